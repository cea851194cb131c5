"""What a run is doing, judged from outside. Owns the verdict and the exit code; only ever reads.

The run's own word (state.json) is held against what the system says of its process: a process that is gone without
having said how it ended has crashed; one that is paused, that no longer writes its state, or whose workers have made
no progress for long is stalled. Ages are differences of the monotonic clock wherever it is the run's own, so that
changing the machine's time changes no verdict.
"""

from __future__ import annotations

import os
import time
from dataclasses import asdict, dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any

from draftmill.monitor.append import last_lines
from draftmill.monitor.layout import LOG_FILE, RUNS, STATE_FILE, all_runs, find_run
from draftmill.monitor.phases import LOADING, Phase
from draftmill.monitor.process import Presence, ProcessIdentity, is_alive
from draftmill.monitor.state import read_json
from draftmill.monitor.stopping import read_request

LATE_S = 30.0
"""A living run writes its state every second; this long without is a process that gets nothing done."""


class ExitCode(IntEnum):
    """What the `status` command ends with."""

    WORKING = 0
    """Training (evaluating and saving included), or ended as wanted: finished, or stopped on request."""
    LOADING = 3
    STALLED = 4
    CRASHED = 5
    NO_RUN = 6


@dataclass(frozen=True, slots=True)
class RunStatus:
    """One run at one moment. Times in seconds, sizes in bytes; None where it isn't known.

    phase           the verdict; `reported_phase` is what the run itself said last
    reason          why, in one line, where the phase alone does not tell
    since_s         seconds since the reported phase began
    presence        what is seen of the process: running, paused, gone or unseen (another host or container)
    state_age_s     seconds since the run last wrote its state
    since_progress_s  seconds since a worker, a phase or a step last moved
    """

    run: str
    phase: Phase
    reported_phase: Phase
    detail: str
    reason: str
    exit_code: int
    presence: str
    pid: int | None
    host: str
    started_time: float | None
    running_s: float | None
    since_s: float | None
    state_age_s: float | None
    since_progress_s: float | None
    stall_s: float | None
    progress: dict[str, Any] = field(default_factory=dict)
    eta_s: float | None = None
    seconds_in: dict[str, float] = field(default_factory=dict)
    workers: dict[str, dict[str, Any]] = field(default_factory=dict)
    gpus: dict[str, Any] | None = None
    warnings: list[dict[str, Any]] = field(default_factory=list)
    stop: str = "no"
    hears_signals: bool = False
    error: dict[str, Any] | None = None
    log: str = ""
    last_lines: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Every field, ready for JSON."""
        return asdict(self)


class NoRun(LookupError):
    """There is no run of this name; the message says where it was looked for."""


def read_status(run: str | os.PathLike[str], runs: Path = RUNS) -> RunStatus:
    """Judge a run by its directory, or by its name under runs/.

    Raises:
        NoRun: there is none.
    """
    directory = find_run(run, runs)
    if directory is None:
        raise NoRun(f"no run at {Path(run)} (no {STATE_FILE} in it)")
    try:
        state = read_json(directory / STATE_FILE)
    except OSError as error:
        raise NoRun(f"{directory / STATE_FILE} can't be read: {error.strerror}") from None
    if state is None or (process := ProcessIdentity.from_json(state.get("process"))) is None:
        raise NoRun(f"{directory / STATE_FILE} is not a run's state; it is empty or of another program")
    return judge(directory, state, process, process.presence())


def read_all(runs: Path = RUNS) -> list[RunStatus]:
    """Every run under a folder, the one that moved last at the end."""
    found = []
    for path in all_runs(runs):
        try:
            found.append(read_status(path))
        except NoRun:
            continue
    return found


def judge(directory: Path, state: dict[str, Any], process: ProcessIdentity, presence: Presence) -> RunStatus:
    """The verdict on what a run said last and what is seen of its process."""
    age_s = _age_s(state, process)
    reported = _phase(state)
    since_progress_s = state.get("since_progress_s")
    if since_progress_s is not None and age_s is not None and is_alive(presence):
        since_progress_s += age_s
    phase, reason = _verdict(directory, state, process, presence, age_s, since_progress_s)
    ended = bool(state.get("ended"))
    # Of an ended or lost run the last word counts; of a living one the time that passed since.
    until = state.get("written_at", 0.0) + (age_s or 0.0 if not ended and is_alive(presence) else 0.0)
    lost = phase in (Phase.CRASHED, Phase.STALLED)
    return RunStatus(
        run=str(directory),
        phase=phase,
        reported_phase=reported,
        detail=str(state.get("detail") or ""),
        reason=reason,
        exit_code=int(exit_code(phase)),
        presence=presence.value,
        pid=process.pid,
        host=process.host,
        started_time=state.get("started_time"),
        running_s=_difference(until, state.get("started_at")),
        since_s=_since_s(state, age_s, until, ended),
        state_age_s=age_s,
        since_progress_s=since_progress_s,
        stall_s=state.get("stall_s"),
        progress=state.get("progress") or {},
        eta_s=None if ended or lost else state.get("eta_s"),
        seconds_in=state.get("seconds_in") or {},
        workers=_aged(state.get("workers") or {}, age_s if is_alive(presence) and not ended else 0.0),
        gpus=state.get("gpus"),
        warnings=state.get("warnings") or [],
        stop=str(state.get("stop") or "no"),
        hears_signals=bool(state.get("hears_signals")),
        error=state.get("error"),
        log=str(directory / LOG_FILE),
        last_lines=_last_lines(directory, phase) if lost else [],
    )


def exit_code(phase: Phase) -> ExitCode:
    """The exit code of `status` for a verdict."""
    if phase in LOADING:
        return ExitCode.LOADING
    return {Phase.STALLED: ExitCode.STALLED, Phase.CRASHED: ExitCode.CRASHED}.get(phase, ExitCode.WORKING)


def _verdict(
    directory: Path,
    state: dict[str, Any],
    process: ProcessIdentity,
    presence: Presence,
    age_s: float | None,
    since_progress_s: float | None,
) -> tuple[Phase, str]:
    reported, stall_s = _phase(state), float(state.get("stall_s") or 600.0)
    if state.get("ended"):
        return reported, _ending_reason(state, presence)
    if presence is Presence.GONE:
        request = read_request(directory, process)
        if request is not None and request.get("killed"):
            return Phase.STOPPED, "killed by `draftmill stop` after it did not end by itself"
        return Phase.CRASHED, f"process {process.pid} is gone without a word (killed, out of memory, or a reboot)"
    if presence is Presence.PAUSED:
        return Phase.STALLED, f"process {process.pid} is paused by a signal; `kill -CONT {process.pid}` lets it go on"
    if age_s is not None and age_s > LATE_S:
        if presence is Presence.UNSEEN:
            return Phase.STALLED, (
                f"no heartbeat for {age_s:.0f} s; its process is on {process.host} and can't be looked at from here"
            )
        return Phase.STALLED, f"process {process.pid} lives but wrote no state for {age_s:.0f} s{_disk_hint(directory)}"
    if since_progress_s is not None and since_progress_s > stall_s:
        return Phase.STALLED, f"no progress for {since_progress_s:.0f} s{_suspects(state)}"
    return reported, "judged by its heartbeat alone: its process can't be looked at from here" * (
        presence is Presence.UNSEEN
    )


def _ending_reason(state: dict[str, Any], presence: Presence) -> str:
    error = state.get("error") or {}
    parts = []
    if error:
        where = error.get("worker") or "?"
        where += f" on {error['device']}" if error.get("device") else ""
        where += f" at step {error['step']}" if error.get("step") is not None else ""
        parts.append(f"{error.get('text', '')} (in {where})")
    if is_alive(presence):
        parts.append("its process has not ended yet")
    return "; ".join(parts)


def _last_lines(directory: Path, phase: Phase) -> list[str]:
    lines = last_lines(directory / LOG_FILE, 400)
    if phase is Phase.STALLED:  # the stacks that a stalled run leaves there would push everything else out
        lines = [line for line in lines if line[:4].isdigit() and " | " in line]
    return lines[-12:]


def _suspects(state: dict[str, Any]) -> str:
    """Who holds the run up: those who do not wait for another."""
    workers = (state.get("workers") or {}).items()
    busy = [f"{name} in {entry.get('doing')}" for name, entry in workers if not waits(entry)]
    return f"; not waiting: {', '.join(busy)}" if busy else ""


def waits(worker: dict[str, Any]) -> bool:
    """Whether a worker's entry says that it waits for another."""
    return str(worker.get("doing", "")).startswith("waiting")


def _disk_hint(directory: Path) -> str:
    try:
        disk = os.statvfs(directory)
    except OSError:
        return ""
    if disk.f_flag & os.ST_RDONLY:
        return "; its directory is on a read-only file system, so it can't"
    return "; the disk is full" if disk.f_bavail == 0 else ""


def _phase(state: dict[str, Any]) -> Phase:
    try:
        return Phase(str(state.get("phase")))
    except ValueError:  # a later version's
        return Phase.STARTING


def _age_s(state: dict[str, Any], process: ProcessIdentity) -> float | None:
    """Seconds since the state was written."""
    if process.shares_clock() and isinstance(state.get("written_at"), int | float):
        return max(0.0, time.monotonic() - float(state["written_at"]))
    written = state.get("written_time")
    return max(0.0, time.time() - float(written)) if isinstance(written, int | float) else None


def _since_s(state: dict[str, Any], age_s: float | None, until: float, ended: bool) -> float | None:
    if ended and age_s is not None:  # how long ago it ended
        return age_s + (_difference(state.get("written_at"), state.get("phase_at")) or 0.0)
    return _difference(until, state.get("phase_at"))


def _difference(later: Any, earlier: Any) -> float | None:
    if isinstance(later, int | float) and isinstance(earlier, int | float):
        return max(0.0, later - earlier)
    return None


def _aged(workers: dict[str, dict[str, Any]], age_s: float | None) -> dict[str, dict[str, Any]]:
    aged = {}
    for name, worker in workers.items():
        ages = {key: (worker.get(key) or 0.0) + (age_s or 0.0) for key in ("since_beat_s", "since_progress_s")}
        aged[name] = {**worker, **ages}
    return aged
