"""Does a store of a million samples open, plan, read and stay within memory as the trainer needs it?

Writes 1,095,082 synthetic samples (data_lengths.py; 8 GB, removed afterwards), then measures in fresh processes:
opening and planning one epoch; reading batches in planned order with the file pages dropped from the page cache
first (cold) and again (warm), on one thread; the loader over as many batches, with its anchors. Anonymous memory is
RssAnon of /proc/self/status: what the mapped files hold is page cache and not counted. Nothing is warmed up.

    python bench/data_store.py --folder /fast/disk [--samples N] [--read-batches N]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from data_lengths import EDGES, NUM_SAMPLES, draw_lengths

SHARD_SAMPLES = 4096
VOCAB_SIZE = 151_936


def anonymous_bytes() -> int:
    """Memory of this process that no file backs."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("no RssAnon in /proc/self/status")


def write(folder: Path, num_samples: int) -> float:
    """Write the store; seconds."""
    from draftmill.data.build import StoreBuild, write_shard

    started = time.perf_counter()
    lengths = draw_lengths(num_samples)
    tokens = np.random.default_rng(1).integers(0, VOCAB_SIZE, 1 << 22, dtype=np.int32)
    mask = np.ones(8192, dtype=np.bool_)
    mask[:128] = False
    with StoreBuild(folder, "0" * 32) as build:
        build.start()
        num_shards = -(-num_samples // SHARD_SAMPLES)
        for shard in range(num_shards):
            part = lengths[shard * SHARD_SAMPLES : (shard + 1) * SHARD_SAMPLES]
            begins = (np.arange(len(part)) * 1009 + shard) % ((1 << 22) - 8192)
            samples = [(tokens[b : b + n], mask[:n]) for b, n in zip(begins.tolist(), part.tolist(), strict=True)]
            write_shard(build.folder, shard, samples, {}, VOCAB_SIZE)
        build.finish(num_shards, {"max_length": 8192, "vocab_size": VOCAB_SIZE}, {}, VOCAB_SIZE)
    return time.perf_counter() - started


def drop_from_page_cache(folder: Path) -> None:
    """Ask the kernel to forget the store's file pages, so that the next reads come from the disk."""
    for path in folder.rglob("*.arrow"):
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def measure_open(folder: Path) -> dict[str, Any]:
    """Open the store and plan an epoch, imports of numpy and draftmill.data excluded, those of datasets included."""
    from draftmill.data import BatchPlan, Store

    before = anonymous_bytes()
    cpu, started = time.process_time(), time.perf_counter()
    store = Store.open(folder, max_length=8192)
    opened = time.perf_counter()
    plan = make_plan(BatchPlan, store)
    batches = plan.num_batches(0)
    planned, cpu = time.perf_counter(), time.process_time() - cpu
    lines = plan.describe()
    return {
        "open_s": round(opened - started, 2),
        "plan_s": round(planned - opened, 2),
        "open_and_plan_s": round(planned - started, 2),
        "open_and_plan_cpu_s": round(cpu, 2),
        "anonymous_mb": round((anonymous_bytes() - before) / 1e6, 1),
        "batches": batches,
        "lines": lines,
    }


def make_plan(plan_class: Any, store: Any) -> Any:
    return plan_class(
        store.lengths,
        max_length=8192,
        token_budget=32768,
        min_rows=4,
        max_rows=64,
        num_buckets=len(EDGES),
        bucket_edges=EDGES,
        round_to=64,
        seed=0,
    )


def measure_read(folder: Path, num_batches: int) -> dict[str, Any]:
    """Read batches in planned order and copy each into one array, as a batch needs it."""
    from draftmill.data import BatchPlan, Store

    store = Store.open(folder)
    plan = make_plan(BatchPlan, store)
    num_batches = min(num_batches, plan.num_batches(0))
    plan.sample_ids(0, 0)
    before, cpu, started, tokens = anonymous_bytes(), time.process_time(), time.perf_counter(), 0
    for index in range(num_batches):
        samples = store.read(plan.sample_ids(0, index))
        tokens += len(np.concatenate([ids for ids, _ in samples]))
        np.concatenate([mask for _, mask in samples])
    wall, cpu = time.perf_counter() - started, time.process_time() - cpu
    return {
        "batches": num_batches,
        "mtokens_per_s": round(tokens / wall / 1e6, 2),
        "mtokens_per_cpu_s": round(tokens / cpu / 1e6, 2),
        "anonymous_growth_mb": round((anonymous_bytes() - before) / 1e6, 1),
    }


def measure_loader(folder: Path, num_batches: int) -> dict[str, Any]:
    """The loader with 2048 anchor slots; anonymous memory at a tenth of the way and at the end."""
    from draftmill.data import BatchPlan, Store
    from draftmill.data.loader import Loader
    from draftmill.records import BatchKind, WorkItem

    store = Store.open(folder)
    plan = make_plan(BatchPlan, store)
    num_batches = min(num_batches, plan.num_batches(0))
    items = (WorkItem(index, BatchKind.TRAIN, 0, index) for index in range(num_batches))
    sizes = {"context_slots": plan.context_slots, "anchor_slots": 2048, "block_size": 16, "anchor_draws": 1}
    with Loader(store, plan, None, items, **sizes, seed=0, pin=False, read_ahead=4, buffers=6) as loader:
        early, cpu, started, tokens, done = 0, time.process_time(), time.perf_counter(), 0, 0
        while (batch := loader.next()) is not None:
            tokens += batch.num_tokens
            loader.release(batch)
            done += 1
            if done == max(1, num_batches // 10):
                early = anonymous_bytes()
        wall, cpu = time.perf_counter() - started, time.process_time() - cpu
    return {
        "batches": done,
        "mtokens_per_s": round(tokens / wall / 1e6, 2),
        "mtokens_per_cpu_s": round(tokens / cpu / 1e6, 2),
        "anonymous_growth_mb": round((anonymous_bytes() - early) / 1e6, 1),
    }


MEASURES = {"open": measure_open, "read": measure_read, "loader": measure_loader}


def in_fresh_process(measure: str, folder: Path, *numbers: int) -> dict[str, Any]:
    command = [sys.executable, __file__, "--measure", measure, "--folder", str(folder), *map(str, numbers)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return json.loads(output.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="where the store is written; the temporary folder by default")
    parser.add_argument("--samples", type=int, default=NUM_SAMPLES)
    parser.add_argument("--read-batches", type=int, default=4000)
    parser.add_argument("--no-epoch", action="store_true", help="leave out the loader over a whole epoch (minutes)")
    parser.add_argument("--measure", choices=sorted(MEASURES), help=argparse.SUPPRESS)
    parser.add_argument("numbers", nargs="*", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(MEASURES[arguments.measure](arguments.folder, *arguments.numbers)))
        return
    folder = Path(tempfile.mkdtemp(prefix="draftmill-store-", dir=arguments.folder))
    try:
        result: dict[str, Any] = {"samples": arguments.samples, "write_s": round(write(folder, arguments.samples), 1)}
        drop_from_page_cache(folder)
        opened = in_fresh_process("open", folder)
        print("\n".join(opened.pop("lines")))
        result["open_cold"] = opened
        result["open_warm"] = {k: v for k, v in in_fresh_process("open", folder).items() if k != "lines"}
        drop_from_page_cache(folder)
        result["read_cold"] = in_fresh_process("read", folder, arguments.read_batches)
        result["read_warm"] = in_fresh_process("read", folder, arguments.read_batches)
        result["loader"] = in_fresh_process("loader", folder, arguments.read_batches)
        if not arguments.no_epoch:
            result["loader_epoch"] = in_fresh_process("loader", folder, 1 << 30)
    finally:
        shutil.rmtree(folder)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
