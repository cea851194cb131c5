"""What everything that compiles or captures in this process goes through: one lock, code objects of a worker's own.

Dynamo is not thread-safe and a captured graph may not see another thread's set-up, so whoever compiles, warms up or
captures holds the lock. Owns no model and no step.
"""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Callable
from typing import Any

import torch

BUILD_LOCK = threading.RLock()
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
