"""How a drafter layer attends: one function a backend, chosen once for a batch.

`Attention` maps (layer, q, k, v) to the attended values; q is [A*K, N, D], k and v are [T + A*K, M, D].
Dense scaled-dot-product attention is the reference and runs everywhere; per-document attention is its fast form on a
CPU; flex attention runs on CUDA.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from draftmill.drafter.mask import dense_mask
from draftmill.drafter.shape import DrafterShape
from draftmill.records import Blocks

Attention = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def dense_attention(shape: DrafterShape, blocks: Blocks) -> Attention:
    """Attention by a dense mask: the reference."""
    windows = {shape.window(layer) for layer in range(shape.num_layers)}
    masks = {window: dense_mask(blocks, shape.block_size, window) for window in windows}

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return masked_attention(q, k, v, masks[shape.window(layer)])

    return attend


def per_document_attention(shape: DrafterShape, blocks: Blocks) -> Attention:
    """Attention document by document, each block's own part apart from its context: the fast way on a CPU.

    Equal to the dense reference, without the pairs that no block sees. Unused blocks come out as zeros. Reads the
    blocks' integers on the host, so it is for tensors that are there.
    """
    size = shape.block_size
    used = int((blocks.slots_A > 0).sum())
    starts = blocks.starts_A[:used]
    _, counts = torch.unique_consecutive(starts, return_counts=True)
    bounds = [0, *counts.cumsum(0).tolist()]
    documents = [_Document(shape, blocks, first, last) for first, last in pairwise(bounds)]

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        window = shape.window(layer)
        parts = [document.attend(q, k, v, window) for document in documents]
        rest = q.new_zeros((blocks.anchors_A.shape[0] - used) * size, q.shape[1], q.shape[2])
        return torch.cat([*parts, rest])

    return attend


class _Document:
    """The blocks first..last-1, all of one document, and what they see."""

    def __init__(self, shape: DrafterShape, blocks: Blocks, first: int, last: int) -> None:
        self.size = shape.block_size
        self.first, self.count = first, last - first
        anchors = blocks.anchors_A[first:last]
        self.start, self.stop = int(blocks.starts_A[first]), int(anchors.max())
        self.own_start = blocks.tokens_T.shape[0] + first * self.size
        slots = torch.arange(self.size, dtype=anchors.dtype)
        context = torch.arange(self.start, self.stop, dtype=anchors.dtype)
        before = context < anchors[:, None, None]
        present = slots < self.size - blocks.absent_A[first:last, None, None]  # [count, 1, K]
        self.masks: dict[int | None, tuple[torch.Tensor, torch.Tensor | None]] = {}
        for window in {shape.window(layer) for layer in range(shape.num_layers)}:
            if window is None:
                self.masks[None] = (before, None if bool(present.all()) else present)
            else:
                near = anchors[:, None, None] + slots[:, None] - context < window
                self.masks[window] = (before & near, present & (slots <= slots[:, None]))

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None) -> torch.Tensor:
        """q, k, v of the whole batch -> attended values of this document's blocks [count*K, N, D]."""
        count, size, heads, dim = self.count, self.size, k.shape[1], q.shape[2]
        context_mask, own_mask = self.masks[window]
        rows = slice(self.first * size, (self.first + count) * size)
        own = slice(self.own_start, self.own_start + count * size)
        # [M, group, count, K, D]: the queries that share a key head stand together
        queries = q[rows].view(count, size, heads, -1, dim).permute(2, 3, 0, 1, 4) * dim**-0.5
        group = queries.shape[1]
        context_k, context_v = (x[self.start : self.stop].transpose(0, 1) for x in (k, v))
        own_k, own_v = (x[own].view(count, size, heads, dim).permute(2, 0, 1, 3)[:, None] for x in (k, v))
        rows_of_head, seen = group * count * size, self.stop - self.start  # seen is 0 where a block begins its document
        context_scores = (queries.reshape(heads, rows_of_head, dim) @ context_k.transpose(1, 2)).view(
            heads, group, count, size, seen
        )
        own_scores = queries @ own_k.transpose(-1, -2)
        context_scores = context_scores.masked_fill(~context_mask, float("-inf"))
        if own_mask is not None:
            own_scores = own_scores.masked_fill(~own_mask, float("-inf"))
        probability = torch.softmax(torch.cat([context_scores, own_scores], dim=-1), dim=-1)
        from_context = probability[..., :seen].reshape(heads, rows_of_head, seen) @ context_v
        out = from_context.view(heads, group, count, size, dim) + probability[..., seen:] @ own_v
        return out.permute(2, 3, 0, 1, 4).reshape(count * size, -1, dim)


def flex_masked_attention(
    shape: DrafterShape, masks: dict[int | None, BlockMask], kernel: Callable[..., Any] = flex_attention
) -> Attention:
    """Attention by flex attention under one block mask for each window in use. CUDA; fast only when compiled.

    Every query head gets a key head of its own: the backward pass has one program for a tile of keys of a key head, and
    few key heads leave most of a GPU waiting for the tiles that nearly every block sees (bench/attention.py).
    """

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        group = q.shape[1] // k.shape[1]
        if group > 1:
            k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        out = kernel(q, k, v, block_mask=masks[shape.window(layer)])
        assert isinstance(out, torch.Tensor)
        return out[0].transpose(0, 1)

    return attend


def masked_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """q [Q, N, D], k and v [C, M, D], mask boolean [Q, C] or None (all seen) -> [Q, N, D]."""
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        k.transpose(0, 1)[None],
        v.transpose(0, 1)[None],
        attn_mask=mask,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return out[0].transpose(0, 1)
