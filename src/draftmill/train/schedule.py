"""Learning rate over the run: a pure function of the step."""

from __future__ import annotations

import math

from draftmill.config import TrainConfig

DECAY_SHARE = 0.2
"""Share of the run over which warmup-stable-decay falls to its end."""


def learning_rate(step: int, total_steps: int, config: TrainConfig) -> float:
    """The rate of step `step` (0-based) of `total_steps`.

    Linear warm-up over `warmup_share` of the steps, then the schedule's shape down to `min_lr_share` of the peak.
    """
    warmup = round(config.warmup_share * total_steps)
    if step < warmup:
        return config.lr * (step + 1) / warmup
    progress = (step - warmup) / max(1, total_steps - warmup)
    low = config.min_lr_share
    return config.lr * (low + (1.0 - low) * _SHAPES[config.schedule](progress))


def _cosine(progress: float) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))


def _stable_decay(progress: float) -> float:
    return min(1.0, max(0.0, (1.0 - progress) / DECAY_SHARE))


_SHAPES = {"cosine": _cosine, "constant": lambda _progress: 1.0, "warmup-stable-decay": _stable_decay}
