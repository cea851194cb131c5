"""One small JSON file that is always whole. Owns how state.json is written and read; knows nothing of its fields.

A new state is written beside the old one and renamed over it. The file beside it is never given back to the disk:
after the rename it is the previous state's, whose blocks are already there, and is written over next time. So a full
disk neither tears the state nor stops it from being written, and `status` can still tell what the run does.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from pathlib import Path
from typing import Any

_BLOCK = 8192
"""Files are padded with spaces to a multiple of this many bytes, so that the next state fits into the last one's."""


class StateFile:
    """Writes one JSON file, whole every time. For one writer at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._spare = path.with_name(f".{path.name}.spare")

    def write(self, value: dict[str, Any]) -> None:
        """Replace the file's contents.

        Raises:
            OSError: the disk refuses; the file then holds its previous contents, whole.
        """
        data = json.dumps(finite(value), indent=1, ensure_ascii=False).encode()
        data += b" " * (-len(data) % _BLOCK)
        # Not O_TRUNC: cutting the file would give its blocks back.
        descriptor = os.open(self._spare, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(descriptor, view) :]
            os.ftruncate(descriptor, len(data))
        finally:
            os.close(descriptor)
        kept = self._spare.with_suffix(".kept")
        with contextlib.suppress(OSError):  # no previous file, or a file system without hard links
            kept.unlink(missing_ok=True)
            os.link(self.path, kept)
        os.replace(self._spare, self.path)
        with contextlib.suppress(FileNotFoundError):
            os.replace(kept, self._spare)

    def remove_spare(self) -> None:
        """Give the file beside back to the disk; the next write makes it anew."""
        with contextlib.suppress(OSError):
            self._spare.unlink(missing_ok=True)


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write a JSON file that is not written again and again, whole. Raises OSError."""
    new = path.with_name(f".{path.name}.new")
    new.write_text(json.dumps(finite(value), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(new, path)


def read_json(path: Path, tries: int = 20) -> dict[str, Any] | None:
    """Read a JSON mapping that may be replaced meanwhile; None where there is none, or what is there is no mapping.

    Raises:
        OSError: it exists and can't be read.
    """
    for _ in range(tries):
        try:
            with open(path, "rb") as file:
                before = os.fstat(file.fileno())
                data = file.read()
            after = os.stat(path)
        except FileNotFoundError:
            return None
        # A file is written over only after another took its name. Still the same one: it was whole all the time.
        if (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns):
            try:
                value = json.loads(data)
            except ValueError:
                return None
            return value if isinstance(value, dict) else None
        time.sleep(0.001)
    return None


def finite(value: Any) -> Any:
    """The same value with every float that JSON can't hold (nan, infinities) as None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    if value is None or isinstance(value, str | int):
        return value
    if hasattr(value, "tolist"):  # a number or an array of numpy or torch, without importing them
        return finite(value.tolist())
    return str(value)
