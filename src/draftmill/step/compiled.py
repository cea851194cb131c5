"""The step's pieces compiled: one compilation a piece, for the run's one shape.

Dynamo is not thread-safe and its limits are per thread since torch 2.12, so compiling happens under one lock in the
process, every worker compiles code objects of its own, and a recompilation after that is an error that names the guard.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from draftmill.compiling import own_code
from draftmill.step.eager import AttentionChoice, EagerStep, dense_attention_choice, flex_attention_choice
from draftmill.step.state import StepState


def compile_piece(function: Callable[..., Any], owner: str) -> Callable[..., Any]:
    """Compile a method's function for one shape; a second shape raises instead of compiling again."""
    torch._dynamo.config.error_on_recompile = True
    return torch.compile(own_code(function, owner), dynamic=False)


WARM_UPS = 3
"""Runs before a step is used or captured: compilation, lazy initialisation and autotuning are done by then."""


class CompiledStep(EagerStep):
    """The eager pieces, each compiled once. Build and use it in one thread, and warm it up under BUILD_LOCK."""

    name = "compiled"

    def __init__(self, state: StepState, attention: AttentionChoice | None = None) -> None:
        on_cuda = state.device.type == "cuda"
        super().__init__(state, attention or (flex_attention_choice if on_cuda else dense_attention_choice))
        owner = f"{self.name}_{threading.get_native_id()}"
        self._trunk = compile_piece(EagerStep.trunk, owner)
        self._rows = compile_piece(EagerStep.rows, owner)
        self._chunk = compile_piece(EagerStep.chunk, owner)
        self._count = compile_piece(EagerStep.count, owner)

    def warm_up(self) -> None:
        """Compile every piece on the buffers as they are. Leaves gradients and sums of no meaning."""
        full = self.state.shape.anchor_slots
        scored = full * (self.state.drafter_shape.block_size - 1)
        for _ in range(WARM_UPS):
            CompiledStep.run(self, scored, full)
        if self.state.device.type == "cuda":
            torch.cuda.current_stream().synchronize()

    def evaluate(self, num_scored: int, num_blocks: int) -> None:
        """Forward only, by the pieces that training compiled; the slope is made with them and not used."""
        with torch.enable_grad():
            hidden = self.trunk().detach()
        with torch.no_grad():
            self.score(hidden, num_scored, num_blocks, with_slope=True)

    def trunk(self) -> torch.Tensor:
        """Static inputs -> hidden states [A*K, H]."""
        return self._trunk(self)

    def rows(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rows, labels and weights of the loss head."""
        return self._rows(self)

    def chunk(
        self, hidden_QH: torch.Tensor, rows: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor, with_slope: bool
    ) -> None:
        """One chunk of the loss head."""
        self._chunk(self, hidden_QH, rows, labels, weights, with_slope)

    def count(self) -> None:
        """Add the batch's right and supervised slots to the counts."""
        self._count(self)
