"""GPUs read through a made-up driver, and processes of runs found on the real machine."""

from __future__ import annotations

import os
import re
import signal
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from draftmill.monitor.gpus import Gpu, GpuError, GpuProcess, GpuWatch, NvmlSource, command, read_gpus
from draftmill.monitor.leftovers import leftovers, render_processes, run_processes, start_warnings
from draftmill.monitor.phases import Phase
from monitor_doubles import GIB, FakeGpus, FakeRun, wait_until


class MadeUpError(Exception):
    """Stands for pynvml.NVMLError."""


def make_pynvml(**broken: Exception) -> types.ModuleType:
    """A pynvml of two GPUs; the functions named raise what is given."""

    def answer(name: str, value: Any) -> Any:
        def call(*_: Any) -> Any:
            if name in broken:
                raise broken[name]
            return value(*_) if callable(value) else value

        return call

    running = [
        types.SimpleNamespace(pid=os.getpid(), usedGpuMemory=5 * GIB),
        types.SimpleNamespace(pid=2**30, usedGpuMemory=None),
    ]
    functions = {
        "nvmlInit": None,
        "nvmlShutdown": None,
        "nvmlDeviceGetCount": 2,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetUUID": lambda handle: f"GPU-{handle}",
        "nvmlDeviceGetName": "NVIDIA H200",
        "nvmlDeviceGetMemoryInfo": types.SimpleNamespace(total=141 * GIB, used=6 * GIB),
        "nvmlDeviceGetUtilizationRates": types.SimpleNamespace(gpu=42),
        "nvmlDeviceGetComputeRunningProcesses": lambda handle: running if handle == 0 else [],
    }
    module = types.ModuleType("pynvml")
    module.NVMLError = MadeUpError  # type: ignore[attr-defined]
    for name, value in functions.items():
        setattr(module, name, answer(name, value))
    return module


def test_the_driver_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", make_pynvml())
    first, second = NvmlSource().read()
    assert (first.index, first.uuid, first.name, first.total_bytes, first.used_bytes, first.utilization) == (
        0, "GPU-0", "NVIDIA H200", 141 * GIB, 6 * GIB, 42,
    )  # fmt: skip
    assert [(p.pid, p.used_bytes) for p in first.processes] == [(os.getpid(), 5 * GIB), (2**30, None)]
    assert "python" in first.processes[0].name
    assert first.processes[1].name == ""  # a number that means nothing here
    assert second.processes == ()


def test_what_the_driver_does_not_tell_is_left_open(monkeypatch: pytest.MonkeyPatch) -> None:
    no = MadeUpError("Not Supported")
    broken = {"nvmlDeviceGetUtilizationRates": no, "nvmlDeviceGetComputeRunningProcesses": no}
    monkeypatch.setitem(sys.modules, "pynvml", make_pynvml(**broken))
    gpu = NvmlSource().read()[0]
    assert (gpu.utilization, gpu.processes) == (None, ())


def test_without_a_driver_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", make_pynvml(nvmlInit=MadeUpError("Library Not Found")))
    with pytest.raises(GpuError, match="no NVIDIA driver answers: Library Not Found"):
        NvmlSource()
    assert read_gpus() == ([], "no NVIDIA driver answers: Library Not Found")
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert read_gpus() == ([], "the package nvidia-ml-py is not installed")


def gpu(index: int, *processes: GpuProcess, used: int = 50 * GIB) -> Gpu:
    return Gpu(index, f"GPU-{index}", "H200", 141 * GIB, used, 10, processes)


def one_reading(source: Any, uuids: dict[str, str], own_bytes: Any = None) -> dict[str, Any]:
    readings: list[dict[str, Any]] = []
    watch = GpuWatch(lambda: source, readings.append, every_s=60.0)
    watch.use(uuids, own_bytes)
    watch.start()
    wait_until(lambda: readings, "a reading")
    watch.close()
    watch.close()
    return readings[0]


def test_a_container_that_hides_processes_leaves_own_memory_open_unless_the_run_tells() -> None:
    hidden = [gpu(0, GpuProcess(4321, 49 * GIB)), gpu(1)]  # the host's number
    reading = one_reading(FakeGpus(hidden), {"cuda:0": "0"})
    assert [entry["own_bytes"] for entry in reading["devices"]] == [None, None]
    told = one_reading(FakeGpus(hidden), {"cuda:0": "GPU-0"}, {"cuda:0": 48 * GIB}.__getitem__)
    assert [(entry["device"], entry["own_bytes"]) for entry in told["devices"]] == [("cuda:0", 48 * GIB), ("", None)]


def test_a_list_that_names_this_process_is_believed_for_all_gpus() -> None:
    reading = one_reading(FakeGpus([gpu(0, GpuProcess(os.getpid(), 40 * GIB, "me")), gpu(1)]), {})
    assert [entry["own_bytes"] for entry in reading["devices"]] == [40 * GIB, 0]


def test_a_driver_that_fails_ends_the_readings_with_a_note() -> None:
    assert one_reading(FakeGpus(None), {}) == {"note": "a GPU does not answer: made up", "devices": []}

    class Odd(FakeGpus):
        def read(self) -> list[Gpu]:
            raise KeyError("odd")

    assert one_reading(Odd(), {})["note"] == "reading failed: KeyError: 'odd'"


def test_command_of_processes() -> None:
    assert "python" in command(os.getpid())
    assert command(2**30) == ""


def test_leftovers_are_told_from_runs_that_work(tmp_path: Path) -> None:
    with FakeRun(tmp_path / "good", "wait") as good, FakeRun(tmp_path / "hung", "child") as hung:
        good.wait_phase(Phase.TRAINING, 1)
        hung.wait_phase(Phase.TRAINING, 1)
        match = re.search(r"child (\d+)", (tmp_path / "hung" / "run.log").read_text())
        assert match is not None
        child = int(match.group(1))
        try:
            hung.process.kill()
            hung.wait_end()
            hung.wait_phase(Phase.CRASHED)
            reading = [gpu(3, GpuProcess(child, 7 * GIB, "sleep"), GpuProcess(good.pid, 9 * GIB, "python"))]
            found = {process.pid: process for process in run_processes(reading, [tmp_path])}
            assert {good.pid, child} <= set(found)
            assert (found[good.pid].leftover, found[good.pid].gpu_bytes) == (False, {3: 9 * GIB})
            assert found[good.pid].how_to_end == f"draftmill stop {tmp_path / 'good'}"
            assert found[child].leftover
            assert found[child].how_to_end.startswith(f"kill {child} ")
            assert [process.pid for process in leftovers(reading, [tmp_path])] == [child]
            text = render_processes(list(found.values()))
            assert f"left over: process {child}: kill {child}" in text
            assert "3: 7.0 GiB" in text
            warnings = start_warnings(reading, [tmp_path])
            assert any(f"process {child} of an earlier run" in line and "GPU 3" in line for line in warnings)
            assert any(f"process {good.pid} of another run" in line for line in warnings)
        finally:
            os.kill(child, signal.SIGKILL)


def test_no_process_of_a_run() -> None:
    assert render_processes([], "GPU memory is not shown: x").splitlines() == [
        "GPU memory is not shown: x",
        "no process of a run on this machine",
    ]
