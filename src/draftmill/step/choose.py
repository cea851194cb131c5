"""Which way of running the step is used: the one asked for, or the fastest that equals eager.

`auto` builds the candidates one after another in the worker's own thread, under the process's build lock, on a full
batch of random numbers (so that memory runs out here or never). A candidate that raises, that differs from eager
beyond the tolerance, or that is slower is rejected. Weights, moments and the RNG are afterwards as they were.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from draftmill.compiling import BUILD_LOCK, record_graph
from draftmill.config import StepChoice
from draftmill.errors import InputError
from draftmill.step.compiled import CompiledStep, compile_piece, wait
from draftmill.step.eager import EagerStep
from draftmill.step.graphed import GraphedStep
from draftmill.step.state import StepState

TOLERANCE = {torch.bfloat16: (2e-2, 2e-3), torch.float32: (1e-4, 1e-5)}
"""Relative difference from eager allowed in the gradient (norm of the difference) and in the loss, by compute type."""
TOLERANCE_FLOAT8 = (1e-1, 1e-2)
"""The same where products are in float8: neighbouring numbers lie up to 25 % apart in e5m2 and 12 % in e4m3, and what
differs in its last bfloat16 bit may be rounded to either."""
TIMED_RUNS = 5


class Optimizer(Protocol):
    """What a step needs of the optimizer: one update from the flat gradient, all its numbers on the device."""

    def update(self, weight_sum: torch.Tensor) -> None:
        """One update, the gradient divided by `weight_sum`."""

    def reset(self) -> None:
        """Forget all updates, so that warming up leaves no trace."""


@dataclass
class Built:
    """A step ready to run, and the update that goes with it."""

    step: EagerStep
    update: Callable[[], None]
    report: str


class Decision:
    """Which way a run's drafters take under `auto`, once the first of them has tried all: by the device's name, for
    another kind may do better another way. Read and written under the build lock."""

    def __init__(self) -> None:
        self.names: dict[str, str] = {}


def check_step(choice: StepChoice, devices: Sequence[torch.device]) -> None:
    """Raise InputError where a drafter's step can't run this way on one of these devices."""
    others = [str(device) for device in devices if device.type != "cuda"]
    if choice == "graphed" and others:
        raise InputError(f"drafter.step=graphed needs CUDA devices, got {others[0]}; use eager, compiled or auto")


def build_step(choice: StepChoice, state: StepState, optimizer: Optimizer, decision: Decision | None = None) -> Built:
    """Build the step in the calling thread, on its current stream, before any checkpoint is restored.

    decision: what the drafters of a run share. What goes wrong while building the way that was asked for is raised;
    `auto` rejects it and says so in `report`.
    """
    on_cuda = state.device.type == "cuda"
    if choice == "auto" and not on_cuda:
        return Built(EagerStep(state), lambda: optimizer.update(state.totals[1]), "eager (auto: the choice on a CPU)")
    with BUILD_LOCK, _undisturbed(state):
        fill_randomly(state)
        if choice == "auto":
            return _decided(state, optimizer, decision or Decision())
        step = _STEPS[choice](state)
        step.warm_up()
        return Built(step, _update_for(step, state, optimizer), f"{choice} (as configured)")


_STEPS: dict[str, type[EagerStep]] = {"eager": EagerStep, "compiled": CompiledStep, "graphed": GraphedStep}


def _decided(state: StepState, optimizer: Optimizer, decision: Decision) -> Built:
    """As the first drafter on a device of this kind chose; that one, and who can't do so, tries all."""
    kind = torch.cuda.get_device_name(state.device) if state.device.type == "cuda" else "cpu"
    notes = ""
    if kind in decision.names:
        name = decision.names[kind]
        try:
            step = _STEPS[name](state)
            step.warm_up()
            return Built(step, _update_for(step, state, optimizer), f"{name} (auto: as the first drafter's)")
        except Exception as error:  # all ways are tried here too
            notes = f"; not {name} as the first drafter's: {_first_line(error)}"
    built = _fastest(state, optimizer)
    decision.names.setdefault(kind, built.step.name)
    return replace(built, report=built.report + notes)


def _fastest(state: StepState, optimizer: Optimizer) -> Built:
    reference = EagerStep(state)
    times = {"eager": _time(reference, state)}
    gradient, totals = state.flat.gradient.clone(), state.totals.clone()
    best: EagerStep = reference
    compiled: CompiledStep | None = None
    notes = []
    for name in ("compiled", "graphed"):
        try:
            step = _STEPS[name](state)
            if isinstance(step, GraphedStep) and compiled is not None:
                step.take_over(compiled)
            step.warm_up()
            if isinstance(step, CompiledStep):
                compiled = compiled or step
            seconds = _time(step, state)
            difference = _difference(state, gradient, totals)
        except Exception as error:  # a candidate that does not work here is no reason to end the run
            notes.append(f"{name} rejected: {_first_line(error)}")
            continue
        allowed = TOLERANCE[state.dtype] if state.float8 is None else TOLERANCE_FLOAT8
        if any(got > limit or got != got for got, limit in zip(difference, allowed, strict=True)):
            notes.append(f"{name} rejected: differs from eager by {difference[0]:.1e} in the gradient")
            continue
        times[name] = seconds
        if seconds < times[best.name]:
            best = step
    del gradient
    shown = ", ".join(f"{name} {1000 * seconds:.1f} ms" for name, seconds in times.items())
    return Built(best, _update_for(best, state, optimizer), "; ".join([f"{best.name} (auto: {shown})", *notes]))


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:120]}" if lines else type(error).__name__


def _time(step: EagerStep, state: StepState) -> float:
    """Median seconds of a full batch; leaves its gradient and totals behind."""
    full = state.shape.anchor_slots
    scored = full * (state.drafter_shape.block_size - 1)
    seconds = []
    for _ in range(TIMED_RUNS):
        state.begin()
        wait(state)
        started = time.perf_counter()
        step.run(scored, full)
        wait(state)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def _difference(state: StepState, gradient: torch.Tensor, totals: torch.Tensor) -> tuple[float, float]:
    mine = state.flat.gradient
    # in pieces: a float32 copy of the whole gradient could be the one thing that does not fit
    pieces = zip(mine.split(2**26), gradient.split(2**26), strict=True)
    apart, size = 0.0, 0.0
    for ours, theirs in pieces:
        apart += float((ours.float() - theirs.float()).square().sum())
        size += float(theirs.float().square().sum())
    loss, expected = float(state.totals[0] / state.totals[1]), float(totals[0] / totals[1])
    return (apart / max(size, 1e-30)) ** 0.5, abs(loss - expected) / abs(expected)


def _update_for(step: EagerStep, state: StepState, optimizer: Optimizer) -> Callable[[], None]:
    """The optimizer's update run as the step is: eager, captured, or, on a CPU, compiled.

    On CUDA it is kernels of our own and products, which a compiler would only split into more passes.
    """
    update: Callable[..., None] = type(optimizer).update
    if isinstance(step, CompiledStep) and state.device.type == "cpu":
        update = compile_piece(update, f"{step.name}_update_{id(state)}")

    def run() -> None:
        update(optimizer, state.totals[1])

    if not isinstance(step, CompiledStep) and state.device.type == "cpu":
        return run
    # Kernels are compiled here, under the lock. Without gradient and moments an update changes nothing but the count.
    state.begin()
    state.flat.drop_gradient()
    state.totals[1] = 1.0
    for _ in range(2):
        run()
    captured = record_graph(run).replay if isinstance(step, GraphedStep) else run
    optimizer.reset()
    return captured


@contextmanager
def _undisturbed(state: StepState) -> Iterator[None]:
    """Leaves torch's random number generators as they were, and the state's inputs empty."""
    with torch.random.fork_rng(devices=[state.device] if state.device.type == "cuda" else []):
        yield
    state.begin()
    state.clear_inputs()


def fill_randomly(state: StepState) -> None:
    """A full batch: random features and tokens in documents of a quarter of the context, every anchor slot in use."""
    size, context, anchors = state.drafter_shape, state.shape.context_slots, state.shape.anchor_slots
    generator = torch.Generator().manual_seed(0)
    state.features_TF.normal_()
    state.last_TH.normal_()
    state.blocks.tokens_T.copy_(torch.randint(size.vocab_size, (context,), generator=generator))
    length = max(2, context // 4)
    positions = torch.arange(context) % length
    state.blocks.positions_T.copy_(positions)
    chosen = torch.randint(1, max(2, context - 1), (anchors,), generator=generator).sort().values.clamp(max=context - 1)
    state.blocks.anchors_A.copy_(chosen)
    state.blocks.starts_A.copy_(chosen - positions[chosen])
    absent = torch.zeros(anchors, dtype=torch.int32)
    if state.shape.short_blocks:  # of every length; so many rows carry a loss at most as those that are asked for
        absent = torch.arange(anchors, dtype=torch.int32) % max(1, size.block_size - 1)
    state.blocks.absent_A.copy_(absent)
    state.blocks.slots_A.copy_(size.block_size - 1 - absent)
