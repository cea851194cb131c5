"""The real pipeline on replicas that outlive it, for the benchmarks: one side alone, or any number of both.

Not a benchmark itself. Threads, channels, loader, collective and supervision are those of a run; what is left out is
the run directory, checkpoints and, by default, evaluations. A replica is built once, in a thread of its own, and used
by the workers of every race after that.
"""

from __future__ import annotations

import faulthandler
import gc
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist

from draftmill.data.loader import Loader
from draftmill.monitor.heartbeat import Heartbeat
from draftmill.pipeline.channel import Channel
from draftmill.pipeline.collective import Collective, Gate
from draftmill.pipeline.stream import Stream
from draftmill.pipeline.supervision import StallWatch, Supervisor, Worker
from draftmill.pipeline.team import Team
from draftmill.pipeline.tickets import Evaluate, Step
from draftmill.pipeline.turns import Turns, turns_on_shared
from draftmill.pipeline.workers import FIRST, DrafterWorker, Route, TargetWorker, own_stream
from draftmill.records import HostBatch
from draftmill.target.features import TapsReplica
from draftmill.train.assemble import LOOKAHEAD, build_replica, num_slots
from draftmill.train.loading import Loaded
from draftmill.train.setup import Setup

STARTED = time.perf_counter()
STALL_S = 150.0
"""Seconds in which no worker makes progress, after which a race ends with all stacks on standard error."""
GIB = 2**30
_log = logging.getLogger("bench")


@dataclass
class Share:
    """What a worker did with the measured time: shares of it, on the device's clock where it has one."""

    name: str
    device: str
    busy: float
    wait: float


@dataclass
class Measured:
    """One race: the batches after the warm-up, from the end of the last one before them to their own end.

    memory_requests  how often the allocator asked the devices for memory meanwhile; each time may hold up a device
    ready            batches that lay ready for drafters when it began, and when it ended: with many at the start and
                     few at the end targets had a part of their work done before, and the rate is not one that lasts
    """

    seconds: float
    batches: int
    tokens: int
    shares: list[Share] = field(default_factory=list)
    evaluations: int = 0
    memory_requests: int = 0
    ready: tuple[int, int] = (0, 0)

    @property
    def rate(self) -> float:
        """Ktok/s of context, without padding."""
        return self.tokens / self.seconds / 1e3

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        shown = [{**asdict(share), "busy": round(share.busy, 4), "wait": round(share.wait, 4)} for share in self.shares]
        return {
            "ktok_s": round(self.rate, 3),
            "seconds": round(self.seconds, 3),
            "batches": self.batches,
            "tokens": self.tokens,
            "memory_requests": self.memory_requests,
            "ready": self.ready,
            "workers": shown,
        }


@dataclass
class Seat:
    """A worker's place: the device, and the replica once it is built."""

    device: torch.device
    replica: Any = None
    build_s: float = 0.0


class Rig:
    """Targets and drafters of one size, and the races between them."""

    def __init__(self, setup: Setup, loaded: Loaded) -> None:
        self.setup, self.loaded = setup, loaded
        # Where workers tell what they do, and who is told of every step: its number, how many there are, the results.
        self.beats: Callable[[str, str], Heartbeat] = Heartbeat
        self.on_step: Callable[[int, int, list[Any]], None] | None = None
        # Steps between held-out evaluations; one more follows the last step. None for a race without.
        self.evaluate_every: int | None = None
        # Whether workers that share a GPU take turns on it, as a run's do.
        self.in_turns = True
        placement = setup.placement
        self.targets = [
            Seat(group[-1], replica) for group, replica in zip(placement.targets, loaded.targets, strict=True)
        ]
        self.drafters = [Seat(device) for device in placement.drafters]

    def with_steps(self, target: str | None = None, drafter: str | None = None) -> Setup:
        """The setup with other ways of running."""
        config = self.setup.config
        update: dict[str, Any] = {}
        if target is not None:
            update["target"] = config.target.model_copy(update={"step": target})
        if drafter is not None:
            update["drafter"] = config.drafter.model_copy(update={"step": drafter})
        return replace(self.setup, config=config.model_copy(update=update))

    # Building

    def build_targets(self, step: str) -> list[str]:
        """Let every target choose how it runs, on the first batch; returns their reports."""
        for seat in self.targets:
            old: TapsReplica = seat.replica
            if old.step != step or not old.report:
                if old._forward is not None:
                    old._forward.undo()
                seat.replica = TapsReplica(old.target, old.layer_ids, step, old.packed, old)  # type: ignore[arg-type]
        (batch,) = self.first_batches(1)

        def build(seat: Seat) -> None:
            if not seat.replica.report:
                with torch.no_grad():
                    seat.replica.forward(batch)

        self.in_threads(self.targets, build)
        return [seat.replica.report for seat in self.targets]

    def build_drafters(self, step: str) -> list[str]:
        """Build every drafter with this step; returns their reports."""
        self.forget_drafters()
        setup = self.with_steps(drafter=step)

        def build(seat: Seat) -> None:
            seat.replica = build_replica(setup, self.loaded, seat.device, _log)

        self.in_threads(self.drafters, build, FIRST)
        return [seat.replica.report for seat in self.drafters]

    def forget_drafters(self) -> None:
        """Free the drafters' memory."""
        devices = [seat.device for seat in self.drafters]
        before = allocated(devices)
        for seat in self.drafters:
            seat.replica = None
        free_memory(devices)
        if before:
            say(f"drafters let go: {before / GIB:.1f} GiB in tensors before, {allocated(devices) / GIB:.1f} after")

    def in_threads(self, seats: Sequence[Seat], work: Callable[[Seat], None], priority: int = 0) -> None:
        """Do the work for every seat in a thread and on a stream of its own, all at once."""
        errors: list[BaseException] = []

        def run(seat: Seat) -> None:
            try:
                started = time.perf_counter()
                with own_stream(seat.device, priority):
                    work(seat)
                wait_for([seat.device])
                seat.build_s = time.perf_counter() - started
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=run, args=(seat,)) for seat in seats]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]

    def first_batches(self, count: int) -> list[HostBatch]:
        """The first batches of the epoch, in buffers of their own."""
        with self.loader(self.stream(1, count), count) as loader:
            return [batch for _ in range(count) if (batch := loader.next()) is not None]

    # Races

    def stream(self, num_drafters: int, num_steps: int) -> Stream:
        """The first batches of an epoch, in order."""
        plan = self.setup.plan
        return Stream(
            num_drafters=num_drafters,
            accumulate=1,
            draws=1,
            num_batches=plan.total(self.setup.config.train.epochs),
            num_heldout=0 if self.evaluate_every is None else self.setup.stream.num_heldout,
            evaluate_every=self.evaluate_every or 10**9,
            max_steps=num_steps,
            locate=plan.locate,
        )

    def loader(self, stream: Stream, num_workers: int) -> Loader:
        """The loader as a run has it."""
        setup, config = self.setup, self.setup.config
        return Loader(
            setup.store,
            setup.plan,
            setup.heldout_plan,
            stream.items(),
            context_slots=setup.step_shape.context_slots,
            anchor_slots=setup.step_shape.anchor_slots,
            block_size=setup.shape.block_size,
            anchor_draws=1,
            seed=config.run.seed,
            pin=setup.placement.uses_cuda,
            read_ahead=config.data.read_ahead,
            buffers=config.data.read_ahead + num_workers * (num_slots(setup) + 4),
        )

    def race(
        self,
        num_batches: int,
        warm_up: int,
        targets: Sequence[Seat] | None = None,
        drafters: Sequence[Seat] | None = None,
        *,
        summed: bool = True,
        after: int = 0,
    ) -> Measured:
        """Targets and drafters together. `drafters` and `targets`: seats, all of the rig's by default.

        summed: whether drafters sum their gradients; those that share a device can't, over NCCL.
        after: batches that follow the measured ones, so that targets have as much to do at their end as at their start.
        """
        targets = self.targets if targets is None else targets
        drafters = self.drafters if drafters is None else drafters
        race = _Race(self, len(drafters), num_batches, warm_up, after)
        if self.in_turns:
            race.share(targets, drafters)
        workers = [race.target(index, seat) for index, seat in enumerate(targets)]
        return race.run(workers, [race.drafter(index, seat, summed) for index, seat in enumerate(drafters)])

    def target_alone(self, num_batches: int, warm_up: int, target: Seat, drafter: Seat) -> Measured:
        """One target, whose features are taken at once from the slots of a drafter's device."""
        race = _Race(self, 1, num_batches, warm_up)
        race.add_channel(0, drafter.device)
        return race.run_drained([race.target(0, target)])

    def drafter_alone(self, num_batches: int, warm_up: int, drafter: Seat) -> Measured:
        """One drafter, whose slots are full at once."""
        race = _Race(self, 1, num_batches, warm_up)
        worker = race.drafter(0, drafter, False)
        return race.run([race.feeder()], [worker])


class _Race:
    """One run of the pipeline's workers."""

    def __init__(self, rig: Rig, num_drafters: int, num_batches: int, warm_up: int, after: int = 0) -> None:
        self.rig, self.setup = rig, rig.setup
        self.warm_steps = -(-warm_up // num_drafters)
        self.measured_steps = self.warm_steps + -(-num_batches // num_drafters)
        self.steps = self.measured_steps + -(-after // num_drafters)
        self.stream = rig.stream(num_drafters, self.steps)
        self.supervisor = Supervisor()
        self.loader = rig.loader(self.stream, len(rig.targets) + len(rig.drafters))
        self.supervisor.on_close(lambda: threading.Thread(target=self.loader.close, daemon=True).start())
        self.channels: dict[int, Channel] = {}
        self.beats: list[Heartbeat] = []
        self.store = dist.HashStore() if num_drafters > 1 else None
        self.gate = Gate(num_drafters)
        self.turns: dict[torch.device, Turns] = {}
        self.supervisor.on_close(self.gate.close)

    def share(self, targets: Sequence[Seat], drafters: Sequence[Seat]) -> None:
        """Let those who share a GPU take turns on it. Before their workers are made."""
        self.turns = turns_on_shared([(seat.device,) for seat in targets], [seat.device for seat in drafters], say)
        for turns in self.turns.values():
            self.supervisor.on_close(turns.close)

    def add_channel(self, number: int, device: torch.device) -> Channel:
        setup = self.setup
        channel = Channel(num_slots(setup), setup.step_shape.context_slots, setup.carried_size, device, setup.dtype)
        self.channels[number] = channel
        self.supervisor.on_close(channel.close)
        return channel

    def target(self, index: int, seat: Seat) -> TargetWorker:
        route = Route(self.channels, self.stream, 0)
        beat = self._beat(f"target-{index}", seat)
        return TargetWorker(
            beat.name,
            seat.device,
            self.supervisor,
            beat,
            lambda: seat.replica,
            self.loader,
            route,
            None,
            self.turns.get(seat.device),
        )

    def drafter(self, index: int, seat: Seat, summed: bool) -> DrafterWorker:
        channel = self.add_channel(index, seat.device)
        size = self.stream.num_drafters if summed else 1

        def join(built: Callable[[int], None]) -> Collective:
            collective = Collective(
                self.store,
                index if summed else 0,
                size,
                seat.device,
                gate=self.gate,
                closed=lambda: self.supervisor.closed,
            )
            self.supervisor.on_close(collective.close)
            return collective

        beat = self._beat(f"drafter-{index}", seat)
        return DrafterWorker(
            beat.name,
            seat.device,
            self.supervisor,
            beat,
            lambda: seat.replica,
            join,
            self.loader,
            channel,
            stream=self.stream,
            first_step=0,
            turns=self.turns.get(seat.device),
        )

    def feeder(self) -> Worker:
        """Fills the only channel with batches whose features are whatever lies in the slot."""
        channel = self.channels[0]
        for slot in channel._slots:
            slot.features_TF.normal_()
        wait_for([channel.device])
        return _Feeder("feeder", "cpu", self.supervisor, channel, self.loader)

    def run(self, targets: Sequence[Any], drafters: Sequence[DrafterWorker]) -> Measured:
        watch = StallWatch(self.supervisor, self._idle_s, STALL_S, faulthandler.dump_traceback, lambda: None)
        team = Team(self.supervisor, targets, drafters, watch, lookahead=LOOKAHEAD)
        mark = _Mark(self)
        team.start()
        try:
            for step in range(self.steps):
                for results in team.submit(Step(step)):
                    mark.take(results)
                if self.stream.evaluates_after(step):
                    for results in team.submit(Evaluate(step)):
                        mark.take(results)
            for results in team.drain():
                mark.take(results)
        except BaseException:
            team.abandon()
            raise
        team.close()
        self.loader.close()
        self._let_go()
        return mark.measured()

    def run_drained(self, targets: Sequence[TargetWorker]) -> Measured:
        """Targets alone: whatever is filled is taken and given back once the device has written it."""
        channel, mark = self.channels[0], _Mark(self)
        for target in targets:
            target.start()
        try:
            for number in range(self.steps):
                slot = channel.take(number)
                if slot.written is not None:
                    slot.written.synchronize()
                assert slot.batch is not None
                mark.step(slot.batch.num_tokens, 1)
                self.loader.release(slot.batch)
                channel.release(number)
        except BaseException:
            self.supervisor.check()
            raise
        for target in targets:
            target.join()
        self.supervisor.check()
        self.supervisor.close()
        self.loader.close()
        self._let_go()
        return mark.measured()

    def _let_go(self) -> None:
        self.channels.clear()
        free_memory([seat.device for seat in (*self.rig.targets, *self.rig.drafters)])

    def _beat(self, name: str, seat: Seat) -> Heartbeat:
        self.beats.append(self.rig.beats(name, str(seat.device)))
        return self.beats[-1]

    def _idle_s(self) -> float:
        return time.monotonic() - max(beat.progress_at for beat in self.beats)


class _Mark:
    """The clock of a race: starts when the warm-up's last step is done on all devices, ends with the last measured."""

    def __init__(self, race: _Race) -> None:
        self.race = race
        self.done = self.tokens = self.batches = self.evaluations = 0
        self.began = self.ended = 0.0
        self.requests_before = self.requests_after = self.ready_before = self.ready_after = 0
        self.before: list[tuple[float, float]] = []
        self.after: list[tuple[float, float]] = []

    def take(self, results: list[Any]) -> None:
        for result in results:
            result.span.seconds()
        if isinstance(results[0].ticket, Evaluate):
            self.evaluations += self.race.warm_steps <= self.done < self.race.measured_steps
            return
        self.step(sum(result.num_tokens for result in results), len(results))
        if self.race.rig.on_step is not None:
            self.race.rig.on_step(self.done, self.race.steps, results)

    def step(self, tokens: int, batches: int) -> None:
        self.done += 1
        now = time.perf_counter()
        if self.done == self.race.warm_steps:
            self.began = now
            self.before, self.requests_before, self.ready_before = self.told(), self.requests(), self.ready()
        elif self.race.warm_steps < self.done <= self.race.measured_steps:
            self.ended, self.after = now, self.told()
            self.requests_after, self.ready_after = self.requests(), self.ready()
            self.tokens += tokens
            self.batches += batches

    def told(self) -> list[tuple[float, float]]:
        """Seconds of work and of waiting that each worker has told of; both times some lie a batch behind."""
        return [(beat.busy_s, beat.wait_s) for beat in self.race.beats]

    def requests(self) -> int:
        """Requests for memory to the devices so far."""
        rig = self.race.rig
        devices = {seat.device for seat in (*rig.targets, *rig.drafters) if seat.device.type == "cuda"}
        return sum(torch.cuda.memory_stats(device)["num_device_alloc"] for device in devices)

    def ready(self) -> int:
        """Batches that lie ready for the drafters."""
        return sum(channel.depth() for channel in self.race.channels.values())

    def measured(self) -> Measured:
        seconds = self.ended - self.began
        shares = [
            Share(beat.name, beat.device, (after[0] - before[0]) / seconds, (after[1] - before[1]) / seconds)
            for beat, before, after in zip(self.race.beats, self.before, self.after, strict=True)
        ]
        requests = self.requests_after - self.requests_before
        ready = self.ready_before, self.ready_after
        return Measured(seconds, self.batches, self.tokens, shares, self.evaluations, requests, ready)


class _Feeder(Worker):
    """In the targets' place: hands every batch on at once."""

    drafter_wait_s = 0.0

    def __init__(self, name: str, device: str, supervisor: Supervisor, channel: Channel, loader: Loader) -> None:
        super().__init__(name, device, supervisor)
        self.channel, self.loader = channel, loader

    def work(self) -> None:
        number = 0
        while (batch := self.loader.next()) is not None:
            self.channel.reserve(number)
            self.channel.fill(number, batch)
            number += 1


def wait_for(devices: Sequence[torch.device]) -> None:
    """Until these devices are done."""
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def free_memory(devices: Sequence[torch.device]) -> None:
    """Give what is cached back: every race has streams of its own, and so a part of the cache of its own."""
    gc.collect()
    for device in set(devices):
        if device.type == "cuda":
            wait_for([device])
            with torch.cuda.device(device):
                torch.cuda.empty_cache()


def allocated(devices: Sequence[torch.device]) -> int:
    """Bytes in tensors on these devices."""
    return sum(torch.cuda.memory_allocated(device) for device in set(devices) if device.type == "cuda")


def peaks(devices: Sequence[torch.device]) -> dict[str, float]:
    """GiB that the allocator held at most, by device."""
    return {
        str(device): round(torch.cuda.max_memory_reserved(device) / GIB, 2)
        for device in sorted(set(devices), key=str)
        if device.type == "cuda"
    }


def say(line: str) -> None:
    """A line with the seconds since the start."""
    print(f"[{time.perf_counter() - STARTED:6.1f} s] {line}", flush=True)
