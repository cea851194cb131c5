"""AdamW on a drafter's flat buffers, and what every optimizer of a replica does: clip, update, the copy to the compute
type and the moving average in one pass.

Every number that changes from step to step is a device tensor, so the update can be captured. A gradient that is not
finite reaches neither the weights nor, thereby, the next step.

Source: Loshchilov & Hutter, arXiv 1711.05101, as in torch.optim.AdamW.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from draftmill.config import TrainConfig
from draftmill.step.flat import FlatParameters
from draftmill.train.ema import WeightAverage

CPU_PIECE = 2**17
"""Elements updated together on a CPU: five buffers of them, 2.5 MB, stay near a core."""

Moments = dict[str, dict[str, torch.Tensor]]
"""An optimizer's tensors: kind, then the drafter's tensor by name."""


class FlatOptimizer(ABC):
    """The optimizer of one replica.

    count          int64 []: updates done
    lr             float32 []: set before each update
    grad_norm      float32 []: norm of the latest gradient, after division by the loss's weights and before clipping
    average        of the masters, None without `train.ema_decay`

    Made once it is decided how the flat gradient is summed, see `FlatParameters.sum_in_float32`.
    """

    def __init__(self, flat: FlatParameters, config: TrainConfig, masters: Sequence[torch.Tensor]) -> None:
        """masters: the pieces of the flat masters that `apply` updates, each once."""
        self.flat, self.config = flat, config
        decay = config.ema_decay
        self.average = WeightAverage(flat, decay, masters) if decay is not None else None
        device = flat.master.device
        self.count = torch.zeros((), dtype=torch.int64, device=device)
        self.lr = torch.zeros((), device=device)
        self.grad_norm = torch.zeros((), device=device)

    @abstractmethod
    def moments(self) -> Moments:
        """What it remembers of past gradients, as views by the names under which a checkpoint holds them."""

    @abstractmethod
    def apply(self, lr: torch.Tensor, factor: torch.Tensor) -> None:
        """Move masters and weights. lr: float32 []; factor: float32 [], of the gradient, 0 where it is not finite."""

    def reset(self) -> None:
        """Forget all updates."""
        for tensor in (self.count, self.lr, self.grad_norm):
            tensor.zero_()
        for named in self.moments().values():
            for view in named.values():
                view.zero_()
        if self.average is not None:
            self.average.reset()

    def restore(self, moments: Moments, count: int) -> None:
        """Go on from saved moments after `count` updates. Raises RuntimeError where they are another optimizer's."""
        own = self.moments()
        if moments.keys() != own.keys():
            raise RuntimeError(f"the optimizer's moments are {', '.join(own)}, got {', '.join(moments)}")
        for kind, named in own.items():
            for name, view in named.items():
                view.copy_(moments[kind][name])
        self.count.fill_(count)

    def update(self, weight_sum: torch.Tensor) -> None:
        """One update from the flat gradient, which is divided by `weight_sum` (float32 [], the loss's denominator)."""
        with torch.no_grad():
            scale = 1.0 / weight_sum.clamp(min=1e-12)
            self.grad_norm.copy_(self._norm() * scale)
            finite = torch.isfinite(self.grad_norm)
            clip = (self.config.clip / (self.grad_norm + 1e-6)).clamp(max=1.0)
            self.count += 1
            self.apply(torch.where(finite, self.lr, 0.0), torch.where(finite, scale * clip, 0.0))
            if self.average is not None:
                self.average.update(self.count)

    def _norm(self) -> torch.Tensor:
        """Norm of the flat gradient, float32 []."""
        gradient = self.flat.gradient_sum
        if gradient.is_cuda:
            return torch.linalg.vector_norm(gradient, dtype=torch.float32)
        squares = [piece.float().square().sum() for piece in gradient.split(CPU_PIECE)]
        return torch.stack(squares).sum().sqrt()


@dataclass(frozen=True)
class AdamWPart:
    """Equal pieces of flat buffers that are updated together; weights: None where the masters serve.

    The pieces are made once: inside a compiled update they are inputs that do not overlap, so nothing is copied.
    """

    master: torch.Tensor
    weights: torch.Tensor | None
    gradient: torch.Tensor
    first: torch.Tensor
    second: torch.Tensor
    decay: float


class AdamWParts:
    """AdamW's moments for the elements of the flat buffers from `start` on, and the pieces in which it goes over them.

    first, second  float32 [W - start]
    """

    def __init__(self, flat: FlatParameters, config: TrainConfig, start: int = 0) -> None:
        self.flat, self.config, self.start = flat, config, start
        self._update = adamw_update
        if flat.master.is_cuda:
            from draftmill.train import adamw_kernel

            self._update = adamw_kernel.adamw_update
        self.first = torch.zeros_like(flat.master[start:])
        self.second = torch.zeros_like(flat.master[start:])
        middle, end = max(start, flat.num_matrix_elements), flat.size
        bounds = ((start, middle, config.weight_decay), (middle, end, 0.0))
        self.parts = [
            self._part(first, min(first + size, stop), decay)
            for begin, stop, decay in bounds
            # On a CPU small enough to stay in its cache over the update's dozen passes.
            for size in (stop - begin if flat.master.is_cuda else CPU_PIECE,)
            for first in range(begin, stop, max(1, size))
        ]

    def _part(self, first: int, stop: int, decay: float) -> AdamWPart:
        flat, whole, own = self.flat, slice(first, stop), slice(first - self.start, stop - self.start)
        weights = flat.weights[whole] if flat.weights is not flat.master else None
        return AdamWPart(
            flat.master[whole], weights, flat.gradient_sum[whole], self.first[own], self.second[own], decay
        )

    def masters(self) -> list[torch.Tensor]:
        """The masters, piece by piece."""
        return [part.master for part in self.parts]

    def moments(self) -> Moments:
        """Both moments by name."""
        named = self.flat.named
        return {"exp_avg": named(self.first, self.start), "exp_avg_sq": named(self.second, self.start)}

    def apply(self, lr: torch.Tensor, factor: torch.Tensor, count: torch.Tensor) -> None:
        """AdamW of every piece; count: int64 [], this update's number from 1."""
        beta1, beta2 = self.config.betas
        corrections = (1.0 - beta1 ** count.float(), 1.0 - beta2 ** count.float())
        for part in self.parts:
            self._update(part, (lr, factor, *corrections), (beta1, beta2, self.config.eps))


def adamw_update(
    part: AdamWPart,
    scalars: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    constants: tuple[float, float, float],
) -> None:
    """AdamW in place. scalars: device tensors lr, factor on the gradient, and the two bias corrections. constants: the
    betas and epsilon."""
    lr, factor, correction1, correction2 = scalars
    beta1, beta2, eps = constants
    scaled = torch.where(factor > 0, part.gradient.float() * factor, 0.0)
    part.first.lerp_(scaled, 1.0 - beta1)
    part.second.mul_(beta2).addcmul_(scaled, scaled, value=1.0 - beta2)
    denominator = (part.second / correction2).sqrt_().add_(eps)
    if part.decay:
        part.master.mul_(1.0 - lr * part.decay)
    part.master.sub_(part.first / denominator * (lr / correction1))
    if part.weights is not None:
        part.weights.copy_(part.master)


class FlatAdamW(FlatOptimizer):
    """AdamW for all of a drafter; decoupled weight decay on matrices only.

    first, second  float32 [W]: the moments
    """

    def __init__(self, flat: FlatParameters, config: TrainConfig) -> None:
        self._adamw = AdamWParts(flat, config)
        super().__init__(flat, config, self._adamw.masters())
        self.first, self.second = self._adamw.first, self._adamw.second

    def moments(self) -> Moments:
        """Both moments by name."""
        return self._adamw.moments()

    def apply(self, lr: torch.Tensor, factor: torch.Tensor) -> None:
        """AdamW of matrices and vectors."""
        self._adamw.apply(lr, factor, self.count)
