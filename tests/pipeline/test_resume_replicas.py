"""A resume gives every drafter the same weights in the same types, not the first one alone (case B10)."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from draftmill.checkpoint import latest, load
from draftmill.monitor.metrics import read_metrics
from draftmill.train import replica as replicas
from draftmill.train.run import train
from tiny import config_of, small_world

DRAFTERS = 3
SETTINGS = (
    f"drafter.devices=[{', '.join(['cpu'] * DRAFTERS)}]",
    "drafter.dtype=bfloat16",
    "train.accumulate=2",
    "train.epochs=4",
    "train.ema_decay=0.9",
)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    sections = small_world(tmp_path_factory.mktemp("world"))
    sections["checkpoint"] = {"every_steps": 10**6}
    return sections


def stop_after(step: int) -> Any:
    def observe(record: dict[str, Any]) -> None:
        if record["step"] == step:
            os.kill(os.getpid(), signal.SIGTERM)

    return observe


def test_every_drafter_goes_on_with_the_same_values_in_the_same_types(
    world: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And so, on devices that sum alike, ends bit for bit where the run that was not cut does."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    train(config_of(world, f"run.dir={whole}", *SETTINGS), console=False)
    train(config_of(world, f"run.dir={cut}", *SETTINGS), console=False, observe=stop_after(2))
    entry = latest(cut)
    assert entry is not None
    assert 2 <= entry.step < len(read_metrics(whole).steps)
    saved = load(entry.folder)
    found: dict[str, dict[str, torch.Tensor]] = {}
    update = replicas.Replica.update

    def look(self: replicas.Replica, step: int) -> None:
        state, name = self.state, threading.current_thread().name
        average = self.average()
        if name not in found:
            assert average is not None
            found[name] = {
                "master": state.flat.master.clone(),
                "weights": state.flat.weights.clone(),
                **{
                    f"moment {kind} {key}": t.clone()
                    for kind, named in self.moments().items()
                    for key, t in named.items()
                },
                **{f"average {key}": tensor.clone() for key, tensor in average.items()},
            }
            for key, tensor in saved.tensors().items():
                assert torch.equal(state.flat.view(state.flat.master, key), tensor)
                assert torch.equal(state.flat.view(state.flat.weights, key), tensor.bfloat16())
        update(self, step)

    with monkeypatch.context() as patch:
        patch.setattr(replicas.Replica, "update", look)
        train(config_of(world, f"run.dir={cut}", *SETTINGS), resume=True, console=False)
    assert sorted(found) == [f"drafter-{number}" for number in range(DRAFTERS)]
    first = found["drafter-0"]
    assert (first["master"].dtype, first["weights"].dtype) == (torch.float32, torch.bfloat16)
    for kind, named in saved.optimizer().items():
        for key, tensor in named.items():
            assert first[f"moment {kind} {key}"].dtype == tensor.dtype
            assert torch.equal(first[f"moment {kind} {key}"], tensor)
    for other in found.values():
        assert other.keys() == first.keys()
        for key, tensor in first.items():
            assert other[key].dtype == tensor.dtype
            assert torch.equal(other[key], tensor), key
    ended = [load(newest.folder) for newest in (latest(whole), latest(cut)) if newest is not None]
    for key, tensor in ended[0].tensors().items():
        assert torch.equal(ended[1].tensors()[key], tensor), key
    losses = [{record["step"]: record["loss"] for record in read_metrics(folder).steps} for folder in (whole, cut)]
    assert losses[0] == losses[1]
