"""One drafter's parameters in flat buffers: float32 masters, compute-type weights, and gradients.

Owns the layout and the buffers. The module's parameters become views of `weights`, their gradients views of
`gradient`, so that norm, update, all-reduce and checkpoint each are one operation on one tensor. Matrices come first,
those of equal shape side by side, and vectors after them.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection
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

    @property
    def padded(self) -> int:
        """Elements up to the next tensor."""
        return -(-self.shape.numel() // ALIGNMENT) * ALIGNMENT


class FlatParameters:
    """The flat buffers of a module on a device, and the views that its parameters are.

    master        float32 [W]; what the optimizer updates and checkpoints hold
    weights       [W], the compute type; the same tensor as `master` where that is float32
    gradient      [W], the compute type; the sum over the batch, not divided by the weights of the loss
    overwritten   names of the tensors whose gradient a backward pass overwrites; to the others it adds
    gradient_sum  [W]; what is summed over drafters and updated from: `gradient` itself, or after `sum_in_float32` a
                  float32 buffer to which the batches of a step are added one by one
    """

    def __init__(self, module: nn.Module, device: torch.device | str, dtype: torch.dtype) -> None:
        matrices = [item for item in module.named_parameters() if item[1].dim() >= 2]
        vectors = [item for item in module.named_parameters() if item[1].dim() < 2]
        # Stable: among equal shapes the module's own order stays.
        matrices.sort(key=lambda item: tuple(item[1].shape))
        named = [*matrices, *vectors]
        self.places: dict[str, Place] = {}
        self.size = 0
        for name, parameter in named:
            self.places[name] = Place(self.size, parameter.shape)
            self.size += self.places[name].padded
        self.num_matrix_elements = sum(self.places[name].padded for name, _ in matrices)
        self.master = torch.zeros(self.size, device=device, dtype=torch.float32)
        for name, parameter in named:
            self.view(self.master, name).copy_(parameter.data)
        self.weights = self.master if dtype == torch.float32 else self.master.to(dtype)
        self.gradient = torch.zeros_like(self.weights)
        self.gradient_sum = self.gradient
        self.overwritten: frozenset[str] = frozenset()
        self._added = [self.gradient]
        self._overwritten: list[torch.Tensor] = []
        for name, parameter in named:
            parameter.data = self.view(self.weights, name)
            parameter.grad = self.view(self.gradient, name)
        module.to(device)  # buffers; parameters are there already

    def view(self, flat: torch.Tensor, name: str) -> torch.Tensor:
        """The named tensor's part of a flat buffer of this layout."""
        place = self.places[name]
        return flat[place.offset : place.offset + place.shape.numel()].view(place.shape)

    def named(self, flat: torch.Tensor, first: int = 0) -> dict[str, torch.Tensor]:
        """All tensors of a flat buffer by name, as views; of a buffer that holds the elements from `first` on, those
        that lie in it."""
        found = {}
        for name, place in self.places.items():
            start = place.offset - first
            if start >= 0 and start + place.padded <= flat.numel():
                found[name] = flat[start : start + place.shape.numel()].view(place.shape)
        return found

    def equal_matrices(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """The matrices in a flat buffer that holds at least them, as views [N, rows, columns], one a shape."""
        matrices = [place for place in self.places.values() if place.offset < self.num_matrix_elements]
        stacks = []
        for shape, group in itertools.groupby(matrices, key=lambda place: place.shape):
            places = list(group)
            start, step = places[0].offset, places[0].padded
            rows = flat[start : start + len(places) * step].view(len(places), step)
            stacks.append(rows[:, : shape.numel()].unflatten(1, tuple(shape)))
        return stacks

    def overwrite(self, names: Collection[str]) -> None:
        """From now on a backward pass leaves these gradients whole, whatever was there before."""
        self.overwritten = frozenset(names)
        self._added, self._overwritten = [], []
        groups = itertools.groupby(self.places.items(), key=lambda item: item[0] in self.overwritten)
        for is_overwritten, group in groups:
            places = [place for _, place in group]
            part = self.gradient[places[0].offset : places[-1].offset + places[-1].padded]
            (self._overwritten if is_overwritten else self._added).append(part)

    def sum_in_float32(self) -> None:
        """From now on add the batches of a step in float32, whatever the compute type is; for steps of several."""
        if self.gradient.dtype != torch.float32 or self.overwritten:
            self.gradient_sum = torch.zeros_like(self.master)

    def add_gradient(self) -> None:
        """A batch's gradient is complete: where sums are kept apart, add it to them and make ready for the next."""
        if self.gradient_sum is not self.gradient:
            self.gradient_sum.add_(self.gradient)
            self._clear_added()

    def clear_gradient(self) -> None:
        """Make ready for a step's first batch: no sum, and no gradient where a backward pass would add to it."""
        self._clear_added()
        if self.gradient_sum is not self.gradient:
            self.gradient_sum.zero_()

    def drop_gradient(self) -> None:
        """A batch has no backward pass: clear what one would have overwritten. What adds up stays, a step's sum with
        it."""
        for part in self._overwritten:
            part.zero_()

    def _clear_added(self) -> None:
        for part in self._added:
            part.zero_()

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
