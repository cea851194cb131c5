"""How large the batches of an epoch are: what a plan's costs are scaled by. Reads no sample and measures nothing."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from draftmill.data.plan import BatchPlan


@dataclass(frozen=True)
class BatchSizes:
    """The first epoch's batches, in order. All arrays int64, [batches].

    bucket  length bucket
    padded  tokens of the rows, padding included
    real    tokens without padding
    """

    bucket: np.ndarray
    padded: np.ndarray
    real: np.ndarray

    @property
    def buckets(self) -> list[int]:
        """Length buckets that have batches, ascending."""
        return [int(bucket) for bucket in np.unique(self.bucket)]

    def middle(self, bucket: int) -> int:
        """The batch of middle size of a bucket."""
        members = np.flatnonzero(self.bucket == bucket)
        order = np.argsort(self.padded[members], kind="stable")
        return int(members[order[len(members) // 2]])

    def largest(self) -> int:
        """The batch with most tokens, and among those the one with the longest rows, the last bucket's."""
        return int(np.lexsort((self.bucket, self.padded))[-1])


def batch_sizes(plan: BatchPlan, lengths: np.ndarray) -> BatchSizes:
    """Sizes of the first epoch's batches. lengths: tokens of each sample of the store."""
    count = plan.num_batches(0)
    bucket, padded, real = (np.empty(count, dtype=np.int64) for _ in range(3))
    for index in range(count):
        of_batch = lengths[plan.sample_ids(0, index)]
        rows, length = plan.shape(int(of_batch.max()), len(of_batch))
        bucket[index], padded[index], real[index] = plan.bucket(0, index), rows * length, of_batch.sum()
    return BatchSizes(bucket, padded, real)
