"""What the user sees while answers are made: a bar on a terminal, a line now and then elsewhere.

Owns standard error's progress. Never decides anything.
"""

from __future__ import annotations

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

_LINE_EVERY_S = 30.0


class AnswerProgress:
    """Counts rows and tokens. Use as a context."""

    def __init__(self, what: str, total: int) -> None:
        self._what = what
        self._total = total
        self._num_rows = 0
        self._num_tokens = 0
        self._start_s = self._line_s = time.monotonic()
        console = Console(stderr=True)
        self._bar = Progress(
            TextColumn(what),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task(what, total=total, rate="")

    def __enter__(self) -> AnswerProgress:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def tokens(self, count: int) -> None:
        """Count tokens written."""
        self._num_tokens += count
        self._show()

    def rows(self, count: int = 1) -> None:
        """Count rows finished."""
        self._num_rows += count
        self._show()

    def _show(self) -> None:
        now_s = time.monotonic()
        rate = f"{self._num_tokens / max(now_s - self._start_s, 1e-9):,.0f} tokens/s"
        self._bar.update(self._task, completed=self._num_rows, rate=rate)
        if self._bar.disable and now_s - self._line_s >= _LINE_EVERY_S:
            self._line_s = now_s
            print(f"{self._what}: {self._num_rows}/{self._total}, {rate}", file=sys.stderr, flush=True)
