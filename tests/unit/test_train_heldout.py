"""The held-out acceptance length of a run: which slots are counted, and in which bucket, against counts by hand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from draftmill.config import TrainConfig
from draftmill.pipeline.channel import Slot
from draftmill.pipeline.tickets import Evaluate, Result
from draftmill.records import BatchKind, Blocks, HostBatch
from draftmill.step.choose import Built
from draftmill.step.state import StepState
from draftmill.train.optimizer import FlatAdamW
from draftmill.train.replica import EvaluationValues, Replica
from draftmill.train.report import Reporter
from small_steps import ANCHORS, BLOCK, CONTEXT, SHAPE, small_state

BUCKETS = 3
Scored = list[tuple[int, list[int]]]
"""Blocks: how many slots each has, and which of slots 1..K-1 are right."""

# Right or wrong past a block's end does not count, whatever stands there.
SHORT: Scored = [(3, [1, 1, 0]), (3, [1, 0, 1]), (1, [1, 1, 1])]
SHORT_TOO: Scored = [(3, [1, 1, 1])]
LONG: Scored = [(2, [1, 1, 1]), (1, [0, 0, 0])]
BATCHES = [(0, SHORT), (1, LONG), (0, SHORT_TOO)]
AT_RISK = [[4, 3, 2], [2, 1, 0], [0, 0, 0]]
ACCEPTED = [[4, 2, 1], [1, 1, 0], [0, 0, 0]]


class KnownVerdicts:
    """A step that says of every batch what it was given, in turn; blocks that no batch uses are right."""

    def __init__(self, state: StepState, verdicts: Iterator[Scored]) -> None:
        self.state, self.verdicts = state, verdicts

    def running(self) -> Any:
        return nullcontext()

    def evaluate(self, num_scored: int, num_blocks: int) -> None:
        scored = next(self.verdicts)
        assert (num_scored, num_blocks) == (sum(slots for slots, _ in scored), len(scored))
        self.state.correct_AK.fill_(True)
        self.state.correct_AK[: len(scored), 1:] = torch.tensor([right for _, right in scored], dtype=torch.bool)


def slot_of(bucket: int, scored: Scored, kind: BatchKind = BatchKind.HELDOUT) -> Slot:
    """A batch of one document with these blocks, as a target hands it over."""
    blocks = Blocks.empty(CONTEXT, ANCHORS)
    blocks.positions_T.copy_(torch.arange(CONTEXT))
    blocks.anchors_A[: len(scored)] = torch.arange(len(scored))
    slots = [slots for slots, _ in scored]
    blocks.slots_A[: len(scored)] = torch.tensor(slots)
    slot = Slot(CONTEXT, SHAPE.feature_size, torch.device("cpu"), torch.float32)
    tokens = torch.zeros(1, CONTEXT, dtype=torch.int64)
    slot.batch = HostBatch(
        0, kind, 0, 0, bucket, np.zeros(1), tokens, None, None, torch.arange(CONTEXT), (blocks,), (sum(slots),)
    )
    return slot


def evaluated(replica: Replica, slots: Sequence[Slot]) -> EvaluationValues:
    """One evaluation over these batches, as a drafter's worker does it."""
    replica.begin_evaluation()
    for slot in slots:
        replica.load(slot, 0)
        replica.evaluate()
    replica.evaluated()
    return replica.evaluation_result()


@pytest.fixture
def replica() -> Replica:
    """A replica whose step knows its verdicts, for two evaluations of BATCHES."""
    state = small_state()
    step = KnownVerdicts(state, iter([scored for _, scored in BATCHES] * 2))
    optimizer = FlatAdamW(state.flat, TrainConfig())
    return Replica(state, Built(step, lambda: None, ""), optimizer, lambda _: 0.0, BUCKETS)  # type: ignore[arg-type]


def test_a_cut_block_counts_with_the_slots_it_has_and_in_its_batch_s_bucket(replica: Replica) -> None:
    assert BLOCK - 1 == 3
    slots = [slot_of(bucket, scored) for bucket, scored in BATCHES]
    expected = torch.tensor([AT_RISK, ACCEPTED]).transpose(0, 1)
    assert torch.equal(evaluated(replica, slots).read(), expected)
    # The next evaluation starts at nothing, and a batch that only fills a group adds nothing.
    assert torch.equal(evaluated(replica, [*slots, slot_of(0, [], BatchKind.EMPTY)]).read(), expected)


def test_the_metrics_tell_the_acceptance_length_of_each_bucket_and_of_all(replica: Replica) -> None:
    values = evaluated(replica, [slot_of(bucket, scored) for bucket, scored in BATCHES])
    records: list[dict[str, Any]] = []
    run: Any = SimpleNamespace(
        metrics=records.append, phase=lambda _phase: None, log=SimpleNamespace(info=lambda _line: None)
    )
    nothing: Any = None
    reporter = Reporter(nothing, run, lambda _record: None, nothing)
    reporter.take([[Result("drafter-0", Evaluate(6), values, nothing)]])
    # Buckets: 1 + 4/4 + 2/3 + 2/3 * 1/2 and 1 + 1/2 + 1/2, and none in the third; all: 5/6, 3/4 and 1/2 at each slot.
    joint = [5 / 6, 5 / 6 * 3 / 4, 5 / 6 * 3 / 4 / 2]
    (record,) = records
    assert (record["step"], record["accept_length_by_bucket"][2]) == (7, None)
    assert record["accept_length_by_bucket"][:2] == pytest.approx([3.0, 2.0])
    assert record["accept_by_slot"] == pytest.approx(joint)
    assert record["accept_length"] == reporter.heldout_after(6).accept_length == pytest.approx(1 + sum(joint))
    assert reporter.heldout_after(7).accept_length is None, "those are other weights"
