"""`draftmill train` as a process of its own, ended in every way: which exit code, which last line.

python tests/endings.py FOLDER

Forked from a process that has done nothing but import. Prints one JSON line; tests/commands/test_train.py says what is
right.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from draftmill.checkpoint import checkpoints
from draftmill.cli import main as command_line
from draftmill.monitor.status import NoRun, read_status
from draftmill.train import assemble, replica, saving
from draftmill.train.loading import TapsReplica
from forking import code_of, forked
from tiny import config_of, small_world

SETTINGS = ("data.heldout=0", "checkpoint.every_steps=2", "pipeline.stall_s=600")


def raise_at(owner: Any, name: str, call: int, error: BaseException) -> Callable[[], None]:
    """Lets a function raise at a call."""

    def patch() -> None:
        original, calls = getattr(owner, name), []

        def failing(*arguments: Any) -> Any:
            calls.append(1)
            if len(calls) == call:
                raise error
            return original(*arguments)

        setattr(owner, name, failing)

    return patch


def hang_at(owner: Any, name: str, call: int, grace_s: float) -> Callable[[], None]:
    """Lets a function hang at a call, for good. grace_s: what the main thread has for leaving."""

    def patch() -> None:
        original, calls = getattr(owner, name), []

        def hanging(*arguments: Any) -> Any:
            calls.append(1)
            if len(calls) == call:
                threading.Event().wait()
            return original(*arguments)

        setattr(owner, name, hanging)
        assemble.StallWatch.__init__.__defaults__ = (grace_s,)
        assemble.Team.abandon.__defaults__ = (0.3,)
        saving.LAST_SAVE_S = 0.3

    return patch


def ended(folder: Path, name: str, *overrides: str, patch: Callable[[], None] = lambda: None, send: Any = None) -> Any:
    """Train as the command does, in a child; how it ended, and what is left."""
    run = folder / name
    sections = json.loads((folder / "world.json").read_text())
    path = folder / f"{name}.yaml"
    path.write_text(config_of(sections, f"run.dir={run}", *SETTINGS, *overrides).to_yaml())
    log = folder / f"{name}.out"

    def work() -> None:
        patch()
        command_line(["train", str(path)])

    began = time.monotonic()
    pid = forked(work, log)
    while send is not None and step_of(run) < 2:
        time.sleep(0.005)
    if send is not None:
        os.kill(pid, send)
    code = code_of(pid)
    status = read_status(run)
    return {
        "code": code,
        "status": status.exit_code,
        "phase": str(status.phase),
        "reason": status.reason,
        "last": log.read_text().strip().splitlines()[-1],
        "stacks": (run / "run.log").read_text().count("Stacks of all threads"),
        "checkpoints": [[entry.step, entry.problem] for entry in checkpoints(run)],
        "seconds": time.monotonic() - began,
    }


def step_of(run: Path) -> int:
    try:
        return int(read_status(run).progress.get("step") or 0)
    except NoRun:
        return 0


def main(folder: Path) -> dict[str, Any]:
    """Every ending."""

    def begin() -> None:
        (folder / "world.json").write_text(json.dumps(small_world(folder)))

    if code := code_of(forked(begin, folder / "world.out")):
        raise SystemExit(f"making the small world ended with code {code}")
    made_up = ArithmeticError("made up")
    return {
        "finished": ended(folder, "finished", "train.max_steps=3"),
        "sigterm": ended(folder, "sigterm", "train.epochs=400", send=signal.SIGTERM),
        "sigint": ended(folder, "sigint", "train.epochs=400", send=signal.SIGINT),
        "crashed": ended(folder, "crashed", patch=raise_at(TapsReplica, "forward", 7, made_up)),
        "memory": ended(folder, "memory", patch=raise_at(replica.StepValues, "read", 3, MemoryError())),
        "stalled": ended(folder, "stalled", "pipeline.stall_s=1", patch=hang_at(TapsReplica, "forward", 7, 20.0)),
        "main thread": ended(folder, "main", "pipeline.stall_s=1", patch=hang_at(replica.Late, "numbers", 5, 1.0)),
    }


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
