"""The workers of one host as the main thread sees them: tickets in, results out, and the first failure raised here."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence

from draftmill.pipeline.supervision import StallWatch, Supervisor, Worker
from draftmill.pipeline.tickets import Result, Ticket
from draftmill.pipeline.workers import DrafterWorker, TargetWorker

ABANDON_S = 5.0
"""Seconds that threads have for ending after a failure; those that hang are left behind."""


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
        watch: StallWatch,
        *,
        lookahead: int,
    ) -> None:
        self.supervisor, self.targets, self.drafters, self.watch = supervisor, targets, drafters, watch
        self.lookahead = lookahead
        self.under_way: deque[Ticket] = deque()
        self._latest: list[Result] = []
        supervisor.on_close(self._wake)

    def start(self) -> None:
        """Start every worker's thread, and the watch over them."""
        for worker in (*self.targets, *self.drafters, self.watch):
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

    def drain(self) -> Iterator[list[Result]]:
        """All results under way, oldest first, each as soon as it is there; then every drafter's device is done."""
        while self.under_way:
            yield self._next()
        for result in self._latest:  # or one drafter would leave the group while another's sum still runs
            result.span.seconds()

    def drafter_wait_s(self) -> float:
        """Seconds that targets have waited for drafters since the start, all targets together."""
        return sum(target.drafter_wait_s for target in self.targets)

    def check(self) -> None:
        """Raise the first failure, if there is one."""
        self.supervisor.check()

    def close(self, timeout_s: float = 30.0) -> None:
        """End the workers and wait for their threads. Can be called twice.

        Raises RuntimeError, naming them, where threads do not end in time.
        """
        for drafter in self.drafters:
            drafter.tickets.put(None)
        deadline = time.monotonic() + timeout_s
        _join(self.drafters, deadline)
        self.supervisor.close()
        alive = _join((*self.drafters, *self.targets), deadline)
        self.watch.left()
        if alive:
            raise RuntimeError(f"workers did not end within {timeout_s:g} s: {', '.join(alive)}")

    def abandon(self, timeout_s: float = ABANDON_S) -> list[str]:
        """End the workers after a failure; returns the names of those that hang and are left behind."""
        self.supervisor.close()
        alive = _join((*self.drafters, *self.targets), time.monotonic() + timeout_s)
        self.under_way.clear()
        self.watch.left()
        return alive

    def _next(self) -> list[Result]:
        """The results of the oldest ticket, one a drafter. Raises the first failure."""
        results = [self._from(drafter) for drafter in self.drafters]
        ticket = self.under_way.popleft()
        if any(result.ticket != ticket for result in results):
            raise RuntimeError(f"expected results of {ticket}, got {[result.ticket for result in results]}")
        self._latest = results
        return results

    def _from(self, drafter: DrafterWorker) -> Result:
        """Waits for the drafter's result; is unblocked by it and by the supervisor's end."""
        self.check()
        result = drafter.results.get()
        if result is None:
            self.check()
            raise RuntimeError(f"worker {drafter.name} ended before its work was done")
        return result

    def _wake(self) -> None:
        for drafter in self.drafters:
            drafter.tickets.put(None)
            drafter.results.put(None)


def _join(workers: Sequence[Worker], deadline: float) -> list[str]:
    """Wait for threads that were started, until the deadline; returns the names of those that live on."""
    for worker in workers:
        if worker.ident is not None:
            worker.join(max(0.0, deadline - time.monotonic()))
    return [worker.name for worker in workers if worker.is_alive()]
