"""A run's ear for wishes to stop: the request file that `draftmill stop` writes, and signals.

Owns the request's form. Only notes the wish; what follows from it is the loop's.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import threading
from pathlib import Path
from types import FrameType
from typing import Any, Literal

from draftmill.monitor.layout import STOP_FILE
from draftmill.monitor.process import ProcessIdentity
from draftmill.monitor.state import read_json, write_json

StopMode = Literal["no", "graceful", "now"]


def write_request(directory: Path, process: ProcessIdentity, mode: str, **more: Any) -> None:
    """Ask this process, and no later one in the same directory, to stop. Raises OSError."""
    write_json(directory / STOP_FILE, {"process": process.to_json(), "mode": mode, **more})


def read_request(directory: Path, process: ProcessIdentity) -> dict[str, Any] | None:
    """The request made to this process; None where there is none."""
    try:
        request = read_json(directory / STOP_FILE)
    except OSError:
        return None
    return request if request is not None and request.get("process") == process.to_json() else None


class StopWish:
    """Whether this process was asked to stop. The first wish is for a graceful stop, a second one for one at once."""

    def __init__(self, directory: Path) -> None:
        self.mode: StopMode = "no"
        self._directory = directory
        self._process = ProcessIdentity.of_this()
        self._old_handlers: dict[int, Any] = {}

    def look(self) -> None:
        """Read the request file."""
        request = read_request(self._directory, self._process)
        mode = request.get("mode") if request is not None else None
        if mode == "now" or (mode == "graceful" and self.mode == "no"):
            self.mode = mode

    def take_signals(self, log_descriptor: int | None) -> bool:
        """Hear SIGTERM and SIGINT, and write all stacks on SIGUSR1. Only the main thread can; False in others."""
        if threading.current_thread() is not threading.main_thread():
            return False
        for number in (signal.SIGTERM, signal.SIGINT):
            self._old_handlers[number] = signal.signal(number, self._on_signal)
        if log_descriptor is not None:  # works even while Python itself is stuck
            faulthandler.register(signal.SIGUSR1, file=log_descriptor, all_threads=True, chain=False)
        return True

    def restore_signals(self) -> None:
        """Give the signals back. May be called twice."""
        if not self._old_handlers or threading.current_thread() is not threading.main_thread():
            return
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)
        self._old_handlers = {}
        with contextlib.suppress(AttributeError):  # a system without SIGUSR1
            faulthandler.unregister(signal.SIGUSR1)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process.pid:  # a forked child heard it, which is to end as if it had no handler
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        # Only an assignment: the interrupted code may hold the log's lock. The monitor's thread tells it.
        if self.mode == "now" and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.mode = "graceful" if self.mode == "no" else "now"
