"""What state.json says, and the thread that writes it once a second. Owns every field of the file.

The workers' side is attribute writes without a lock; reading, composing and writing happen in this thread. So the
state goes on being written while every worker hangs, and says for how long each has. Stamps named `_at` are seconds
of the monotonic clock, those named `_time` seconds since 1970: ages come from the first, dates from the second.
"""

from __future__ import annotations

import sys
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable
from typing import Any

from draftmill.monitor.heartbeat import Heartbeat
from draftmill.monitor.phases import ENDINGS, Phase
from draftmill.monitor.process import ProcessIdentity
from draftmill.monitor.state import StateFile

WRITE_EVERY_S = 1.0
_REST_S = 0.1
_MAX_WARNINGS = 20
_RATE_WINDOW = 512
"""Steps over which the rate behind the ETA is taken, evaluations and saving between them included."""


class Recorder:
    """The live picture of one run, written to state.json by a thread of its own.

    Args:
        file: where it goes
        stall_s: seconds without any progress after which the run counts as stalled
        on_second: called by the thread before each write, with the seconds since the last progress
        on_trouble: told once when the state can't be written, and once when it can again
        previous: the last state of the run that is resumed; None for a first start
    """

    def __init__(
        self,
        file: StateFile,
        stall_s: float,
        on_second: Callable[[float], None],
        on_trouble: Callable[[str], None],
        previous: dict[str, Any] | None,
    ) -> None:
        self._file = file
        self._stall_s = stall_s
        self._on_second = on_second
        self._on_trouble = on_trouble
        self._process = ProcessIdentity.of_this()
        self._started_at, self._started_time = time.monotonic(), time.time()
        previous = previous or {}
        self.run_id = str(previous.get("run_id") or uuid.uuid4().hex[:12])
        self._resumes = int(previous.get("resumes", -1)) + 1
        self._elapsed_before_s = _elapsed_s(previous)
        self.phase = Phase.STARTING
        self._detail = ""
        self._phase_at, self._phase_time = self._started_at, self._started_time
        self._seconds_in: dict[str, float] = {}
        self.workers: dict[str, Heartbeat] = {}
        self._progress: dict[str, Any] = {}
        self._progress_at = self._started_at
        self._recent_steps: deque[tuple[float, int]] = deque(maxlen=_RATE_WINDOW)
        self._warnings: deque[dict[str, Any]] = deque(maxlen=_MAX_WARNINGS)
        self.gpus: dict[str, Any] | None = None
        self.stop_mode = "no"
        self.hears_signals = False
        self._error: dict[str, Any] | None = None
        self._num_writes = 0
        self._failed = False
        self._write_lock = threading.Lock()
        self._wake = threading.Event()
        self._closing = False
        self._thread = threading.Thread(target=self._loop, name="monitor", daemon=True)

    def start(self) -> None:
        """Write the first state and start the thread.

        Raises:
            OSError: the first state can't be written.
        """
        self._file.write(self._compose())
        self._thread.start()

    def set_phase(self, phase: Phase, detail: str) -> None:
        """Enter a phase, or say more about the one that lasts. An ending stays, unless a crash follows it."""
        if self.phase in ENDINGS and phase is not Phase.CRASHED:
            return  # a worker's last words, after the run has ended
        now = time.monotonic()
        if phase is self.phase and detail == self._detail:  # said at every step, maybe
            self._progress_at = now
            return
        if phase is not self.phase:
            self._seconds_in[self.phase.value] = self._seconds_in.get(self.phase.value, 0.0) + now - self._phase_at
            self._phase_at, self._phase_time = now, time.time()
        self.phase, self._detail = phase, detail
        self._progress_at = now
        self._wake.set()

    def set_progress(self, progress: dict[str, Any]) -> None:
        """Take the last optimizer step's figures; those given as None keep their last value."""
        self.add_figures(progress)
        self._progress_at = time.monotonic()
        self._recent_steps.append((self._progress_at, progress["step"]))

    def add_figures(self, figures: dict[str, Any]) -> None:
        """Take figures that belong to no step of their own, such as an evaluation's."""
        self._progress = {**self._progress, **{key: item for key, item in figures.items() if item is not None}}

    def add_warning(self, text: str) -> None:
        """Keep a line among the last warnings."""
        self._warnings.append({"time": time.time(), "text": text})

    def set_error(self, error: dict[str, Any]) -> None:
        """Keep what ended the run."""
        self._error = error

    def elapsed_s(self) -> float:
        """Seconds that the run has run, those before it was resumed included."""
        return self._elapsed_before_s + time.monotonic() - self._started_at

    def since_progress_s(self) -> float:
        """Seconds since a worker, a phase or a step last moved."""
        last = max([self._progress_at, *(worker.progress_at for worker in list(self.workers.values()))])
        return max(0.0, time.monotonic() - last)

    def write_now(self) -> None:
        """Write the state in the calling thread; trouble is reported, not raised."""
        with self._write_lock:
            try:
                self._file.write(self._compose())
                message = "state.json is written again" if self._failed else None
                self._failed = False
            except OSError as error:
                message = None if self._failed else f"state.json can't be written: {error.strerror}; the run goes on"
                self._failed = True
        if message is not None:
            self._on_trouble(message)

    def close(self) -> None:
        """End the thread after a last write. May be called twice."""
        if self._closing:
            return
        self._closing = True
        self._wake.set()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=10.0)
        self.write_now()
        self._file.remove_spare()

    def _loop(self) -> None:
        while not self._closing:
            for worker in list(self.workers.values()):
                worker.sample()
            try:
                self._on_second(self.since_progress_s())
            except Exception as error:  # the state must go on being written, and say that this went wrong
                self.add_warning(f"monitor: {type(error).__name__}: {error}")
                print(f"draftmill: warning: monitor: {type(error).__name__}: {error}", file=sys.stderr)
            self.write_now()
            time.sleep(_REST_S)  # however often it is woken
            self._wake.wait(WRITE_EVERY_S - _REST_S)
            self._wake.clear()

    def _eta_s(self) -> float | None:
        """Seconds the remaining steps take at the recent rate; None before two steps, or without their number."""
        recent, steps = list(self._recent_steps), self._progress.get("steps")
        if steps is None or len(recent) < 2 or recent[-1][1] <= recent[0][1]:
            return None
        seconds_a_step = (recent[-1][0] - recent[0][0]) / (recent[-1][1] - recent[0][1])
        return max(0, steps - recent[-1][1]) * seconds_a_step

    def _compose(self) -> dict[str, Any]:
        now = time.monotonic()
        self._num_writes += 1
        return {
            "version": 1,
            "phase": self.phase.value,
            "detail": self._detail,
            "ended": self.phase in ENDINGS,
            "phase_at": self._phase_at,
            "phase_time": self._phase_time,
            "seconds_in": dict(self._seconds_in),
            "process": self._process.to_json(),
            "started_at": self._started_at,
            "started_time": self._started_time,
            "run_id": self.run_id,
            "resumes": self._resumes,
            "elapsed_before_s": self._elapsed_before_s,
            "written_at": now,
            "written_time": time.time(),
            "num_writes": self._num_writes,
            "stall_s": self._stall_s,
            "since_progress_s": round(self.since_progress_s(), 3),
            "progress": self._progress,
            "eta_s": self._eta_s(),
            "workers": {name: worker.to_json(now) for name, worker in list(self.workers.items())},
            "gpus": self.gpus,
            "warnings": list(self._warnings),
            "stop": self.stop_mode,
            "hears_signals": self.hears_signals,
            "error": self._error,
        }


def _elapsed_s(previous: dict[str, Any]) -> float:
    try:
        return float(previous["elapsed_before_s"] + previous["written_at"] - previous["started_at"])
    except (KeyError, TypeError):
        return 0.0
