"""The loss head in float8: its logits and its slope as float8 products with the frozen LM head.

The head is rounded once, to e4m3, and kept both ways round. The logits' slope of a cross entropy to the data's labels
is a softmax without its label: numbers between 0 and 1, so it takes one fixed scale and no pass to find it, and e4m3.
The label's part is added to the hidden states' slope on its own, unrounded: otherwise a label that is nearly certain
would leave behind its row's rounding, as large as a wrong label's slope. Other losses round their slope to e5m2.

Source for the loss itself: loss.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from draftmill.drafter.float8 import GRADIENTS, VALUES, largest_magnitude, product, round_float8, scaled_to
from draftmill.drafter.loss import LossRule, RowScores, first_largest, score_rows
from draftmill.target.head import TargetHead, shape_logits

SLOPE_UNIT = torch.finfo(VALUES).max
"""What the likeliest token's share of an undivided softmax, 1, is stored as."""
PIECE_ROWS = 8192
"""Rows of the head rounded at a time, so that no float32 copy of all of it is made."""


@dataclass(frozen=True, kw_only=True)
class Float8Head(TargetHead):
    """A target's head whose two products for the loss are in float8. Embedding and `logits` are as before.

    head8_VH [V, H], head8_HV [H, V]  the LM head in e4m3, row-major both
    head_scale, one                   float32 []: its scale, and the scale of what is stored in its own unit
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
            head_scale=largest / SLOPE_UNIT,
            one=torch.ones((), device=matrix.device),
        )

    def drafted_logits(self, hidden_RH: torch.Tensor) -> torch.Tensor:
        """Normed hidden states [R, H] -> logits [R, V], the compute type."""
        hidden8, scale = round_float8(hidden_RH, VALUES)
        raw = product(hidden8, scale, self.head8_VH.t(), self.head_scale, hidden_RH.dtype, fast=True)
        return shape_logits(raw, self.logit_scale, self.logit_softcap)

    def back(self, slope_RV: torch.Tensor) -> torch.Tensor:
        """Slope to raw logits [R, V], e4m3 in its own unit or any wider type -> times the head, [R, H]."""
        slope8, scale = (slope_RV, self.one) if slope_RV.dtype == VALUES else round_float8(slope_RV, GRADIENTS)
        return product(slope8, scale, self.head8_HV.t(), self.head_scale, self.head_VH.dtype)


def score_rows_float8(
    logits: torch.Tensor,
    target_logits: torch.Tensor | None,
    labels_R: torch.Tensor,
    rule: LossRule,
    softcap: float | None,
    with_slope: bool,
) -> RowScores:
    """`score_rows` for a `Float8Head`: where the target's logits are not needed, the slope is in e4m3 and without the
    label, whose own slope is apart."""
    if rule.needs_target or not with_slope:
        return score_rows(logits, target_logits, labels_R, rule, softcap, with_slope)
    logits = logits.float()
    top = logits.amax(dim=-1)
    at_label = logits.gather(1, labels_R[:, None])[:, 0]
    share = (logits - top[:, None]).exp()
    total = share.sum(dim=-1)
    label_slope = (at_label - top).exp() - total
    if softcap is not None:
        share *= 1.0 - (logits / softcap).square()
        label_slope = label_slope * (1.0 - (at_label / softcap).square())
    slope = (share.scatter_(1, labels_R[:, None], 0.0) * SLOPE_UNIT).to(VALUES)
    cross_entropy = total.log() + top - at_label
    return RowScores(
        cross_entropy,
        rule.cross_entropy * cross_entropy,
        first_largest(logits) == labels_R,
        slope,
        rule.cross_entropy / (SLOPE_UNIT * total),
        rule.cross_entropy * label_slope / total,
    )
