"""The figures in a checkpoint are of its own weights, or there are none; best, exports and the rest go by them."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from draftmill.checkpoint import checkpoints, export, load, read_source, store
from draftmill.monitor.metrics import read_metrics
from draftmill.train.run import train
from tiny import config_of, small_world


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    sections = small_world(tmp_path_factory.mktemp("world"))
    sections["train"].update(evaluate_every=2, max_steps=10)
    sections["checkpoint"] = {"every_steps": 3, "keep_last": 99}
    return sections


@pytest.fixture(scope="module")
def run(world: dict[str, Any]) -> Path:
    return train(config_of(world), console=False)


def measured(run: Path) -> dict[int, dict[str, Any]]:
    return {record["step"]: record for record in read_metrics(run).evaluations}


def test_a_checkpoint_has_the_figure_of_its_own_step_or_none(run: Path) -> None:
    evaluations = measured(run)
    assert list(evaluations) == [2, 4, 6, 8, 10]
    lengths = {step: record["accept_length"] for step, record in evaluations.items()}
    assert {entry.step: entry.accept_length for entry in checkpoints(run)} == {
        3: None,
        6: lengths[6],
        9: None,
        10: lengths[10],
    }


def test_one_without_a_figure_is_kept_as_one_of_the_newest_alone(world: dict[str, Any], tmp_path: Path) -> None:
    """Saves at 3, 6, 9 and 10, where there are more places for the best than figures."""
    keep = ("checkpoint.keep_last=1", "checkpoint.keep_best=3")
    train(config_of(world, f"run.dir={tmp_path}", *keep), console=False)
    assert [entry.step for entry in checkpoints(tmp_path)] == [6, 10]


def test_a_stop_between_two_evaluations_saves_without_a_figure(world: dict[str, Any], tmp_path: Path) -> None:
    def stop(record: dict[str, Any]) -> None:
        if record["step"] == 2 and "loss" in record:
            os.kill(os.getpid(), signal.SIGTERM)

    rare = ("train.evaluate_every=1000", "checkpoint.every_steps=1000")
    train(config_of(world, f"run.dir={tmp_path}", *rare), console=False, observe=stop)
    (entry,) = checkpoints(tmp_path)
    assert 2 <= entry.step < 10
    assert entry.accept_length is None
    assert read_source(tmp_path).note == f"step-{entry.step}, the newest; none was evaluated"
    train(config_of(world, f"run.dir={tmp_path}", *rare), resume=True, console=False)
    assert checkpoints(tmp_path)[-1].accept_length == measured(tmp_path)[10]["accept_length"]


def test_a_run_told_to_save_where_nothing_is_measured_says_so(world: dict[str, Any], run: Path, tmp_path: Path) -> None:
    said = "2 of 3 checkpoints by steps before the end will have no held-out acceptance length"
    assert said in (run / "run.log").read_text()
    train(config_of(world, f"run.dir={tmp_path}", "checkpoint.every_steps=4"), console=False)
    assert "will have no held-out" not in (tmp_path / "run.log").read_text()


def test_an_export_of_a_run_shows_what_was_measured_on_its_weights(run: Path, tmp_path: Path) -> None:
    best = store.best(run)
    assert best is not None
    record = measured(run)[best.step]
    assert len(record["accept_by_slot"]) == 3
    assert load(best.folder).state["accept_by_slot"] == record["accept_by_slot"]
    export(run, "zlab", tmp_path / "best")
    card = (tmp_path / "best" / "README.md").read_text()
    assert f"acceptance length {record['accept_length']:.3f} tokens a block" in card
    shares = " | ".join(f"{share:.3f}" for share in record["accept_by_slot"])
    assert f"| slot | 1 | 2 | 3 |\n|---|---|---|---|\n| accepted | {shares} |\n" in card
    export(run / "checkpoints" / "step-9", "zlab", tmp_path / "other")
    assert "Not measured yet" in (tmp_path / "other" / "README.md").read_text(), "step 8's figures are not step 9's"
