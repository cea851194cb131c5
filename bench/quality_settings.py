"""What one experiment of bench/quality.py is made of: its numbers, and where its files lie under --work.

Owns names and numbers alone; imports no torch, so that the process that only starts others stays light.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Settings:
    """The experiment's numbers. Lengths are in tokens.

    prompts, max_new_tokens  of each evaluation suite, and of each of its answers
    seconds                  GPU seconds of a run whose recipe has the whole time
    points                   moments of a run, evenly spread, at which tau is measured; the last is its end
    """

    chats: int = 22_000
    heldout: int = 256
    prompt_tokens: int = 192
    answer_tokens: int = 384
    max_length: int = 1024
    prompts: int = 32
    max_new_tokens: int = 128
    seconds: float = 60.0
    points: int = 6
    seeds: tuple[int, ...] = (0, 1, 2)


TINY = Settings(
    chats=60,
    heldout=6,
    prompt_tokens=48,
    answer_tokens=24,
    max_length=640,
    prompts=2,
    max_new_tokens=12,
    seconds=3.0,
    points=2,
    seeds=(0,),
)
"""Everything as small as it can be, for a tiny random target on a CPU."""


@dataclass(frozen=True)
class Paths:
    """Where an experiment's files lie."""

    work: Path

    @property
    def data_file(self) -> Path:
        """The data in one compact file, which can be taken elsewhere and given with --data."""
        return self.work / "quality-data.npz"

    @property
    def store(self) -> Path:
        """The training chats as `draftmill prepare` stores them."""
        return self.work / "store"

    @property
    def parts(self) -> Path:
        """What the processes of the data stage write."""
        return self.work / "parts"

    @property
    def runs(self) -> Path:
        """A folder a run: `run.json`, `half/` and `final/` with weights."""
        return self.work / "runs"

    @property
    def runs_file(self) -> Path:
        """A line a finished run."""
        return self.work / "runs.jsonl"

    @property
    def evaluations_file(self) -> Path:
        """A line for each set of weights that was really decoded with."""
        return self.work / "evaluations.jsonl"
