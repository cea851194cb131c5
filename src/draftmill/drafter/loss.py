"""The loss over a batch's blocks: weights, labels, and a chunked linear + loss that keeps no logits.

The head is frozen, so the gradient to the hidden states is made in the forward pass, chunk by chunk: logits of one
chunk, the drafter's and where wanted the target's, are all that ever exists. The sum is not divided here; numerator and
denominator are summed over drafters, hosts and accumulation steps first.

With q the drafter's distribution in a slot, p the target's at the same place, y the slot's label and z the drafter's
logits, a slot costs a weighted sum of

    cross entropy      -log q_y                          slope to z   q - [y]
    KL                 sum p (log p - log q)                          q - p
    total variation    sum |q - p| / 2                                q C where q > p, else -q (1 - C)

with C the mass of q where q <= p. Total variation is the chance that rejection sampling turns a draft of q down
(Leviathan et al., arXiv 2211.17192).

Source: dflash.md "Loss"; D-PACE weights as in SpecForge 0.2.0 specforge/algorithms/common/dflash_family_model.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from draftmill.config import TrainConfig, gamma_for
from draftmill.records import Blocks
from draftmill.target.head import TargetHead


@dataclass(frozen=True)
class LossRule:
    """What a slot costs, how slots are weighed, and which token is right.

    gamma            decay length in slots
    alpha            D-PACE's smoothing; None for plain decay
    cross_entropy, kl, total_variation  weights of the loss's terms
    target_labels    whether a slot's label is the target's likeliest token, and not the data's
    """

    gamma: float
    alpha: float | None = None
    cross_entropy: float = 1.0
    kl: float = 0.0
    total_variation: float = 0.0
    target_labels: bool = False

    @classmethod
    def of(cls, train: TrainConfig, block_size: int) -> LossRule:
        """The rule that a run's configuration asks for."""
        terms = train.loss_terms
        return cls(
            gamma=train.gamma or gamma_for(block_size),
            alpha=train.d_pace_alpha if train.slot_weights == "d_pace" else None,
            cross_entropy=terms.get("cross_entropy", 0.0),
            kl=terms.get("kl", 0.0),
            total_variation=terms.get("total_variation", 0.0),
            target_labels=train.labels == "target",
        )

    @property
    def compares(self) -> bool:
        """Whether the loss looks at the target's distribution."""
        return self.kl > 0.0 or self.total_variation > 0.0

    @property
    def needs_target(self) -> bool:
        """Whether the target's logits are needed, and so its last hidden state at every context place."""
        return self.compares or self.target_labels


def block_tokens(blocks: Blocks, block_size: int, mask_token_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What blocks begin with: token ids [A+1], each anchor's and, last, the mask token's, which every other slot holds;
    and positions [A*K] of all block slots."""
    anchors = blocks.anchors_A.long()
    mask = torch.full((1,), mask_token_id, dtype=torch.int64, device=anchors.device)
    slots = torch.arange(block_size, device=anchors.device)
    positions = blocks.positions_T[anchors].long()[:, None] + slots
    return torch.cat([blocks.tokens_T[anchors].long(), mask]), positions.flatten()


def scored_rows(blocks: Blocks, block_size: int, rule: LossRule) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The slots 1..K-1 of all blocks as rows of the loss head, in the order in which they are worked on.

    Returns rows [A*(K-1)] (index a*K + k of each slot), labels [A*(K-1)] (token ids) and weights [A*(K-1)] float32.
    Under decay the supervised slots come first, weighted exp(-(k-1)/gamma), and then fillers of weight 0. Under D-PACE,
    whose weights need a block's slots together, blocks stay whole and the weights are 1 or 0.
    """
    anchors = blocks.anchors_A.long()
    slots = torch.arange(1, block_size, device=anchors.device)
    supervised = slots <= blocks.slots_A[:, None]
    places = (anchors[:, None] + slots).clamp(max=blocks.tokens_T.shape[0] - 1)
    labels = blocks.tokens_T[places].flatten()
    rows = (torch.arange(anchors.shape[0], device=anchors.device)[:, None] * block_size + slots).flatten()
    if rule.alpha is not None:
        return rows, labels, supervised.float().flatten()
    weights = (torch.exp(-(slots - 1).float() / rule.gamma) * supervised).flatten()
    order = torch.argsort(supervised.flatten().to(torch.int8), descending=True, stable=True)
    return rows[order], labels[order], weights[order]


def target_places(blocks: Blocks, rows_R: torch.Tensor, block_size: int) -> torch.Tensor:
    """The context slot at which the target predicts what each row stands for: anchor + k - 1 for slot k, [R] int64.

    rows_R: indices a*K + k. A row without weight may be given any place inside the context.
    """
    block, slot = rows_R // block_size, rows_R % block_size
    return (blocks.anchors_A.long()[block] + slot - 1).clamp(0, blocks.tokens_T.shape[0] - 1)


class RowScores(NamedTuple):
    """What a chunk's rows cost. The last three have no meaning where no slope was wanted.

    cross_entropy_R, costs_R  float32
    correct_R      bool: whether each row's likeliest token is its label
    slope_RV       d(cost)/d(raw logits), of any type, but for a factor on its rows
    factor_R       that factor, float32; None for 1
    label_slope_R  float32: what the slope at the label is where `slope_RV` leaves it out; None where it does not
    """

    cross_entropy_R: torch.Tensor
    costs_R: torch.Tensor
    correct_R: torch.Tensor
    slope_RV: torch.Tensor
    factor_R: torch.Tensor | None = None
    label_slope_R: torch.Tensor | None = None


class RowSlopes(NamedTuple):
    """d(sum w*cost)/d(hidden) of a chunk's rows, in parts: raw_RH times factor_R, and where the label's own part is
    apart, the head's rows of labels_R times label_factor_R. Factors are float32 [R]."""

    raw_RH: torch.Tensor
    factor_R: torch.Tensor
    head_VH: torch.Tensor
    labels_R: torch.Tensor
    label_factor_R: torch.Tensor | None = None

    def whole(self, dtype: torch.dtype) -> torch.Tensor:
        """The slope [R, H]."""
        slope_RH = self.raw_RH * self.factor_R[:, None]
        if self.label_factor_R is not None:
            slope_RH = slope_RH + self.head_VH[self.labels_R] * self.label_factor_R[:, None]
        return slope_RH.to(dtype)


ScoreRows = Callable[[torch.Tensor, torch.Tensor | None, torch.Tensor, LossRule, float | None, bool], RowScores]
"""`score_rows`, or what stands in for it on a device or for a head."""


class RowWork(NamedTuple):
    """What is done to rows outside of products: as here, or by kernels of a device's own.

    score  logits to costs and slopes, as `score_rows` does
    take   hidden states [N, H] and places [R] to their rows [R, H]
    place  rows of slopes written into [N, H] at places [R]; a place of -1 is the last row
    """

    score: ScoreRows
    take: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    place: Callable[[torch.Tensor, torch.Tensor, RowSlopes], None]


def take_rows(hidden_NH: torch.Tensor, places_R: torch.Tensor) -> torch.Tensor:
    """Rows of hidden states at places, of which -1 is the last: [R, H]."""
    return hidden_NH[places_R]


def place_rows(into_NH: torch.Tensor, places_R: torch.Tensor, slopes: RowSlopes) -> None:
    """Write rows of slopes at places, of which -1 is the last."""
    into_NH[places_R] = slopes.whole(into_NH.dtype)


def loss_chunk(
    hidden_RH: torch.Tensor,
    target_RH: torch.Tensor | None,
    head: TargetHead,
    labels_R: torch.Tensor,
    weights_R: torch.Tensor,
    rule: LossRule,
    slots: int,
    with_slope: bool = True,
    score: ScoreRows | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, RowSlopes | None]:
    """One chunk of rows of the loss head, value and gradient together.

    hidden_RH [R, H]; target_RH [R, H], the target's last hidden state, normed, where the rule needs it; labels_R [R];
    weights_R [R]; slots: those that a block scores, K-1. Under D-PACE the rows are whole blocks. score: `score_rows`
    by default.
    Returns costs [R] float32, final weights [R] float32, whether each row is right [R] bool, and the slope, None where
    none is wanted.
    Logits [R, V] live only here.
    """
    logits = head.drafted_logits(hidden_RH)
    target_logits = None
    if rule.needs_target:
        assert target_RH is not None
        target_logits = head.logits(target_RH)
    found = (score or score_rows)(logits, target_logits, labels_R, rule, head.logit_softcap, with_slope)
    if rule.alpha is not None:
        supervised = weights_R.view(-1, slots) > 0
        weights_R = d_pace_weights(found.cross_entropy_R.view(-1, slots), supervised, rule.alpha).flatten()
    if not with_slope:
        return found.costs_R, weights_R, found.correct_R, None
    # The weights scale whole rows, so they are applied to [R, H] and not to [R, V].
    scaled_R = weights_R * head.logit_scale
    slopes = RowSlopes(
        head.back(found.slope_RV),
        scaled_R if found.factor_R is None else scaled_R * found.factor_R,
        head.head_VH,
        labels_R,
        None if found.label_slope_R is None else scaled_R * found.label_slope_R,
    )
    return found.costs_R, weights_R, found.correct_R, slopes


def score_rows(
    logits: torch.Tensor,
    target_logits: torch.Tensor | None,
    labels_R: torch.Tensor,
    rule: LossRule,
    softcap: float | None,
    with_slope: bool,
) -> RowScores:
    """What rows of logits cost, and where wanted the slope.

    logits and, where the rule needs them, target_logits [R, V]: both may be overwritten. softcap: what both went
    through.
    """
    logits = _wide(logits)
    if target_logits is not None:
        target_logits = _wide(target_logits)
        if rule.target_labels:
            labels_R = first_largest(target_logits)
    correct = first_largest(logits) == labels_R
    log_q = torch.log_softmax(logits, dim=-1)
    cross_entropy = -log_q.gather(1, labels_R[:, None])[:, 0].float()
    if rule.compares:
        assert target_logits is not None
        costs, slope = _compare(log_q, target_logits, cross_entropy, rule)
    else:
        costs, slope = rule.cross_entropy * cross_entropy, log_q
        if with_slope:
            slope = log_q.exp_()
            if rule.cross_entropy != 1.0:
                slope *= rule.cross_entropy
    if not with_slope:
        return RowScores(cross_entropy, costs, correct, slope)
    if rule.cross_entropy:
        slope = _less_at(slope, labels_R, rule.cross_entropy)
    if softcap is not None:
        slope = slope * (1.0 - (logits / softcap).square())
    return RowScores(cross_entropy, costs, correct, slope)


def _wide(logits: torch.Tensor) -> torch.Tensor:
    """Logits in float32 on CUDA, where the cast is fused; on a CPU each further pass over them costs."""
    return logits.float() if logits.is_cuda else logits


def _compare(
    log_q: torch.Tensor, target_logits: torch.Tensor, cross_entropy_R: torch.Tensor, rule: LossRule
) -> tuple[torch.Tensor, torch.Tensor]:
    """Costs [R] float32 of a rule that compares distributions, and their slope to the logits but for the label's part.

    log_q, target_logits [R, V]: both are overwritten. On a CPU a new tensor of that size costs more than three passes
    over one that is there, so what can be done in place is.
    """
    p = torch.softmax(target_logits, dim=-1)
    costs = rule.cross_entropy * cross_entropy_R
    if rule.kl:
        # sum p log p = sum p * logit - log of the sum of all exponentials, which is exact at the largest of both
        log_sum = target_logits.amax(dim=-1).float() - p.amax(dim=-1).float().log()
        apart = target_logits.sub_(log_q).mul_(p).sum(dim=-1, dtype=torch.float32)
        costs = costs + rule.kl * (apart - log_sum)
    q = log_q.exp_()
    plain = rule.cross_entropy + rule.kl
    if rule.total_variation:
        gap = q - p
        costs = costs + rule.total_variation / 2 * torch.linalg.vector_norm(gap, 1, dim=-1).float()
        # Apart, both parts keep their relative precision, also in bfloat16 and where one of them has nearly all mass.
        above = gap.gt_(0.0).mul_(q)
        below = q.sub_(above)
        factor_above = plain + rule.total_variation * below.sum(dim=-1, keepdim=True)
        factor_below = plain - rule.total_variation * above.sum(dim=-1, keepdim=True)
        slope = above.mul_(factor_above).add_(below.mul_(factor_below))
    else:
        slope = q.mul_(plain)
    if rule.kl:
        slope.sub_(p, alpha=rule.kl)
    return costs, slope


def _less_at(slope: torch.Tensor, labels_R: torch.Tensor, amount: float) -> torch.Tensor:
    """The slope [R, V], less by `amount` at each row's label."""
    if slope.is_cuda:  # fused with what is around it
        return slope - amount * (torch.arange(slope.shape[1], device=slope.device) == labels_R[:, None]).float()
    slope[torch.arange(slope.shape[0]), labels_R] -= amount
    return slope


def first_largest(logits: torch.Tensor) -> torch.Tensor:
    """Index of each row's largest logit, the first among equals: [R, V] -> [R] int64.

    On a CPU in two levels, of which the first is a plain maximum: torch's argmax there takes four times as long.
    """
    rows, size = logits.shape
    group = 128
    if logits.is_cuda or size % group:
        return logits.argmax(dim=-1)
    grouped = logits.view(rows, size // group, group)
    which = grouped.amax(dim=-1).argmax(dim=-1)
    inside = grouped[torch.arange(rows), which].argmax(dim=-1)
    return which * group + inside


def d_pace_weights(cross_entropy_AK: torch.Tensor, supervised_AK: torch.Tensor, alpha: float) -> torch.Tensor:
    """D-PACE weights of blocks' slots 1..K-1, [A, K-1] float32: w_j = sum over m >= j of prod over i <= m of s_i.

    s = (1 - alpha) exp(-CE) + alpha; unsupervised slots neither multiply nor add.
    """
    smooth = (1.0 - alpha) * torch.exp(-cross_entropy_AK) + alpha
    prefix = torch.where(supervised_AK, smooth, 1.0).cumprod(dim=1) * supervised_AK
    return prefix.flip(1).cumsum(1).flip(1) * supervised_AK


ROW_WORK = RowWork(score_rows, take_rows, place_rows)
