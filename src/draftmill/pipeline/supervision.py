"""The first failure wins: it stops every worker within seconds and is raised in the main thread.

Owns the list of what to close, the first failure, and the watch for a run that no longer moves. Knows no device and no
record.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from draftmill.pipeline.channel import ChannelClosed

GRACE_S = 60.0
"""Seconds that the main thread has for leaving once the workers were told to end; past them it hangs itself."""


class WorkerFailed(RuntimeError):
    """A worker raised. The message names worker, device and what it was doing; the cause is the worker's exception."""

    def __init__(self, worker: str, device: str, doing: str, cause: BaseException, step: int | None = None) -> None:
        """step: the optimizer step it was at, counted from 1, where it knows."""
        reason = f"{type(cause).__name__}: {cause}" if str(cause) else type(cause).__name__
        super().__init__(f"worker {worker} on {device} failed {doing}: {reason}")
        self.worker, self.device, self.step = worker, device, step


class Stalled(RuntimeError):
    """No worker has made progress for longer than `pipeline.stall_s`."""


class HostEnded(RuntimeError):
    """Another host's run has ended early, or this host was asked to stop while it waited for another.

    stopped: somebody asked for it; it is no failure.
    """

    def __init__(self, message: str, *, stopped: bool) -> None:
        super().__init__(message)
        self.stopped = stopped


Failure = WorkerFailed | Stalled | HostEnded
"""What ends a run before its time."""


class Supervisor:
    """Holds the first failure and the things to close when it comes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._closers: list[Callable[[], None]] = []
        self._failure: Failure | None = None
        self._closed = False

    def on_close(self, closer: Callable[[], None]) -> None:
        """Register what to close, without waiting for anything; called at once where the end has come already."""
        with self._lock:
            if not self._closed:
                self._closers.append(closer)
                return
        closer()

    def fail(self, failure: Failure) -> None:
        """Report a failure. Only the first is kept; all workers are stopped."""
        with self._lock:
            if self._failure is None and not self._closed:
                self._failure = failure
        self.close()

    def close(self) -> None:
        """Stop all workers. Can be called twice, from any thread. Raises what a closer raised, once all were called."""
        with self._lock:
            closers, self._closers, self._closed = self._closers, [], True
        errors = []
        for closer in closers:
            try:
                closer()
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]

    @property
    def closed(self) -> bool:
        """Whether the run is ending."""
        return self._closed

    @property
    def failure(self) -> Failure | None:
        """The first failure, if there is one."""
        return self._failure

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
        self.step: int | None = None

    def work(self) -> None:
        """Run until there is nothing more to do. Raises ChannelClosed when the run ends early."""
        raise RuntimeError(f"worker {self.name} has no work")

    def leave(self) -> None:
        """Let go of what others may be waiting for. Called when `work` is over, after a failure was reported."""

    def run(self) -> None:
        """Run `work`; the first failure of any worker stops all of them."""
        try:
            self.work()
        except ChannelClosed:
            return
        except WorkerFailed as error:  # of a thread that has no supervisor, told by this one
            self.supervisor.fail(error)
        except BaseException as error:  # reported, and raised again in the main thread
            failure = WorkerFailed(self.name, self.device_name, self.doing, error, self.step)
            failure.__cause__ = error
            self.supervisor.fail(failure)
        finally:
            self.leave()


class StallWatch(threading.Thread):
    """Ends a run in which nothing moves, also where the main thread hangs with the workers.

    Waits until no worker has made progress for stall_s, or the run ends. Then the main thread has grace_s to leave;
    past that it hangs in a call that nothing can interrupt, such as waiting for a device that never answers.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        idle_s: Callable[[], float],
        stall_s: float,
        on_stall: Callable[[], None],
        abandon: Callable[[], None],
        grace_s: float = GRACE_S,
    ) -> None:
        """idle_s: seconds since any worker made progress. on_stall: called first, while all threads still stand where
        they hang. abandon: ends the process."""
        super().__init__(name="stall-watch", daemon=True)
        self.supervisor, self.idle_s, self.stall_s, self.grace_s = supervisor, idle_s, stall_s, grace_s
        self.on_stall, self.abandon = on_stall, abandon
        self._ending, self._left = threading.Event(), threading.Event()
        supervisor.on_close(self._ending.set)

    def run(self) -> None:
        """Until the main thread has left."""
        while not self._ending.wait(max(0.01, self.stall_s - self.idle_s())):
            if self.idle_s() >= self.stall_s:
                self.on_stall()
                self.supervisor.fail(Stalled(f"no worker has made progress for {self.stall_s:g} s"))
        if not self._left.wait(self.grace_s):
            self.abandon()

    def left(self) -> None:
        """The main thread is out of the run."""
        self._left.set()
        self._ending.set()


def within(timeout_s: float, function: Callable[[], object], name: str) -> BaseException | None:
    """Call a function that may never return, in a thread of its own, and wait for it so long.

    Returns what it raised, a TimeoutError where it has not returned, None where all is well.
    """
    outcome: list[BaseException | None] = []

    def call() -> None:
        try:
            function()
            outcome.append(None)
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=call, name=name, daemon=True)
    thread.start()
    thread.join(timeout_s)
    return outcome[0] if outcome else TimeoutError(f"{name} has not ended within {timeout_s:g} s")
