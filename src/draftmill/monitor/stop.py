"""Ending a run from outside. Owns the order of means: a request, a signal, and at last a kill.

Only ever touches the one process that the run's state names, and only after its start time was compared: a pid that
was given to another process since is left alone. Signals go through a pidfd, which can't change hands in between.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from draftmill.errors import InputError
from draftmill.monitor.layout import STATE_FILE, require_run
from draftmill.monitor.process import Presence, ProcessIdentity, is_alive
from draftmill.monitor.show import duration
from draftmill.monitor.state import read_json
from draftmill.monitor.stopping import write_request

_FIRM_S = 15.0
"""Seconds that a run has to leave after it was asked to stop at once, before it is killed."""


@dataclass(frozen=True, slots=True)
class StopOutcome:
    """How a stop went: whether the process is gone now, and one line on it."""

    ended: bool
    message: str


def stop_run(
    run: str | os.PathLike[str],
    *,
    now: bool = False,
    timeout_s: float = 180.0,
    firm_s: float = _FIRM_S,
    tell: Callable[[str], None] = lambda line: None,
) -> StopOutcome:
    """Ask a run to stop, wait for it, and end it firmly when the time is over.

    Args:
        run: its directory, or its name under runs/
        now: leave out the graceful part, in which it finishes its step and saves
        timeout_s: seconds for the graceful part
        firm_s: seconds between asking it to stop at once and killing it
        tell: given a line when something happens

    Raises:
        InputError: there is no such run.
    """
    directory = require_run(run)
    state = read_json(directory / STATE_FILE) or {}
    process = ProcessIdentity.from_json(state.get("process"))
    if process is None:
        raise InputError(f"{directory / STATE_FILE} is not a run's state; give a run's directory")
    presence = process.presence()
    if presence is Presence.UNSEEN:
        return _stop_elsewhere(directory, process, now, timeout_s)
    if not is_alive(presence):
        return StopOutcome(True, f"{directory} is not running (its process {process.pid} is gone)")
    with _Handle(process) as handle:
        hears = bool(state.get("hears_signals"))
        if presence is Presence.PAUSED:
            tell(f"process {process.pid} is paused; it is let go on so that it can stop")
            handle.send(signal.SIGCONT)
        if not now:
            _ask(directory, process, handle, "graceful", hears)
            tell(f"asked process {process.pid} to finish its step, save and end; at most {duration(timeout_s)}")
            if handle.wait(timeout_s):
                return StopOutcome(True, f"{directory} has stopped")
            tell("the time is over")
        _ask(directory, process, handle, "now", hears)
        tell(f"asked process {process.pid} to end at once; it is killed after {duration(firm_s)}")
        if handle.wait(firm_s):
            return StopOutcome(True, f"{directory} has stopped")
        _note_kill(directory, process)
        handle.send(signal.SIGKILL)
        if handle.wait(30.0):
            return StopOutcome(True, f"{directory} was killed; what its last checkpoint holds is safe")
    return StopOutcome(False, f"process {process.pid} does not end even when killed; it hangs inside the system")


def _ask(directory: Path, process: ProcessIdentity, handle: _Handle, mode: str, hears: bool) -> None:
    try:
        write_request(directory, process, mode)
    except OSError as error:  # a full disk, or another user's directory
        if not hears:
            raise InputError(f"{directory} can't be written ({error.strerror}) and its run hears no signals") from None
        handle.send(signal.SIGTERM)
        if mode == "now":  # the first one only asks for a graceful stop
            time.sleep(0.1)
            handle.send(signal.SIGTERM)


def _note_kill(directory: Path, process: ProcessIdentity) -> None:
    # So that `status` can tell this end from a crash. Without the note it says crashed, which is not wrong either.
    try:
        write_request(directory, process, "now", killed=True)
    except OSError:
        return


def _stop_elsewhere(directory: Path, process: ProcessIdentity, now: bool, timeout_s: float) -> StopOutcome:
    """A run on another host or in another container hears the request through the shared directory alone."""
    try:
        write_request(directory, process, "now" if now else "graceful")
    except OSError as error:
        raise InputError(f"{directory} can't be written: {error.strerror}; stop it on {process.host}") from None
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        if (read_json(directory / STATE_FILE) or {}).get("ended"):
            return StopOutcome(True, f"{directory} has stopped")
        time.sleep(0.5)
    return StopOutcome(
        False,
        f"{directory} was asked to stop but has not; run `draftmill stop` on {process.host}, where it can be ended",
    )


class _Handle:
    """A verified hold on one process."""

    def __init__(self, process: ProcessIdentity) -> None:
        self._process = process
        self._descriptor: int | None = None

    def __enter__(self) -> _Handle:
        try:
            self._descriptor = os.pidfd_open(self._process.pid)
        except ProcessLookupError:
            return self
        except (AttributeError, OSError):  # no such call on this system: every signal is checked for itself
            return self
        # Opened first, compared after: from here on the descriptor means this very process.
        if not is_alive(self._process.presence()):
            self._close()
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def _close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def send(self, number: signal.Signals) -> None:
        """Send a signal to this process, if it still lives. Raises InputError where one may not."""
        try:
            if self._descriptor is not None:
                signal.pidfd_send_signal(self._descriptor, number)
            elif is_alive(self._process.presence()):
                os.kill(self._process.pid, number)
        except ProcessLookupError:
            return
        except PermissionError:
            raise InputError(
                f"process {self._process.pid} belongs to another user; ask them, or use their account"
            ) from None

    def wait(self, timeout_s: float) -> bool:
        """Wait for its end; whether it came."""
        end = time.monotonic() + timeout_s
        if self._descriptor is not None:
            poll = select.poll()
            poll.register(self._descriptor, select.POLLIN)
            poll.poll(max(0.0, timeout_s) * 1000)
        while is_alive(self._process.presence()):
            if time.monotonic() >= end:
                return False
            time.sleep(0.1)
        return True
