"""What `prepare` found and made.

Owns the report's form. Never computes a sample and never prints (show.py does).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np


@dataclass(slots=True)
class PrepareReport:
    """What became of the rows.

    output               the store's folder
    hit                  the store was there already, made from the same inputs and settings
    verdict              why it was a hit or a miss
    rows                 rows read
    kept                 samples in the store
    skipped, examples    refused rows by reason, and one of each with its place
    duplicates           rows left out because an earlier one gave the same tokens and mask
    notes                kept rows that something was done to, or left out of, by what it was
    num_tokens, num_supervised   of all samples
    histogram            [first, last+1, samples] of each range of lengths
    sample               a sample's text in parts, and whether the target writes each
    """

    output: str
    hit: bool = False
    verdict: str = ""
    rows: int = 0
    kept: int = 0
    skipped: dict[str, int] = field(default_factory=dict)
    examples: dict[str, str] = field(default_factory=dict)
    duplicates: int = 0
    duplicate_example: str = ""
    notes: dict[str, int] = field(default_factory=dict)
    num_tokens: int = 0
    num_supervised: int = 0
    histogram: list[tuple[int, int, int]] = field(default_factory=list)
    sample: list[tuple[str, bool]] = field(default_factory=list)

    @property
    def num_skipped(self) -> int:
        """Rows refused, duplicates not among them."""
        return sum(self.skipped.values())

    @property
    def bad_share(self) -> float:
        """Refused rows of all rows."""
        return self.num_skipped / self.rows if self.rows else 0.0

    @property
    def supervised_share(self) -> float:
        """Tokens the target writes, of all tokens."""
        return self.num_supervised / self.num_tokens if self.num_tokens else 0.0

    def add(self, record: dict[str, Any]) -> None:
        """Count in what a shard's record says; shards in order, so that the examples are the first ones."""
        self.rows += record["rows"]
        for mine, theirs in ((self.skipped, record["skipped"]), (self.notes, record["notes"])):
            for reason, count in theirs.items():
                mine[reason] = mine.get(reason, 0) + count
        for reason, example in record["examples"].items():
            self.examples.setdefault(reason, example)

    def reasons(self, most: int = 3) -> str:
        """The commonest reasons with their counts and an example, on one line."""
        common = sorted(self.skipped, key=lambda reason: -self.skipped[reason])[:most]
        return "; ".join(f"{self.skipped[reason]} × {reason} ({self.examples[reason]})" for reason in common)

    def to_json(self) -> dict[str, Any]:
        """A plain mapping, without what is found anew in each call (output, hit, verdict, sample)."""
        return {key: value for key, value in asdict(self).items() if key not in ("output", "hit", "verdict", "sample")}


def length_histogram(lengths: np.ndarray, most_bins: int = 12) -> list[tuple[int, int, int]]:
    """Ranges of like width, rounded to whole steps, and the samples in each."""
    longest = int(lengths.max())
    raw = max(1, -(-(longest + 1) // most_bins))
    magnitude = 1 << max(0, raw.bit_length() - 3)
    step = -(-raw // magnitude) * magnitude
    counts = np.bincount(lengths // step)
    return [(index * step, (index + 1) * step, int(count)) for index, count in enumerate(counts)]
