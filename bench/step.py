"""How long does one optimizer step of a drafter take, against SpecForge 0.2.0 and speculators 0.9.0?

Qwen3-8B's shape, 5 draft layers, 5 taps, blocks of 16; random weights, the same tokens, features, anchors and weights
for everybody, learning rate 0, so that every step of everybody does the same work. A step is forward, backward, clip
and AdamW on float32 masters. All who fit into memory together are timed in turns in one process: a turn is one run that
is not counted and two that are. Who runs out of memory beside the others is timed once more alone (`alone`). Our
captured step, whose graphs keep their memory, joins after the peers have left where `Size.graphed_apart` says so and
both peers are there.

Memory is a contender's own: what it holds, and what it adds at the peak of a step. Useful work is counted by
draftmill.step.flops; the ceiling is a product of two random 8192 x 8192 bfloat16 matrices, before and after.

    PYTHONPATH=src python bench/step.py --repeats 5
    PYTHONPATH=src python bench/step.py --contenders graphed graphed-float8 speculators
    PYTHONPATH=src python bench/step.py --tiny        (on a CPU: that the script works, not how fast anything is)

Without --contenders and --sizes all are run, but for the contenders in float8, whose numbers are others: those have to
be named. The peers need their wheels on the path; a contender that fails is in the result with its error.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

import table
from draftmill.drafter.shape import DrafterShape
from draftmill.step.bench import matmul_tflops, on_own_stream, pick_device
from draftmill.step.workload import Workload
from step_race import FLOAT8, OURS, PEERS, STARTED, Race, Size, say

QWEN3_8B = DrafterShape(
    hidden_size=4096,
    intermediate_size=12288,
    num_layers=5,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    rms_norm_eps=1e-6,
    vocab_size=151936,
    block_size=16,
    mask_token_id=151669,
    target_layer_ids=(1, 9, 17, 25, 33),
    num_target_layers=36,
    rope={"rope_type": "default", "rope_theta": 1000000.0},
    max_position_embeddings=40960,
)
TINY = replace(
    QWEN3_8B,
    hidden_size=64,
    intermediate_size=96,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    vocab_size=512,
    block_size=8,
    mask_token_id=511,
    target_layer_ids=(1, 3, 5),
    num_target_layers=8,
)


SIZES = {
    "1x3072": Size(Workload(1, 3072, 512)),
    "4x2048": Size(Workload(4, 2048, 2048), graphed_apart=True),
    "small": Size(Workload(1, 2048, 64), contenders=(*OURS, *FLOAT8)),
}
TINY_SIZES = {
    "1x3072": Size(Workload(1, 96, 16)),
    "4x2048": Size(Workload(4, 48, 32), graphed_apart=True),
    "small": Size(Workload(1, 64, 4), contenders=(*OURS, *FLOAT8)),
}


COLUMNS: dict[str, Callable[[dict[str, Any]], str]] = {
    "median ms": lambda row: f"{row['median_ms']:.1f}",
    "min ms": lambda row: f"{row['min_ms']:.1f}",
    **table.RATES,
    "loss diff": lambda row: f"{row['loss_difference']:.1e}",
    "norm diff": lambda row: f"{row['grad_norm_difference']:.1e}",
    "alone": lambda row: "alone" if row["alone"] else "",
}


def show(size: str, result: dict[str, Any], ceiling: float) -> None:
    """The size's table."""
    print(
        f"\n{size}: {result['documents']} documents, {result['context_tokens']} context tokens, {result['anchors']} "
        f"anchors; {result['useful_tflop']:.4g} useful TFLOP a step"
    )
    table.show(result["contenders"], ceiling, COLUMNS)
    if result["best_of_ours"]:
        print(f"time of the others over {result['best_of_ours']}'s: {result['speed_up']}", flush=True)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--tiny", action="store_true", help="a tiny shape in float32, for trying the script on a CPU")
    parser.add_argument("--contenders", nargs="+", choices=(*OURS, *FLOAT8, *PEERS))
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--repeats", type=int, default=5, help="turns of each contender, two timed runs a turn")
    parser.add_argument("--profile", action="store_true", help="where the kernels' time goes in our fastest way")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", help="file for the result, besides the last line")
    options = parser.parse_args()
    options.device = pick_device(options.device)
    options.dtype = torch.float32 if options.tiny else torch.bfloat16
    if options.contenders is None:
        # compiling for a CPU takes minutes, and says nothing
        on_cuda = options.device.type == "cuda"
        options.contenders = [name for name in (*OURS, *PEERS) if on_cuda or name != "compiled"]
    return options


def main() -> None:
    options = parsed()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    shape, sizes = (TINY, TINY_SIZES) if options.tiny else (QWEN3_8B, SIZES)
    results = table.head("step", options, (*PEERS, "triton"))
    with on_own_stream(options.device):
        before = matmul_tflops(options.device, options.dtype)
        say(f"matmul ceiling {before:.4g} TFLOP/s on {results['device']}; {results['versions']}")
        results["sizes"] = {}
        for name in options.sizes:
            torch._dynamo.reset()  # a peer's second size is compiled as its first would be, not with dynamic shapes
            race = Race(name, sizes[name], shape, options.device, options.dtype, options.contenders)
            results["sizes"][name] = race.run(options.repeats, options.profile)
            del race
            show(name, results["sizes"][name], before)
            table.write(results, options.out)  # a later size that is cut short takes nothing with it
        after = matmul_tflops(options.device, options.dtype)
        say(f"matmul ceiling {after:.4g} TFLOP/s at the end")
    results["ceiling_tflops"] = {"before": round(before, 4), "after": round(after, 4)}
    results["total_s"] = round(time.perf_counter() - STARTED, 1)
    table.write(results, options.out)
    print(json.dumps(results), flush=True)


if __name__ == "__main__":
    main()
