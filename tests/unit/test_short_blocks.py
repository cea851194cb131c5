"""Blocks that lack slots train as blocks of their own size do."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from draftmill.drafter.attention import dense_attention
from draftmill.drafter.loss import LossRule
from draftmill.drafter.network import Drafter
from draftmill.records import Blocks
from draftmill.step.choose import fill_randomly
from draftmill.step.eager import EagerStep
from draftmill.step.state import StepShape, StepState
from draftmill.target.head import TargetHead
from small_steps import ANCHORS, CONTEXT, SHAPE

CPU = torch.device("cpu")
LONG, SHORT = 8, 5
SLOTS = (4, 4, 2, 4, 1, 3)
"""Supervised slots of the blocks, none of them past what a short one has."""


def state_of(block_size: int, rule: LossRule, *, window: int | None = None) -> StepState:
    shape = replace(
        SHAPE,
        num_layers=2,
        block_size=block_size,
        sliding_window=window,
        sliding_layers=() if window is None else (1,),
    )
    matrix = torch.randn(SHAPE.vocab_size, SHAPE.hidden_size, generator=torch.Generator().manual_seed(0))
    slots = StepShape(CONTEXT, ANCHORS, 14, short_blocks=block_size == LONG)
    return StepState(Drafter(shape, seed=1), TargetHead(matrix, matrix), rule, slots, CPU, torch.float32)


def batch(absent: int) -> tuple[torch.Tensor, Blocks]:
    generator = torch.Generator().manual_seed(2)
    blocks = Blocks.empty(CONTEXT, ANCHORS)
    blocks.tokens_T[:] = torch.randint(38, (CONTEXT,), generator=generator)
    blocks.positions_T[:] = torch.arange(CONTEXT)
    blocks.anchors_A[:6] = torch.tensor([1, 4, 9, 15, 20, 26])
    blocks.slots_A[:6] = torch.tensor(SLOTS)
    blocks.absent_A[:6] = absent
    return torch.randn(CONTEXT, SHAPE.feature_size, generator=generator), blocks


def trained(state: StepState, absent: int, dense: bool) -> StepState:
    features, blocks = batch(absent)
    state.load(features, blocks)
    state.begin()
    attention = (lambda state: lambda blocks: dense_attention(state.drafter_shape, blocks)) if dense else None
    EagerStep(state, attention).run(sum(SLOTS), len(SLOTS))
    return state


@pytest.mark.parametrize("dense", [False, True], ids=["by document", "dense"])
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("alpha", [None, 0.5], ids=["decay", "d_pace"])
def test_loss_and_gradient_are_those_of_a_smaller_block(dense: bool, window: int | None, alpha: float | None) -> None:
    rule = LossRule(4.0, alpha=alpha)
    short = trained(state_of(LONG, rule, window=window), LONG - SHORT, dense)
    small = trained(state_of(SHORT, rule, window=window), 0, dense)
    torch.testing.assert_close(short.totals, small.totals, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(short.flat.gradient, small.flat.gradient, rtol=1e-4, atol=1e-6)
    assert torch.equal(short.correct_AK[:, :SHORT], small.correct_AK)
    assert not short.correct_AK[:, SHORT:].any()
    assert torch.equal(short.scored_K[:SHORT], small.scored_K)
    assert not short.scored_K[SHORT:].any()
    whole = trained(state_of(LONG, rule, window=window), 0, dense)
    if window is None:
        assert (whole.flat.gradient - small.flat.gradient).norm() > 1e-3 * small.flat.gradient.norm()


def test_ways_of_running_are_compared_on_short_blocks_where_there_are_any() -> None:
    state = state_of(LONG, LossRule(4.0))
    fill_randomly(state)
    absent = state.blocks.absent_A
    assert sorted(set(absent.tolist())) == list(range(LONG - 1))
    assert torch.equal(state.blocks.slots_A, LONG - 1 - absent)
    whole = state_of(SHORT, LossRule(4.0))
    fill_randomly(whole)
    assert not whole.blocks.absent_A.any()
    assert (whole.blocks.slots_A == SHORT - 1).all()
