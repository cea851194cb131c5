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

from draftmill.monitor.heartbeat import Heartbeat
from draftmill.pipeline import turns as turns_module
from draftmill.pipeline.channel import ChannelClosed
from draftmill.pipeline.features import FeatureCache
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

    def __init__(self, device: torch.device, told: Callable[[str], None] = lambda line: None) -> None:
        super().__init__(device, told)
        self.inside = self.most = 0
        self.order: list[bool] = []
        self.holders: set[int] = set()
        self._lock = threading.Lock()

    @contextmanager
    def take(self, first: bool, waits: Callable[[], None] = lambda: None) -> Iterator[None]:
        with super().take(first, waits):
            with self._lock:
                self.inside += 1
                self.most = max(self.most, self.inside)
                self.order.append(first)
                self.holders.add(threading.get_ident())
            try:
                yield
            finally:
                with self._lock:
                    self.inside -= 1
                    self.holders.remove(threading.get_ident())


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


@pytest.mark.parametrize(
    ("drafter_s", "target_s", "are_brief"),
    [(0.0, 0.0, True), (0.0, 0.03, False), (0.03, 0.0, False)],
    ids=["both brief", "long forwards", "long steps"],
)
def test_turns_that_are_brief_on_both_sides_are_given_up(drafter_s: float, target_s: float, are_brief: bool) -> None:
    told: list[str] = []
    turns = Watched(CPU, told.append)
    for _ in range(3):  # before the drafter is there
        with turns.take(False):
            time.sleep(0.03)
    for index in range(TRIED):
        with turns.take(True):
            time.sleep(0.1 if index == 0 else drafter_s)  # as the first one may be, for which kernels are loaded
        assert not told
        with turns.take(False):
            time.sleep(target_s)
    assert turns.are_taken != are_brief
    (line,) = told
    assert line.startswith(f"target and drafter on cpu {'compute side by side' if are_brief else 'take turns'}: ")

    def work() -> None:
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
    assert len(told) == 1


def test_who_has_had_a_turn_and_asks_again_at_once_is_before_a_target() -> None:
    """A drafter's next batch of the same step. Now and then the other thread is quicker."""
    orders = []
    for _ in range(20):
        turns = Watched(CPU)

        def work(turns: Watched = turns) -> None:
            with turns.take(False):
                pass

        with turns.take(True):
            threads = started(work)
            waiting(turns, 1)
        with turns.take(True):
            pass
        assert joined(threads)
        orders.append(turns.order)
    assert orders.count([True, True, False]) > 10


class FakeStream:
    def __init__(self) -> None:
        self.waits, self.done = 0, False

    def query(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        self.waits += 1


def test_a_host_waits_for_its_device_before_and_at_the_end_of_a_turn_and_never_once_they_are_brief(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream = FakeStream()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    turns = Turns(torch.device("cuda", 0))
    with turns.take(True):
        assert stream.waits == 1
        stream.done = True
    assert stream.waits == 1, "it was done already"
    stream.done = False
    for _ in range(TRIED):
        with turns.take(False):
            pass
        with turns.take(True):
            pass
    assert not turns.are_taken
    before = stream.waits
    with turns.take(False):
        pass
    assert stream.waits == before


def test_waiting_is_told_before_it_begins() -> None:
    turns, told = Turns(CPU), []

    def work() -> None:
        with turns.take(False, lambda: told.append("waits")):
            told.append("has it")

    with turns.take(True):
        threads = started(work)
        waiting(turns, 1)
        assert told == ["waits"]
    assert joined(threads)
    assert told == ["waits", "has it"]


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
    monkeypatch.setattr(assemble, "turns_on_shared", lambda targets, drafters, told: {CPU: made})
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


def test_what_computes_nothing_takes_no_turn_and_who_waits_says_so(
    world: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, turns: Watched
) -> None:
    had_turn: dict[str, list[bool]] = {"read": [], "keep": []}
    said: dict[str, set[str]] = {}

    def watched(name: str) -> Callable[..., Any]:
        real = getattr(FeatureCache, name)

        def call(*args: Any) -> Any:
            had_turn[name].append(threading.get_ident() in turns.holders)
            return real(*args)

        return call

    for name in had_turn:
        monkeypatch.setattr(FeatureCache, name, watched(name))

    def beat(self: Heartbeat, doing: str, *args: Any, **kwargs: Any) -> None:
        said.setdefault(self.name, set()).add(doing)
        real_beat(self, doing, *args, **kwargs)

    real_beat = Heartbeat.beat
    monkeypatch.setattr(Heartbeat, "beat", beat)
    train(config_of(world, f"run.dir={tmp_path / 'run'}", *SETTINGS, "target.cache_gib=1"), console=False)
    assert had_turn["read"]
    assert had_turn["keep"]
    assert not any(had_turn["read"] + had_turn["keep"])
    assert turns.order.count(False) == len(had_turn["keep"]), "one turn a forward, none where features were kept"
    assert {"waiting for a turn", "forward", "waiting for drafter"} <= said["target-0"]
    assert {"waiting for a turn", "working", "waiting for target"} <= said["drafter-0"]


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
