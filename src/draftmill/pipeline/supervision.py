"""The first failure wins: it stops every worker within seconds and is raised in the main thread.

Owns the list of what to close, the first failure, and the watch for a run that no longer moves. Knows no device and no
record.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from draftmill.pipeline.channel import ChannelClosed


class WorkerFailed(RuntimeError):
    """A worker raised. The message names worker, device and what it was doing; the cause is the worker's exception."""

    def __init__(self, worker: str, device: str, doing: str, cause: BaseException) -> None:
        reason = str(cause) or type(cause).__name__
        super().__init__(f"worker {worker} on {device} failed {doing}: {type(cause).__name__}: {reason}")
        self.worker, self.device = worker, device


class Supervisor:
    """Holds the first failure and the things to close when it comes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._closers: list[Callable[[], None]] = []
        self._failure: WorkerFailed | None = None
        self._closed = False
        self.changed = threading.Condition()

    def on_close(self, closer: Callable[[], None]) -> None:
        """Register what to close; closed at once where the end has come already."""
        with self._lock:
            if not self._closed:
                self._closers.append(closer)
                return
        closer()

    def fail(self, failure: WorkerFailed) -> None:
        """Report a worker's failure. Only the first is kept; all workers are stopped."""
        with self._lock:
            if self._failure is None and not self._closed:
                self._failure = failure
        self.close()

    def close(self) -> None:
        """Stop all workers. Can be called twice, from any thread."""
        with self._lock:
            closers, self._closers, self._closed = self._closers, [], True
        for closer in closers:
            closer()
        with self.changed:
            self.changed.notify_all()

    @property
    def closed(self) -> bool:
        """Whether the run is ending."""
        return self._closed

    def check(self) -> None:
        """Raise the first failure, if there is one."""
        if self._failure is not None:
            raise self._failure from self._failure.__cause__


class Worker(threading.Thread):
    """A thread for one device. Subclasses do their work in `work`; what it raises goes to the supervisor."""

    def __init__(self, name: str, device: str, supervisor: Supervisor) -> None:
        super().__init__(name=name, daemon=True)
        self.device_name, self.supervisor = device, supervisor
        self.doing = "while starting"

    def work(self) -> None:
        """Run until there is nothing more to do. Raises ChannelClosed when the run ends early."""
        raise RuntimeError(f"worker {self.name} has no work")

    def run(self) -> None:
        """Run `work`; the first failure of any worker stops all of them."""
        try:
            self.work()
        except ChannelClosed:
            return
        except BaseException as error:  # reported, and raised again in the main thread
            failure = WorkerFailed(self.name, self.device_name, self.doing, error)
            failure.__cause__ = error
            self.supervisor.fail(failure)
