"""The run's one log. Owns the form of a line: time, worker, device, text. Every `draftmill` logger writes into it."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path

from draftmill.monitor.append import LineFile
from draftmill.monitor.layout import LOG_FILE

_LOGGER = "draftmill"


class RunLog:
    """Sends what the package logs to run.log, and to standard error unless that is run.log already.

    Args:
        directory: the run's
        device_of: device of the worker with this thread name, "" for a thread that is no worker
        on_warning: told each line that is a warning or worse
        console: whether standard error is written as well
    """

    def __init__(
        self, directory: Path, device_of: Callable[[str], str], on_warning: Callable[[str], None], *, console: bool
    ) -> None:
        self.logger = logging.getLogger(_LOGGER)
        self.file = LineFile(directory / LOG_FILE, self._report)
        self._on_warning = on_warning
        self._old_level = self.logger.level
        self._old_propagate = self.logger.propagate
        self.logger.setLevel(logging.INFO)
        self.logger.propagate = False
        formatter = _WorkerFormatter(device_of)
        self._handlers: list[logging.Handler] = [_FileHandler(self.file), _WarningHandler(on_warning)]
        if console and not _is_stderr(self.file):
            self._handlers.append(logging.StreamHandler(sys.stderr))
        for handler in self._handlers:
            handler.setFormatter(formatter)
            self.logger.addHandler(handler)

    def _report(self, message: str) -> None:
        # Not through the log, which is what fails.
        print(f"draftmill: warning: {message}", file=sys.stderr)
        self._on_warning(message)

    def raw(self, text: str) -> None:
        """Add lines that carry their own form, such as a traceback."""
        for line in text.rstrip("\n").split("\n"):
            self.file.write(line)

    def close(self) -> None:
        """Take the handlers away again and close the file. May be called twice."""
        for handler in self._handlers:
            self.logger.removeHandler(handler)
        if self._handlers:
            self.logger.setLevel(self._old_level)
            self.logger.propagate = self._old_propagate
        self._handlers = []
        self.file.close()


def place_of(thread_name: str) -> str:
    """What a thread is called in the log: workers by their name, Python's main thread as "main"."""
    return "main" if thread_name == "MainThread" else thread_name


class _WorkerFormatter(logging.Formatter):
    def __init__(self, device_of: Callable[[str], str]) -> None:
        super().__init__("%(asctime)s %(place)s%(level)s| %(message)s", datefmt="%Y-%m-%d %H:%M:%S")
        self._device_of = device_of

    def format(self, record: logging.LogRecord) -> str:
        name = record.threadName or ""
        device, place = self._device_of(name), place_of(name)
        record.place = f"{place} {device} " if device else f"{place} "
        record.level = f"{record.levelname} " if record.levelno >= logging.WARNING else ""
        return super().format(record)


class _FileHandler(logging.Handler):
    def __init__(self, file: LineFile) -> None:
        super().__init__()
        self._file = file

    def emit(self, record: logging.LogRecord) -> None:
        # One write a record, so that the lines of two threads never mix.
        self._file.write(self.format(record))


class _WarningHandler(logging.Handler):
    def __init__(self, on_warning: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._on_warning = on_warning

    def emit(self, record: logging.LogRecord) -> None:
        self._on_warning(record.getMessage())


def _is_stderr(file: LineFile) -> bool:
    descriptor = file.fileno()
    try:
        return descriptor is not None and os.path.samestat(os.fstat(descriptor), os.fstat(2))
    except OSError:
        return False
