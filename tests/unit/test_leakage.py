"""What a block must not see: perturbing it leaves the block's output as it was, bit for bit (cases B2 and B5)."""

from __future__ import annotations

import pytest
import torch

from draftmill.config import gamma_for
from draftmill.drafter.loss import LossRule
from draftmill.drafter.network import Drafter
from draftmill.drafter.shape import DrafterShape
from draftmill.step.eager import EagerStep, dense_attention_choice
from draftmill.step.state import StepShape, StepState
from draftmill.target.head import TargetHead

CONTEXT, ANCHORS, BLOCK = 96, 12, 16
LENGTHS = (50, 30)


def make_step(sliding: bool, dense: bool) -> EagerStep:
    """Two documents, overlapping anchors three apart in each, blocks of 16."""
    torch.manual_seed(0)
    shape = DrafterShape(
        hidden_size=32,
        intermediate_size=48,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        rms_norm_eps=1e-6,
        vocab_size=50,
        block_size=BLOCK,
        mask_token_id=49,
        target_layer_ids=(1, 2),
        num_target_layers=6,
        rope={"rope_type": "default", "rope_theta": 1e4},
        max_position_embeddings=128,
        sliding_window=10 if sliding else None,
        sliding_layers=(0, 1) if sliding else (),
    )
    matrix = torch.randn(50, 32)
    state = StepState(
        Drafter(shape, seed=0),
        TargetHead(matrix, matrix),
        LossRule(gamma_for(BLOCK)),
        StepShape(CONTEXT, ANCHORS, 64),
        torch.device("cpu"),
        torch.float32,
    )
    state.features_TF.normal_()
    blocks = state.blocks
    blocks.tokens_T[: sum(LENGTHS)] = torch.randint(49, (sum(LENGTHS),))
    blocks.positions_T[: sum(LENGTHS)] = torch.cat([torch.arange(n) for n in LENGTHS]).int()
    anchors = [(0, 0), *((0, a) for a in range(20, 32, 3)), *((50, a) for a in range(55, 70, 3))]
    for i, (start, anchor) in enumerate(anchors):
        blocks.anchors_A[i], blocks.starts_A[i] = anchor, start
        blocks.slots_A[i] = min(BLOCK - 1, start + (LENGTHS[0] if start == 0 else LENGTHS[1]) - 1 - anchor)
    return EagerStep(state, dense_attention_choice if dense else None)


def hidden(step: EagerStep) -> torch.Tensor:
    with torch.no_grad():
        return step.trunk().view(ANCHORS, BLOCK, -1).clone()


@pytest.mark.parametrize("sliding", [False, True])
@pytest.mark.parametrize("dense", [False, True])
def test_features_at_and_after_the_anchor_change_nothing(sliding: bool, dense: bool) -> None:
    step = make_step(sliding, dense)
    state, before = step.state, hidden(step)
    used = state.blocks.slots_A > 0
    for block in range(int(used.sum())):
        anchor, start = int(state.blocks.anchors_A[block]), int(state.blocks.starts_A[block])
        kept = state.features_TF.clone()
        state.features_TF[anchor:] += torch.randn_like(state.features_TF[anchor:])
        state.features_TF[:start] -= 1.0  # the document before, where there is one
        assert torch.equal(hidden(step)[block], before[block])
        state.features_TF.copy_(kept)
        if anchor > start:
            state.features_TF[anchor - 1] += 1.0
            assert not torch.equal(hidden(step)[block], before[block]), "the last known feature is seen"
            state.features_TF.copy_(kept)


def test_tokens_of_other_blocks_change_nothing() -> None:
    """Only a block's own anchor token enters it: labels and other anchors' tokens do not."""
    step = make_step(sliding=False, dense=False)
    state, before = step.state, hidden(step)
    for block in range(int((state.blocks.slots_A > 0).sum())):
        anchor = int(state.blocks.anchors_A[block])
        kept = state.blocks.tokens_T.clone()
        state.blocks.tokens_T[:] = (state.blocks.tokens_T + 1) % 49
        state.blocks.tokens_T[anchor] = kept[anchor]
        assert torch.equal(hidden(step)[block], before[block])
        state.blocks.tokens_T.copy_(kept)


def test_slot_k_is_scored_against_the_token_k_after_the_anchor_and_slot_0_never() -> None:
    """Case B3."""
    step = make_step(sliding=False, dense=False)
    blocks = step.state.blocks
    rows, labels, weights = step.rows()
    scored = weights > 0
    assert int(scored.sum()) == int(blocks.slots_A.sum())
    for row, label, weight in zip(
        rows[scored].tolist(), labels[scored].tolist(), weights[scored].tolist(), strict=True
    ):
        block, slot = divmod(row, BLOCK)
        assert slot >= 1
        assert label == int(blocks.tokens_T[blocks.anchors_A[block] + slot])
        assert weight == pytest.approx(2.718281828 ** (-(slot - 1) / 7.0), rel=1e-5)
