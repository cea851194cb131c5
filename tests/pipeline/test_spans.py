"""Where a worker's time goes: cut without gaps, told once, and counted as waiting or work."""

from __future__ import annotations

import time

import pytest
import torch

from draftmill.pipeline.spans import Clock
from draftmill.pipeline.workers import tell

CPU = torch.device("cpu")


def test_spans_follow_one_another_without_a_gap() -> None:
    clock = Clock(CPU)
    first = clock.cut("work")
    time.sleep(0.02)
    second = clock.cut("waiting for data")
    time.sleep(0.01)
    third = clock.cut("work")
    assert first.end is second.begin
    assert second.end is third.begin
    assert second.seconds() >= 0.02
    assert third.seconds() >= 0.01
    whole = third.end.at_s - first.begin.at_s
    assert first.seconds() + second.seconds() + third.seconds() == pytest.approx(whole)
    assert clock.finished() == {
        "work": pytest.approx(first.seconds() + third.seconds()),
        "waiting for data": pytest.approx(second.seconds()),
    }
    assert clock.finished() == {}, "told once"


def test_what_begins_with_waiting_is_told_as_waiting() -> None:
    told = []

    class Beats:
        def beat(self, doing: str, step: int | None = None, busy_s: float = 0.0, wait_s: float = 0.0) -> None:
            told.append((doing, step, busy_s, wait_s))

    tell(Beats(), {"work": 1.0, "sum": 0.5, "waiting for data": 0.25, "waiting for a ticket": 2.0}, "forward", 3)
    tell(Beats(), {}, "done")
    assert told == [("forward", 3, 1.5, 2.25), ("done", None, 0.0, 0.0)]
