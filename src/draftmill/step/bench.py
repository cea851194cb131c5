"""`draftmill bench step`: one optimizer step measured for a target's shape, without weights and without data.

Owns the measuring: time, useful arithmetic over time, the device's own matmul ceiling, and peak memory. The learning
rate stays 0, so that every step does the same work on the same numbers.
"""

from __future__ import annotations

import gc
import json
import platform
import resource
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, get_args

import torch

from draftmill.config import DEVICE_NAME, DrafterConfig, Float8Choice, StepChoice, cuda_index
from draftmill.drafter.float8 import check_float8
from draftmill.drafter.shape import DrafterShape, shape_for, text_config
from draftmill.errors import InputError
from draftmill.step.choose import Optimizer, build_step
from draftmill.step.flat import FlatParameters
from draftmill.step.flops import step_flops, work_of
from draftmill.step.workload import Workload, random_blocks, random_features, random_state, slots_for
from draftmill.target.load import load_config

STEPS = ("eager", "compiled", "graphed", "auto")
FLOAT8 = get_args(Float8Choice)
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
CEILING_SIZE, CEILING_SIZE_CPU = 8192, 1024
"""Edge of the square product that stands for the ceiling."""
GIB = 2**30


@dataclass(frozen=True)
class Request:
    """The command's options, as typed."""

    model_config: str
    num_layers: int = 5
    num_taps: int = 5
    block_size: int = 16
    anchors: int = 512
    context: int = 3072
    documents: int = 1
    device: str = "auto"
    dtype: str = "auto"
    float8: str | None = None
    step: str = "auto"
    repeats: int = 10
    as_json: bool = False


@dataclass(frozen=True)
class Figures:
    """What was measured. Times in seconds, rates in TFLOP/s, memory in bytes."""

    shape: DrafterShape
    work: Workload
    device: str
    dtype: str
    float8: str | None
    report: str
    build_s: float
    step_s: list[float]
    useful_flops: float
    ceiling: float
    peak_bytes: int

    @property
    def median_s(self) -> float:
        """Median step."""
        return statistics.median(self.step_s)

    @property
    def rate(self) -> float:
        """Useful TFLOP/s of the median step."""
        return self.useful_flops / self.median_s / 1e12

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {
            "context_tokens": self.work.context_tokens,
            "documents": self.work.documents,
            "anchors": self.work.anchors,
            "block_size": self.shape.block_size,
            "num_layers": self.shape.num_layers,
            "num_taps": len(self.shape.target_layer_ids),
            "device": self.device,
            "dtype": self.dtype,
            "float8": self.float8,
            "torch": torch.__version__,
            "step": self.report,
            "build_s": round(self.build_s, 2),
            "median_ms": 1e3 * self.median_s,
            "min_ms": 1e3 * min(self.step_s),
            "useful_tflop": self.useful_flops / 1e12,
            "useful_tflops": self.rate,
            "ceiling_tflops": self.ceiling,
            "ceiling_share": self.rate / self.ceiling,
            "peak_gib": self.peak_bytes / GIB,
        }

    def lines(self) -> list[str]:
        """For a reader."""
        shape = self.shape
        ids = ", ".join(str(index) for index in shape.target_layer_ids)
        return [
            f"drafter  hidden {shape.hidden_size}, MLP {shape.intermediate_size}, {shape.num_heads}/"
            f"{shape.num_kv_heads} heads of {shape.head_dim}, vocabulary {shape.vocab_size:,}; {shape.num_layers} "
            f"layers, blocks of {shape.block_size}, taps of {shape.num_target_layers} layers at {ids}",
            f"batch    {self.work.documents} x {self.work.tokens_each} context tokens, {self.work.anchors} anchors; "
            f"{self.dtype}{f', float8: {self.float8}' if self.float8 else ''} on {self.device}",
            f"step     {self.report}; built in {self.build_s:.1f} s",
            f"time     {1e3 * self.median_s:.1f} ms, median of {len(self.step_s)} (fastest "
            f"{1e3 * min(self.step_s):.1f} ms); {self.work.context_tokens / self.median_s / 1e3:.1f} ktok/s of context",
            f"useful   {self.useful_flops / 1e12:.3g} TFLOP: {self.rate:.3g} TFLOP/s, "
            f"{100 * self.rate / self.ceiling:.0f} % of the matmul ceiling of {self.ceiling:.3g}",
            f"memory   {self.peak_bytes / GIB:.2f} GiB at the peak",
        ]


def bench_step(request: Request, make_optimizer: Callable[[FlatParameters], Optimizer]) -> None:
    """The command: measure and print. Raises InputError for options that do not fit together."""
    figures = measure(request, make_optimizer)
    for line in figures.lines():
        print(line)
    if request.as_json:
        print(json.dumps(figures.to_dict()))


def measure(request: Request, make_optimizer: Callable[[FlatParameters], Optimizer]) -> Figures:
    """Build the step as asked for and time whole optimizer steps: load, forward, backward, clip and update."""
    device, dtype = pick_device(request.device), request.dtype
    if dtype == "auto":
        dtype = "bfloat16" if device.type == "cuda" else "float32"
    if dtype not in DTYPES:
        raise InputError(f"--dtype must be auto, {' or '.join(DTYPES)}, got {dtype!r}")
    if request.step not in STEPS:
        raise InputError(f"--step must be {', '.join(STEPS[:-1])} or {STEPS[-1]}, got {request.step!r}")
    if request.step == "graphed" and device.type != "cuda":
        raise InputError("--step graphed needs a CUDA device, got cpu; take eager, compiled or auto")
    if request.float8 not in (None, *FLOAT8):
        raise InputError(f"--float8 must be {' or '.join(FLOAT8)}, got {request.float8!r}")
    shape, work, float8 = _shape(request), _workload(request), cast(Float8Choice | None, request.float8)
    check_float8(float8, shape, DTYPES[dtype], [device])
    with on_own_stream(device):
        slots = slots_for(work, shape.block_size, device)
        state = random_state(shape, slots, device, DTYPES[dtype], float8)
        started = time.perf_counter()
        optimizer = make_optimizer(state.flat)
        built = build_step(cast(StepChoice, request.step), state, optimizer)
        build_s = time.perf_counter() - started
        blocks, features = random_blocks(work, shape, slots), random_features(work, shape, device, state.dtype)
        scored, used = int(blocks.slots_A.sum()), int((blocks.slots_A > 0).sum())

        def one_step() -> None:
            state.load(features, blocks)
            state.begin()
            built.step.run(scored, used)
            built.update()

        peak = PeakMemory(device)
        step_s = timed(one_step, device, request.repeats)
        peak_bytes = peak.read()
        if not bool(torch.isfinite(state.totals).all()):
            raise RuntimeError(f"the step gave a loss that is not finite: {state.totals.tolist()}")
        ceiling = matmul_tflops(device, state.dtype)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return Figures(
        shape=shape,
        work=work,
        device=f"{device} ({name})",
        dtype=dtype,
        float8=float8,
        report=built.report,
        build_s=build_s,
        step_s=step_s,
        useful_flops=step_flops(shape, work_of(blocks, work.context_tokens, shape)).total,
        ceiling=ceiling,
        peak_bytes=peak_bytes,
    )


def timed(run: Callable[[], object], device: torch.device, repeats: int, warm_ups: int = 2) -> list[float]:
    """Seconds of each of `repeats` runs, each waited for, after some that are not counted."""
    seconds = []
    for index in range(warm_ups + repeats):
        wait_for(device)
        started = time.perf_counter()
        run()
        wait_for(device)
        if index >= warm_ups:
            seconds.append(time.perf_counter() - started)
    return seconds


def matmul_tflops(device: torch.device, dtype: torch.dtype, repeats: int = 10) -> float:
    """The device's matmul ceiling: TFLOP/s of one large square product of random numbers, the median of some runs."""
    size = CEILING_SIZE if device.type == "cuda" else CEILING_SIZE_CPU
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(left)
    seconds = timed(lambda: torch.mm(left, right, out=out), device, repeats, warm_ups=3)
    return 2 * size**3 / statistics.median(seconds) / 1e12


def wait_for(device: torch.device) -> None:
    """Until all work on the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class PeakMemory:
    """Largest memory in use from here on: of tensors on CUDA, captured graphs' pools included; of the process on a
    CPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()
            # What a captured graph works in is reserved for it and counted as no tensor's.
            self.reserved = torch.cuda.memory_reserved(device)
            torch.cuda.reset_peak_memory_stats(device)

    def read(self) -> int:
        """Bytes."""
        if self.device.type != "cuda":
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return max(self.reserved, torch.cuda.max_memory_allocated(self.device))


@contextmanager
def on_own_stream(device: torch.device) -> Iterator[None]:
    """A stream of this thread's own on CUDA, as a worker has: the default one can't be captured."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.set_device(device)
    with torch.cuda.stream(torch.cuda.Stream(device)):
        yield


def pick_device(name: str) -> torch.device:
    """auto, cpu or cuda:N -> a device that is here. Raises InputError."""
    count = torch.cuda.device_count()
    if name == "auto":
        return torch.device("cuda:0" if count else "cpu")
    if not DEVICE_NAME.fullmatch(name):
        raise InputError(f"--device must be auto, cpu or cuda:N, got {name!r}")
    index = cuda_index(name)
    if index is not None and index >= count:
        here = f"cuda:0..{count - 1}" if count else "no CUDA device, only cpu"
        raise InputError(f"--device {name} is not on this host, which has {here}")
    return torch.device(name)


def _workload(request: Request) -> Workload:
    for option, value in (
        ("context", request.context),
        ("documents", request.documents),
        ("anchors", request.anchors),
        ("repeats", request.repeats),
    ):
        if value < 1:
            raise InputError(f"--{option} must be at least 1, got {value}")
    if request.context % request.documents:
        raise InputError(f"--context must be a multiple of --documents {request.documents}, got {request.context}")
    work = Workload(request.documents, request.context // request.documents, request.anchors)
    work.check(request.block_size)
    return work


def _shape(request: Request) -> DrafterShape:
    for option, value, lowest, highest in (
        ("num-layers", request.num_layers, 1, 64),
        ("num-taps", request.num_taps, 1, 64),
        ("block-size", request.block_size, 2, 256),
    ):
        if not lowest <= value <= highest:
            raise InputError(f"--{option} must lie in {lowest}..{highest}, got {value}")
    config = _model_config(request.model_config)
    drafter = DrafterConfig(num_layers=request.num_layers, num_taps=request.num_taps, block_size=request.block_size)
    vocabulary = getattr(text_config(config), "vocab_size", None)
    if not vocabulary:
        raise InputError(f"{request.model_config} gives no vocab_size; give a causal LM's config.json")
    return shape_for(config, drafter, mask_token_id=vocabulary - 1)


def _model_config(name: str) -> Any:
    """The configuration in a JSON file, in a folder, or of a hub id."""
    path = Path(name)
    if not path.is_file():
        if path.suffix == ".json":
            raise InputError(f"no file at {path}; give a Hugging Face config.json, its folder or a hub id")
        return load_config(name)
    from transformers import AutoConfig

    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path} is no JSON file: {error}; give a Hugging Face config.json or its folder") from None
    if not isinstance(raw, dict) or "model_type" not in raw:
        raise InputError(f"{path} has no model_type; give a Hugging Face config.json or its folder")
    try:
        return AutoConfig.for_model(**raw)
    except (ValueError, TypeError, KeyError) as error:
        raise InputError(f"{path} is no configuration that can be used: {str(error).splitlines()[0]}") from None
