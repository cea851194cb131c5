"""A run that fails: the first failure wins, names who and where, ends everything within seconds, and harms nothing.

Supervision alone first, then whole runs in which a part raises or hangs.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest
import torch

from draftmill.checkpoint import checkpoints, load, store
from draftmill.data import loader as loading
from draftmill.monitor.phases import Phase
from draftmill.monitor.status import read_status
from draftmill.pipeline.channel import ChannelClosed
from draftmill.pipeline.supervision import Stalled, StallWatch, Supervisor, Worker, WorkerFailed, within
from draftmill.pipeline.team import Team
from draftmill.records import HostBatch
from draftmill.train import replica as replicas
from draftmill.train import run as run_module
from draftmill.train.loading import TapsReplica
from draftmill.train.report import NotFinite
from draftmill.train.run import train
from tiny import config_of, metrics_of, small_world

SOON_S = 5.0
"""Nothing here takes long; a test that waits this long has failed."""


# Supervision


class Raises(Worker):
    def __init__(self, supervisor: Supervisor, name: str, error: BaseException) -> None:
        super().__init__(name, "cpu", supervisor)
        self.error, self.events = error, []
        self.doing, self.step = "at step 3, batch 7 (epoch 1, index 7)", 3

    def work(self) -> None:
        raise self.error

    def leave(self) -> None:
        self.events.append("left")


def test_the_first_failure_wins_and_closes_everything_once() -> None:
    supervisor, closed = Supervisor(), []
    supervisor.on_close(lambda: closed.append("a"))
    supervisor.on_close(lambda: closed.append("b"))
    first = Raises(supervisor, "drafter-1", ArithmeticError("made up"))
    second = Raises(supervisor, "target-0", ValueError("a consequence"))
    for worker in (first, second):
        worker.start()
        worker.join(SOON_S)
    supervisor.on_close(lambda: closed.append("late"))
    supervisor.close()
    assert closed == ["a", "b", "late"]
    assert first.events == second.events == ["left"]
    with pytest.raises(WorkerFailed) as caught:
        supervisor.check()
    assert str(caught.value) == (
        "worker drafter-1 on cpu failed at step 3, batch 7 (epoch 1, index 7): ArithmeticError: made up"
    )
    assert (caught.value.worker, caught.value.device, caught.value.step) == ("drafter-1", "cpu", 3)
    assert isinstance(caught.value.__cause__, ArithmeticError)


def test_every_kind_of_end_of_a_worker() -> None:
    told: dict[str, str | None] = {}
    errors: dict[str, BaseException] = {
        "closed": ChannelClosed(),
        "memory": MemoryError(),
        "exit": SystemExit(3),
        "told": WorkerFailed("loader", "cpu", "reading ahead", OSError("disk")),
    }
    for name, error in errors.items():
        supervisor = Supervisor()
        worker = Raises(supervisor, name, error)
        worker.start()
        worker.join(SOON_S)
        told[name] = str(supervisor.failure) if supervisor.failure is not None else None
    where = "at step 3, batch 7 (epoch 1, index 7)"
    assert told == {
        "closed": None,
        "memory": f"worker memory on cpu failed {where}: MemoryError",
        "exit": f"worker exit on cpu failed {where}: SystemExit: 3",
        "told": "worker loader on cpu failed reading ahead: OSError: disk",
    }


def test_a_closer_that_raises_keeps_none_from_being_closed() -> None:
    supervisor, closed = Supervisor(), []

    def bad() -> None:
        raise OSError("made up")

    supervisor.on_close(bad)
    supervisor.on_close(lambda: closed.append("b"))
    with pytest.raises(OSError, match="made up"):
        supervisor.close()
    assert closed == ["b"]
    supervisor.close()


def watch_of(
    supervisor: Supervisor, idle_s: Callable[[], float], stall_s: float, grace_s: float
) -> tuple[StallWatch, list[str]]:
    events: list[str] = []
    supervisor.on_close(lambda: events.append("closed"))
    watch = StallWatch(
        supervisor, idle_s, stall_s, lambda: events.append("stacks"), lambda: events.append("abandoned"), grace_s
    )
    watch.start()
    return watch, events


def test_a_stall_is_written_down_before_anything_is_closed() -> None:
    supervisor, began = Supervisor(), time.monotonic()
    watch, events = watch_of(supervisor, lambda: time.monotonic() - began, 0.1, 0.1)
    watch.join(SOON_S)
    assert events == ["stacks", "closed", "abandoned"], "the main thread never left: it hangs itself"
    with pytest.raises(Stalled, match=r"no worker has made progress for 0.1 s"):
        supervisor.check()


def test_a_main_thread_that_leaves_is_not_abandoned_and_progress_holds_the_stall_off() -> None:
    supervisor = Supervisor()
    watch, events = watch_of(supervisor, lambda: 0.0, 0.02, 0.05)
    watch.join(0.2)
    assert watch.is_alive()
    assert events == []
    watch.left()
    watch.join(SOON_S)
    assert not watch.is_alive()
    assert events == []
    supervisor.fail(WorkerFailed("a", "cpu", "", ValueError()))
    watch, events = watch_of(Supervisor(), lambda: 9.0, 0.02, 5.0)
    watch.join(0.1)
    watch.left()
    watch.join(SOON_S)
    assert not watch.is_alive()
    assert events == ["stacks", "closed"]


def test_a_call_that_may_never_return_is_waited_for_only_so_long() -> None:
    release = threading.Event()

    def bad() -> None:
        raise ArithmeticError("made up")

    assert within(SOON_S, lambda: None, "nothing") is None
    assert isinstance(within(SOON_S, bad, "bad"), ArithmeticError)
    assert str(within(0.05, release.wait, "the save")) == "the save has not ended within 0.05 s"
    release.set()


# Whole runs


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    sections = small_world(tmp_path_factory.mktemp("world"))
    sections["data"]["heldout"] = 0
    sections["checkpoint"] = {"every_steps": 2, "keep_last": 20}
    return sections


LAYOUTS = {"one": (1, 1), "several": (2, 3)}


def layout_of(name: str) -> tuple[str, str]:
    targets, drafters = LAYOUTS[name]
    return f"target.devices=[{', '.join(['cpu'] * targets)}]", f"drafter.devices=[{', '.join(['cpu'] * drafters)}]"


def fail_at(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, call: int, error: BaseException) -> None:
    """Let the owner's function raise at a call, counted over all threads from 1."""
    original, calls = getattr(owner, name), []

    def failing(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == call:
            raise error
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, failing)


def workers_alive() -> list[str]:
    return [thread.name for thread in threading.enumerate() if isinstance(thread, Worker)]


def crashed(folder: Path, *said: str) -> None:
    """What is left of a crashed run: its verdict, its log, and nothing that still runs."""
    status = read_status(folder)
    assert (status.phase, status.exit_code) == (Phase.CRASHED, 5)
    log = (folder / "run.log").read_text()
    for text in said:
        assert text in status.reason
        assert text in log
    assert "Traceback (most recent call last):" in log
    assert workers_alive() == []


def assert_saved(folder: Path, newest: Sequence[int]) -> None:
    """The newest checkpoint is of one of these steps, 0 for none, and every second step up to it has a good one."""
    steps = [load(entry.folder).step for entry in checkpoints(folder)]
    last = max(steps, default=0)
    assert last in newest
    assert steps == list(range(2, last + 1, 2))


AHEAD = range(2, 9)
"""The newest checkpoint where a part that runs ahead of the drafters fails at step 9: how far ahead is not fixed."""


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("owner", "name", "step", "said", "newest"),
    [
        (TapsReplica, "forward", 9, "worker target-", AHEAD),
        (replicas.Replica, "accumulate", 8, "worker drafter-", [6]),
        (replicas.Replica, "update", 4, "worker drafter-", [2]),
        (loading, "draw_anchors", 9, "worker loader on cpu failed reading ahead", AHEAD),
    ],
    ids=["target", "drafter", "update", "loader"],
)
def test_an_exception_in_any_worker_ends_the_run_and_keeps_the_last_checkpoint(
    world: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    layout: str,
    owner: Any,
    name: str,
    step: int,
    said: str,
    newest: Sequence[int],
) -> None:
    """At the first of the step's calls, one for each drafter."""
    _, drafters = LAYOUTS[layout]
    fail_at(monkeypatch, owner, name, (step - 1) * drafters + 1, ArithmeticError("made up"))
    began = time.monotonic()
    with pytest.raises(WorkerFailed) as caught:
        train(config_of(world, f"run.dir={tmp_path / 'run'}", "train.epochs=4", *layout_of(layout)), console=False)
    assert time.monotonic() - began < 4 * SOON_S
    assert str(caught.value).startswith(said)
    assert str(caught.value).endswith("ArithmeticError: made up")
    assert "batch " in str(caught.value), "which batch it was at is named"
    assert isinstance(caught.value.__cause__, ArithmeticError)
    crashed(tmp_path / "run", str(caught.value))
    assert_saved(tmp_path / "run", newest)


@pytest.mark.parametrize(
    ("batch", "step", "where"),
    [
        (3, 4, "at step 4, batch 3 (epoch 1, index 3)"),
        (5, 5, "at evaluate 5, batch 5 (held out, index 0)"),
        (8, 7, "at step 7, batch 8 (epoch 1, index 6)"),
    ],
)
def test_a_target_that_fails_names_the_step_that_its_batch_is_for(
    world: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batch: int, step: int, where: str
) -> None:
    forward = TapsReplica.forward

    def failing(self: TapsReplica, given: HostBatch) -> list[torch.Tensor]:
        if given.sequence == batch:
            raise ArithmeticError("made up")
        return forward(self, given)

    monkeypatch.setattr(TapsReplica, "forward", failing)
    config = config_of(
        world, f"run.dir={tmp_path / 'run'}", "data.heldout=4", "train.evaluate_every=5", "train.max_steps=8"
    )
    with pytest.raises(WorkerFailed) as caught:
        train(config, console=False)
    assert str(caught.value) == f"worker target-0 on cpu failed {where}: ArithmeticError: made up"
    assert caught.value.step == step
    crashed(tmp_path / "run", where)


def test_a_drafter_that_fails_while_the_others_wait_for_it_ends_them(
    world: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others are in the sum over all drafters, whose own time limit is 20 minutes."""
    original = replicas.Replica.reducible

    def failing(self: replicas.Replica) -> list[torch.Tensor]:
        if threading.current_thread().name == "drafter-1":
            time.sleep(0.3)
            raise ArithmeticError("made up")
        return original(self)

    monkeypatch.setattr(replicas.Replica, "reducible", failing)
    began = time.monotonic()
    with pytest.raises(WorkerFailed, match="worker drafter-1 on cpu failed at step 1, batch 1"):
        train(config_of(world, f"run.dir={tmp_path / 'run'}", *layout_of("several")), console=False)
    assert time.monotonic() - began < 2 * SOON_S
    crashed(tmp_path / "run", "made up")


@pytest.mark.parametrize("phase", ["build", "snapshot"])
def test_failures_while_warming_up_and_while_saving(
    world: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    if phase == "build":
        fail_at(monkeypatch, replicas.Replica, "__init__", 2, MemoryError())
        said = "failed while starting: MemoryError"
    else:
        fail_at(monkeypatch, replicas.Replica, "snapshot", 2, MemoryError())
        said = "failed at snapshot 2: MemoryError"
    with pytest.raises(WorkerFailed, match=said):
        train(config_of(world, f"run.dir={tmp_path / 'run'}", *layout_of("several")), console=False)
    crashed(tmp_path / "run", said)


def test_a_checkpoint_that_is_not_written_ends_the_run_at_the_next(
    world: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_at(monkeypatch, store, "write_tensors", 3, OSError(28, "No space left on device", "drafter.safetensors"))
    with pytest.raises(WorkerFailed, match=r"worker drafter-0 on cpu failed at snapshot 6: InputError: checkpoint .*"):
        train(config_of(world, f"run.dir={tmp_path / 'run'}"), console=False)
    crashed(tmp_path / "run", "step-4 was not written: No space left on device")
    assert [(entry.step, entry.problem) for entry in checkpoints(tmp_path / "run")] == [(2, None)]


def test_the_first_failure_is_told_though_the_writer_fails_after_it(
    world: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_at(monkeypatch, replicas.Replica, "update", 5, ArithmeticError("the first"))
    fail_at(monkeypatch, store, "write_tensors", 3, OSError(28, "No space left on device", "drafter.safetensors"))
    with pytest.raises(WorkerFailed, match="ArithmeticError: the first"):
        train(config_of(world, f"run.dir={tmp_path / 'run'}"), console=False)
    crashed(tmp_path / "run", "the first")
    assert "the last checkpoint was not written: checkpoint" in (tmp_path / "run" / "run.log").read_text()


# Hanging


@pytest.fixture
def blocked(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Lets a function hang at a call until the test is over."""
    release = threading.Event()

    def block(owner: Any, name: str, call: int) -> None:
        original, calls = getattr(owner, name), []

        def hangs_here(*args: Any, **kwargs: Any) -> Any:
            calls.append(1)
            if len(calls) == call:
                release.wait()
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, hangs_here)

    yield block
    release.set()
    for thread in threading.enumerate():
        if isinstance(thread, Worker):
            thread.join(SOON_S)


@pytest.mark.parametrize(
    ("owner", "name", "call", "thread", "newest"),
    [
        (TapsReplica, "forward", 25, "target-", AHEAD),
        (replicas.Replica, "accumulate", 13, "drafter-", [4]),  # the first of step 5
        (replicas.Replica, "__init__", 2, "drafter-", [0]),
        (loading, "draw_anchors", 9, "draftmill-loader", [2]),  # two steps of three batches lie before it
        (store, "write_tensors", 3, "checkpoint-writer", [2]),  # two files to a checkpoint
    ],
    ids=["target", "drafter", "warming up", "loader", "writer"],
)
def test_whoever_hangs_the_run_ends_as_stalled_with_all_stacks_in_its_log(
    world: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    blocked: Callable[..., None],
    owner: Any,
    name: str,
    call: int,
    thread: str,
    newest: Sequence[int],
) -> None:
    blocked(owner, name, call)
    monkeypatch.setattr("draftmill.train.assemble.Team.abandon", partialmethod(Team.abandon, timeout_s=0.5))
    monkeypatch.setattr("draftmill.train.saving.LAST_SAVE_S", 0.2)
    overrides = ("pipeline.stall_s=1", "train.epochs=4", *layout_of("several"))
    began = time.monotonic()
    with pytest.raises(Stalled, match="no worker has made progress for 1 s"):
        train(config_of(world, f"run.dir={tmp_path / 'run'}", *overrides), console=False)
    assert time.monotonic() - began < 3 * SOON_S
    status = read_status(tmp_path / "run")
    assert (status.phase, status.exit_code) == (Phase.STALLED, 4)
    stacks = (tmp_path / "run" / "run.log").read_text().split("Stacks of all threads:", 1)[1]
    parts = [part.split("\n\n")[0] for part in stacks.split("Thread ")[1:]]
    hanging = next(part for part in parts if "in hangs_here" in part)
    assert hanging.startswith(thread)
    assert "Thread MainThread:" in stacks
    assert_saved(tmp_path / "run", newest)


# Stopping


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_signal_lets_the_step_finish_saves_and_stops(
    world: dict[str, Any], tmp_path: Path, number: signal.Signals, layout: str
) -> None:
    def observe(record: dict[str, Any]) -> None:
        if record["step"] == 3:
            os.kill(os.getpid(), number)

    config = config_of(world, f"run.dir={tmp_path / 'run'}", "checkpoint.every_steps=1000", *layout_of(layout))
    train(config, console=False, observe=observe)
    status = read_status(tmp_path / "run")
    assert (status.phase, status.exit_code) == (Phase.STOPPED, 0)
    steps = [line["step"] for line in metrics_of(tmp_path / "run") if "loss" in line]
    (entry,) = checkpoints(tmp_path / "run")
    # Read in the result of step 3, when the next one or two were with the drafters.
    assert entry.step == steps[-1] in (5, 6)
    assert not load(entry.folder).state["finished"]
    assert workers_alive() == []


def test_asked_to_stop_while_loading_it_stops_before_it_trains(
    world: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = run_module.load_targets

    def interrupted(*args: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return original(*args)

    with monkeypatch.context() as patch:
        patch.setattr(run_module, "load_targets", interrupted)
        train(config_of(world, f"run.dir={tmp_path / 'run'}"), console=False)
    assert read_status(tmp_path / "run").phase is Phase.STOPPED
    assert metrics_of(tmp_path / "run") == []
    train(config_of(world, f"run.dir={tmp_path / 'run'}", "train.max_steps=2"), console=False)
    assert read_status(tmp_path / "run").phase is Phase.FINISHED, "nothing stands in the way of another start"


# Numbers that are none


@pytest.mark.parametrize("what", ["gradient", "loss"])
def test_a_step_that_is_not_finite_never_reaches_the_weights(
    world: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Neither where the gradient is not finite, nor where the loss alone is."""
    original, update = replicas.Replica.accumulate, replicas.Replica.update
    weights: list[torch.Tensor] = []

    def accumulate(self: replicas.Replica) -> None:
        original(self)
        if len(weights) == 4:
            (self.state.flat.gradient if what == "gradient" else self.state.totals)[0] = float("inf")

    def recorded(self: replicas.Replica, step: int) -> None:
        update(self, step)
        weights.append(self.state.flat.master.clone())

    monkeypatch.setattr(replicas.Replica, "accumulate", accumulate)
    monkeypatch.setattr(replicas.Replica, "update", recorded)
    with pytest.raises(NotFinite, match=r"step 5: loss .*, gradient norm .*; the update was not applied") as caught:
        train(config_of(world, f"run.dir={tmp_path / 'run'}"), console=False)
    assert caught.value.step == 5
    assert not torch.equal(weights[3], weights[2])
    assert torch.equal(weights[4], weights[3]), "step 5 changed nothing"
    crashed(tmp_path / "run", "step 5")
    entries = checkpoints(tmp_path / "run")
    assert [entry.step for entry in entries] == [2, 4]
    assert [line["step"] for line in metrics_of(tmp_path / "run")] == [1, 2, 3, 4]


def test_drafters_that_no_longer_hold_the_same_weights_end_the_run(
    world: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One bit of one drafter's masters, after the second step: the next evaluation tells."""
    update = replicas.Replica.update
    seen: list[replicas.Replica] = []

    def one_bit_off(self: replicas.Replica, step: int) -> None:
        update(self, step)
        if step == 1:
            seen.append(self)
            if len(seen) == 2:
                self.state.flat.master.view(torch.int32)[3] += 1

    monkeypatch.setattr(replicas.Replica, "update", one_bit_off)
    with pytest.raises(RuntimeError, match="the drafters' weights differ from each other"):
        train(
            config_of(
                world,
                f"run.dir={tmp_path / 'run'}",
                "drafter.devices=[cpu, cpu]",
                "train.evaluate_every=2",
                "data.heldout=4",
            ),
            console=False,
        )
    assert len(seen) == 2
    assert read_status(tmp_path / "run").phase is Phase.CRASHED
