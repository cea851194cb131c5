"""How much of a block is accepted: the same estimator for teacher-forced blocks and for real decoding.

Owns the counts and what follows from them. Pure functions on small tensors of fixed shape, without a host
synchronisation, so that a drafter worker can run them on its device. Never runs a model and never reads a clock.

The estimator. Slot k = 1..S of a block (S = K - 1) is *at risk* when it is scored and all slots before it were right;
it is *accepted* when it is at risk and right. With both counted over all blocks,

    a_k = accepted_k / at_risk_k          chance that slot k is right, given that the slots before it are
    S_k = a_1 * ... * a_k                 chance that slot k is accepted: the joint leading run reaches it
    accept length = 1 + S_1 + ... + S_S   expected leading run, plus the target's own token

A block cut short (the document ends, or a response stops inside it) is at risk only at the slots it has: an unscored
slot is neither right nor wrong. This is the product-limit estimator (Kaplan and Meier, 1958): as long as where a block
is cut says nothing about whether its next slot would be right, each a_k is unbiased given that some block is at risk,
and S_k is unbiased up to the chance that none is. The plain mean of leading runs over all blocks would be too low,
because a cut block could never reach its full run; a mean over uncut blocks alone would drop the ends of documents.
Where blocks are uncut the two agree exactly. A slot at which no block is at risk counts as never accepted, so the
length is then a lower bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import torch


def leading_run(correct_AK: torch.Tensor, slots_A: torch.Tensor) -> torch.Tensor:
    """Accepted run of each block: how many of its slots 1..n are right before the first wrong one.

    correct_AK boolean [A, K], column 0 (the given token) is ignored; slots_A [A], integers, scored slots n <= K-1 of
    each block, 0 for an unused one. Returns int64 [A].
    """
    slot_S = torch.arange(1, correct_AK.shape[1], device=correct_AK.device)
    right_AS = correct_AK[:, 1:] & (slot_S <= slots_A[:, None])
    return right_AS.long().cumprod(dim=1).sum(dim=1)


def acceptance_counts(correct_AK: torch.Tensor, slots_A: torch.Tensor) -> torch.Tensor:
    """Counts of a set of blocks, int64 [2, K-1]: at risk and accepted, for slots 1..K-1.

    Arguments as for `leading_run`. Counts of several batches, devices or buckets simply add.
    """
    return _counts(leading_run(correct_AK, slots_A), slots_A, correct_AK.shape[1] - 1)


def accept_given_previous(counts_2S: torch.Tensor) -> torch.Tensor:
    """a_k, float64 [S]: the chance that slot k is right once the slots before it are; 0 where none is at risk."""
    at_risk, accepted = counts_2S[0].double(), counts_2S[1].double()
    return accepted / at_risk.clamp_min(1.0)


def accept_by_slot(counts_2S: torch.Tensor) -> torch.Tensor:
    """S_k, float64 [S]: the chance that slot k is accepted, jointly with all slots before it."""
    return accept_given_previous(counts_2S).cumprod(dim=0)


def accept_length(counts_2S: torch.Tensor) -> torch.Tensor:
    """Expected tokens of a step, float64 scalar in 1..K: the accepted run plus the target's own token."""
    return 1.0 + accept_by_slot(counts_2S).sum()


@dataclass(frozen=True)
class StepRecord:
    """One step of real decoding.

    tokens    added to the response: accepted draft tokens and the target's own, cut where the response ended
    accepted  draft tokens kept
    scored    draft slots with a verdict: all that were drafted, or the kept ones where the response ended inside them
    """

    tokens: int
    accepted: int
    scored: int


def step_counts(steps: Sequence[StepRecord], num_slots: int) -> torch.Tensor:
    """The counts of real decoding steps, int64 [2, num_slots] on the CPU."""
    run = torch.tensor([step.accepted for step in steps], dtype=torch.int64)
    scored = torch.tensor([step.scored for step in steps], dtype=torch.int64)
    return _counts(run, scored, num_slots)


def histogram(steps: Sequence[StepRecord], num_slots: int) -> list[int]:
    """Steps by the number of draft tokens kept: num_slots + 1 counts, for 0..num_slots."""
    counts = [0] * (num_slots + 1)
    for step in steps:
        counts[step.accepted] += 1
    return counts


def tau_response_mean(responses: Sequence[Sequence[StepRecord]]) -> float | None:
    """Tokens per step, averaged over each response's steps and then over responses; None where no step was taken."""
    means = [fmean(step.tokens for step in steps) for steps in responses if steps]
    return fmean(means) if means else None


def tau_pooled(responses: Sequence[Sequence[StepRecord]]) -> float | None:
    """Tokens per step over all steps of all responses together; None where no step was taken."""
    tokens = [step.tokens for steps in responses for step in steps]
    return fmean(tokens) if tokens else None


def _counts(run_A: torch.Tensor, slots_A: torch.Tensor, num_slots: int) -> torch.Tensor:
    slot_S = torch.arange(1, num_slots + 1, device=run_A.device)
    scored_AS = slot_S <= slots_A[:, None]
    at_risk = (scored_AS & (slot_S <= run_A[:, None] + 1)).sum(dim=0)
    accepted = (scored_AS & (slot_S <= run_A[:, None])).sum(dim=0)
    return torch.stack([at_risk, accepted])
