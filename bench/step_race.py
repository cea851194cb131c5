"""One size of bench/step.py: builds the contenders, gives them their turns, and says what each of them took."""

from __future__ import annotations

import gc
import statistics
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from draftmill.config import Float8Choice
from draftmill.drafter.shape import DrafterShape
from draftmill.step.bench import GIB, wait_for
from draftmill.step.flops import step_flops, work_of
from draftmill.step.workload import Workload
from step_contender import Contender, Inputs
from step_ours import Replica
from step_profile import profile

OURS = ("eager", "compiled", "graphed")
FLOAT8: dict[str, Float8Choice] = {"graphed-float8-head": "head", "graphed-float8": "all"}
"""Ours too, but other numbers: only where named."""
CAPTURED = ("graphed", *FLOAT8)
PEERS = ("specforge", "speculators")
RUNS_OF_A_TURN = 2
WARM_UPS = 3
STARTED = time.perf_counter()


@dataclass(frozen=True)
class Size:
    """A batch, who works on it, and whether our captured steps wait until the memory of two peers is free."""

    work: Workload
    contenders: tuple[str, ...] = (*OURS, *FLOAT8, *PEERS)
    graphed_apart: bool = False


@dataclass
class Entry:
    """What is known of one contender. held: while it does nothing; added: at the peak of a step."""

    name: str
    build_s: float = 0.0
    seconds: list[float] = field(default_factory=list)
    results: list[tuple[float, float]] = field(default_factory=list)
    held_bytes: int = 0
    added_bytes: int = 0
    alone: bool = False
    error: str | None = None


class Race:
    """The contenders of one size and their turns."""

    def __init__(
        self, title: str, size: Size, shape: DrafterShape, device: torch.device, dtype: torch.dtype, wanted: list[str]
    ) -> None:
        self.title, self.size, self.device = title, size, device
        self.names = [name for name in size.contenders if name in wanted]
        self.entries = {name: Entry(name) for name in self.names}
        self.inputs = Inputs(shape, size.work, device, dtype)
        self.running: dict[str, Contender] = {}
        self.replica: Replica | None = None
        self.replica_bytes = 0

    def run(self, turns: int, with_profile: bool) -> dict[str, Any]:
        """All turns of all contenders; the size's part of the result."""
        profiled: dict[str, Any] = {}
        crowded = self.size.graphed_apart and all(peer in self.names for peer in PEERS)
        if crowded and any(name in CAPTURED for name in self.names):
            self._phase([name for name in self.names if name not in CAPTURED], turns)
            self._leave([name for name in self.running if name in PEERS])
            self._phase([name for name in self.names if name in ("compiled", *CAPTURED)], turns)
        else:
            self._phase(self.names, turns)
        if with_profile:
            profiled = {"profile": self._profile()}
        for name in [name for name in self.names if self.entries[name].alone]:
            self._leave(list(self.running))
            self._phase([name], turns, again=True)
        self._leave(list(self.running))
        return {**self._summary(), **profiled}

    def _phase(self, names: list[str], turns: int, again: bool = False) -> None:
        for name in names:
            entry = self.entries[name]
            if name not in self.running and (entry.error is None or again):
                self._guarded(entry, self._build)
        for _ in range(turns):
            for name in names:
                if name in self.running:
                    self._guarded(self.entries[name], self._turn)
        say(f"{self.title}: {turns} turns of {', '.join(name for name in names if name in self.running) or 'nobody'}")

    def _guarded(self, entry: Entry, work: Callable[[Entry], None]) -> None:
        """Do it; note what goes wrong. Out of memory beside others is tried once more without them."""
        try:
            work(entry)
            return
        except Exception as error:  # one contender's failure is its result, and not the others' end
            lines = str(error).strip().splitlines() or [""]
            entry.error = f"{type(error).__name__}: {lines[0][:300]}"
            memory = isinstance(error, torch.cuda.OutOfMemoryError)
            say(f"{self.title}: {entry.name} failed: {entry.error}")
            if not memory:
                print("".join(traceback.format_exception(error)[-6:]), flush=True)
        others = [name for name in self.running if name != entry.name]
        self._leave([entry.name])
        entry.alone = memory and not entry.alone and bool(others)

    def _build(self, entry: Entry) -> None:
        name, started = entry.name, time.perf_counter()
        entry.seconds, entry.results, entry.added_bytes = [], [], 0
        if name in OURS and self.replica is None:
            before = held_bytes(self.device)
            self.replica = Replica(self.inputs)
            self.replica_bytes = held_bytes(self.device) - before
        # What a captured graph works in is reserved for it and counted as no tensor's.
        reserved = name in CAPTURED
        before = held_bytes(self.device, reserved)
        with recompiling(strict=False):
            contender = self._new(name)
            for _ in range(WARM_UPS):
                contender.run()
            wait_for(self.device)
        self.running[name] = contender
        entry.held_bytes = held_bytes(self.device, reserved) - before + (self.replica_bytes if name in OURS else 0)
        entry.build_s, entry.error = time.perf_counter() - started, None
        say(f"{self.title}: {name} built in {entry.build_s:.1f} s")
        spent = torch._dynamo.utils.calculate_time_spent()
        say("compiling so far: " + ", ".join(f"{part} {seconds:.1f} s" for part, seconds in spent.items()))

    def _new(self, name: str) -> Contender:
        if name in OURS:
            made: Contender = getattr(self.replica, name)()
            return made
        if name in FLOAT8:
            return Replica(self.inputs, FLOAT8[name]).graphed()
        import step_peers

        return step_peers.SpecForge(self.inputs) if name == "specforge" else step_peers.Speculators(self.inputs)

    def _turn(self, entry: Entry) -> None:
        contender, cuda = self.running[entry.name], self.device.type == "cuda"
        before = held_bytes(self.device)
        if cuda:
            torch.cuda.reset_peak_memory_stats(self.device)
        with recompiling(strict=contender.strict):
            for index in range(1 + RUNS_OF_A_TURN):
                started = time.perf_counter()
                contender.run()
                wait_for(self.device)
                if index:
                    entry.seconds.append(time.perf_counter() - started)
        if cuda:
            entry.added_bytes = max(entry.added_bytes, torch.cuda.max_memory_allocated(self.device) - before)
        entry.results.append(contender.result())

    def _leave(self, names: list[str]) -> None:
        for name in names:
            self.running.pop(name, None)
        if not any(name in OURS for name in self.running):
            self.replica = None
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _profile(self) -> dict[str, Any]:
        name = next((name for name in reversed((*OURS, *FLOAT8)) if name in self.running), None)
        if name is None:
            return {"error": "none of our steps is running"}
        contender = self.running[name]
        with recompiling(strict=contender.strict):
            return {"contender": name, **profile(contender.run, f"{self.title}, {name}", self.device)}

    def _summary(self) -> dict[str, Any]:
        inputs = self.inputs
        flops = step_flops(inputs.shape, work_of(inputs.blocks, inputs.work.context_tokens, inputs.shape))
        timed = {name: statistics.median(entry.seconds) for name, entry in self.entries.items() if entry.seconds}
        reference = next((entry.results[0] for entry in self.entries.values() if entry.results), (0.0, 0.0))
        best = min((name for name in (*OURS, *FLOAT8) if name in timed), key=lambda name: timed[name], default=None)
        return {
            "documents": inputs.work.documents,
            "context_tokens": inputs.work.context_tokens,
            "anchors": inputs.work.anchors,
            "useful_tflop": flops.total / 1e12,
            "useful_tflop_by_part": {part: value / 1e12 for part, value in vars(flops).items()},
            "contenders": {name: described(entry, flops.total, reference) for name, entry in self.entries.items()},
            "best_of_ours": best,
            "speed_up": {
                other: round(timed[other] / timed[best], 3) for other in timed if best is not None and other != best
            },
        }


def described(entry: Entry, flops: float, reference: tuple[float, float]) -> dict[str, Any]:
    """A contender's part of the result; loss and gradient norm against the first contender's."""
    if not entry.seconds:
        return {"error": entry.error or "not run"}
    median = statistics.median(entry.seconds)
    loss, norm = entry.results[0]
    return {
        "median_ms": 1e3 * median,
        "min_ms": 1e3 * min(entry.seconds),
        "runs": len(entry.seconds),
        "useful_tflops": flops / median / 1e12,
        "peak_gib": round((entry.held_bytes + entry.added_bytes) / GIB, 2),
        "held_gib": round(entry.held_bytes / GIB, 2),
        "build_s": round(entry.build_s, 1),
        "alone": entry.alone,
        "loss": loss,
        "loss_difference": abs(loss / reference[0] - 1.0),
        "grad_norm": norm,
        "grad_norm_difference": abs(norm / reference[1] - 1.0),
        "loss_drift": max(abs(other / loss - 1.0) for other, _ in entry.results),
        **({"error": entry.error} if entry.error else {}),
    }


def held_bytes(device: torch.device, reserved: bool = False) -> int:
    """Memory in tensors on CUDA, or reserved by the allocator when nothing is cached; 0 on a CPU."""
    if device.type != "cuda":
        return 0
    wait_for(device)
    gc.collect()
    if not reserved:
        return torch.cuda.memory_allocated(device)
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved(device)


def recompiling(*, strict: bool) -> Any:
    """Whether Dynamo must not compile again in the block: our compiled steps must not, peers may."""
    return torch._dynamo.config.patch(error_on_recompile=strict)


def say(line: str) -> None:
    """A line with the seconds since the start."""
    print(f"[{time.perf_counter() - STARTED:6.1f} s] {line}", flush=True)
