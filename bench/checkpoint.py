"""How long does a checkpoint hold the training up, and how long does resuming take?

Weights and two AdamW moments of the given number of parameters, in float32, as for a drafter. Buffers are prepared and
one save is done before anything is timed. `longest_pause_s` is the longest that another Python thread was kept from
running while the writer wrote, against the same without a writer. The cold figures have the files dropped from the
page cache first.

    python bench/checkpoint.py --parameters 20000000 --device cpu
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import tempfile
import threading
import time
from pathlib import Path

import torch

from draftmill.checkpoint import BackgroundSaver, Saved, load, pick, save

TENSOR_PARAMETERS = 64 * 2**20
"""About the size of the largest matrices of an 8B target's drafter."""


def random_tensors(num_parameters: int, device: torch.device) -> dict[str, torch.Tensor]:
    sizes = [TENSOR_PARAMETERS] * (num_parameters // TENSOR_PARAMETERS)
    if rest := num_parameters - sum(sizes):
        sizes.append(rest)
    return {f"layers.{index}.weight": torch.randn(size, device=device) for index, size in enumerate(sizes)}


class Pauses:
    """A thread that wants to run every millisecond and notes the longest time between two runs."""

    def __enter__(self) -> Pauses:
        self.longest_s = 0.0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _run(self) -> None:
        last_s = time.perf_counter()
        while not self._done.wait(0.001):
            now_s = time.perf_counter()
            self.longest_s = max(self.longest_s, now_s - last_s)
            last_s = now_s


def drop_from_page_cache(folder: Path) -> None:
    for path in folder.iterdir():
        handle = os.open(path, os.O_RDONLY)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def resume(run: Path, tensors: dict[str, torch.Tensor], moments: dict[str, dict[str, torch.Tensor]]) -> float:
    """Seconds from a run's path to verified weights and moments on the device."""
    for named in (tensors, *moments.values()):
        for tensor in named.values():
            tensor.zero_()
    start_s = time.perf_counter()
    checkpoint = pick(run)
    groups = {"": checkpoint.tensors(), **checkpoint.optimizer()}
    for group, named in {"": tensors, **moments}.items():
        for name, tensor in named.items():
            tensor.copy_(groups[group][name])
    if next(iter(tensors.values())).is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--parameters", type=int, default=20_000_000)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--saves", type=int, default=3)
    parser.add_argument(
        "--alias",
        action="store_true",
        help="moments are the weights' own memory, for a machine with little of it; leaves saving in the loop out",
    )
    parser.add_argument("--folder", help="where to write; by default a temporary folder")
    arguments = parser.parse_args()

    device = torch.device(arguments.device)
    tensors = random_tensors(arguments.parameters, device)
    kinds = ("exp_avg", "exp_avg_sq")
    alias = arguments.alias
    moments = {kind: {key: x if alias else x.clone() for key, x in tensors.items()} for kind in kinds}
    run = Path(tempfile.mkdtemp(dir=arguments.folder, prefix="checkpoint-bench-"))
    saved: list[Saved] = []
    try:
        saver = BackgroundSaver(run, keep_last=1, keep_best=0, on_saved=saved.append)
        start_s = time.perf_counter()
        saver.prepare(tensors, moments)
        prepare_s = time.perf_counter() - start_s
        saver.save(1, tensors, moments, {})
        saver.wait()
        with Pauses() as idle:
            time.sleep(min(10.0, arguments.saves * saved[0].write_s))
        held_up = []
        with Pauses() as writing:
            for step in range(2, 2 + arguments.saves):
                held_up.append(saver.save(step, tensors, moments, {}))
                saver.wait()
        saver.close()
        newest, direct_s = saved[-1].folder, None
        if not alias:  # what shares memory is not written as it is
            start_s = time.perf_counter()
            newest = save(run, 99, tensors, moments, {})
            direct_s = round(time.perf_counter() - start_s, 3)
        kept = next(iter(tensors.values())).clone()
        drop_from_page_cache(newest)
        cold_s = resume(run, tensors, moments)
        warm_s = resume(run, tensors, moments)
        assert torch.equal(kept, next(iter(tensors.values())))
        start_s = time.perf_counter()
        load(newest)
        verify_s = time.perf_counter() - start_s
        num_bytes = sum(path.stat().st_size for path in newest.iterdir())
    finally:
        shutil.rmtree(run)
    result = {
        "parameters": arguments.parameters,
        "gigabytes": round(num_bytes / 1e9, 3),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu",
        "moments_alias_weights": arguments.alias,
        "num_cpus": os.cpu_count(),
        "held_up_s": round(statistics.median(each.copy_s for each in held_up), 4),
        "held_up_max_s": round(max(each.copy_s for each in held_up), 4),
        "write_s": round(statistics.median(each.write_s for each in saved[1:]), 3),
        "held_up_by_saving_in_the_loop_s": direct_s,
        "prepare_s": round(prepare_s, 3),
        "longest_pause_idle_s": round(idle.longest_s, 4),
        "longest_pause_writing_s": round(writing.longest_s, 4),
        "resume_cold_s": round(cold_s, 3),
        "resume_warm_s": round(warm_s, 3),
        "verify_warm_s": round(verify_s, 3),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
