"""The step captured by hand as CUDA graphs, in the worker's own thread and stream.

    load ─► [trunk + rows] ─► [chunk 0] [chunk 1] ... as many as have rows ─► [count] ─► [backward] ─► ... ─► [update]

Each bracket is a graph over the replica's static buffers. The graphs share one memory pool and are replayed in the
order of their capture, so what one leaves for the next (hidden states, activations) stays valid in between. Input
shapes are the state's; outputs are the state's buffers and are overwritten by the next run. It is a compiled step that
is captured, so whatever the compiler fuses stays fused.

Capture runs with capture_error_mode="thread_local": other threads may allocate, pin and launch meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

from draftmill.compiling import record_graph
from draftmill.step.compiled import CompiledStep
from draftmill.step.state import StepState


class GraphedStep(CompiledStep):
    """The compiled step's pieces, replayed. `warm_up` captures them; an evaluation stops before the backward pass."""

    name = "graphed"

    def __init__(self, state: StepState) -> None:
        if state.device.type != "cuda":
            raise ValueError(f"a CUDA graph needs a CUDA device, got {state.device}")
        super().__init__(state)
        self._is_warm = False
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: dict[str | int, torch.cuda.CUDAGraph] = {}
        self._hidden: torch.Tensor | None = None
        self._kept: tuple[torch.Tensor, ...] = ()

    def warm_up(self) -> None:
        """Warm up on the current stream and capture every piece there. Leaves gradients and sums of no meaning."""
        if not self._is_warm:
            CompiledStep.warm_up(self)

        def first() -> None:
            self._hidden = CompiledStep.trunk(self)
            with torch.no_grad():
                self._kept = (self._hidden.detach(), *CompiledStep.rows(self))

        def count() -> None:
            with torch.no_grad():
                CompiledStep.count(self)

        def backward() -> None:
            assert self._hidden is not None
            self._hidden.backward(self.state.slope_RH[:-1])

        self._record("first", first)
        for index in range(self.num_chunks):
            self._record(index, lambda index=index: self._chunk_at(index))  # type: ignore[misc]
        self._record("count", count)
        self._record("backward", backward)

    def take_over(self, other: CompiledStep) -> None:
        """Capture the trunk that another step over the same state has compiled, and warmed up."""
        super().take_over(other)
        self._is_warm = True

    def running(self) -> AbstractContextManager[None]:
        """Nothing: a replay calls no code that is compiled."""
        return nullcontext()

    def run(self, num_scored: int, num_blocks: int) -> None:
        """Replay one batch. Raises RuntimeError before `warm_up`."""
        self.evaluate(num_scored, num_blocks)
        self._graphs["backward"].replay()

    def evaluate(self, num_scored: int, num_blocks: int) -> None:
        """Replay all but the backward pass. Raises RuntimeError before `warm_up`."""
        if "backward" not in self._graphs:
            raise RuntimeError("a graphed step must be warmed up before it runs")
        self._graphs["first"].replay()
        for index in range(self.chunks_to_run(num_scored, num_blocks)):
            self._graphs[index].replay()
        self._graphs["count"].replay()

    def _chunk_at(self, index: int) -> None:
        hidden, rows, labels, weights = self._kept
        part = slice(index * self.chunk_rows, (index + 1) * self.chunk_rows)
        with torch.no_grad():
            CompiledStep.chunk(self, hidden, rows[part], labels[part], weights[part], True)

    def _record(self, name: str | int, work: Callable[[], None]) -> None:
        self._graphs[name] = record_graph(work, self._pool)
