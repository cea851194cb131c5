"""A target's replica is refused where its features know what follows: blocks and right padding rest on it (B2)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from draftmill.errors import InputError
from draftmill.target.features import TapsReplica
from target_kinds import tiny_target


class LooksAhead(torch.nn.Module):
    """An MLP that mixes in all tokens after."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + 0.1 * x.flip(1).cumsum(1).flip(1)


def looking_ahead() -> Any:
    target: Any = tiny_target("llama")
    target.layers[2].mlp = LooksAhead(target.layers[2].mlp)
    return target


@pytest.mark.parametrize("packed", [False, True])
def test_features_that_know_the_next_token_are_refused_by_name(packed: bool) -> None:
    TapsReplica(tiny_target("llama"), (1, 3), packed=packed)
    TapsReplica(looking_ahead(), (0, 1), packed=packed)  # what comes after the last tap does not matter
    with pytest.raises(InputError) as refused:
        TapsReplica(looking_ahead(), (1, 3), packed=packed)
    message = str(refused.value)
    assert message.startswith("LlamaForCausalLM is not causal: a token's features change by ")
    assert message.endswith("with what comes after it; a drafter needs a causal target")
