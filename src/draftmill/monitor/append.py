"""A file of lines that is only ever added to. Owns what happens when the disk refuses: nothing torn, nothing silent.

Lines that could not be written wait in memory, bounded, and follow as soon as the disk takes them again.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path

_MAX_PENDING = 20_000


class LineFile:
    """Appends whole lines to a file. Any thread may write.

    Args:
        path: the file, made if missing
        report: told once, in one line, when the disk begins to refuse, and once when it takes lines again
    """

    def __init__(self, path: Path, report: Callable[[str], None]) -> None:
        self.path = path
        self._report = report
        self._lock = threading.Lock()
        self._pending: deque[bytes] = deque()
        self._num_lost = 0
        self._refused = False
        self._descriptor: int | None = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._end_line()

    def _end_line(self) -> None:
        # A killed writer may have left half a line.
        with open(self.path, "rb") as file:
            if file.seek(0, os.SEEK_END) and (file.seek(-1, os.SEEK_END), file.read(1))[1] != b"\n":
                self.write("")

    def write(self, line: str) -> bool:
        """Add one line and hand it to the system at once. False where the disk refused and the line waits."""
        message = None
        with self._lock:
            if self._descriptor is None:
                return False
            self._pending.append(line.encode(errors="replace") + b"\n")
            if len(self._pending) > _MAX_PENDING:
                self._pending.popleft()
                self._num_lost += 1
            error = self._flush()
            if error is not None and not self._refused:
                self._refused = True
                message = f"{self.path.name} can't be written: {error.strerror}; lines wait in memory"
            elif error is None and self._refused:
                self._refused = False
                message = f"{self.path.name} is written again, {self._num_lost or 'no'} lines lost"
                self._num_lost = 0
        if message is not None:
            self._report(message)
        return error is None

    def _flush(self) -> OSError | None:
        while self._pending:
            line = self._pending[0]
            try:
                self._write_whole(line)
            except OSError as error:
                return error
            self._pending.popleft()
        return None

    def _write_whole(self, line: bytes) -> None:
        assert self._descriptor is not None
        written = os.write(self._descriptor, line)
        if written == len(line):
            return
        # The disk filled up inside the line: take the piece back, so that no line is ever torn.
        with contextlib.suppress(OSError):
            os.ftruncate(self._descriptor, os.fstat(self._descriptor).st_size - written)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def fileno(self) -> int | None:
        """The open descriptor, or None once closed."""
        return self._descriptor

    def close(self) -> None:
        """Close the file; lines that still wait are tried once more, and counted if lost. May be called twice."""
        with self._lock:
            if self._descriptor is None:
                return
            error = self._flush()
            os.close(self._descriptor)
            self._descriptor = None
            num_lost = self._num_lost + len(self._pending)
            self._pending.clear()
        if error is not None:
            self._report(f"{self.path.name}: {num_lost} lines were lost: {error.strerror}")


def last_lines(path: Path, num_lines: int, num_bytes: int = 65536) -> list[str]:
    """The last lines of a file, out of its last bytes; empty where it can't be read."""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - num_bytes))
            data = file.read()
    except OSError:
        return []
    lines = data.decode(errors="replace").splitlines()
    return (lines[1:] if size > num_bytes else lines)[-num_lines:]
