"""The output of `regenerate` and `synthesize`: JSONL that grows a row at a time and survives being killed.

Owns what lies on disk: the rows, a settings file beside them and a list of failures. A later run with the same
settings continues; one with others is refused before anything is touched.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
from collections import Counter
from collections.abc import Callable
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any

from draftmill.errors import InputError


class AnswerFile:
    """Rows keyed by `prompt_key`, appended whole or not at all. Use as a context; one process at a time.

    FILE                 the rows
    FILE.settings.json   what they were made with
    FILE.failures.jsonl  what the latest run could not answer: `where`, `prompt_key`, `reason`
    """

    def __init__(
        self, path: str | os.PathLike[str], settings: dict[str, Any], remember: Callable[[dict[str, Any]], Any]
    ) -> None:
        """Nothing is touched yet. `remember` gives what is kept in memory of each row that is there already."""
        self.path = Path(path)
        self.failures_path = self.path.with_name(self.path.name + ".failures.jsonl")
        self.done: list[Any] = []
        self.failures: Counter[str] = Counter()
        self.num_added = 0
        self._remember = remember
        self._settings_path = self.path.with_name(self.path.name + ".settings.json")
        self._settings = settings
        self._new = False
        self._file: FileIO | None = None

    def __enter__(self) -> AnswerFile:
        """Open, lock and read what is there.

        Raises:
            InputError: the path can't be written, holds something else, or was made with other settings.
        """
        if self.path.suffix in (".gz", ".zst", ".parquet", ".arrow"):
            raise InputError(f"the output grows line by line, so it must be plain JSONL, got {self.path}")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._new = not self.path.exists()
            self._file = self.path.open("ab", buffering=0)  # what is written is in the file, or an error
        except OSError as error:
            raise InputError(f"{self.path} can't be written: {error.strerror}; give another --output") from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if self.path.stat().st_size:
                self._new = False  # another process may have made and left it since
                self._check_settings()
                self._read_rows()
            self._write_settings()
            self.failures_path.unlink(missing_ok=True)
        except BlockingIOError:
            self._file.close()
            raise InputError(f"another process is writing {self.path}; wait for it, or give another --output") from None
        except OSError as error:
            self._leave_nothing()
            raise self._unwritable(error) from None
        except BaseException:
            self._leave_nothing()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and not self.num_added:
            self._leave_nothing()
        elif self._file is not None:
            self._file.close()

    def _leave_nothing(self) -> None:
        """Close; where there was no file before, and no row has come, there is none after."""
        if self._new:
            self.path.unlink(missing_ok=True)
            self._settings_path.unlink(missing_ok=True)
        if self._file is not None:
            self._file.close()

    def append(self, row: dict[str, Any]) -> None:
        """Add a row. Raises InputError where the disk is full: the rows before it stay, its own part goes next time."""
        assert self._file is not None
        line = json.dumps(row, ensure_ascii=False).encode("utf-8", errors="backslashreplace") + b"\n"
        try:
            rest = memoryview(line)
            while len(rest):
                rest = rest[self._file.write(rest) :]
        except OSError as problem:
            raise self._unwritable(problem) from None
        self.num_added += 1

    def fail(self, where: str, key: str | None, reason: str) -> None:
        """List a prompt that got no answer; the next run tries it again."""
        self.failures[reason.split(":")[0]] += 1
        line = json.dumps({"where": where, "prompt_key": key, "reason": reason}, ensure_ascii=False)
        try:
            with self.failures_path.open("a", encoding="utf-8", errors="backslashreplace") as file:
                file.write(line + "\n")
        except OSError as problem:
            raise self._unwritable(problem) from None

    def _unwritable(self, problem: OSError) -> InputError:
        why = "the disk is full" if problem.errno in (errno.ENOSPC, errno.EDQUOT) else str(problem.strerror)
        kept = len(self.done) + self.num_added
        return InputError(f"{self.path} can't be written: {why}; its {kept} rows are kept, run again to continue")

    def _check_settings(self) -> None:
        try:
            found = json.loads(self._settings_path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            raise InputError(
                f"{self.path} already holds something that was not made here; give another --output"
            ) from None
        for name in {**found, **self._settings}:
            was, now = found.get(name), self._settings.get(name)
            if was != now:
                raise InputError(
                    f"{self.path} was made with {name} {was!r}, this call has {now!r}; give another --output, or the"
                    " same settings to continue"
                )

    def _read_rows(self) -> None:
        """Keep whole rows; a row cut off by a kill has no line end and goes."""
        end = 0
        with self.path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    break
                end += len(line)
                try:
                    self.done.append(self._remember(json.loads(line)))
                except (ValueError, LookupError, TypeError):
                    raise InputError(
                        f"{self.path}, line {number} is no row written here; give another --output"
                    ) from None
        os.truncate(self.path, end)

    def _write_settings(self) -> None:
        whole = self._settings_path.with_name(self._settings_path.name + ".tmp")
        try:
            whole.write_text(json.dumps(self._settings, indent=2) + "\n", encoding="utf-8")
            whole.replace(self._settings_path)
        except BaseException:
            whole.unlink(missing_ok=True)
            raise
