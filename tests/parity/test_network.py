"""The network against dflash 0.1.0's: the same weights give the same hidden states and logits, one anchor at a time."""

from __future__ import annotations

import pytest
import torch

from draftmill.drafter.attention import dense_attention
from draftmill.drafter.loss import block_tokens
from draftmill.drafter.network import Drafter
from draftmill.drafter.shape import DrafterShape
from draftmill.records import Blocks
from draftmill.target.head import TargetHead

dflash = pytest.importorskip("dflash.model", reason="dflash 0.1.0 is not installed; `make test` installs it")


def small_shape(**changes) -> DrafterShape:
    values = dict(
        hidden_size=32,
        intermediate_size=48,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        rms_norm_eps=1e-6,
        vocab_size=97,
        block_size=8,
        mask_token_id=96,
        target_layer_ids=(1, 3, 5),
        num_target_layers=8,
        rope={"rope_type": "default", "rope_theta": 10000.0},
        max_position_embeddings=512,
    )
    return DrafterShape(**{**values, **changes})


def upstream(drafter: Drafter):
    """The peer's model holding this drafter's weights."""
    shape = drafter.shape
    sliding = set(shape.sliding_layers)
    config = dflash.Qwen3Config(
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        rms_norm_eps=shape.rms_norm_eps,
        vocab_size=shape.vocab_size,
        rope_parameters=dict(shape.rope),
        max_position_embeddings=shape.max_position_embeddings,
        sliding_window=shape.sliding_window,
        use_sliding_window=bool(sliding),
        layer_types=["sliding_attention" if i in sliding else "full_attention" for i in range(shape.num_layers)],
    )
    config.num_target_layers = shape.num_target_layers
    config.block_size = shape.block_size
    config.dflash_config = {
        "mask_token_id": shape.mask_token_id,
        "target_layer_ids": list(shape.target_layer_ids),
        "block_size": shape.block_size,
    }
    config._attn_implementation = "sdpa"
    model = dflash.DFlashDraftModel(config).float().eval()
    missing, unexpected = model.load_state_dict(drafter.state_dict(), strict=False)
    assert not unexpected
    assert all("rotary" in name for name in missing)
    return model


ROPES = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 128,
    },
}


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("sliding", [False, True])
@pytest.mark.parametrize("short", [False, True])
def test_forward_equals_upstream_one_anchor_at_a_time(rope: str, sliding: bool, short: bool) -> None:
    torch.manual_seed(3)
    extra = {"sliding_window": 9, "sliding_layers": (1,)} if sliding else {}
    shape = small_shape(rope=ROPES[rope], **extra)
    drafter = Drafter(shape).eval()
    for parameter in drafter.parameters():
        if parameter.dim() == 1:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    matrix = torch.randn(shape.vocab_size, shape.hidden_size)
    head = TargetHead(matrix, matrix)
    # two documents of 20 and 31 tokens in 64 context slots; overlapping anchors in both
    lengths, anchors = (20, 31), [(0, 1), (0, 12), (0, 14), (1, 21), (1, 23), (1, 40)]
    features = torch.randn(64, shape.feature_size)
    blocks = Blocks.empty(64, 8)
    blocks.tokens_T[:51] = torch.randint(0, 96, (51,))
    blocks.positions_T[:51] = torch.cat([torch.arange(n) for n in lengths]).int()
    for i, (document, anchor) in enumerate(anchors):
        blocks.anchors_A[i], blocks.starts_A[i], blocks.slots_A[i] = anchor, 20 * document, 3
        blocks.absent_A[i] = i % 5 if short else 0  # an engine that drafts fewer tokens runs fewer mask tokens
    ids, positions = block_tokens(blocks, shape.block_size, shape.mask_token_id)
    with torch.no_grad():
        hidden = drafter(features, blocks.positions_T, head.embed(ids), positions, dense_attention(shape, blocks))
        logits = head.logits(hidden).view(8, shape.block_size, -1)
        peer = upstream(drafter)
        for i, (document, anchor) in enumerate(anchors):
            start = 20 * document
            count = anchor - start
            size = shape.block_size - int(blocks.absent_A[i])
            given = torch.full((1, size), shape.mask_token_id)
            given[0, 0] = blocks.tokens_T[anchor]
            expected = peer(
                position_ids=torch.arange(count + size)[None],
                noise_embedding=head.embed(given),
                target_hidden=features[start:anchor][None],
            )
            expected = head.logits(expected[0])
            assert (logits[i, :size] - expected).abs().max() < 1e-5 * expected.abs().max()
