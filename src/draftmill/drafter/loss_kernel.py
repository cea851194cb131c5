"""What a chunk of logits costs on CUDA, with the likeliest tokens and the slope, in two or three passes over each row.

The slope overwrites the logits, so a chunk's logits exist once. The terms and their slopes are those of loss.py.
Imported on CUDA only.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from draftmill.drafter.loss import LossRule, RowScores

BLOCK = 4096
WARPS = 16


@triton.jit
def _absorb(x, columns, largest, where, total):  # type: ignore[no-untyped-def]
    """Take x into each lane's largest value, where that was, and its sum of exponentials."""
    larger = x > largest
    bound = tl.where(larger, x, largest)
    # A lane past the end has seen nothing: both are -inf, and their difference is no number.
    known = bound > -float("inf")
    shrink = tl.where(known, tl.exp(largest - bound), 0.0)
    total = total * shrink + tl.where(known, tl.exp(x - bound), 0.0)
    return bound, tl.where(larger, columns, where), total


@triton.jit
def _settle(largest, where, total, size: tl.constexpr):  # type: ignore[no-untyped-def]
    """All lanes' values -> log of the sum of exponentials, and where the first of the largest is."""
    top = tl.max(largest, axis=0)
    best = tl.min(tl.where(largest == top, where, size), axis=0)
    return tl.log(tl.sum(total * tl.exp(largest - top), axis=0)) + top, best


@triton.jit
def _score_rows(  # type: ignore[no-untyped-def]
    logits_ptr,
    target_ptr,
    labels_ptr,
    cross_entropy_ptr,
    costs_ptr,
    correct_ptr,
    cross_entropy_weight,
    kl_weight,
    variation_weight,
    softcap,
    size: tl.constexpr,
    compares: tl.constexpr,
    target_labels: tl.constexpr,
    with_slope: tl.constexpr,
    has_softcap: tl.constexpr,
    block: tl.constexpr,
):
    row = tl.program_id(0)
    logits_ptr += row.to(tl.int64) * size
    target_ptr += row.to(tl.int64) * size
    lanes = tl.arange(0, block)
    nothing = tl.full([block], -float("inf"), tl.float32)
    zeros, nowhere = tl.full([block], 0.0, tl.float32), tl.full([block], 0, tl.int32)
    largest, where, total = nothing, nowhere, zeros
    target_largest, target_where, target_total = nothing, nowhere, zeros
    for start in range(0, size, block):
        columns = start + lanes
        inside = columns < size
        x = tl.load(logits_ptr + columns, mask=inside, other=-float("inf")).to(tl.float32)
        largest, where, total = _absorb(x, columns, largest, where, total)
        if compares or target_labels:
            t = tl.load(target_ptr + columns, mask=inside, other=-float("inf")).to(tl.float32)
            target_largest, target_where, target_total = _absorb(t, columns, target_largest, target_where, target_total)
    log_sum, best = _settle(largest, where, total, size)
    label = tl.load(labels_ptr + row).to(tl.int32)
    target_log_sum = 0.0
    if compares or target_labels:
        target_log_sum, target_best = _settle(target_largest, target_where, target_total, size)
        if target_labels:
            label = target_best
    cross_entropy = log_sum - tl.load(logits_ptr + label).to(tl.float32)
    tl.store(cross_entropy_ptr + row, cross_entropy)
    tl.store(correct_ptr + row, best == label)
    cost = cross_entropy_weight * cross_entropy
    signed = 0.0
    if compares:
        kl, apart, sign_q = zeros, zeros, zeros
        for start in range(0, size, block):
            columns = start + lanes
            inside = columns < size
            x = tl.load(logits_ptr + columns, mask=inside, other=-float("inf")).to(tl.float32) - log_sum
            t = tl.load(target_ptr + columns, mask=inside, other=-float("inf")).to(tl.float32) - target_log_sum
            q, p = tl.exp(x), tl.exp(t)
            kl += tl.where(p > 0.0, p * (t - x), 0.0)
            apart += tl.abs(q - p)
            sign_q += tl.where(q > p, q, tl.where(q < p, -q, 0.0))
        cost += kl_weight * tl.sum(kl, axis=0) + variation_weight * 0.5 * tl.sum(apart, axis=0)
        signed = tl.sum(sign_q, axis=0)
    tl.store(costs_ptr + row, cost)
    if with_slope:
        tl.debug_barrier()  # everybody has read before anybody overwrites
        for start in range(0, size, block):
            columns = start + lanes
            inside = columns < size
            x = tl.load(logits_ptr + columns, mask=inside, other=-float("inf")).to(tl.float32)
            q = tl.exp(x - log_sum)
            slope = cross_entropy_weight * (q - tl.where(columns == label, 1.0, 0.0))
            if compares:
                t = tl.load(target_ptr + columns, mask=inside, other=-float("inf")).to(tl.float32)
                p = tl.exp(t - target_log_sum)
                sign = tl.where(q > p, 1.0, tl.where(q < p, -1.0, 0.0))
                slope += kl_weight * (q - p) + variation_weight * 0.5 * q * (sign - signed)
            if has_softcap:
                slope *= 1.0 - (x / softcap) * (x / softcap)
            tl.store(logits_ptr + columns, slope.to(logits_ptr.dtype.element_ty), mask=inside)


def score_rows(
    logits: torch.Tensor,
    target_logits: torch.Tensor | None,
    labels_R: torch.Tensor,
    rule: LossRule,
    softcap: float | None,
    with_slope: bool,
) -> RowScores:
    """`loss.score_rows` in one launch, on contiguous logits of any float type; the slope takes the logits' place."""
    rows, size = logits.shape
    cross_entropy, costs = (torch.empty(rows, device=logits.device, dtype=torch.float32) for _ in range(2))
    correct = torch.empty(rows, device=logits.device, dtype=torch.bool)
    if rule.needs_target and target_logits is None:
        raise RuntimeError("this loss looks at the target's logits, and was given none")
    _score_rows[(rows,)](
        logits,
        logits if target_logits is None else target_logits,
        labels_R,
        cross_entropy,
        costs,
        correct,
        rule.cross_entropy,
        rule.kl,
        rule.total_variation,
        1.0 if softcap is None else softcap,
        size=size,
        compares=rule.compares,
        target_labels=rule.target_labels,
        with_slope=with_slope,
        has_softcap=softcap is not None,
        block=min(BLOCK, triton.next_power_of_2(size)),
        num_warps=WARPS,
    )
    return cross_entropy, costs, correct, logits
