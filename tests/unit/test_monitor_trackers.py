"""Trackers as guests: real event files, and no harm from one that fails or dawdles."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from draftmill.errors import InputError
from draftmill.monitor import trackers
from draftmill.monitor.trackers import TRACKERS, TrackedRun, TrackerFeed, check_installed, tagged
from monitor_doubles import wait_until


def make_run(directory: Path) -> TrackedRun:
    return TrackedRun(directory, "draftmill", "abc", {"train": {"lr": 1e-3}})


def feed(directory: Path, first: int, last: int) -> None:
    reports: list[str] = []
    feed = TrackerFeed(["tensorboard"], make_run(directory), reports.append)
    feed.start()
    for step in range(first, last + 1):
        feed.put({"step": step, "loss": 1.0 / step, "accuracy_by_slot": [0.5, None, 0.25], "lr": None})
    feed.close()
    feed.close()
    assert reports == []


def test_tensorboard_reads_what_was_written_and_a_resume_replaces_steps(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    feed(tmp_path, 1, 6)
    feed(tmp_path, 4, 5)  # resumed from step 3
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert sorted(events.Tags()["scalars"]) == [
        "accuracy/accuracy_by_slot/01", "accuracy/accuracy_by_slot/03", "train/loss",
    ]  # fmt: skip
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [
        (step, pytest.approx(1.0 / step)) for step in (1, 2, 3, 4, 5)
    ]
    assert [e.value for e in events.Scalars("accuracy/accuracy_by_slot/03")] == [0.25] * 5


def test_tensorboard_needs_no_torch(tmp_path: Path) -> None:
    script = (
        "import sys\nfrom pathlib import Path\nfrom draftmill.monitor.trackers import TRACKERS, TrackedRun\n"
        "t = TRACKERS['tensorboard'](TrackedRun(Path(sys.argv[1]), 'p', 'i', {}))\n"
        "t.log(1, 0.0, {'a': 1.0})\nt.close()\n"
        "print([m for m in ('torch', 'tensorflow') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


class Broken:
    """Takes two steps, then fails."""

    def __init__(self, run: TrackedRun) -> None:
        self.num = 0

    def log(self, step: int, time_s: float, figures: dict[str, float]) -> None:
        self.num += 1
        if self.num > 2:
            raise ConnectionError("server gone")

    def close(self) -> None:
        raise AssertionError("a tracker that failed is not called again")


class Good:
    """Keeps what it is given."""

    seen: list[tuple[int, dict[str, float]]] = []  # noqa: RUF012

    def __init__(self, run: TrackedRun) -> None:
        type(self).seen = []

    def log(self, step: int, time_s: float, figures: dict[str, float]) -> None:
        self.seen.append((step, figures))

    def close(self) -> None:
        self.seen.append((-1, {}))


def never_opens(run: TrackedRun) -> Good:
    """A tracker without its key."""
    raise RuntimeError("no key")


def test_one_that_fails_is_told_once_and_the_others_go_on(tmp_path: Path) -> None:
    reports: list[str] = []
    choice = {"broken": Broken, "good": Good, "closed": never_opens}
    feed = TrackerFeed(["closed", "broken", "good"], make_run(tmp_path), reports.append, choice)
    feed.start()
    for step in range(1, 6):
        feed.put({"step": step, "loss": 0.5})
    feed.close()
    assert reports == [
        "tracker closed failed and is left out: RuntimeError: no key",
        "tracker broken failed and is left out: ConnectionError: server gone",
    ]
    assert Good.seen == [(step, {"train/loss": 0.5}) for step in range(1, 6)] + [(-1, {})]


def test_one_that_hangs_delays_neither_a_step_nor_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers, "_MAX_WAITING", 5)
    monkeypatch.setattr(trackers, "_CLOSE_S", 0.2)
    ending = threading.Event()

    class Hanging(Good):
        def log(self, step: int, time_s: float, figures: dict[str, float]) -> None:
            ending.wait()

    reports: list[str] = []
    feed = TrackerFeed(["hanging"], make_run(tmp_path), reports.append, {"hanging": Hanging})
    feed.start()
    wait_until(lambda: Hanging.seen == [], "it to be open")
    began = time.monotonic()
    for step in range(50):
        feed.put({"step": step, "loss": 0.5})
    feed.close()
    assert time.monotonic() - began < 5.0
    assert reports == [
        "trackers are too slow: records are left out of them; metrics.jsonl has them all",
        "trackers did not end within 0 s and were left",
    ]
    ending.set()


def test_a_long_run_of_fast_steps_is_thinned_out_but_its_evaluations_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trackers, "_NUM_DENSE", 10)
    monkeypatch.setattr(trackers, "_SPARSE_S", 1000.0)
    feed = TrackerFeed(["good"], make_run(tmp_path), print, {"good": Good})
    feed.start()
    for step in range(1, 41):
        feed.put({"step": step, "loss": 0.5})
        if step % 20 == 0:
            feed.put({"step": step, "accept_length": 2.0})
    feed.close()
    assert [step for step, figures in Good.seen if "train/loss" in figures] == list(range(1, 11))
    assert [step for step, figures in Good.seen if "acceptance/accept_length" in figures] == [20, 40]


def test_tags_group_numbers_and_leave_out_what_is_none() -> None:
    record = {"step": 3, "loss": 1.5, "lr": None, "accept_by_slot": [0.9, 0.8], "mine": 2, "flag": True, "text": "x"}
    assert tagged(record) == {
        "train/loss": 1.5,
        "acceptance/accept_by_slot/01": 0.9,
        "acceptance/accept_by_slot/02": 0.8,
        "other/mine": 2.0,
    }


def test_a_missing_package_is_refused_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "wandb" else object())
    check_installed(["tensorboard", "mlflow"])
    with pytest.raises(InputError, match=r"names wandb, which is not installed; `pip install 'draftmill\[wandb\]'`"):
        check_installed(["tensorboard", "wandb"])


def test_the_choices_are_those_of_the_configuration() -> None:
    from typing import get_args

    from draftmill.config import MonitorConfig

    choices = get_args(get_args(MonitorConfig.model_fields["trackers"].annotation)[0])
    assert set(choices) == set(TRACKERS)
