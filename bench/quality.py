"""Which recipe gives the longest accepted blocks for the same GPU time, and how does SpecForge 0.2.0's compare?

A fixed real task: at least 20,000 chats that the target answered itself, and drafters of one size trained on them for
the same seconds on one GPU each, by each recipe and several seeds. tau is that of greedy speculative decoding on
MT-Bench, HumanEval, gsm_symbolic and held-out chats. docs/quality.md says what is measured and how.

    python bench/quality.py --target FOLDER --work WORK                      all stages, on every GPU there is
    python bench/quality.py --target FOLDER --work WORK --stage data        data | train | evaluate | report
    python bench/quality.py --work WORK --tiny                               that the script works, on a CPU

A stage that is run again goes on with what is missing. Each GPU is driven by a process of its own. The last line
printed is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from draftmill.errors import InputError
from quality_settings import TINY, Paths, Settings

STAGES = ("data", "train", "evaluate", "report")


def parsed(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for everything that is made")
    parser.add_argument("--target", help="folder of the target model")
    parser.add_argument("--stage", choices=("all", *STAGES), nargs="+", default=["all"])
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, and without --target a tiny random target")
    parser.add_argument("--data", type=Path, help="a compact data file made before, in place of --stage data")
    parser.add_argument("--recipes", nargs="+", help="names in quality_recipes.py, or all; default: the main ones")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="settings for all recipes of ours")
    parser.add_argument("--stop-after", type=float, help="seconds after which a process begins no further run")
    parser.add_argument("--gpus", type=int, help="GPUs to use; default: all there are")
    parser.add_argument("--decode-prompts", type=int, help="prompts a suite that are really decoded; default: all")
    parser.add_argument("--decode", nargs="+", choices=("final", "half"), default=["final"], help="which weights")
    parser.add_argument("--evaluators", type=int, default=2, help="processes a GPU that decode side by side")
    for name in ("chats", "prompts", "max-new-tokens", "points", "answer-tokens"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--seconds", type=float, help="GPU seconds of a run")
    parser.add_argument("--seeds", type=int, nargs="+")
    parser.add_argument("--worker", help=argparse.SUPPRESS)  # I/N: this process is the I-th of N that a stage started
    return parser.parse_args(arguments)


def settings_of(options: argparse.Namespace) -> Settings:
    """The experiment's numbers: the defaults, or the tiny ones, and what the command line says."""
    names = ("chats", "prompts", "max_new_tokens", "points", "answer_tokens", "seconds")
    given = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    if options.seeds is not None:
        given["seeds"] = tuple(options.seeds)
    return replace(TINY if options.tiny else Settings(), **given)


def num_gpus(options: argparse.Namespace) -> int:
    """GPUs to use, 0 for the CPU; found out without touching them."""
    if options.tiny:
        return 0
    if options.gpus is not None:
        return options.gpus
    found = os.environ.get("CUDA_VISIBLE_DEVICES")
    if found is not None:
        return len([part for part in found.split(",") if part])
    if shutil.which("nvidia-smi") is None:
        return 0
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    return listed.stdout.count("GPU ")


def main() -> None:
    options = parsed()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    options.work.mkdir(parents=True, exist_ok=True)
    if options.target is None:
        if not options.tiny:
            sys.exit("quality: give --target with the folder of the target model, or --tiny")
        from quality_tiny import tiny_target

        options.target = str(tiny_target(options.work / "target"))
    last: dict[str, Any] | None = None
    failures: list[str] = []
    try:
        if options.worker is not None:
            index, count = (int(part) for part in options.worker.split("/"))
            work(options, options.stage[0], index, count)
            return
        stages = STAGES if "all" in options.stage else [stage for stage in STAGES if stage in options.stage]
        for stage in stages:
            started = time.perf_counter()
            try:
                last = LEADS[stage](options)
            except RuntimeError as problem:  # of some runs, not of all: the others are evaluated and reported
                failures.append(f"{stage}: {problem}")
                print(f"{stage} failed: {problem}", flush=True)
            print(f"{stage}: {time.perf_counter() - started:.1f} s", flush=True)
    except InputError as problem:
        sys.exit(f"quality: error: {problem}")
    print(json.dumps({**(last or {"bench": "quality", "stages": stages}), "failures": failures}))
    sys.exit(bool(failures))


def lead_data(options: argparse.Namespace) -> None:
    """Bring the data file that was given, or make one; then the store."""
    from quality_file import read_file, store_from_chats, store_from_file, write_file

    settings, paths = settings_of(options), Paths(options.work)
    if options.data is not None:
        data = read_file(options.data)
        store = store_from_file(settings, paths, options.target, data)
        if options.data.resolve() != paths.data_file.resolve():
            paths.data_file.write_bytes(options.data.read_bytes())
        print(f"data: {store.num_samples} chats, {store.meta['num_tokens']:,} tokens from {options.data}", flush=True)
        return
    if paths.data_file.exists() and paths.store.exists():
        print(f"data: {paths.data_file} is there", flush=True)
        return
    from quality_data import read_parts

    try:
        start_workers(options, "data", max(1, num_gpus(options)))
    except RuntimeError as problem:
        raise InputError(str(problem)) from problem  # nothing can follow
    rows, items, counted = read_parts(paths)
    store = store_from_chats(settings, paths, options.target, rows)
    facts = {
        "target": Path(options.target).name,
        "chats": store.num_samples,
        "num_tokens": store.meta["num_tokens"],
        "num_supervised": store.meta["num_supervised"],
        "answer_tokens": settings.answer_tokens,
        **{name: dict(value) if isinstance(value, dict) else value for name, value in counted.items()},
    }
    write_file(paths.data_file, store, items, facts)
    size = paths.data_file.stat().st_size / 2**20
    print(f"data: {json.dumps(facts)} -> {paths.data_file}, {size:.1f} MiB", flush=True)


def lead_train(options: argparse.Namespace) -> None:
    """Train every recipe and seed that has no result yet."""
    if not Paths(options.work).store.exists():
        lead_data(options)
    start_workers(options, "train", max(1, num_gpus(options)))


def lead_evaluate(options: argparse.Namespace) -> None:
    """Decode with every set of weights that was not decoded with yet."""
    gpus = num_gpus(options)
    start_workers(options, "evaluate", max(1, gpus * options.evaluators) if gpus else 1)


def lead_report(options: argparse.Namespace) -> dict[str, Any]:
    """Table, plot, and the figures for the last line."""
    from quality_report import report

    return report(settings_of(options), Paths(options.work), options.target, tiny=options.tiny)


LEADS: dict[str, Any] = {"data": lead_data, "train": lead_train, "evaluate": lead_evaluate, "report": lead_report}


def start_workers(options: argparse.Namespace, stage: str, count: int) -> None:
    """Run a stage in `count` processes, spread over the GPUs, each seeing one as its only one; wait for all.

    One process without a GPU is this one. Raises RuntimeError where one fails, once all have ended.
    """
    gpus = num_gpus(options)
    if count == 1 and not gpus:
        work(options, stage, 0, 1)
        return
    visible = [part for part in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if part] or [
        str(index) for index in range(gpus)
    ]
    given = [*sys.argv[1:]]
    processes = []
    for index in range(count):
        environment = dict(os.environ)
        environment.setdefault("TORCHINDUCTOR_CACHE_DIR", str(options.work.resolve() / "inductor"))
        if gpus:
            environment["CUDA_VISIBLE_DEVICES"] = visible[index % gpus]
        command = [sys.executable, __file__, *given, "--target", options.target, "--stage", stage]
        processes.append(subprocess.Popen([*command, "--worker", f"{index}/{count}"], env=environment))
    codes = [process.wait() for process in processes]
    if any(codes):
        raise RuntimeError(f"{sum(map(bool, codes))} of {count} processes of stage {stage} failed; see above")


def work(options: argparse.Namespace, stage: str, index: int, count: int) -> None:
    """The part of a stage that is the index-th process's of `count`."""
    import torch

    if options.tiny:
        torch.set_num_threads(1)
    on_gpu = num_gpus(options) > 0
    device = "cuda:0" if on_gpu else "cpu"
    settings, paths = settings_of(options), Paths(options.work)
    WORKERS[stage](options, settings, paths, device, index, count)


def work_data(
    options: argparse.Namespace, settings: Settings, paths: Paths, device: str, index: int, count: int
) -> None:
    from quality_data import Share, make_part
    from quality_prompts import SUITES, known_suites

    suites = known_suites() if options.tiny else SUITES
    make_part(settings, paths, options.target, device, Share(index, count), suites)


def work_train(
    options: argparse.Namespace, settings: Settings, paths: Paths, device: str, index: int, count: int
) -> None:
    from quality_train import train_all

    train_all(
        settings,
        paths,
        options.target,
        device,
        (index, count),
        options.recipes,
        overrides=options.set,
        stop_after=options.stop_after,
        tiny=options.tiny,
    )


def work_evaluate(
    options: argparse.Namespace, settings: Settings, paths: Paths, device: str, index: int, count: int
) -> None:
    from quality_evaluate import evaluate_all

    prompts = options.decode_prompts or settings.prompts
    evaluate_all(settings, paths, options.target, device, (index, count), prompts, options.decode, options.stop_after)


WORKERS: dict[str, Any] = {"data": work_data, "train": work_train, "evaluate": work_evaluate}


if __name__ == "__main__":
    main()
