"""Gradients of matrices, written where they are wanted by the product that makes them.

Autograd makes each gradient apart and adds it to a buffer that was cleared before: three more passes over as many bytes
as there are weights. Here a product's result goes straight into that buffer, and autograd is told of no gradient.

The operator can be compiled and captured: it changes a tensor that is given, and the compiler keeps it in place.
"""

from __future__ import annotations

from typing import Any

import torch


def _take_product(into_MK: torch.Tensor, adds: bool, left_NM: torch.Tensor, right_NK: torch.Tensor) -> None:
    """into_MK becomes, or with `adds` grows by, left_NM transposed times right_NK."""
    if adds:
        into_MK.addmm_(left_NM.t(), right_NK)
    else:
        torch.mm(left_NM.t(), right_NK, out=into_MK)


_LIBRARY = torch.library.Library("draftmill", "FRAGMENT")
_LIBRARY.define("take_product(Tensor(a!) into, bool adds, Tensor left, Tensor right) -> ()")
_LIBRARY.impl("take_product", _take_product, "CompositeExplicitAutograd")
torch.library.register_fake("draftmill::take_product", lambda *_: None, lib=_LIBRARY)
take_product = torch.ops.draftmill.take_product


def linear_into(x: torch.Tensor, weight: torch.Tensor, gradient_MK: torch.Tensor, adds: bool) -> torch.Tensor:
    """x [N, K] times weight [M, K] transposed, [N, M]; the weight's gradient goes where `take_product` puts it."""
    product_of: Any = _Linear.apply
    result: torch.Tensor = product_of(x, weight, gradient_MK, adds)
    return result


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, gradient_MK: torch.Tensor, adds: bool) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        # Not among what is saved: autograd refuses those once another view of their buffer was written.
        ctx.gradient_MK, ctx.adds = gradient_MK, adds
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, slope: torch.Tensor) -> tuple[torch.Tensor | None, None, None, None]:
        x, weight = ctx.saved_tensors
        take_product(ctx.gradient_MK, ctx.adds, slope, x)
        return slope @ weight if ctx.needs_input_grad[0] else None, None, None, None
