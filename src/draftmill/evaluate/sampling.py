"""The verdict of speculative decoding on drafted tokens, greedy or at a temperature, and the draws it needs.

Owns the distributions and the acceptance rule. Tensors of fixed shape in and out, no host synchronisation, so that a
decoding step can be captured. Randomness comes in as uniform numbers: the same ones give the same tokens on every
device, and a captured step needs no generator of its own.

Source of the acceptance rule: Leviathan et al., arXiv 2211.17192, algorithm 1; Chen et al., arXiv 2302.01318.
"""

from __future__ import annotations

import torch

from draftmill.target.generate_sampling import Sampling


def num_uniforms(sampling: Sampling, num_drafts: int) -> int:
    """Uniform numbers that a step with this many drafted tokens uses: one a draw, one a verdict."""
    return 0 if sampling.temperature == 0.0 else 2 * num_drafts + 1


def probabilities(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Logits [..., V] -> float32 probabilities [..., V] after temperature, then top-k, then top-p.

    Tokens as likely as the k-th stay; top-p keeps the smallest set of likeliest tokens that reaches it, at least one.
    """
    scores = logits.float() / sampling.temperature
    if 0 < sampling.top_k < scores.shape[-1]:
        kth = scores.topk(sampling.top_k, dim=-1).values[..., -1:]
        scores = scores.masked_fill(scores < kth, float("-inf"))
    chances = scores.softmax(dim=-1)
    if sampling.top_p < 1.0:
        ordered, order = chances.sort(dim=-1, descending=True)
        before = ordered.cumsum(dim=-1, dtype=torch.float64) - ordered
        ordered = ordered.masked_fill(before >= sampling.top_p, 0.0)
        chances = torch.zeros_like(chances).scatter(-1, order, ordered)
        chances = chances / chances.sum(dim=-1, keepdim=True)
    return chances


def draw(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Weights [..., V], not negative and not all 0, and uniforms [...] in [0, 1) -> token ids [...], in proportion.

    By the inverse of the cumulative sum in float64, so that a large vocabulary's small weights are not lost.
    """
    cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
    threshold = uniforms.double() * cumulative[..., -1]
    chosen = (cumulative <= threshold.unsqueeze(-1)).sum(dim=-1)
    # Rounding could lift the threshold to the whole sum: the last token that has any weight is meant then.
    last = weights.shape[-1] - 1 - (weights > 0).flip(-1).byte().argmax(dim=-1)
    return torch.minimum(chosen, last)


def judge_greedy(drafts_N: torch.Tensor, logits_PV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Verdict on N drafted tokens from the target's logits [N+1, V], one row before each draft and one after the last.

    Returns how many leading drafts are the target's own choice, and the target's token after them; int64 [1] each.
    """
    choice_P = logits_PV.argmax(dim=-1)
    accepted = (drafts_N == choice_P[:-1]).long().cumprod(dim=0).sum(dim=0, keepdim=True)
    return accepted, choice_P.gather(0, accepted)


def judge_sampled(
    drafts_N: torch.Tensor, drafted_NV: torch.Tensor, wanted_PV: torch.Tensor, uniforms: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rejection sampling: the kept tokens are distributed exactly as the target's own would be.

    drafts_N were drawn from drafted_NV [N, V]; wanted_PV [N+1, V] are the target's probabilities; uniforms [N+1] in
    [0, 1). Draft k is kept with chance min(1, wanted / drafted); the first one refused is replaced by a draw from what
    the target wants beyond what was drafted, and a draw from the target's own distribution follows a full run.
    Returns how many were kept and the token after them; int64 [1] each.
    """
    wanted = wanted_PV[:-1].gather(-1, drafts_N[:, None])[:, 0]
    drafted = drafted_NV.gather(-1, drafts_N[:, None])[:, 0]
    kept = uniforms[:-1] * drafted.double() < wanted.double()
    accepted = kept.long().cumprod(dim=0).sum(dim=0, keepdim=True)
    # After a full run nothing was drafted: a row of zeros leaves the target's distribution whole.
    padded = torch.cat([drafted_NV, torch.zeros_like(wanted_PV[:1])])
    want, have = wanted_PV.index_select(0, accepted), padded.index_select(0, accepted)
    rest = (want - have).clamp_min(0.0)
    # The rest can be empty by rounding alone, where both distributions are equal.
    return accepted, draw(torch.where(rest.sum() > 0, rest, want), uniforms[-1:])
