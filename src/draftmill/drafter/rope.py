"""Rotary position embedding of the drafter: inverse frequencies by type, angles computed in float32.

The frequencies of scaled types come from transformers, whose tables the serving engines follow. Half-split (NeoX)
layout; with a partial factor only the first dimensions of a head turn.
"""

from __future__ import annotations

import torch
from torch import nn
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from draftmill.drafter.shape import DrafterShape, check_rope


class Rotary(nn.Module):
    """Cosines and sines for positions. Holds no parameter; its frequencies are not part of a checkpoint."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        frequencies, self.scale = inverse_frequencies(shape)
        self.rotary_dim = 2 * frequencies.shape[0]
        self.register_buffer("frequencies", frequencies, persistent=False)

    def forward(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """positions [...], integers -> cosines and sines [..., rotary_dim / 2], float32."""
        assert isinstance(self.frequencies, torch.Tensor)
        cosines, sines = torch.ops.draftmill.cosines_and_sines(positions, self.frequencies, self.scale)
        return cosines, sines


def _cosines_and_sines(
    positions: torch.Tensor, frequencies: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    angles = positions.float().unsqueeze(-1) * frequencies
    return angles.cos() * scale, angles.sin() * scale


# An operator of its own, which the compiler does not look into: it would work the angles out again for every head of
# every layer, forward and backward, in place of reading them.
_LIBRARY = torch.library.Library("draftmill", "FRAGMENT")
_LIBRARY.define("cosines_and_sines(Tensor positions, Tensor frequencies, float scale) -> (Tensor, Tensor)")
_LIBRARY.impl("cosines_and_sines", _cosines_and_sines, "CompositeExplicitAutograd")


def rotate(x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """Turn the first dimensions of x [tokens, heads, D] by angles [tokens, rotary_dim / 2]; float32 inside."""
    half = cosines.shape[-1]
    cosines, sines = cosines.unsqueeze(-2), sines.unsqueeze(-2)
    first, second = x[..., :half].float(), x[..., half : 2 * half].float()
    turned = torch.cat([first * cosines - second * sines, second * cosines + first * sines], dim=-1).to(x.dtype)
    return turned if 2 * half == x.shape[-1] else torch.cat([turned, x[..., 2 * half :]], dim=-1)


def inverse_frequencies(shape: DrafterShape) -> tuple[torch.Tensor, float]:
    """Inverse frequencies [rotary_dim / 2], float32 on the CPU, and the factor on cosines and sines.

    Raises InputError for a type the network does not implement.
    """
    check_rope(shape.rope)
    kind = shape.rope["rope_type"]
    if kind == "default":
        dim = int(shape.head_dim * shape.rope.get("partial_rotary_factor", 1.0))
        exponents = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
        return 1.0 / (shape.rope["rope_theta"] ** exponents), 1.0
    config = PretrainedConfig()
    config.update(
        {
            "hidden_size": shape.hidden_size,
            "num_attention_heads": shape.num_heads,
            "head_dim": shape.head_dim,
            "max_position_embeddings": shape.max_position_embeddings,
            "rope_parameters": dict(shape.rope),
        }
    )
    frequencies, scale = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    return frequencies.float(), float(scale)
