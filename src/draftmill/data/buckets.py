"""Length buckets: where their edges lie, and the lines that show them.

Owns the choice from the length histogram. Never draws an order (plan.py does).
"""

from __future__ import annotations

import numpy as np

from draftmill.errors import InputError


def choose_edges(lengths: np.ndarray, num_buckets: int, max_length: int, round_to: int) -> list[int]:
    """The upper edges of at most `num_buckets` buckets that waste least if each sample were padded to its bucket's.

    Exact, by dynamic programming over the histogram of rounded lengths (at most 512 bins).

    Args:
        lengths: tokens of each sample, in 1..max_length.
        max_length: tokens; the last edge is max_length + 1.
        round_to: edges lie just past multiples of this many tokens.
    """
    step = max(round_to, -(-max_length // 512))
    bins = np.bincount((lengths.astype(np.int64) + step - 1) // step)
    used = np.flatnonzero(bins)
    if len(used) == 0:
        return [max_length + 1]
    samples = np.concatenate([[0], np.cumsum(bins[used])])
    height = used.astype(np.float64)
    # cost[j] after k buckets: padded length of all samples in the first j used bins
    cost = np.concatenate([[0.0], height * samples[1:]])
    choices: list[np.ndarray] = []
    for _ in range(min(num_buckets, len(used)) - 1):
        # a last bucket of bins i..j-1 pads each of its samples to the height of bin j-1
        table = cost[None, :-1] + height[:, None] * (samples[1:, None] - samples[None, :-1])
        table[np.triu_indices(len(used), 1)] = np.inf
        best = table.argmin(axis=1)
        choices.append(best)
        cost = np.concatenate([[0.0], table[np.arange(len(used)), best]])
    edges = [max_length + 1]
    end = len(used)
    for best in reversed(choices):
        end = int(best[end - 1])
        if end == 0:
            break
        edges.append(min(int(used[end - 1]) * step + 1, max_length + 1))
    return sorted(set(edges))


def check_edges(edges: list[int], longest: int) -> list[int]:
    """The user's edges, which must reach the longest sample.

    Raises:
        InputError: a sample lies past the last edge.
    """
    if longest > edges[-1]:
        raise InputError(
            f"data.bucket_edges end at {edges[-1]}, the longest sample has {longest} tokens; add an edge of at least "
            f"{longest + 1} or set data.max_length lower"
        )
    return list(edges)


def bucket_of(lengths: np.ndarray, edges: list[int]) -> np.ndarray:
    """The bucket of each length: edges are exclusive, but for the last."""
    buckets = np.searchsorted(np.asarray(edges), lengths, side="right")
    return np.minimum(buckets, len(edges) - 1)


def bucket_lines(edges: list[int], batches: np.ndarray, longest: int) -> list[str]:
    """A line a bucket: its range of lengths, its batches and their share of an epoch's."""
    width = max(4, len(str(edges[-1])))
    total = max(1, int(batches.sum()))
    lines = []
    for bucket, (low, high) in enumerate(zip([0, *edges], edges, strict=False)):
        end = "]" if bucket == len(edges) - 1 and longest == high else ")"
        count = int(batches[bucket])
        share = 100.0 * count / total
        lines.append(f"  Bucket {bucket} [{low:>{width}},{high:>{width}}{end}: {count:6d} batches ({share:5.1f}%)")
    return lines
