"""How a drafter layer attends: one function a backend, chosen once for a batch.

`Attention` maps (layer, q, k, v) to the attended values; q is [A*K, N, D], k and v are [T + A*K, M, D].
Dense scaled-dot-product attention is the reference and runs everywhere; flex attention runs on CUDA.
"""

from __future__ import annotations

from collections.abc import Callable

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


def flex_masked_attention(shape: DrafterShape, masks: dict[int | None, BlockMask]) -> Attention:
    """Attention by flex attention under one block mask for each window in use. CUDA; fast only when compiled."""

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = flex_attention(
            q.transpose(0, 1)[None],
            k.transpose(0, 1)[None],
            v.transpose(0, 1)[None],
            block_mask=masks[shape.window(layer)],
            enable_gqa=q.shape[1] != k.shape[1],
        )
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
