"""How much arithmetic of one drafter step is useful: what any implementation must do, and nothing that one may waste.

Owns the count. Multiplications and additions of matrix products only, each counted as one operation: linear layers on
the batch's real context tokens and on the tokens of used blocks, attention between a query and the keys that it sees,
and the loss head on rows that carry a weight. Padding, unused slots, masked pairs, recomputation, norms, softmax and
the optimizer count nothing. Measures nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from draftmill.drafter.shape import DrafterShape
from draftmill.records import Blocks

# Operations for each weight and row, forward and backward together.
TRAINED = 6
"""A trained matrix: its output (2), the gradient to its input (2), and its own gradient (2)."""
TRAINED_ON_INPUTS = 4
"""A trained matrix on inputs that need no gradient, as the target's features: no gradient to the input."""
FROZEN = 4
"""A frozen matrix: its output and the gradient to its input."""
TARGET = 2
"""The same matrix on the target's last hidden state: its output alone."""
ATTENTION = 12
"""For each seen pair, head and element of a head: scores and values forward (4), four products backward (8)."""


@dataclass(frozen=True)
class StepWork:
    """What a batch asks of a step: real context tokens, used blocks and their tokens (K of each that lacks none),
    supervised slots, and query-key pairs that see each other, summed over the layers."""

    context_tokens: int
    blocks: int
    block_tokens: int
    scored_rows: int
    pairs: int

    def __add__(self, other: StepWork) -> StepWork:
        return StepWork(
            self.context_tokens + other.context_tokens,
            self.blocks + other.blocks,
            self.block_tokens + other.block_tokens,
            self.scored_rows + other.scored_rows,
            self.pairs + other.pairs,
        )


@dataclass(frozen=True)
class StepFlops:
    """Useful operations of a step, forward and backward, by part."""

    context: float
    blocks: float
    attention: float
    head: float

    @property
    def total(self) -> float:
        """All parts."""
        return self.context + self.blocks + self.attention + self.head


def work_of(blocks: Blocks, num_tokens: int, shape: DrafterShape) -> StepWork:
    """Count a batch's work. `blocks` on the host, of which a block without supervised slots is unused."""
    used = blocks.slots_A > 0
    before_A = (blocks.anchors_A[used] - blocks.starts_A[used]).long()
    sizes_A = shape.block_size - blocks.absent_A[used].long()
    by_window = {window: visible_pairs(before_A, sizes_A, window) for window in _windows(shape)}
    return StepWork(
        context_tokens=num_tokens,
        blocks=len(before_A),
        block_tokens=int(sizes_A.sum()),
        scored_rows=int(blocks.slots_A.sum()),
        pairs=sum(by_window[window] for window in _windows(shape)),
    )


def visible_pairs(before_A: torch.Tensor, sizes_A: torch.Tensor, window: int | None) -> int:
    """Pairs of a query and a key that it sees, in one layer.

    before_A  int64 [A]: context tokens of its document before each block's anchor
    sizes_A   int64 [A]: slots of each block, those that it lacks not counted
    window    the layer's sliding window in tokens, or None where it attends to everything
    """
    if window is None:
        return int(((before_A + sizes_A) * sizes_A).sum())
    slots = torch.arange(int(sizes_A.max()) if len(sizes_A) else 0)
    reach = (window - 1 - slots).clamp(min=0)
    context = (torch.minimum(before_A[:, None], reach) * (slots < sizes_A[:, None])).sum()
    return int(context + (sizes_A * (sizes_A + 1) // 2).sum())


def step_flops(shape: DrafterShape, work: StepWork, with_target: bool = False) -> StepFlops:
    """Useful operations of one forward and backward over this work.

    with_target: whether the loss needs the target's logits too.
    """
    hidden, head = shape.hidden_size, shape.head_dim
    queries, keys = shape.num_heads * head, shape.num_kv_heads * head
    keys_values = 2 * hidden * keys
    projections = keys_values + hidden * queries
    rest = hidden * queries + 3 * hidden * shape.intermediate_size
    given, drafted = work.blocks, work.block_tokens - work.blocks
    return StepFlops(
        context=float(
            work.context_tokens
            * (TRAINED_ON_INPUTS * shape.feature_size * hidden + TRAINED * shape.num_layers * keys_values)
        ),
        blocks=float(
            TRAINED
            * (
                work.block_tokens * (shape.num_layers - 1) * (projections + rest)
                # In the first layer all mask tokens are one.
                + (given + (given > 0)) * projections
                # In the last layer a block's given token is a key and a value and nothing else.
                + drafted * rest
            )
        ),
        attention=float(ATTENTION * work.pairs * queries),
        head=float((FROZEN + (TARGET if with_target else 0)) * work.scored_rows * hidden * shape.vocab_size),
    )


def _windows(shape: DrafterShape) -> list[int | None]:
    return [shape.window(layer) for layer in range(shape.num_layers)]
