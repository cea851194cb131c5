"""What the main thread asks of the drafters, and what they answer: tickets and results.

Every drafter of a host gets the same tickets in the same order. A result says what the time went on; reading its
seconds waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from draftmill.pipeline.spans import Span


@dataclass(frozen=True)
class Step:
    """Ticket: take a group's batches, update. The number counts from 0 over the whole run."""

    step: int


@dataclass(frozen=True)
class Evaluate:
    """Ticket: score the held-out batches that follow this step."""

    step: int


@dataclass(frozen=True)
class Snapshot:
    """Ticket: hand out state after this step."""

    step: int
    request: Any = None


Ticket = Step | Evaluate | Snapshot

WORK, SUM = "work", "sum"
WAITING_DATA, WAITING_DRAFTER = "waiting for data", "waiting for drafter"
WAITING_FEATURES, WAITING_TICKET = "waiting for features", "waiting for a ticket"
"""What a worker's time is spent on; what begins with waiting counts as such. A turn on a shared device is waited for as
what the other side gives is: features, or free slots."""
WAITING_TURN = "waiting for a turn"
"""What is said meanwhile."""


@dataclass(frozen=True)
class Result:
    """What came of a ticket.

    span         from the start of its work to the end
    parts        what that time was spent on: waiting for features and turns, work, and the sum over all drafters
    num_tokens   real tokens of the training batches that were taken from the channel for it
    num_padded   tokens of their rows, padding included
    queue_depth  batches that lie ready when it is done
    """

    worker: str
    ticket: Ticket
    value: Any
    span: Span
    parts: tuple[Span, ...] = ()
    num_tokens: int = 0
    num_padded: int = 0
    queue_depth: int = 0

    @property
    def wait_s(self) -> float:
        """Seconds of waiting for features and turns. Waits for the device."""
        return sum(part.seconds() for part in self.parts if part.kind == WAITING_FEATURES)

    @property
    def sum_s(self) -> float:
        """Seconds in the sum over all drafters, waiting for them included. Waits for the device."""
        return sum(part.seconds() for part in self.parts if part.kind == SUM)

    @property
    def work_s(self) -> float:
        """Seconds of all but that waiting. Waits for the device."""
        return self.span.seconds() - self.wait_s
