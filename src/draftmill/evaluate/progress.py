"""What the user sees while an evaluation decodes: a bar on a terminal, a line now and then elsewhere.

Owns standard error's progress. Measures nothing that is reported.
"""

from __future__ import annotations

import sys
import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from draftmill.evaluate.run import Trial

LINE_EVERY_S = 15.0


class DecodingProgress:
    """Counts answers, each of them decoded in all ways. Use as a context."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        columns = (TextColumn("decoding"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._bar.add_task("decoding", total=None)
        self._start_s = self._line_s = time.monotonic()

    def __enter__(self) -> DecodingProgress:
        self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.stop()

    def trial(self, done: int, total: int, trial: Trial) -> None:
        """Count an answer: the done-th of so many."""
        self._bar.update(self._task, completed=done, total=total)
        now_s = time.monotonic()
        if self._bar.disable and (now_s - self._line_s >= LINE_EVERY_S or done == 1):
            self._line_s = now_s
            left_s = (now_s - self._start_s) / done * (total - done)
            print(f"decoded {done}/{total}, about {left_s:.0f} s left", file=sys.stderr, flush=True)
