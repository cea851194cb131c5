"""Which files a run's directory holds, how it is found, and whether a new run may have it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from draftmill.errors import InputError
from draftmill.monitor.state import read_json

RUNS = Path("runs")
"""Where runs are kept that were given no directory of their own."""
STATE_FILE = "state.json"
LOCK_FILE = "lock"
LOG_FILE = "run.log"
METRICS_FILE = "metrics.jsonl"
CONFIG_FILE = "config.yaml"
ENVIRONMENT_FILE = "environment.json"
STOP_FILE = "stop"
TENSORBOARD = "tensorboard"
CHECKPOINTS = "checkpoints"
_BEFORE_A_RUN = frozenset({LOG_FILE, LOCK_FILE, STOP_FILE, TENSORBOARD, CHECKPOINTS})
"""Entries that a directory may hold before its first run begins."""


def find_run(name: str | os.PathLike[str], runs: Path = RUNS) -> Path | None:
    """The run's directory by its path, or by its name under runs/; None where there is no run."""
    for path in (Path(name), runs / Path(name)):
        if (path / STATE_FILE).is_file():
            return path
    return None


def require_run(name: str | os.PathLike[str], runs: Path = RUNS) -> Path:
    """The same, refusing what is no run. Raises InputError."""
    path = find_run(name, runs)
    if path is None:
        known = [run.name for run in all_runs(runs)]
        hint = f"runs here: {', '.join(known[-5:])}" if known else f"there are no runs under {runs}/"
        raise InputError(f"no run at {Path(name)} (no {STATE_FILE} in it); give a run's directory; {hint}")
    return path


def all_runs(runs: Path = RUNS) -> list[Path]:
    """Every run's directory under a folder, the one that wrote its state last at the end."""
    found = []
    for state in runs.glob(f"*/{STATE_FILE}"):
        try:
            found.append((state.stat().st_mtime, state.parent))
        except OSError:
            continue
    return [path for _, path in sorted(found)]


def check_directory(path: Path, resume: bool) -> None:
    """Refuse a directory that a run can't have: a file, another's files, or nothing to resume. Raises InputError."""
    if path.exists() and not path.is_dir():
        raise InputError(f"{path} is a file; a run needs a directory: choose another run.dir")
    if resume and not (path / STATE_FILE).exists():
        raise InputError(f"{path} holds no run to resume; leave --resume out, or give the run's own directory")
    if not resume and path.is_dir() and not (path / STATE_FILE).exists():
        others = sorted(entry.name for entry in path.iterdir() if entry.name not in _BEFORE_A_RUN)
        if others:
            raise InputError(f"{path} holds files that are no run's ({others[0]}, ...); choose an empty run.dir")


def previous_state(path: Path, resume: bool) -> dict[str, Any] | None:
    """The last state of the run that the directory holds; None for none.

    Raises:
        InputError: it trained, and is not to be resumed.
    """
    state = read_json(path / STATE_FILE)
    if state is None or resume:
        return state
    metrics, checkpoints = path / METRICS_FILE, path / CHECKPOINTS
    if (metrics.exists() and metrics.stat().st_size) or (checkpoints.is_dir() and any(checkpoints.iterdir())):
        step = (state.get("progress") or {}).get("step")
        raise InputError(
            f"{path} holds a run already (last seen {state.get('phase')}{f' at step {step}' if step else ''}); "
            "go on with it by --resume, or choose another run.dir"
        )
    return None


def write_config(path: Path, text: str) -> None:
    """Write config.yaml; a different one that a resumed run had before is kept as config.N.yaml."""
    target = path / CONFIG_FILE
    if target.exists() and (old := target.read_text(encoding="utf-8")) != text:
        number = 1
        while (kept := path / f"config.{number}.yaml").exists():
            number += 1
        kept.write_text(old, encoding="utf-8")
    new = path / f".{CONFIG_FILE}.new"
    new.write_text(text, encoding="utf-8")
    os.replace(new, target)
