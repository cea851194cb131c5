"""Packing documents into rows of one length: best fit, longest first.

Owns the algorithm. Never draws an order (plan.py hands it windows of shuffled documents).
"""

from __future__ import annotations

import numpy as np


def pack(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """Give each document a row so that no row holds more than `capacity` tokens, by best fit, longest first.

    Args:
        lengths: tokens of each document, in 1..capacity.

    Returns:
        int32, the row of each document; rows are numbered 0.. in the order they were begun.
    """
    rows = np.empty(len(lengths), dtype=np.int32)
    open_rows: list[list[int]] = [[] for _ in range(capacity + 1)]  # by the room that is left
    rooms = 0  # bit r is set where a row with room r is open: finding the tightest fit is one shift
    num_rows = 0
    order = np.argsort(-lengths.astype(np.int64), kind="stable")
    for document, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        fitting = rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            row = open_rows[room].pop()
            if not open_rows[room]:
                rooms ^= 1 << room
        else:
            room, row = capacity, num_rows
            num_rows += 1
        rows[document] = row
        left = room - length
        if left:
            if not open_rows[left]:
                rooms |= 1 << left
            open_rows[left].append(row)
    return rows
