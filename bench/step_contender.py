"""What the contenders of bench/step.py share: the numbers that all of them work on, and what each must offer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from draftmill.config import gamma_for
from draftmill.drafter.network import Drafter
from draftmill.drafter.shape import DrafterShape
from draftmill.records import Blocks
from draftmill.step.workload import (
    Workload,
    random_blocks,
    random_drafter,
    random_features,
    random_head,
    slots_for,
)
from draftmill.target.head import TargetHead


@dataclass
class Inputs:
    """One batch for everybody: the same tokens, features and anchors, and the same weights whenever asked for.

    blocks on the host, as a loader gives them; features_TF [T, L*H] on the device
    """

    shape: DrafterShape
    work: Workload
    device: torch.device
    dtype: torch.dtype

    def __post_init__(self) -> None:
        self.slots = slots_for(self.work, self.shape.block_size, self.device)
        self.blocks: Blocks = random_blocks(self.work, self.shape, self.slots)
        self.features_TF = random_features(self.work, self.shape, self.device, self.dtype)
        self.gamma = gamma_for(self.shape.block_size)

    def drafter(self) -> Drafter:
        """A new float32 drafter with the weights that all begin with."""
        return random_drafter(self.shape, self.device)

    def head(self) -> TargetHead:
        """A new copy of the target's vocabulary matrices."""
        return random_head(self.shape, self.device, self.dtype)

    @property
    def token_rows(self) -> torch.Tensor:
        """Token ids [documents, tokens of each] on the device."""
        tokens = self.blocks.tokens_T[: self.work.context_tokens].to(self.device)
        return tokens.view(self.work.documents, self.work.tokens_each)

    @property
    def anchor_places(self) -> torch.Tensor:
        """Anchors [A] as places in the packed context, on the device."""
        return self.blocks.anchors_A[: self.work.anchors].long().to(self.device)

    @property
    def num_scored(self) -> int:
        """Supervised slots of the batch."""
        return self.work.anchors * (self.shape.block_size - 1)

    @property
    def weight_sum(self) -> float:
        """The loss's denominator."""
        slots = torch.arange(self.shape.block_size - 1, dtype=torch.float64)
        return self.work.anchors * float(torch.exp(-slots / self.gamma).sum())


class Contender(Protocol):
    """Somebody's optimizer step on the inputs: forward, backward, clip, AdamW on float32 masters, learning rate 0."""

    strict: bool
    """Whether a recompilation while it runs is an error."""

    def run(self) -> None:
        """One step."""

    def result(self) -> tuple[float, float]:
        """Of the latest step: loss (sum of w*CE over sum of w), and norm of its gradient before clipping."""
