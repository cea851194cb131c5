"""One run a directory. Owns the file `lock`: who holds the directory, and when a dead holder's lock may be taken."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

from draftmill.errors import InputError
from draftmill.monitor.layout import LOCK_FILE, STATE_FILE
from draftmill.monitor.process import Presence, ProcessIdentity, is_alive
from draftmill.monitor.state import read_json

_ELSEWHERE_S = 120.0
"""A holder on another host, whose process can't be looked at, counts as alive this long after its last heartbeat."""


class Lock:
    """The directory's lock, held by the calling process."""

    def __init__(self, path: Path, taken_over: str | None) -> None:
        self.path = path
        self.taken_over = taken_over
        """One line on the dead holder that the lock was taken from; None where it was free."""

    @classmethod
    def take(cls, directory: Path) -> Lock:
        """Take the directory's lock, from a holder that is gone too.

        Raises:
            InputError: a living process holds it; names its pid and host.
        """
        path = directory / LOCK_FILE
        with _opened(path) as descriptor:
            content = os.read(descriptor, 65536)
            holder = None
            if content.strip():
                with contextlib.suppress(ValueError):
                    holder = ProcessIdentity.from_json(json.loads(content))
            taken_over = None
            if holder is not None:
                presence = _presence(holder, directory)
                if is_alive(presence):
                    raise InputError(
                        f"{directory} is in use by process {holder.pid} on {holder.host}"
                        f"{', which is paused' if presence is Presence.PAUSED else ''}; "
                        f"wait for it, end it with `draftmill stop {directory}`, or choose another run.dir"
                    )
                taken_over = f"took over the lock of process {holder.pid} on {holder.host}, which is gone"
            elif content.strip():
                taken_over = "took over a lock that names no process"
            data = json.dumps(ProcessIdentity.of_this().to_json()).encode() + b"\n"
            os.pwrite(descriptor, data, 0)
            os.ftruncate(descriptor, len(data))
        return cls(path, taken_over)

    def release(self) -> None:
        """Give the directory free, if it is still this process's. May be called twice."""
        holder = read_holder(self.path.parent)
        if holder == ProcessIdentity.of_this():
            self.path.unlink(missing_ok=True)


def read_holder(directory: Path) -> ProcessIdentity | None:
    """The process named by the directory's lock, alive or not; None where there is no lock."""
    try:
        return ProcessIdentity.from_json(read_json(directory / LOCK_FILE))
    except OSError:
        return None


def _presence(holder: ProcessIdentity, directory: Path) -> Presence:
    presence = holder.presence()
    if presence is not Presence.UNSEEN:
        return presence
    # Another host or container: all that reaches us is the file it writes once a second.
    try:
        age_s = time.time() - (directory / STATE_FILE).stat().st_mtime
    except FileNotFoundError:
        age_s = time.time() - (directory / LOCK_FILE).stat().st_mtime
    return Presence.RUNNING if age_s < _ELSEWHERE_S else Presence.GONE


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    """The lock file, open, while no other process is between reading and writing it."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            try:
                fcntl.lockf(descriptor, fcntl.LOCK_EX)
            except OSError as error:
                if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):
                    raise
                raise InputError(
                    f"{path.parent}: its file system has no file locks ({error.strerror}); choose another run.dir"
                ) from None
            try:
                same = os.path.samestat(os.fstat(descriptor), os.stat(path))
            except FileNotFoundError:
                same = False
            if same:  # else its holder removed it meanwhile: look again
                yield descriptor
                return
        finally:
            os.close(descriptor)
