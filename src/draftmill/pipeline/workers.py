"""The worker threads: one for each target replica, one for each drafter replica.

    target worker    takes    the next batch in order, from the loader
                     waits    for the free slot of that batch in its drafter's channel (backpressure)
                     gives    the features, written into the slot, and frees nothing else
    drafter worker   takes    a ticket from the main thread, then its batches, in order, from its channel
                     waits    for the targets, and for the other drafters in the all-reduce
                     gives    a result for each ticket; releases a slot once it has copied from it for the last time
    both             wait     for a turn, where they share a GPU (turns.py)

Knows no drafter mathematics: what a step, an update or an evaluation is, the replica says. All CUDA work of a worker
runs on the worker's own stream.
"""

from __future__ import annotations

import contextlib
import queue
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Protocol

import torch

from draftmill.pipeline.channel import Channel, ChannelClosed, Slot
from draftmill.pipeline.features import FeatureCache, pack
from draftmill.pipeline.spans import Clock, Span
from draftmill.pipeline.stream import Stream
from draftmill.pipeline.supervision import Supervisor, Worker, WorkerFailed
from draftmill.pipeline.tickets import (
    SUM,
    WAITING_DATA,
    WAITING_DRAFTER,
    WAITING_FEATURES,
    WAITING_TICKET,
    WAITING_TURN,
    WORK,
    Evaluate,
    Result,
    Snapshot,
    Ticket,
)
from draftmill.pipeline.turns import Turns, computing, cores
from draftmill.records import BatchKind, HostBatch


def named(batch: HostBatch) -> str:
    """A batch as an error names it: its number, and which one it is in its epoch, or of the held-out samples."""
    if batch.kind is BatchKind.EMPTY:
        return f"batch {batch.sequence} (an empty one)"
    where = "held out" if batch.kind is BatchKind.HELDOUT else f"epoch {batch.epoch + 1}"
    return f"batch {batch.sequence} ({where}, index {batch.index})"


class Beats(Protocol):
    """A worker's sign of life, as the monitor gives it."""

    def beat(self, doing: str, step: int | None = None, busy_s: float = 0.0, wait_s: float = 0.0) -> None:
        """Say what begins, and add the seconds worked and waited since the last beat."""


class Batches(Protocol):
    """Where batches come from and go back to, as the loader is."""

    def next(self) -> HostBatch | None:
        """The next batch in order, or None at the end."""

    def release(self, batch: HostBatch) -> None:
        """Give a batch's buffers back."""

    def close(self) -> None:
        """Unblock everybody."""


class TargetReplica(Protocol):
    """A frozen target on one device."""

    def forward(self, batch: HostBatch) -> list[torch.Tensor]:
        """The tapped layers' outputs, L tensors [B, S, H], on the replica's device."""


class DrafterReplica(Protocol):
    """A drafter on one device, with its step and optimizer."""

    def load(self, slot: Slot, draw: int) -> None:
        """Copy a batch from its slot into the static inputs."""

    def begin(self) -> None:
        """Start an optimizer step."""

    def accumulate(self) -> None:
        """Forward and backward of the loaded batch."""

    def reducible(self) -> list[torch.Tensor]:
        """What is summed over all drafters before the update."""

    def update(self, step: int) -> None:
        """One optimizer update."""

    def step_result(self) -> Any:
        """What the main thread is told about the step; may hold copies still under way."""

    def begin_evaluation(self) -> None:
        """Start an evaluation."""

    def evaluate(self) -> None:
        """Score the loaded batch."""

    def evaluated(self) -> list[torch.Tensor]:
        """What is summed over all drafters after an evaluation."""

    def evaluation_result(self) -> Any:
        """What the main thread is told about the evaluation."""

    def snapshot(self, request: Any) -> Any:
        """Whatever the main thread asks about the weights, between two steps."""


@dataclass(frozen=True)
class Route:
    """Which channel and which place in it a batch of the stream has, and which step it is for.

    first_step  the step that the run starts at
    """

    channels: dict[int, Channel]
    stream: Stream
    first_step: int

    @cached_property
    def first_sequence(self) -> int:
        """The number of the run's first batch."""
        return self.stream.sequence_before(self.first_step)

    def of(self, sequence: int) -> tuple[Channel, int]:
        """The channel of a batch, and its number in that channel."""
        num_drafters = self.stream.num_drafters
        return self.channels[sequence % num_drafters], (sequence - self.first_sequence) // num_drafters

    def step_of(self, sequence: int) -> tuple[int, str]:
        """The step, from 1, in which a drafter reads a batch first, or after which; and how an error says it."""
        step, evaluates = self.stream.step_of(sequence)
        step = max(step, self.first_step) + 1
        return step, f"at {'evaluate' if evaluates else 'step'} {step}"


FIRST = -1
"""Priority of a stream whose kernels go before those of others on the device."""


@contextlib.contextmanager
def own_stream(device: torch.device, priority: int = 0) -> Iterator[torch.cuda.Stream | None]:
    """Make a CUDA device current in this thread, with a stream of its own; nothing on a CPU.

    A drafter's goes FIRST: where a target shares its device without turns (turns.py), that one has what the drafter
    leaves, while the drafter waits for features, instead of both at half their speed with batches piling up between
    them. With turns it is the sum and the update that go first. A graph keeps the priority of the stream that it was
    captured on.
    """
    if device.type != "cuda":
        yield None
        return
    torch.cuda.set_device(device)
    stream = torch.cuda.Stream(device, priority=priority)
    with torch.cuda.stream(stream):
        yield stream


@contextlib.contextmanager
def streams_on(devices: Iterable[torch.device]) -> Iterator[None]:
    """Make streams of this thread's own current on other CUDA devices. Leaves the last of them as the current device.

    A copy to another device waits for the current stream there: by default the one that all threads share, whose turn
    may come after whatever waits in the device's few queues.
    """
    with contextlib.ExitStack() as stack:
        for device in devices:
            if device.type == "cuda":
                stack.enter_context(torch.cuda.stream(torch.cuda.Stream(device)))
        yield


def tell(beats: Beats, ended: dict[str, float], doing: str, step: int | None = None) -> None:
    """Say what begins, and what the time was spent on that has ended since."""
    wait_s = sum(seconds for kind, seconds in ended.items() if kind.startswith("waiting"))
    beats.beat(doing, step, busy_s=sum(ended.values()) - wait_s, wait_s=wait_s)


def _event(device: torch.device) -> torch.cuda.Event | None:
    """What this thread's stream has been given is done after it; None on a CPU, where it is done."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record()
    return event


class TargetWorker(Worker):
    """Runs one target replica over the batches, in order, shared with the other target workers."""

    def __init__(
        self,
        name: str,
        device: torch.device,
        supervisor: Supervisor,
        beats: Beats,
        build: Callable[[], TargetReplica],
        batches: Batches,
        route: Route,
        cache: FeatureCache | None,
        turns: Turns | None = None,
    ) -> None:
        """turns: those of the device, where a drafter shares it."""
        super().__init__(name, str(device), supervisor)
        self.device, self.beats, self.build = device, beats, build
        self.batches, self.route, self.cache, self.turns = batches, route, cache, turns
        self.drafter_wait_s = 0.0

    def work(self) -> None:
        """Until the loader ends: batch, slot, features, hand over."""
        others = {channel.device for channel in self.route.channels.values()} - {self.device}
        with streams_on(sorted(others, key=str)), own_stream(self.device), torch.no_grad():
            self.beats.beat("warming up")
            replica = self.build()
            clock = Clock(self.device)
            while True:
                self._tell(clock, "waiting for data")
                batch = self._next()
                clock.cut(WAITING_DATA)
                if batch is None:
                    break
                self.step, at = self.route.step_of(batch.sequence)
                self.doing = f"{at}, {named(batch)}"
                channel, number = self.route.of(batch.sequence)
                self._tell(clock, "waiting for drafter", batch.sequence)
                slot = channel.reserve(number)
                if slot.read is not None:
                    torch.cuda.current_stream().wait_event(slot.read)
                self._fill(clock, replica, batch, slot)
                written = _event(self.device)
                clock.cut(WORK)
                channel.fill(number, batch, written)
                self._tell(clock, "handing over", batch.sequence)
            self._tell(clock, "done")

    def _tell(self, clock: Clock, doing: str, sequence: int | None = None) -> None:
        """Say what begins, and how long whatever has ended since took."""
        ended = clock.finished()
        self.drafter_wait_s += ended.get(WAITING_DRAFTER, 0.0)
        tell(self.beats, ended, doing, sequence)

    def _next(self) -> HostBatch | None:
        try:
            return self.batches.next()
        except Exception as error:  # the reading thread's, which tells whoever asks for what it could not read
            raise WorkerFailed("loader", "cpu", f"reading ahead ({self.name} was last {self.doing})", error) from error

    def _fill(self, clock: Clock, replica: TargetReplica, batch: HostBatch, slot: Slot) -> None:
        """Features into the slot, kept ones or made by a forward; they are there when this thread's stream is."""
        if self.cache is not None and slot.read is not None:
            slot.read.synchronize()  # the cache writes from the host, on no stream of this worker's
        clock.cut(WAITING_DRAFTER)
        if not batch.num_tokens or (self.cache is not None and self.cache.read(batch, slot.features_TF)):
            return
        waits = partial(self._tell, clock, WAITING_TURN, batch.sequence)
        with computing(self.device, self.turns, first=False, waits=waits):
            clock.cut(WAITING_DRAFTER)
            self._tell(clock, "forward", batch.sequence)
            taps = replica.forward(batch)
            source = batch.source_T.to(self.device, non_blocking=True)
            pack(taps, source, slot.features_TF)
        if self.cache is not None:
            self.cache.keep(batch, slot.features_TF)


class DrafterWorker(Worker):
    """Runs one drafter replica, ticket by ticket."""

    def __init__(
        self,
        name: str,
        device: torch.device,
        supervisor: Supervisor,
        beats: Beats,
        build: Callable[[], DrafterReplica],
        join: Callable[[Callable[[int], None]], Any],
        batches: Batches,
        channel: Channel,
        *,
        stream: Stream,
        first_step: int,
        turns: Turns | None = None,
    ) -> None:
        """build: makes the replica; join: waits for all drafters, told how many are there, and gives this one's end of
        their group. Both run in this thread. turns: those of the device, where a target shares it."""
        super().__init__(name, str(device), supervisor)
        self.device, self.beats, self.build, self.join_group = device, beats, build, join
        self.batches, self.channel = batches, channel
        self.stream, self.first_step, self.turns = stream, first_step, turns
        # None ends the side that waits.
        self.tickets: queue.SimpleQueue[Ticket | None] = queue.SimpleQueue()
        self.results: queue.SimpleQueue[Result | None] = queue.SimpleQueue()
        self.number = 0
        self.held: list[tuple[int, Slot]] = []
        self.read: deque[tuple[torch.cuda.Event | None, HostBatch]] = deque()
        self.parts: list[Span] = []
        self.num_tokens = self.num_padded = 0
        self.collective: Any = None
        self.clock: Clock

    def work(self) -> None:
        """Until the tickets end."""
        with own_stream(self.device, FIRST):
            self.beats.beat("warming up")
            replica = self.build()
            self.doing = "while waiting for the other drafters"
            self.beats.beat("waiting for drafters")
            # Another one that is built is progress: they are built one after another.
            self.collective = self.join_group(
                lambda num_built: self.beats.beat(f"waiting for drafters, {num_built} built")
            )
            self.beats.beat("waiting for a ticket")
            ticket = self.tickets.get()
            self.clock = Clock(self.device)  # what came before was set-up
            while ticket is not None:
                if self.supervisor.closed:
                    raise ChannelClosed
                self.step = ticket.step + 1
                self.doing = f"at {type(ticket).__name__.lower()} {self.step}"
                self.results.put(self._result(replica, ticket))
                ticket = self.tickets.get()
                self.clock.cut(WAITING_TICKET)
            self.beats.beat("done")

    def leave(self) -> None:
        """Leave the group of drafters, so that none waits for this one."""
        if self.collective is not None:
            self.collective.close()
            if self.supervisor.failure is None:
                self.collective.left()

    def _result(self, replica: DrafterReplica, ticket: Ticket) -> Result:
        begin, self.parts = self.clock.last, []
        self.num_tokens = self.num_padded = 0
        value = self._serve(replica, self.collective, ticket)
        self._cut(WORK)
        span = Span(WORK, begin, self.clock.last)
        tell(self.beats, self.clock.finished(), "waiting for a ticket", self.step)
        return Result(
            self.name, ticket, value, span, tuple(self.parts), self.num_tokens, self.num_padded, self.channel.depth()
        )

    def _cut(self, kind: str) -> None:
        self.parts.append(self.clock.cut(kind))

    def _serve(self, replica: DrafterReplica, collective: Any, ticket: Ticket) -> Any:
        if isinstance(ticket, Snapshot):
            self.beats.beat("saving", self.step)
            return replica.snapshot(ticket.request)
        if isinstance(ticket, Evaluate):
            replica.begin_evaluation()
            for _ in range(self.stream.heldout_per_drafter):
                number, slot = self._take()
                with self._computing():
                    replica.load(slot, 0)
                    self._release(number, slot)
                    replica.evaluate()
            self._cut(WORK)
            collective.sum_(*replica.evaluated())
            self._cut(SUM)
            return replica.evaluation_result()
        replica.begin()
        self._group(replica, ticket.step)
        self.beats.beat("waiting for drafters" if collective.size > 1 else "update", self.step)
        self._cut(WORK)
        collective.sum_(*replica.reducible())
        self._cut(SUM)
        with cores(self.device):
            replica.update(ticket.step)
            return replica.step_result()

    def _group(self, replica: DrafterReplica, step: int) -> None:
        """Forward and backward over the group's batches; with several draws the slots are held until the last."""
        draws = self.stream.draws
        draw, last = step % draws, self.stream.ends_group(step)
        fresh = draw == 0 or step == self.first_step
        for index in range(self.stream.accumulate):
            if fresh:
                self.held.append(self._take())
            else:
                self._end_work()
            number, slot = self.held[index] if draws > 1 else self.held.pop()
            with self._computing():
                replica.load(slot, draw)
                if last:  # what a step needs of the slot is in its own buffers
                    self._release(number, slot)
                replica.accumulate()
        if last:
            self.held.clear()

    def _end_work(self) -> None:
        """What came before is work, up to the end of the update; in turns it is waited for, before the next turn is."""
        self._cut(WORK)
        if self.turns is not None and self.turns.are_taken:
            tell(self.beats, self.clock.finished(), "finishing", self.step)
            self.turns.finish()

    def _take(self) -> tuple[int, Slot]:
        self._end_work()
        tell(self.beats, self.clock.finished(), "waiting for target", self.step)
        slot = self.channel.take(self.number)
        self.number += 1
        if slot.written is not None:
            torch.cuda.current_stream().wait_event(slot.written)
        batch = slot.batch
        assert batch is not None
        self.doing = f"{self.doing.partition(',')[0]}, {named(batch)}"
        if batch.kind is BatchKind.TRAIN:
            self.num_tokens += batch.num_tokens
            self.num_padded += batch.tokens_BS.numel()
        return self.number - 1, slot

    @contextlib.contextmanager
    def _computing(self) -> Iterator[None]:
        """Once features are there, and the device is this worker's."""

        def waits() -> None:
            tell(self.beats, self.clock.finished(), WAITING_TURN, self.step)

        with computing(self.device, self.turns, first=True, waits=waits):
            self._cut(WAITING_FEATURES)
            tell(self.beats, self.clock.finished(), "working", self.step)
            yield

    def _release(self, number: int, slot: Slot) -> None:
        """Free the slot, and the host buffers of batches whose copies are surely done."""
        assert slot.batch is not None
        event = _event(self.device)
        self.read.append((event, slot.batch))
        self.channel.release(number, event)
        while self.read and (self.read[0][0] is None or len(self.read) > 2 or self.read[0][0].query()):
            done, batch = self.read.popleft()
            if done is not None:
                done.synchronize()
            self.batches.release(batch)
