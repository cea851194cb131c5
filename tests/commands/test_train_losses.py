"""`draftmill train` with every loss, as a user types it; files and checkpoints from before; bad input."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import yaml

from draftmill.checkpoint.resume import check_same_run
from draftmill.cli import main
from draftmill.config import TrainConfig, load_config
from draftmill.drafter.loss import LossRule
from draftmill.errors import InputError
from draftmill.pipeline.collective import Hosts
from draftmill.train.setup import Setup, set_up
from tiny import metrics_of, small_world

LOSSES = {
    "cross entropy": ("train.loss=cross_entropy",),
    "d-pace": ("train.loss=d_pace",),
    "kl": ("train.loss=kl",),
    "total variation": ("train.loss=total_variation",),
    "mixed": ("train.loss={cross_entropy: 0.1, kl: 0.9, total_variation: 1}",),
    "the target's labels": ("train.labels=target",),
    "everything": ("train.loss={kl: 1, cross_entropy: 1}", "train.slot_weights=d_pace", "train.labels=target"),
}


@pytest.fixture(scope="module")
def run_yaml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("world")
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(small_world(folder)))
    return path


def command(*arguments: str | Path) -> int:
    with pytest.raises(SystemExit) as left:
        main([*map(str, arguments)])
    return int(left.value.code or 0)


@pytest.mark.parametrize("name", LOSSES)
def test_trained_evaluated_and_exported(run_yaml: Path, tmp_path: Path, name: str) -> None:
    run = tmp_path / "run"
    assert command("train", run_yaml, f"run.dir={run}", "train.epochs=10", "train.lr=3e-3", *LOSSES[name]) == 0
    lines = metrics_of(run)
    losses = [line["loss"] for line in lines if "loss" in line]
    assert all(math.isfinite(loss) for loss in losses)
    # a random target's next tokens are hard to foresee, and yet
    assert sum(losses[-8:]) < 0.97 * sum(losses[:8])
    assert [line["accept_length"] for line in lines if "accept_length" in line][-1] >= 1.0
    if name == "total variation":
        assert 0.0 < losses[-1] < losses[0] < 1.0
    assert command("export", run, "--layout", "zlab", "--output", tmp_path / "export") == 0
    recipe = (tmp_path / "export" / "README.md").read_text()
    config = load_config(run / "config.yaml")
    for setting in ("loss", "slot_weights", "labels"):
        assert f"train.{setting}: {getattr(config.train, setting)}" in recipe


def test_packed_rows_several_devices_draws_and_accumulation(run_yaml: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    more = ("train.anchor_draws=2", "train.accumulate=2", "data.batching=packed", "data.token_budget=64")
    devices = ("drafter.devices=[cpu, cpu]", "target.devices=[cpu, cpu]", "target.cache_gib=1")
    assert (
        command("train", run_yaml, f"run.dir={run}", "train.max_steps=6", *more, *devices, *LOSSES["everything"]) == 0
    )
    losses = [line["loss"] for line in metrics_of(run) if "loss" in line]
    assert len(losses) == 6
    assert all(0.0 < loss < 50.0 for loss in losses)


def test_planned(run_yaml: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("plan", run_yaml, "--json", *LOSSES["everything"]) == 0
    costs = json.loads(capsys.readouterr().out.splitlines()[-1])["costs"]
    assert all(each["target_s"] > 0 and each["drafter_s"] > 0 for each in costs["buckets"])


def checkpoint_of(setup: Setup) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a checkpoint of this run says, and what the run itself does besides configuration and shape."""
    facts = {"data_fingerprint": setup.store.fingerprint, "batches_per_step": 1}
    return {"config": setup.config.model_dump(mode="json"), "shape": setup.shape.to_dict(), **facts}, facts


def test_a_checkpoint_from_before_is_of_the_same_run(run_yaml: Path) -> None:
    """It says loss d_pace, and knows of no slot weights and no labels."""
    setup = set_up(load_config(run_yaml, ["train.loss=d_pace"]), Hosts())
    saved, more = checkpoint_of(setup)
    old = saved["config"]["train"]
    assert (old["loss"], old["slot_weights"], old["labels"]) == ("cross_entropy", "d_pace", "data")
    del old["slot_weights"], old["labels"]
    old["loss"] = "d_pace"
    assert check_same_run(saved, setup.config, setup.shape, **more) == []
    with pytest.raises(InputError, match=r"train\.slot_weights was d_pace, is decay"):
        check_same_run(saved, load_config(run_yaml), setup.shape, **more)


@pytest.mark.parametrize(
    ("written", "terms", "slot_weights"),
    [
        ("{}", {"cross_entropy": 1.0}, "decay"),
        ("{loss: cross_entropy}", {"cross_entropy": 1.0}, "decay"),
        ("{loss: d_pace}", {"cross_entropy": 1.0}, "d_pace"),
        ("{loss: d_pace, slot_weights: d_pace}", {"cross_entropy": 1.0}, "d_pace"),
        ("{slot_weights: d_pace, loss: kl}", {"kl": 1.0}, "d_pace"),
        ("{loss: {total_variation: 2, kl: 0.5}}", {"kl": 0.5, "total_variation": 2.0}, "decay"),
    ],
)
def test_what_a_file_says_and_what_is_written_beside_the_results(
    tmp_path: Path, written: str, terms: dict[str, float], slot_weights: str
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(f"target: {{model: a/b}}\ndata: {{path: c}}\ntrain: {written}\n")
    config = load_config(path)
    assert config.train.loss_terms == terms
    assert config.train.slot_weights == slot_weights
    path.write_text(config.to_yaml())
    assert load_config(path) == config


def test_the_rule_of_a_configuration() -> None:
    assert LossRule.of(TrainConfig(), 16) == LossRule(7.0)
    assert LossRule.of(TrainConfig(loss="d_pace", d_pace_alpha=0.3), 8) == LossRule(4.0, 0.3)  # type: ignore[arg-type]
    mixed = TrainConfig(loss={"kl": 0.9, "cross_entropy": 0.1}, labels="target", gamma=3.0)
    assert LossRule.of(mixed, 16) == LossRule(3.0, None, 0.1, 0.9, 0.0, target_labels=True)
    assert not LossRule.of(TrainConfig(), 16).needs_target
    assert LossRule.of(TrainConfig(labels="target"), 16).needs_target
    assert LossRule.of(TrainConfig(loss="total_variation"), 16) == LossRule(7.0, None, 0.0, 0.0, 1.0)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ["train.loss=mse"],
            "train.loss: must be cross_entropy, kl, total_variation, d_pace, or a mapping of the first",
        ),
        (["train.loss=null"], "train.loss: must be cross_entropy, kl"),
        (["train.loss=[kl]"], "train.loss: must be cross_entropy, kl"),
        (
            ["train.loss={}"],
            "train.loss: a mixed loss maps some of cross_entropy, kl, total_variation to weights, got {}",
        ),
        (["train.loss={mse: 1}"], "train.loss: a mixed loss maps some of"),
        (["train.loss={d_pace: 1}"], "train.loss: a mixed loss maps some of"),
        (["train.loss={kl: 0}"], "train.loss: a mixed loss's weights must be positive numbers, got {'kl': 0}"),
        (["train.loss={kl: -1, cross_entropy: 1}"], "weights must be positive numbers"),
        (["train.loss={kl: .inf}"], "weights must be positive numbers"),
        (["train.loss={kl: .nan}"], "weights must be positive numbers"),
        (["train.loss={kl: yes}"], "weights must be positive numbers"),
        (["train.loss={kl: much}"], "weights must be positive numbers"),
        (
            ["train.loss=d_pace", "train.slot_weights=decay"],
            "train: loss d_pace weighs slots by d_pace, got slot_weights",
        ),
        (["train.slot_weights=flat"], "train.slot_weights: Input should be 'decay' or 'd_pace', got 'flat'"),
        (["train.labels=teacher"], "train.labels: Input should be 'data' or 'target', got 'teacher'"),
    ],
)
def test_a_wrong_loss_is_one_line(
    run_yaml: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], overrides: list[str], said: str
) -> None:
    assert command("train", run_yaml, f"run.dir={tmp_path / 'run'}", *overrides) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("draftmill: error: ")
    assert said in line
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("train.loss=kl", "train.loss was cross_entropy, is kl"),
        ("train.loss={kl: 1}", "train.loss was cross_entropy, is {'kl': 1.0}"),
        ("train.labels=target", "train.labels was data, is target"),
    ],
)
def test_another_loss_is_another_run(run_yaml: Path, override: str, said: str) -> None:
    setup = set_up(load_config(run_yaml), Hosts())
    saved, more = checkpoint_of(setup)
    with pytest.raises(InputError, match="this is not the run of the checkpoint") as refused:
        check_same_run(saved, load_config(run_yaml, [override]), setup.shape, **more)
    assert said in str(refused.value)
