"""How a target's forward runs: the contract, eager, and the choice by measurement.

    eager     the model as transformers runs it, on CUDA with fused kernels where they are known (step_fused.py)
    compiled  one decoder layer of each kind compiled and used for all of them, for batches of any shape
              (step_compiled.py)
    graphed   the whole forward captured, for packed rows, which have one shape (step_graphed.py)
    auto      on a CPU eager; on CUDA each of them is tried on the first batch, and the fastest that gives the features
              of the plain model is kept

Built in the worker's own thread and on its stream, when the first batch is there.
"""

from __future__ import annotations

import logging
import statistics
import time
import traceback
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from draftmill.compiling import BUILD_LOCK
from draftmill.config import StepChoice
from draftmill.errors import InputError
from draftmill.target.attention import Packing
from draftmill.target.model import Target

_logger = logging.getLogger(__name__)

TOLERANCE = {torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 5e-2}
"""Median over tokens of the relative difference from the plain model's features, in the tap where it is largest, that
another order of the same sums may make, by type; more in a model where that much is rounding."""
ROUNDINGS = 4.0
"""How many times as far from the plain features as the plain model is from itself with one more rounding a layer."""
TIMED_RUNS = 3
LAUNCH_BOUND = 0.8
"""The share of a run's time that its launching takes, above which the device waits for the host."""
COPIES_IN_FLIGHT = 2
"""Batches whose features may lie on a group's earlier device, waiting to be copied to its last one."""
COMPARED_TOKENS = 2048
"""Tokens, spread over the batch, whose features are compared."""


class Forward(Protocol):
    """A way of running a target up to its last tap. It changes the target while it is applied, and only then."""

    name: str

    def apply(self) -> None:
        """Make the target run this way."""

    def undo(self) -> None:
        """Leave the target as it was before."""

    def run(self, tokens_BS: torch.Tensor, packing: Packing | None) -> list[torch.Tensor]:
        """Token ids [B, S] -> the tapped layers' outputs, L tensors [B, S, H]; the next run may overwrite them."""


class EagerForward:
    """The model as it is."""

    name = "plain"

    def __init__(self, target: Target, layer_ids: Sequence[int], by_document: bool = False) -> None:
        """by_document: whether packed rows run under the document attention, as `prepare_packing` found."""
        self.target, self.layer_ids, self.by_document = target, tuple(layer_ids), by_document
        self._aside: dict[torch.device, torch.cuda.Stream] = {}
        self._copied: deque[torch.cuda.Event] = deque()

    @torch.no_grad()
    def run(self, tokens_BS: torch.Tensor, packing: Packing | None) -> list[torch.Tensor]:
        """Token ids [B, S] -> L tensors [B, S, H] on the target's output device. Waits while another thread traces."""
        inputs = {} if packing is None else packing.inputs(self.by_document)
        device = self.target.output_device
        with BUILD_LOCK.running(), self.target.taps(self.layer_ids) as taps:
            self.target.forward_layers(tokens_BS, **inputs)
            found = [self._on(device, taps.outputs[layer]) for layer in self.layer_ids]
        for aside in self._aside.values():
            self._copied.append(aside.record_event())
        while len(self._copied) > COPIES_IN_FLIGHT * len(self._aside):
            self._copied.popleft().synchronize()  # features wait there for their copies, and take room
        return found

    def _on(self, device: torch.device, features: torch.Tensor) -> torch.Tensor:
        """Features of a group's earlier device on its last one.

        A copy waits for all that its destination has yet to do. On a stream of its own, so that the device goes on with
        the next batch meanwhile.
        """
        source = features.device
        if source == device or source.type != "cuda":
            return features.to(device, non_blocking=True)
        if source not in self._aside:
            self._aside[source] = torch.cuda.Stream(source)
        aside = self._aside[source]
        aside.wait_stream(torch.cuda.current_stream(source))
        features.record_stream(aside)
        with torch.cuda.stream(aside):
            return features.to(device, non_blocking=True)

    def apply(self) -> None:
        """Nothing to change."""

    def undo(self) -> None:
        """Nothing was changed."""


@dataclass(frozen=True)
class Built:
    """A forward ready to run, and why it was chosen. ways: names of what it is made of, a graph's inner way first."""

    forward: Forward
    report: str
    ways: tuple[str, ...] = ()


class Decision:
    """Which way the replicas of one target run, once the first of them has tried all; the others then take it.

    By what was asked for and by the device's name, for another kind may do better another way. Read and written under
    the build lock.
    """

    def __init__(self) -> None:
        self.ways: dict[tuple[StepChoice, str], tuple[str, ...]] = {}


def build_forward(
    choice: StepChoice,
    target: Target,
    layer_ids: Sequence[int],
    tokens_BS: torch.Tensor,
    packing: Packing | None,
    by_document: bool = False,
    decision: Decision | None = None,
) -> Built:
    """Build the forward in the calling thread, on its current stream; the batch given is tried on.

    decision: what the replicas of this target share; what was decided is tried once and compared with plain alone.

    Raises InputError for a way that this target, device or batching does not allow; what else goes wrong while building
    the way that was asked for is raised as it is, and under `auto` or for fused kernels is said in the report.
    """
    plain = EagerForward(target, layer_ids, by_document)
    devices = list(dict.fromkeys([target.device, target.output_device]))
    check_choice(choice, packing is not None, devices)
    if len(devices) > 1:
        return Built(plain, f"eager ({choice}: the choice for a target over several devices)")
    if target.device.type != "cuda" and choice in ("auto", "eager"):
        return Built(plain, "eager (auto: the choice on a CPU)" if choice == "auto" else "eager (as configured)")
    with BUILD_LOCK:
        if decision is None:
            return _choose(choice, plain, tokens_BS, packing)
        key = choice, torch.cuda.get_device_name(target.device) if target.device.type == "cuda" else "cpu"
        built = _as_decided(decision.ways[key], plain, tokens_BS, packing) if key in decision.ways else None
        if built is None:
            built = _choose(choice, plain, tokens_BS, packing)
            decision.ways[key] = built.ways
        return built


def check_choice(choice: StepChoice, packed: bool, devices: Sequence[torch.device]) -> None:
    """Raise InputError where a target on these devices can't run this way, with packed rows or without."""
    cuda = all(device.type == "cuda" for device in devices)
    if choice in ("compiled", "graphed") and len(devices) > 1:
        raise InputError(f"target.step={choice} needs the target on one device, not several; use eager or auto")
    if choice == "compiled" and packed and not cuda:
        raise InputError("target.step=compiled reads packed rows on CUDA only; use eager, or data.batching=bucketed")
    if choice == "graphed" and not packed:
        raise InputError("target.step=graphed needs data.batching=packed: only packed rows have one shape")
    if choice == "graphed" and not cuda:
        raise InputError("target.step=graphed needs a CUDA device, got cpu; use eager or auto")


def _choose(choice: StepChoice, plain: EagerForward, tokens_BS: torch.Tensor, packing: Packing | None) -> Built:
    trial = _Trial(plain, tokens_BS, packing)
    if choice != "compiled":
        trial.consider("fused")
    if choice in ("auto", "compiled"):
        trial.consider("compiled", needed=choice == "compiled")
    inner = trial.best
    if choice == "graphed" or (choice == "auto" and packing is not None):
        inner = trial.capture(needed=choice == "graphed")
    inner.apply()
    how = "auto" if choice == "auto" else f"as configured: {choice}"
    ways = (inner.name,) if trial.best is inner else (inner.name, trial.best.name)
    return Built(trial.best, f"{trial.label} ({how}; {trial.report()})", ways)


def _as_decided(
    ways: tuple[str, ...], plain: EagerForward, tokens_BS: torch.Tensor, packing: Packing | None
) -> Built | None:
    """The forward made of these ways, where they work here as they did for the first replica."""
    how = "as the first replica's"
    if ways == (plain.name,):
        return Built(plain, f"{plain.name} ({how})", ways)
    trial = _Trial(plain, tokens_BS, packing, timed_runs=1)
    try:
        for way in ways:
            if way != plain.name:
                trial.consider(way, needed=True)
                trial.best.apply()
    except Exception as error:  # another choice is made for this one, which says what went wrong if it does again
        trial.best.undo()
        _logger.warning("target on %s does not run as the first one does: %s", plain.target.device, first_line(error))
        return None
    return Built(trial.best, f"{trial.label} ({how}; {trial.report()})", ways)


def _build(name: str, plain: EagerForward, inner: Forward, packed_length: int | None) -> Forward:
    """The way of this name; `inner` is what a graph would capture, and is applied."""
    from draftmill.target.step_compiled import CompiledForward
    from draftmill.target.step_fused import FusedForward
    from draftmill.target.step_graphed import GraphedForward

    parts = (plain.target, plain.layer_ids, plain.by_document)
    if name == "graphed":
        return GraphedForward(inner)
    return FusedForward(*parts) if name == "fused" else CompiledForward(*parts, packed_length)


class _Trial:
    """The plain model's time and features on the batch, what rounding may make of them, and the best way so far."""

    def __init__(
        self, plain: EagerForward, tokens_BS: torch.Tensor, packing: Packing | None, timed_runs: int = TIMED_RUNS
    ) -> None:
        self.plain, self.tokens_BS, self.packing, self.timed_runs = plain, tokens_BS, packing, timed_runs
        self.best: Forward = plain
        self.label = plain.name
        self.right: list[Forward] = [plain]
        self.seconds: dict[str, float] = {}
        self.launching: dict[str, bool] = {}
        """Whether a way's time is mostly the host's."""
        self.notes: list[str] = []
        self.features = self._run(plain, plain.name)
        # Measured here, where no other way is applied to the target.
        rounding = rounding_of(plain, tokens_BS, packing, self.features)
        self.tolerance = max(TOLERANCE.get(self.features[0].dtype, 5e-2), ROUNDINGS * rounding)

    def consider(self, name: str, needed: bool = False) -> None:
        """Build a way and try it; it becomes the best if it is right and the fastest, with `needed` if it is right.

        Leaves the target as it was. With `needed` what is wrong is raised.
        """
        try:
            forward = self._tried(name, name, self.best)
        except Exception as error:  # a way that does not work here is no reason to end the run, unless it was asked for
            if needed:
                raise
            self._reject(name, error)
            return
        self.right.append(forward)
        if needed or self.seconds[name] < self.seconds[self.label]:
            self.best, self.label = forward, name

    def capture(self, needed: bool) -> Forward:
        """Try a graph of every right way that may give the best one; returns the way to apply for the best of all.

        Launched, a small target's time is the host's, and says nothing of how long its kernels take. With `needed` the
        best graph is the best of all, and what is wrong is raised where there is none.
        """
        inner, found = self.best, False
        first_error: Exception | None = None
        for way in tuple(self.right):
            if self.seconds[way.name] > self.seconds[self.label] and not self.launching[way.name]:
                continue  # its kernels alone take longer
            label = "graphed" if way is self.plain else f"graphed {way.name}"
            way.apply()
            try:
                forward = self._tried("graphed", label, way)
            except Exception as error:
                self._reject(label, error)
                if needed and first_error is None:
                    traceback.clear_frames(error.__traceback__)  # or the next graph has no room beside this one's
                    first_error = error
                continue
            finally:
                way.undo()
            if (needed and not found) or self.seconds[label] < self.seconds[self.label]:
                inner, self.best, self.label = way, forward, label
            found = True
        if first_error is not None and not found:
            raise first_error
        return inner

    def _tried(self, name: str, label: str, inner: Forward) -> Forward:
        """A way built and run, its time and difference noted under the label. Raises what is wrong with it."""
        forward: Forward | None = None
        try:
            forward = _build(name, self.plain, inner, None if self.packing is None else self.tokens_BS.shape[1])
            forward.apply()
            features = self._run(forward, label)
            difference = largest_difference(features, self.features)
            if not difference <= self.tolerance:
                allowed = f"more than rounding's {self.tolerance:.1e}"
                raise RuntimeError(f"features differ from the plain model's by {difference:.1e}, {allowed}")
        finally:
            if forward is not None:
                forward.undo()
        self.notes.append(f"{label} differs by {difference:.1e}")
        return forward

    def _reject(self, label: str, error: Exception) -> None:
        self.seconds.pop(label, None)
        self.notes.append(f"{label} rejected: {type(error).__name__}: {first_line(error)[:120]}")

    def report(self) -> str:
        """Times, differences from the plain model's features, and what was rejected and why."""
        rows, length = self.tokens_BS.shape
        shown = ", ".join(f"{name} {1000 * seconds:.1f} ms" for name, seconds in self.seconds.items())
        return "; ".join([f"{rows}x{length}: {shown}", *self.notes])

    def _run(self, forward: Forward, label: str) -> list[torch.Tensor]:
        """Note the median time, the first run aside, and return some of the last run's features, [tokens, H]."""
        seconds, launches = [], []
        for index in range(1 + self.timed_runs):
            self._wait()
            started = time.perf_counter()
            features = forward.run(self.tokens_BS, self.packing)
            launched = time.perf_counter()
            self._wait()
            if index:
                seconds.append(time.perf_counter() - started)
                launches.append(launched - started)
        self.seconds[label] = statistics.median(seconds)
        self.launching[label] = statistics.median(launches) > LAUNCH_BOUND * self.seconds[label]
        return compared(features)

    def _wait(self) -> None:
        if self.tokens_BS.is_cuda:
            torch.cuda.current_stream(self.tokens_BS.device).synchronize()


def compared(features: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copies of some tokens' features, spread over the batch: [B, S, H] each -> [tokens, H] each."""
    stride = max(1, features[0].shape[:2].numel() // COMPARED_TOKENS)
    return [feature.flatten(0, 1)[::stride].clone() for feature in features]


def largest_difference(features: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    """Median over tokens of the relative difference, in the tap where it is largest. Tensors [..., H].

    A token whose expected features are all zero, as padding's may be, is 0 where ours are too and infinite otherwise.
    """

    def median(ours: torch.Tensor, theirs: torch.Tensor) -> float:
        apart, size = (ours.float() - theirs.float()).norm(dim=-1), theirs.float().norm(dim=-1)
        return float(torch.where(apart == 0, 0.0, apart / size).median())

    return max(median(ours, theirs) for ours, theirs in zip(features, expected, strict=True))


def rounding_of(
    plain: EagerForward, tokens_BS: torch.Tensor, packing: Packing | None, expected: Sequence[torch.Tensor]
) -> float:
    """By how much the plain features change if every layer's output is rounded once more: `largest_difference` from
    `expected`, which `compared` took from the plain model."""

    def round_again(_module: torch.nn.Module, _inputs: Any, output: Any) -> Any:
        hidden = output[0] if isinstance(output, tuple) else output
        noise = torch.rand(hidden.shape, device=hidden.device, generator=generator) - 0.5
        rounded = (hidden.float() * (1.0 + torch.finfo(hidden.dtype).eps * noise)).to(hidden.dtype)
        return (rounded, *output[1:]) if isinstance(output, tuple) else rounded

    generator = torch.Generator(plain.target.device).manual_seed(0)
    # Before the taps' own hooks, which then see what was rounded.
    hooks = [layer.register_forward_hook(round_again, prepend=True) for layer in plain.target.layers]
    try:
        return largest_difference(compared(plain.run(tokens_BS, packing)), expected)
    finally:
        for hook in hooks:
            hook.remove()


def first_line(error: BaseException) -> str:
    """The first line of what an error says, or its type."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
