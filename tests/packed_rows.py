"""Batches for tests of the target's side: documents of given lengths, packed into rows or one a row."""

from __future__ import annotations

import numpy as np
import torch

from draftmill.records import BatchKind, Blocks, HostBatch
from target_kinds import random_tokens


def documents_of(lengths: list[int]) -> list[torch.Tensor]:
    """Random documents, each another."""
    return [random_tokens(length, seed=100 + index) for index, length in enumerate(lengths)]


def packed_batch(rows: list[list[torch.Tensor]], length: int) -> HostBatch:
    """Rows that hold several documents each, filled up with padding, as the loader gives them."""
    shape = (len(rows), length)
    tokens = torch.zeros(shape, dtype=torch.int64)
    positions, documents = torch.zeros(shape, dtype=torch.int32), torch.full(shape, -1, dtype=torch.int32)
    source = []
    for row, held in enumerate(rows):
        at = 0
        for index, document in enumerate(held):
            span = slice(at, at + len(document))
            tokens[row, span], positions[row, span] = document, torch.arange(len(document)).int()
            documents[row, span] = index
            source += range(row * length + at, row * length + at + len(document))
            at += len(document)
    return _batch(tokens, source, positions, documents)


def bucketed_batch(rows: list[torch.Tensor], length: int) -> HostBatch:
    """One document a row, padded on the right."""
    tokens = torch.zeros(len(rows), length, dtype=torch.int64)
    source = []
    for row, document in enumerate(rows):
        tokens[row, : len(document)] = document
        source += range(row * length, row * length + len(document))
    return _batch(tokens, source, None, None)


def real_tokens(taps: list[torch.Tensor], batch: HostBatch) -> torch.Tensor:
    """Features of the batch's real tokens, document after document, [num_tokens, L*H]."""
    return torch.cat([tap.flatten(0, 1)[batch.source_T.to(tap.device)] for tap in taps], dim=-1)


def _batch(
    tokens: torch.Tensor, source: list[int], positions: torch.Tensor | None, documents: torch.Tensor | None
) -> HostBatch:
    return HostBatch(
        sequence=3,
        kind=BatchKind.TRAIN,
        epoch=0,
        index=3,
        bucket=0,
        sample_ids_B=np.arange(len(tokens)),
        tokens_BS=tokens,
        positions_BS=positions,
        documents_BS=documents,
        source_T=torch.tensor(source),
        blocks=(Blocks.empty(8, 2),),
        num_rows_scored=(0,),
    )
