"""Five targets and three drafters on eight GPUs, a million samples: how long until it trains, and how fast is it then?

Qwen3-8B's shape with random weights, a store of 1,095,082 samples of random tokens whose lengths and bucket edges are
those of a real run, no network. One process with a thread a GPU, as `draftmill train` has; targets and drafters are
built once and used for every layout, so that all fits into eight minutes. A target lies on every GPU that has one in
any layout, and likewise a drafter; so memory on those between is that of both.

    start     seconds of each part of it, with `draftmill status` while loading, warming up and training
    layouts   Ktok/s of 5 + 3, 4 + 4 and 6 + 2 against what `draftmill plan` predicts from costs measured here, for the
              very batches that are run; within 10 % of it
    alone     1 + 1 against 5 + 3 per GPU, and each against its slower side alone: what one interpreter costs
    modes     5 + 3 eager (target as transformers runs it, with fused kernels where they are installed), compiled (a
              layer of the target, the drafter's trunk) and graphed (the drafter's step captured besides; a target is
              captured only where rows are packed, and these are not)

    PYTHONPATH=src python bench/eight_gpus.py            (on fewer GPUs with a smaller layout)
    PYTHONPATH=src python bench/eight_gpus.py --tiny     (on a CPU: that the script works, not how fast it is)

What --budget-s has no time for is in the result as not run. Rates are of the batches after a warm-up, by the clock, on
all devices together; busy and waiting shares are by the devices' own clocks. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from data_lengths import NUM_SAMPLES
from draftmill.monitor.phases import Phase
from draftmill.monitor.run import RunDirectory
from draftmill.pipeline.collective import Hosts
from draftmill.step.bench import on_own_stream
from draftmill.target.step import first_line
from draftmill.train.planning_batches import BatchSizes, batch_sizes
from draftmill.train.planning_costs import Chosen, Costs, costs_of, time_drafter, time_target
from draftmill.train.planning_splits import Pace, pace_of
from draftmill.train.setup import Setup, set_up
from pipeline import environment
from pipeline_rig import STARTED, Measured, Rig, peaks, say
from pipeline_world import SIZES, config_of, random_loaded, write_world

MODES = {"eager": ("eager", "eager"), "compiled": ("compiled", "compiled"), "graphed": ("compiled", "graphed")}
"""Steps of target and drafter."""


class Bench:
    """Everything that the parts share."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options, self.folder = options, folder
        self.results: dict[str, Any] = {"bench": "eight_gpus", "start_s": {}, "status": {}}
        self.aside_s = 0.0
        self.rig: Rig
        self.setup: Setup
        self.run: RunDirectory
        self.sizes: BatchSizes
        self.costs: Costs
        self.first_mode = "graphed" if options.cuda else "eager"
        self.mode = ""

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Seconds of a part of the start, without what the benchmark does for itself meanwhile."""
        began, self.aside_s = time.perf_counter(), 0.0
        yield
        self.results["start_s"][part] = round(time.perf_counter() - began - self.aside_s, 2)
        say(f"{part}: {self.results['start_s'][part]} s")

    def status(self, moment: str) -> None:
        """What `draftmill status` says of this process now, and with which exit code."""
        began = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-m", "draftmill", "status", str(self.run.path)],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "NO_COLOR": "1", "COLUMNS": "110"},
        )
        took = round(time.perf_counter() - began, 2)
        self.results["status"][moment] = {"exit_code": done.returncode, "took_s": took, "text": done.stdout.rstrip()}
        say(f"draftmill status, {moment}: exit code {done.returncode} after {took} s\n{done.stdout.rstrip()}")

    def status_later(self, moment: str, after_s: float) -> threading.Thread:
        """The same a little later, beside whatever goes on."""
        thread = threading.Timer(after_s, self.status, (moment,))
        thread.start()
        return thread

    def left_s(self) -> float:
        return float(self.options.budget_s - (time.perf_counter() - STARTED))


# The start


def start(bench: Bench) -> None:
    """All that comes before the first step."""
    options, size = bench.options, bench.options.size
    with bench.timed("data written (no part of a start)"):
        write_world(bench.folder, size, options.samples, options.processes)
    bench.results.update(environment(options))
    with bench.timed("store opened and planned"):
        config = config_of(bench.folder, size, options.targets, options.drafters)
        bench.setup = set_up(config, Hosts())
        lines = bench.setup.plan.describe()
    bench.run = RunDirectory.create(bench.folder / "run", config.to_yaml(), {"bench": "eight_gpus"}, console=False)
    bench.run.phase(Phase.LOADING_DATA)
    if options.cuda:
        uuids = {name: f"GPU-{torch.cuda.get_device_properties(name).uuid}" for name in options.devices}
        bench.run.use_gpus(uuids, torch.cuda.memory_reserved)
    for line in lines:
        print(line, flush=True)
    bench.results["data"] = lines
    with bench.timed("targets drawn and copied"):
        _load(bench)
    bench.run.phase(Phase.WARMING_UP)
    bench.rig.beats = bench.run.worker
    looking = bench.status_later("warming up", options.look_after_s)
    with bench.timed("targets and drafters built"):
        _build(bench, bench.first_mode)
    looking.join()
    seconds = bench.results["start_s"]
    seconds["until the first step, data aside"] = round(sum(seconds.values()) - next(iter(seconds.values())), 2)


def _load(bench: Bench) -> None:
    number = len(bench.options.targets)

    def told(index: int, device: torch.device) -> None:
        if index == 0:
            print(f"Loading {number} target models...", flush=True)
        bench.run.phase(Phase.LOADING_TARGETS, f"{index + 1}/{number}")
        print(f"  Target {index} on {device}...", flush=True)
        if index == min(1, number - 1):
            began = time.perf_counter()
            time.sleep(1.1)  # state is written once a second
            bench.status("loading")
            bench.aside_s += time.perf_counter() - began

    bench.rig = Rig(bench.setup, random_loaded(bench.setup, bench.options.size, told))


def _build(bench: Bench, mode: str) -> None:
    """Let targets and drafters be built side by side, as a run does; they share the build lock."""
    target_step, drafter_step = MODES[mode]
    rig, reports = bench.rig, {}

    def targets() -> None:
        reports["target"] = rig.build_targets(target_step)

    errors: list[BaseException] = []

    def guarded() -> None:
        try:
            targets()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=guarded)
    thread.start()
    reports["drafter"] = rig.build_drafters(drafter_step)
    thread.join()
    if errors:
        raise errors[0]
    bench.mode = mode
    bench.results.setdefault("built", {})[mode] = {
        "target": reports["target"],
        "drafter": reports["drafter"],
        # with the waiting for the build lock, which the others hold meanwhile
        "target_s": [round(seat.build_s, 1) for seat in rig.targets],
        "drafter_s": [round(seat.build_s, 1) for seat in rig.drafters],
    }
    say(f"{mode}: {json.dumps(bench.results['built'][mode])}")


# The parts


def measure_costs(bench: Bench) -> dict[str, Any]:
    """What plan measures, on one target and one drafter."""
    rig, setup = bench.rig, bench.setup
    chosen = Chosen.of(setup)
    runs = bench.options.cost_runs
    with on_own_stream(rig.targets[0].device):
        target_s = time_target(setup, rig.targets[0].replica, chosen, runs)
    with on_own_stream(rig.drafters[-1].device):
        drafter_s, update_s = time_drafter(setup, rig.drafters[-1].replica, chosen, runs)
    bench.costs = costs_of(setup, chosen, target_s, drafter_s, update_s, target_bytes=None, drafter_bytes=None)
    bench.sizes = batch_sizes(setup.plan, setup.store.lengths)
    pace = pace_of(bench.costs, bench.sizes, 1, 1)
    return {"costs": bench.costs.to_dict(), "target_s_per_batch": pace.target_s, "drafter_s_per_batch": pace.drafter_s}


def layout(bench: Bench, num_targets: int, num_drafters: int) -> dict[str, Any]:
    """One race, against its prediction."""
    rig, options = bench.rig, bench.options
    targets, drafters = rig.targets[:num_targets], rig.drafters[len(rig.drafters) - num_drafters :]
    number = num_targets + num_drafters
    measured = rig.race(_batches(options, number), _warm_up(number), targets, drafters)
    pace = _pace(bench, measured, number, num_drafters)
    target_rate, drafter_rate = num_targets / pace.target_s, num_drafters / pace.drafter_s
    predicted = min(target_rate, drafter_rate) * pace.tokens / 1e3
    return {
        **measured.to_dict(),
        "predicted_ktok_s": predicted,
        "of_predicted": measured.rate / predicted,
        "slower_side": "targets" if target_rate < drafter_rate else "drafters",
        "per_gpu_ktok_s": measured.rate / (num_targets + num_drafters),
    }


def _batches(options: argparse.Namespace, num_devices: int) -> int:
    return int(options.batches) if num_devices == len(options.devices) else max(4, int(options.batches) // 2)


def _warm_up(num_devices: int) -> int:
    """Batches; more than it takes to use up what lies in the slots when the drafters begin."""
    return 4 * num_devices


def _pace(bench: Bench, measured: Measured, num_devices: int, num_drafters: int) -> Pace:
    """The mean costs of the very batches of a race: those after its warm-up, in order."""
    first = -(-_warm_up(num_devices) // num_drafters) * num_drafters
    part = slice(first, first + measured.batches)
    sizes = bench.sizes
    return pace_of(bench.costs, BatchSizes(sizes.bucket[part], sizes.padded[part], sizes.real[part]), 1, 1)


def main_layout(bench: Bench) -> dict[str, Any]:
    """The first of the layouts, in which the run is looked at while it trains."""
    bench.run.phase(Phase.TRAINING)
    looking = bench.status_later("training", bench.options.look_after_s + 2.0)
    bench.rig.on_step = _told_to(bench.run)
    result = layout(bench, *bench.options.layouts[0])
    looking.join()
    bench.rig.on_step = None
    return result


def _told_to(run: RunDirectory) -> Callable[[int, int, list[Any]], None]:
    def told(step: int, steps: int, results: list[Any]) -> None:
        values = results[0].value.read()
        took_s = max(result.span.seconds() for result in results)
        rate = values["context_tokens"] / took_s
        record = {"step": step, "loss": values["loss"], "context_tokens": values["context_tokens"]}
        run.metrics({**record, "context_tokens_per_s": rate})
        run.progress(step, steps, loss=values["loss"])

    return told


def mode(bench: Bench, name: str) -> dict[str, Any]:
    """The first of the layouts, with other ways of running."""
    rig, number = bench.rig, bench.options.layouts[0]
    if bench.mode != name:
        kept = rig.targets, rig.drafters
        rig.forget_drafters()
        rig.targets, rig.drafters = kept[0][: number[0]], kept[1][len(kept[1]) - number[1] :]
        try:
            _build(bench, name)
        finally:
            rig.targets, rig.drafters = kept
    targets, drafters = rig.targets[: number[0]], rig.drafters[len(rig.drafters) - number[1] :]
    return rig.race(_batches(bench.options, sum(number)), _warm_up(sum(number)), targets, drafters).to_dict()


def named(number: tuple[int, int]) -> str:
    return f"{number[0]}+{number[1]}"


def parts(bench: Bench) -> dict[str, tuple[float, Callable[[], Any]]]:
    """What is run, in the order of its weight: least seconds that must be left, and how."""
    options = bench.options
    found: dict[str, tuple[float, Callable[[], Any]]] = {
        "costs": (0.0, lambda: measure_costs(bench)),
        f"layout {named(options.layouts[0])}": (0.0, lambda: main_layout(bench)),
    }
    one = (1, 1)
    if options.layouts[0] != one:
        found["layout 1+1"] = (options.race_s * 1.5, lambda: layout(bench, *one))
    for number in options.layouts[1:]:
        found[f"layout {named(number)}"] = (options.race_s, lambda number=number: layout(bench, *number))  # type: ignore[misc]
    for name in options.modes:
        found[f"mode {name}"] = (options.race_s + options.build_s, lambda name=name: mode(bench, name))  # type: ignore[misc]
    return found


def conclusions(bench: Bench) -> dict[str, Any]:
    """The ratios that the bars are about."""
    results, first = bench.results, named(bench.options.layouts[0])
    raced = {name: part for name, part in results.items() if name.startswith(("layout ", "mode ")) and "ktok_s" in part}
    rates = {name: part["ktok_s"] for name, part in raced.items() if name.startswith("layout ")}
    found: dict[str, Any] = {
        "off_prediction": {name: results[name]["of_predicted"] - 1.0 for name in rates},
        "off_prediction_bar": 0.1,
    }
    if "layout 1+1" in rates and f"layout {first}" in rates and first != "1+1":
        one, all_ = results["layout 1+1"], results[f"layout {first}"]
        found["per_gpu_ratio"] = all_["per_gpu_ktok_s"] / one["per_gpu_ktok_s"]
        # 1 + 1 leaves its faster side idle, so the share of what the slower side can do is the fairer measure
        found["share_of_slower_side_ratio"] = all_["of_predicted"] / one["of_predicted"]
        found["ratio_bar"] = 0.9
    modes = {name: raced[f"mode {name}"]["ktok_s"] for name in MODES if f"mode {name}" in raced}
    if f"layout {first}" in rates:
        modes[bench.first_mode] = rates[f"layout {first}"]
    return {**found, "modes_ktok_s": modes}


# The command


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--tiny", action="store_true", help="a tiny shape in float32, for trying the script on a CPU")
    parser.add_argument("--small", action="store_true", help="Qwen3-0.6B's shape and samples a quarter as long")
    parser.add_argument("--num-devices", type=int, help="by default all GPUs; CPU workers with --tiny, by default 3")
    parser.add_argument("--samples", type=int, help=f"of the store; by default {NUM_SAMPLES:,}, with --tiny 5,000")
    parser.add_argument("--batches", type=int, help="measured in a race; half of it for 1 + 1")
    parser.add_argument("--budget-s", type=float, default=440.0, help="seconds after which no part is begun")
    parser.add_argument("--modes", nargs="*", choices=list(MODES), help="by default all")
    parser.add_argument("--folder", help="where the store is written; the temporary folder by default")
    parser.add_argument("--out", help="file for the result, besides the last line")
    options = parser.parse_args()
    return completed(options)


def completed(options: argparse.Namespace) -> argparse.Namespace:
    """The options with all that follows from them and from the machine."""
    name = "tiny" if options.tiny else "small" if options.small else "full"
    options.cuda = torch.cuda.is_available() and not options.tiny
    count = options.num_devices or (torch.cuda.device_count() if options.cuda else 3)
    options.devices = [f"cuda:{index}" for index in range(count)] if options.cuda else ["cpu"] * count
    options.size, options.rounds = SIZES[name], 1
    options.layouts = layouts_for(count)
    most_targets, most_drafters = (max(side) for side in zip(*options.layouts, strict=True))
    options.targets = options.devices[:most_targets]
    options.drafters = options.devices[count - most_drafters :]
    options.samples = options.samples or (5000 if options.tiny else NUM_SAMPLES)
    options.processes = 1 if options.tiny else min(48, os.cpu_count() or 1)
    options.batches = options.batches or (12 if options.tiny else 12 * count // 2)
    options.cost_runs = 1
    # Seconds that a race and a building take at most, for the budget alone.
    options.race_s, options.build_s = (0.0, 0.0) if options.tiny else (30.0, 90.0)
    options.look_after_s = 0.3 if options.tiny else 4.0
    if options.modes is None:
        options.modes = ["compiled", "eager"] if options.cuda else []
    return options


def layouts_for(count: int) -> list[tuple[int, int]]:
    """5 + 3, 4 + 4 and 6 + 2 for eight devices, and what is like it for fewer; the first one counts."""
    if count < 2:
        return [(1, 1)]
    targets = min(count - 1, max(1, round(count * 5 / 8)))
    near = [targets, targets - 1, targets + 1]
    return [(number, count - number) for number in near if 1 <= number < count]


def process_age_s() -> float:
    """Seconds since this process was started."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    uptime_s = float(Path("/proc/uptime").read_text().split()[0])
    return uptime_s - ticks / os.sysconf("SC_CLK_TCK")


def main() -> None:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    # GPUs are counted without a context: the processes that write the data are forked from this one.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    options = parsed()
    folder = Path(tempfile.mkdtemp(prefix="draftmill-eight-", dir=options.folder))
    bench = Bench(options, folder)
    bench.results["start_s"]["data written (no part of a start)"] = 0.0
    bench.results["start_s"]["imported"] = round(process_age_s(), 2)
    results = bench.results
    try:
        start(bench)
        for name, (needed_s, run) in parts(bench).items():
            if bench.left_s() < needed_s:
                results[name] = {"not_run": f"{bench.left_s():.0f} s were left, {needed_s:.0f} s may be needed"}
                continue
            try:
                results[name] = run()
            except Exception as error:  # one part's failure is its result, and not the others' end
                results[name] = {"error": f"{type(error).__name__}: {first_line(error)[:300]}"}
                traceback.print_exc()
            say(f"{name}: {json.dumps(results[name])}")
            keep(options, results)
        results["peak_gib"] = peaks([seat.device for seat in (*bench.rig.targets, *bench.rig.drafters)])
        results["conclusions"] = conclusions(bench)
        bench.run.finish(Phase.FINISHED)
        bench.run.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    results["total_s"] = round(time.perf_counter() - STARTED, 1)
    keep(options, results)
    print(json.dumps(results), flush=True)


def keep(options: argparse.Namespace, results: dict[str, Any]) -> None:
    """What is known so far, in the file."""
    if options.out:
        Path(options.out).write_text(json.dumps(results) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
