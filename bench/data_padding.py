"""How much of the target's tokens is padding, by way of batching?

One epoch over 1,095,082 lengths that resemble a real bucket table (data_lengths.py), 32,768 tokens a batch, at most 64
rows, row lengths rounded up to 64. Compared: random batches of a fixed number of rows padded to their longest; one
padded shape a bucket; our bucketed batches with 1, 6 and 32 buckets, with the table's own edges, and with narrower and
wider windows; packed rows. Seconds are those of planning one epoch, on one thread.

    python bench/data_padding.py [--samples N]
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import numpy as np

from data_lengths import EDGES, NUM_SAMPLES, draw_lengths
from draftmill.data import BatchPlan
from draftmill.data import plan as plan_module
from draftmill.data.buckets import bucket_of, choose_edges

SETTINGS: dict[str, Any] = {"max_length": 8192, "token_budget": 32768, "min_rows": 4, "max_rows": 64, "round_to": 64}


def ours(lengths: np.ndarray, **changed: Any) -> dict[str, Any]:
    options = {"num_buckets": 6, "bucket_edges": None, "seed": 0, "batching": "bucketed", **changed}
    started = time.perf_counter()
    plan = BatchPlan(lengths, **SETTINGS, **options)
    batches = plan.num_batches(0)
    seconds = time.perf_counter() - started
    return {"padding_pct": round(100 * plan.padding_share(), 3), "batches": batches, "plan_s": round(seconds, 2)}


def random_fixed(lengths: np.ndarray, rows: int) -> dict[str, Any]:
    """Random batches of `rows` samples, each padded to the batch's longest."""
    order = np.random.default_rng(0).permutation(lengths).astype(np.int64)
    longest = np.maximum.reduceat(order, np.arange(0, len(order), rows))
    longest = -(-longest // 64) * 64
    sizes = np.full(len(longest), rows)
    sizes[-1] = len(order) - rows * (len(longest) - 1)
    padded = int((longest * sizes).sum())
    return {"padding_pct": round(100 * (1 - float(order.sum()) / padded), 3), "batches": len(longest)}


def one_shape_a_bucket(lengths: np.ndarray, edges: list[int]) -> dict[str, Any]:
    """Every sample padded to its bucket's upper edge."""
    top = np.minimum(-(-(np.array(edges) - 1) // 64) * 64, SETTINGS["max_length"])
    padded = int(top[bucket_of(lengths, edges)].sum())
    return {"padding_pct": round(100 * (1 - int(lengths.sum(dtype=np.int64)) / padded), 3), "buckets": len(edges)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=NUM_SAMPLES)
    lengths = draw_lengths(parser.parse_args().samples)
    results: dict[str, Any] = {}
    for rows in (4, 18):
        results[f"random, {rows} rows, padded to the longest"] = random_fixed(lengths, rows)
    results["one shape a bucket, the table's 6"] = one_shape_a_bucket(lengths, EDGES)
    for buckets in (6, 16, 32):
        edges = choose_edges(lengths, buckets, SETTINGS["max_length"], SETTINGS["round_to"])
        results[f"one shape a bucket, best {buckets}"] = one_shape_a_bucket(lengths, edges)
    results["bucketed, the table's 6"] = ours(lengths, bucket_edges=EDGES)
    for buckets in (1, 6, 32):
        results[f"bucketed, {buckets} chosen"] = ours(lengths, num_buckets=buckets)
    chosen = plan_module._WINDOW_BATCHES
    for window in (16, 64, 1024):
        plan_module._WINDOW_BATCHES = window
        results[f"bucketed, 6 chosen, windows of {window} batches (default {chosen})"] = ours(lengths)
    plan_module._WINDOW_BATCHES = chosen
    results["packed"] = ours(lengths, batching="packed")
    for name, result in results.items():
        print(f"{name:62} {result['padding_pct']:7.3f} %   {result}")
    print(json.dumps({"samples": len(lengths), "results": results}))


if __name__ == "__main__":
    main()
