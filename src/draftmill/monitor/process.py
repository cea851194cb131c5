"""Which process is meant, and whether it still lives. Owns pids, process start times, hosts and clocks.

A pid alone names nobody: numbers are given again. A pid, its start time and the machine's boot name one process for
good. Ages are differences of the monotonic clock, which no change of the wall clock moves. Never sends a signal.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Any

_PROC = Path("/proc")


class Presence(Enum):
    """What can be seen of a process from here."""

    RUNNING = "running"
    PAUSED = "paused"
    """Stopped by SIGSTOP, a terminal or a debugger: it lives, and does nothing."""
    GONE = "gone"
    UNSEEN = "unseen"
    """It lives on another host or in another container, so that its pid means nothing here."""


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """One process of one boot of one machine.

    start_ticks  clock ticks after boot at which it started (/proc/PID/stat), or None where there is no /proc
    boot_id      the kernel's random id of this boot, "" where there is none
    namespaces   the pid and time namespaces, "" where there are none: pids and monotonic stamps compare only inside
    """

    pid: int
    start_ticks: int | None
    host: str
    boot_id: str
    namespaces: str

    @classmethod
    def of(cls, pid: int) -> ProcessIdentity:
        """The process that has this pid on this machine now."""
        stat = _stat(pid)
        return cls(pid, stat[1] if stat else None, os.uname().nodename, _boot_id(), _namespaces())

    @classmethod
    def of_this(cls) -> ProcessIdentity:
        """The calling process."""
        return cls.of(os.getpid())

    @classmethod
    def from_json(cls, value: Any) -> ProcessIdentity | None:
        """Read what `to_json` wrote; None where it is something else."""
        try:
            ticks = value["start_ticks"]
            return cls(
                int(value["pid"]),
                None if ticks is None else int(ticks),
                str(value["host"]),
                str(value["boot_id"]),
                str(value["namespaces"]),
            )
        except (KeyError, TypeError, ValueError):
            return None

    def to_json(self) -> dict[str, Any]:
        """The fields, ready for JSON."""
        return asdict(self)

    def shares_clock(self) -> bool:
        """Whether this process's monotonic stamps can be compared with ours: same boot, same time namespace."""
        if not self.boot_id:  # no such id on this system: the host's name has to do
            return self.host == os.uname().nodename
        return self.boot_id == _boot_id() and self.namespaces.partition("+")[2] == _namespaces().partition("+")[2]

    def presence(self) -> Presence:
        """What can be seen of it from the calling process."""
        if self.host != os.uname().nodename:
            return Presence.UNSEEN
        if self.boot_id != _boot_id():
            return Presence.GONE  # the machine was started again since
        if self.namespaces.partition("+")[0] != _namespaces().partition("+")[0]:
            return Presence.UNSEEN
        stat = _stat(self.pid)
        if stat is None:
            return _presence_by_signal(self.pid)
        state, ticks = stat
        if (self.start_ticks is not None and ticks != self.start_ticks) or state in "ZXx":
            return Presence.GONE
        return Presence.PAUSED if state in "Tt" else Presence.RUNNING


def is_alive(presence: Presence) -> bool:
    """Whether the process was seen, working or paused."""
    return presence in (Presence.RUNNING, Presence.PAUSED)


def _presence_by_signal(pid: int) -> Presence:
    # Either gone, or hidden: /proc may be missing (macOS) or show only one's own processes (hidepid).
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return Presence.GONE
    except PermissionError:
        return Presence.RUNNING
    # Our signal reaches it, so a /proc that exists would have shown it: it ended between the two looks.
    return Presence.GONE if (_PROC / "self").exists() else Presence.RUNNING


def _stat(pid: int) -> tuple[str, int] | None:
    """State letter and start time, in clock ticks after boot, of a process; None where it can't be seen."""
    try:
        text = (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The second field is the command in parentheses, and may itself hold spaces and parentheses.
    fields = text[text.rindex(")") + 2 :].split()
    return fields[0], int(fields[19])


def _boot_id() -> str:
    try:
        return (_PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _namespaces() -> str:
    names = []
    for name in ("pid", "time"):
        try:
            names.append(os.readlink(_PROC / "self/ns" / name))
        except OSError:
            names.append("")
    return "+".join(names)
