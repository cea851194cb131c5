"""Compiling and capturing from several threads (cases B30, B31 and B34), as far as it shows without a GPU."""

from __future__ import annotations

import ast
import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import draftmill
from draftmill.compiling import BUILD_LOCK, num_compilations, record_graph
from draftmill.config import TrainConfig
from draftmill.step.choose import build_step
from draftmill.step.compiled import compile_piece
from draftmill.target.step_compiled import CompiledForward
from draftmill.train.optimizer import FlatAdamW
from small_steps import small_state
from target_kinds import random_tokens, tiny_target

SOURCES = sorted(Path(str(draftmill.__file__)).parent.rglob("*.py"))
DYNAMOS_LIMIT = 8
"""Compilations of one code object that Dynamo remembers; the next one would run eagerly and say nothing."""


@pytest.fixture(autouse=True)
def _dynamo(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The compiler's front alone; and its settings as they were."""
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    torch._dynamo.config.error_on_recompile = False
    yield
    torch._dynamo.config.error_on_recompile = False
    torch._dynamo.reset()


def in_thread(work: Callable[[], Any]) -> Any:
    """What work returns in a thread of its own; raises what it raises."""
    found: dict[str, Any] = {}

    def run() -> None:
        try:
            found["value"] = work()
        except BaseException as error:
            found["error"] = error

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if "error" in found:
        raise found["error"]
    return found["value"]


def is_free() -> bool:
    """Whether another thread could build something now."""

    return not in_thread(BUILD_LOCK.taken)


def twice(x: torch.Tensor) -> torch.Tensor:
    return 2.0 * x


def test_a_second_shape_is_an_error_in_the_thread_that_compiled() -> None:
    """B31: since torch 2.12 what the main thread sets is not seen there, so the piece sets it where it is compiled."""

    def work() -> torch.Tensor:
        piece = compile_piece(twice, "worker")
        assert piece(torch.ones(4)).tolist() == [2.0] * 4
        before = num_compilations()
        with pytest.raises(Exception, match=r"(?i)recompil"):
            piece(torch.ones(5))
        assert num_compilations() == before
        return piece(torch.full((4,), 3.0))

    assert in_thread(work).tolist() == [6.0] * 4


def test_more_workers_than_dynamo_remembers_compile_each_their_own() -> None:
    """B31: nine and more shapes of one function, a worker each. Shared, the second would be a recompilation."""
    before, workers = num_compilations(), DYNAMOS_LIMIT + 3
    for number in range(1, workers + 1):
        piece = in_thread(lambda number=number: _compiled(number))
        assert piece == [2.0] * number
    assert num_compilations() == before + workers


def _compiled(number: int) -> list[float]:
    piece = compile_piece(twice, f"worker_{number}")
    with BUILD_LOCK:
        return piece(torch.ones(number)).tolist()


@contextmanager
def compiler_that_looks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Of each compilation, whether the lock was held."""
    held: list[bool] = []

    def backend(module: Any, _inputs: Any) -> Any:
        held.append(not is_free())
        return module.forward

    with monkeypatch.context() as patch:
        patch.setattr(torch, "compile", functools.partial(torch.compile.func, backend=backend))  # type: ignore[attr-defined]
        yield held


def test_a_drafters_step_is_compiled_under_the_lock_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """B30, B31: nobody else compiles, warms up or captures meanwhile; afterwards nothing is compiled any more."""
    state = small_state()
    with compiler_that_looks(monkeypatch) as held:
        built = build_step("compiled", state, FlatAdamW(state.flat, TrainConfig()))
        assert held
        assert all(held)
        count = len(held)
        assert is_free()
        built.step.run(0, 0)
        built.update()
    assert len(held) == count


def test_a_targets_layers_are_compiled_under_the_lock_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target("qwen3")
    held: list[bool] = []

    def backend(module: Any, _inputs: Any) -> Any:
        held.append(not is_free())
        return module.forward

    forward = CompiledForward(target, (1, 3), backend=backend)
    forward.apply()
    forward.run(random_tokens(2, 9), None)
    assert held
    assert all(held)
    assert is_free()
    forward.undo()


def test_a_graph_is_captured_on_the_threads_own_stream_and_minds_no_other_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """B34: in any other mode an allocation of pinned memory or NCCL's watch, in another thread, ends a capture."""
    asked: dict[str, Any] = {}

    @contextmanager
    def graph(_graph: Any, **options: Any) -> Iterator[None]:
        asked.update(options)
        yield

    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "this thread's stream")
    monkeypatch.setattr(torch.cuda, "graph", graph)
    done: list[bool] = []
    record_graph(lambda: done.append(True), pool="pool")
    assert done == [True]
    assert asked == {"pool": "pool", "stream": "this thread's stream", "capture_error_mode": "thread_local"}


def calls(name: str) -> list[tuple[str, ast.Call]]:
    """Every call in the package of a function whose dotted name ends so, with the file it is in."""
    found = []
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and f".{ast.unparse(node.func)}".endswith(f".{name}"):
                found.append((path.name, node))
    return found


def options_of(call: ast.Call) -> dict[str, str]:
    return {keyword.arg or "**": ast.unparse(keyword.value) for keyword in call.keywords}


def test_every_capture_in_the_package_minds_its_own_thread_alone() -> None:
    """B34, wherever somebody captures next: on a stream that is said, and in the mode for threads."""
    captures = calls("cuda.graph")
    assert captures
    for file, call in captures:
        options = options_of(call)
        assert options.get("capture_error_mode") == "'thread_local'", file
        assert "stream" in options, file


def test_nothing_in_the_package_uses_what_plain_threads_can_not() -> None:
    """B30: CUDA graph trees keep their state in thread-local storage that plain threads lack."""
    compilations = calls("torch.compile")
    assert compilations
    for file, call in compilations:
        assert not {"mode", "options"} & set(options_of(call)), file
    for name in ("make_graphed_callables", "cudagraph_mark_step_begin", "torch.jit.script"):
        assert calls(name) == []
