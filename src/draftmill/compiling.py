"""What everything that compiles or captures in this process goes through: one lock, code objects of a worker's own.

Dynamo is not thread-safe: it compiles one thing at a time, and while it traces, compiled code that another thread calls
raises, for the mark of tracing is the process's. Nor may a captured graph see another thread's set-up. So whoever
compiles, warms up or captures holds the lock, and whoever runs a model says so: it and what traces wait for each other.
Owns no model and no step.
"""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


class BuildLock:
    """A lock for building, one thread at a time, which may take it again.

    `with lock` is for what traces, and keeps the other threads' running models out meanwhile; `with lock.beside()` for
    what does not, such as a capture. A thread may build inside what it runs, and run inside what it builds. Of several
    that want to build from inside what they run each lets the others go first: where they wait they call nothing.

    Nobody is kept out for good by one who waits to build: somebody who runs may depend on what another has yet to
    launch, as drafters do who sum over all of them.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._builder: int | None = None
        self._depth = self._excluding = 0
        self._running: dict[int, int] = {}
        self._waiting: set[int] = set()
        """Who wants to trace, and lets nobody begin to run."""
        self._calling_nothing: set[int] = set()
        """Who waits for the lock, or for its stream before."""

    def __enter__(self) -> None:
        self._take(excluding=True)

    def __exit__(self, *exception: object) -> None:
        self._give(excluding=True)

    @contextmanager
    def beside(self) -> Iterator[None]:
        """The lock for what traces nothing: other threads' models run on."""
        self._take(excluding=False)
        try:
            yield
        finally:
            self._give(excluding=False)

    def taken(self) -> bool:
        """Whether another thread builds."""
        return self._builder not in (None, threading.get_ident())

    @contextmanager
    def running(self) -> Iterator[None]:
        """Held while a model runs: waits while another thread traces, or waits to."""
        me = threading.get_ident()
        with self._changed:
            if me not in self._running:
                self._changed.wait_for(lambda: self._builder == me or not (self._excluding or self._waiting))
            self._running[me] = self._running.get(me, 0) + 1
        try:
            yield
        finally:
            with self._changed:
                self._running[me] -= 1
                if not self._running[me]:
                    del self._running[me]
                    self._changed.notify_all()

    def _take(self, *, excluding: bool) -> None:
        me = threading.get_ident()
        with self._changed:
            if self._builder == me and (self._excluding or not excluding):
                self._hold(me, excluding=excluding)
                return
            self._calling_nothing.add(me)
            self._changed.notify_all()
        try:
            if excluding and me in self._running:  # while the others still launch what its stream may wait for
                wait_for_stream()
            with self._changed:
                self._wait(me, excluding=excluding)
                self._hold(me, excluding=excluding)  # at once, or a model would begin in between
        finally:
            with self._changed:
                self._calling_nothing.discard(me)
                self._changed.notify_all()

    def _hold(self, me: int, *, excluding: bool) -> None:
        self._builder = me
        self._depth += 1
        self._excluding += excluding

    def _wait(self, me: int, *, excluding: bool) -> None:
        """Until nobody else builds and, if excluding, nobody else runs."""

        def free() -> bool:
            alone = not excluding or self._running.keys() <= self._calling_nothing
            return alone and self._builder in (None, me)

        if not excluding:
            self._changed.wait_for(free)
            return
        try:
            self._waiting.add(me)
            while not self._changed.wait_for(free, timeout=PATIENCE_S):
                self._waiting.discard(me)
                self._changed.notify_all()
                self._changed.wait(PATIENCE_S)
                self._waiting.add(me)
        finally:
            self._waiting.discard(me)

    def _give(self, *, excluding: bool) -> None:
        with self._changed:
            self._excluding -= excluding
            self._depth -= 1
            if self._depth == 0:
                self._builder = None
            self._changed.notify_all()


PATIENCE_S = 2.0
"""How long one who waits to trace keeps others from beginning to run, before they may again for as long at most."""


def wait_for_stream() -> None:
    """Until this thread's CUDA stream has done all that was launched; at once where there is none.

    Not for the whole device, which may not be waited for while another thread captures there.
    """
    if torch.cuda.is_initialized():
        torch.cuda.current_stream().synchronize()


BUILD_LOCK = BuildLock()
"""Held over every compilation, warm-up and capture in the process."""


def own_code(function: Callable[..., Any], owner: str) -> Callable[..., Any]:
    """The same function with a code object of its own, so that workers do not share Dynamo's cache entries."""
    code = function.__code__.replace(co_name=f"{function.__name__}_{owner}")
    own = types.FunctionType(code, function.__globals__, code.co_name, function.__defaults__, function.__closure__)
    own.__kwdefaults__ = function.__kwdefaults__
    return own


def num_compilations() -> int:
    """Graphs that Dynamo has compiled in this process so far; it stands still once training does not warm up."""
    dynamo = sys.modules.get("torch._dynamo")  # not imported where nothing compiles: that takes a second
    return 0 if dynamo is None else int(dynamo.utils.counters["stats"]["unique_graphs"])


def record_graph(work: Callable[[], None], pool: Any = None) -> torch.cuda.CUDAGraph:
    """Capture what `work` launches on the current stream of this thread, which must not be a device's default one.

    Waits for the whole device first. Where drafters sum there meanwhile the wait ends, because none of them launches
    its sum before the others can (pipeline/collective.py).
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
        work()
    return graph
