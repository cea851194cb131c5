"""Gradients that products write where they are wanted equal those that autograd keeps, whatever was there before."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from draftmill.config import Float8Choice, StepChoice, TrainConfig
from draftmill.records import BatchKind
from draftmill.step.choose import build_step, fill_randomly
from draftmill.step.state import StepState
from draftmill.train.optimizer import FlatAdamW
from draftmill.train.replica import Replica
from small_steps import ANCHORS, BLOCK, small_state

SCORED = ANCHORS * (BLOCK - 1)
MATRICES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "fc")


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    yield
    torch._dynamo.config.error_on_recompile = False
    torch._dynamo.reset()


def ready(state: StepState, seed: int = 0) -> StepState:
    """A state with a full batch in it."""
    fill_randomly(state)
    state.features_TF.copy_(torch.randn(state.features_TF.shape, generator=torch.Generator().manual_seed(seed)))
    return state


def gradient_of(state: StepState, choice: StepChoice, batches: int = 1) -> torch.Tensor:
    """What a step leaves, of a buffer that held no numbers where nobody has to clear it."""
    built = build_step(choice, state, FlatAdamW(state.flat, TrainConfig()))
    ready(state)
    for name in state.flat.overwritten:
        state.flat.view(state.flat.gradient, name).fill_(float("nan"))
    state.begin()
    for seed in range(batches):
        ready(state, seed)
        built.step.run(SCORED, ANCHORS)
        state.flat.add_gradient()
    return state.flat.gradient_sum.clone()


@pytest.mark.parametrize(
    ("choice", "float8", "checkpointed"),
    [
        ("eager", None, False),
        ("eager", "all", False),
        ("eager", None, True),
        ("compiled", None, False),
        ("compiled", "all", True),
    ],
)
def test_written_gradients_are_autograds(choice: StepChoice, float8: Float8Choice | None, checkpointed: bool) -> None:
    kept, written = small_state(float8), small_state(float8, overwrite=True)
    for state in (kept, written):
        state.drafter.checkpoint_activations = checkpointed
    expected = gradient_of(kept, choice)
    assert expected.norm() > 0
    torch.testing.assert_close(gradient_of(written, choice), expected, rtol=1e-4, atol=1e-6)


def test_all_matrices_are_written_but_for_those_that_a_pass_uses_twice() -> None:
    state = small_state(overwrite=True)
    names = {name.rsplit(".", 2)[-2] for name in state.flat.overwritten}
    assert names == set(MATRICES) - {"k_proj", "v_proj"}
    state.flat.gradient.fill_(7.0)
    state.begin()
    for name in state.flat.places:
        value = 7.0 if name in state.flat.overwritten else 0.0
        assert (state.flat.view(state.flat.gradient, name) == value).all(), name


def test_batches_of_a_step_add_up() -> None:
    """In a sum apart, for the next batch overwrites."""
    kept, written = small_state(), small_state(overwrite=True)
    for state in (kept, written):
        state.flat.sum_in_float32()
    assert kept.flat.gradient_sum is kept.flat.gradient
    assert written.flat.gradient_sum is not written.flat.gradient
    expected = gradient_of(kept, "eager", batches=3)
    torch.testing.assert_close(gradient_of(written, "eager", batches=3), expected, rtol=1e-4, atol=1e-6)


def test_the_trunk_stays_one_graph() -> None:
    state = small_state(overwrite=True)
    before = dict(torch._dynamo.utils.counters["graph_break"])
    gradient_of(state, "compiled")
    assert dict(torch._dynamo.utils.counters["graph_break"]) == before


def after_a_batch(*, overwrite: bool, sums_apart: bool) -> Replica:
    """A replica within a step whose first batch was run."""
    state = small_state(overwrite=overwrite)
    if sums_apart:
        state.flat.sum_in_float32()
    optimizer = FlatAdamW(state.flat, TrainConfig())
    replica = Replica(state, build_step("eager", state, optimizer), optimizer, lambda _: 1e-3, 1)
    replica.begin()
    replica.batch, replica.num_scored, replica.num_blocks = _batch(BatchKind.TRAIN), SCORED, ANCHORS
    ready(state)
    replica.accumulate()
    return replica


@pytest.mark.parametrize("accumulate", [False, True])
def test_a_step_without_a_batch_has_no_gradient(accumulate: bool) -> None:
    """Not that of the step before."""
    replica = after_a_batch(overwrite=True, sums_apart=accumulate)
    assert all(part.any() for part in replica.reducible())
    replica.begin()
    replica.batch = _batch(BatchKind.EMPTY)
    replica.accumulate()
    gradient, _ = replica.reducible()
    assert not gradient.any()


@pytest.mark.parametrize("overwrite", [False, True])
def test_an_empty_batch_takes_nothing_from_the_batches_before_it(overwrite: bool) -> None:
    """As in the last step of a run, where one drafter may have a batch and then none."""
    replica = after_a_batch(overwrite=overwrite, sums_apart=True)
    expected = replica.reducible()[0].clone()
    assert expected.norm() > 0
    replica.batch = _batch(BatchKind.EMPTY)
    replica.accumulate()
    assert torch.equal(replica.reducible()[0], expected)


def _batch(kind: BatchKind) -> Any:
    return SimpleNamespace(kind=kind, num_tokens=4)


def test_building_updates_without_gradient_leave_the_weights() -> None:
    state = small_state(overwrite=True)
    optimizer = FlatAdamW(state.flat, TrainConfig())
    before = state.flat.master.clone()
    build_step("compiled", state, optimizer)
    assert torch.equal(state.flat.master, before)
