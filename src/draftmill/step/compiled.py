"""The step with its trunk compiled, once, for the run's one shape.

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


def wait(state: StepState) -> None:
    """Until the current stream of the state's device is done."""
    if state.device.type == "cuda":
        torch.cuda.current_stream().synchronize()


class CompiledStep(EagerStep):
    """The eager pieces, the trunk compiled. Build and use it in one thread, and warm it up under BUILD_LOCK.

    Only the trunk has passes that a compiler fuses. The loss head is two products and, on CUDA, a kernel of our own;
    the rest are small integers.
    """

    name = "compiled"

    def __init__(self, state: StepState, attention: AttentionChoice | None = None) -> None:
        on_cuda = state.device.type == "cuda"
        super().__init__(state, attention or (flex_attention_choice if on_cuda else dense_attention_choice))
        if on_cuda:
            from draftmill.drafter.loss_kernel import ROW_WORK, ROW_WORK_FLOAT8

            self.row_work = ROW_WORK if state.float8 is None else ROW_WORK_FLOAT8
        self._trunk = compile_piece(EagerStep.trunk, f"{self.name}_{threading.get_native_id()}")
        self._traced: CompiledStep = self

    def warm_up(self) -> None:
        """Compile the trunk, on the buffers as they are. Leaves gradients and sums of no meaning."""
        full = self.state.shape.anchor_slots
        scored = full * (self.state.drafter_shape.block_size - 1)
        for _ in range(WARM_UPS):
            CompiledStep.run(self, scored, full)
        CompiledStep.evaluate(self, scored, full)  # a kernel without a slope is another one
        wait(self.state)

    def evaluate(self, num_scored: int, num_blocks: int) -> None:
        """Forward only, by the trunk that training compiled."""
        with torch.enable_grad():
            hidden = self.trunk().detach()
        with torch.no_grad():
            self.score(hidden, num_scored, num_blocks, with_slope=False)

    def trunk(self) -> torch.Tensor:
        """Static inputs -> hidden states of slots 1..K-1, [A*(K-1), H]."""
        return self._trunk(self._traced)

    def take_over(self, other: CompiledStep) -> None:
        """Run the trunk that another step over the same state has compiled."""
        self._trunk, self._traced, self.attention = other._trunk, other._traced, other.attention
