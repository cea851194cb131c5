"""Where the time of a step goes on the device, by kernel and by kind of kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity

RUNS = 3
SHOWN = 30
KINDS = {
    "attention": ("flex_attention", "flash", "fmha", "sdpa"),
    "matmul": ("gemm", "nvjet", "cutlass", "cublas", "wgmma", "addmm", "aten::mm", "splitk"),
    "copy": ("memcpy", "memset", "copy_kernel", "direct_copy", "catarray"),
    "compiled pointwise and reductions": ("triton_",),
}


def profile(run: Callable[[], None], title: str, device: torch.device) -> dict[str, Any]:
    """Profile some runs, print the largest kernels, return milliseconds a step by kind and by kernel."""
    cuda = device.type == "cuda"
    activity = ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU
    run()
    with torch.profiler.profile(activities=[activity]) as profiler:
        for _ in range(RUNS):
            run()
        if cuda:
            torch.cuda.synchronize(device)
    events = profiler.key_averages()
    spent = {event.key: (event.self_device_time_total if cuda else event.self_cpu_time_total) for event in events}
    counts = {event.key: event.count for event in events}
    spent = {key: micros for key, micros in sorted(spent.items(), key=lambda item: -item[1]) if micros > 0}
    total = sum(spent.values())
    kinds: dict[str, float] = dict.fromkeys([*KINDS, "other"], 0.0)
    print(f"\n{title}: {total / RUNS / 1e3:.2f} ms a step in kernels")
    for key, micros in list(spent.items())[:SHOWN]:
        print(f"{micros / RUNS / 1e3:9.3f} ms {100 * micros / total:5.1f} % {counts[key] / RUNS:7.1f} x  {key[:110]}")
    for key, micros in spent.items():
        kinds[kind_of(key)] += micros / RUNS / 1e3
    for kind, milliseconds in kinds.items():
        print(f"{milliseconds:9.3f} ms {100e3 * milliseconds * RUNS / total:5.1f} % {kind}")
    return {
        "kernel_ms": round(total / RUNS / 1e3, 3),
        "kinds_ms": {kind: round(value, 3) for kind, value in kinds.items()},
        "kernels_ms": {key[:80]: round(micros / RUNS / 1e3, 3) for key, micros in list(spent.items())[:SHOWN]},
    }


def kind_of(kernel: str) -> str:
    """The first kind one of whose marks is in the kernel's name."""
    lower = kernel.lower()
    return next((kind for kind, marks in KINDS.items() if any(mark in lower for mark in marks)), "other")
