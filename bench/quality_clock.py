"""A run's clock and what is kept of a run as it goes: weights at given moments, with the time and step they are of.

The time is the wall's while one process has the GPU alone: from the first counted step to the end of the last.
Compiling, warming up and measuring tau are not in it.
"""

from __future__ import annotations

import math
import time
from collections import deque
from dataclasses import dataclass, field

import torch

from draftmill.config import TrainConfig
from draftmill.train.schedule import learning_rate

_TICKS = 100_000


class Clock:
    """Seconds since `start`, as seconds and as a share of the run's."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._started: float | None = None

    def start(self) -> None:
        """Begin to count."""
        self._started = time.perf_counter()

    def now(self) -> float:
        """Seconds so far; 0 before the start."""
        return 0.0 if self._started is None else time.perf_counter() - self._started

    def rate(self, train: TrainConfig) -> float:
        """The schedule's learning rate now: its course over the run's time, not over a number of steps that nobody
        knows beforehand."""
        share = min(1.0, self.now() / self.seconds)
        return learning_rate(min(_TICKS - 1, int(share * _TICKS)), _TICKS, train)


@dataclass(frozen=True)
class Kept:
    """Weights on the device as they were at a moment."""

    share: float
    seconds: float
    step: int
    tensors: dict[str, torch.Tensor]


@dataclass
class Course:
    """What came of a run.

    kept  weights at the asked moments, the last at the end
    """

    kept: list[Kept] = field(default_factory=list)
    build_s: float = 0.0
    seconds: float = 0.0
    steps: int = 0
    context_tokens: int = 0
    loss: float = math.nan
    notes: list[str] = field(default_factory=list)


def moments(points: int) -> deque[float]:
    """Shares of a run at which weights are kept, its end included."""
    return deque((index + 1) / points for index in range(points))
