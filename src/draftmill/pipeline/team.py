"""The workers of one host as the main thread sees them: tickets in, results out, and the first failure raised here."""

from __future__ import annotations

import queue
import time
from collections import deque
from collections.abc import Callable, Sequence

from draftmill.pipeline.supervision import Supervisor, Worker
from draftmill.pipeline.workers import DrafterWorker, Result, TargetWorker, Ticket


class Stalled(RuntimeError):
    """No worker has made progress for longer than `pipeline.stall_s`."""


class Team:
    """All workers of this host. Used by the main thread only.

    A ticket goes to every drafter; its result is the first drafter's, whose values are summed over all. At most
    `lookahead` tickets are under way, so that devices never wait for the main thread and never run far ahead of it.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        targets: Sequence[TargetWorker],
        drafters: Sequence[DrafterWorker],
        *,
        lookahead: int,
        stall_s: float,
        idle_s: Callable[[], float],
    ) -> None:
        """idle_s: seconds since any worker last made progress."""
        self.supervisor, self.targets, self.drafters = supervisor, targets, drafters
        self.lookahead, self.stall_s, self.idle_s = lookahead, stall_s, idle_s
        self.under_way: deque[Ticket] = deque()
        supervisor.on_close(self._wake)

    def start(self) -> None:
        """Start every worker's thread."""
        for worker in (*self.targets, *self.drafters):
            worker.start()

    def submit(self, ticket: Ticket) -> list[list[Result]]:
        """Give every drafter a ticket. Returns the results that had to be waited for, oldest first."""
        finished = []
        while len(self.under_way) >= self.lookahead:
            finished.append(self._next())
        for drafter in self.drafters:
            drafter.tickets.put(ticket)
        self.under_way.append(ticket)
        return finished

    def drain(self) -> list[list[Result]]:
        """Wait for all results under way, oldest first."""
        return [self._next() for _ in range(len(self.under_way))]

    def drafter_wait_s(self) -> float:
        """Seconds that targets have waited for drafters since the start, all targets together."""
        return sum(target.drafter_wait_s for target in self.targets)

    def close(self, timeout_s: float = 30.0) -> None:
        """End the workers and wait for their threads. Can be called twice.

        Raises RuntimeError, naming them, where threads do not end in time.
        """
        for drafter in self.drafters:
            drafter.tickets.put(None)
        if self.under_way:
            self.supervisor.close()
        deadline = time.monotonic() + timeout_s
        workers: list[Worker] = [worker for worker in (*self.drafters, *self.targets) if worker.ident is not None]
        for drafter in self.drafters:
            if drafter.ident is not None:
                drafter.join(max(0.0, deadline - time.monotonic()))
        self.supervisor.close()
        for worker in workers:
            worker.join(max(0.0, deadline - time.monotonic()))
        self.under_way.clear()
        if alive := [worker.name for worker in workers if worker.is_alive()]:
            raise RuntimeError(f"workers did not end within {timeout_s:.0f} s: {', '.join(alive)}")

    def _next(self) -> list[Result]:
        """The results of the oldest ticket, one a drafter. Raises the first failure, or Stalled."""
        results = [self._from(drafter) for drafter in self.drafters]
        ticket = self.under_way.popleft()
        if any(result.ticket != ticket for result in results):
            raise RuntimeError(f"expected results of {ticket}, got {[result.ticket for result in results]}")
        return results

    def _from(self, drafter: DrafterWorker) -> Result:
        while True:
            self.supervisor.check()
            if self.supervisor.closed:
                raise RuntimeError(f"worker {drafter.name} ended before its work was done")
            try:
                return drafter.results.get(timeout=min(1.0, self.stall_s))
            except queue.Empty:
                if self.idle_s() > self.stall_s:
                    raise Stalled(f"no worker has made progress for {self.stall_s:.0f} s") from None

    def _wake(self) -> None:
        for drafter in self.drafters:
            drafter.tickets.put(None)
