"""The visibility rule against a plain triple loop, and every way of attending against the dense reference."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from draftmill.drafter.attention import dense_attention, per_document_attention
from draftmill.drafter.mask import TILE, TileLists, dense_mask
from draftmill.drafter.shape import DrafterShape
from draftmill.records import Blocks


def packed_blocks(
    lengths: list[int], anchors: list[list[int]], context_slots: int, anchor_slots: int, short: bool = False
) -> Blocks:
    """Documents one after another, with anchors given inside each document; short: three of four blocks lack slots."""
    blocks = Blocks.empty(context_slots, anchor_slots)
    start, i = 0, 0
    for length, inside in zip(lengths, anchors, strict=True):
        blocks.tokens_T[start : start + length] = torch.arange(length) + 1
        blocks.positions_T[start : start + length] = torch.arange(length).int()
        for anchor in inside:
            blocks.anchors_A[i], blocks.starts_A[i], blocks.slots_A[i] = start + anchor, start, 1
            blocks.absent_A[i] = i % 4 if short else 0
            i += 1
        start += length
    return blocks


CASES = {
    "overlapping": ([40, 9, 60], [[1, 4, 5, 30], [2], [3, 6, 57, 58]], 128, 16),
    "one document": ([128], [[5, 64, 127]], 128, 16),
    "many small": ([8] * 12, [[1, 3]] * 12, 128, 32),
    "nothing before the block": ([20, 30], [[0], [0, 7]], 128, 16),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("window", [None, 1, 6, 50])
@pytest.mark.parametrize("block_size", [8, 10])
@pytest.mark.parametrize("short", [False, True])
def test_mask_equals_a_triple_loop(case: str, window: int | None, block_size: int, short: bool) -> None:
    lengths, anchors, context_slots, anchor_slots = CASES[case]
    blocks = packed_blocks(lengths, anchors, context_slots, anchor_slots, short)
    assert bool(blocks.absent_A.any()) == short
    mask = dense_mask(blocks, block_size, window)
    document_of = [d for d, length in enumerate(lengths) for _ in range(length)]
    flat = [(d, sum(lengths[:d]) + a) for d, inside in enumerate(anchors) for a in inside]
    expected = torch.zeros_like(mask)
    for block in range(anchor_slots):
        for slot in range(block_size):
            row = block * block_size + slot
            for other in range(block_size - int(blocks.absent_A[block])):
                if window is None or other <= slot:
                    expected[row, context_slots + block * block_size + other] = True
            if block < len(flat):
                document, anchor = flat[block]
                for j in range(sum(lengths)):
                    same = document_of[j] == document
                    near = window is None or anchor + slot - j < window
                    if same and j < anchor and near:
                        expected[row, j] = True
    assert torch.equal(mask, expected)


@pytest.mark.parametrize("window", [None, 20, 200])
@pytest.mark.parametrize("block_size", [8, 16, 12])
@pytest.mark.parametrize("short", [False, True])
def test_tile_lists_cover_the_mask_exactly(window: int | None, block_size: int, short: bool) -> None:
    torch.manual_seed(1)
    context_slots, anchor_slots = 512, 32 if block_size != 12 else 64
    lengths = [300, 30, 150]
    anchors = [sorted(torch.randperm(n - 1)[: n // 20].add(1).tolist()) for n in lengths]
    blocks = packed_blocks(lengths, anchors, context_slots, anchor_slots, short)
    tiles = TileLists(context_slots, anchor_slots, block_size, "cpu", short)
    mask = dense_mask(blocks, block_size, window)
    tiled = mask.view(mask.shape[0] // TILE, TILE, mask.shape[1] // TILE, TILE).permute(0, 2, 1, 3).flatten(2)
    counts, ids, full_counts, full_ids = (x[0, 0] for x in tiles.build(blocks, window))
    for row in range(tiled.shape[0]):
        listed = set(ids[row, : counts[row]].tolist())
        full = set(full_ids[row, : full_counts[row]].tolist())
        assert not listed & full
        for column in range(tiled.shape[1]):
            if column in full:
                assert tiled[row, column].all()
            elif tiled[row, column].any():
                assert column in listed
    # A list that is too long is right but slow: context tiles nobody sees are left out.
    seen = tiled.any(dim=2).sum()
    assert counts.sum() + full_counts.sum() <= seen + tiled.shape[0] * 2


@pytest.mark.parametrize("short", [False, True])
@pytest.mark.parametrize("sliding", [False, True])
def test_flex_mask_equals_dense_attention(sliding: bool, short: bool) -> None:
    torch.manual_seed(0)
    blocks = packed_blocks([100, 28], [[5, 50, 51], [2, 20]], 128, 8, short)
    q, k, v = torch.randn(128, 4, 16), torch.randn(256, 2, 16), torch.randn(256, 2, 16)
    shape = _shape(block_size=16, sliding=sliding)
    mask = TileLists(128, 8, 16, "cpu", short).mask(blocks, shape.window(0))
    out = flex_attention(
        q.transpose(0, 1)[None], k.transpose(0, 1)[None], v.transpose(0, 1)[None], block_mask=mask, enable_gqa=True
    )
    expected = dense_attention(shape, blocks)(0, q, k, v)
    torch.testing.assert_close(out[0].transpose(0, 1), expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("sliding", [False, True])
@pytest.mark.parametrize("short", [False, True])
def test_per_document_attention_equals_dense(case: str, sliding: bool, short: bool) -> None:
    torch.manual_seed(0)
    lengths, anchors, context_slots, anchor_slots = CASES[case]
    blocks = packed_blocks(lengths, anchors, context_slots, anchor_slots, short)
    shape = _shape(block_size=8, sliding=sliding)
    used = sum(len(inside) for inside in anchors) * 8
    inputs = [torch.randn(anchor_slots * 8, 4, 16), *torch.randn(2, context_slots + anchor_slots * 8, 2, 16)]
    results = []
    for attention in (dense_attention(shape, blocks), per_document_attention(shape, blocks)):
        q, k, v = (x.clone().requires_grad_() for x in inputs)
        out = attention(0, q, k, v)[:used]
        (out * torch.arange(out.numel()).view_as(out).cos()).sum().backward()
        results.append((out.detach(), q.grad[:used], k.grad, v.grad))
    for ours, expected in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(ours, expected, atol=2e-6, rtol=1e-4)


def _shape(block_size: int, sliding: bool = False) -> DrafterShape:
    return DrafterShape(
        hidden_size=64,
        intermediate_size=64,
        num_layers=1,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        rms_norm_eps=1e-6,
        vocab_size=100,
        block_size=block_size,
        mask_token_id=99,
        target_layer_ids=(1,),
        num_target_layers=4,
        rope={"rope_type": "default", "rope_theta": 1e4},
        max_position_embeddings=512,
        sliding_window=6 if sliding else None,
        sliding_layers=(0,) if sliding else (),
    )
