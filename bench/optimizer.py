"""How long does one update of a drafter take: AdamW, and Muon with more or fewer matrices iterated as one batch?

Five layers for a target of the named shape, random float32 masters and bfloat16 gradients, updates captured on CUDA as
in a run and eager on a CPU. The contenders run in turns; two updates each are not timed. `torch` is torch.optim.Muon
and AdamW on float32 parameters of the same shapes, clipped, eager.

    python bench/optimizer.py --shape qwen3-8b --device cuda
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from unittest import mock

import torch
from torch import nn

from draftmill.checkpoint.weights import tensor_shapes
from draftmill.compiling import record_graph
from draftmill.config import TrainConfig
from draftmill.drafter.shape import DrafterShape
from draftmill.step.flat import FlatParameters
from draftmill.train import muon
from draftmill.train.optimizer import FlatAdamW

SIZES = {
    # hidden, MLP, heads, key-value heads, head size
    "tiny": (64, 96, 4, 2, 16),
    "smollm2-135m": (576, 1536, 9, 3, 64),
    "qwen3-1.7b": (2048, 6144, 16, 8, 128),
    "qwen3-8b": (4096, 12288, 32, 8, 128),
}
NS_ITERATIONS = 5


def drafter_shape(name: str) -> DrafterShape:
    hidden, wide, heads, kv_heads, head_dim = SIZES[name]
    return DrafterShape(
        hidden_size=hidden,
        intermediate_size=wide,
        num_layers=5,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=1e-6,
        vocab_size=1000,
        block_size=16,
        mask_token_id=999,
        target_layer_ids=(1, 3, 5, 7, 9),
        num_target_layers=12,
        rope={"rope_type": "default", "rope_theta": 1e6},
        max_position_embeddings=4096,
    )


def random_module(shape: DrafterShape, device: torch.device) -> nn.Module:
    """The drafter's tensors by shape, without a network."""
    module = nn.Module()
    for name, size in tensor_shapes(shape).items():
        module.register_parameter(name.replace(".", "_"), nn.Parameter(torch.randn(size, device=device) * 0.02))
    return module


def iteration_flops(shape: DrafterShape) -> float:
    """Operations of Muon's iterations in one update."""
    total = 0.0
    for size in tensor_shapes(shape).values():
        if len(size) == 2:
            short, long = min(size), max(size)
            total += NS_ITERATIONS * (4.0 * short**2 * long + 2.0 * short**3)
    return total


def own(shape: DrafterShape, device: torch.device, batch_elements: int | None, ema: bool) -> Callable[[], None]:
    """An update of ours; batch_elements None is AdamW."""
    flat = FlatParameters(random_module(shape, device), device, torch.bfloat16)
    ema_decay = 0.999 if ema else None
    flat.gradient.normal_()
    weight_sum = torch.ones((), device=device)
    if batch_elements is None:
        optimizer: FlatAdamW | muon.FlatMuon = FlatAdamW(flat, TrainConfig(ema_decay=ema_decay))
    else:
        with mock.patch.object(muon, "BATCH_ELEMENTS", batch_elements):
            optimizer = muon.FlatMuon(flat, TrainConfig(optimizer="muon", ema_decay=ema_decay))
    optimizer.lr.fill_(1e-4)
    if device.type != "cuda":
        return lambda: optimizer.update(weight_sum)
    for _ in range(2):
        optimizer.update(weight_sum)
    graph = record_graph(lambda: optimizer.update(weight_sum))

    def replay(_held: object = optimizer) -> None:  # whoever holds the graph holds its buffers
        graph.replay()

    return replay


def torchs(shape: DrafterShape, device: torch.device) -> Callable[[], None]:
    """torch's Muon for matrices and AdamW for vectors."""
    parameters = list(random_module(shape, device).parameters())
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    optimizers = [
        torch.optim.Muon([p for p in parameters if p.dim() == 2], lr=1e-4, weight_decay=0.0),
        torch.optim.AdamW([p for p in parameters if p.dim() == 1], lr=1e-4, weight_decay=0.0),
    ]

    def update() -> None:
        nn.utils.clip_grad_norm_(parameters, 1.0)
        for optimizer in optimizers:
            optimizer.step()

    return update


def timed(work: Callable[[], None], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.current_stream().synchronize()
    start_s = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.current_stream().synchronize()
    return time.perf_counter() - start_s


def measure(arguments: argparse.Namespace) -> dict[str, float]:
    """Median milliseconds by contender. All are built first, so that they run in turns."""
    device, shape = torch.device(arguments.device), drafter_shape(arguments.shape)
    contenders: dict[str, Callable[[], None]] = {
        "adamw": own(shape, device, None, ema=False),
        "adamw, ema": own(shape, device, None, ema=True),
        **{f"muon, 2^{power}": own(shape, device, 2**power, ema=False) for power in arguments.powers},
        f"muon, 2^{arguments.powers[-1]}, ema": own(shape, device, 2 ** arguments.powers[-1], ema=True),
        "torch": torchs(shape, device),
    }
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(2 + arguments.repeats):
        for name, work in contenders.items():
            took_s = timed(work, device)
            if turn >= 2:
                seconds[name].append(took_s)
    return {name: round(1e3 * statistics.median(took), 3) for name, took in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", choices=SIZES, default="tiny")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument(
        "--powers", type=int, nargs="+", default=[0, 22, 24, 25, 26], help="batches of 2^n elements; 0: one matrix each"
    )
    arguments = parser.parse_args()
    if arguments.device == "cuda":
        with torch.cuda.stream(torch.cuda.Stream()):
            medians = measure(arguments)
    else:
        medians = measure(arguments)
    shape = drafter_shape(arguments.shape)
    result = {
        "shape": arguments.shape,
        "parameters": sum(torch.Size(size).numel() for size in tensor_shapes(shape).values()),
        "device": torch.cuda.get_device_name() if arguments.device == "cuda" else "cpu",
        "torch": torch.__version__,
        "iteration_tflop": iteration_flops(shape) / 1e12,
        "median_ms": medians,
    }
    for name, milliseconds in medians.items():
        print(f"{name:20} {milliseconds:9.3f} ms")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
