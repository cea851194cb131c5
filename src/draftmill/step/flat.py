"""One drafter's parameters in flat buffers: float32 masters, compute-type weights, and gradients.

Owns the layout and the buffers. The module's parameters become views of `weights`, their gradients views of
`gradient`, so that norm, update, all-reduce and checkpoint each are one operation on one tensor. Matrices come first,
vectors after them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

ALIGNMENT = 64
"""Elements to which each tensor's offset is rounded up, so that every view starts on 128 bytes even in bfloat16."""


@dataclass(frozen=True)
class Place:
    """Where a named tensor lies in the flat buffers."""

    offset: int
    shape: torch.Size


class FlatParameters:
    """The flat buffers of a module on a device, and the views that its parameters are.

    master    float32 [W]; what the optimizer updates and checkpoints hold
    weights   [W], the compute type; the same tensor as `master` where that is float32
    gradient  [W], the compute type; the sum over the batch, not divided by the weights of the loss
    """

    def __init__(self, module: nn.Module, device: torch.device | str, dtype: torch.dtype) -> None:
        named = sorted(module.named_parameters(), key=lambda item: item[1].dim() < 2)
        self.places: dict[str, Place] = {}
        size = 0
        for name, parameter in named:
            if parameter.dim() < 2:
                self.num_matrix_elements = getattr(self, "num_matrix_elements", size)
            self.places[name] = Place(size, parameter.shape)
            size += -(-parameter.numel() // ALIGNMENT) * ALIGNMENT
        self.num_matrix_elements = getattr(self, "num_matrix_elements", size)
        self.size = size
        self.master = torch.zeros(size, device=device, dtype=torch.float32)
        for name, parameter in named:
            self.view(self.master, name).copy_(parameter.data)
        self.weights = self.master if dtype == torch.float32 else self.master.to(dtype)
        self.gradient = torch.zeros_like(self.weights)
        for name, parameter in named:
            parameter.data = self.view(self.weights, name)
            parameter.grad = self.view(self.gradient, name)
        module.to(device)  # buffers; parameters are there already

    def view(self, flat: torch.Tensor, name: str) -> torch.Tensor:
        """The named tensor's part of a flat buffer of this layout."""
        place = self.places[name]
        return flat[place.offset : place.offset + place.shape.numel()].view(place.shape)

    def named(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """All tensors of a flat buffer by name, as views."""
        return {name: self.view(flat, name) for name in self.places}

    def load(self, tensors: dict[str, torch.Tensor]) -> None:
        """Overwrite masters and weights in place. Raises ValueError, naming it, for a missing or misshapen tensor."""
        for name, place in self.places.items():
            given = tensors.get(name)
            if given is None or given.shape != place.shape:
                got = "nothing" if given is None else f"shape {tuple(given.shape)}"
                raise ValueError(f"tensor {name}: expected shape {tuple(place.shape)}, got {got}")
            self.view(self.master, name).copy_(given)
        self.sync()

    def sync(self) -> None:
        """Make the compute weights equal the masters."""
        if self.weights is not self.master:
            self.weights.copy_(self.master)
