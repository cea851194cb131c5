"""Who waits for whom where models run and are built in several threads (case B31)."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from draftmill import compiling
from draftmill.compiling import BUILD_LOCK, BuildLock
from draftmill.pipeline.workers import TargetReplica
from draftmill.target.features import TapsReplica
from draftmill.target.step_compiled import CompiledForward
from packed_rows import bucketed_batch, documents_of
from target_kinds import tiny_target

AT_ONCE_S, NOT_YET_S = 20.0, 0.2
"""How long anything may take that waits for nothing, and how long something that waits is watched."""


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


class Inside:
    """Work that enters something, says so, and stays until it is let go."""

    def __init__(self, pool: ThreadPoolExecutor, enter: Callable[[], Any]) -> None:
        self.entered, self.go = threading.Event(), threading.Event()
        self.future = pool.submit(self._stay, enter)

    def _stay(self, enter: Callable[[], Any]) -> None:
        with enter():
            self.entered.set()
            assert self.go.wait(AT_ONCE_S)

    def is_in(self) -> bool:
        return self.entered.wait(AT_ONCE_S)

    def stays_out(self) -> bool:
        return not self.entered.wait(NOT_YET_S)

    def leave(self) -> None:
        self.go.set()
        self.future.result(AT_ONCE_S)


def test_models_run_side_by_side_and_building_waits_for_all_of_them(pool: ThreadPoolExecutor) -> None:
    lock = BuildLock()
    first, second = Inside(pool, lock.running), Inside(pool, lock.running)
    assert first.is_in()
    assert second.is_in()
    builder = Inside(pool, lambda: lock)
    assert builder.stays_out()
    first.leave()
    assert builder.stays_out()
    second.leave()
    assert builder.is_in()
    builder.leave()


def test_what_would_run_waits_for_whoever_builds_or_waits_to(pool: ThreadPoolExecutor) -> None:
    lock = BuildLock()
    first = Inside(pool, lock.running)
    assert first.is_in()
    builder = Inside(pool, lambda: lock)
    assert builder.stays_out()
    second = Inside(pool, lock.running)
    assert second.stays_out()
    first.leave()
    assert builder.is_in()
    assert second.stays_out()
    assert lock.taken()
    builder.leave()
    assert second.is_in()
    second.leave()
    assert not lock.taken()


def test_a_thread_may_build_what_it_runs_and_run_what_it_builds() -> None:
    lock = BuildLock()
    with lock, lock.running(), lock, lock.running():
        assert not lock.taken()
    with lock.running(), lock, lock.running():
        pass
    with ThreadPoolExecutor(1) as pool:
        Inside(pool, lambda: lock).leave()


@pytest.mark.parametrize("within", [False, True])
def test_nobody_can_begin_to_run_between_taking_the_lock_and_holding_it(
    monkeypatch: pytest.MonkeyPatch, within: bool
) -> None:
    """Whenever others are told to look, whoever has the lock for tracing keeps models out already."""
    lock = BuildLock()
    seen: list[tuple[bool, int]] = []
    tell = lock._changed.notify_all

    def told() -> None:
        seen.append((lock._builder is not None, lock._excluding))
        tell()

    with lock.beside() if within else nullcontext():
        monkeypatch.setattr(lock._changed, "notify_all", told)
        with lock:
            inside = list(seen)
    assert inside[-1] == (True, 1)


def test_two_that_build_from_inside_what_they_run_both_get_their_turn(pool: ThreadPoolExecutor) -> None:
    lock, both = BuildLock(), threading.Barrier(2, timeout=AT_ONCE_S)
    held: list[int] = []

    def work() -> None:
        with lock.running():
            both.wait()
            with lock:
                held.append(1)
                assert len(held) == 1
                held.pop()

    for future in [pool.submit(work) for _ in range(2)]:
        future.result(AT_ONCE_S)


def test_captures_wait_for_builders_and_for_no_model(pool: ThreadPoolExecutor) -> None:
    lock = BuildLock()
    first, capture = Inside(pool, lock.running), Inside(pool, lock.beside)
    assert first.is_in()
    assert capture.is_in()
    second, builder = Inside(pool, lock.running), Inside(pool, lambda: lock)
    assert builder.stays_out()
    second.go.set()
    first.leave()
    assert builder.stays_out(), "there is one builder at a time"
    capture.leave()
    assert builder.is_in()
    builder.leave()
    second.leave()


def test_what_is_traced_within_a_capture_keeps_models_out(pool: ThreadPoolExecutor) -> None:
    lock = BuildLock()
    with lock.beside():
        model = Inside(pool, lock.running)
        assert model.is_in()
        model.leave()
        with lock:
            model = Inside(pool, lock.running)
            assert model.stays_out()
        assert model.is_in()
        model.leave()


def test_who_waits_to_build_lets_in_whom_a_running_model_depends_on(
    pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two drafters that sum: the one inside leaves only when the other, kept out, has launched its part."""
    monkeypatch.setattr(compiling, "PATIENCE_S", 0.05)
    lock, inside, launched = BuildLock(), threading.Event(), threading.Event()

    def first() -> bool:
        with lock.running():
            inside.set()
            return launched.wait(AT_ONCE_S)

    def second() -> None:
        with lock.running():
            launched.set()

    running = pool.submit(first)
    assert inside.wait(AT_ONCE_S)
    builder = Inside(pool, lambda: lock)
    assert builder.stays_out()
    pool.submit(second).result(AT_ONCE_S)
    assert running.result(AT_ONCE_S)
    assert builder.is_in()
    builder.leave()


def test_who_fails_lets_go(pool: ThreadPoolExecutor) -> None:
    lock = BuildLock()
    for enter in (lambda: lock, lock.running):
        with pytest.raises(ValueError, match="made up"), enter():
            raise ValueError("made up")
    builder = Inside(pool, lambda: lock)
    assert builder.is_in()
    builder.leave()


def test_who_builds_midway_first_waits_for_its_stream_while_the_others_run(
    pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A capture waits for the device, which may wait for what a drafter has yet to launch."""
    lock, launched, midway = BuildLock(), threading.Event(), threading.Event()
    monkeypatch.setattr(compiling, "wait_for_stream", lambda: launched.wait(AT_ONCE_S))

    def capture() -> bool:
        with lock.running():
            midway.set()
            with lock:
                return launched.wait(NOT_YET_S)

    def drafter() -> None:
        with lock.running():
            launched.set()

    capturing = pool.submit(capture)
    assert midway.wait(AT_ONCE_S)
    builder = Inside(pool, lambda: lock)
    assert builder.is_in(), "who waits for its stream calls nothing"
    drafting = pool.submit(drafter)
    builder.leave()
    drafting.result(AT_ONCE_S)
    assert capturing.result(AT_ONCE_S)


def test_who_gives_up_waiting_to_build_holds_nobody_back(
    pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = BuildLock()
    first = Inside(pool, lock.running)
    assert first.is_in()
    waits, wait_for = threading.Event(), lock._changed.wait_for

    def interrupted(holds: Callable[[], bool], timeout: float | None = None) -> bool:
        if waits.is_set():
            return wait_for(holds, timeout)
        waits.set()
        lock._changed.wait(NOT_YET_S)
        raise KeyboardInterrupt

    monkeypatch.setattr(lock._changed, "wait_for", interrupted)
    building = pool.submit(lock.__enter__)
    assert waits.wait(AT_ONCE_S)
    second = Inside(pool, lock.running)
    with pytest.raises(KeyboardInterrupt):
        building.result(AT_ONCE_S)
    assert second.is_in()
    first.leave()
    second.leave()


@pytest.fixture
def _front(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The compiler's front alone; and its settings as they were."""
    torch._dynamo.reset()
    monkeypatch.setattr(CompiledForward, "__init__", functools.partialmethod(CompiledForward.__init__, backend="eager"))
    yield
    torch._dynamo.config.error_on_recompile = False
    torch._dynamo.reset()


class Traced(nn.Module):
    """Whose tracing takes as long as is wanted."""

    def __init__(self, begun: threading.Event, go: threading.Event) -> None:
        super().__init__()
        self.begun, self.go = begun, go

    def forward(self, x: Any) -> Any:
        self.begun.set()
        self.go.wait(NOT_YET_S)
        return x


@pytest.mark.usefixtures("_front")
def test_a_compiled_target_runs_on_while_a_drafter_is_traced(pool: ThreadPoolExecutor) -> None:
    """Called while anybody traces, compiled code raises."""
    replica: TargetReplica = TapsReplica(tiny_target("qwen3"), (1, 3), "compiled")
    batch = bucketed_batch(documents_of([9, 7]), 9)
    expected = [tap.clone() for tap in replica.forward(batch)]
    begun, go = threading.Event(), threading.Event()

    def trace() -> None:
        with BUILD_LOCK:
            torch.fx.symbolic_trace(Traced(begun, go))

    tracing = pool.submit(trace)
    assert begun.wait(AT_ONCE_S)
    running = pool.submit(replica.forward, batch)
    with pytest.raises(NotYet):
        running.result(NOT_YET_S / 4)
    go.set()
    tracing.result(AT_ONCE_S)
    for tap, was in zip(running.result(AT_ONCE_S), expected, strict=True):
        assert torch.equal(tap, was)
