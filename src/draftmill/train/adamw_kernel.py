"""AdamW's pass over flat buffers on CUDA as one kernel: every number is read once and written once.

28 bytes an element in bfloat16 training, which is what the update has to move at least. A compiler splits the same
arithmetic into several passes with float32 intermediates as large as the masters. Imported on CUDA only.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from draftmill.train.optimizer import AdamWPart

BLOCK = 2048


@triton.jit
def _adamw(  # type: ignore[no-untyped-def]
    master_ptr,
    first_ptr,
    second_ptr,
    gradient_ptr,
    weights_ptr,
    scalars_ptr,
    size,
    beta1,
    beta2,
    eps,
    decay,
    has_weights: tl.constexpr,
    block: tl.constexpr,
):
    offsets = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = offsets < size
    lr = tl.load(scalars_ptr)
    factor = tl.load(scalars_ptr + 1)
    correction1 = tl.load(scalars_ptr + 2)
    correction2 = tl.load(scalars_ptr + 3)
    gradient = tl.load(gradient_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    master = tl.load(master_ptr + offsets, mask=inside, other=0.0)
    first = tl.load(first_ptr + offsets, mask=inside, other=0.0)
    second = tl.load(second_ptr + offsets, mask=inside, other=0.0)
    # A factor of 0 stands for a gradient that is not finite; multiplying would keep it so.
    scaled = tl.where(factor > 0.0, gradient * factor, 0.0)
    first += (scaled - first) * (1.0 - beta1)
    second = second * beta2 + scaled * scaled * (1.0 - beta2)
    denominator = tl.sqrt(second / correction2) + eps
    master = master * (1.0 - lr * decay) - first / denominator * (lr / correction1)
    tl.store(first_ptr + offsets, first, mask=inside)
    tl.store(second_ptr + offsets, second, mask=inside)
    tl.store(master_ptr + offsets, master, mask=inside)
    if has_weights:
        tl.store(weights_ptr + offsets, master.to(weights_ptr.dtype.element_ty), mask=inside)


def adamw_update(
    part: AdamWPart,
    scalars: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    constants: tuple[float, float, float],
) -> None:
    """`optimizer.adamw_update` in one kernel launch, on pieces of any length."""
    size = part.master.numel()
    _adamw[(triton.cdiv(size, BLOCK),)](
        part.master,
        part.first,
        part.second,
        part.gradient,
        part.master if part.weights is None else part.weights,
        torch.stack(scalars),
        size,
        *constants,
        part.decay,
        has_weights=part.weights is not None,
        block=BLOCK,
        num_warps=8,
    )
