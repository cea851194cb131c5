"""Speculative decoding on the real target, acceptance, suites. Imports `checkpoint` and below."""

from draftmill.evaluate.acceptance import accept_by_slot, accept_length, acceptance_counts, leading_run
from draftmill.evaluate.decode import Decoder, Response
from draftmill.evaluate.prompts import Prompt, read_prompts
from draftmill.evaluate.run import Evaluation, evaluate
from draftmill.evaluate.suites import SUITES, load_suite

__all__ = [
    "SUITES",
    "Decoder",
    "Evaluation",
    "Prompt",
    "Response",
    "accept_by_slot",
    "accept_length",
    "acceptance_counts",
    "evaluate",
    "leading_run",
    "load_suite",
    "read_prompts",
]
