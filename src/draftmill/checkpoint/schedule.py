"""When a checkpoint is due: every n steps, and every m minutes, whichever comes first.

Where several processes train together, one of them asks and the others are told: their clocks differ.
"""

from __future__ import annotations

import time
from collections.abc import Callable


class SaveSchedule:
    """Counts steps and minutes since the last save, or since the start."""

    def __init__(self, every_steps: int, every_minutes: float, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._every_steps, self._every_s = every_steps, 60.0 * every_minutes
        self._clock_s = clock_s
        self._saved_s = clock_s()

    def due(self, step: int) -> bool:
        """Whether a checkpoint should be written after this optimizer step (1 is the first)."""
        return step % self._every_steps == 0 or self._clock_s() - self._saved_s >= self._every_s

    def saved(self) -> None:
        """A save was begun: the minutes count from now. The steps are counted from 0, so that a resumed run saves at
        the same steps."""
        self._saved_s = self._clock_s()
