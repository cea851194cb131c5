"""How long does a target's forward to its last tap take, plain, with fused kernels, with compiled layers, and captured?

Qwen3-8B's shape by default, cut after layer 33, random bfloat16 weights. A batch has the same documents for everybody:
one a row (plain, fused, compiled), or packed into rows of 8192 tokens (packed, packed-compiled, graphed), as a worker
runs them. Everybody is timed in turns in one process: a turn is one run that is not counted and two that are.
`launch_ms` is how long Python took before it went on, which a worker takes from the other threads. Useful work counts
matrix products of real tokens and pairs that see each other: no embedding, no LM head. The ceiling is a product of two
random 8192 x 8192 matrices, before and after. Features are compared with the plain forward's (`difference`). Memory is
the peak of tensors, weights included; what a captured forward works in is not among them.

    PYTHONPATH=src python bench/target.py --repeats 5
    PYTHONPATH=src python bench/target.py --tiny        (on a CPU: that the script works, not how fast anything is)

Liger's kernels need liger-kernel on the path; a contender that fails is in the result with its error.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

import table
from draftmill.drafter.shape import default_layer_ids
from draftmill.step.bench import matmul_tflops, on_own_stream, pick_device, wait_for
from draftmill.target.attention import Packing, packing_of
from draftmill.target.attention_check import prepare_packing
from draftmill.target.float8 import check_float8, quantize_layers
from draftmill.target.model import Target
from draftmill.target.step import EagerForward, Forward, first_line, largest_difference
from draftmill.target.step_compiled import CompiledForward
from draftmill.target.step_fused import FusedForward
from draftmill.target.step_graphed import GraphedForward
from pipeline_world import QWEN3_8B, TINY

GIB = 2**30
SIZES = {"32x512": (32, 512), "8x2048": (8, 2048), "4x8192": (4, 8192)}
TINY_SIZES = {"32x512": (8, 16), "8x2048": (4, 32), "4x8192": (2, 64)}
PADDED, PACKED = ("plain", "fused", "compiled"), ("packed", "packed-fused", "packed-compiled", "graphed")


@dataclass(frozen=True)
class Batch:
    """Token ids in rows, and where documents lie in them if they are packed."""

    tokens: torch.Tensor
    packing: Packing | None


def random_target(
    config: Any, num_taps: int, device: torch.device, dtype: torch.dtype
) -> tuple[Target, tuple[int, ...]]:
    """A target with random weights on the device, cut after its last tap."""
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            model = AutoModelForCausalLM.from_config(config)
    finally:
        torch.set_default_dtype(before)
    layer_ids = default_layer_ids(config.num_hidden_layers, num_taps)
    target = Target(model)
    target.cut_after(layer_ids[-1])
    return target, layer_ids


def batches(documents: int, length: int, row: int, vocabulary: int, device: torch.device) -> dict[bool, Batch]:
    """The same documents, one a row (False) and packed into rows (True)."""
    tokens = torch.randint(vocabulary, (documents, length), generator=torch.Generator().manual_seed(1))
    in_row = row // length
    positions = torch.arange(length).repeat(in_row).expand(documents // in_row, -1).int()
    number = torch.arange(in_row).repeat_interleave(length).expand(documents // in_row, -1).int()
    packing = packing_of(positions.contiguous(), number.contiguous(), device)
    return {
        False: Batch(tokens.to(device), None),
        True: Batch(tokens.view(documents // in_row, row).to(device), packing),
    }


def useful_flops(target: Target, documents: int, length: int) -> float:
    """Operations of the linear layers on every token, and of causal attention on every pair that sees each other."""
    weights = sum(m.weight.numel() for m in target.layers.modules() if isinstance(m, torch.nn.Linear))
    text = target.text_config
    pairs = length * (length + 1) // 2
    attention = 4 * pairs * text.num_attention_heads * text.head_dim * len(target.layers)
    return float(documents * (2 * weights * length + attention))


class Contender:
    """One way of running the target, with what was measured of it. It changes the target only while it runs."""

    def __init__(self, name: str, batch: Batch, implementation: str, build: Callable[[], Forward]) -> None:
        self.name, self.batch, self.implementation, self.build = name, batch, implementation, build
        self.forward: Forward | None = None
        self.seconds: list[float] = []
        self.launches: list[float] = []
        self.error: str | None = None
        self.build_s = 0.0
        self.peak_bytes = 0
        self.features: list[torch.Tensor] = []

    def turn(self, target: Target, device: torch.device, timed: int) -> None:
        """Run once, then `timed` times on the clock."""
        if self.error is not None:
            return
        target.decoder.config._attn_implementation_internal = self.implementation
        try:
            started = time.perf_counter()
            if self.forward is None:
                self.forward = self.build()
            self.forward.apply()
            self.forward.run(self.batch.tokens, self.batch.packing)
            wait_for(device)
            if not self.seconds:
                self.build_s = time.perf_counter() - started
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(
                    device
                )  # and keep what the allocator holds: a run is not to wait for it
            for _ in range(timed):
                started = time.perf_counter()
                taps = self.forward.run(self.batch.tokens, self.batch.packing)
                self.launches.append(time.perf_counter() - started)
                wait_for(device)
                self.seconds.append(time.perf_counter() - started)
            if device.type == "cuda":
                self.peak_bytes = torch.cuda.max_memory_allocated(device)
            hidden = taps[0].shape[-1]
            self.features = [tap.reshape(-1, hidden)[::8].clone() for tap in taps]
        except Exception as error:
            self.error = f"{type(error).__name__}: {first_line(error)[:200]}"
        finally:
            if self.forward is not None and not isinstance(self.forward, GraphedForward):
                self.forward.undo()

    def result(self, flops: float, plain: Contender | None) -> dict[str, Any]:
        if self.error is not None:
            return {"error": self.error}
        median = statistics.median(self.seconds)
        difference = None if plain is None or plain.error else largest_difference(self.features, plain.features)
        return {
            "median_ms": round(1e3 * median, 3),
            "min_ms": round(1e3 * min(self.seconds), 3),
            "launch_ms": round(1e3 * statistics.median(self.launches), 3),
            "useful_tflops": float(f"{flops / median / 1e12:.5g}"),
            "build_s": round(self.build_s, 1),
            "peak_gib": round(self.peak_bytes / GIB, 2) if self.peak_bytes else None,
            "runs": len(self.seconds),
            "difference": difference,
        }


def contenders(
    names: list[str], target: Target, layer_ids: tuple[int, ...], size: dict[bool, Batch], plain: str, by_document: str
) -> list[Contender]:
    """Those asked for; `plain` and `by_document` are the attention implementations of padded and packed rows."""
    padded, packed = size[False], size[True]
    row = packed.tokens.shape[1]
    captured = CompiledForward(target, layer_ids, True, row) if packed.tokens.is_cuda else None

    def graph() -> Forward:
        if captured is None:
            return GraphedForward(EagerForward(target, layer_ids, True))
        captured.apply()
        try:
            forward = GraphedForward(captured)
            forward.run(packed.tokens, packed.packing)
        finally:
            captured.undo()
        return forward

    ways: dict[str, tuple[Batch, str, Callable[[], Forward]]] = {
        "plain": (padded, plain, lambda: EagerForward(target, layer_ids)),
        "fused": (padded, plain, lambda: FusedForward(target, layer_ids)),
        "compiled": (padded, plain, lambda: CompiledForward(target, layer_ids)),
        "packed": (packed, by_document, lambda: EagerForward(target, layer_ids, True)),
        "packed-fused": (packed, by_document, lambda: FusedForward(target, layer_ids, True)),
        "packed-compiled": (packed, by_document, lambda: CompiledForward(target, layer_ids, True, row)),
        "graphed": (packed, by_document, graph),
    }
    return [Contender(name, *ways[name]) for name in names]


def race(options: argparse.Namespace, ceiling: float) -> dict[str, Any]:
    config = options.config
    target, layer_ids = random_target(config, options.num_taps, options.device, options.dtype)
    plain = target.decoder.config._attn_implementation
    if not prepare_packing(target, layer_ids):
        raise SystemExit(f"{type(target.model).__name__} does not attend by document")
    by_document = target.decoder.config._attn_implementation
    weights = sum(p.numel() * p.element_size() for p in target.model.parameters())
    if options.quantize:
        check_float8([options.device])
        say(f"{quantize_layers(target)} layers in {options.quantize}, out of {weights / GIB:.2f} GiB in all")
    say(f"{len(target.layers)} layers, {weights / GIB:.2f} GiB, {plain} attention, taps {list(layer_ids)}")
    results: dict[str, Any] = {"weights_gib": round(weights / GIB, 2), "sizes": {}}
    row = max(length for _, length in options.all_sizes.values())
    for name in options.sizes:
        documents, length = options.all_sizes[name]
        size = batches(documents, length, row, config.vocab_size, options.device)
        flops = useful_flops(target, documents, length)
        everybody = contenders(options.contenders, target, layer_ids, size, plain, by_document)
        for _ in range(options.repeats):
            for each in everybody:
                each.turn(target, options.device, timed=2)
        reference = next((each for each in everybody if each.name == "plain"), None)
        rows = {each.name: each.result(flops, reference) for each in everybody}
        results["sizes"][name] = {
            "documents": documents,
            "tokens_each": length,
            "useful_tflop": float(f"{flops / 1e12:.5g}"),
            "contenders": rows,
        }
        say(f"\n{name}: {results['sizes'][name]['useful_tflop']:.4g} useful TFLOP a forward")
        table.show(rows, ceiling, COLUMNS)
        del everybody, reference
        gc.collect()
        if options.device.type == "cuda":
            torch.cuda.empty_cache()
    return results


COLUMNS: dict[str, Callable[[dict[str, Any]], str]] = {
    "median ms": lambda row: f"{row['median_ms']:.2f}",
    "min ms": lambda row: f"{row['min_ms']:.2f}",
    "launch ms": lambda row: f"{row['launch_ms']:.2f}",
    **table.RATES,
    "differs": lambda row: "" if row["difference"] is None else f"{row['difference']:.1e}",
    "build s": lambda row: f"{row['build_s']:.1f}",
}


def say(text: str) -> None:
    print(text, flush=True)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--tiny", action="store_true", help="a tiny shape in float32, for trying the script on a CPU")
    parser.add_argument("--model-config", help="a target's config.json in place of Qwen3-8B's shape")
    parser.add_argument("--contenders", nargs="+", choices=(*PADDED, *PACKED))
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--num-taps", type=int, default=5)
    parser.add_argument("--quantize", choices=("float8",), help="the layers in it, for everybody")
    parser.add_argument("--repeats", type=int, default=5, help="turns of each contender, two timed runs a turn")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", help="file for the result, besides the last line")
    options = parser.parse_args()
    options.device = pick_device(options.device)
    options.dtype = torch.float32 if options.tiny else torch.bfloat16
    options.all_sizes = TINY_SIZES if options.tiny else SIZES
    shape: dict[str, Any] = TINY if options.tiny else QWEN3_8B
    if options.model_config:
        with open(options.model_config, encoding="utf-8") as file:
            shape = json.load(file)
    options.config = AutoConfig.for_model(**shape)
    if options.contenders is None:
        on_cuda = options.device.type == "cuda"
        # compiling for a CPU takes long, and says nothing
        options.contenders = [name for name in (*PADDED, *PACKED) if on_cuda or "compiled" not in name]
    return options


def main() -> None:
    options = parsed()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    started = time.perf_counter()
    results = table.head("target", options, ("liger-kernel", "triton"))
    results["model_type"] = options.config.model_type
    with on_own_stream(options.device), torch.no_grad():
        before = matmul_tflops(options.device, options.dtype)
        say(f"matmul ceiling {before:.4g} TFLOP/s on {results['device']}; {results['versions']}")
        results.update(race(options, before))
        after = matmul_tflops(options.device, options.dtype)
        say(f"matmul ceiling {after:.4g} TFLOP/s at the end")
    results["ceiling_tflops"] = {"before": round(before, 4), "after": round(after, 4)}
    results["total_s"] = round(time.perf_counter() - started, 1)
    table.write(results, options.out)
    print(json.dumps(results), flush=True)


if __name__ == "__main__":
    main()
