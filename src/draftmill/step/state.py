"""What one drafter replica owns on its device: weights, static input buffers, static outputs.

Every tensor here lives as long as the replica and never moves, so a captured graph may read and write it. Whoever
holds the state holds the buffers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from draftmill.config import Float8Choice
from draftmill.drafter.loss import LossRule
from draftmill.drafter.loss_float8 import Float8Head
from draftmill.drafter.network import Drafter
from draftmill.drafter.shape import DrafterShape
from draftmill.records import Blocks
from draftmill.step.flat import FlatParameters
from draftmill.target.head import TargetHead

CHUNK_ROWS = 1024
"""Rows of the loss head worked on at once, on a CPU."""
CHUNK_ROWS_CUDA = 2048
"""The same on CUDA; 0.6 GB of bf16 logits at a vocabulary of 151,936."""


@dataclass(frozen=True)
class StepShape:
    """The one shape of a run's drafter batches: T context slots, A anchor slots, and rows of a loss-head chunk.

    short_blocks: whether blocks may lack slots at their end (records.Blocks.absent_A).
    """

    context_slots: int
    anchor_slots: int
    chunk_rows: int
    short_blocks: bool = False


class StepState:
    """Weights and buffers of one replica. Built in the worker thread that runs the step.

    float8       which products are in it: the loss head's, or the drafter's own too, which is told so here
    features_TF  [T, L*H], the compute type; blocks: static inputs, overwritten by `load`
    last_TH      [T, H], the compute type; the target's last hidden state where the rule needs it, else [0, H]
    slope_RH     [A*(K-1) + 1, H], the compute type: d(loss)/d(hidden) of slots 1..K-1, and a last row for fillers
    sums         float32 [4 + 2K], all of it added over drafters; its parts, each counted since `begin`:
      totals     [2]: sum of w*cost and sum of w
      tokens     [2]: context tokens and supervised slots
      correct_K, scored_K  [K] each: right and supervised slots
    correct_AK   bool [A, K]: which slots of the latest batch were right
    """

    def __init__(
        self,
        drafter: Drafter,
        head: TargetHead,
        rule: LossRule,
        shape: StepShape,
        device: torch.device,
        dtype: torch.dtype,
        float8: Float8Choice | None = None,
        overwrite: bool | None = None,
    ) -> None:
        """overwrite: whether products write the gradients of matrices in place of autograd; by default on CUDA."""
        self.drafter, self.rule, self.shape, self.device, self.dtype = drafter, rule, shape, device, dtype
        self.float8 = float8
        self.head = head.to(device, dtype)
        if float8 is not None:
            self.head = Float8Head.of(self.head)
        if float8 == "all":
            drafter.use_float8()
        self.flat = FlatParameters(drafter, device, dtype)
        if device.type == "cuda" if overwrite is None else overwrite:
            self.flat.overwrite(drafter.write_gradients(lambda name: self.flat.view(self.flat.gradient, name)))
        size, blocks = drafter.shape, drafter.shape.block_size
        drafted = shape.anchor_slots * (blocks - 1)
        self.features_TF = torch.zeros(shape.context_slots, size.feature_size, device=device, dtype=dtype)
        last = shape.context_slots if rule.needs_target else 0
        self.last_TH = torch.zeros(last, size.hidden_size, device=device, dtype=dtype)
        self.blocks = Blocks.empty(shape.context_slots, shape.anchor_slots, device)
        self.slope_RH = torch.zeros(drafted + 1, size.hidden_size, device=device, dtype=dtype)
        self.correct_AK = torch.zeros(shape.anchor_slots, blocks, device=device, dtype=torch.bool)
        self.sums = torch.zeros(4 + 2 * blocks, device=device)
        self.totals, self.tokens, self.correct_K, self.scored_K = self.sums.split([2, 2, blocks, blocks])

    @property
    def drafter_shape(self) -> DrafterShape:
        """The drafter's own shape."""
        return self.drafter.shape

    def load(self, carried_TF: torch.Tensor, blocks: Blocks) -> None:
        """Copy a batch into the static inputs on the current stream.

        carried_TF [n <= T, L*H], any device and type: what the target gave. Where the rule needs the target's last
        hidden state, it follows the features: [n, (L+1)*H]. Raises RuntimeError for another width.
        """
        num_tokens, width = carried_TF.shape
        size = self.drafter_shape
        expected = size.feature_size + (size.hidden_size if self.rule.needs_target else 0)
        if width != expected:
            raise RuntimeError(f"what the target gave: expected {expected} numbers a token, got {width}")
        self.features_TF[:num_tokens].copy_(carried_TF[:, : size.feature_size], non_blocking=True)
        if self.rule.needs_target:
            self.last_TH[:num_tokens].copy_(carried_TF[:, size.feature_size :], non_blocking=True)
        self.blocks.copy_(blocks, non_blocking=True)

    def clear_inputs(self) -> None:
        """No features, no blocks."""
        self.features_TF.zero_()
        self.last_TH.zero_()
        self.blocks.copy_(Blocks.empty(self.shape.context_slots, self.shape.anchor_slots))

    def begin(self) -> None:
        """Start an optimizer step: ready for a gradient, no totals."""
        self.flat.clear_gradient()
        self.sums.zero_()
