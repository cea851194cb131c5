"""Whose GPU memory it is, on a real driver, inside a container or not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from draftmill.monitor.gpus import read_gpus
from draftmill.monitor.leftovers import run_processes
from draftmill.monitor.phases import Phase
from draftmill.monitor.status import NoRun, RunStatus, read_status
from monitor_doubles import GIB, wait_until

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")]

HOLDER = """
import sys, time, torch
from draftmill.monitor.phases import Phase
from draftmill.monitor.run import RunDirectory
with RunDirectory.create(sys.argv[1], "monitor: {trackers: []}", {}) as run:
    held = torch.ones(2**30, dtype=torch.uint8, device="cuda:0")
    uuid = str(torch.cuda.get_device_properties(0).uuid)
    run.use_gpus({"cuda:0": uuid}, own_bytes=torch.cuda.memory_reserved)
    run.phase(Phase.TRAINING)
    while run.stop_requested() == "no":
        time.sleep(0.05)
    run.finish(Phase.STOPPED)
"""


def look(run: Path) -> RunStatus | None:
    """The run's status; None before it has one."""
    try:
        return read_status(run)
    except NoRun:
        return None


def own_bytes(run: Path) -> int:
    """What the run's state says that it holds of cuda:0."""
    status = look(run)
    devices = ((status.gpus or {}).get("devices", []) if status else []) or []
    return max((gpu["own_bytes"] or 0 for gpu in devices if gpu["device"] == "cuda:0"), default=0)


def test_a_runs_memory_is_seen_and_so_is_its_process(tmp_path: Path) -> None:
    run = tmp_path / "run"
    gpus, note = read_gpus()
    assert note == ""
    before = sum(gpu.used_bytes for gpu in gpus)
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(run)])
    try:
        wait_until(lambda: own_bytes(run) >= GIB, "the run's gigabyte", timeout_s=120.0)
        gpus, _ = read_gpus()
        assert sum(gpu.used_bytes for gpu in gpus) - before >= GIB
        found = {entry.pid: entry for entry in run_processes(gpus, [tmp_path])}
        assert found[process.pid].holds_gpu
        assert not found[process.pid].leftover
        os.kill(process.pid, signal.SIGSTOP)
        wait_until(lambda: (status := look(run)) and status.phase is Phase.STALLED, "the pause to be seen")
        left = {entry.pid: entry for entry in run_processes(gpus, [tmp_path])}[process.pid]
        assert left.leftover
        assert left.how_to_end == f"draftmill stop {run} --now"
    finally:
        process.kill()
        process.wait()
    status = look(run)
    assert status is not None
    assert status.phase is Phase.CRASHED
