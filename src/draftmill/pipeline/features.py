"""From a target's layer outputs to a drafter's context slots, and the cache of features already made.

The features of a batch's real tokens, without padding, go into a slot on the drafter's device: one gather a tap, and
where that is another device one copy.
"""

from __future__ import annotations

import threading
from itertools import pairwise

import torch

from draftmill.records import HostBatch


def pack(taps: list[torch.Tensor], source_T: torch.Tensor, features_TF: torch.Tensor) -> None:
    """Write the taps' real tokens into the first context slots.

    taps: L tensors [B, S, H], or L + 1 with the last hidden state. source_T: int64 [n], flat index b*S + s of each
    context slot's token, on their device. features_TF: as wide as all taps together, any device and type.
    """
    count, width = source_T.shape[0], taps[0].shape[-1]
    whole = features_TF[:count]
    here = whole
    if features_TF.device != source_T.device:
        # Gathered here first, so that one copy of whole rows crosses over: that needs no kernel on either device and no
        # work on a stream of the other one, whether the devices reach each other's memory or not.
        here = torch.empty(whole.shape, dtype=whole.dtype, device=source_T.device)
    for index, tap in enumerate(taps):
        rows = tap.reshape(-1, width).index_select(0, source_T)
        here[:, index * width : (index + 1) * width].copy_(rows, non_blocking=True)
    if here is not whole:
        whole.copy_(here, non_blocking=True)


class FeatureCache:
    """Features of whole samples on the host, kept while they fit. Thread-safe.

    For small data on small machines, where running the target again in every epoch costs more than memory does.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.num_bytes = 0
        self._rows: dict[int, torch.Tensor] = {}
        self._lock = threading.Lock()

    def read(self, batch: HostBatch, features_TF: torch.Tensor) -> bool:
        """Fill the context slots from the cache; False, with nothing written, unless it holds every sample.

        Nobody may read or write them any more; they are there when the call returns, whichever device they are on.
        """
        with self._lock:
            rows = [self._rows.get(int(sample)) for sample in batch.sample_ids_B]
        first = 0
        if any(row is None for row in rows):
            return False
        for row in rows:
            assert row is not None
            features_TF[first : first + row.shape[0]].copy_(row)
            first += row.shape[0]
        return True

    def keep(self, batch: HostBatch, features_TF: torch.Tensor) -> None:
        """Remember the batch's samples, in the order of their context slots, as far as memory allows."""
        positions = batch.blocks[0].positions_T[: batch.num_tokens]
        firsts = [*(positions == 0).nonzero()[:, 0].tolist(), batch.num_tokens]
        for sample, (first, last) in zip(batch.sample_ids_B.tolist(), pairwise(firsts), strict=True):
            rows = features_TF[first:last]
            with self._lock:
                size = rows.numel() * rows.element_size()
                if sample in self._rows or self.num_bytes + size > self.limit_bytes:
                    continue
                self._rows[sample] = rows.to("cpu", copy=True)
                self.num_bytes += size
