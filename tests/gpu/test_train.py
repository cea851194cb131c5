"""A whole run on CUDA: targets and drafters on one device, and on two where there are two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from draftmill.pipeline import turns
from draftmill.pipeline.supervision import WorkerFailed
from draftmill.train.run import train
from tiny import config_of, metrics_of, small_world

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")]

LAYOUTS = {
    "colocated": (["cuda:0"], ["cuda:0"]),
    "two targets, two drafters on one": (["cuda:0", "cuda:0"], ["cuda:0"]),
    "apart": (["cuda:0"], ["cuda:1"]),
    "one target, drafters on both": (["cuda:0"], ["cuda:0", "cuda:1"]),
    "both on each": (["cuda:0", "cuda:1"], ["cuda:0", "cuda:1"]),
}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    sections = small_world(tmp_path_factory.mktemp("world"), head_dim=16)  # flex attention takes no smaller heads
    sections["drafter"] |= {"block_size": 16}
    return sections


@pytest.mark.parametrize("step", ["eager", "graphed"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_equal_the_cpus(world: dict[str, Any], tmp_path: Path, layout: str, step: str) -> None:
    assert_trains_as_on_the_cpu(world, tmp_path, layout, step)


@pytest.mark.parametrize("layout", ["colocated", "both on each"])
@pytest.mark.parametrize("brief_s", [0.0, 1000.0], ids=["turns", "side by side"])
def test_turns_change_no_loss_and_are_told(
    world: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str, brief_s: float
) -> None:
    monkeypatch.setattr(turns, "BRIEF_S", brief_s)
    assert_trains_as_on_the_cpu(world, tmp_path, layout, "graphed", "train.epochs=6")
    log = (tmp_path / "cuda" / "run.log").read_text()
    for device in set(LAYOUTS[layout][0]):
        word = "compute side by side" if brief_s else "take turns"
        assert log.count(f"target and drafter on {device} {word}: ") == 1


def assert_trains_as_on_the_cpu(world: dict[str, Any], tmp_path: Path, layout: str, step: str, *more: str) -> None:
    targets, drafters = LAYOUTS[layout]
    if "cuda:1" in (*targets, *drafters) and torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    accumulate = 2 // len(drafters)
    common = (f"train.accumulate={accumulate}", "train.epochs=3", *more)
    train(config_of(world, f"run.dir={tmp_path / 'cpu'}", "train.accumulate=2", "train.epochs=3", *more), console=False)
    devices = (f"target.devices=[{', '.join(targets)}]", f"drafter.devices=[{', '.join(drafters)}]")
    train(config_of(world, f"run.dir={tmp_path / 'cuda'}", f"drafter.step={step}", *devices, *common), console=False)
    expected = [line["loss"] for line in metrics_of(tmp_path / "cpu") if "loss" in line]
    losses = [line["loss"] for line in metrics_of(tmp_path / "cuda") if "loss" in line]
    assert losses == pytest.approx(expected, rel=2e-2)
    tau = [
        [line["accept_length"] for line in metrics_of(tmp_path / where) if "accept_length" in line]
        for where in ("cpu", "cuda")
    ]
    assert tau[1] == pytest.approx(tau[0], rel=0.1)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_features_from_the_cache_reach_a_slot_on_another_device(world: dict[str, Any], tmp_path: Path) -> None:
    devices = ("target.devices=[cuda:0]", "drafter.devices=[cuda:1]", "drafter.step=eager", "train.epochs=3")
    losses = []
    for cache in (0.0, 1.0):
        run_dir = tmp_path / f"cache-{cache}"
        train(config_of(world, f"run.dir={run_dir}", f"target.cache_gib={cache}", *devices), console=False)
        losses.append([line["loss"] for line in metrics_of(run_dir) if "loss" in line])
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_auto_measures_chooses_and_trains(world: dict[str, Any], tmp_path: Path) -> None:
    auto = ("target.devices=auto", "drafter.devices=auto", "drafter.step=eager", "train.epochs=1")
    train(config_of(world, f"run.dir={tmp_path / 'run'}", *auto), console=False)
    log = (tmp_path / "run" / "run.log").read_text()
    assert "measuring a target and a drafter" in log
    assert "1 targets + 1 drafters: " in log
    chosen = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    devices = [*chosen["target"]["devices"], *chosen["drafter"]["devices"]]
    assert sorted(set(devices)) == ["cuda:0", "cuda:1"]
    assert all(line["loss"] > 0 for line in metrics_of(tmp_path / "run") if "loss" in line)


def test_the_largest_batch_that_does_not_fit_ends_the_run_before_it_trains(
    world: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("made up")

    monkeypatch.setattr("draftmill.train.planning_worst.pack", full)
    devices = ("target.devices=[cuda:0]", "drafter.devices=[cuda:0]", "drafter.step=eager")
    with pytest.raises(WorkerFailed, match=r"worker target-0 on cuda:0 failed .* lower data.token_budget"):
        train(config_of(world, f"run.dir={tmp_path / 'run'}", *devices), console=False)
    assert not (tmp_path / "run" / "metrics.jsonl").exists() or metrics_of(tmp_path / "run") == []
