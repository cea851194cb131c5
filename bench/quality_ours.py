"""Draftmill's own training of one run against the clock: its loader, target worker, channel and drafter worker.

What is otherwise than in `draftmill train`: the run ends with its time and not with its steps, the rate follows the
time, weights are kept in memory instead of in checkpoints, and what was compiled and captured for one run serves the
next of the same shape, with fresh weights and moments.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, cast

import torch

from draftmill.config import Config
from draftmill.monitor.heartbeat import Heartbeat
from draftmill.monitor.run import RunDirectory
from draftmill.pipeline.collective import Hosts
from draftmill.pipeline.supervision import Supervisor
from draftmill.pipeline.team import Team
from draftmill.pipeline.tickets import Result, Snapshot, Step
from draftmill.target.features import TapsReplica
from draftmill.train.assemble import Parts, _build_team, start_loader
from draftmill.train.loading import Loaded, first_drafter, load_targets
from draftmill.train.replica import Replica
from draftmill.train.setup import Setup, set_up
from quality_clock import Clock, Course, Kept, moments

WARM_UP_STEPS = 6
_BATCHES = 10**9  # more than any clock allows
_FREE = {
    "run": {"dir", "seed"},
    "drafter": {"init", "from_checkpoint"},
    "train": {"lr", "warmup_share", "schedule", "min_lr_share", "decay_share", "epochs", "max_steps", "anchor_draws",
              "short_blocks", "evaluate_every", "log_every_s"},
}  # fmt: skip
"""Settings that nothing compiled or captured depends on."""


class _Run:
    """Of a run directory what workers and loading use; writes nothing."""

    def __init__(self) -> None:
        self.log = logging.getLogger("quality")

    def worker(self, name: str, device: str) -> Heartbeat:
        return Heartbeat(name, device)

    def phase(self, *_: Any) -> None:
        pass

    def dump_stacks(self) -> None:
        pass


class Trainer:
    """Runs of one process on one device, one after another."""

    def __init__(self) -> None:
        self._replicas: dict[str, Replica] = {}
        self._targets: dict[str, list[TapsReplica]] = {}

    def run(self, config: Config, seconds: float, points: int) -> tuple[Setup, Course]:
        """Train; the course holds weights at `points` moments. Raises what a worker raised."""
        started = time.perf_counter()
        setup = set_up(config, Hosts())
        setup = replace(setup, stream=replace(setup.stream, num_batches=_BATCHES, max_steps=None))
        run = cast(RunDirectory, _Run())
        loaded = self._loaded(setup, run)
        weights = loaded.weights or {name: tensor.detach() for name, tensor in first_drafter(setup).named_parameters()}
        supervisor, clock = Supervisor(), Clock(seconds)
        loader = start_loader(setup, 0)
        supervisor.on_close(lambda: threading.Thread(target=loader.close, daemon=True).start())
        team = _build_team(
            Parts(setup, run, loaded, 0, None, lambda _replica, _number: None), loader, supervisor, lambda: None
        )
        drafter = team.drafters[0]
        build, key = drafter.build, _key(setup)

        def ready() -> Replica:
            if key not in self._replicas:
                self._replicas[key] = cast(Replica, build())
            replica = self._replicas[key]
            replica.learning_rate = lambda _step: clock.rate(config.train)
            return replica

        drafter.build = ready
        team.start()
        try:
            course = _train(team, weights, clock, points)
        except BaseException:
            team.abandon()
            raise
        team.close()
        loader.close()
        course.build_s = time.perf_counter() - started - course.seconds
        course.notes += [self._replicas[key].report, self._targets[_target_key(setup)][0].report]
        return setup, course

    def _loaded(self, setup: Setup, run: RunDirectory) -> Loaded:
        """Target, head and first weights; the target's replica is the one that earlier runs built their forward on."""
        loaded = load_targets(setup, run)
        key = _target_key(setup)
        return replace(loaded, targets=self._targets.setdefault(key, loaded.targets))


def _train(team: Team, weights: dict[str, torch.Tensor], clock: Clock, points: int) -> Course:
    """Warm up, start afresh, and take steps until the time is over."""
    course, due, losses = Course(), moments(points), deque[float](maxlen=20)
    waited_s = 0.0

    def restart(replica: Replica) -> None:
        replica.state.flat.load(weights)
        replica.optimizer.reset()

    def keep(replica: Replica) -> Kept:
        if replica.state.device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        named = replica.average() or replica.weights()
        tensors = {name: tensor.clone() for name, tensor in named.items()}
        return Kept(due.popleft(), clock.now(), step - WARM_UP_STEPS, tensors)

    def take(finished: Iterable[list[Result]]) -> None:
        nonlocal waited_s
        for results in finished:
            result = results[0]
            if isinstance(result.value, Kept):
                course.kept.append(result.value)
            elif isinstance(result.ticket, Step) and result.ticket.step >= WARM_UP_STEPS:
                record = result.value.read()
                losses.append(record["loss"])
                course.context_tokens += record["context_tokens"]
                waited_s += result.wait_s

    step = 0
    while step < WARM_UP_STEPS or step % team.drafters[0].stream.draws:
        take(team.submit(Step(step)))
        step += 1
    take(team.submit(Snapshot(step - 1, restart)))
    take(team.drain())
    clock.start()
    print(f"  built and warm; {clock.seconds:g} s of training begin", flush=True)
    first = step
    while clock.now() < clock.seconds:
        take(team.submit(Step(step)))
        step += 1
        if len(due) > 1 and clock.now() >= due[0] * clock.seconds:
            take(team.submit(Snapshot(step - 1, keep)))
            take(team.drain())
    take(team.drain())
    course.seconds = clock.now()
    take(team.submit(Snapshot(step - 1, keep)))
    take(team.drain())
    course.steps, course.loss = step - first, sum(losses) / len(losses)
    share = waited_s / course.seconds
    course.notes.append(f"the drafter waited for the target, or its turn, for {share:.0%} of the time")
    return course


def _key(setup: Setup) -> str:
    """What a built step depends on."""
    sections = setup.config.model_dump(mode="json")
    fixed = {
        section: {name: value for name, value in sections[section].items() if name not in _FREE[section]}
        for section in ("drafter", "train")
    }
    return json.dumps([fixed, setup.shape.to_dict(), repr(setup.step_shape)])


def _target_key(setup: Setup) -> str:
    """What a built target forward depends on."""
    config = setup.config
    data = {name: getattr(config.data, name) for name in ("batching", "token_budget", "max_length")}
    return json.dumps([config.target.model_dump(mode="json"), data, list(setup.taps)])
