"""Capturing while a run is under way: drafters sum over NCCL and copy into pinned memory on both devices (case B34)."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from draftmill.target.attention import Packing
from draftmill.target.step_graphed import GraphedForward
from draftmill.train.run import train
from tiny import config_of, metrics_of, small_world

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
EVERY = 3
"""Batches of a target after which its forward is captured anew."""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    sections = small_world(tmp_path_factory.mktemp("world"), kind="qwen3", head_dim=16)
    sections["target"] |= {"devices": ["cuda:0", "cuda:1"], "dtype": "bfloat16"}
    sections["drafter"] |= {"devices": ["cuda:0", "cuda:1"], "block_size": 16}
    sections["data"] |= {"batching": "packed", "token_budget": 256}
    sections["train"] |= {"epochs": 6}
    return sections


def test_targets_captured_anew_while_drafters_sum_and_copy(
    world: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a batch has more documents than a graph has room for, and on a device that is not the first, too."""
    plain = ("target.step=eager", "drafter.step=eager", f"run.dir={tmp_path / 'plain'}")
    train(config_of(world, *plain), console=False)
    captured: dict[str, int] = {}
    runs: dict[str, int] = {}
    run, capture = GraphedForward.run, GraphedForward._capture

    def counted(self: GraphedForward, tokens_BS: torch.Tensor, packing: Packing) -> None:
        name = threading.current_thread().name
        captured[name] = captured.get(name, 0) + 1
        capture(self, tokens_BS, packing)

    def forgetful(self: GraphedForward, tokens_BS: torch.Tensor, packing: Packing | None) -> list[torch.Tensor]:
        name = threading.current_thread().name
        runs[name] = runs.get(name, 0) + 1
        if runs[name] % EVERY == 0:
            self._graph = None
        return run(self, tokens_BS, packing)

    monkeypatch.setattr(GraphedForward, "_capture", counted)
    monkeypatch.setattr(GraphedForward, "run", forgetful)
    graphed = ("target.step=graphed", "drafter.step=graphed", f"run.dir={tmp_path / 'graphed'}")
    train(config_of(world, *graphed), console=False)
    assert sorted(captured) == ["target-0", "target-1"]
    assert min(captured.values()) > 2
    expected, losses = (
        [line["loss"] for line in metrics_of(tmp_path / where) if "loss" in line] for where in ("plain", "graphed")
    )
    assert losses == pytest.approx(expected, rel=3e-2)
