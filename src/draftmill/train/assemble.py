"""From a checked setup to running workers: targets loaded, channels made, threads started.

Weights are read once a host; each further replica is copied from the first on its way to its device.
"""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from draftmill.data.loader import Loader
from draftmill.drafter.initial import weights_from_target
from draftmill.drafter.network import Drafter
from draftmill.monitor.phases import Phase
from draftmill.monitor.run import RunDirectory
from draftmill.pipeline.channel import Channel
from draftmill.pipeline.collective import Collective, shared_store
from draftmill.pipeline.features import FeatureCache
from draftmill.pipeline.supervision import Supervisor
from draftmill.pipeline.team import Team
from draftmill.pipeline.workers import DrafterWorker, Result, Route, TargetWorker
from draftmill.records import HostBatch, WorkItem
from draftmill.step.choose import build_step
from draftmill.step.state import StepState
from draftmill.target.head import TargetHead
from draftmill.target.load import load_target
from draftmill.target.model import Target
from draftmill.train.optimizer import FlatAdamW
from draftmill.train.replica import Replica
from draftmill.train.schedule import learning_rate
from draftmill.train.setup import Setup

LOOKAHEAD = 2
"""Tickets under way: one being worked on, one waiting, so that no drafter waits for the main thread."""


class TapsReplica:
    """A cut target on one device, giving its tapped layers' outputs."""

    def __init__(self, target: Target, layer_ids: tuple[int, ...]) -> None:
        self.target, self.layer_ids = target, layer_ids

    def forward(self, batch: HostBatch) -> list[torch.Tensor]:
        """L tensors [B, S, H] of the batch's rows, right padding included."""
        device = self.target.device
        tokens = batch.tokens_BS.to(device, non_blocking=True)
        with self.target.taps(self.layer_ids) as taps:
            self.target.forward_layers(tokens)
            return [taps.outputs[layer] for layer in self.layer_ids]


@dataclass(frozen=True)
class Loaded:
    """What was read from the target: a cut replica a device, the head, and first weights for the drafters."""

    targets: list[Target]
    head: TargetHead
    weights: dict[str, torch.Tensor] | None


def load_targets(setup: Setup, run: RunDirectory) -> Loaded:
    """Read the target once, put a replica on each target device, with progress in log and phase."""
    settings, groups = setup.config.target, setup.placement.targets
    run.log.info(f"Loading {len(groups)} target model{'s' if len(groups) > 1 else ''}...")
    first = load_target(
        settings.model,
        dtype=settings.dtype,
        revision=settings.revision,
        trust_remote_code=settings.trust_remote_code,
        with_tokenizer=False,
    )
    head = first.head()
    weights = _first_weights(setup, first)
    first.cut_after(setup.shape.target_layer_ids[-1])
    targets = []
    for index, group in enumerate(groups):
        run.phase(Phase.LOADING_TARGETS, f"{index + 1}/{len(groups)}")
        run.log.info(f"  Target {index} on {group[0]}...")
        targets.append(first if group[0].type == "cpu" and index == 0 else first.replica(group[0]))
    return Loaded(targets, head, weights)


def _first_weights(setup: Setup, target: Target) -> dict[str, torch.Tensor] | None:
    """What the drafters start from; None leaves them random."""
    drafter = setup.config.drafter
    if setup.warm_weights is not None:
        return setup.warm_weights
    if drafter.init == "normal":
        return None
    final_norm = getattr(target.model.get_decoder(), "norm", None)
    return weights_from_target(first_drafter(setup), target.layers, final_norm)


def first_drafter(setup: Setup) -> Drafter:
    """The network with the run's random first weights, the same on every device and host."""
    return Drafter(setup.shape, seed=setup.config.run.seed)


@contextmanager
def running_team(
    setup: Setup,
    run: RunDirectory,
    loaded: Loaded,
    first_step: int,
    prepare: Callable[[Replica, int], None],
) -> Iterator[Team]:
    """Start loader and workers; end them, whatever happens.

    prepare: called with each replica and its number, in its worker thread, once it is built (to restore a checkpoint).
    """
    supervisor = Supervisor()
    with running_loader(setup, first_step) as loader:
        supervisor.on_close(loader.close)
        team = _build_team(setup, run, loaded, first_step, prepare, loader, supervisor)
        team.start()
        try:
            yield team
        finally:
            team.close()


@contextmanager
def running_loader(setup: Setup, first_step: int) -> Iterator[Loader]:
    """The loader over this host's part of the stream."""
    config, placement = setup.config, setup.placement
    mine = range(setup.first_drafter, setup.first_drafter + len(placement.drafters))

    def items() -> Iterator[WorkItem]:
        for item in setup.stream.items(first_step):
            if item.sequence % setup.stream.num_drafters in mine:
                yield item

    in_flight = len(placement.targets) + len(placement.drafters) * (_num_slots(setup) + 3)
    loader = Loader(
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
    )
    try:
        yield loader
    finally:
        loader.close()


def _build_team(
    setup: Setup,
    run: RunDirectory,
    loaded: Loaded,
    first_step: int,
    prepare: Callable[[Replica, int], None],
    loader: Loader,
    supervisor: Supervisor,
) -> Team:
    config, stream, placement = setup.config, setup.stream, setup.placement
    channels = {
        setup.first_drafter + index: Channel(
            _num_slots(setup), setup.step_shape.context_slots, setup.shape.feature_size, device, setup.dtype
        )
        for index, device in enumerate(placement.drafters)
    }
    for channel in channels.values():
        supervisor.on_close(channel.close)
    route = Route(channels, stream.num_drafters, stream.sequence_before(first_step))
    cache = FeatureCache(int(config.target.cache_gib * 2**30)) if config.target.cache_gib else None
    heartbeats = []

    def beats(name: str, device: torch.device) -> Any:
        heartbeats.append(run.worker(name, str(device)))
        return heartbeats[-1]

    target_workers = [
        TargetWorker(
            name := f"target-{index}",
            group[0],
            supervisor,
            beats(name, group[0]),
            lambda target=target: TapsReplica(target, setup.shape.target_layer_ids),  # type: ignore[misc]
            loader,
            route,
            cache,
        )
        for index, (group, target) in enumerate(zip(placement.targets, loaded.targets, strict=True))
    ]
    store = shared_store(setup.hosts) if stream.num_drafters > 1 else None
    drafter_workers = []
    for index, device in enumerate(placement.drafters):
        number = setup.first_drafter + index
        results: queue.SimpleQueue[Result] = queue.SimpleQueue()

        def build(number: int = number, device: torch.device = device) -> tuple[Replica, Collective]:
            replica = build_replica(setup, loaded, device, run.log)
            prepare(replica, number)
            return replica, Collective(store, number, stream.num_drafters, device)

        drafter_workers.append(
            DrafterWorker(
                name := f"drafter-{number}",
                device,
                supervisor,
                beats(name, device),
                build,
                loader,
                channels[number],
                results,
                stream=stream,
                first_step=first_step,
            )
        )
    return Team(
        supervisor,
        target_workers,
        drafter_workers,
        lookahead=LOOKAHEAD,
        stall_s=config.pipeline.stall_s,
        idle_s=lambda: time.monotonic() - max(heartbeat.progress_at for heartbeat in heartbeats),
    )


def build_replica(setup: Setup, loaded: Loaded, device: torch.device, log: logging.Logger) -> Replica:
    """A drafter with the run's first weights on a device, its step chosen. Runs in the worker thread."""
    config = setup.config
    drafter = first_drafter(setup)
    if loaded.weights is not None:
        drafter.load_state_dict(loaded.weights)
    drafter.checkpoint_activations = config.drafter.checkpoint_activations
    state = StepState(drafter, loaded.head, setup.rule, setup.step_shape, device, setup.dtype)
    num_buckets = max(len(plan.edges) for plan in (setup.plan, setup.heldout_plan) if plan is not None)
    total_steps = setup.stream.total_steps
    optimizer = FlatAdamW(state.flat, config.train)
    built = build_step(config.drafter.step, state, optimizer)
    log.info(f"drafter step on {device}: {built.report}")
    return Replica(
        state,
        built,
        optimizer,
        lambda step: learning_rate(step, total_steps, config.train),
        num_buckets,
    )


def _num_slots(setup: Setup) -> int:
    """Slots of a channel; with several draws a group is held while the next arrives."""
    config = setup.config
    return max(config.pipeline.slots, config.train.accumulate + 1 if config.train.anchor_draws > 1 else 1)
