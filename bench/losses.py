"""What does each loss cost in the loss head?

One chunk of rows, value and slope, for every objective; contenders take turns in one process, the time is the median.
`products` is the products alone: logits and slope, which no loss goes without. On CUDA both the plain arithmetic and
the kernel that compiled and captured steps use are timed, and the peak of what a chunk allocates is read.

    PYTHONPATH=src python bench/losses.py --vocabulary 151936 --hidden 4096 --rows 2048
    PYTHONPATH=src OMP_NUM_THREADS=1 python bench/losses.py --vocabulary 49152 --hidden 576 --rows 512 --device cpu
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from draftmill.drafter.loss import ROW_WORK, LossRule, RowWork, loss_chunk
from draftmill.step.bench import DTYPES, GIB, on_own_stream, pick_device, wait_for
from draftmill.target.head import TargetHead

RULES = {
    "cross_entropy": LossRule(7.0),
    "cross_entropy, labels of the target": LossRule(7.0, target_labels=True),
    "kl": LossRule(7.0, cross_entropy=0.0, kl=1.0),
    "total_variation": LossRule(7.0, cross_entropy=0.0, total_variation=1.0),
    "all three": LossRule(7.0, cross_entropy=0.1, kl=0.9, total_variation=0.5),
}
WARM_UPS = 2


def contenders(device: torch.device, dtype: torch.dtype, rows: int, vocabulary: int, hidden: int) -> dict[str, Any]:
    """Functions that do the work once, by name."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, device=device, dtype=dtype, generator=generator)

    matrix = normal(vocabulary, hidden).mul_(0.05)
    head, states, target_states = TargetHead(matrix, matrix), normal(rows, hidden), normal(rows, hidden)
    labels = torch.randint(vocabulary, (rows,), device=device, generator=generator)
    weights = torch.ones(rows, device=device)
    places, slopes = torch.arange(rows, device=device), torch.empty_like(states)
    ways = {"plain": ROW_WORK}
    if device.type == "cuda":
        from draftmill.drafter import loss_kernel

        ways["kernel"] = loss_kernel.ROW_WORK

    def chunk(rule: LossRule, given: torch.Tensor | None, work: RowWork) -> None:
        taken = work.take(states, places)
        *_, found = loss_chunk(taken, given, head, labels, weights, rule, 15, True, work.score)
        assert found is not None
        work.place(slopes, places, found)

    def products(count: int) -> None:
        for _ in range(count):
            logits = head.logits(states)
        logits @ matrix

    found: dict[str, Any] = {"products": lambda: products(1), "products, target too": lambda: products(2)}
    for name, rule in RULES.items():
        given = target_states if rule.needs_target else None
        for way, work in ways.items():
            found[f"{name} ({way})"] = functools.partial(chunk, rule, given, work)
    return found


def timed(work: Callable[[], Any], device: torch.device) -> tuple[float, int]:
    """Seconds, and bytes at the peak above what was there (0 on a CPU)."""
    before = 0
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
    wait_for(device)
    started = time.perf_counter()
    work()
    wait_for(device)
    seconds = time.perf_counter() - started
    return seconds, torch.cuda.max_memory_allocated(device) - before if device.type == "cuda" else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bfloat16")
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, default=151936)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=10)
    options = parser.parse_args()
    device = pick_device(options.device)
    seconds: dict[str, list[float]] = {}
    peaks: dict[str, int] = {}
    with on_own_stream(device), torch.no_grad():
        work = contenders(device, DTYPES[options.dtype], options.rows, options.vocabulary, options.hidden)
        for turn in range(WARM_UPS + options.repeats):
            for name, run in work.items():
                took_s, peak = timed(run, device)
                if turn >= WARM_UPS:
                    seconds.setdefault(name, []).append(took_s)
                    peaks[name] = peak
    found = {
        name: {"ms": 1e3 * statistics.median(each), **({"peak_gib": peaks[name] / GIB} if peaks[name] else {})}
        for name, each in seconds.items()
    }
    for name, figures in found.items():
        memory = f"   {figures['peak_gib']:.2f} GiB" if "peak_gib" in figures else ""
        print(f"{name:46s} {figures['ms']:9.2f} ms{memory}")
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu, {torch.get_num_threads()} threads"
    print(json.dumps({**vars(options), "device": where, "torch": torch.__version__, "losses": found}))


if __name__ == "__main__":
    main()
