"""Turns on a device that targets and drafters share: one at a time, drafters first, nobody left waiting."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from draftmill.pipeline import turns as turns_module
from draftmill.pipeline.channel import ChannelClosed
from draftmill.pipeline.supervision import WorkerFailed
from draftmill.pipeline.turns import TRIED, Turns, turns_on_shared
from draftmill.train import assemble
from draftmill.train.replica import Replica
from draftmill.train.run import train
from tiny import config_of, metrics_of, small_world

CPU = torch.device("cpu")
SOON_S = 5.0


class Watched(Turns):
    """Turns that count who has one."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.inside = self.most = 0
        self.order: list[bool] = []
        self._lock = threading.Lock()

    @contextmanager
    def take(self, first: bool) -> Iterator[None]:
        with super().take(first):
            with self._lock:
                self.inside += 1
                self.most = max(self.most, self.inside)
                self.order.append(first)
            try:
                yield
            finally:
                with self._lock:
                    self.inside -= 1


@pytest.fixture
def _never_brief(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns_module, "BRIEF_S", 0.0)


def started(*works: Callable[[], object]) -> list[threading.Thread]:
    threads = [threading.Thread(target=work, daemon=True) for work in works]
    for thread in threads:
        thread.start()
    return threads


def joined(threads: list[threading.Thread]) -> bool:
    for thread in threads:
        thread.join(SOON_S)
    return not any(thread.is_alive() for thread in threads)


def waiting(turns: Turns, count: int) -> None:
    """Until so many threads wait."""
    deadline = time.monotonic() + SOON_S
    while len(turns._changed._waiters) < count:  # type: ignore[attr-defined]
        assert time.monotonic() < deadline
        time.sleep(0.002)


@pytest.mark.usefixtures("_never_brief")
def test_one_at_a_time() -> None:
    turns, done = Watched(CPU), []

    def work(first: bool) -> None:
        for _ in range(20):
            with turns.take(first):
                time.sleep(0.0005)
        done.append(first)

    assert joined(started(*(lambda first=first: work(first) for first in (False, True, False))))
    assert len(done) == 3
    assert turns.most == 1
    assert len(turns.order) == 60


def test_who_asks_to_be_first_is_the_next() -> None:
    turns = Watched(CPU)

    def work(first: bool) -> None:
        with turns.take(first):
            pass

    with turns.take(False):
        threads = started(lambda: work(False), lambda: work(False))
        waiting(turns, 2)
        threads += started(lambda: work(True))
        waiting(turns, 3)
    assert joined(threads)
    assert turns.order == [False, True, False, False]


def test_closing_wakes_those_who_wait_and_refuses_those_who_come() -> None:
    turns, ended = Turns(CPU), []

    def work(first: bool) -> None:
        try:
            with turns.take(first):
                ended.append("had a turn")
        except ChannelClosed:
            ended.append("closed")

    with turns.take(False):
        threads = started(lambda: work(False), lambda: work(True))
        waiting(turns, 2)
        turns.close()
        turns.close()
        assert joined(threads)
    work(True)
    assert ended == ["closed"] * 3


def test_a_turn_that_fails_is_over() -> None:
    turns = Turns(CPU)
    with pytest.raises(ArithmeticError), turns.take(True):
        raise ArithmeticError
    with turns.take(False):
        pass


def test_brief_turns_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    for brief_s, are_brief in ((1.0, True), (1e-9, False)):
        monkeypatch.setattr(turns_module, "BRIEF_S", brief_s)
        turns = Watched(CPU)
        for _ in range(TRIED - 1):
            with turns.take(False):
                time.sleep(0.0002)
        assert not turns._are_brief
        with turns.take(True):
            pass
        assert turns._are_brief == are_brief

        def work(turns: Watched = turns) -> None:
            with turns.take(False):
                pass

        with turns.take(True):
            threads = started(work)
            if are_brief:
                assert joined(threads)
            else:
                waiting(turns, 1)
        assert joined(threads)
        assert turns.most == (2 if are_brief else 1)


def test_one_slow_turn_among_brief_ones_does_not_count() -> None:
    """As the first on a device may be, for which kernels are loaded."""
    turns = Turns(CPU)
    for index in range(TRIED):
        with turns.take(False):
            time.sleep(0.1 if index == 0 else 0.0)
    assert turns._are_brief


def test_which_devices_are_shared() -> None:
    a, b, c = (torch.device("cuda", index) for index in range(3))
    assert set(turns_on_shared([(a,), (b,)], [a, b])) == {a, b}
    assert set(turns_on_shared([(a,), (b,)], [b])) == {b}
    assert set(turns_on_shared([(a,), (a,), (b,)], [a, c])) == {a}
    assert not turns_on_shared([(a,), (b,)], [c])
    assert not turns_on_shared([(a, b)], [b])  # one target over both
    assert not turns_on_shared([(CPU,)], [CPU])  # workers on a CPU have its cores in turns anyway


# Whole runs, with turns where a run on a CPU has none


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return small_world(tmp_path_factory.mktemp("world"))


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch, _never_brief: None) -> Watched:
    made = Watched(CPU)
    monkeypatch.setattr(assemble, "turns_on_shared", lambda targets, drafters: {CPU: made})
    return made


SETTINGS = ("train.epochs=2", "train.accumulate=2", "train.anchor_draws=2", "data.heldout=4", "train.evaluate_every=3")


@pytest.mark.parametrize("devices", [(1, 1), (2, 2)])
def test_a_run_in_turns_is_the_same_run(
    world: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, turns: Watched, devices: tuple[int, int]
) -> None:
    targets, drafters = (f"[{', '.join(['cpu'] * count)}]" for count in devices)
    layout = (f"target.devices={targets}", f"drafter.devices={drafters}", *SETTINGS)

    def losses(name: str) -> list[Any]:
        train(config_of(world, f"run.dir={tmp_path / name}", *layout), console=False)
        lines = metrics_of(tmp_path / name)
        assert all(line[key] >= 0.0 for line in lines for key in ("target_wait_s", "drafter_wait_s") if key in line)
        return [line.get("loss", line.get("accept_length")) for line in lines]

    in_turns = losses("turns")
    assert turns.most == 1
    assert turns.order.count(True) >= len(in_turns)
    assert turns.order.count(False) > 4
    monkeypatch.undo()
    assert losses("beside") == in_turns


def test_a_failure_within_a_turn_ends_the_run(
    world: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, turns: Watched
) -> None:
    calls = []

    def fails(self: Replica) -> None:
        calls.append(self)
        if len(calls) == 3:
            raise ArithmeticError("made up")
        accumulate(self)

    accumulate = Replica.accumulate
    monkeypatch.setattr(Replica, "accumulate", fails)
    began = time.monotonic()
    with pytest.raises(WorkerFailed, match=r"drafter-\d on cpu failed at step .*ArithmeticError: made up"):
        train(config_of(world, f"run.dir={tmp_path / 'run'}", *SETTINGS, "target.devices=[cpu, cpu]"), console=False)
    assert time.monotonic() - began < 60.0
    assert turns.inside == 0
