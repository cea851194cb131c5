"""The train stage: which process trains which recipe and seed, and what is written of each run.

    runs/NAME-SEED/run.json         the result: tau at every moment, steps, seconds, settings
    runs/NAME-SEED/half, final      weights in z-lab layout, for `draftmill evaluate` and the evaluate stage
    runs.jsonl                      the results, a line each, in the order in which they came

A run that has a line in runs.jsonl is not trained again.
"""

from __future__ import annotations

import fcntl
import gc
import json
import math
import platform
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from draftmill.checkpoint import zlab
from draftmill.checkpoint.durable import write_json
from draftmill.checkpoint.source import CONFIG_FILE
from draftmill.checkpoint.weights import write_weights
from draftmill.data.store import Store
from draftmill.drafter.shape import DrafterShape
from draftmill.errors import InputError
from draftmill.evaluate.command import build_drafter
from draftmill.pipeline.collective import Hosts
from draftmill.target.load import load_target
from draftmill.train.setup import set_up
from provenance import commit, version
from quality_clock import Course, Kept
from quality_file import chosen_items, read_file
from quality_ours import Trainer
from quality_recipes import Recipe, chosen, config_for
from quality_settings import Paths, Settings
from quality_walk import Walker

PACKAGES = ("torch", "transformers", "triton", "specforge", "dflash", "datasets", "reasoning-gym")
_WEIGHTS_FILE_BYTES = 2**40


@dataclass(frozen=True)
class Job:
    """A run to be trained."""

    recipe: Recipe
    seed: int

    @property
    def name(self) -> str:
        """Of the run's folder."""
        return f"{self.recipe.name}-{self.seed}"


def train_all(
    settings: Settings,
    paths: Paths,
    target: str,
    device: str,
    place: tuple[int, int],
    names: list[str] | None,
    *,
    overrides: list[str],
    stop_after: float | None,
    tiny: bool,
) -> None:
    """Train what falls to this process, the place-th of several.

    overrides: of the settings of all our recipes. stop_after: seconds past which no run is begun that would not end.
    Raises RuntimeError where a run failed, after the others.
    """
    started = time.perf_counter()
    jobs = [Job(recipe, seed) for seed in settings.seeds for recipe in chosen(names)]
    runs = _Runs(settings, paths, target, device, overrides, tiny=tiny)
    failures: list[str] = []
    done = {(line["recipe"], line["seed"]) for line in read_lines(paths.runs_file) if "points" in line}
    built: set[str] = set()
    for job in assigned(jobs, settings, *place):
        if (job.recipe.name, job.seed) in done:
            continue
        kind = _built_alike(job.recipe)
        ends = time.perf_counter() - started + settings.seconds * job.recipe.share + _AROUND_S
        ends += 0.0 if kind in built else _BUILD_S
        if stop_after is not None and ends > stop_after:
            print(f"train {job.name}: left for another call", flush=True)
            continue
        built.add(kind)
        print(f"train {job.name}: begins", flush=True)
        try:
            runs.train(job)
        except InputError as problem:
            runs.unavailable(job, str(problem))
        except Exception as error:
            failures.append(f"{job.name}: {type(error).__name__}: {error}")
            traceback.print_exc()
            runs.forget()
    if failures:
        raise RuntimeError("; ".join(failures))


def assigned(jobs: Sequence[Job], settings: Settings, index: int, count: int) -> list[Job]:
    """The jobs of one of `count` processes: first those together that share what is compiled, the largest groups first,
    each to the process with the least to do; then single ones are moved as long as all are done earlier for it."""
    groups: dict[str, list[Job]] = {}
    for job in jobs:
        groups.setdefault(_built_alike(job.recipe), []).append(job)

    def load(part: Sequence[Job]) -> float:
        built = {_built_alike(job.recipe) for job in part}
        return sum(settings.seconds * job.recipe.share + _AROUND_S for job in part) + _BUILD_S * len(built)

    parts: list[list[Job]] = [[] for _ in range(count)]
    for group in sorted(groups.values(), key=load, reverse=True):
        min(parts, key=load).extend(group)
    while True:
        busiest, idlest = max(parts, key=load), min(parts, key=load)
        moved = min(
            busiest,
            key=lambda job: max(load([one for one in busiest if one is not job]), load([*idlest, job])),
            default=None,
        )
        if moved is None:
            break
        rest, more = [one for one in busiest if one is not moved], [*idlest, moved]
        if max(load(rest), load(more)) >= load(busiest):
            break
        busiest[:], idlest[:] = rest, more
    return sorted(parts[index], key=jobs.index)


_AROUND_S, _BUILD_S = 12.0, 75.0
"""Guesses for sharing out the work: loading and measuring a run, and compiling for a group of alike ones."""
_COMPILED_FOR = ("num_anchors", "token_budget", "batching", "block_size", "num_layers", "num_taps", "sliding", "gamma",
                 "loss", "labels", "optimizer", "ema", "betas")  # fmt: skip


def _built_alike(recipe: Recipe) -> str:
    """The same for recipes that are built once for all of them."""
    changes = {name: value for name, value in recipe.changes.items() if name.split(".")[1].startswith(_COMPILED_FOR)}
    is_short = recipe.changes.get("train.short_blocks", 0.0) > 0.0
    return json.dumps([recipe.peer is not None, recipe.peer, changes, is_short], sort_keys=True)


class _Runs:
    """Trains job after job in one process, keeping what can be used again."""

    def __init__(
        self, settings: Settings, paths: Paths, target: str, device: str, overrides: list[str], *, tiny: bool
    ) -> None:
        self.settings, self.paths, self.target, self.device, self.tiny = settings, paths, target, device, tiny
        self.overrides = overrides
        self.items = chosen_items(read_file(paths.data_file).items, settings.prompts, settings.max_new_tokens)
        self.trainer = Trainer()
        self.contender: Any = None
        self.walkers: dict[str, Walker] = {}

    def forget(self) -> None:
        """Let go of everything that was built, after a failure."""
        self.trainer, self.contender = Trainer(), None
        gc.collect()
        if self.device != "cpu":
            torch.cuda.empty_cache()

    def train(self, job: Job) -> None:
        """Train, measure, write down. Raises InputError for settings that this version does not have."""
        seconds = self.settings.seconds * job.recipe.share
        place = (self.target, str(self.paths.store), self.device)
        config = config_for(job.recipe, self.settings, place, job.seed, self.overrides, tiny=self.tiny)
        if job.recipe.peer is None:
            setup, course = self.trainer.run(config, seconds, self.settings.points)
            shape = setup.shape
        else:
            shape = set_up(config, Hosts()).shape
            course = self._contend(job, shape, seconds)
        self._write(job, shape, course, config.model_dump(mode="json") if job.recipe.peer is None else {})

    def unavailable(self, job: Job, why: str) -> None:
        """Note that this version can't train a recipe."""
        self._append({"recipe": job.recipe.name, "seed": job.seed, "unavailable": why})

    def _contend(self, job: Job, shape: DrafterShape, seconds: float) -> Course:
        from quality_specforge import Contender

        if self.contender is None:
            self.contender = Contender(self.target, Store.open(self.paths.store), shape, self.device)
        assert job.recipe.peer is not None
        rows = min(job.recipe.peer, 4) if self.tiny else job.recipe.peer
        course: Course = self.contender.run(job.seed, rows, seconds, self.settings.points)
        return course

    def _write(self, job: Job, shape: DrafterShape, course: Course, config: dict[str, Any]) -> None:
        folder = self.paths.runs / job.name
        started = time.perf_counter()
        halves = [kept for kept in course.kept if abs(kept.share - 0.5) < 1e-6]
        for name, some in (("half", halves[:1]), ("final", course.kept[-1:])):
            for one in some:
                _write_weights(folder / name, shape, one)
        walker = self._walker(shape)
        points: list[dict[str, Any]] = []
        tau: dict[str, dict[str, float]] = {}
        for kept in course.kept:
            drafter = build_drafter(shape, _as_saved(kept.tensors), walker.target)
            tau = walker.tau(drafter)
            points.append({"share": kept.share, "seconds": kept.seconds, "step": kept.step, "tau": tau})
        measured_s = time.perf_counter() - started
        result = {
            "recipe": job.recipe.name,
            "seed": job.seed,
            "peer": job.recipe.peer,
            "seconds": self.settings.seconds * job.recipe.share,
            "gpu_seconds": round(course.seconds, 3),
            "build_s": round(course.build_s, 1),
            "measure_s": round(measured_s, 1),
            "steps": course.steps,
            "context_tokens": course.context_tokens,
            "loss": course.loss if math.isfinite(course.loss) else None,
            "points": points,
            "notes": course.notes,
            "changes": job.recipe.changes,
            "overrides": self.overrides,
            "config": config,
            **environment(self.device, self.target),
        }
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "run.json", result)
        self._append(result)
        shown = ", ".join(f"{suite} {found['mean']:.3f}" for suite, found in tau.items())
        print(
            f"train {job.name}: {course.steps} steps in {course.seconds:.1f} s, {course.build_s:.1f} s before, "
            f"{measured_s:.1f} s measuring; loss {course.loss:.3f}; tau {shown}",
            flush=True,
        )

    def _walker(self, shape: DrafterShape) -> Walker:
        key = json.dumps([list(shape.target_layer_ids), shape.block_size])
        if key not in self.walkers:
            dtype = "float32" if self.device == "cpu" else "bfloat16"
            self.walkers[key] = Walker(load_target(self.target, device=self.device, dtype=dtype), shape, self.items)
        return self.walkers[key]

    def _append(self, result: dict[str, Any]) -> None:
        append_line(self.paths.runs_file, result)


def append_line(path: Path, record: dict[str, Any]) -> None:
    """Add a JSON line; several processes may do so at once."""
    with path.open("a", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(json.dumps(record) + "\n")
        file.flush()


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The records of a file of JSON lines; none where it is not there."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def environment(device: str, target: str) -> dict[str, Any]:
    """Where and with what something was measured."""
    return {
        "target": Path(target).name,
        "device": torch.cuda.get_device_name(0) if device != "cpu" else platform.machine(),
        "commit": commit(),
        "versions": {name: found for name in PACKAGES if (found := version(name)) is not None},
    }


def _as_saved(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Weights as they are once they were written and read again."""
    return {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}


def _write_weights(folder: Path, shape: DrafterShape, kept: Kept) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_weights(folder, kept.tensors, torch.bfloat16, _WEIGHTS_FILE_BYTES)
    write_json(folder / CONFIG_FILE, zlab.to_config(shape, "bfloat16"))
