"""Products in float8 for training: rounding, one product, and a linear layer with its gradients.

A tensor is rounded with one scale, from its own largest magnitude: weights and hidden states to e4m3 (3 bits of
fraction), gradients to e5m2 (2 bits, and a longer reach). Products add up in float32 and come out in the compute type.
Master weights, moments, norms, attention, and whatever else is no product stay as they are. On a CPU the same rounded
numbers are multiplied in float32: slow, for tests.

Nothing here reads a number on the host, so all of it can be compiled and captured.

Source: the two formats, and which of them for what, arXiv 2209.05433.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from draftmill.config import Float8Choice
from draftmill.drafter.gradient import take_product
from draftmill.drafter.shape import DrafterShape
from draftmill.errors import InputError
from draftmill.float8 import check_devices

VALUES, GRADIENTS = torch.float8_e4m3fn, torch.float8_e5m2
MULTIPLE = 16
"""What the sides of matrices in a float8 product must be multiples of."""
LEAST_LARGEST = 1e-20
"""A tensor's largest magnitude is taken to be at least this, so that zeros stay zeros."""
FAST_GRADIENTS = False
"""Whether gradients too may be added up in fewer bits, as the forward pass's sums are."""


def check_float8(
    choice: Float8Choice | None, shape: DrafterShape, dtype: torch.dtype, devices: Sequence[torch.device]
) -> None:
    """Raise InputError where a drafter of this shape can't be trained in float8 on these devices, in this type."""
    if choice is None:
        return
    check_devices("drafter.float8", devices)
    if dtype != torch.bfloat16:
        raise InputError(
            f"drafter.float8 rounds what is computed in bfloat16, got drafter.dtype {str(dtype).removeprefix('torch.')}"
            "; leave one of the two out"
        )
    hidden, queries = shape.hidden_size, shape.num_heads * shape.head_dim
    matrices = {"LM head": (shape.vocab_size, hidden)}
    if choice == "all":
        keys = shape.num_kv_heads * shape.head_dim
        matrices |= {
            "fc": (hidden, shape.feature_size),
            "q_proj": (queries, hidden),
            "k_proj": (keys, hidden),
            "gate_proj": (shape.intermediate_size, hidden),
        }
    for name, sides in matrices.items():
        if any(side % MULTIPLE for side in sides):
            raise InputError(
                f"drafter.float8: {choice} needs matrices whose sides are multiples of {MULTIPLE}, got {name} of "
                f"{sides[0]} x {sides[1]}; leave drafter.float8 out"
                + (" or set it to head" if choice == "all" and name != "LM head" else "")
            )


def largest_magnitude(x: torch.Tensor) -> torch.Tensor:
    """The largest magnitude in a tensor, at least LEAST_LARGEST: float32 []. Not a number where one is none."""
    return x.abs().amax().float().clamp(min=LEAST_LARGEST)


def scaled_to(x: torch.Tensor, largest: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x rounded to a float8 type, `largest` becoming the type's own largest number; row-major."""
    most = torch.finfo(dtype).max
    # Clamped, or what the scale's rounding puts past the end would become infinite.
    return (x.float() * (most / largest)).clamp(-most, most).to(dtype).contiguous()


def round_float8(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """x in a float8 type, row-major, and its scale, float32 []: x is about rounded times scale.

    A number that is not finite anywhere makes the scale, or what is rounded, none too.
    """
    largest = largest_magnitude(x)
    return scaled_to(x, largest, dtype), largest / torch.finfo(dtype).max


def column_major(matrix: torch.Tensor) -> torch.Tensor:
    """The same matrix, copied so that a column's elements lie side by side, as a product's second factor must."""
    return matrix.t().contiguous().t()


def product(
    left: torch.Tensor,
    left_scale: torch.Tensor,
    right: torch.Tensor,
    right_scale: torch.Tensor,
    dtype: torch.dtype,
    *,
    fast: bool = False,
) -> torch.Tensor:
    """left [N, K], row-major, times right [K, M], column-major, both float8 with scales [] -> [N, M] in `dtype`.

    K and M must be multiples of 16 on CUDA, and at most one factor e5m2. fast: sums are kept in fewer bits while they
    add up, which is precise enough for a forward pass.
    """
    if left.is_cuda:
        return torch._scaled_mm(
            left, right, scale_a=left_scale, scale_b=right_scale, out_dtype=dtype, use_fast_accum=fast
        )
    wide = left.float() @ right.float() * (left_scale * right_scale)
    # Under torch 2.11 a traced autograd function whose result is a cast to the type it has loses its gradients.
    return wide if dtype == torch.float32 else wide.to(dtype)


class Rounded(NamedTuple):
    """What goes into several linear layers, rounded once: itself [N, K], in e4m3, and the scale []."""

    wide: torch.Tensor
    rounded: torch.Tensor
    scale: torch.Tensor


def rounded_once(x: torch.Tensor) -> Rounded:
    """x [N, K] for `float8_linear`."""
    return Rounded(x, *round_float8(x.detach(), VALUES))


def float8_linear(
    x: torch.Tensor | Rounded, weight: torch.Tensor, gradient_MK: torch.Tensor | None = None, adds: bool = False
) -> torch.Tensor:
    """x [N, K] times weight [M, K] transposed, in float8, forward and backward: [N, M] in x's type.

    gradient_MK: where the backward pass leaves the weight's gradient, or with `adds` adds it; None: autograd keeps it.
    The gradient to the weight adds up over the rows, and in float8 their number must be a multiple of 16; where it is
    none, that one product is in x's type.
    """
    product_of: Any = _Float8Linear.apply
    result: torch.Tensor = product_of(*(x if isinstance(x, Rounded) else rounded_once(x)), weight, gradient_MK, adds)
    return result


class _Float8Linear(torch.autograd.Function):
    """Keeps what was rounded, one byte an element, for the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        wide: torch.Tensor,
        rounded: torch.Tensor,
        scale: torch.Tensor,
        weight: torch.Tensor,
        gradient_MK: torch.Tensor | None,
        adds: bool,
    ) -> torch.Tensor:
        weight8, weight_scale = round_float8(weight, VALUES)
        ctx.save_for_backward(rounded if wide.shape[0] % MULTIPLE == 0 else wide, scale, weight8, weight_scale)
        ctx.gradient_MK, ctx.adds = gradient_MK, adds
        return product(rounded, scale, weight8.t(), weight_scale, wide.dtype, fast=True)

    @staticmethod
    def backward(ctx: Any, slope: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        kept, scale, weight8, weight_scale = ctx.saved_tensors
        slope8, slope_scale = round_float8(slope, GRADIENTS)
        to_x = to_weight = None
        if ctx.needs_input_grad[0]:
            to_x = product(slope8, slope_scale, column_major(weight8), weight_scale, slope.dtype, fast=FAST_GRADIENTS)
        if ctx.needs_input_grad[3]:
            if kept.dtype == VALUES:
                factors = slope8.t().contiguous(), slope_scale, column_major(kept), scale
                if ctx.gradient_MK is None:
                    to_weight = product(*factors, slope.dtype, fast=FAST_GRADIENTS)
                else:
                    torch.ops.draftmill.take_scaled_product(ctx.gradient_MK, ctx.adds, *factors)
            elif ctx.gradient_MK is None:
                to_weight = slope.t() @ kept
            else:
                take_product(ctx.gradient_MK, ctx.adds, slope, kept)
        return to_x, None, None, to_weight, None, None


def _take_scaled_product(
    into: torch.Tensor,
    adds: bool,
    left: torch.Tensor,
    left_scale: torch.Tensor,
    right: torch.Tensor,
    right_scale: torch.Tensor,
) -> None:
    """into becomes, or with `adds` grows by, the product."""
    if adds or not left.is_cuda:
        found = product(left, left_scale, right, right_scale, into.dtype, fast=FAST_GRADIENTS)
        (into.add_ if adds else into.copy_)(found)
        return
    torch._scaled_mm(
        left,
        right,
        scale_a=left_scale,
        scale_b=right_scale,
        out_dtype=into.dtype,
        use_fast_accum=FAST_GRADIENTS,
        out=into,
    )


_LIBRARY = torch.library.Library("draftmill", "FRAGMENT")
_LIBRARY.define(
    "take_scaled_product(Tensor(a!) into, bool adds, Tensor left, Tensor left_scale, Tensor right, Tensor right_scale)"
    " -> ()"
)
_LIBRARY.impl("take_scaled_product", _take_scaled_product, "CompositeExplicitAutograd")
torch.library.register_fake("draftmill::take_scaled_product", lambda *_: None, lib=_LIBRARY)
