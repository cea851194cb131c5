"""The exponential moving average of a drafter's masters: kept in the same update, used where drafts are counted.

Owns the averaged buffer and the swapping of weights for an evaluation. Training never reads it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from draftmill.step.flat import FlatParameters


class WeightAverage:
    """average <- d average + (1 - d) masters after each update, with d = min(decay, (1 + n) / (10 + n)) of the n-th.

    The warm-up lets the first weights fade at once; it is over after 9 / (1 - decay) updates.

    average  float32 [W]
    """

    def __init__(self, flat: FlatParameters, decay: float, masters: Sequence[torch.Tensor]) -> None:
        """masters: the pieces of the flat masters as the optimizer updates them. The very same tensors, so that a
        compiled update reads and writes each once."""
        self.flat, self.decay = flat, decay
        self.average = flat.master.clone()
        self._pieces = [
            (master, self.average.as_strided(master.shape, master.stride(), master.storage_offset()))
            for master in masters
        ]
        self._masters: torch.Tensor | None = None

    def update(self, count: torch.Tensor) -> None:
        """After update number `count` (int64 [], from 1)."""
        number = count.float()
        share = 1.0 - ((1.0 + number) / (10.0 + number)).clamp(max=self.decay)
        for master, average in self._pieces:
            average.lerp_(master, share)

    def show(self) -> None:
        """Compute with the average from now on, until `hide`. Nothing may be updated or saved meanwhile."""
        flat = self.flat
        if flat.weights is flat.master:
            self._masters = flat.master.clone()
        flat.weights.copy_(self.average)

    def hide(self) -> None:
        """Compute with the masters again, bit for bit what they were."""
        if self._masters is not None:
            self.flat.master.copy_(self._masters)
            self._masters = None
        else:
            self.flat.sync()

    def reset(self) -> None:
        """Begin with the masters as they are."""
        self.average.copy_(self.flat.master)

    def named(self) -> dict[str, torch.Tensor]:
        """The average by name, as views."""
        return self.flat.named(self.average)

    def restore(self, saved: dict[str, torch.Tensor]) -> None:
        """Go on from a saved average."""
        for name, view in self.named().items():
            view.copy_(saved[name])
