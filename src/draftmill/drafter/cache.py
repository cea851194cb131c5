"""Context keys and values of one sequence being decoded, kept between blocks.

Owns the buffers and their length. Block keys and values never enter: only what the target has verified does.
"""

from __future__ import annotations

import torch

from draftmill.drafter.shape import DrafterShape


class DrafterCache:
    """Preallocated buffers [capacity, M, D] for keys and values of each layer, and the number of tokens in them."""

    def __init__(self, shape: DrafterShape, capacity: int, device: torch.device | str, dtype: torch.dtype) -> None:
        size = (shape.num_layers, 2, capacity, shape.num_kv_heads, shape.head_dim)
        self.buffer = torch.zeros(size, device=device, dtype=dtype)
        self.capacity = capacity
        self.length = 0

    def append(self, keys_values: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Add N tokens: for each layer keys and values [N, M, D]. Raises RuntimeError where they do not fit."""
        count = keys_values[0][0].shape[0]
        if self.length + count > self.capacity:
            raise RuntimeError(f"a cache of {self.capacity} tokens can't take {count} more after {self.length}")
        for index, (keys, values) in enumerate(keys_values):
            self.buffer[index, 0, self.length : self.length + count] = keys
            self.buffer[index, 1, self.length : self.length + count] = values
        self.length += count

    def crop(self, length: int) -> None:
        """Forget all tokens from `length` on."""
        if not 0 <= length <= self.length:
            raise RuntimeError(f"a cache of {self.length} tokens can't be cropped to {length}")
        self.length = length

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [length, M, D] of a layer, as views."""
        return self.buffer[index, 0, : self.length], self.buffer[index, 1, : self.length]

    def visible(self, positions_K: torch.Tensor, window: int | None) -> torch.Tensor | None:
        """What a block at positions [K] sees of [cached | block]: boolean [K, length + K], or None for all of it."""
        if window is None:
            return None
        device = positions_K.device
        cached = torch.arange(self.length, device=device)[None, :]
        slots = torch.arange(positions_K.shape[0], device=device)
        near = positions_K[:, None] - cached < window
        return torch.cat([near, slots[None, :] <= slots[:, None]], dim=1)
