"""How the next token is chosen from logits: greedy, or sampled from random numbers that belong to the prompt.

Owns temperature, top-k, top-p and the random numbers. A prompt's numbers follow from (seed, stream) alone, so which
other prompts shared its batch, and when, does not change what is drawn for it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from draftmill.errors import InputError


@dataclass(frozen=True, slots=True)
class Sampling:
    """How answers are drawn. Temperature 0 is greedy, and then top_p, top_k and seed have no effect."""

    max_new_tokens: int = 1024
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        wanted = [
            (self.max_new_tokens >= 1, "max_new_tokens", self.max_new_tokens, "at least 1"),
            (0.0 <= self.temperature <= 10.0, "temperature", self.temperature, "from 0 (greedy) to 10"),
            (0.0 < self.top_p <= 1.0, "top_p", self.top_p, "above 0 and at most 1 (off)"),
            (self.top_k >= 0, "top_k", self.top_k, "0 (off) or more"),
            (0 <= self.seed < 2**31, "seed", self.seed, "from 0 to 2147483647"),
        ]
        for holds, name, got, text in wanted:
            if not holds:
                raise InputError(f"{name} must be {text}, got {got}")


def uniforms(seed: int, stream: int, count: int) -> np.ndarray:
    """`count` numbers in [0, 1), float64: the random numbers of one prompt, one a token."""
    return np.random.default_rng((seed, stream)).random(count)


def choose_tokens(logits_BV: torch.Tensor, sampling: Sampling, uniforms_B: torch.Tensor | None) -> torch.Tensor:
    """The next token of each row, int64 [B].

    Sampling inverts the cumulative distribution at the row's number, after temperature, then top-k, then top-p (the
    smallest set of likeliest tokens that holds top_p of the mass).

    Args:
        logits_BV: any float dtype.
        uniforms_B: float64 in [0, 1) on the same device; not looked at when greedy.
    """
    if sampling.temperature == 0.0:
        return logits_BV.argmax(dim=-1)
    assert uniforms_B is not None
    values = logits_BV.float() / sampling.temperature
    ids: torch.Tensor | None = None
    if 0 < sampling.top_k < values.shape[-1]:
        values, ids = values.topk(sampling.top_k, dim=-1)
    elif sampling.top_p < 1.0:
        values, ids = values.sort(dim=-1, descending=True)
    probabilities = values.softmax(dim=-1)
    if sampling.top_p < 1.0:
        before = probabilities.cumsum(dim=-1, dtype=torch.float64) - probabilities
        probabilities = probabilities.masked_fill(before >= sampling.top_p, 0.0)
    cumulative = probabilities.cumsum(dim=-1, dtype=torch.float64)
    drawn = uniforms_B.unsqueeze(-1) * cumulative[:, -1:]
    index = torch.searchsorted(cumulative, drawn, right=True)  # the first token whose sum passes the number
    return (index if ids is None else ids.gather(-1, index)).squeeze(-1)
