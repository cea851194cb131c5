"""Reading metrics.jsonl. Owns how lines become series, also where a run was killed in a line or resumed."""

from __future__ import annotations

import json
import os
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from draftmill.monitor.layout import METRICS_FILE


@dataclass(slots=True)
class Metrics:
    """A run's records, each kind in the order of its steps, without those that a resume did over.

    steps        records of optimizer steps (they have a loss)
    evaluations  records of held-out evaluations (they have an acceptance length)
    num_broken   lines that are no record: at most the one a killed process left half written
    """

    steps: list[dict[str, Any]] = field(default_factory=list)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    num_broken: int = 0

    def add(self, line: str, keys: Collection[str] | None = None) -> None:
        """Take one line, keeping all or some of its fields.

        Where the step goes back, a resumed run does those steps over: the later records count.
        """
        try:
            record = json.loads(line)
            step = record["step"] = int(record["step"])
        except (ValueError, KeyError, TypeError):
            self.num_broken += bool(line.strip())
            return
        if keys is not None:
            record = {key: value for key, value in record.items() if key in keys}
        if "loss" in record:
            _replace_from(self.steps, step)
            _replace_from(self.evaluations, step + 1)
            self.steps.append(record)
        if "accept_length" in record:
            _replace_from(self.evaluations, step)
            self.evaluations.append(record)

    def series(self, key: str, *, evaluations: bool = False) -> tuple[list[int], list[float]]:
        """Steps and values of a number, where it is known."""
        xs, ys = [], []
        for record in self.evaluations if evaluations else self.steps:
            value = record.get(key)
            if isinstance(value, int | float) and not isinstance(value, bool):
                xs.append(record["step"])
                ys.append(float(value))
        return xs, ys


def _replace_from(records: list[dict[str, Any]], step: int) -> None:
    while records and records[-1]["step"] >= step:
        records.pop()


def read_metrics(directory: Path) -> Metrics:
    """Every record of a run; none where it has no metrics.jsonl yet."""
    metrics = Metrics()
    try:
        with open(directory / METRICS_FILE, encoding="utf-8", errors="replace") as file:
            for line in file:
                metrics.add(line)
    except FileNotFoundError:
        pass
    return metrics


class MetricsFollower:
    """Reads a file that grows: the whole of it at first, then what was added since.

    Args:
        directory: the run's
        keys: fields that are kept of each record, besides its step
        num_bytes: of a larger file, only this much of its end is read
    """

    def __init__(self, directory: Path, keys: Collection[str], num_bytes: int = 128 * 2**20) -> None:
        self.metrics = Metrics()
        self._path = directory / METRICS_FILE
        self._keys = frozenset(keys) | {"step", "loss", "accept_length"}
        self._num_bytes = num_bytes
        self._at: int | None = None
        self._rest = b""

    def read(self) -> Metrics:
        """Take what was added; the same object every time."""
        try:
            with open(self._path, "rb") as file:
                size = file.seek(0, os.SEEK_END)
                if self._at is None:
                    self._at = max(0, size - self._num_bytes)
                    file.seek(self._at)
                    if self._at:
                        self._at += len(file.readline())  # most likely half a line
                file.seek(self._at)
                data = file.read()
        except FileNotFoundError:
            return self.metrics
        self._at += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self.metrics.add(line.decode(errors="replace"), self._keys)
        return self.metrics
