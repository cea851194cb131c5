"""Who sees whom: the DFlash visibility rule over [context | blocks] keys.

A block with anchor slot a and document start s sees the context slots j with s <= j < a, and its own block: all slots
in a full-attention layer, slots up to its own in a sliding layer, which also drops context further back than its
window. Nothing else: no other block, no other document, no padding. An unused block (a = s = 0) sees itself only. The
slots that a short block lacks at its end nobody sees.

Two forms of the one rule: a dense boolean matrix (the reference, and the CPU's), and block lists for flex attention,
built from the intervals directly, without evaluating the rule on every pair. Owns no attention arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.attention.flex_attention import BlockMask

from draftmill.records import Blocks

TILE = 128
"""Edge of a flex attention tile, in queries and in keys."""

MaskRule = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def dense_mask(blocks: Blocks, block_size: int, window: int | None = None) -> torch.Tensor:
    """The rule as a boolean matrix [A*K, T + A*K], True where a query sees a key. On the blocks' device.

    Source: dflash.md "Who sees whom"; arXiv 2602.06036 section 3.
    """
    context_slots, anchor_slots = blocks.tokens_T.shape[0], blocks.anchors_A.shape[0]
    device = blocks.anchors_A.device
    queries = torch.arange(anchor_slots * block_size, device=device)[:, None]
    keys = torch.arange(context_slots + anchor_slots * block_size, device=device)[None, :]
    return mask_rule(blocks, block_size, window, short_blocks=True)(queries, queries, queries, keys)


def mask_rule(blocks: Blocks, block_size: int, window: int | None, short_blocks: bool) -> MaskRule:
    """The rule as a flex attention mask function of (batch, head, query, key), closing over the blocks' tensors.

    short_blocks: whether a block may lack slots; a rule for whole ones alone has less to do.
    """
    anchors, starts, absent, context_slots = (
        blocks.anchors_A,
        blocks.starts_A,
        blocks.absent_A,
        blocks.tokens_T.shape[0],
    )

    def whole(_batch: torch.Tensor, _head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        block = query // block_size
        seen = (key >= starts[block]) & (key < anchors[block])
        own = (key - context_slots) // block_size == block
        return seen | (own & (key >= context_slots))

    def short(batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        present = (key - context_slots) % block_size < block_size - absent[query // block_size]
        return whole(batch, head, query, key) & (present | (key < context_slots))

    full = short if short_blocks else whole
    if window is None:
        return full

    def sliding(batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        block, slot = query // block_size, query % block_size
        position = anchors[block] + slot
        near = (key >= context_slots) | (position - key < window)
        causal = (key < context_slots) | ((key - context_slots) % block_size <= slot)
        return full(batch, head, query, key) & near & causal

    return sliding


class TileLists:
    """Builds flex attention's lists of visible tiles from a batch's intervals, for one shape.

    A tile is full where every query in it sees every key in it, else partial where any may. Anchors need not be sorted
    for the lists to be right; sorted anchors make them short. All work is tensor work of fixed shape on the device.
    """

    def __init__(
        self,
        context_slots: int,
        anchor_slots: int,
        block_size: int,
        device: torch.device | str,
        short_blocks: bool,
    ) -> None:
        """short_blocks: whether a block may lack slots. Raises ValueError unless context slots and anchor slots x block
        size are multiples of the tile."""
        if context_slots % TILE or (anchor_slots * block_size) % TILE:
            raise ValueError(
                f"context slots and anchor slots x block size must be multiples of {TILE}, got {context_slots} and "
                f"{anchor_slots} x {block_size}"
            )
        self.block_size, self.short_blocks = block_size, short_blocks
        self.context_slots = context_slots
        self.num_queries = anchor_slots * block_size
        query_tiles = self.num_queries // TILE
        first = torch.arange(query_tiles, device=device) * TILE
        width = (TILE + block_size - 2) // block_size + 1
        self._blocks_of_tile = (first[:, None] // block_size + torch.arange(width, device=device)).clamp(
            max=anchor_slots - 1
        )
        # A block past the tile's last query is replaced by the tile's last one.
        self._blocks_of_tile = torch.minimum(self._blocks_of_tile, ((first + TILE - 1) // block_size)[:, None])
        self._key_tile_first = torch.arange(context_slots // TILE, device=device, dtype=torch.int32) * TILE
        own_first = self._blocks_of_tile * block_size // TILE
        own_last = (self._blocks_of_tile * block_size + block_size - 1) // TILE
        tiles = torch.arange(query_tiles, device=device)
        self._own = ((tiles >= own_first[..., None]) & (tiles <= own_last[..., None])).any(dim=1)

    def build(self, blocks: Blocks, window: int | None = None) -> tuple[torch.Tensor, ...]:
        """Blocks -> (partial counts, partial ids, full counts, full ids), int32 [1, 1, query tiles(, key tiles)]."""
        anchors = blocks.anchors_A[self._blocks_of_tile][..., None]
        starts = blocks.starts_A[self._blocks_of_tile][..., None]
        low, low_for_all = starts, starts
        if window is not None:
            low = torch.maximum(starts, anchors - window + 1)
            low_for_all = torch.maximum(starts, anchors + self.block_size - window)
        first = self._key_tile_first
        any_seen = ((low < first + TILE) & (anchors > first) & (low < anchors)).any(dim=1)
        all_seen = ((low_for_all <= first) & (anchors >= first + TILE)).all(dim=1)
        partial = torch.cat([any_seen & ~all_seen, self._own], dim=1)
        full = torch.cat([all_seen, torch.zeros_like(self._own)], dim=1)
        return (*_ordered(partial), *_ordered(full))

    def mask(self, blocks: Blocks, window: int | None = None) -> BlockMask:
        """The blocks' flex attention mask. Its rule reads the blocks' tensors when the kernel runs."""
        counts, ids, full_counts, full_ids = self.build(blocks, window)
        return BlockMask.from_kv_blocks(
            counts,
            ids,
            full_counts,
            full_ids,
            BLOCK_SIZE=TILE,
            mask_mod=mask_rule(blocks, self.block_size, window, self.short_blocks),
            seq_lengths=(self.num_queries, self.context_slots + self.num_queries),
        )


def _ordered(dense: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    counts = dense.sum(dim=1, dtype=torch.int32)
    ids = torch.argsort(dense.to(torch.int8), dim=1, descending=True, stable=True).to(torch.int32)
    return counts[None, None], ids[None, None]
