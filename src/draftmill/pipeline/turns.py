"""Whose turn it is on a device that several workers share: one computes, the others wait.

On a CPU all cores are one device, and one worker has them at a time: two teams of OpenMP threads on the same cores
would wait for one another at every barrier.

On a GPU a forward and a step take longer side by side than one after the other, for the products of both are made for
a device of their own: a fifth of the speed was lost so at Qwen3-8B's shape (docs/log.md, 2026-11-30). So where a target
and a drafter share one they take turns. The drafter goes first: the target has what it leaves, while it waits for
features, or for the sum over drafters, which takes no turn. A turn costs a moment, for a host waits for the device
before the next one may begin; where both sides' turns are brief that would be more than they bring, and they compute
side by side.
"""

from __future__ import annotations

import contextlib
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from draftmill.pipeline.channel import ChannelClosed

BRIEF_S = 0.02
"""Turns that are shorter than this are not taken."""
TRIED = 8
"""Turns of each side after which that is decided. A target's count from the drafter's first one on: before that others
may be compiling."""


class Turns:
    """The turns on one device. Any thread may take one, and any may close it."""

    def __init__(self, device: torch.device, told: Callable[[str], None] = lambda line: None) -> None:
        """told: given a line once it is decided whether turns are taken."""
        self.device, self._told = device, told
        self._changed = threading.Condition()
        self._taken = self._closed = False
        self._waiting_first = 0
        self._seconds: dict[bool, list[float]] = {True: [], False: []}
        self.are_taken = True
        """Until they prove to be brief."""

    @contextlib.contextmanager
    def take(self, first: bool, waits: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Wait for a turn; it ends when what was launched within it is done.

        Before it begins, what this thread's stream has under way is waited for, lest the device stands idle for that;
        `waits` is called after that. first: a drafter's, before all others. Raises ChannelClosed.
        """
        if not self.are_taken:
            yield
            return
        self.finish()
        waits()
        self._begin(first)
        began = time.perf_counter()
        try:
            yield
            self.finish()
        finally:
            self._end(first, time.perf_counter() - began)

    def finish(self) -> None:
        """Wait for what this thread's stream has under way."""
        if self.device.type != "cuda":
            return
        stream = torch.cuda.current_stream(self.device)
        if not stream.query():  # waiting lets another thread run, who might take the turn that follows this one's
            stream.synchronize()

    def close(self) -> None:
        """Wake everybody with ChannelClosed. Can be called twice."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _begin(self, first: bool) -> None:
        with self._changed:
            self._waiting_first += first
            self._changed.wait_for(lambda: self._closed or (not self._taken and (first or not self._waiting_first)))
            self._waiting_first -= first
            if self._closed:
                raise ChannelClosed
            self._taken = True

    def _end(self, first: bool, seconds: float) -> None:
        with self._changed:
            self._taken = False
            if first or self._seconds[True]:
                self._judge(self._seconds[first], seconds)
            self._changed.notify_all()

    def _judge(self, tried: list[float], seconds: float) -> None:
        if len(tried) == TRIED:
            return
        tried.append(seconds)
        if all(len(each) == TRIED for each in self._seconds.values()):
            drafter_s, target_s = (statistics.median(self._seconds[first]) for first in (True, False))
            self.are_taken = max(drafter_s, target_s) >= BRIEF_S
            self._told(
                f"target and drafter on {self.device} {'take turns' if self.are_taken else 'compute side by side'}: "
                f"{1e3 * target_s:.3g} and {1e3 * drafter_s:.3g} ms"
            )


def turns_on_shared(
    targets: Sequence[tuple[torch.device, ...]],
    drafters: Sequence[torch.device],
    told: Callable[[str], None] = lambda line: None,
) -> dict[torch.device, Turns]:
    """The turns of each CUDA device that has a drafter and a target. One that is spread over several devices takes
    none: it has several batches under way, in different places. told: as in `Turns`."""
    alone = {group[0] for group in targets if len(group) == 1}
    return {device: Turns(device, told) for device in drafters if device.type == "cuda" and device in alone}


_CORES = threading.Lock()


def cores(device: torch.device) -> AbstractContextManager[Any]:
    """All cores of a CPU; nothing on another device."""
    return _CORES if device.type == "cpu" else contextlib.nullcontext()


def computing(
    device: torch.device, turns: Turns | None, first: bool, waits: Callable[[], None]
) -> AbstractContextManager[Any]:
    """What a worker holds while it runs a forward or a step. first, waits: as in `Turns.take`."""
    return cores(device) if turns is None else turns.take(first, waits)
