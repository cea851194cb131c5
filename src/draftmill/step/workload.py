"""A step's work made up from numbers: random weights, head, features and blocks of a given shape, the same every time.

For measuring a step without a target and without data. Owns how such a batch is laid out; measures nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from draftmill.config import Float8Choice, gamma_for
from draftmill.drafter.loss import LossRule
from draftmill.drafter.mask import TILE
from draftmill.drafter.network import Drafter
from draftmill.drafter.shape import DrafterShape
from draftmill.errors import InputError
from draftmill.records import Blocks
from draftmill.step.state import CHUNK_ROWS, CHUNK_ROWS_CUDA, StepShape, StepState
from draftmill.target.head import TargetHead


@dataclass(frozen=True)
class Workload:
    """Documents of equal length, packed one after another, and blocks spread evenly over them, all slots supervised."""

    documents: int
    tokens_each: int
    anchors: int

    @property
    def context_tokens(self) -> int:
        """Tokens of all documents."""
        return self.documents * self.tokens_each

    def check(self, block_size: int) -> None:
        """Raise InputError unless every block fits into its document, on an anchor of its own."""
        most = self.documents * max(0, self.tokens_each - block_size)
        if not 1 <= self.anchors <= most:
            raise InputError(
                f"{self.documents} x {self.tokens_each} context tokens have room for {most} whole blocks of "
                f"{block_size} on different anchors, got {self.anchors} anchors; give fewer anchors or more context"
            )


def slots_for(work: Workload, block_size: int, device: torch.device) -> StepShape:
    """The static shape for a workload: whole tiles of flex attention on CUDA, exactly the workload on a CPU."""
    if device.type != "cuda":
        return StepShape(work.context_tokens, work.anchors, CHUNK_ROWS)
    anchors = work.anchors
    while anchors * block_size % TILE:
        anchors += 1
    return StepShape(-(-work.context_tokens // TILE) * TILE, anchors, CHUNK_ROWS_CUDA)


def random_blocks(work: Workload, shape: DrafterShape, slots: StepShape, seed: int = 0) -> Blocks:
    """The integer side of the batch, on the host: random tokens, and random anchors in ascending order."""
    work.check(shape.block_size)
    generator = torch.Generator().manual_seed(seed)
    blocks = Blocks.empty(slots.context_slots, slots.anchor_slots, pin=torch.cuda.is_available())
    tokens, used = work.context_tokens, 0
    blocks.tokens_T[:tokens] = torch.randint(shape.vocab_size - 1, (tokens,), generator=generator)
    blocks.positions_T[:tokens] = torch.arange(tokens, dtype=torch.int32) % work.tokens_each
    for document in range(work.documents):
        count = (work.anchors - used) // (work.documents - document)
        start = document * work.tokens_each
        anchors = torch.randperm(work.tokens_each - shape.block_size, generator=generator)[:count].sort().values + 1
        blocks.anchors_A[used : used + count] = anchors + start
        blocks.starts_A[used : used + count] = start
        blocks.slots_A[used : used + count] = shape.block_size - 1
        used += count
    return blocks


def random_features(work: Workload, shape: DrafterShape, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Features [T, L*H] of the context tokens, N(0, 1)."""
    generator = torch.Generator(device).manual_seed(1)
    return torch.randn(work.context_tokens, shape.feature_size, device=device, dtype=dtype, generator=generator)


def random_drafter(shape: DrafterShape, device: torch.device) -> Drafter:
    """A drafter in float32 on the device, always with the same weights there."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.device(device):
        torch.manual_seed(2)
        return Drafter(shape)


def random_head(shape: DrafterShape, device: torch.device, dtype: torch.dtype) -> TargetHead:
    """Untied vocabulary matrices, N(0, 0.02), always the same on the device."""
    generator = torch.Generator(device).manual_seed(3)

    def matrix() -> torch.Tensor:
        size = (shape.vocab_size, shape.hidden_size)
        return torch.randn(size, device=device, dtype=dtype, generator=generator).mul_(0.02)

    return TargetHead(matrix(), matrix(), shape.embedding_scale, shape.logit_scale, shape.logit_softcap)


def random_state(
    shape: DrafterShape,
    slots: StepShape,
    device: torch.device,
    dtype: torch.dtype,
    float8: Float8Choice | None = None,
) -> StepState:
    """A replica's state with random weights and head, its inputs still empty."""
    return StepState(
        random_drafter(shape, device),
        random_head(shape, device, dtype),
        LossRule(gamma_for(shape.block_size)),
        slots,
        device,
        dtype,
        float8,
    )
