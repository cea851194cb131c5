"""Stand-ins that the tests of monitoring share: a run without training as a process, a driver without GPUs."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from draftmill.monitor.gpus import Gpu, GpuError
from draftmill.monitor.phases import Phase
from draftmill.monitor.status import NoRun, RunStatus, read_status

FAKE_RUN = Path(__file__).parent / "pipeline" / "fake_run.py"
GIB = 2**30


def wait_until(condition: Callable[[], object], what: str, timeout_s: float = 30.0) -> None:
    """Wait for something that another process does; fails the test, with a word, when it doesn't."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, f"waited {timeout_s} s in vain for {what}"
        time.sleep(0.02)


class FakeRun:
    """fake_run.py as a process; ended for good when the `with` statement is left."""

    def __init__(self, directory: Path, behaviour: str, stall_s: float = 600.0, *, resume: bool = False) -> None:
        self.directory = directory
        self.process = subprocess.Popen(
            [sys.executable, str(FAKE_RUN), str(directory), behaviour, str(stall_s), "resume" * resume],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )

    def __enter__(self) -> FakeRun:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        assert self.process.stderr is not None
        self.process.stderr.close()

    @property
    def pid(self) -> int:
        """Of the run's process."""
        return self.process.pid

    def status(self) -> RunStatus | None:
        """Its status from outside; None before it has one."""
        try:
            return read_status(self.directory)
        except NoRun:
            return None

    def wait_phase(self, phase: Phase, min_step: int = 0) -> RunStatus:
        """Wait until it is in a phase, and has come so far."""

        def there() -> bool:
            status = self.status()
            return status is not None and status.phase is phase and (status.progress.get("step") or 0) >= min_step

        wait_until(there, f"{phase} in {self.directory}, last seen {self.status()}")
        status = self.status()
        assert status is not None
        return status

    def wait_end(self) -> int:
        """Wait for its process; gives its exit code. Reaps it, so that no zombie is left to look at."""
        return self.process.wait(timeout=30)


class FakeGpus:
    """Gives made-up readings, one after another, then the last one again; None is a driver that fails."""

    def __init__(self, *readings: Sequence[Gpu] | None) -> None:
        self.readings = list(readings)
        self.num_reads = 0
        self.closed = False

    def read(self) -> list[Gpu]:
        """The next reading."""
        if not self.readings:
            return []
        reading = self.readings[min(self.num_reads, len(self.readings) - 1)]
        self.num_reads += 1
        if reading is None:
            raise GpuError("a GPU does not answer: made up")
        return list(reading)

    def close(self) -> None:
        """Note that it was closed."""
        self.closed = True


def draftmill(*arguments: str, folder: Path, timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
    """Run the command line as a user types it, in a folder."""
    environment = {**os.environ, "NO_COLOR": "1", "COLUMNS": "100", "PYTHONIOENCODING": "utf-8"}
    return subprocess.run(
        [sys.executable, "-m", "draftmill", *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=timeout_s,
        stdin=subprocess.DEVNULL,
    )
