"""The loss head in float8: its logits and its slope as float8 products with the frozen LM head.

The head is rounded once, to e4m3, and kept both ways round. Slopes to the logits are bounded by the loss's weights, so
their scale is fixed, and no pass over them looks for the largest. That of a cross entropy to the data's labels is a
softmax, to e4m3, without its label, whose part is added to the hidden states' slope on its own, unrounded: otherwise a
label that is nearly certain would leave its rounding behind where nearly nothing should be. Other losses' slopes are
rounded to e5m2 with all their parts.

Source for the loss itself: loss.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from draftmill.drafter.float8 import (
    FAST_GRADIENTS,
    GRADIENTS,
    VALUES,
    largest_magnitude,
    product,
    round_float8,
    scaled_to,
)
from draftmill.drafter.loss import ROW_WORK, LossRule, RowScores, first_largest, score_rows
from draftmill.target.head import TargetHead, shape_logits

SHARE_UNIT = torch.finfo(VALUES).max
"""What the likeliest token's share of an undivided softmax, 1, is stored as."""
PIECE_ROWS = 8192
"""Rows of the head rounded at a time, so that no float32 copy of all of it is made."""


@dataclass(frozen=True, kw_only=True)
class Float8Head(TargetHead):
    """A target's head whose two products for the loss are in float8. Embedding and `logits` are as before.

    head8_VH [V, H], head8_HV [H, V]  the LM head in e4m3, row-major both
    head_scale, one                   float32 []: its scale, and that of slopes, whose unit is their rows' factor
    """

    head8_VH: torch.Tensor
    head8_HV: torch.Tensor
    head_scale: torch.Tensor
    one: torch.Tensor

    @classmethod
    def of(cls, head: TargetHead) -> Float8Head:
        """A head on its device, with the rounded copies beside it: two bytes an element more."""
        matrix = head.head_VH
        pieces = matrix.split(PIECE_ROWS)
        largest = torch.stack([largest_magnitude(piece) for piece in pieces]).amax()
        head8_VH = torch.empty_like(matrix, dtype=VALUES)
        for piece, rounded in zip(pieces, head8_VH.split(PIECE_ROWS), strict=True):
            rounded.copy_(scaled_to(piece, largest, VALUES))
        return cls(
            **vars(head),
            head8_VH=head8_VH,
            head8_HV=head8_VH.t().contiguous(),
            head_scale=largest / torch.finfo(VALUES).max,
            one=torch.ones((), device=matrix.device),
        )

    def drafted_logits(self, hidden_RH: torch.Tensor) -> torch.Tensor:
        """Normed hidden states [R, H] -> logits [R, V], the compute type."""
        hidden8, scale = round_float8(hidden_RH, VALUES)
        raw = product(hidden8, scale, self.head8_VH.t(), self.head_scale, hidden_RH.dtype, fast=True)
        return shape_logits(raw, self.logit_scale, self.logit_softcap)

    def back(self, slope_RV: torch.Tensor) -> torch.Tensor:
        """Slope to raw logits [R, V], float8 -> times the head, [R, H], the compute type."""
        right = self.head8_HV.t()
        return product(slope_RV, self.one, right, self.head_scale, self.head_VH.dtype, fast=FAST_GRADIENTS)


def slope_unit(rule: LossRule) -> float:
    """What a slope of 1 to the logits of a loss that looks at the target is stored as, so that its bound is stored as
    the largest number of its type."""
    return torch.finfo(GRADIENTS).max / (rule.cross_entropy + rule.kl + rule.total_variation)


def score_rows_float8(
    logits: torch.Tensor,
    target_logits: torch.Tensor | None,
    labels_R: torch.Tensor,
    rule: LossRule,
    softcap: float | None,
    with_slope: bool,
) -> RowScores:
    """`score_rows` for a `Float8Head`, with a float8 slope.

    In e5m2 where the loss looks at the target's logits, else in e4m3 and without the label, whose own slope is apart.
    """
    if rule.needs_target or not with_slope:
        found = score_rows(logits, target_logits, labels_R, rule, softcap, with_slope)
        if not with_slope:
            return found
        unit = slope_unit(rule)
        slope = (found.slope_RV.float() * unit).to(GRADIENTS)
        return found._replace(slope_RV=slope, factor_R=torch.full_like(found.costs_R, 1.0 / unit))
    logits = logits.float()
    top = logits.amax(dim=-1)
    at_label = logits.gather(1, labels_R[:, None])[:, 0]
    share = (logits - top[:, None]).exp()
    total = share.sum(dim=-1)
    label_slope = (at_label - top).exp() - total
    if softcap is not None:
        share *= 1.0 - (logits / softcap).square()
        label_slope = label_slope * (1.0 - (at_label / softcap).square())
    slope = (share.scatter_(1, labels_R[:, None], 0.0) * SHARE_UNIT).to(VALUES)
    cross_entropy = total.log() + top - at_label
    return RowScores(
        cross_entropy,
        rule.cross_entropy * cross_entropy,
        first_largest(logits) == labels_R,
        slope,
        rule.cross_entropy / (SHARE_UNIT * total),
        rule.cross_entropy * label_slope / total,
    )


ROW_WORK_FLOAT8 = ROW_WORK._replace(score=score_rows_float8)
