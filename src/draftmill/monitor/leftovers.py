"""Processes of draftmill runs on this machine, above all those that still hold GPU memory and should not.

Found three ways that complete each other: the directories of runs, the commands of all processes, and the driver's
list of who holds memory. Only ever reads; ending them is left to the user, who is told how.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from draftmill.monitor.gpus import Gpu, command, read_gpus
from draftmill.monitor.layout import LOG_FILE, RUNS, STATE_FILE, all_runs
from draftmill.monitor.phases import ENDINGS, Phase
from draftmill.monitor.process import ProcessIdentity, is_alive
from draftmill.monitor.show import columns, size
from draftmill.monitor.state import read_json
from draftmill.monitor.status import NoRun, RunStatus, read_status

_PROC = Path("/proc")
_RUN_COMMANDS = ("train", "demo")


@dataclass(frozen=True, slots=True)
class RunProcess:
    """A living process that belongs to a run.

    run        its directory, None where it can't be found out
    status     the run's verdict, None likewise
    gpu_bytes  memory it holds, by GPU index; None as a size where the driver lists it without one
    gpus_open  indices of GPUs whose device file it has open; says more than gpu_bytes inside containers
    leftover   it should not be there: its run has ended or stalled, or it is a child whose run is gone
    is_main    it is the run's own process, not a child of it
    """

    pid: int
    command: str
    run: Path | None
    status: RunStatus | None
    leftover: bool
    is_main: bool
    gpu_bytes: dict[int, int | None] = field(default_factory=dict)
    gpus_open: tuple[int, ...] = ()

    @property
    def holds_gpu(self) -> bool:
        """Whether it holds GPU memory, as far as can be seen."""
        return bool(self.gpu_bytes or self.gpus_open)

    @property
    def how_to_end(self) -> str:
        """The command that ends it."""
        if self.run is not None and self.is_main and self.status is not None:
            return f"draftmill stop {self.run}" + (" --now" if self.leftover else "")
        return f"kill {self.pid}   (and if that does nothing: kill -9 {self.pid})"


def run_processes(gpus: Sequence[Gpu] = (), runs: Sequence[Path] = (RUNS,)) -> list[RunProcess]:
    """Every living process of a run on this machine, the calling one left out.

    Args:
        gpus: one reading of the driver; empty where there is none
        runs: folders that hold runs' directories
    """
    owners: dict[int, _Owner] = {}
    for folder in runs:
        for path in all_runs(folder):
            _add_owner(owners, path)
    pids = [pid for pid in _pids() if pid != os.getpid()]
    for pid in pids:
        if pid not in owners and _is_run_command(_words(pid)):
            directory = _run_by_log(pid)
            if directory is not None:
                _add_owner(owners, directory)
    held = holders(gpus)
    found = [_entry(pid, owners, held) for pid in pids]
    return [entry for entry in found if entry is not None]


def leftovers(gpus: Sequence[Gpu] | None = None, runs: Sequence[Path] = (RUNS,)) -> list[RunProcess]:
    """Processes of runs that have ended or stalled and still hold GPU memory, as far as can be seen.

    Args:
        gpus: one reading of the driver; None reads it now
        runs: folders that hold runs' directories
    """
    if gpus is None:
        gpus = read_gpus()[0]
    return [process for process in run_processes(gpus, runs) if process.leftover and process.holds_gpu]


def holders(gpus: Iterable[Gpu]) -> dict[int, dict[int, int | None]]:
    """Bytes held, by pid and GPU index, out of one reading."""
    held: dict[int, dict[int, int | None]] = {}
    for gpu in gpus:
        for process in gpu.processes:
            held.setdefault(process.pid, {})[gpu.index] = process.used_bytes
    return held


@dataclass(frozen=True, slots=True)
class _Owner:
    """The process that a run's state names, and the run."""

    process: ProcessIdentity
    directory: Path


def _add_owner(owners: dict[int, _Owner], directory: Path) -> None:
    process = _process_of(directory)
    if process is None:
        return
    # A number may have been given twice; the process that lives is the one meant.
    if process.pid not in owners or is_alive(process.presence()):
        owners[process.pid] = _Owner(process, directory)


def _entry(pid: int, owners: dict[int, _Owner], held: dict[int, dict[int, int | None]]) -> RunProcess | None:
    """What is to be told of a process; None where it belongs to no run."""
    mine = ProcessIdentity.of(pid)
    if not is_alive(mine.presence()):  # ended, and only waits to be taken note of by its parent
        return None
    owner = owners.get(pid)
    if owner is not None and owner.process == mine:
        status = _status(owner.directory)
        # Ended by its own word, yet still there; or hanging.
        leftover = status is not None and status.phase in (*ENDINGS, Phase.STALLED)
    else:
        owner = owners.get(_group(pid))
        if owner is not None and _is_younger(mine, owner.process):  # a child, useless without the run's own process
            status = _status(owner.directory)
            leftover = not is_alive(owner.process.presence())
        elif _is_run_command(_words(pid)):
            owner, status, leftover = None, None, False
        else:
            return None
    run = owner.directory if owner is not None else None
    is_main = owner is not None and owner.process == mine
    return RunProcess(pid, command(pid), run, status, leftover, is_main, held.get(pid, {}), _gpus_open(pid))


def _status(directory: Path) -> RunStatus | None:
    try:
        return read_status(directory)
    except NoRun:
        return None


def _process_of(directory: Path) -> ProcessIdentity | None:
    try:
        state = read_json(directory / STATE_FILE)
    except OSError:
        return None
    return ProcessIdentity.from_json(state.get("process")) if state is not None else None


def _pids() -> list[int]:
    try:
        return sorted(int(entry.name) for entry in _PROC.iterdir() if entry.name.isdigit())
    except OSError:
        return []


def _group(pid: int) -> int:
    try:
        return os.getpgid(pid)
    except OSError:
        return -1


def _is_younger(mine: ProcessIdentity, owner: ProcessIdentity) -> bool:
    """Whether a process of the same group began after the run's own, so that the number was not given again."""
    if owner.start_ticks is None or mine.start_ticks is None or owner.boot_id != mine.boot_id:
        return False
    return mine.start_ticks >= owner.start_ticks


def _words(pid: int) -> list[str]:
    try:
        return (_PROC / str(pid) / "cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []


def _is_run_command(words: list[str]) -> bool:
    """Whether a command line is one of draftmill that trains, started by its script or as a module."""
    for at, word in enumerate(words[:4]):
        if word.rsplit("/", 1)[-1] == "draftmill" or word.endswith("draftmill/__main__.py"):
            return any(after in _RUN_COMMANDS for after in words[at + 1 : at + 2])
    return False


def _open_files(pid: int) -> list[str]:
    targets = []
    try:
        for entry in (_PROC / str(pid) / "fd").iterdir():
            try:
                targets.append(os.readlink(entry))
            except OSError:
                continue
    except OSError:  # another user's
        return []
    return targets


def _run_by_log(pid: int) -> Path | None:
    """The run directory whose log a process holds open."""
    for target in _open_files(pid):
        path = Path(target)
        if path.name == LOG_FILE and (path.parent / STATE_FILE).exists():
            return path.parent
    return None


def _gpus_open(pid: int) -> tuple[int, ...]:
    found = {int(m.group(1)) for target in _open_files(pid) if (m := re.fullmatch(r"/dev/nvidia(\d+)", target))}
    return tuple(sorted(found))


def render_processes(processes: Sequence[RunProcess], note: str = "") -> str:
    """What `ps` prints: one line a process, then how to end what should not be there."""
    lines = [note] if note else []
    if not processes:
        return "\n".join([*lines, "no process of a run on this machine"])
    rows = [["pid", "run", "phase", "GPU memory", "command"]]
    for process in processes:
        held = [f"{index}: {size(used)}" for index, used in sorted(process.gpu_bytes.items())]
        held += [f"{index}: open" for index in process.gpus_open if index not in process.gpu_bytes]
        phase = str(process.status.phase) if process.status is not None else "?"
        rows.append(
            [
                str(process.pid),
                str(process.run) if process.run is not None else "?",
                f"{phase}, left over" if process.leftover else phase,
                ", ".join(held) or "none seen",
                process.command[:60],
            ]
        )
    lines += columns(rows, right={0})
    for process in processes:
        what = "left over" if process.leftover else "to end"
        lines.append(f"{what}: process {process.pid}: {process.how_to_end}")
    return "\n".join(lines)


def start_warnings(gpus: Sequence[Gpu] | None = None, runs: Sequence[Path] = (RUNS,)) -> list[str]:
    """Lines for the start of a run: which other runs hold GPU memory, and how to end those that should not.

    Args:
        gpus: one reading of the driver; None reads it now
        runs: folders that hold runs' directories
    """
    if gpus is None:
        gpus = read_gpus()[0]
    lines = []
    for process in run_processes(gpus, runs):
        if process.holds_gpu:
            which = ", ".join(str(index) for index in sorted({*process.gpu_bytes, *process.gpus_open}))
            kind = "an earlier run" if process.leftover else "another run"
            lines.append(
                f"process {process.pid} of {kind} ({process.run or process.command}) holds memory of GPU {which}; "
                f"to end it: {process.how_to_end}"
            )
    return lines
