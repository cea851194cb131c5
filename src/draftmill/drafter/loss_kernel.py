"""The loss's work on rows, on CUDA: what logits cost, with the likeliest tokens and the slope, in two or three passes
over each row; and rows taken from hidden states, and slopes put where they belong, in one.

The slope overwrites the logits, so a chunk's logits exist once; a slope in float8 alone is a tensor of its own. The
terms and their slopes are those of loss.py and loss_float8.py.
Imported on CUDA only.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from draftmill.drafter.float8 import GRADIENTS, VALUES
from draftmill.drafter.loss import LossRule, RowScores, RowSlopes, RowWork
from draftmill.drafter.loss_float8 import SHARE_UNIT, slope_unit

BLOCK = 4096
WARPS = 16
MOVING_BLOCK = 4096
"""Elements of a row that a program moves."""


@triton.jit
def _cross_entropy_rows(  # type: ignore[no-untyped-def]
    logits_ptr,
    target_ptr,
    labels_ptr,
    cross_entropy_ptr,
    scale_ptr,
    correct_ptr,
    slope_ptr,
    label_slope_ptr,
    softcap,
    size: tl.constexpr,
    target_labels: tl.constexpr,
    with_slope: tl.constexpr,
    label_apart: tl.constexpr,
    share_unit: tl.constexpr,
    has_softcap: tl.constexpr,
    block: tl.constexpr,
):
    """Cross entropy alone: the largest logit, then one exponential an element, which is also the slope.

    The slope is left undivided by the sum of exponentials, which is known only at the end: that is the rows' factor.
    label_apart: the slope goes elsewhere, times share_unit and 0 at the label, whose own slope is given for itself.
    """
    row = tl.program_id(0)
    logits_ptr += row.to(tl.int64) * size
    slope_ptr += row.to(tl.int64) * size
    target_ptr += row.to(tl.int64) * size
    lanes = tl.arange(0, block)
    largest, where = tl.full([block], -float("inf"), tl.float32), tl.full([block], 0, tl.int32)
    target_largest, target_where = largest, where
    for start in range(0, size, block):
        columns = start + lanes
        inside = columns < size
        x = tl.load(logits_ptr + columns, mask=inside, other=-float("inf")).to(tl.float32)
        where = tl.where(x > largest, columns, where)
        largest = tl.maximum(largest, x)
        if target_labels:
            t = tl.load(target_ptr + columns, mask=inside, other=-float("inf")).to(tl.float32)
            target_where = tl.where(t > target_largest, columns, target_where)
            target_largest = tl.maximum(target_largest, t)
    top = tl.max(largest, axis=0)
    best = tl.min(tl.where(largest == top, where, size), axis=0)
    label = tl.load(labels_ptr + row).to(tl.int32)
    if target_labels:
        label = tl.min(tl.where(target_largest == tl.max(target_largest, axis=0), target_where, size), axis=0)
    at_label = tl.load(logits_ptr + label).to(tl.float32)
    tl.debug_barrier()  # everybody has read it before anybody overwrites it
    total = tl.full([block], 0.0, tl.float32)
    for start in range(0, size, block):
        columns = start + lanes
        inside = columns < size
        x = tl.load(logits_ptr + columns, mask=inside, other=-float("inf")).to(tl.float32)
        slope = tl.exp(x - top)
        total += slope
        if with_slope:
            if has_softcap:
                slope *= 1.0 - (x / softcap) * (x / softcap)
            if label_apart:
                slope = tl.where(columns == label, 0.0, slope * share_unit)
            tl.store(slope_ptr + columns, slope.to(slope_ptr.dtype.element_ty), mask=inside)
    sum_exp = tl.sum(total, axis=0)
    tl.store(cross_entropy_ptr + row, tl.log(sum_exp) + top - at_label)
    tl.store(correct_ptr + row, best == label)
    if with_slope:
        at_slope = tl.exp(at_label - top) - sum_exp
        if has_softcap:
            at_slope *= 1.0 - (at_label / softcap) * (at_label / softcap)
        if label_apart:
            tl.store(scale_ptr + row, 1.0 / (sum_exp * share_unit))
            tl.store(label_slope_ptr + row, at_slope / sum_exp)
        else:
            tl.store(scale_ptr + row, 1.0 / sum_exp)
            tl.debug_barrier()  # after the store above that also wrote there
            tl.store(slope_ptr + label, at_slope.to(slope_ptr.dtype.element_ty))


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
def _comparing_rows(  # type: ignore[no-untyped-def]
    logits_ptr,
    target_ptr,
    labels_ptr,
    cross_entropy_ptr,
    costs_ptr,
    correct_ptr,
    slope_ptr,
    cross_entropy_weight,
    kl_weight,
    variation_weight,
    slope_unit,
    softcap,
    size: tl.constexpr,
    target_labels: tl.constexpr,
    with_slope: tl.constexpr,
    has_softcap: tl.constexpr,
    block: tl.constexpr,
):
    """Cross entropy, KL and total variation: both sums of exponentials, then what is compared, then the slope, times
    slope_unit."""
    row = tl.program_id(0)
    logits_ptr += row.to(tl.int64) * size
    slope_ptr += row.to(tl.int64) * size
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
        t = tl.load(target_ptr + columns, mask=inside, other=-float("inf")).to(tl.float32)
        target_largest, target_where, target_total = _absorb(t, columns, target_largest, target_where, target_total)
    log_sum, best = _settle(largest, where, total, size)
    target_log_sum, target_best = _settle(target_largest, target_where, target_total, size)
    label = tl.load(labels_ptr + row).to(tl.int32)
    if target_labels:
        label = target_best
    cross_entropy = log_sum - tl.load(logits_ptr + label).to(tl.float32)
    tl.store(cross_entropy_ptr + row, cross_entropy)
    tl.store(correct_ptr + row, best == label)
    # Both masses of q are summed apart: the difference of two that are nearly equal would be their rounding.
    kl, apart, above, below = zeros, zeros, zeros, zeros
    for start in range(0, size, block):
        columns = start + lanes
        inside = columns < size
        x = tl.load(logits_ptr + columns, mask=inside, other=-float("inf")).to(tl.float32) - log_sum
        t = tl.load(target_ptr + columns, mask=inside, other=-float("inf")).to(tl.float32) - target_log_sum
        q, p = tl.exp(x), tl.exp(t)
        kl += tl.where(p > 0.0, p * (t - x), 0.0)
        apart += tl.abs(q - p)
        above += tl.where(q > p, q, 0.0)
        below += tl.where(q > p, 0.0, q)
    compared = kl_weight * tl.sum(kl, axis=0) + variation_weight * 0.5 * tl.sum(apart, axis=0)
    tl.store(costs_ptr + row, cross_entropy_weight * cross_entropy + compared)
    mass_above, mass_below = tl.sum(above, axis=0), tl.sum(below, axis=0)
    if with_slope:
        tl.debug_barrier()  # everybody has read before anybody overwrites
        for start in range(0, size, block):
            columns = start + lanes
            inside = columns < size
            x = tl.load(logits_ptr + columns, mask=inside, other=-float("inf")).to(tl.float32)
            t = tl.load(target_ptr + columns, mask=inside, other=-float("inf")).to(tl.float32)
            q, p = tl.exp(x - log_sum), tl.exp(t - target_log_sum)
            variation = q * tl.where(q > p, mass_below, -mass_above)
            slope = cross_entropy_weight * (q - tl.where(columns == label, 1.0, 0.0))
            slope += kl_weight * (q - p) + variation_weight * variation
            if has_softcap:
                slope *= 1.0 - (x / softcap) * (x / softcap)
            tl.store(slope_ptr + columns, (slope * slope_unit).to(slope_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _take_rows(from_ptr, places_ptr, out_ptr, last, size: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
    """A row of `out` for each place; a place of -1 is the last row."""
    row, columns = tl.program_id(0), tl.program_id(1) * block + tl.arange(0, block)
    place = tl.load(places_ptr + row).to(tl.int64)
    place = tl.where(place < 0, last, place)
    inside = columns < size
    tl.store(
        out_ptr + row.to(tl.int64) * size + columns,
        tl.load(from_ptr + place * size + columns, mask=inside),
        mask=inside,
    )


@triton.jit
def _place_rows(  # type: ignore[no-untyped-def]
    raw_ptr,
    factor_ptr,
    head_ptr,
    labels_ptr,
    label_factor_ptr,
    places_ptr,
    out_ptr,
    last,
    size: tl.constexpr,
    label_apart: tl.constexpr,
    block: tl.constexpr,
):
    """Scale a row, with label_apart add the label's own part, and write it at its place; -1 is the last row."""
    row, columns = tl.program_id(0), tl.program_id(1) * block + tl.arange(0, block)
    place = tl.load(places_ptr + row).to(tl.int64)
    place = tl.where(place < 0, last, place)
    inside = columns < size
    slope = tl.load(raw_ptr + row.to(tl.int64) * size + columns, mask=inside).to(tl.float32)
    slope *= tl.load(factor_ptr + row)
    if label_apart:
        label = tl.load(labels_ptr + row).to(tl.int64)
        at_label = tl.load(head_ptr + label * size + columns, mask=inside).to(tl.float32)
        slope += at_label * tl.load(label_factor_ptr + row)
    tl.store(out_ptr + place * size + columns, slope.to(out_ptr.dtype.element_ty), mask=inside)


def take_rows(hidden_NH: torch.Tensor, places_R: torch.Tensor) -> torch.Tensor:
    """`loss.take_rows` in one launch, of contiguous rows."""
    rows, size = len(places_R), hidden_NH.shape[1]
    out = torch.empty(rows, size, device=hidden_NH.device, dtype=hidden_NH.dtype)
    _take_rows[_tiles(rows, size)](hidden_NH, places_R, out, len(hidden_NH) - 1, size=size, block=MOVING_BLOCK)
    return out


def place_rows(into_NH: torch.Tensor, places_R: torch.Tensor, slopes: RowSlopes) -> None:
    """`loss.place_rows` in one launch, into contiguous rows."""
    rows, size = slopes.raw_RH.shape
    label_factor_R = slopes.label_factor_R
    _place_rows[_tiles(rows, size)](
        slopes.raw_RH,
        slopes.factor_R,
        slopes.head_VH,
        slopes.labels_R,
        slopes.factor_R if label_factor_R is None else label_factor_R,
        places_R,
        into_NH,
        len(into_NH) - 1,
        size=size,
        label_apart=label_factor_R is not None,
        block=MOVING_BLOCK,
    )


def _tiles(rows: int, size: int) -> tuple[int, int]:
    """A program for each row and piece of it."""
    return rows, triton.cdiv(size, MOVING_BLOCK)


def score_rows(
    logits: torch.Tensor,
    target_logits: torch.Tensor | None,
    labels_R: torch.Tensor,
    rule: LossRule,
    softcap: float | None,
    with_slope: bool,
) -> RowScores:
    """`loss.score_rows` in one launch, on contiguous logits of any float type; the slope takes the logits' place."""
    score = _comparing if rule.compares else _cross_entropy
    return score(logits, target_logits, labels_R, rule, softcap, with_slope, logits)


def score_rows_float8(
    logits: torch.Tensor,
    target_logits: torch.Tensor | None,
    labels_R: torch.Tensor,
    rule: LossRule,
    softcap: float | None,
    with_slope: bool,
    slope_type: torch.dtype | None = None,
) -> RowScores:
    """`loss_float8.score_rows_float8` in one launch; the logits stay. slope_type: a wider one, to look at the slope."""
    if not with_slope:
        return score_rows(logits, target_logits, labels_R, rule, softcap, with_slope)
    slope = torch.empty_like(logits, dtype=slope_type or (GRADIENTS if rule.needs_target else VALUES))
    score = _comparing if rule.needs_target else _cross_entropy
    return score(logits, target_logits, labels_R, rule, softcap, with_slope, slope)


def _cross_entropy(
    logits: torch.Tensor,
    target_logits: torch.Tensor | None,
    labels_R: torch.Tensor,
    rule: LossRule,
    softcap: float | None,
    with_slope: bool,
    slope: torch.Tensor,
) -> RowScores:
    """Launch `_cross_entropy_rows`; a slope that does not take the logits' place is without its labels."""
    label_apart = slope is not logits
    cross_entropy, scale, correct = _of_rows(logits)
    label_slope = torch.empty_like(scale) if label_apart else scale
    _cross_entropy_rows[(len(logits),)](
        logits,
        _target(logits, target_logits, rule),
        labels_R,
        cross_entropy,
        scale,
        correct,
        slope,
        label_slope,
        1.0 if softcap is None else softcap,
        label_apart=label_apart,
        share_unit=SHARE_UNIT,
        **_options(logits, rule, softcap, with_slope),
    )
    return RowScores(
        cross_entropy,
        rule.cross_entropy * cross_entropy,
        correct,
        slope,
        rule.cross_entropy * scale,
        rule.cross_entropy * label_slope if label_apart else None,
    )


def _comparing(
    logits: torch.Tensor,
    target_logits: torch.Tensor | None,
    labels_R: torch.Tensor,
    rule: LossRule,
    softcap: float | None,
    with_slope: bool,
    slope: torch.Tensor,
) -> RowScores:
    """Launch `_comparing_rows`; a slope that does not take the logits' place is in `slope_unit`."""
    unit = 1.0 if slope is logits else slope_unit(rule)
    cross_entropy, costs, correct = _of_rows(logits)
    _comparing_rows[(len(logits),)](
        logits,
        _target(logits, target_logits, rule),
        labels_R,
        cross_entropy,
        costs,
        correct,
        slope,
        rule.cross_entropy,
        rule.kl,
        rule.total_variation,
        unit,
        1.0 if softcap is None else softcap,
        **_options(logits, rule, softcap, with_slope),
    )
    factor = None if slope is logits else torch.full_like(costs, 1.0 / unit)
    return RowScores(cross_entropy, costs, correct, slope, factor)


def _target(logits: torch.Tensor, target_logits: torch.Tensor | None, rule: LossRule) -> torch.Tensor:
    """The target's logits, or anything in their place where none are looked at."""
    if rule.needs_target and target_logits is None:
        raise RuntimeError("this loss looks at the target's logits, and was given none")
    return logits if target_logits is None else target_logits


def _of_rows(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Two numbers and a truth for each row, yet to be written."""
    first, second = (torch.empty(len(logits), device=logits.device, dtype=torch.float32) for _ in range(2))
    return first, second, torch.empty(len(logits), device=logits.device, dtype=torch.bool)


def _options(logits: torch.Tensor, rule: LossRule, softcap: float | None, with_slope: bool) -> dict[str, Any]:
    size = logits.shape[1]
    return {
        "size": size,
        "target_labels": rule.target_labels,
        "with_slope": with_slope,
        "has_softcap": softcap is not None,
        # No fewer lanes than threads: two threads of one lane would read what the other has overwritten.
        "block": max(32 * WARPS, min(BLOCK, triton.next_power_of_2(size))),
        "num_warps": WARPS,
    }


ROW_WORK = RowWork(score_rows, take_rows, place_rows)
ROW_WORK_FLOAT8 = ROW_WORK._replace(score=score_rows_float8)
