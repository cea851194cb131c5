"""Several drafters, one checkpoint (case B27): one writes, nobody waits for it, and a save takes no part in a sum."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from draftmill.checkpoint import background, checkpoints, load
from draftmill.monitor.metrics import read_metrics
from draftmill.pipeline.collective import Collective
from draftmill.train.run import train
from tiny import config_of, small_world

DRAFTERS = 3
SOON_S = 30.0


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    sections = small_world(tmp_path_factory.mktemp("world"))
    sections["data"]["heldout"] = 0
    sections["drafter"]["devices"] = ["cpu"] * DRAFTERS
    sections["checkpoint"] = {"every_steps": 2, "keep_last": 99}
    return sections


def saved_lines(folder: Path) -> list[str]:
    log = (folder / "run.log").read_text().splitlines()
    return [line.partition("saved ")[2].split()[0] for line in log if "| saved step-" in line]


def test_each_checkpoint_is_written_once_and_by_the_first_drafter_alone(
    world: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writers: list[tuple[str, int]] = []
    save = background.BackgroundSaver.save

    def told(self: background.BackgroundSaver, step: int, *arguments: Any, **options: Any) -> Any:
        writers.append((threading.current_thread().name, step))
        return save(self, step, *arguments, **options)

    monkeypatch.setattr(background.BackgroundSaver, "save", told)
    train(config_of(world, f"run.dir={tmp_path}", "train.epochs=3"), console=False)
    steps = len(read_metrics(tmp_path).steps)
    expected = sorted({*range(2, steps + 1, 2), steps})
    assert len(expected) > 3
    assert writers == [("drafter-0", step) for step in expected]
    assert saved_lines(tmp_path) == [f"step-{step}" for step in expected]
    assert [(entry.step, entry.problem) for entry in checkpoints(tmp_path)] == [(step, None) for step in expected]
    assert load(checkpoints(tmp_path)[-1].folder).state["finished"]


def test_no_drafter_waits_while_a_checkpoint_is_on_its_way_to_the_disk(
    world: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one is held up on the disk until all drafters have done the step after it."""
    went_on, in_time = threading.Event(), []
    write = background.BackgroundSaver._write

    def slow(self: background.BackgroundSaver, step: int, state: dict[str, Any]) -> None:
        if step == 2:
            in_time.append(went_on.wait(SOON_S))
        write(self, step, state)

    def observe(record: dict[str, Any]) -> None:
        if record["step"] == 3:
            went_on.set()

    monkeypatch.setattr(background.BackgroundSaver, "_write", slow)
    overrides = ("train.epochs=1", "train.max_steps=6", "checkpoint.every_steps=2")
    train(config_of(world, f"run.dir={tmp_path}", *overrides), console=False, observe=observe)
    assert in_time == [True]


def test_saving_enters_no_sum(world: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever only the writer did in a sum, the others would miss: as many sums with saves as without."""
    counts: list[dict[str, int]] = []
    sum_ = Collective.sum_

    def counted(self: Collective, *tensors: Any) -> None:
        name = threading.current_thread().name
        counts[-1][name] = counts[-1].get(name, 0) + 1
        sum_(self, *tensors)

    monkeypatch.setattr(Collective, "sum_", counted)
    for every in (1, 10**6):
        counts.append({})
        run = tmp_path / str(every)
        train(config_of(world, f"run.dir={run}", f"checkpoint.every_steps={every}", "train.epochs=1"), console=False)
    steps = len(read_metrics(run).steps)
    assert counts == [{f"drafter-{number}": steps for number in range(DRAFTERS)}] * 2
