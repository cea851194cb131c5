"""Where a worker's time goes: moments and the spans between them, by the device's own clock on CUDA.

There the host runs ahead: a call returns long before its work is done, and a wait for an event costs the host nothing.
So a span's ends are events on the worker's stream, and what lies between is what the device did, or waited for. Knows
nothing of what is worked on.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

import torch


class Moment:
    """A point in a worker's time: on CUDA when its stream gets there, else now."""

    def __init__(self, device: torch.device) -> None:
        self.at_s = time.monotonic()
        self.event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self.event = torch.cuda.Event(enable_timing=True)
            self.event.record()


@dataclass(frozen=True)
class Span:
    """A stretch of a worker's time, and what it was spent on."""

    kind: str
    begin: Moment
    end: Moment

    def done(self) -> bool:
        """Whether it is over on the device, too. Waits for nothing."""
        return self.end.event is None or self.end.event.query()

    def seconds(self) -> float:
        """How long it lasted; waits for the device to be there."""
        if self.begin.event is None or self.end.event is None:
            return self.end.at_s - self.begin.at_s
        self.end.event.synchronize()
        return self.begin.event.elapsed_time(self.end.event) / 1000.0


class Clock:
    """A worker's time cut into spans: each begins where the one before it ended. Used by its thread only."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.last = Moment(device)
        self._open: deque[Span] = deque()

    def cut(self, kind: str) -> Span:
        """End a span here, and tell what it was spent on."""
        span = Span(kind, self.last, Moment(self.device))
        self.last = span.end
        self._open.append(span)
        return span

    def finished(self) -> dict[str, float]:
        """Seconds by kind of the spans that have ended since this was last asked. Waits for nothing."""
        found: dict[str, float] = {}
        while self._open and self._open[0].done():
            span = self._open.popleft()
            found[span.kind] = found.get(span.kind, 0.0) + span.seconds()
        return found
