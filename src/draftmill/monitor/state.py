"""One small JSON file that is always whole. Owns how state.json is written and read; knows nothing of its fields.

A new state is written beside the old one and renamed over it. The file beside it is never given back to the disk:
after the rename it is the previous state's, whose blocks are already there. So a full disk neither tears the state
nor stops it from being written, and `status` can still tell what the run does.
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


def read_json(path: Path, tries: int = 5) -> dict[str, Any] | None:
    """Read a JSON mapping that may be replaced meanwhile; None where there is none, or what is there is no mapping.

    Raises:
        OSError: it exists and can't be read.
    """
    for attempt in range(tries):
        try:
            value = json.loads(path.read_bytes())
        except FileNotFoundError:
            return None
        except ValueError:
            # Overwritten while it was being read: only possible for a reader slower than two writes.
            if attempt + 1 < tries:
                time.sleep(0.02)
            continue
        return value if isinstance(value, dict) else None
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
