"""kill -9 at random moments of a training run that saves after every step, until it is done; then compare.

python tests/killing.py [--kills 30] [--seed 0] [--folder DIR]

Prints one JSON line: where it was killed each time, and whether the run's weights, moments, losses and evaluations are
those of the run that was not killed, bit for bit. Runs are forked from a process that has done nothing but import, so
that a start takes half a second.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from draftmill.checkpoint import checkpoints, latest, load
from draftmill.monitor.metrics import read_metrics
from draftmill.monitor.state import read_json
from draftmill.train.run import train
from forking import code_of, forked
from tiny import config_of, small_world

SETTINGS = (
    "checkpoint.every_steps=1",
    "checkpoint.keep_last=2",
    "checkpoint.keep_best=1",
    "train.epochs=3",
    "train.evaluate_every=4",
)


def ends_well(pid: int, what: str) -> None:
    if code := code_of(pid):
        raise SystemExit(f"{what} ended with code {code}")


def newest_step(folder: Path) -> int:
    entry = latest(folder)
    return entry.step if entry is not None else 0


def run_and_kill(killed: Path, start: Callable[[], int], moments: random.Random, kills_left: int, steps: int) -> Any:
    """Start the run and kill it: at any moment of its first second, or at some later step, around its saving.

    Returns the phase and the newest checkpoint that it was killed in; None if it was done before.
    """
    first = newest_step(killed)
    goal = first + moments.randint(1, max(1, 2 * (steps - first) // (kills_left + 2)))
    any_moment, delay_s = moments.random() < 0.4, moments.uniform(0.0, 0.02)
    limit_s = moments.uniform(0.0, 0.8) if any_moment else 60.0
    pid, began = start(), time.monotonic()
    done = False
    while not done and time.monotonic() - began < limit_s and newest_step(killed) < goal:
        done = os.waitpid(pid, os.WNOHANG)[0] == pid
        time.sleep(0.001)
    time.sleep(0.0 if done or any_moment else delay_s)
    if not done:
        os.kill(pid, signal.SIGKILL)
        done = os.waitpid(pid, 0)[1] != signal.SIGKILL
    state = read_json(killed / "state.json") or {}
    return None if done else [state.get("phase", "before its first word"), newest_step(killed)]


def same(ours: Path, expected: Path) -> dict[str, bool]:
    """What of two runs is equal, bit for bit."""
    mine, theirs = load(checkpoints(ours)[-1].folder), load(checkpoints(expected)[-1].folder)
    moments, their_moments = mine.optimizer(), theirs.optimizer()
    figures = [
        [
            [(record["step"], record["loss"]) for record in read_metrics(folder).steps],
            [(record["step"], record["accept_length"]) for record in read_metrics(folder).evaluations],
        ]
        for folder in (ours, expected)
    ]
    return {
        "weights": all(torch.equal(tensor, theirs.tensors()[name]) for name, tensor in mine.tensors().items()),
        "moments": all(
            torch.equal(tensor, their_moments[group][name])
            for group, named in moments.items()
            for name, tensor in named.items()
        ),
        "losses": figures[0][0] == figures[1][0],
        "evaluations": figures[0][1] == figures[1][1],
        "state": [mine.state[key] for key in ("step", "finished", "accept_length")]
        == [theirs.state[key] for key in ("step", "finished", "accept_length")],
    }


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Kill, resume, compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=None)
    options = parser.parse_args(arguments)
    folder = options.folder or Path(tempfile.mkdtemp(prefix="killing-"))
    whole, killed = folder / "whole", folder / "killed"

    def begin() -> None:
        sections = small_world(folder)
        (folder / "world.json").write_text(json.dumps(sections))
        train(config_of(sections, f"run.dir={whole}", *SETTINGS), console=False)

    log = folder / "output.log"
    ends_well(forked(begin, log), "the run that is not killed")
    sections = json.loads((folder / "world.json").read_text())
    steps = newest_step(whole)

    def train_killed() -> None:
        resume = (killed / "state.json").exists()
        train(config_of(sections, f"run.dir={killed}", *SETTINGS), resume=resume, console=False)

    def start() -> int:
        return forked(train_killed, log)

    moments, where = random.Random(options.seed), []
    for kill in range(options.kills):
        where.append(run_and_kill(killed, start, moments, options.kills - kill, steps))
        if where[-1] is None:
            break
        for entry in checkpoints(killed):
            load(entry.folder)  # whole, with the right checksums
    else:
        ends_well(start(), "the run after its last kill")
    left = [path.name for path in (killed / "checkpoints").iterdir() if path.name.startswith(".")]
    return {"steps": steps, "killed": where, "same": same(killed, whole), "left": left}


if __name__ == "__main__":
    print(json.dumps(main()))
