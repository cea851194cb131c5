"""Bounded slots between the targets and one drafter.

A slot's buffer lies on the drafter's device and is allocated once. Batches are numbered per channel 0, 1, 2, ...;
number n uses slot n mod slots, so the drafter gets them in order, whichever target is done first.

    FREE --reserve(n)--> FILLING --fill(n)--> READY --take(n)--> TAKEN --release(n)--> FREE

A target waits in `reserve` while the drafter is slots behind (backpressure); the drafter waits in `take` while the
targets are behind. `close` wakes everybody.
"""

from __future__ import annotations

import threading
from enum import Enum

import torch

from draftmill.records import HostBatch


class ChannelClosed(Exception):
    """The run is ending; the waiter has nothing more to do."""


class SlotState(Enum):
    """Who may touch a slot's buffer."""

    FREE = "free"
    FILLING = "filling"
    READY = "ready"
    TAKEN = "taken"


class Slot:
    """A buffer on the drafter's device for what the target gives of a batch's tokens, and the batch it is of.

    features_TF: [T, L*H], the tapped layers' outputs side by side; where the loss looks at the target's own
    predictions, its last hidden state follows: [T, (L+1)*H].

    written, read: events on the device, recorded after the features were written and after they were last read; None on
    a CPU, where both are done when the call returns.
    """

    def __init__(self, context_slots: int, feature_size: int, device: torch.device, dtype: torch.dtype) -> None:
        self.features_TF = torch.zeros(context_slots, feature_size, device=device, dtype=dtype)
        self.state = SlotState.FREE
        self.number = -1
        self.batch: HostBatch | None = None
        self.written: torch.cuda.Event | None = None
        self.read: torch.cuda.Event | None = None


class Channel:
    """The slots of one drafter. Targets reserve and fill, the drafter takes and releases; any thread may close."""

    def __init__(
        self, num_slots: int, context_slots: int, feature_size: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.device = device
        self._slots = [Slot(context_slots, feature_size, device, dtype) for _ in range(num_slots)]
        if device.type == "cuda":  # the workers' streams do not wait for the one that has cleared the slots
            torch.cuda.current_stream(device).synchronize()
        self._changed = threading.Condition()
        self._closed = False

    def reserve(self, number: int) -> Slot:
        """Wait for the slot of batch `number` to be free, and own it for filling. Raises ChannelClosed."""
        return self._move(number, SlotState.FREE, SlotState.FILLING, claim=True)

    def fill(self, number: int, batch: HostBatch, written: torch.cuda.Event | None = None) -> None:
        """Hand the filled slot over; its writes are done once `written` is. Raises RuntimeError out of turn."""
        with self._changed:
            slot = self._slot(number, SlotState.FILLING)
            slot.batch, slot.written = batch, written
            slot.state = SlotState.READY
            self._changed.notify_all()

    def take(self, number: int) -> Slot:
        """Wait for batch `number` and own its slot for reading. Raises ChannelClosed."""
        return self._move(number, SlotState.READY, SlotState.TAKEN)

    def release(self, number: int, read: torch.cuda.Event | None = None) -> None:
        """Give the slot back; its reads are done once `read` is. Raises RuntimeError out of turn."""
        with self._changed:
            slot = self._slot(number, SlotState.TAKEN)
            slot.batch, slot.read = None, read
            slot.state = SlotState.FREE
            self._changed.notify_all()

    def depth(self) -> int:
        """Batches that are ready and not yet taken."""
        with self._changed:
            return sum(slot.state is SlotState.READY for slot in self._slots)

    def close(self) -> None:
        """Wake everybody with ChannelClosed. Can be called twice."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _move(self, number: int, source: SlotState, target: SlotState, claim: bool = False) -> Slot:
        slot = self._slots[number % len(self._slots)]
        # A slot freed by number n is next owned by n + slots, and by no later number; at first by one below slots.
        due = max(number - len(self._slots), -1) if claim else number
        with self._changed:
            self._changed.wait_for(lambda: self._closed or (slot.state is source and slot.number == due))
            if self._closed:
                raise ChannelClosed
            slot.state, slot.number = target, number
            return slot

    def _slot(self, number: int, expected: SlotState) -> Slot:
        slot = self._slots[number % len(self._slots)]
        if slot.number != number or slot.state is not expected:
            raise RuntimeError(
                f"slot of batch {number}: expected {expected.value}, got {slot.state.value} of batch {slot.number}"
            )
        return slot
