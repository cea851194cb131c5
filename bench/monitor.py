"""What does monitoring cost a step, and how soon does `status` answer?

The cost is CPU seconds of all its threads for each second of training, as a share of a step.
Eight workers beat, the loop reports a step of 15 slots, TensorBoard is fed; the "step" itself is a sleep, so that every
CPU second of the process is monitoring's. Counting CPU time, all threads together, is the worst case: it is what
monitoring would take from workers that hold the interpreter's lock all the time. Warm-up: 1000 steps without a pause
(after which trackers are fed at their lasting rate) and 20 of the length measured.

python bench/monitor.py [--seconds 10]; the last line is JSON. Bar: under 1 % of a step of 0.14 s, the optimizer step of
the smallest reference shape (1 x 3072 tokens, 512 anchors, Qwen3-8B, one H200).
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from draftmill.monitor.phases import Phase
from draftmill.monitor.run import RunDirectory

STEPS_S = (0.02, 0.05, 0.14, 0.5)
CONFIG = "monitor: {trackers: [tensorboard]}\ntrain: {log_every_s: 10}\n"


def one_step(run: RunDirectory, hearts: list, step: int, step_s: float) -> float:
    """What the loop and the workers tell in one step; gives the seconds that the calls took."""
    began = time.perf_counter()
    for heart in hearts:
        heart.beat("waiting", step, busy_s=step_s * 0.9)
        heart.beat("working", step, wait_s=step_s * 0.1)
    run.phase(Phase.TRAINING)
    run.metrics(
        {
            "step": step,
            "epoch": 0,
            "loss": 2.0 / step,
            "lr": 6e-4,
            "grad_norm": 0.5,
            "context_tokens": 31000,
            "supervised_tokens": 22000,
            "context_tokens_per_s": 83000.0,
            "supervised_tokens_per_s": 59000.0,
            "accuracy_by_slot": [0.9 * 0.9**slot for slot in range(15)],
            "target_wait_s": 0.01,
            "drafter_wait_s": 0.02,
            "queue_depth": 2,
            "peak_bytes": 60 * 2**30,
        }
    )
    run.progress(step, steps=60000, epoch=0, epochs=6, loss=2.0, context_tokens_per_s=83000.0)
    return time.perf_counter() - began


def measure(step_s: float, seconds: float) -> dict[str, float]:
    """CPU share and call times at one length of step."""
    with (
        tempfile.TemporaryDirectory() as folder,
        RunDirectory.create(Path(folder) / "run", CONFIG, {}, console=False) as run,
    ):
        hearts = [run.worker(f"worker-{i}", f"cuda:{i}") for i in range(8)]
        for step in range(1, 1021):
            one_step(run, hearts, step, step_s)
            time.sleep(step_s if step > 1000 else 0.0005)
        calls, step = [], 1020
        cpu, wall = time.process_time(), time.perf_counter()
        while time.perf_counter() - wall < seconds:
            step += 1
            calls.append(one_step(run, hearts, step, step_s))
            time.sleep(step_s)
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        run.finish(Phase.FINISHED)
    return {
        "step_s": step_s,
        "cpu_share_of_a_step": round(cpu / wall, 5),
        "calls_median_us": round(1e6 * statistics.median(calls), 1),
        "calls_p99_us": round(1e6 * sorted(calls)[int(0.99 * len(calls))], 1),
        "num_steps": len(calls),
    }


def measure_status(num_tries: int = 15) -> dict[str, float]:
    """How long `draftmill status RUN` takes from start to end: fastest and median wall time, fastest CPU time."""
    with tempfile.TemporaryDirectory() as folder:
        with RunDirectory.create(Path(folder) / "run", CONFIG, {}, console=False) as run:
            run.finish(Phase.FINISHED)
        walls, cpus = [], []
        for _ in range(num_tries):
            before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
            subprocess.run(
                [sys.executable, "-m", "draftmill", "status", f"{folder}/run"], stdout=subprocess.DEVNULL, check=True
            )
            walls.append(time.perf_counter() - began)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            cpus.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return {
        "wall_min_s": round(min(walls), 3),
        "wall_median_s": round(statistics.median(walls), 3),
        "cpu_min_s": round(min(cpus), 3),
    }


def main() -> None:
    """Measure each length of step, then the status command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=10.0, help="Seconds measured for each length of step.")
    seconds = parser.parse_args().seconds
    rows = []
    for step_s in STEPS_S:
        rows.append(measure(step_s, seconds))
        row = rows[-1]
        print(
            f"step {step_s:4.2f} s: {100 * row['cpu_share_of_a_step']:.2f} % of a step in CPU time of all threads; "
            f"the step's own calls take {row['calls_median_us']:.0f} us (p99 {row['calls_p99_us']:.0f})"
        )
    status = measure_status()
    print(f"draftmill status: {status['wall_min_s']} s at best, median {status['wall_median_s']} s (bar 0.3 s)")
    print(json.dumps({"bench": "monitor", "rows": rows, "status": status}))


if __name__ == "__main__":
    main()
