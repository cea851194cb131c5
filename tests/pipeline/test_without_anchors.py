"""Batches with nothing to learn from, under every loss and beside every optimizer (cases B23 and B24)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from draftmill.checkpoint import latest, load
from draftmill.data import loader as loading
from draftmill.data.anchors import draw_anchors
from draftmill.monitor.metrics import read_metrics
from draftmill.train.run import train
from tiny import config_of, small_world

LOSSES = {
    "d_pace": ("train.loss=d_pace",),
    "the target's distribution": (
        "train.loss={cross_entropy: 0.1, kl: 0.9, total_variation: 0.5}",
        "train.labels=target",
    ),
    "muon, moving average, packed": ("train.optimizer=muon", "train.ema_decay=0.9", "data.batching=packed"),
    "two draws": ("train.anchor_draws=2",),
}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    sections = small_world(tmp_path_factory.mktemp("world"), count=20)
    sections["data"]["heldout"] = 4
    sections["train"] |= {"epochs": 2, "evaluate_every": 3}
    return sections


@pytest.fixture(autouse=True)
def _every_second_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def limited(mask_T: np.ndarray, lengths_D: np.ndarray, *, index: int, **more: Any) -> Any:
        return draw_anchors(np.zeros_like(mask_T) if index % 2 else mask_T, lengths_D, index=index, **more)

    monkeypatch.setattr(loading, "draw_anchors", limited)


@pytest.mark.parametrize("loss", LOSSES)
def test_a_drafter_without_anchors_goes_along_whatever_is_learned(
    world: dict[str, Any], tmp_path: Path, loss: str
) -> None:
    """Every second batch, and so all of one drafter's in an epoch: the same steps and weights as one drafter's."""
    ends = []
    for drafters in (1, 2):
        devices = f"drafter.devices=[{', '.join(['cpu'] * drafters)}]"
        overrides = (f"run.dir={tmp_path / str(drafters)}", devices, f"train.accumulate={2 // drafters}", *LOSSES[loss])
        train(config_of(world, *overrides), console=False)
        entry = latest(tmp_path / str(drafters))
        assert entry is not None
        metrics = read_metrics(tmp_path / str(drafters))
        ends.append((metrics, load(entry.folder).tensors()))
    (one, weights), (two, others) = ends
    assert len(one.steps) == len(two.steps) > 4
    assert all(0.0 < record["loss"] < 100.0 for record in one.steps if record["supervised_tokens"])
    assert [record["loss"] for record in two.steps] == pytest.approx([record["loss"] for record in one.steps], rel=1e-4)
    assert [record["supervised_tokens"] for record in two.steps] == [
        record["supervised_tokens"] for record in one.steps
    ]
    assert [record["accept_length"] for record in two.evaluations] == pytest.approx(
        [record["accept_length"] for record in one.evaluations], rel=0.02
    )
    for name, tensor in weights.items():
        torch.testing.assert_close(others[name], tensor, rtol=5e-3, atol=5e-4)
