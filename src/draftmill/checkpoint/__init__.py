"""Checkpoints, resuming, and the layouts in which other programs keep a drafter."""

from draftmill.checkpoint.background import BackgroundSaver, HeldUp, Saved
from draftmill.checkpoint.card import record_evaluation
from draftmill.checkpoint.export import Exported, export
from draftmill.checkpoint.resume import check_same_run, finished_message, pick
from draftmill.checkpoint.schedule import SaveSchedule
from draftmill.checkpoint.source import Source, read_published, read_source, warm_start
from draftmill.checkpoint.store import Checkpoint, Entry, best, checkpoints, latest, load, prune, save

__all__ = [
    "BackgroundSaver",
    "Checkpoint",
    "Entry",
    "Exported",
    "HeldUp",
    "SaveSchedule",
    "Saved",
    "Source",
    "best",
    "check_same_run",
    "checkpoints",
    "export",
    "finished_message",
    "latest",
    "load",
    "pick",
    "prune",
    "read_published",
    "read_source",
    "record_evaluation",
    "save",
    "warm_start",
]
