"""What a run is doing, in the words that every tool shows. Owns the names and which of them are endings."""

from __future__ import annotations

from enum import StrEnum


class Phase(StrEnum):
    """What a run is doing, or how it ended. The value is the word shown and written to state.json."""

    STARTING = "starting"
    LOADING_DATA = "loading data"
    LOADING_TARGETS = "loading targets"
    WARMING_UP = "warming up"
    TRAINING = "training"
    EVALUATING = "evaluating"
    SAVING = "saving"
    FINISHED = "finished"
    STOPPED = "stopped"
    CRASHED = "crashed"
    STALLED = "stalled"
    """No progress. Judged by whoever reads a live run; also the ending of a run that gave up waiting."""


ENDINGS = frozenset({Phase.FINISHED, Phase.STOPPED, Phase.CRASHED, Phase.STALLED})
LOADING = frozenset({Phase.STARTING, Phase.LOADING_DATA, Phase.LOADING_TARGETS, Phase.WARMING_UP})
WORKING = frozenset({Phase.TRAINING, Phase.EVALUATING, Phase.SAVING})
