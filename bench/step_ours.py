"""Draftmill's own step for bench/step.py: eager, compiled and graphed over one replica's weights and buffers; in float8
captured, over another's."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.attention.flex_attention import flex_attention

from draftmill.compiling import record_graph
from draftmill.config import Float8Choice, TrainConfig
from draftmill.drafter.attention import Attention
from draftmill.drafter.float8 import check_float8
from draftmill.drafter.loss import LossRule
from draftmill.records import Blocks
from draftmill.step.compiled import CompiledStep, compile_piece
from draftmill.step.eager import EagerStep, default_attention, flex_attention_choice
from draftmill.step.graphed import GraphedStep
from draftmill.step.state import StepState
from draftmill.train.optimizer import FlatAdamW
from step_contender import Inputs


class Replica:
    """The state and optimizer that the three ways of running the step share."""

    def __init__(self, inputs: Inputs, float8: Float8Choice | None = None) -> None:
        check_float8(float8, inputs.shape, inputs.dtype, [inputs.device])
        self.inputs = inputs
        self.state = StepState(
            inputs.drafter(), inputs.head(), LossRule(inputs.gamma), inputs.slots, inputs.device, inputs.dtype, float8
        )
        self.optimizer = FlatAdamW(self.state.flat, TrainConfig())
        self._pieces: CompiledStep | None = None

    def eager(self) -> Ours:
        """The pieces as they are; on CUDA flex attention alone compiled."""
        return Ours(self, EagerStep(self.state, eager_attention).run, self._eager_update, strict=False)

    def compiled(self) -> Ours:
        """The compiled trunk, the other pieces, and the update: kernels of our own, or compiled on a CPU."""
        step, update = self._compile(), self._compiled_update()
        return Ours(self, lambda scored, used: CompiledStep.run(step, scored, used), update, strict=True)

    def graphed(self) -> Ours:
        """The same, captured and replayed."""
        if self.inputs.device.type != "cuda":
            raise ValueError(f"a CUDA graph needs a CUDA device, got {self.inputs.device}")
        step, update = self._compile(), self._compiled_update()
        step.warm_up()
        for _ in range(2):
            update()
        return Ours(self, step.run, record_graph(update).replay, strict=True)

    def _compile(self) -> CompiledStep:
        """One compilation for both: a graphed step's pieces also run without their graphs."""
        if self._pieces is None:
            self.state.load(self.inputs.features_TF, self.inputs.blocks)
            on_cuda = self.inputs.device.type == "cuda"
            self._pieces = GraphedStep(self.state) if on_cuda else CompiledStep(self.state)
            CompiledStep.warm_up(self._pieces)
        return self._pieces

    def _compiled_update(self) -> Callable[[], None]:
        if self.inputs.device.type == "cuda":
            return self._eager_update
        compiled = compile_piece(FlatAdamW.update, f"bench_update_{id(self)}")
        return lambda: compiled(self.optimizer, self.state.totals[1])

    def _eager_update(self) -> None:
        self.optimizer.update(self.state.totals[1])


def eager_attention(state: StepState) -> Callable[[Blocks], Attention]:
    """Flex attention compiled alone on CUDA, the default elsewhere."""
    if state.device.type != "cuda":
        return default_attention(state)
    return flex_attention_choice(state, torch.compile(flex_attention, dynamic=False))


class Ours:
    """One way of running the replica's step. `run` includes the copy of the batch into the static buffers."""

    def __init__(
        self, replica: Replica, run: Callable[[int, int], None], update: Callable[[], None], strict: bool
    ) -> None:
        self.replica, self._run, self._update, self.strict = replica, run, update, strict

    def run(self) -> None:
        """Load the batch, forward and backward, update."""
        replica = self.replica
        replica.state.load(replica.inputs.features_TF, replica.inputs.blocks)
        replica.state.begin()
        self._run(replica.inputs.num_scored, replica.inputs.work.anchors)
        self._update()

    def result(self) -> tuple[float, float]:
        """Loss and norm of its gradient."""
        total, weights = self.replica.state.totals.tolist()
        return total / weights, float(self.replica.optimizer.grad_norm)
