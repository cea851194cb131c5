"""Updates on CUDA, eager and captured, equal the CPU's, while rate, clipping and averaging change at every step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from draftmill.checkpoint import checkpoints, load
from draftmill.compiling import BUILD_LOCK, record_graph
from draftmill.config import TrainConfig
from draftmill.monitor.metrics import read_metrics
from draftmill.step.flat import FlatParameters
from draftmill.train.muon import FlatMuon
from draftmill.train.optimizer import FlatAdamW, FlatOptimizer
from draftmill.train.run import train
from tiny import config_of, small_world

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")]

STEPS = 20
CONFIGS = {
    "adamw": TrainConfig(lr=3e-3, weight_decay=0.1, ema_decay=0.6),
    "muon": TrainConfig(optimizer="muon", lr=3e-3, muon_lr=2e-2, weight_decay=0.1, ema_decay=0.6),
}


class Net(nn.Module):
    """A small drafter's matrices and vectors, and a matrix that fills no alignment."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        shapes = [(256, 256), (128, 256), (128, 256), (512, 256), (512, 256), (256, 512), (256,), (64,)] * 2
        for index, shape in enumerate([*shapes, (256, 1280), (33, 7)]):
            setattr(self, f"p{index}", nn.Parameter(torch.randn(shape, generator=generator) * 0.05))


def updated(case: str, device: str, captured: bool, dtype: torch.dtype, summed: bool = False) -> FlatOptimizer:
    """20 updates from the same gradients; the 11th has a number that is none and must change no weight."""
    flat = FlatParameters(Net(), device, dtype)
    if summed:
        flat.sum_in_float32()
    optimizer: FlatOptimizer = (FlatMuon if case == "muon" else FlatAdamW)(flat, CONFIGS[case])
    weight_sum = torch.ones((), device=device)

    def run() -> None:
        optimizer.update(weight_sum)

    update: Callable[[], None] = run
    if captured:
        for _ in range(2):
            run()
        update = record_graph(run).replay
        optimizer.reset()
    generator = torch.Generator().manual_seed(7)
    for step in range(STEPS):
        flat.gradient_sum.copy_(torch.randn(flat.size, generator=generator) * 10.0 ** (step % 3 - 1))
        before = flat.master.clone()
        if step == 10:
            flat.gradient_sum[5] = float("nan")
        optimizer.lr.fill_(CONFIGS[case].lr * (1.0 - step / STEPS))
        weight_sum.fill_(1.0 + step)
        update()
        assert torch.equal(flat.master, before) == (step == 10), step
        assert bool(torch.isfinite(optimizer.grad_norm)) == (step != 10), step
    return optimizer


def on_cuda(*arguments: Any, **options: Any) -> FlatOptimizer:
    """`updated` on a stream of its own, as in a worker."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), BUILD_LOCK:
        optimizer = updated(arguments[0], "cuda", *arguments[1:], **options)
    stream.synchronize()
    return optimizer


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", ["adamw", "muon"])
def test_twenty_updates_end_at_the_cpus(case: str, dtype: torch.dtype, captured: bool) -> None:
    found, expected = on_cuda(case, captured, dtype), updated(case, "cpu", False, dtype)
    moved = expected.flat.master - FlatParameters(Net(), "cpu", dtype).master
    # Muon's iteration is in bfloat16, where another order of sums is felt.
    allowed = 1e-3 if case == "adamw" else 3e-2
    assert float((found.flat.master.cpu() - expected.flat.master).norm() / moved.norm()) < allowed
    assert found.average is not None
    assert expected.average is not None
    assert float((found.average.average.cpu() - expected.average.average).norm() / moved.norm()) < allowed
    assert torch.equal(found.flat.weights, found.flat.master.to(dtype))
    assert int(found.count) == STEPS
    for kind, named in expected.moments().items():
        for name, moment in named.items():
            torch.testing.assert_close(found.moments()[kind][name].cpu(), moment, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("case", ["adamw", "muon"])
def test_a_captured_update_is_the_eager_one_bit_for_bit_and_so_is_another(case: str) -> None:
    first, second, eager = (on_cuda(case, captured, torch.bfloat16) for captured in (True, True, False))
    for other in (second, eager):
        assert torch.equal(first.flat.master, other.flat.master)
        assert first.average is not None
        assert other.average is not None
        assert torch.equal(first.average.average, other.average.average)


def test_a_captured_update_reads_the_float32_sum() -> None:
    found = on_cuda("muon", True, torch.bfloat16, summed=True)
    expected = updated("muon", "cpu", False, torch.bfloat16, summed=True)
    moved = expected.flat.master - FlatParameters(Net(), "cpu", torch.bfloat16).master
    assert found.flat.gradient_sum.dtype == torch.float32
    assert float((found.flat.master.cpu() - expected.flat.master).norm() / moved.norm()) < 3e-2


def test_whole_runs_graphed_and_eager(tmp_path: Path) -> None:
    """Muon, moving average and sums in float32 in a run that evaluates and saves."""
    sections = small_world(tmp_path, head_dim=16)  # flex attention takes no smaller heads
    sections["drafter"] |= {"block_size": 16}
    settings = (
        "target.devices=[cuda:0]",
        "drafter.devices=[cuda:0]",
        "drafter.dtype=bfloat16",
        "train.optimizer=muon",
        "train.muon_lr=0.01",
        "train.ema_decay=0.9",
        "train.accumulate=2",
    )
    losses, averages = {}, {}
    for how in ("eager", "graphed"):
        folder = tmp_path / how
        train(config_of(sections, f"run.dir={folder}", f"drafter.step={how}", *settings), console=False)
        losses[how] = [record["loss"] for record in read_metrics(folder).steps]
        averages[how] = load(checkpoints(folder)[-1].folder).average()
    assert losses["graphed"] == pytest.approx(losses["eager"], rel=2e-2)
    assert averages["eager"] is not None
    assert averages["graphed"] is not None
    for name, expected in averages["eager"].items():
        assert float((averages["graphed"][name] - expected).norm() / expected.norm()) < 0.15, name
