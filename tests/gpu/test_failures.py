"""A run on CUDA that fails or hangs: the main thread waits for a device that waits for another."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from draftmill.monitor.phases import Phase
from draftmill.monitor.status import read_status
from draftmill.pipeline.supervision import Stalled, WorkerFailed
from draftmill.train import replica as replicas
from draftmill.train.run import train
from tiny import config_of, metrics_of, small_world

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")]
two_devices = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
ON_TWO = ("target.devices=[cuda:0]", "drafter.devices=[cuda:0, cuda:1]", "drafter.step=eager", "train.epochs=8")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    sections = small_world(tmp_path_factory.mktemp("world"))
    sections["drafter"] |= {"block_size": 16}
    return sections


@two_devices
def test_a_drafter_that_fails_ends_those_whose_devices_wait_in_the_sum(
    world: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = replicas.Replica.reducible

    def failing(self: replicas.Replica) -> list[torch.Tensor]:
        if threading.current_thread().name == "drafter-1" and self.optimizer.count.item() == 3:
            time.sleep(0.5)
            raise ArithmeticError("made up")
        return original(self)

    monkeypatch.setattr(replicas.Replica, "reducible", failing)
    began = time.monotonic()
    with pytest.raises(WorkerFailed, match="worker drafter-1 on cuda:1 failed at step 4"):
        train(config_of(world, f"run.dir={tmp_path / 'run'}", *ON_TWO), console=False)
    assert time.monotonic() - began < 60
    assert read_status(tmp_path / "run").phase is Phase.CRASHED
    assert [line["step"] for line in metrics_of(tmp_path / "run") if "loss" in line] == [1, 2, 3]


@two_devices
def test_a_drafter_that_hangs_ends_the_run_as_stalled_though_the_main_thread_waits_for_a_device(
    world: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, release = replicas.Replica.reducible, threading.Event()

    def hanging(self: replicas.Replica) -> list[torch.Tensor]:
        if threading.current_thread().name == "drafter-1" and self.optimizer.count.item() == 3:
            release.wait()
        return original(self)

    monkeypatch.setattr(replicas.Replica, "reducible", hanging)
    with pytest.raises(Stalled):
        train(config_of(world, f"run.dir={tmp_path / 'run'}", *ON_TWO, "pipeline.stall_s=25"), console=False)
    release.set()
    assert read_status(tmp_path / "run").phase is Phase.STALLED
    assert "in hanging" in (tmp_path / "run" / "run.log").read_text()


def test_whose_memory_it_is_and_how_long_steps_take(world: dict[str, Any], tmp_path: Path) -> None:
    devices = ("target.devices=[cuda:0]", "drafter.devices=[cuda:0]", "drafter.step=eager")
    train(config_of(world, f"run.dir={tmp_path / 'run'}", *devices), console=False)
    status = read_status(tmp_path / "run")
    (gpu,) = [entry for entry in (status.gpus or {}).get("devices", []) if entry["device"] == "cuda:0"]
    assert gpu["own_bytes"] is None or gpu["own_bytes"] > 0
    rates = [line["context_tokens_per_s"] for line in metrics_of(tmp_path / "run") if "loss" in line]
    assert all(0 < rate < 1e9 for rate in rates)
