"""A command that goes on after its terminal has closed. Owns how it is started and when it counts as begun."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from draftmill.errors import InputError
from draftmill.monitor.append import last_lines
from draftmill.monitor.layout import LOG_FILE, STATE_FILE
from draftmill.monitor.process import ProcessIdentity
from draftmill.monitor.state import read_json


@dataclass(frozen=True, slots=True)
class Detached:
    """A run that goes on by itself."""

    directory: Path
    pid: int
    log: Path

    def lines(self) -> list[str]:
        """What the user is told."""
        return [
            f"run directory  {self.directory}",
            f"process        {self.pid}",
            f"log            {self.log}",
            f"see it with    draftmill status {self.directory}   or   draftmill watch {self.directory}",
        ]


def start_detached(
    arguments: Sequence[str], directory: Path, *, timeout_s: float = 60.0, program: Sequence[str] | None = None
) -> Detached:
    """Start a draftmill command in a session of its own and wait until it has taken its run directory.

    Whatever it prints goes to the directory's log, which its RunDirectory then writes too.

    Args:
        arguments: the command's, as in ["train", "run.yaml", "run.dir=runs/a"]; they must name the same directory
        directory: the run's
        timeout_s: seconds for it to take the directory
        program: what is started with them; by default this Python with the package

    Raises:
        InputError: it ended before, with its own message; or it did not take the directory in time. Where it refused
            its input there is no new directory either.
    """
    new = not directory.exists()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        log = open(directory / LOG_FILE, "ab")  # noqa: SIM115 - closed below
    except OSError as error:
        raise InputError(f"{directory} can't be a run directory: {error.strerror}; choose another run.dir") from None
    with log:
        begun_at = log.tell()
        child = subprocess.Popen(
            [*(program or [sys.executable, "-m", "draftmill"]), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            close_fds=True,
        )
    end = time.monotonic() + timeout_s
    while not _has_begun(directory, child.pid):
        if child.poll() is not None:
            words = _last_words(directory, begun_at, child.returncode)
            if new and child.returncode == 2:  # one line, which is said here
                _remove(directory)
            raise InputError(words)
        if time.monotonic() > end:
            raise InputError(
                f"process {child.pid} has not begun its run within {timeout_s:.0f} s; see {directory / LOG_FILE}"
            )
        time.sleep(0.05)
    return Detached(directory, child.pid, directory / LOG_FILE)


def _has_begun(directory: Path, pid: int) -> bool:
    state = read_json(directory / STATE_FILE)
    process = ProcessIdentity.from_json(state.get("process")) if state is not None else None
    return process is not None and process.pid == pid


def _remove(directory: Path) -> None:
    """The directory that was made for the log alone; one that holds anything else stays."""
    with suppress(OSError):
        if [path.name for path in directory.iterdir()] == [LOG_FILE]:
            (directory / LOG_FILE).unlink()
            directory.rmdir()


def _last_words(directory: Path, begun_at: int, code: int) -> str:
    if (directory / LOG_FILE).stat().st_size > begun_at:
        last = last_lines(directory / LOG_FILE, 1)
        if last:
            return last[0].removeprefix("draftmill: error: ")
    return f"the run ended with code {code} before it began, without a word; see {directory / LOG_FILE}"
