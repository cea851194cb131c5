"""Decoding a prompt, plainly or with a drafter, by one loop: what differs is the number of drafted tokens, 0 or more.

Owns the loop on the host: random numbers, what ends a response, and the clock. Plain decoding is the same loop with
nothing drafted, so a speed-up compares two runs of the same code. Greedy speculative output equals greedy plain output
token for token in float32; sampled output has the target's distribution. In narrower types a near-tie can fall
otherwise, because a forward over several tokens rounds otherwise than one over a single token.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch

from draftmill.drafter.network import Drafter
from draftmill.errors import InputError
from draftmill.evaluate.acceptance import StepRecord
from draftmill.evaluate.checks import check_cached_forward, check_pair
from draftmill.evaluate.sampling import num_uniforms
from draftmill.evaluate.session import Session
from draftmill.target.generate_sampling import Sampling, uniforms
from draftmill.target.model import Target

_LOG = logging.getLogger(__name__)
_SMALLEST_CAPACITY = 256

Graphs = Literal["auto", "on", "off"]


@dataclass
class Response:
    """What was decoded, how, and how long it took.

    tokens     new token ids, the stop token included where one ended it
    steps      one record a step after the prefill, which gives the first token
    prefill_s  from the prompt to the first token
    decode_s   all steps; the drafter's work on the prompt counts here, so that a speed-up does not hide it
    ended      whether a stop token ended it, and not the limit
    """

    tokens: list[int] = field(default_factory=list)
    steps: list[StepRecord] = field(default_factory=list)
    prefill_s: float = 0.0
    decode_s: float = 0.0
    ended: bool = False

    @property
    def num_decoded(self) -> int:
        """Tokens that the steps added: all but the prefill's."""
        return sum(step.tokens for step in self.steps)


class Decoder:
    """A target, and a drafter or none, ready to decode prompts one at a time.

    graphs: "on" captures each kind of step as a CUDA graph, "off" launches it, "auto" captures on CUDA and launches
    where capture fails, which it logs. Checks once that the target decodes rightly from a cache.
    Raises InputError for a drafter of another target, or a target that can't be decoded from a cache of fixed slots.
    """

    def __init__(self, target: Target, drafter: Drafter | None = None, *, graphs: Graphs = "auto") -> None:
        if graphs == "on" and target.device.type != "cuda":
            raise InputError(f"graphs can be captured on CUDA only, and the target is on {target.device}")
        if drafter is not None:
            check_pair(target.config, drafter.shape)
        check_cached_forward(target)
        self.target, self.drafter = target, drafter
        self.position_limit: int | None = getattr(target.config.get_text_config(), "max_position_embeddings", None)
        self.graphs: Graphs = "off" if target.device.type != "cuda" else graphs
        self.why_eager: str | None = None
        """Why steps are launched where "auto" would have captured them."""
        self._sessions: dict[tuple[int, Sampling], Session] = {}
        """By capacity and by how tokens are chosen, whatever the seed and the limit."""

    @property
    def max_drafts(self) -> int:
        """Tokens that the drafter can draft at once: all slots of a block but the given one."""
        return 0 if self.drafter is None else self.drafter.shape.block_size - 1

    @torch.inference_mode()
    def generate(
        self,
        prompt: Sequence[int],
        *,
        num_drafts: int,
        sampling: Sampling,
        stop: Collection[int] = (),
        stream: int = 0,
    ) -> Response:
        """Decode one prompt of token ids.

        num_drafts: tokens drafted a step, 0 for plain decoding, at most `max_drafts`; the block then has so many mask
        tokens. sampling: also says how many tokens at most and the seed; stream: number of the random stream.
        Raises InputError for an empty prompt or one that leaves no room within the target's positions.
        """
        if not 0 <= num_drafts <= self.max_drafts:
            raise InputError(f"this drafter drafts 1 to {self.max_drafts} tokens a step, got {num_drafts}")
        limit = self.room(len(prompt), sampling.max_new_tokens)
        session = self._ready(len(prompt) + limit + self.max_drafts + 1, num_drafts, sampling)
        numbers = _Numbers(session, sampling, num_drafts, limit, stream)
        response = Response()
        with session.taps(num_drafts) as taps:
            started = self._now()
            numbers.give(0)
            response.tokens.append(int(session.prefill(prompt)))
            response.ended = response.tokens[0] in stop
            prefilled = self._now()
            session.take_prompt(len(prompt), taps)
            while not response.ended and len(response.tokens) < limit:
                numbers.give(num_drafts)
                accepted, token, *drafts = session.step(num_drafts, taps).tolist()
                _take(response, [*drafts[:accepted], token], num_drafts, limit, stop)
            finished = self._now()
        response.prefill_s, response.decode_s = prefilled - started, finished - prefilled
        return response

    def prepare(self, num_prompt: int, num_drafts: int, sampling: Sampling) -> None:
        """Allocate, and capture, what a prompt of this many tokens needs, so that no clock sees it."""
        with torch.inference_mode():
            limit = self.room(num_prompt, sampling.max_new_tokens)
            self._ready(num_prompt + limit + self.max_drafts + 1, num_drafts, sampling)

    def room(self, num_prompt: int, max_new_tokens: int) -> int:
        """Tokens that may follow a prompt of this length: those asked for, within the target's positions."""
        if num_prompt == 0:
            raise InputError("a prompt is empty; give at least one token")
        if not self.fits(num_prompt):
            raise InputError(
                f"a prompt of {num_prompt} tokens is too long: the target holds {self.position_limit}; "
                "shorten it or leave it out"
            )
        return max_new_tokens if self.position_limit is None else min(max_new_tokens, self.position_limit - num_prompt)

    def fits(self, num_prompt: int) -> bool:
        """Whether a prompt of this length leaves room for an answer."""
        return self.position_limit is None or num_prompt < self.position_limit

    def _ready(self, needed: int, num_drafts: int, sampling: Sampling) -> Session:
        capacity = max(_SMALLEST_CAPACITY, 1 << (needed - 1).bit_length())
        key = capacity, replace(sampling, seed=0, max_new_tokens=1)
        session = self._sessions.get(key)
        if session is None:
            session = Session(self.target, self.drafter, capacity, sampling)
            if not session.cache.recurrent:  # a recurrent state belongs to one sequence
                self._sessions[key] = session
        if self.graphs != "off" and self.why_eager is None:
            try:
                session.capture(num_drafts)
            except RuntimeError as error:
                if self.graphs == "on" or isinstance(error, torch.OutOfMemoryError):
                    raise
                # All kinds of steps run alike, or comparing them would mean nothing.
                for other in self._sessions.values():
                    other.drop_captures()
                self.why_eager = _first_cause(error)
                _LOG.warning("decoding steps are launched, not replayed as CUDA graphs: %s", self.why_eager)
        return session

    def _now(self) -> float:
        if self.target.device.type == "cuda":
            torch.cuda.synchronize(self.target.device)
        return time.perf_counter()


def _first_cause(error: BaseException) -> str:
    """What went wrong first: ending a failed capture fails once more, and says less."""
    while error.__context__ is not None:
        error = error.__context__
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


class _Numbers:
    """The random numbers of one response, handed to the session step by step; none when greedy."""

    def __init__(self, session: Session, sampling: Sampling, num_drafts: int, limit: int, stream: int) -> None:
        self._session, self._used = session, 0
        self._per_step = {count: num_uniforms(sampling, count) for count in (0, num_drafts)}
        total = self._per_step[0] + limit * self._per_step[num_drafts]
        self._numbers = torch.from_numpy(uniforms(sampling.seed, stream, total))

    def give(self, num_drafts: int) -> None:
        count = self._per_step[num_drafts]
        if count:
            self._session.set_uniforms(self._numbers[self._used : self._used + count])
            self._used += count


def _take(response: Response, produced: list[int], num_drafts: int, limit: int, stop: Collection[int]) -> None:
    """Add a step's tokens to the response, up to its end, and the step's record."""
    accepted = len(produced) - 1
    kept = produced[: limit - len(response.tokens)]
    for index, token in enumerate(kept):
        if token in stop:
            kept, response.ended = kept[: index + 1], True
            break
    whole = len(kept) == len(produced)
    response.tokens += kept
    # Where the response ended inside the drafts, the ones after its end have no verdict that counts.
    response.steps.append(StepRecord(len(kept), min(accepted, len(kept)), num_drafts if whole else len(kept)))
