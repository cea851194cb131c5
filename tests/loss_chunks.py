"""One chunk of the loss head with its slope whole, as tests want to look at it."""

from __future__ import annotations

from typing import Any

import torch

from draftmill.drafter.loss import loss_chunk


def whole_chunk(
    hidden_RH: torch.Tensor, *arguments: Any, **options: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`loss_chunk`; the slope [R, H], or the rows themselves where none is wanted."""
    costs, weights, correct, slopes = loss_chunk(hidden_RH, *arguments, **options)
    return costs, weights, correct, hidden_RH if slopes is None else slopes.whole(hidden_RH.dtype)
