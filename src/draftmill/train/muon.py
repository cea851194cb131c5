"""Muon for a drafter's matrices, AdamW for its vectors: momentum, made orthogonal, is the step.

Matrices of equal shape lie side by side in the flat buffers, so several of them go through the iteration as one batch.
One moment a matrix element instead of AdamW's two.

Source: Jordan et al., kellerjordan.github.io/posts/muon, as in torch.optim.Muon; match_rms_adamw: Liu et al.,
arXiv 2502.16982.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from draftmill.config import TrainConfig
from draftmill.step.flat import FlatParameters
from draftmill.train.optimizer import AdamWParts, FlatOptimizer, Moments

EPS = 1e-7
"""Smallest norm that a matrix is divided by, torch.optim.Muon's."""
BATCH_ELEMENTS = 2**25
"""Elements of equal-shaped matrices that are iterated as one batch; a larger matrix alone fills a GPU. Not tuned yet:
bench/optimizer.py measures it."""


@dataclass(frozen=True)
class MuonPart:
    """Matrices of equal shape that are updated together, each tensor [N, rows, columns]; weights: None where the
    masters serve. Made once, as AdamWPart."""

    master: torch.Tensor
    weights: torch.Tensor | None
    gradient: torch.Tensor
    momentum: torch.Tensor


class FlatMuon(FlatOptimizer):
    """Muon for matrices, AdamW for vectors.

    momentum       float32 [M]: of the matrices
    first, second  float32 [W - M]: the vectors' moments
    """

    def __init__(self, flat: FlatParameters, config: TrainConfig) -> None:
        self.momentum = torch.zeros_like(flat.master[: flat.num_matrix_elements])
        self._adamw = AdamWParts(flat, config, start=flat.num_matrix_elements)
        self.first, self.second = self._adamw.first, self._adamw.second
        self._parts = self._split(flat)
        super().__init__(flat, config, [part.master for part in self._parts] + self._adamw.masters())

    def _split(self, flat: FlatParameters) -> list[MuonPart]:
        stacks = flat.equal_matrices
        weights = stacks(flat.weights) if flat.weights is not flat.master else None
        parts = []
        for index, master in enumerate(stacks(flat.master)):
            size = max(1, BATCH_ELEMENTS // master[0].numel())
            chosen = [slice(first, first + size) for first in range(0, len(master), size)]
            gradient, momentum = stacks(flat.gradient_sum)[index], stacks(self.momentum)[index]
            parts += [
                MuonPart(
                    master[each],
                    weights[index][each] if weights is not None else None,
                    gradient[each],
                    momentum[each],
                )
                for each in chosen
            ]
        return parts

    def moments(self) -> Moments:
        """The matrices' momentum and the vectors' two moments by name."""
        return {"momentum_buffer": self.flat.named(self.momentum), **self._adamw.moments()}

    def apply(self, lr: torch.Tensor, factor: torch.Tensor) -> None:
        """Muon of the matrices at its own rate, which follows the same schedule, and AdamW of the vectors."""
        config = self.config
        matrix_lr = lr * (config.muon_lr / config.lr)
        for part in self._parts:
            scaled = torch.where(factor > 0, part.gradient.float() * factor, 0.0)
            part.momentum.lerp_(scaled, 1.0 - config.muon_momentum)
            ahead = scaled.lerp(part.momentum, config.muon_momentum) if config.muon_nesterov else part.momentum
            step = orthogonalized(ahead, config.muon_ns_coefficients, config.muon_ns_steps)
            rows, columns = part.master.shape[1:]
            if config.weight_decay:
                part.master.mul_(1.0 - matrix_lr * config.weight_decay)
            part.master.sub_(step.float() * (matrix_lr * rate_factor(config.muon_adjust_lr_fn, rows, columns)))
            if part.weights is not None:
                part.weights.copy_(part.master)
        self._adamw.apply(lr, factor, self.count)


def rate_factor(adjust_lr_fn: str, rows: int, columns: int) -> float:
    """What the rate is multiplied by for a matrix of this shape, so that steps are alike over shapes.

    original: sqrt(rows / columns), at least 1. match_rms_adamw: 0.2 sqrt(larger side), which makes a step as long as
    AdamW's usually is, so that AdamW's rates serve.
    """
    if adjust_lr_fn == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1.0, rows / columns))


def orthogonalized(matrices: torch.Tensor, coefficients: tuple[float, float, float], num_steps: int) -> torch.Tensor:
    """Matrices [N, rows, columns], each with its singular values brought near 1, in bfloat16.

    Newton-Schulz: x <- a x + (b x x' + c (x x')^2) x on the shorter side, after division by the norm.
    """
    linear, cubic, quintic = coefficients
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.bfloat16()
    x = x.mT if tall else x
    x = x / torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp(min=EPS)
    for _ in range(num_steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=cubic, alpha=quintic), x, beta=linear)
    return x.mT if tall else x
