"""What crosses a room or a device border, shapes stated once.

Shape letters, here and everywhere: B rows of a target batch, S tokens of a row, T context slots of a drafter batch,
A anchor slots (blocks), K block size, L tapped layers, H hidden size, V vocabulary, N query heads, M key/value heads,
D head size.

A drafter batch has one shape for the whole run. The batch's real tokens stand one after another in T context slots,
document after document; its blocks stand in A anchor slots, sorted by anchor. What is not used is marked by counts.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import Enum

import numpy as np
import torch


class BatchKind(Enum):
    """What a batch is for."""

    TRAIN = "train"
    HELDOUT = "heldout"
    EMPTY = "empty"
    """Stands in where an epoch's last step has fewer batches than drafters: it has no documents and no loss."""


@dataclass(frozen=True, slots=True)
class WorkItem:
    """One number of the run's stream of batches: the index-th batch of an epoch, or of the held-out samples."""

    sequence: int
    kind: BatchKind
    epoch: int
    index: int


@dataclass(frozen=True, slots=True)
class Blocks:
    """The integer side of a drafter batch: tokens in context slots, blocks in anchor slots. One device, one shape.

    tokens_T     int64  token ids, document after document; 0 past the last real token
    positions_T  int32  position of each token inside its own document; 0 past the last
    anchors_A    int32  context slot of each block's anchor, ascending; 0 for an unused block
    starts_A     int32  context slot of the first token of the anchor's document; 0 for an unused block
    slots_A      int32  supervised slots of each block: slots 1..n carry a loss, n <= K-1-absent; 0 for an unused block
    absent_A     int32  slots that a short block lacks at its end, which nobody sees; 0 for a whole or an unused block

    A block with anchor slot a and document start s sees the context slots j with s <= j < a, and itself. Its slot k
    stands for the token in context slot a + k, which exists for every supervised k.
    """

    tokens_T: torch.Tensor
    positions_T: torch.Tensor
    anchors_A: torch.Tensor
    starts_A: torch.Tensor
    slots_A: torch.Tensor
    absent_A: torch.Tensor

    @classmethod
    def empty(
        cls, context_slots: int, anchor_slots: int, device: torch.device | str = "cpu", *, pin: bool = False
    ) -> Blocks:
        """Zeroed buffers: a batch with no token and no block."""

        def ints(size: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(size, dtype=dtype, device=device, pin_memory=pin)

        return cls(
            ints(context_slots, torch.int64),
            ints(context_slots, torch.int32),
            *(ints(anchor_slots, torch.int32) for _ in range(4)),
        )

    def copy_(self, other: Blocks, *, non_blocking: bool = False) -> None:
        """Overwrite these buffers, whose shapes must be the other's, on the current stream."""
        for field in fields(self):
            mine, theirs = getattr(self, field.name), getattr(other, field.name)
            if mine.shape != theirs.shape:
                raise RuntimeError(f"{field.name}: expected shape {tuple(mine.shape)}, got {tuple(theirs.shape)}")
            mine.copy_(theirs, non_blocking=non_blocking)


@dataclass(frozen=True, slots=True)
class HostBatch:
    """One batch on the host, as the loader gives it to a target worker. Tensors are pinned where CUDA is used.

    tokens_BS     int64, right-padded with 0; a row is one document (bucketed) or several (packed)
    positions_BS  int32 or None: position inside the document; None when every row is one document
    documents_BS  int32 or None: document of each token inside its row, -1 for padding; None likewise
    source_T      int64 [num_tokens]: flat index b*S + s of each context slot's token
    blocks        one Blocks for each anchor draw, in order
    num_rows_scored  for each draw, the number of supervised slots (the rows of the loss head)
    """

    sequence: int
    kind: BatchKind
    epoch: int
    index: int
    bucket: int
    sample_ids_B: np.ndarray
    tokens_BS: torch.Tensor
    positions_BS: torch.Tensor | None
    documents_BS: torch.Tensor | None
    source_T: torch.Tensor
    blocks: tuple[Blocks, ...]
    num_rows_scored: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        """Real tokens, without padding."""
        return self.source_T.shape[0]
