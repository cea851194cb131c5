"""What everything that compiles or captures in this process goes through: one lock, code objects of a worker's own.

Dynamo is not thread-safe: it compiles one thing at a time, and while it traces, compiled code that another thread calls
raises, for the mark of tracing is the process's. Nor may a captured graph see another thread's set-up. So whoever
compiles, warms up or captures holds the lock, and whoever runs a model says so: the one waits for the other. Owns no
model and no step.
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
    """A lock for building, which a thread may take again, and which keeps the others' running models out meanwhile.

    A thread may build inside what it runs, and run inside what it builds. Of several that want to build from inside
    what they run each lets the others go first: where they wait they call nothing.

    Building waits for the device (a capture begins so), which may wait for what another thread has yet to launch: a
    target for a drafter's read of a slot, that one for the sum over all drafters. So who builds from inside what it
    runs first waits for its stream while the others still run.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._builder: int | None = None
        self._depth = 0
        self._running: dict[int, int] = {}
        self._waiting: set[int] = set()
        """Who wants to build, and lets nobody begin to run."""
        self._calling_nothing: set[int] = set()
        """Those, and who waits for its stream before."""

    def __enter__(self) -> None:
        me = threading.get_ident()
        if self._builder != me:
            self._become_builder(me)
        self._depth += 1

    def _become_builder(self, me: int) -> None:
        with self._changed:
            self._calling_nothing.add(me)
            self._changed.notify_all()
        try:
            if me in self._running:
                wait_for_stream()
            with self._changed:
                self._waiting.add(me)
                try:
                    self._changed.wait_for(
                        lambda: self._builder is None and self._running.keys() <= self._calling_nothing
                    )
                    self._builder = me
                finally:
                    self._waiting.discard(me)
        finally:
            with self._changed:
                self._calling_nothing.discard(me)
                self._changed.notify_all()

    def __exit__(self, *exception: object) -> None:
        with self._changed:
            self._depth -= 1
            if self._depth == 0:
                self._builder = None
                self._changed.notify_all()

    def taken(self) -> bool:
        """Whether another thread builds."""
        return self._builder not in (None, threading.get_ident())

    @contextmanager
    def running(self) -> Iterator[None]:
        """Held while a model runs: waits while another thread builds, or waits to."""
        me = threading.get_ident()
        with self._changed:
            if me not in self._running:
                self._changed.wait_for(lambda: self._builder == me or (self._builder is None and not self._waiting))
            self._running[me] = self._running.get(me, 0) + 1
        try:
            yield
        finally:
            with self._changed:
                self._running[me] -= 1
                if not self._running[me]:
                    del self._running[me]
                    self._changed.notify_all()


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
    """Capture what `work` launches on the current stream of this thread, which must not be a device's default one."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
        work()
    return graph
