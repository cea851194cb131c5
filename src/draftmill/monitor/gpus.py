"""The machine's GPUs and who holds their memory, through NVML. Owns every call of NVML.

What can't be read is told, never guessed: without a driver there are no GPUs and a note says so; inside a container
NVML may list no processes, or list them under numbers of the host, and then whose memory it is stays open.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A process that holds memory of a GPU. `used_bytes` is None where the driver doesn't tell."""

    pid: int
    used_bytes: int | None
    name: str = ""
    """Its command, "" where no process of this number can be seen from here."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU at one moment. Sizes in bytes, utilization in percent of the last sampling period of the driver."""

    index: int
    uuid: str
    name: str
    total_bytes: int
    used_bytes: int
    utilization: int | None
    processes: tuple[GpuProcess, ...] = field(default=())


class GpuSource(Protocol):
    """Where readings come from. Tests give their own."""

    def read(self) -> list[Gpu]:
        """Every GPU of the machine, now. Raises GpuError."""

    def close(self) -> None:
        """Let the driver go. May be called twice."""


class GpuError(RuntimeError):
    """GPUs can't be read here; the message says why."""


class NvmlSource:
    """Reads through the nvidia-ml-py package.

    Raises:
        GpuError: no driver, no permission, or the package is missing.
    """

    def __init__(self) -> None:
        try:
            import pynvml
        except ImportError:
            raise GpuError("the package nvidia-ml-py is not installed") from None
        self._nvml = pynvml
        self._open = False
        try:
            pynvml.nvmlInit()
            self._open = True
            self._handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        except pynvml.NVMLError as error:
            self.close()
            raise GpuError(f"no NVIDIA driver answers: {error}") from None

    def read(self) -> list[Gpu]:
        """Every GPU of the machine, now. Raises GpuError where one stops answering."""
        try:
            return [self._read(index, handle) for index, handle in enumerate(self._handles)]
        except self._nvml.NVMLError as error:
            raise GpuError(f"a GPU does not answer: {error}") from None

    def _read(self, index: int, handle: Any) -> Gpu:
        nvml = self._nvml
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        try:
            utilization = int(nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
        except nvml.NVMLError:  # not told for a part of a GPU (MIG)
            utilization = None
        try:
            running = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
        except nvml.NVMLError:
            running = []
        processes = tuple(
            GpuProcess(int(one.pid), None if one.usedGpuMemory is None else int(one.usedGpuMemory), command(one.pid))
            for one in running
        )
        uuid, name = nvml.nvmlDeviceGetUUID(handle), nvml.nvmlDeviceGetName(handle)
        return Gpu(index, uuid, name, int(memory.total), int(memory.used), utilization, processes)

    def close(self) -> None:
        """Let the driver go. May be called twice."""
        if self._open:
            self._open = False
            self._nvml.nvmlShutdown()


def command(pid: int) -> str:
    """The command of a process, cut to 120 characters; "" where it can't be seen from here."""
    process = Path("/proc") / str(pid)
    try:
        words = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        return words[:120] if words else (process / "comm").read_text(errors="replace").strip()
    except OSError:
        return ""


def read_gpus(opener: Callable[[], GpuSource] = NvmlSource) -> tuple[list[Gpu], str]:
    """One reading, and a note on why there is none."""
    try:
        source = opener()
        try:
            return source.read(), ""
        finally:
            source.close()
    except GpuError as error:
        return [], str(error)


class GpuWatch:
    """Looks at the GPUs every few seconds in a thread of its own, for a driver that hangs must not hold up anything.

    Args:
        opener: makes the source, inside the thread
        on_reading: given the JSON form of each reading, and once a note where there are no GPUs to read
        every_s: seconds between readings
    """

    def __init__(
        self, opener: Callable[[], GpuSource], on_reading: Callable[[dict[str, Any]], None], every_s: float = 5.0
    ) -> None:
        self._opener = opener
        self._on_reading = on_reading
        self._every_s = every_s
        self._devices: dict[str, str] = {}
        self._own_bytes: Callable[[str], int] | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="gpus", daemon=True)

    def start(self) -> None:
        """Start looking."""
        self._thread.start()

    def use(self, uuids: Mapping[str, str], own_bytes: Callable[[str], int] | None) -> None:
        """Say which GPUs are the run's: device name -> UUID, and how to ask for its own memory of a device."""
        self._devices = {uuid.removeprefix("GPU-"): device for device, uuid in uuids.items()}
        self._own_bytes = own_bytes

    def close(self) -> None:
        """Stop looking. May be called twice."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join(timeout=2.0)

    def _loop(self) -> None:
        try:
            self._read_until_closed()
        except GpuError as error:
            self._on_reading({"note": str(error), "devices": []})
        except Exception as error:  # a view of the GPUs is not worth a run, but its loss is told
            self._on_reading({"note": f"reading failed: {type(error).__name__}: {error}", "devices": []})

    def _read_until_closed(self) -> None:
        source = self._opener()
        try:
            while not self._closing.is_set():
                gpus = source.read()
                pid = os.getpid()
                # A list that names this process anywhere is in numbers that mean something here.
                listed = any(process.pid == pid for gpu in gpus for process in gpu.processes)
                entries = [self._entry(gpu, pid, listed) for gpu in gpus]
                self._on_reading({"note": "", "read_at": time.monotonic(), "devices": entries})
                self._closing.wait(self._every_s)
        finally:
            source.close()

    def _entry(self, gpu: Gpu, pid: int, listed: bool) -> dict[str, Any]:
        device = self._devices.get(gpu.uuid.removeprefix("GPU-"), "")
        held = [process.used_bytes for process in gpu.processes if process.pid == pid]
        own: int | None = None
        if listed and None not in held:
            own = sum(used for used in held if used is not None)
        elif device and self._own_bytes is not None:
            own = self._own_bytes(device)
        others = [asdict(process) for process in gpu.processes if process.pid != pid]
        return {
            "index": gpu.index,
            "uuid": gpu.uuid,
            "name": gpu.name,
            "device": device,
            "total_bytes": gpu.total_bytes,
            "used_bytes": gpu.used_bytes,
            "own_bytes": own,
            "utilization": gpu.utilization,
            "others": others,
        }
