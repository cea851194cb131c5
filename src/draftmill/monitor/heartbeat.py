"""What one worker is doing, told by itself. Owns the counters of a worker; never locks, writes or waits.

A beat marks progress: something was begun or finished. A worker that waits beats once, before it waits, and not
again until it goes on; so "nobody has beaten for long" means that the run hangs, and whoever is not waiting is why.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any

_WINDOW = 30
"""Samples, one a second, over which the busy share is taken."""


class Heartbeat:
    """One worker's sign of life. The worker writes it, the monitor's thread reads it; a beat costs a microsecond."""

    __slots__ = ("_samples", "_wakes", "beat_at", "busy_s", "device", "doing", "name", "progress_at", "step", "wait_s")

    def __init__(self, name: str, device: str) -> None:
        now = time.monotonic()
        self.name = name
        self.device = device
        self.doing = "starting"
        self.step: int | None = None
        self.busy_s = 0.0
        self.wait_s = 0.0
        self.beat_at = now
        self.progress_at = now
        self._samples: deque[tuple[float, float]] = deque(maxlen=_WINDOW)

    def beat(self, doing: str, step: int | None = None, busy_s: float = 0.0, wait_s: float = 0.0) -> None:
        """Say what begins now, and add the seconds worked and waited since the last beat.

        Args:
            doing: a word or two, as in "forward" or "waiting for target"; what begins with "waiting" counts as waiting
            step: optimizer step or batch number it works on; None keeps the last one
            busy_s: seconds of work that just ended
            wait_s: seconds of waiting that just ended
        """
        now = time.monotonic()
        # The same words with nothing done since are a sign of life, but no progress.
        if doing != self.doing or busy_s > 0.0 or (step is not None and step != self.step):
            self.progress_at = now
        self.doing = doing
        if step is not None:
            self.step = step
        self.busy_s += busy_s
        self.wait_s += wait_s
        self.beat_at = now

    def sample(self) -> None:
        """Remember the counters of this second, for the recent busy share. Called by the monitor's thread."""
        self._samples.append((self.busy_s, self.wait_s))

    def busy_share(self) -> float | None:
        """Share of the recent time spent working, 0..1; None before any was reported."""
        busy, wait = self.busy_s, self.wait_s
        if self._samples:
            first_busy, first_wait = self._samples[0]
            if busy + wait > first_busy + first_wait:
                busy, wait = busy - first_busy, wait - first_wait
        return busy / (busy + wait) if busy + wait > 0.0 else None

    def to_json(self, now: float) -> dict[str, Any]:
        """The worker's entry of state.json. `now` and the stamps are seconds of the monotonic clock."""
        return {
            "device": self.device,
            "doing": self.doing,
            "step": self.step,
            "beat_at": self.beat_at,
            "since_beat_s": round(max(0.0, now - self.beat_at), 3),
            "since_progress_s": round(max(0.0, now - self.progress_at), 3),
            "busy_s": round(self.busy_s, 3),
            "wait_s": round(self.wait_s, 3),
            "busy_share": self.busy_share(),
        }
