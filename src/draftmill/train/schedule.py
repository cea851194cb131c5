"""Learning rate over the run: a pure function of the step."""

from __future__ import annotations

import math

from draftmill.config import TrainConfig


def learning_rate(step: int, total_steps: int, config: TrainConfig) -> float:
    """The rate of step `step` (0-based) of `total_steps`.

    Linear warm-up over `warmup_share` of the steps, then the schedule's shape down to `min_lr_share` of the peak.
    """
    warmup = round(config.warmup_share * total_steps)
    if step < warmup:
        return config.lr * (step + 1) / warmup
    low = config.min_lr_share
    return config.lr * (low + (1.0 - low) * _SHAPES[config.schedule](step, warmup, total_steps, config))


def _cosine(step: int, warmup: int, total_steps: int, _config: TrainConfig) -> float:
    progress = (step - warmup) / max(1, total_steps - warmup)
    return 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))


def _constant(_step: int, _warmup: int, _total_steps: int, _config: TrainConfig) -> float:
    return 1.0


def _stable_decay(step: int, warmup: int, total_steps: int, config: TrainConfig) -> float:
    """Falls linearly over the last `decay_share` of all steps; the first of them is the last at the peak."""
    decay = min(total_steps - warmup, round(config.decay_share * total_steps))
    return min(1.0, max(0.0, (total_steps - step) / max(1, decay)))


_SHAPES = {"cosine": _cosine, "constant": _constant, "warmup-stable-decay": _stable_decay}
