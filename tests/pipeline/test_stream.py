"""The pipeline's parts alone, on fakes that record the order of events: stream, channel, workers, team, placement."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from draftmill.errors import InputError
from draftmill.pipeline.channel import Channel, ChannelClosed
from draftmill.pipeline.collective import Collective
from draftmill.pipeline.placement import ask_for_queues, place
from draftmill.pipeline.stream import Stream
from draftmill.pipeline.supervision import Stalled, StallWatch, Supervisor, WorkerFailed
from draftmill.pipeline.team import Team
from draftmill.pipeline.tickets import Evaluate, Result, Snapshot, Step
from draftmill.pipeline.workers import DrafterWorker, Route, TargetWorker
from draftmill.records import BatchKind, Blocks, HostBatch, WorkItem

CPU = torch.device("cpu")
SOON_S = 5.0
"""Nothing here takes long; a test that waits this long has failed."""


def stream_of(num_drafters: int = 1, accumulate: int = 1, draws: int = 1, **more: Any) -> Stream:
    """Epochs of five batches."""
    settings: dict[str, Any] = {"num_batches": 15, "num_heldout": 0, "evaluate_every": 4, "max_steps": None, **more}
    return Stream(num_drafters, accumulate, draws, locate=lambda number: divmod(number, 5), **settings)


def start(function: Callable[[], Any]) -> threading.Thread:
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    return thread


# The stream


@pytest.mark.parametrize(
    ("stream", "last_of_epochs"),
    [
        (stream_of(), [4, 9, 14]),
        (stream_of(accumulate=5), [0, 1, 2]),
        (stream_of(accumulate=2), [2, 4, 7]),  # a group over the border is of the epoch that it begins in
        (stream_of(draws=2), [9, 19, 29]),
        (stream_of(max_steps=7), [4]),
        (stream_of(max_steps=10), [4, 9]),
        (stream_of(draws=2, max_steps=9), []),  # between the draws of the last batch
    ],
)
def test_where_epochs_end(stream: Stream, last_of_epochs: list[int]) -> None:
    assert [step for step in range(stream.total_steps) if stream.ends_epoch(step)] == last_of_epochs


@pytest.mark.parametrize("num_drafters", [1, 2, 3, 6])
def test_a_steps_batches_are_the_same_however_many_drafters_share_them(num_drafters: int) -> None:
    stream = stream_of(num_drafters, 6 // num_drafters)
    items = list(stream.items())
    trained = [(item.epoch, item.index) for item in items if item.kind is BatchKind.TRAIN]
    assert trained == [(epoch, index) for epoch in range(3) for index in range(5)]
    assert [item.kind for item in items[15:]] == [BatchKind.EMPTY] * 3
    assert [item.sequence for item in items] == list(range(18))
    assert stream.total_steps == 3


@pytest.mark.parametrize(("num_drafters", "accumulate", "draws"), [(4, 1, 1), (2, 3, 1), (3, 2, 4), (1, 1, 2)])
def test_all_drafters_take_equally_many_batches_also_at_the_uneven_end(
    num_drafters: int, accumulate: int, draws: int
) -> None:
    """B24: 15 training and 5 held-out batches over 4, 2 or 3 drafters."""
    stream = stream_of(num_drafters, accumulate, draws, num_heldout=5)
    items = list(stream.items())
    shares = [[item for item in items if item.sequence % num_drafters == drafter] for drafter in range(num_drafters)]
    assert len({len(share) for share in shares}) == 1
    evaluations = sum(stream.evaluates_after(step) for step in range(stream.total_steps))
    assert len(shares[0]) == stream.total_steps // draws * accumulate + evaluations * stream.heldout_per_drafter
    assert sum(item.kind is BatchKind.HELDOUT for item in items) == 5 * evaluations
    assert sum(item.kind is BatchKind.TRAIN for item in items) == 15


@pytest.mark.parametrize("draws", [1, 3])
@pytest.mark.parametrize("max_steps", [None, 7])
def test_a_stream_that_starts_later_goes_on_with_the_very_next_batch(draws: int, max_steps: int | None) -> None:
    stream = stream_of(2, 2, draws, num_heldout=3, evaluate_every=2, max_steps=max_steps)
    whole = list(stream.items())
    for first in range(stream.total_steps):
        rest = list(stream.items(first))
        # Between two draws the group's batches are needed again; otherwise it is the tail of the whole.
        again = stream.group if first % draws else 0
        numbers = range(first // draws * stream.group, first // draws * stream.group + again)
        assert [(item.epoch, item.index) for item in rest[:again] if item.kind is BatchKind.TRAIN] == [
            divmod(number, 5) for number in numbers if number < 15
        ]
        assert rest[again:] == whole[len(whole) - len(rest) + again :]
        assert rest[0].sequence == stream.sequence_before(first)
        assert rest[0].sequence % stream.num_drafters == 0


@pytest.mark.parametrize("draws", [1, 2, 3, 5])
@pytest.mark.parametrize("every", [1, 2, 3, 4, 7, 100])
@pytest.mark.parametrize("max_steps", [None, 1, 4, 7, 9])
@pytest.mark.parametrize("num_heldout", [0, 3])
def test_the_step_of_a_batch_is_told_by_its_number(
    draws: int, every: int, max_steps: int | None, num_heldout: int
) -> None:
    """As a walk along the steps finds it."""
    stream = stream_of(2, 2, draws, num_heldout=num_heldout, evaluate_every=every, max_steps=max_steps)
    expected: list[tuple[int, bool]] = []
    for step in range(stream.total_steps):
        if step % draws == 0:
            expected += [(step, False)] * 4
        if stream.evaluates_after(step):
            expected += [(step, True)] * 4
    items = list(stream.items())
    assert [stream.step_of(item.sequence) for item in items] == expected
    assert all(stream.step_of(item.sequence)[1] for item in items if item.kind is BatchKind.HELDOUT)


def test_a_route_names_the_step_in_which_a_run_reads_a_batch() -> None:
    """Started between two draws, a run reads the group's batches in the step that it starts at."""
    stream = stream_of(draws=3, num_heldout=1)
    from_start, later = (Route({}, stream, first_step) for first_step in (0, 4))
    assert from_start.step_of(0) == (1, "at step 1")
    assert from_start.step_of(1) == (4, "at step 4")
    assert later.first_sequence == 1
    assert later.step_of(1) == (5, "at step 5")
    assert later.step_of(2) == (6, "at evaluate 6"), "4 rounded up to a group"


def test_evaluations_fall_where_a_group_ends_and_after_the_last_step() -> None:
    def evaluated(**settings: Any) -> list[int]:
        stream = stream_of(num_heldout=1, **settings)
        return [step + 1 for step in range(stream.total_steps) if stream.evaluates_after(step)]

    assert evaluated() == [4, 8, 12, 15]
    assert evaluated(draws=3) == [6, 9, 12, 18, 21, 24, 30, 33, 36, 42, 45]  # 4, 8, 12, 16, ... rounded up to a group
    assert evaluated(draws=3, max_steps=8) == [6, 8]
    assert evaluated(evaluate_every=100) == [15]
    assert [stream_of(num_heldout=0).evaluates_after(step) for step in range(15)] == [False] * 15


# The channel


def channel_of(num_slots: int = 2) -> Channel:
    return Channel(num_slots, 4, 2, CPU, torch.float32)


def batch_of(sequence: int, kind: BatchKind = BatchKind.TRAIN, num_tokens: int = 3) -> HostBatch:
    tokens_BS = torch.zeros(1, 4, dtype=torch.int64)
    blocks = Blocks.empty(4, 1)
    source_T = torch.arange(num_tokens)
    ids = np.array([sequence])
    return HostBatch(sequence, kind, 0, sequence, 0, ids, tokens_BS, None, None, source_T, (blocks, blocks), (0, 0))


def test_batches_come_in_order_whichever_is_filled_first() -> None:
    channel, taken = channel_of(3), []
    for number in (2, 0, 1):
        channel.reserve(number)
    for number in (1, 2):
        channel.fill(number, batch_of(number))
    reader = start(lambda: taken.extend(channel.take(number).batch.sequence for number in range(3)))
    reader.join(0.05)
    assert taken == []
    assert channel.depth() == 2
    channel.fill(0, batch_of(0))
    reader.join(SOON_S)
    assert taken == [0, 1, 2]


def test_a_target_waits_while_the_drafter_is_slots_behind() -> None:
    channel, reserved = channel_of(2), []

    def target() -> None:
        for number in range(4):
            channel.reserve(number)
            reserved.append(number)
            channel.fill(number, batch_of(number))

    writer = start(target)
    writer.join(0.05)
    assert reserved == [0, 1]
    channel.take(0)
    writer.join(0.05)
    assert reserved == [0, 1], "a slot that is being read is not free"
    channel.release(0)
    writer.join(0.05)
    assert reserved == [0, 1, 2]
    channel.take(1)
    channel.release(1)
    writer.join(SOON_S)
    assert reserved == [0, 1, 2, 3]


def test_a_slot_is_never_claimed_by_a_later_batch_whose_turn_it_is_not() -> None:
    """Three targets: the one with batch 0 has not reserved yet when the one with batch 2 comes to the same slot."""
    channel = channel_of(2)
    order: list[int] = []
    later = start(lambda: (channel.reserve(2), order.append(2)))
    later.join(0.05)
    assert order == []
    channel.reserve(0)
    order.append(0)
    channel.fill(0, batch_of(0))
    channel.take(0)
    channel.release(0)
    later.join(SOON_S)
    assert order == [0, 2]


def test_closing_wakes_everybody_and_what_is_out_of_turn_is_an_error() -> None:
    channel, woken = channel_of(1), []

    def waits(call: Callable[[int], Any], number: int) -> Callable[[], None]:
        def wait() -> None:
            with pytest.raises(ChannelClosed):
                call(number)
            woken.append(number)

        return wait

    with pytest.raises(RuntimeError, match="slot of batch 0: expected filling, got free of batch -1"):
        channel.fill(0, batch_of(0))
    channel.reserve(0)
    with pytest.raises(RuntimeError, match="expected taken, got filling"):
        channel.release(0)
    threads = [start(waits(channel.take, 0)), start(waits(channel.reserve, 1))]
    channel.close()
    channel.close()
    for thread in threads:
        thread.join(SOON_S)
    assert sorted(woken) == [0, 1]


# Workers and team, on fakes that record what happens


class FakeLoader:
    """Gives the stream's batches, and knows which came back."""

    def __init__(self, items: list[WorkItem], fails_at: int | None = None) -> None:
        self.items, self.fails_at = iter(items), fails_at
        self.released: list[int] = []
        self.lock = threading.Lock()

    def next(self) -> HostBatch | None:
        with self.lock:
            item = next(self.items, None)
        if item is None:
            return None
        if item.sequence == self.fails_at:
            raise OSError("made up: the disk is gone")
        return batch_of(item.sequence, item.kind, 0 if item.kind is BatchKind.EMPTY else 3)

    def release(self, batch: HostBatch) -> None:
        self.released.append(batch.sequence)

    def close(self) -> None:
        """Nothing waits."""


class NoBeats:
    def beat(self, doing: str, step: int | None = None, busy_s: float = 0.0, wait_s: float = 0.0) -> None:
        """Nobody looks."""


class FakeTarget:
    """Two taps of one feature each: the batch's sequence, and its negative."""

    def forward(self, batch: HostBatch) -> list[torch.Tensor]:
        return [torch.full((1, 4, 1), float(sign * batch.sequence)) for sign in (1, -1)]


class FakeDrafter:
    """Records every call, with what the slot held."""

    def __init__(self, events: list[Any]) -> None:
        self.events = events

    def load(self, slot: Any, draw: int) -> None:
        self.events.append(("load", slot.batch.sequence, draw, slot.features_TF[:3].tolist()[0]))

    def begin(self) -> None:
        self.events.append("begin")

    def accumulate(self) -> None:
        self.events.append("accumulate")

    def reducible(self) -> list[torch.Tensor]:
        self.events.append("sum")
        return []

    def update(self, step: int) -> None:
        self.events.append(("update", step))

    def step_result(self) -> Any:
        return "result"

    def begin_evaluation(self) -> None:
        self.events.append("begin evaluation")

    def evaluate(self) -> None:
        self.events.append("evaluate")

    def evaluated(self) -> list[torch.Tensor]:
        return []

    def evaluation_result(self) -> Any:
        return "score"

    def snapshot(self, request: Any) -> Any:
        self.events.append(("snapshot", request))
        return request


class Rig:
    """A team of fakes."""

    def __init__(
        self,
        stream: Stream,
        *,
        num_targets: int = 1,
        first_step: int = 0,
        slots: int = 4,
        fails_at: int | None = None,
        stall_s: float = 60.0,
        target: Any = None,
        drafter: Callable[[list[Any]], Any] = FakeDrafter,
    ) -> None:
        self.supervisor = Supervisor()
        self.loader = FakeLoader(list(stream.items(first_step)), fails_at)
        channels = {number: channel_of(slots) for number in range(stream.num_drafters)}
        for channel in channels.values():
            self.supervisor.on_close(channel.close)
        route = Route(channels, stream, first_step)
        self.events: dict[int, list[Any]] = {number: [] for number in channels}
        targets = [
            TargetWorker(
                f"target-{index}",
                CPU,
                self.supervisor,
                NoBeats(),
                lambda: target or FakeTarget(),
                self.loader,
                route,
                None,
            )
            for index in range(num_targets)
        ]

        drafters = [
            DrafterWorker(
                f"drafter-{number}",
                CPU,
                self.supervisor,
                NoBeats(),
                lambda number=number: drafter(self.events[number]),
                lambda _built: Collective(None, 0, 1, CPU),
                self.loader,
                channel,
                stream=stream,
                first_step=first_step,
            )
            for number, channel in channels.items()
        ]
        self.stacks: list[str] = []
        began = time.monotonic()
        idle_s = (lambda: time.monotonic() - began) if stall_s < 60 else (lambda: 0.0)
        watch = StallWatch(self.supervisor, idle_s, stall_s, lambda: self.stacks.append("stacks"), lambda: None, 60.0)
        self.team = Team(self.supervisor, targets, drafters, watch, lookahead=2)
        self.team.start()


def results_of(rig: Rig, last: int, first: int = 0) -> list[list[Result]]:
    """Of steps first..last-1, without evaluations."""
    results = [result for step in range(first, last) for result in rig.team.submit(Step(step))]
    return [*results, *rig.team.drain()]


def test_the_order_of_a_drafters_events() -> None:
    rig = Rig(stream_of(2, 2, num_batches=7, num_heldout=1, evaluate_every=2), num_targets=3)
    results = []
    for ticket in (Step(0), Step(1), Evaluate(1), Snapshot(1, "please")):
        results += rig.team.submit(ticket)
        assert len(rig.team.under_way) <= 2
    results += rig.team.drain()
    rig.team.close()
    rig.team.close()
    step = lambda number, loads: [  # noqa: E731
        "begin",
        *(event for load in loads for event in (("load", load, 0, [load, -load]), "accumulate")),
        "sum",
        ("update", number),
    ]
    # Batches 0..3, then 4..6 and an empty one, then a held-out one and an empty one; features of the empty ones are
    # what their slot held before.
    assert rig.events[0] == [
        *step(0, (0, 2)),
        *step(1, (4, 6)),
        "begin evaluation",
        ("load", 8, 0, [8, -8]),
        "evaluate",
        ("snapshot", "please"),
    ]
    assert [event if isinstance(event, str) else event[:3] for event in rig.events[1]] == [
        *["begin", ("load", 1, 0), "accumulate", ("load", 3, 0), "accumulate", "sum", ("update", 0)],
        *["begin", ("load", 5, 0), "accumulate", ("load", 7, 0), "accumulate", "sum", ("update", 1)],
        *["begin evaluation", ("load", 9, 0), "evaluate", ("snapshot", "please")],
    ]
    assert [[result.value for result in pair] for pair in results] == [
        ["result", "result"],
        ["result", "result"],
        ["score", "score"],
        ["please", "please"],
    ]
    assert [(pair[0].num_tokens, pair[0].num_padded) for pair in results] == [(6, 8), (6, 8), (0, 0), (0, 0)]
    assert results[1][1].num_tokens == 3, "an empty batch has none"
    assert all(result.span.seconds() >= result.work_s for pair in results for result in pair)
    assert sorted(rig.loader.released) == list(range(10))


@pytest.mark.parametrize("first_step", [0, 1, 2, 3, 5])
def test_several_draws_hold_their_batches_and_release_them_after_the_last(first_step: int) -> None:
    stream = stream_of(1, 2, draws=3, num_batches=4)
    rig = Rig(stream, first_step=first_step)
    results = results_of(rig, stream.total_steps, first_step)
    rig.team.close()
    loads = [event[1:3] for event in rig.events[0] if event[0] == "load"]
    assert loads == [
        (sequence, step % 3) for step in range(first_step, 6) for sequence in (step // 3 * 2, step // 3 * 2 + 1)
    ]
    assert rig.loader.released == list(range(first_step // 3 * 2, 4))
    fresh = [step % 3 == 0 or step == first_step for step in range(first_step, 6)]
    assert [pair[0].num_tokens for pair in results] == [6 if first else 0 for first in fresh]


def test_a_failing_loader_is_named_as_such() -> None:
    rig = Rig(stream_of(), fails_at=4)
    with pytest.raises(WorkerFailed) as caught:
        results_of(rig, 15)
    assert rig.team.abandon() == []
    assert str(caught.value) == (
        "worker loader on cpu failed reading ahead (target-0 was last at step 4, batch 3 (epoch 1, index 3)): "
        "OSError: made up: the disk is gone"
    )


def test_a_failing_target_and_a_failing_drafter_are_named_with_what_they_were_at() -> None:
    class BadTarget(FakeTarget):
        def forward(self, batch: HostBatch) -> list[torch.Tensor]:
            if batch.sequence == 3:
                raise ArithmeticError("made up")
            return super().forward(batch)

    class BadDrafter(FakeDrafter):
        def accumulate(self) -> None:
            if len(self.events) > 9:
                raise ArithmeticError("made up")

    for rig, said in (
        (Rig(stream_of(), target=BadTarget()), "target-0 on cpu failed at step 4, batch 3 (epoch 1, index 3)"),
        (Rig(stream_of(), drafter=BadDrafter), "drafter-0 on cpu failed at step 3, batch 2 (epoch 1, index 2)"),
    ):
        with pytest.raises(WorkerFailed) as caught:
            results_of(rig, 15)
        assert str(caught.value) == f"worker {said}: ArithmeticError: made up"
        assert rig.team.abandon() == [], "every thread has ended"


def test_a_worker_that_hangs_is_left_behind_and_named() -> None:
    release = threading.Event()

    class Hangs(FakeTarget):
        def forward(self, batch: HostBatch) -> list[torch.Tensor]:
            release.wait()
            return super().forward(batch)

    rig = Rig(stream_of(num_drafters=2), num_targets=1, target=Hangs(), stall_s=0.2)
    with pytest.raises(Stalled):
        results_of(rig, 7)
    assert rig.stacks == ["stacks"]
    assert rig.team.abandon(0.1) == ["target-0"]
    release.set()
    rig.team.targets[0].join(SOON_S)
    assert not rig.team.targets[0].is_alive(), "once it goes on, it finds the channel closed"


def test_a_drafter_that_ends_early_is_a_broken_protocol() -> None:
    rig = Rig(stream_of())
    rig.supervisor.close()
    with pytest.raises(RuntimeError, match="worker drafter-0 ended before its work was done"):
        results_of(rig, 1)
    assert rig.team.abandon() == []


# Placement


def test_a_device_has_more_queues_unless_the_environment_says_how_many(monkeypatch: pytest.MonkeyPatch) -> None:
    for before, after in (({}, "32"), ({"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, "1")):
        environment = dict(before)
        monkeypatch.setattr(os, "environ", environment)
        ask_for_queues()
        assert environment == {"CUDA_DEVICE_MAX_CONNECTIONS": after}


def test_devices_that_are_not_here_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(InputError, match=r"target.devices: cuda:2 is not on this host, which has cuda:0..1"):
        place(["cuda:0", "cuda:2"], ["cuda:1"])
    assert place("auto", "auto").drafters == (torch.device("cuda:1"),)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    placement = place("auto", "auto")
    assert (len(placement.targets), len(placement.drafters)) == (5, 3)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(InputError, match=r"drafter.devices: cuda:0 is not on this host, which has no CUDA device"):
        place(["cpu"], ["cuda:0"])
    placement = place("auto", "auto")
    assert (placement.targets, placement.drafters) == (((CPU,),), (CPU,))


@pytest.mark.parametrize("number", [128, 255, 256, 257, 999])
def test_a_number_that_torch_would_wrap_around_is_refused(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """torch.device keeps 8 bits: cuda:256 would be cuda:0, and cuda:255 the current one."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(InputError, match=rf"target.devices: cuda:{number} is not on this host, which has cuda:0..1"):
        place([["cuda:0", f"cuda:{number}"]], ["cuda:1"])
    with pytest.raises(InputError, match=rf"drafter.devices: cuda:{number} is not on this host"):
        place("auto", [f"cuda:{number}"])


def test_a_target_on_one_kind_of_device_and_a_drafter_on_another_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(
        InputError, match="targets and drafters must all be on CUDA or all on the CPU, got cpu and cuda"
    ):
        place(["cpu"], ["cuda:0"])
