"""tau of greedy speculative decoding from the target's own greedy answers, all blocks of an answer in one forward.

In greedy decoding what is written does not depend on the drafter: it is the target's plain answer. So the block that
would be drafted at any place of it can be drafted for all places at once, and the decoding walked through afterwards:
from a block whose first n drafts are right to the place n + 1 further on. Up to the rounding of differently shaped
forwards that is what `draftmill evaluate` finds step by step; quality_evaluate.py does that too, and compares.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from draftmill.drafter.attention import dense_attention, per_document_attention
from draftmill.drafter.loss import block_tokens
from draftmill.drafter.network import Drafter
from draftmill.drafter.shape import DrafterShape
from draftmill.evaluate.acceptance import StepRecord, leading_run, tau_pooled, tau_response_mean
from draftmill.records import Blocks
from draftmill.target.head import TargetHead
from draftmill.target.model import Target
from quality_data import Item

_CONTEXT, _ANCHORS = 4096, 512
_CHUNK = 2048  # rows of logits at once


@dataclass(frozen=True)
class _Batch:
    """Whole answers that are drafted together; owners: of each anchor, its answer's number and its place in it."""

    features_TF: torch.Tensor
    blocks: Blocks
    owners: list[tuple[int, int]]


class Walker:
    """The evaluation's answers with the target's features, ready for drafters of one shape."""

    def __init__(self, target: Target, shape: DrafterShape, items: Sequence[Item]) -> None:
        self.target, self.shape, self.items = target, shape, items
        self.device, self.dtype = target.device, target.dtype
        self.head: TargetHead = target.head()
        self._batches = [self._batch(target, group) for group in self._groups()]

    @torch.no_grad()
    def steps(self, drafter: Drafter) -> list[list[StepRecord]]:
        """The decoding steps of every answer, in the items' order. drafter: on the target's device, in its type."""
        runs = [[0] * len(item.answer) for item in self.items]
        for batch in self._batches:
            right_AK = self._right(drafter, batch)
            found = leading_run(right_AK, batch.blocks.slots_A).tolist()
            for (owner, place), run in zip(batch.owners, found[: len(batch.owners)], strict=True):
                runs[owner][place] = run
        return [walked(found, self.shape.block_size) for found in runs]

    def tau(self, drafter: Drafter) -> dict[str, dict[str, float]]:
        """By suite: `mean` over responses, `pooled` over all steps, and the number of answers with a step."""
        steps = self.steps(drafter)
        return {
            suite: tau_of([one for one, item in zip(steps, self.items, strict=True) if item.suite == suite])
            for suite in dict.fromkeys(item.suite for item in self.items)
        }

    def _groups(self) -> list[list[int]]:
        """Answers' numbers, as many together as there is room for."""
        groups: list[list[int]] = []
        context = anchors = 0
        for index, item in enumerate(self.items):
            size, places = len(item.prompt) + len(item.answer), len(item.answer) - 1
            if places < 1:
                continue
            if not groups or context + size > _CONTEXT or anchors + places > _ANCHORS:
                groups.append([])
                context = anchors = 0
            groups[-1].append(index)
            context, anchors = context + size, anchors + places
        return groups

    @torch.no_grad()
    def _batch(self, target: Target, group: list[int]) -> _Batch:
        rows = [[*self.items[index].prompt, *self.items[index].answer] for index in group]
        longest = max(map(len, rows))
        padded = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows], device=self.device)
        with target.taps(self.shape.target_layer_ids) as taps:
            target.forward_layers(padded)
            features = taps.concatenated()
        kept = torch.cat([features[number, : len(row)] for number, row in enumerate(rows)])
        context, anchors = max(_CONTEXT, len(kept)), _ANCHORS
        blocks = Blocks.empty(context, max(anchors, sum(len(self.items[i].answer) - 1 for i in group)))
        features_TF = torch.zeros(context, features.shape[-1], device=self.device, dtype=self.dtype)
        features_TF[: len(kept)] = kept.to(self.dtype)
        owners: list[tuple[int, int]] = []
        start = 0
        for index, row in zip(group, rows, strict=True):
            first, count = start + len(self.items[index].prompt), len(self.items[index].answer) - 1
            at = slice(len(owners), len(owners) + count)
            blocks.tokens_T[start : start + len(row)] = torch.tensor(row)
            blocks.positions_T[start : start + len(row)] = torch.arange(len(row), dtype=torch.int32)
            places = torch.arange(count, dtype=torch.int32)
            blocks.anchors_A[at], blocks.starts_A[at] = first + places, start
            blocks.slots_A[at] = (count - places).clamp(max=self.shape.block_size - 1)
            owners += [(index, place) for place in range(count)]
            start += len(row)
        moved = Blocks.empty(len(blocks.tokens_T), len(blocks.anchors_A), self.device)
        moved.copy_(blocks)
        return _Batch(features_TF, moved, owners)

    def _right(self, drafter: Drafter, batch: _Batch) -> torch.Tensor:
        """Which slots the drafter gets right, boolean [A, K]."""
        size, blocks = self.shape.block_size, batch.blocks
        ids, positions = block_tokens(blocks, size, self.shape.mask_token_id)
        attend = per_document_attention if self.device.type == "cpu" else dense_attention
        hidden_QH = drafter(
            batch.features_TF,
            blocks.positions_T,
            self.head.embed(ids).to(self.dtype),
            positions,
            attend(self.shape, blocks),
        )
        drafts_Q = torch.cat([self.head.logits(part).argmax(dim=-1) for part in hidden_QH.split(_CHUNK)])
        places = blocks.anchors_A.long()[:, None] + torch.arange(size, device=self.device)
        return drafts_Q.view(-1, size) == blocks.tokens_T[places.clamp(max=len(blocks.tokens_T) - 1)]


def walked(runs: Sequence[int], block_size: int) -> list[StepRecord]:
    """The steps of decoding an answer whose block at place a has runs[a] right drafts before the first wrong one.

    The first token is the prefill's. A step that would go past the answer's end is cut there, as decoding cuts it.
    """
    steps, place, last = [], 0, len(runs) - 1
    while place < last:
        room = last - place
        made = min(runs[place], block_size - 1) + 1
        kept = min(made, room)
        steps.append(StepRecord(kept, min(made - 1, kept), block_size - 1 if made <= room else kept))
        place += kept
    return steps


def tau_of(steps: Sequence[Sequence[StepRecord]]) -> dict[str, float]:
    """tau over answers, both ways, and how many answers have a step."""
    return {
        "mean": tau_response_mean(steps) or 0.0,
        "pooled": tau_pooled(steps) or 0.0,
        "answers": sum(bool(one) for one in steps),
    }
