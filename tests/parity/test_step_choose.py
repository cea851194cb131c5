"""How a step is chosen, and the captured step's order of pieces, on a CPU: a graph is played by its work done again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from draftmill.compiling import num_compilations
from draftmill.config import TrainConfig
from draftmill.step import choose, graphed
from draftmill.step.choose import Decision
from draftmill.step.compiled import CompiledStep
from draftmill.step.eager import EagerStep
from draftmill.step.graphed import GraphedStep
from draftmill.step.state import StepState
from draftmill.train.optimizer import FlatAdamW
from small_steps import ANCHORS, small_state


class Replayed:
    """In a CUDA graph's place: recording does the work, and so does every replay."""

    def __init__(self, work: Callable[[], None]) -> None:
        self.replay = work
        work()


class CpuGraphed(GraphedStep):
    """The captured step where there are no graphs."""

    def __init__(self, state: StepState) -> None:
        CompiledStep.__init__(self, state)
        self._is_warm, self._pool, self._graphs, self._hidden, self._kept = False, None, {}, None, ()


class Wrong(CpuGraphed):
    """One that computes something else."""

    def run(self, num_scored: int, num_blocks: int) -> None:
        super().run(num_scored, num_blocks)
        self.state.flat.gradient[:64] += 1.0


class Broken(CpuGraphed):
    """One that can't be captured, and does not say why."""

    def warm_up(self) -> None:
        raise RuntimeError


@pytest.fixture(autouse=True)
def _no_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def record(work: Callable[[], None], pool: Any = None) -> Any:
        return Replayed(work)

    monkeypatch.setattr(graphed, "record_graph", record)
    monkeypatch.setattr(choose, "record_graph", record)
    monkeypatch.setitem(choose._STEPS, "graphed", CpuGraphed)
    torch.set_num_threads(1)
    yield
    torch._dynamo.config.error_on_recompile = False


def decided(decision: Decision) -> tuple[choose.Built, StepState]:
    state = small_state()
    with choose._undisturbed(state):
        choose.fill_randomly(state)
        return choose._decided(state, FlatAdamW(state.flat, TrainConfig()), decision), state


def gradient_of(step: EagerStep, num_blocks: int) -> torch.Tensor:
    """Of a batch with some blocks unused and one cut."""
    state = step.state
    with torch.random.fork_rng():
        torch.manual_seed(7)
        choose.fill_randomly(state)
    state.blocks.slots_A[0] = 1
    for name in ("anchors_A", "starts_A", "slots_A"):
        getattr(state.blocks, name)[num_blocks:] = 0
    state.begin()
    step.run(int(state.blocks.slots_A.sum()), num_blocks)
    return state.flat.gradient.clone()


def test_all_ways_are_tried_on_one_compilation_and_the_next_drafter_takes_the_choice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seconds = {"eager": 3.0, "compiled": 2.0, "graphed": 1.0}
    measure = choose._time

    def pretended(step: EagerStep, state: StepState) -> float:
        measure(step, state)
        return seconds[step.name]

    monkeypatch.setattr(choose, "_time", pretended)
    decision, before = Decision(), num_compilations()
    built, state = decided(decision)
    assert built.report == "graphed (auto: eager 3000.0 ms, compiled 2000.0 ms, graphed 1000.0 ms)"
    assert isinstance(built.step, GraphedStep)
    assert num_compilations() == before + 2, "the trunk, once for both, and on a CPU the update"
    assert decision.names == {"cpu": "graphed"}
    assert not state.features_TF.any()

    for num_blocks in (ANCHORS, 3, ANCHORS):
        expected = gradient_of(EagerStep(small_state()), num_blocks)
        torch.testing.assert_close(gradient_of(built.step, num_blocks), expected, rtol=1e-4, atol=1e-5)

    monkeypatch.setattr(choose, "_fastest", None)  # nobody tries again
    second, _ = decided(decision)
    assert second.report == "graphed (auto: as the first drafter's)"
    expected = gradient_of(EagerStep(small_state()), 5)
    torch.testing.assert_close(gradient_of(second.step, 5), expected, rtol=1e-4, atol=1e-5)


def test_who_can_not_do_as_the_first_tries_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(choose._STEPS, "graphed", Broken)
    decision = Decision()
    decision.names["cpu"] = "graphed"
    built, _ = decided(decision)
    assert built.step.name in ("eager", "compiled")
    assert built.report.endswith("graphed rejected: RuntimeError; not graphed as the first drafter's: RuntimeError")
    assert decision.names == {"cpu": "graphed"}


def test_one_that_computes_something_else_is_rejected_however_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(choose._STEPS, "graphed", Wrong)
    measure = choose._time
    monkeypatch.setattr(
        choose, "_time", lambda step, state: measure(step, state) * (0.0 if step.name == "graphed" else 1.0)
    )
    built, _ = decided(Decision())
    assert built.step.name != "graphed"
    assert "graphed rejected: differs from eager by" in built.report
