"""The loss over a batch's blocks: weights, labels, and a chunked linear + cross entropy that keeps no logits.

The head is frozen, so the gradient to the hidden states is made in the forward pass, chunk by chunk: logits of one
chunk are all that ever exists. The sum is not divided here; numerator and denominator are summed over drafters, hosts
and accumulation steps first.

Source: dflash.md "Loss"; D-PACE weights as in SpecForge 0.2.0 specforge/algorithms/common/dflash_family_model.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from draftmill.records import Blocks
from draftmill.target.head import TargetHead


@dataclass(frozen=True)
class LossRule:
    """How slots are weighed. gamma: decay length in slots; alpha: D-PACE's smoothing, None for plain decay."""

    gamma: float
    alpha: float | None = None


def block_tokens(blocks: Blocks, block_size: int, mask_token_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and positions of all block slots, [A*K] each: the anchor's token, then mask tokens."""
    anchors = blocks.anchors_A.long()
    ids = torch.full((anchors.shape[0], block_size), mask_token_id, dtype=torch.int64, device=anchors.device)
    ids[:, 0] = blocks.tokens_T[anchors]
    slots = torch.arange(block_size, device=anchors.device)
    positions = blocks.positions_T[anchors].long()[:, None] + slots
    return ids.flatten(), positions.flatten()


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


def loss_chunk(
    hidden_RH: torch.Tensor,
    head: TargetHead,
    labels_R: torch.Tensor,
    weights_R: torch.Tensor,
    d_pace: tuple[int, float] | None = None,
    with_slope: bool = True,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """One chunk of rows of the loss head, value and gradient together.

    hidden_RH [R, H], labels_R [R], weights_R [R]; under D-PACE (slots a block, alpha), and R whole blocks.
    Returns cross entropies [R] float32, final weights [R] float32, whether each row is right [R] bool, and
    d(sum w*CE)/d(hidden) [R, H] (the rows themselves where no slope is wanted).
    Logits [R, V] live only here.
    """
    logits = head.logits(hidden_RH)
    wide = logits.float() if logits.is_cuda else logits  # fused there; on a CPU each further pass over them costs
    log_probability = torch.log_softmax(wide, dim=-1)
    cross_entropy = -log_probability.gather(1, labels_R[:, None])[:, 0].float()
    correct = first_largest(wide) == labels_R
    if d_pace is not None:
        slots, alpha = d_pace
        by_block = d_pace_weights(cross_entropy.view(-1, slots), weights_R.view(-1, slots) > 0, alpha)
        weights_R = by_block.flatten()
    if not with_slope:
        return cross_entropy, weights_R, correct, hidden_RH
    slope = log_probability.exp_()
    if slope.is_cuda:  # fused with what is around it
        slope = slope - (torch.arange(slope.shape[1], device=slope.device) == labels_R[:, None]).float()
    else:
        slope[torch.arange(slope.shape[0]), labels_R] -= 1.0
    if head.logit_softcap is not None:
        slope = slope * (1.0 - (wide / head.logit_softcap).square())
    # The weights scale whole rows, so they are applied to [R, H] and not to [R, V].
    slope_RH = (slope.to(hidden_RH.dtype) @ head.head_VH) * (weights_R[:, None] * head.logit_scale)
    return cross_entropy, weights_R, correct, slope_RH.to(hidden_RH.dtype)


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
