"""From a checked setup and loaded targets to running workers: channels made, threads started, and ended again."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from draftmill.data.loader import Loader
from draftmill.monitor.heartbeat import Heartbeat
from draftmill.monitor.run import RunDirectory
from draftmill.pipeline.channel import Channel
from draftmill.pipeline.collective import Collective, Gate
from draftmill.pipeline.features import FeatureCache
from draftmill.pipeline.supervision import Failure, StallWatch, Supervisor
from draftmill.pipeline.team import Team
from draftmill.pipeline.turns import Turns, turns_on_shared
from draftmill.pipeline.workers import DrafterWorker, Route, TargetWorker
from draftmill.records import WorkItem
from draftmill.step.choose import Decision, build_step
from draftmill.step.state import StepState
from draftmill.target.features import TapsReplica
from draftmill.train.loading import Loaded, first_drafter
from draftmill.train.muon import FlatMuon
from draftmill.train.optimizer import FlatAdamW
from draftmill.train.planning_worst import StepDoesNotFit, built_and_run, run_worst
from draftmill.train.replica import Replica
from draftmill.train.schedule import learning_rate
from draftmill.train.setup import Setup

LOOKAHEAD = 2
"""Tickets under way: one being worked on, one waiting, so that no drafter waits for the main thread."""

_OPTIMIZERS: dict[str, type[FlatAdamW] | type[FlatMuon]] = {"adamw": FlatAdamW, "muon": FlatMuon}


@dataclass(frozen=True)
class Parts:
    """What a run's workers are made of.

    store    the hosts', None for one host alone
    prepare  called with each replica and its number, in its worker thread, once it is built: restores a checkpoint
    """

    setup: Setup
    run: RunDirectory
    loaded: Loaded
    first_step: int
    store: dist.Store | None
    prepare: Callable[[Replica, int], None]


@dataclass(frozen=True)
class Running:
    """What the main thread has of a run under way."""

    team: Team
    loader: Loader


@contextmanager
def running_team(parts: Parts, abandon: Callable[[Failure | None], None]) -> Iterator[Running]:
    """Start loader and workers; end them, whatever happens.

    abandon: ends the process, with the first failure at hand, where the main thread itself hangs.
    """
    supervisor = Supervisor()
    loader = start_loader(parts.setup, parts.first_step)
    # Not waited for where the run fails: it may be the reading that hangs.
    supervisor.on_close(lambda: threading.Thread(target=loader.close, name="loader-close", daemon=True).start())
    try:
        team = _build_team(parts, loader, supervisor, lambda: abandon(supervisor.failure))
    except BaseException:
        supervisor.close()
        raise
    team.start()
    try:
        yield Running(team, loader)
    except BaseException:
        if hanging := team.abandon():
            parts.run.log.error(f"left behind, for they did not end: {', '.join(hanging)}")
        raise
    team.close()
    loader.close()


def start_loader(setup: Setup, first_step: int) -> Loader:
    """The loader over this host's part of the stream, reading."""
    config, placement = setup.config, setup.placement
    mine = range(setup.first_drafter, setup.first_drafter + len(placement.drafters))

    def items() -> Iterator[WorkItem]:
        for item in setup.stream.items(first_step):
            if item.sequence % setup.stream.num_drafters in mine:
                yield item

    in_flight = len(placement.targets) + len(placement.drafters) * (num_slots(setup) + 3)
    return Loader(
        setup.store,
        setup.plan,
        setup.heldout_plan,
        items(),
        context_slots=setup.step_shape.context_slots,
        anchor_slots=setup.step_shape.anchor_slots,
        block_size=setup.shape.block_size,
        anchor_draws=config.train.anchor_draws,
        seed=config.run.seed,
        pin=placement.uses_cuda,
        read_ahead=config.data.read_ahead,
        buffers=config.data.read_ahead + in_flight,
        short_blocks=config.train.short_blocks,
    )


def _build_team(parts: Parts, loader: Loader, supervisor: Supervisor, abandon: Callable[[], None]) -> Team:
    setup, run = parts.setup, parts.run
    heartbeats: list[Heartbeat] = []

    def beats(name: str, device: torch.device) -> Heartbeat:
        heartbeats.append(run.worker(name, str(device)))
        return heartbeats[-1]

    channels = {
        setup.first_drafter + index: _channel(setup, device) for index, device in enumerate(setup.placement.drafters)
    }
    turns = turns_on_shared(setup.placement.targets, setup.placement.drafters, run.log.info)
    for channel in channels.values():
        supervisor.on_close(channel.close)
    for each in turns.values():
        supervisor.on_close(each.close)
    common = _Common(parts, loader, supervisor, beats, channels, turns)
    targets, drafters = _target_workers(common), _drafter_workers(common)
    watch = StallWatch(
        supervisor,
        lambda: time.monotonic() - max(heartbeat.progress_at for heartbeat in heartbeats),
        setup.config.pipeline.stall_s,
        run.dump_stacks,
        abandon,
    )
    return Team(supervisor, targets, drafters, watch, lookahead=LOOKAHEAD)


def _channel(setup: Setup, device: torch.device) -> Channel:
    try:
        return Channel(num_slots(setup), setup.step_shape.context_slots, setup.carried_size, device, setup.dtype)
    except torch.OutOfMemoryError as error:
        raise StepDoesNotFit(setup, device) from error


@dataclass(frozen=True)
class _Common:
    """What the workers of a run have in common."""

    parts: Parts
    loader: Loader
    supervisor: Supervisor
    beats: Callable[[str, torch.device], Heartbeat]
    channels: dict[int, Channel]
    turns: dict[torch.device, Turns]


def _target_workers(common: _Common) -> list[TargetWorker]:
    parts, setup = common.parts, common.parts.setup
    cache_gib = setup.config.target.cache_gib
    route = Route(common.channels, setup.stream, parts.first_step)
    cache = FeatureCache(int(cache_gib * 2**30)) if cache_gib else None
    return [
        TargetWorker(
            name := f"target-{index}",
            group[-1],  # where a group gathers its features
            common.supervisor,
            common.beats(name, group[-1]),
            partial(run_worst, setup, target) if group[-1].type == "cuda" else partial(_as_it_is, target),
            common.loader,
            route,
            cache,
            common.turns.get(group[-1]) if len(group) == 1 else None,
        )
        for index, (group, target) in enumerate(zip(setup.placement.targets, parts.loaded.targets, strict=True))
    ]


def _as_it_is(target: TapsReplica) -> TapsReplica:
    return target


def _drafter_workers(common: _Common) -> list[DrafterWorker]:
    parts, setup, supervisor = common.parts, common.parts.setup, common.supervisor
    num_drafters = setup.stream.num_drafters
    store = dist.HashStore() if parts.store is None and num_drafters > 1 else parts.store
    decision, gate = Decision(), Gate(len(setup.placement.drafters))
    supervisor.on_close(gate.close)

    def build(number: int, device: torch.device) -> Replica:
        replica = built_and_run(
            setup, device, lambda: build_replica(setup, parts.loaded, device, parts.run.log, decision)
        )
        parts.prepare(replica, number)
        return replica

    def join(number: int, device: torch.device, built: Callable[[int], None]) -> Collective:
        collective = Collective(
            store, number, num_drafters, device, gate=gate, closed=lambda: supervisor.closed, built=built
        )
        supervisor.on_close(collective.close)
        return collective

    return [
        DrafterWorker(
            name := f"drafter-{number}",
            channel.device,
            supervisor,
            common.beats(name, channel.device),
            partial(build, number, channel.device),
            partial(join, number, channel.device),
            common.loader,
            channel,
            stream=setup.stream,
            first_step=parts.first_step,
            turns=common.turns.get(channel.device),
        )
        for number, channel in common.channels.items()
    ]


def build_replica(
    setup: Setup, loaded: Loaded, device: torch.device, log: logging.Logger, decision: Decision | None = None
) -> Replica:
    """A drafter with the run's first weights on a device, its step chosen. Runs in the worker thread."""
    config = setup.config
    drafter = first_drafter(setup)
    if loaded.weights is not None:
        drafter.load_state_dict(loaded.weights)
    drafter.checkpoint_activations = config.drafter.checkpoint_activations
    state = StepState(
        drafter, loaded.head, setup.rule, setup.step_shape, device, setup.dtype, float8=config.drafter.float8
    )
    num_buckets = max(len(plan.edges) for plan in (setup.plan, setup.heldout_plan) if plan is not None)
    total_steps = setup.stream.total_steps
    if config.train.accumulate > 1:
        state.flat.sum_in_float32()
    optimizer = _OPTIMIZERS[config.train.optimizer](state.flat, config.train)
    built = build_step(config.drafter.step, state, optimizer, decision)
    log.info(f"drafter step on {device}: {built.report}")
    return Replica(
        state,
        built,
        optimizer,
        lambda step: learning_rate(step, total_steps, config.train),
        num_buckets,
    )


def num_slots(setup: Setup) -> int:
    """Slots of a channel; with several draws a group is held while the next arrives."""
    config = setup.config
    return max(config.pipeline.slots, config.train.accumulate + 1 if config.train.anchor_draws > 1 else 1)
