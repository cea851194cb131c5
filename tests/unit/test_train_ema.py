"""The moving average of the weights: its values, its use in evaluations, and what a checkpoint of it gives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from draftmill.checkpoint import checkpoints, export, load, read_source
from draftmill.config import TrainConfig
from draftmill.data.prepare import prepare
from draftmill.monitor.metrics import read_metrics
from draftmill.step.flat import FlatParameters
from draftmill.train.muon import FlatMuon
from draftmill.train.optimizer import FlatAdamW, FlatOptimizer
from draftmill.train.run import train
from tiny import config_of, small_world


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        for name, shape in (("a", (8, 20)), ("v", (7,)), ("b", (24, 8)), ("c", (8, 20))):
            setattr(self, name, nn.Parameter(torch.randn(shape, generator=generator)))


def made(kind: type[FlatAdamW] | type[FlatMuon], dtype: torch.dtype, decay: float) -> FlatOptimizer:
    name = "muon" if kind is FlatMuon else "adamw"
    return kind(FlatParameters(Net(), "cpu", dtype), TrainConfig(optimizer=name, ema_decay=decay))


def updated(optimizer: FlatOptimizer, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    optimizer.flat.gradient.copy_(torch.randn(optimizer.flat.size, generator=generator))
    optimizer.lr.fill_(0.05)
    optimizer.update(torch.tensor(3.0))


@pytest.mark.parametrize("kind", [FlatAdamW, FlatMuon])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_the_average_by_the_formula(kind: Any, dtype: torch.dtype) -> None:
    optimizer = made(kind, dtype, decay=0.5)
    average = optimizer.average
    assert average is not None
    expected = optimizer.flat.master.double()
    decays = []
    for number in range(1, 16):
        updated(optimizer, number)
        decays.append(min(0.5, (1 + number) / (10 + number)))
        expected = decays[-1] * expected + (1 - decays[-1]) * optimizer.flat.master.double()
    assert decays[0] < 0.2
    assert decays[-1] == 0.5, "both the warm-up and what follows it were tried"
    torch.testing.assert_close(average.average.double(), expected, rtol=1e-5, atol=1e-6)
    assert (average.average - optimizer.flat.master).abs().max() > 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_computing_with_it_leaves_masters_weights_and_itself_as_they_were(dtype: torch.dtype) -> None:
    optimizer = made(FlatAdamW, dtype, decay=0.9)
    for step in range(3):
        updated(optimizer, step)
    flat, average = optimizer.flat, optimizer.average
    assert average is not None
    before = [tensor.clone() for tensor in (flat.master, flat.weights, average.average)]
    average.show()
    assert torch.equal(flat.weights, average.average.to(dtype))
    assert not torch.equal(flat.weights, before[1])
    average.hide()
    for tensor, kept in zip((flat.master, flat.weights, average.average), before, strict=True):
        assert torch.equal(tensor, kept)


def test_without_a_decay_none_is_kept_and_a_reset_begins_it_anew() -> None:
    assert FlatAdamW(FlatParameters(Net(), "cpu", torch.float32), TrainConfig()).average is None
    optimizer = made(FlatMuon, torch.float32, decay=0.9)
    updated(optimizer, 0)
    optimizer.reset()
    assert optimizer.average is not None
    assert torch.equal(optimizer.average.average, optimizer.flat.master)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A run on chats that say the same over and over, cut while it learns them: the average lags behind."""
    folder = tmp_path_factory.mktemp("world")
    sections = small_world(folder)
    with (folder / "same.jsonl").open("w") as file:
        for length in range(10, 50):
            words = " ".join(f"w{number % 6}" for number in range(length))
            turns = [{"role": "user", "content": "w1"}, {"role": "assistant", "content": words}]
            file.write(json.dumps({"messages": turns}) + "\n")
    prepare(sections["target"]["model"], [str(folder / "same.jsonl")], folder / "same", max_length=64, num_processes=1)
    sections["data"]["path"] = str(folder / "same")
    train(config_of(sections, "train.ema_decay=0.97", "train.evaluate_every=1", "train.max_steps=12"), console=False)
    return sections


def accept_length_of(world: dict[str, Any], folder: Path, start: Path | str) -> float:
    """Held-out acceptance length of the weights in `start`, which a run takes over and hardly moves."""
    still = ("train.lr=1e-30", "train.max_steps=1", "train.evaluate_every=1")
    train(config_of(world, f"run.dir={folder}", f"drafter.from_checkpoint={start}", *still), console=False)
    (evaluation,) = read_metrics(folder).evaluations
    return evaluation["accept_length"]


def test_evaluations_exports_and_warm_starts_take_the_average(world: dict[str, Any], tmp_path: Path) -> None:
    run = Path(world["run"]["dir"])
    checkpoint = load(checkpoints(run)[-1].folder)
    average = checkpoint.average()
    assert average is not None
    assert not torch.equal(average["fc.weight"], checkpoint.tensors()["fc.weight"])
    source = read_source(checkpoint.folder)
    assert all(torch.equal(tensor, average[name]) for name, tensor in source.tensors.items())
    said = checkpoint.state["accept_length"]
    assert read_metrics(run).evaluations[-1]["accept_length"] == said
    assert accept_length_of(world, tmp_path / "from-average", checkpoint.folder) == pytest.approx(said, abs=1e-6)
    export(checkpoint.folder, "zlab", tmp_path / "raw", dtype="float32", which="raw")
    assert accept_length_of(world, tmp_path / "from-raw", tmp_path / "raw") > said + 0.1, "the other weights are others"
