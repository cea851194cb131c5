"""The DFlash drafter: a small block-diffusion transformer conditioned on the target's hidden states.

Owns the weights and the forward pass, in training (all blocks of a batch at once) and in decoding (one block against a
cache). Tensor names are the upstream ones, so a checkpoint runs wherever a DFlash drafter runs. Knows no mask rule, no
loss and no target; embedding and LM head come from outside (`TargetHead`).

Source: arXiv 2602.06036; the contract in docs/dflash.md. Shape letters as in records.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

from draftmill.drafter.attention import Attention, masked_attention
from draftmill.drafter.cache import DrafterCache
from draftmill.drafter.float8 import Rounded, float8_linear, rounded_once
from draftmill.drafter.gradient import linear_into
from draftmill.drafter.rope import Rotary, rotate
from draftmill.drafter.shape import DrafterShape

Angles = tuple[torch.Tensor, torch.Tensor]
Spread = Callable[[torch.Tensor], torch.Tensor]


def as_it_is(rows: torch.Tensor) -> torch.Tensor:
    """Every row is there already."""
    return rows


def spread_blocks(rows_EX: torch.Tensor, block_size: int) -> torch.Tensor:
    """Rows [A+1, ...] of each block's given token and, last, of the mask token -> of all block tokens, [A*K, ...]."""
    given, mask = rows_EX[:-1, None], rows_EX[-1:, None]
    masks = mask.expand(len(given), block_size - 1, *rows_EX.shape[1:])
    return torch.cat([given, masks], dim=1).flatten(0, 1)


class Linear(nn.Linear):
    """A matrix without bias whose values `Drafter` sets, once and from its own generator.

    used_twice: whether a pass of training uses it more than once, so that its gradient is a sum
    float8      whether its products are in float8, for training; then what several matrices take may be `rounded_once`
    gradient    where its gradient is to be written; None where autograd keeps it
    """

    float8 = False
    gradient: torch.Tensor | None = None

    def __init__(self, size_in: int, size_out: int, used_twice: bool = False) -> None:
        super().__init__(size_in, size_out, bias=False)
        self.used_twice = used_twice

    def reset_parameters(self) -> None:
        """Leave the values unset."""

    def shared(self, x: torch.Tensor) -> torch.Tensor | Rounded:
        """x as this matrix and others beside it take it."""
        return rounded_once(x) if self.float8 else x

    def forward(self, x: torch.Tensor | Rounded) -> torch.Tensor:
        if self.float8:
            return float8_linear(x, self.weight, self.gradient, self.used_twice)
        assert isinstance(x, torch.Tensor)
        if self.gradient is not None:
            return linear_into(x, self.weight, self.gradient, self.used_twice)
        return F.linear(x, self.weight)


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension; statistics in float32, result in the input's type."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class BlockAttention(nn.Module):
    """Attention of block tokens over [context | own block]; keys and values of both parts by the same matrices."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        self.q_proj = Linear(shape.hidden_size, queries)
        # of the context and of the blocks
        self.k_proj = Linear(shape.hidden_size, keys, used_twice=True)
        self.v_proj = Linear(shape.hidden_size, keys, used_twice=True)
        self.o_proj = Linear(queries, shape.hidden_size)
        self.q_norm = RMSNorm(shape.head_dim, shape.rms_norm_eps)
        self.k_norm = RMSNorm(shape.head_dim, shape.rms_norm_eps)

    def queries(self, hidden: torch.Tensor | Rounded, angles: Angles, spread: Spread = as_it_is) -> torch.Tensor:
        """hidden [Q, H] -> rotated queries [Q, N, D]. spread: puts rows where their angles are."""
        queries = self.q_norm(self.q_proj(hidden).unflatten(-1, (-1, self.head_dim)))
        return rotate(spread(queries), *angles)

    def keys_values(
        self, hidden: torch.Tensor | Rounded, angles: Angles, spread: Spread = as_it_is
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """hidden or context [C, H] -> rotated keys and values, [C, M, D] each. spread: as in `queries`."""
        keys = self.k_norm(self.k_proj(hidden).unflatten(-1, (-1, self.head_dim)))
        values = self.v_proj(hidden).unflatten(-1, (-1, self.head_dim))
        return rotate(spread(keys), *angles), spread(values)


class SwiGLU(nn.Module):
    """The gated MLP."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.gate_proj = Linear(shape.hidden_size, shape.intermediate_size)
        self.up_proj = Linear(shape.hidden_size, shape.intermediate_size)
        self.down_proj = Linear(shape.intermediate_size, shape.hidden_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shared = self.gate_proj.shared(x)
        return self.down_proj(F.silu(self.gate_proj(shared)) * self.up_proj(shared))


class DrafterLayer(nn.Module):
    """Pre-norm layer: block attention, then the MLP, each with a residual. The context enters as keys and values."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.self_attn = BlockAttention(shape)
        self.mlp = SwiGLU(shape)
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)

    def forward(
        self,
        x: torch.Tensor,
        angles: Angles,
        attend: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
        drafted: int | None = None,
        spread: Spread = as_it_is,
    ) -> torch.Tensor:
        """x [Q, H] -> [Q, H]; `attend` gets the block tokens' q, k, v and adds the context's part itself.

        drafted: the block size K where only slots 1..K-1 of each block are wanted, which makes it [A*(K-1), H].
        spread: makes Q rows of those of x where block tokens begin alike and x holds each kind of row once.
        """
        attention = self.self_attn
        hidden = attention.q_proj.shared(self.input_layernorm(x))
        attended = attend(
            attention.queries(hidden, angles, spread), *attention.keys_values(hidden, angles, spread)
        ).flatten(-2)
        x = spread(x)
        if drafted is not None:
            x, attended = (part.unflatten(0, (-1, drafted))[:, 1:].flatten(0, 1) for part in (x, attended))
        x = x + self.self_attn.o_proj(attended)
        return x + self.mlp(self.post_attention_layernorm(x))


class Drafter(nn.Module):
    """The whole network. Parameters are made in float32 on the CPU: matrices N(0, 0.02), norms 1."""

    def __init__(self, shape: DrafterShape, seed: int | None = None) -> None:
        """seed: draws the first values from a generator of their own; None from torch's, which threads share."""
        super().__init__()
        self.shape = shape
        self.layers = nn.ModuleList(DrafterLayer(shape) for _ in range(shape.num_layers))
        self.fc = Linear(shape.feature_size, shape.hidden_size)
        self.hidden_norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.rotary = Rotary(shape)
        self.checkpoint_activations = False
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02, generator=generator)

    def use_float8(self) -> None:
        """From now on multiply in float8, forward and backward. For training: inputs must be of two dimensions."""
        for module in self.modules():
            if isinstance(module, Linear):
                module.float8 = True

    def write_gradients(self, place: Callable[[str], torch.Tensor]) -> list[str]:
        """From now on leave each matrix's gradient at its place, by name; inputs must be of two dimensions.

        Returns the names of those that are overwritten; to the others a backward pass adds.
        """
        matrices = {f"{name}.weight": module for name, module in self.named_modules() if isinstance(module, Linear)}
        for name, module in matrices.items():
            module.gradient = place(name)
        return [name for name, module in matrices.items() if not module.used_twice]

    def context(self, features: torch.Tensor) -> torch.Tensor | Rounded:
        """Features [..., L*H] -> context [..., H], which enters every layer unchanged; in float8 rounded once."""
        return self.fc.shared(self.hidden_norm(self.fc(features)))

    def forward(
        self,
        features_TF: torch.Tensor,
        positions_T: torch.Tensor,
        embeddings_EH: torch.Tensor,
        positions_Q: torch.Tensor,
        attention: Attention,
        drafted_only: bool = False,
    ) -> torch.Tensor:
        """All blocks of a batch at once.

        features_TF [T, L*H] and positions_T [T] of the context slots; embeddings_EH [A+1, H] of each block's given
        token and, last, of the mask token, which all other block tokens are; positions_Q [A*K] of the block tokens;
        `attention` over keys [context | blocks]. Returns normed hidden states [A*K, H], ready for the target's head;
        with `drafted_only` those of slots 1..K-1, [A*(K-1), H]: in the last layer a block's given token is a key and a
        value and nothing else. In the first one all mask tokens have the same query, key and value but for their
        angles, which are made once.
        """
        context = self.context(features_TF)
        context_angles, block_angles = self.rotary(positions_T), self.rotary(positions_Q)
        x, last = embeddings_EH, len(self.layers) - 1
        for index, layer in enumerate(self.layers):
            drafted = self.shape.block_size if drafted_only and index == last else None
            if self.checkpoint_activations and self.training:
                x = checkpoint(
                    self._layer,
                    index,
                    layer,
                    x,
                    context,
                    context_angles,
                    block_angles,
                    attention,
                    drafted,
                    use_reentrant=False,
                )
            else:
                x = self._layer(index, layer, x, context, context_angles, block_angles, attention, drafted)
        return self.norm(x)

    def _layer(
        self,
        index: int,
        layer: Any,
        x: torch.Tensor,
        context: torch.Tensor | Rounded,
        context_angles: Angles,
        block_angles: Angles,
        attention: Attention,
        drafted: int | None,
    ) -> torch.Tensor:
        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            context_k, context_v = layer.self_attn.keys_values(context, context_angles)
            return attention(index, q, torch.cat([context_k, k]), torch.cat([context_v, v]))

        spread = partial(spread_blocks, block_size=self.shape.block_size) if index == 0 else as_it_is
        return layer(x, block_angles, attend, drafted, spread)

    def new_cache(self, capacity: int, device: torch.device | str, dtype: torch.dtype) -> DrafterCache:
        """An empty cache of context keys and values for decoding one sequence of at most `capacity` tokens."""
        return DrafterCache(self.shape, capacity, device, dtype)

    def extend(self, cache: DrafterCache, features_NF: torch.Tensor, positions_N: torch.Tensor) -> None:
        """Append the context keys and values of N further target features [N, L*H] at their positions [N]."""
        context, angles = self.context(features_NF), self.rotary(positions_N)
        cache.append([layer.self_attn.keys_values(context, angles) for layer in self._typed_layers()])

    def draft(self, cache: DrafterCache, embeddings_KH: torch.Tensor, positions_K: torch.Tensor) -> torch.Tensor:
        """One block against the cached context: embeddings [K, H] at positions [K] -> normed hidden states [K, H].

        The first token is the last known one, the others are mask tokens; the cache stays as it is.
        """
        angles, x = self.rotary(positions_K), embeddings_KH
        for index, layer in enumerate(self._typed_layers()):
            context_k, context_v = cache.layer(index)
            mask = cache.visible(positions_K, self.shape.window(index))

            def attend(
                q: torch.Tensor,
                k: torch.Tensor,
                v: torch.Tensor,
                context_k: torch.Tensor = context_k,
                context_v: torch.Tensor = context_v,
                mask: torch.Tensor | None = mask,
            ) -> torch.Tensor:
                return masked_attention(q, torch.cat([context_k, k]), torch.cat([context_v, v]), mask)

            x = layer(x, angles, attend)
        return self.norm(x)

    def _typed_layers(self) -> list[DrafterLayer]:
        return [layer for layer in self.layers if isinstance(layer, DrafterLayer)]
