"""Exact resume: a run that was cut anywhere ends as the one that was not; on the CPU bit for bit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from draftmill.checkpoint import checkpoints, latest, load
from draftmill.errors import InputError
from draftmill.monitor.metrics import read_metrics
from draftmill.monitor.phases import Phase
from draftmill.monitor.status import read_status
from draftmill.train.run import train
from tiny import config_of, metrics_of, small_world

NUM_KILLS = int(os.environ.get("DRAFTMILL_KILLS", "4"))
"""How often the training run is killed; the proof of a release takes 30."""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    sections = small_world(tmp_path_factory.mktemp("world"), count=28)
    sections["data"]["heldout"] = 4
    sections["checkpoint"] = {"every_steps": 10**6, "keep_last": 50}
    return sections


@pytest.fixture(scope="module")
def whole(world: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The directory of the run that was not cut, trained once for each choice of settings."""
    runs: dict[tuple[str, ...], Path] = {}

    def trained(*overrides: str) -> Path:
        if overrides not in runs:
            runs[overrides] = tmp_path_factory.mktemp("whole")
            train(config_of(world, f"run.dir={runs[overrides]}", *overrides), console=False)
        return runs[overrides]

    return trained


class Cut(Exception):
    """Ends a run from its observer, as an error in the main thread would."""


def cut_after(step: int) -> Any:
    def observe(record: dict[str, Any]) -> None:
        if record["step"] == step:
            os.kill(os.getpid(), signal.SIGTERM)

    return observe


def losses_of(folder: Path) -> dict[int, float]:
    """Of each step the line that counts."""
    return {record["step"]: record["loss"] for record in read_metrics(folder).steps}


def evaluations_of(folder: Path) -> dict[int, float]:
    return {record["step"]: record["accept_length"] for record in read_metrics(folder).evaluations}


def end_of(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, dict[str, torch.Tensor]], dict[str, Any]]:
    entry = latest(folder)
    assert entry is not None
    checkpoint = load(entry.folder)
    average = checkpoint.average()
    moments = {**checkpoint.optimizer(), **({"average": average} if average is not None else {})}
    return checkpoint.tensors(), moments, checkpoint.state


def assert_equal_ends(ours: Path, expected: Path) -> None:
    """Weights, moments, moving average and state, bit for bit."""
    weights, moments, state = end_of(ours)
    their_weights, their_moments, their_state = end_of(expected)
    assert moments.keys() == their_moments.keys()
    assert state["step"] == their_state["step"]
    assert state["finished"]
    assert state["accept_length"] == their_state["accept_length"]
    for name, tensor in their_weights.items():
        assert torch.equal(weights[name], tensor), name
    for group, named in their_moments.items():
        for name, tensor in named.items():
            assert torch.equal(moments[group][name], tensor), f"{group} {name}"


CASES: dict[str, tuple[int, tuple[str, ...]]] = {
    # asked to stop when the result of this step is known; the run stops one or two steps later
    "mid-epoch": (2, ()),
    "where an epoch ends": (7, ()),
    "accumulation": (3, ("train.accumulate=3", "train.epochs=4")),
    "between two draws": (3, ("train.anchor_draws=3", "train.epochs=1")),
    "draws and accumulation": (3, ("train.anchor_draws=4", "train.accumulate=2", "train.epochs=1")),
    "packed": (3, ("data.batching=packed", "data.token_budget=64")),
    "short blocks": (3, ("train.short_blocks=0.5",)),
    "d_pace": (3, ("train.loss=d_pace", "train.schedule=warmup-stable-decay")),
    "kl": (3, ("train.loss={kl: 0.9, cross_entropy: 0.1}", "train.labels=target")),
    "muon": (3, ("train.optimizer=muon", "train.muon_lr=0.02", "train.weight_decay=0.1")),
    "moving average": (3, ("train.ema_decay=0.8",)),
    "muon, moving average, accumulation in bfloat16": (
        3,
        (
            "train.optimizer=muon",
            "train.ema_decay=0.9",
            "train.accumulate=3",
            "train.epochs=4",
            "drafter.dtype=bfloat16",
        ),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_stopped_run_goes_on_with_the_very_next_batch(
    world: dict[str, Any], whole: Callable[..., Path], tmp_path: Path, case: str
) -> None:
    stop_at, overrides = CASES[case]
    uncut, cut = whole(*overrides), tmp_path / "cut"
    train(config_of(world, f"run.dir={cut}", *overrides), console=False, observe=cut_after(stop_at))
    (entry,) = checkpoints(cut)
    steps = len(losses_of(uncut))
    assert stop_at < entry.step < steps, "it was cut in the middle"
    if case == "between two draws":
        assert entry.step % 3, f"cut at step {entry.step}"
    if case == "where an epoch ends":
        epochs = [record["epoch"] for record in read_metrics(uncut).steps]
        assert (epochs[entry.step - 1], epochs[entry.step]) == (0, 1)
    train(config_of(world, f"run.dir={cut}", *overrides), resume=True, console=False)
    assert losses_of(cut) == losses_of(uncut)
    assert evaluations_of(cut) == evaluations_of(uncut)
    assert_equal_ends(cut, uncut)
    ours, expected = (
        [(line["step"], line["lr"], line["context_tokens"]) for line in metrics_of(folder) if "loss" in line]
        for folder in (cut, uncut)
    )
    assert ours == expected, "rate and tokens too, and no step was done twice"


def test_every_checkpoint_is_one_to_go_on_from(world: dict[str, Any], tmp_path: Path) -> None:
    """Two epochs, a checkpoint at every step: from any of them the same end."""
    whole = tmp_path / "whole"
    overrides = ("checkpoint.every_steps=1", "data.heldout=0")
    train(config_of(world, f"run.dir={whole}", *overrides), console=False)
    entries = checkpoints(whole)
    assert len(entries) == len(losses_of(whole)) > 10
    for entry in entries[:-1:6]:
        cut = tmp_path / f"from-{entry.step}"
        (cut / "checkpoints").mkdir(parents=True)
        os.symlink(entry.folder, cut / "checkpoints" / entry.folder.name)
        (cut / "state.json").write_text((whole / "state.json").read_text())
        train(config_of(world, f"run.dir={cut}", *overrides, "checkpoint.every_steps=1000"), resume=True, console=False)
        assert losses_of(cut) == {step: loss for step, loss in losses_of(whole).items() if step > entry.step}
        assert_equal_ends(cut, whole)


@pytest.mark.parametrize(("targets", "drafters"), [(3, 1), (1, 2), (2, 3)])
def test_a_run_goes_on_with_other_devices(
    world: dict[str, Any], whole: Callable[..., Path], tmp_path: Path, targets: int, drafters: int
) -> None:
    """Other targets change nothing, not a bit; other drafters do the same global batches, summed in another order."""
    uncut, cut = whole("train.accumulate=6", "train.epochs=4"), tmp_path / "cut"
    before = config_of(world, f"run.dir={cut}", "train.accumulate=6", "train.epochs=4")
    train(before, console=False, observe=cut_after(1))
    others = (
        f"target.devices=[{', '.join(['cpu'] * targets)}]",
        f"drafter.devices=[{', '.join(['cpu'] * drafters)}]",
        f"train.accumulate={6 // drafters}",
    )
    train(config_of(world, f"run.dir={cut}", "train.epochs=4", *others), resume=True, console=False)
    log = (cut / "run.log").read_text()
    if targets != 1:
        assert "target.devices was ['cpu'], is" in log
    assert "going on from step-" in log
    ours, expected = losses_of(cut), losses_of(uncut)
    assert ours.keys() == expected.keys()
    if drafters == 1:
        assert ours == expected
        assert_equal_ends(cut, uncut)
        return
    assert list(ours.values()) == pytest.approx(list(expected.values()), rel=2e-5)
    weights, their_weights = end_of(cut)[0], end_of(uncut)[0]
    for name, tensor in their_weights.items():
        torch.testing.assert_close(weights[name], tensor, rtol=1e-3, atol=2e-4)
    tokens, their_tokens = (
        [line["context_tokens"] for line in metrics_of(folder) if "loss" in line] for folder in (cut, uncut)
    )
    assert tokens == their_tokens


def test_what_may_not_change_is_named_and_nothing_is_touched(world: dict[str, Any], tmp_path: Path) -> None:
    cut = tmp_path / "cut"
    train(config_of(world, f"run.dir={cut}"), console=False, observe=cut_after(2))

    def stamps() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in cut.rglob("*") if path.is_file()}

    before = stamps()
    for override, said in (
        ("train.lr=1e-3", "train.lr was 0.01, is 0.001"),
        ("drafter.block_size=5", "the drafter's block_size was 4, is 5"),
        ("drafter.target_layer_ids=[1, 2]", "the drafter's target_layer_ids was [1, 3], is [1, 2]"),
        ("train.optimizer=muon", "train.optimizer was adamw, is muon"),
        ("train.ema_decay=0.9", "train.ema_decay was None, is 0.9"),
        ("train.accumulate=2", "drafters x train.accumulate was 1, is 2"),
        ("data.heldout=3", "data.heldout was 4, is 3"),
    ):
        with pytest.raises(InputError, match="this is not the run of the checkpoint") as caught:
            train(config_of(world, f"run.dir={cut}", override), resume=True, console=False)
        assert said in str(caught.value)
    assert stamps() == before
    train(config_of(world, f"run.dir={cut}", "drafter.target_layer_ids=[1, 3]"), resume=True, console=False)
    assert read_status(cut).phase is Phase.FINISHED, "the same taps by their ids are the same run"


def test_a_finished_run_says_so(world: dict[str, Any], tmp_path: Path) -> None:
    config = config_of(world, f"run.dir={tmp_path / 'run'}", "train.max_steps=2")
    train(config, console=False)
    with pytest.raises(InputError, match="the run is finished at step 2"):
        train(config, resume=True, console=False)


def test_a_run_without_a_checkpoint_begins_again_and_one_without_a_run_is_refused(
    world: dict[str, Any], tmp_path: Path
) -> None:
    config = config_of(world, f"run.dir={tmp_path / 'run'}", "train.epochs=1")
    with pytest.raises(InputError, match="holds no run to resume"):
        train(config, resume=True, console=False)
    assert not (tmp_path / "run").exists()

    def fail(record: dict[str, Any]) -> None:
        if record["step"] == 3:
            raise Cut

    with pytest.raises(Cut):
        train(config, console=False, observe=fail)
    assert checkpoints(tmp_path / "run") == []
    with pytest.raises(InputError, match=r"holds a run already .* go on with it by --resume"):
        train(config, console=False)
    train(config, resume=True, console=False)
    whole = config_of(world, f"run.dir={tmp_path / 'whole'}", "train.epochs=1")
    train(whole, console=False)
    assert "no checkpoint was written yet: beginning at the first step" in (tmp_path / "run" / "run.log").read_text()
    assert losses_of(tmp_path / "run") == losses_of(tmp_path / "whole")
    lines = metrics_of(tmp_path / "run")
    (mark,) = [line for line in lines if line.get("resumed")]
    assert mark["step"] == 1
    assert [line["step"] for line in lines[: lines.index(mark)]] == [1, 2, 3]
    assert_equal_ends(tmp_path / "run", tmp_path / "whole")


def test_steps_that_are_done_again_are_marked_in_the_metrics(world: dict[str, Any], tmp_path: Path) -> None:
    """Cut four steps after its last checkpoint: what stands above the mark from its step on is void."""
    config = config_of(world, f"run.dir={tmp_path / 'run'}", "checkpoint.every_steps=3")

    def fail(record: dict[str, Any]) -> None:
        if record["step"] == 7:
            raise Cut

    with pytest.raises(Cut):
        train(config, console=False, observe=fail)
    assert read_status(tmp_path / "run").phase is Phase.CRASHED
    train(config, resume=True, console=False)
    lines = metrics_of(tmp_path / "run")
    (mark,) = [line for line in lines if line.get("resumed")]
    assert mark["step"] == 7
    at = lines.index(mark)
    assert [line["step"] for line in lines[:at] if "loss" in line] == [1, 2, 3, 4, 5, 6, 7]
    assert next(line["step"] for line in lines[at + 1 :] if "loss" in line) == 7
    first, again = ([line["loss"] for line in part if line["step"] == 7] for part in (lines[:at], lines[at + 1 :]))
    assert first == again, "done again, it is the same step"


def test_killed_at_random_moments_it_ends_as_the_run_that_was_not(tmp_path: Path) -> None:
    """kill -9 while it loads, trains, evaluates and above all saves, which it does after every step."""
    script = Path(__file__).parents[1] / "killing.py"
    done = subprocess.run(
        [sys.executable, str(script), "--kills", str(NUM_KILLS), "--folder", str(tmp_path)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:] + (tmp_path / "output.log").read_text()[-4000:]
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["same"] == dict.fromkeys(("weights", "moments", "losses", "evaluations", "state"), True), report
    assert len([where for where in report["killed"] if where is not None]) == NUM_KILLS, report
    assert report["left"] == [], report
