"""AdamW on a drafter's flat buffers: clip, update and the copy to the compute type in one pass.

Every number that changes from step to step is a device tensor, so the update can be captured. A gradient that is not
finite reaches neither the weights nor, thereby, the next step.

Source: Loshchilov & Hutter, arXiv 1711.05101, as in torch.optim.AdamW.
"""

from __future__ import annotations

import torch

from draftmill.config import TrainConfig
from draftmill.step.flat import FlatParameters

CPU_PIECE = 2**17
"""Elements updated together on a CPU: five buffers of them, 2.5 MB, stay near a core."""


class FlatAdamW:
    """The optimizer of one replica.

    first, second  float32 [W]: the moments
    count          int64 []: updates done
    lr             float32 []: set before each update
    grad_norm      float32 []: norm of the latest gradient, after division by the loss's weights and before clipping
    """

    def __init__(self, flat: FlatParameters, config: TrainConfig) -> None:
        self.flat, self.config = flat, config
        self._has_copy = flat.weights is not flat.master
        device = flat.master.device
        self.first = torch.zeros_like(flat.master)
        self.second = torch.zeros_like(flat.master)
        self.count = torch.zeros((), dtype=torch.int64, device=device)
        self.lr = torch.zeros((), device=device)
        self.grad_norm = torch.zeros((), device=device)

    def reset(self) -> None:
        """Forget all updates."""
        for tensor in (self.first, self.second, self.count, self.lr, self.grad_norm):
            tensor.zero_()

    def update(self, weight_sum: torch.Tensor) -> None:
        """One update from the flat gradient, which is divided by `weight_sum` (float32 [], the loss's denominator)."""
        with torch.no_grad():
            flat, config = self.flat, self.config
            scale = 1.0 / weight_sum.clamp(min=1e-12)
            self.grad_norm.copy_(self._norm() * scale)
            finite = torch.isfinite(self.grad_norm)
            clip = (config.clip / (self.grad_norm + 1e-6)).clamp(max=1.0)
            factor = torch.where(finite, scale * clip, 0.0)
            lr = torch.where(finite, self.lr, 0.0)
            self.count += 1
            beta1, beta2 = config.betas
            corrections = (1.0 - beta1 ** self.count.float(), 1.0 - beta2 ** self.count.float())
            for part, decay in self._parts():
                adamw_update(
                    flat.master[part],
                    self.first[part],
                    self.second[part],
                    flat.gradient[part],
                    flat.weights[part] if self._has_copy else None,
                    (lr, factor, *corrections),
                    (beta1, beta2, config.eps, decay),
                )

    def _norm(self) -> torch.Tensor:
        """Norm of the flat gradient, float32 []."""
        gradient = self.flat.gradient
        if gradient.is_cuda:
            return torch.linalg.vector_norm(gradient, dtype=torch.float32)
        squares = [piece.float().square().sum() for piece in gradient.split(CPU_PIECE)]
        return torch.stack(squares).sum().sqrt()

    def _parts(self) -> list[tuple[slice, float]]:
        """Parts of the flat buffers that are updated together, and the weight decay of each: none on vectors.

        On a CPU they are small enough to stay in its cache over the update's dozen passes.
        """
        flat = self.flat
        bounds = ((0, flat.num_matrix_elements, self.config.weight_decay), (flat.num_matrix_elements, flat.size, 0.0))
        if flat.master.is_cuda:
            return [(slice(start, stop), decay) for start, stop, decay in bounds if stop > start]
        return [
            (slice(first, min(first + CPU_PIECE, stop)), decay)
            for start, stop, decay in bounds
            for first in range(start, stop, CPU_PIECE)
        ]


def adamw_update(
    master: torch.Tensor,
    first: torch.Tensor,
    second: torch.Tensor,
    gradient: torch.Tensor,
    weights: torch.Tensor | None,
    scalars: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    constants: tuple[float, float, float, float],
) -> None:
    """AdamW in place on equal pieces of flat buffers; weights: the compute type's copy, None where masters serve.

    scalars: device tensors lr, factor on the gradient, and the two bias corrections. constants: the betas, epsilon and
    decoupled weight decay.
    """
    lr, factor, correction1, correction2 = scalars
    beta1, beta2, eps, decay = constants
    scaled = torch.where(factor > 0, gradient.float() * factor, 0.0)
    first.lerp_(scaled, 1.0 - beta1)
    second.mul_(beta2).addcmul_(scaled, scaled, value=1.0 - beta2)
    denominator = (second / correction2).sqrt_().add_(eps)
    if decay:
        master.mul_(1.0 - lr * decay)
    master.sub_(first / denominator * (lr / correction1))
    if weights is not None:
        weights.copy_(master)
