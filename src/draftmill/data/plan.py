"""Which samples make up which batch, in every epoch, from (seed, epoch) alone.

Owns the order of the data, its cutting into batches and the split into training and held-out samples. Never reads a
sample (store.py does) and imports no torch.

bucketed: inside a length bucket the samples are shuffled and cut into windows; a window is sorted by length and cut
into batches of neighbours, as many rows as the token budget allows at the batch's own longest sample. What is left at
the end of the windows is gathered into batches of its own. All batches are then shuffled.

packed: shuffled documents, window by window, are packed into rows of max_length tokens; a batch is a fixed number of
rows.

An epoch's plan is made when first asked for and kept while it is in use: about 20 bytes a sample.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Literal

import numpy as np

from draftmill.data.buckets import bucket_lines, bucket_of, check_edges, choose_edges
from draftmill.data.packing import pack
from draftmill.errors import InputError

_logger = logging.getLogger(__name__)

_PLAN_STREAM = 0x9A7C
_SPLIT_STREAM = 0x5917
# Batches in a window at most, measured with bench/data_padding.py: wider windows pad less and mix less. A small bucket
# has narrower ones, at least four, or its batches would be the same in every epoch.
_WINDOW_BATCHES = 256
_LEAST_WINDOWS = 4
_PACKING_WINDOW = 16384
_HELDOUT_SHARE = 5  # at most one sample in five is held out
_EPOCHS_KEPT = 2


@dataclass(frozen=True, slots=True)
class _Epoch:
    """ids: sample ids, batch after batch. first: start of each batch in ids, and the end. bucket: of each batch.
    rows: for packed, the row of each sample inside its batch."""

    ids: np.ndarray
    first: np.ndarray
    bucket: np.ndarray
    rows: np.ndarray | None


class BatchPlan:
    """The batches of every epoch: each sample exactly once in each, any batch addressable directly. Thread-safe."""

    def __init__(
        self,
        lengths: np.ndarray,
        *,
        max_length: int,
        token_budget: int,
        min_rows: int,
        max_rows: int,
        num_buckets: int,
        bucket_edges: list[int] | None,
        round_to: int,
        seed: int,
        batching: Literal["bucketed", "packed"] = "bucketed",
        sample_ids: np.ndarray | None = None,
    ) -> None:
        """Plan batches over samples.

        Args:
            lengths: tokens of each sample of the store, int32 [num_samples].
            max_length: tokens of the longest sample allowed, and of a packed row.
            token_budget: tokens of a batch, padding included; more only where min_rows forces it.
            min_rows, max_rows: bounds of a bucketed batch's rows; a bucket's last batch may have fewer than min_rows.
            num_buckets, bucket_edges: buckets chosen from the histogram, or their upper edges.
            round_to: row lengths are multiples of this, or max_length.
            seed: with the epoch, all that the order depends on.
            sample_ids: the samples to plan; all by default.

        Raises:
            InputError: no samples, a sample longer than max_length or than the last edge.
        """
        self._ids = np.arange(len(lengths)) if sample_ids is None else np.asarray(sample_ids, dtype=np.int64)
        self._lengths = np.asarray(lengths, dtype=np.int32)[self._ids]
        if not len(self._ids):
            raise InputError("there is no sample to make batches of; run draftmill prepare on more data")
        longest = int(self._lengths.max())
        if longest > max_length:
            raise InputError(
                f"a sample has {longest} tokens, data.max_length is {max_length}; run draftmill prepare "
                f"--max-length {max_length}"
            )
        self.max_length, self.token_budget, self.round_to, self.seed = max_length, token_budget, round_to, seed
        self.min_rows, self.max_rows = min_rows, max_rows
        self.batching = batching
        if batching == "packed":
            self.edges = [max_length + 1]
        elif bucket_edges is not None:
            self.edges = check_edges(bucket_edges, longest)
        else:
            self.edges = choose_edges(self._lengths, num_buckets, max_length, round_to)
        self.packed_rows = max(1, token_budget // max_length)
        self._epochs: OrderedDict[int, _Epoch] = OrderedDict()
        self._counts: dict[int, int] = {}
        self._lock = threading.Lock()

    @property
    def num_samples(self) -> int:
        """Samples of an epoch."""
        return len(self._ids)

    @property
    def context_slots(self) -> int:
        """The most real tokens that any batch of any epoch can hold."""
        if self.batching == "packed":
            return self.packed_rows * self.max_length
        present = np.unique(self._lengths).astype(np.int64)
        return int((present * np.minimum(self._rows_for(present), self.num_samples)).max())

    @property
    def padded_slots(self) -> int:
        """The most tokens, padding included, that any batch of any epoch can hold."""
        if self.batching == "packed":
            return self.packed_rows * self.max_length
        present = np.unique(self._lengths).astype(np.int64)
        return int((self.row_length(present) * np.minimum(self._rows_for(present), self.num_samples)).max())

    def num_batches(self, epoch: int) -> int:
        """Batches of an epoch; it varies a little from epoch to epoch."""
        with self._lock:
            count = self._counts.get(epoch)
        return len(self._epoch(epoch).bucket) if count is None else count

    def total(self, epochs: int) -> int:
        """Batches of epochs 0..epochs-1."""
        return sum(self.num_batches(epoch) for epoch in range(epochs))

    def locate(self, flat_index: int) -> tuple[int, int]:
        """The (epoch, index) of a number in the endless stream of epoch 0's batches, epoch 1's and so on."""
        if flat_index < 0:
            raise IndexError(f"a batch has a number from 0 on, got {flat_index}")
        epoch = 0
        while flat_index >= (count := self.num_batches(epoch)):
            flat_index -= count
            epoch += 1
        return epoch, flat_index

    def sample_ids(self, epoch: int, index: int) -> np.ndarray:
        """The samples of a batch, int64; row by row where rows are packed."""
        plan, first, last = self._batch(epoch, index)
        return plan.ids[first:last]

    def rows(self, epoch: int, index: int) -> np.ndarray:
        """The row of each of a batch's samples, int32, ascending: 0, 1, 2, ... where every row is one sample."""
        plan, first, last = self._batch(epoch, index)
        return np.arange(last - first, dtype=np.int32) if plan.rows is None else plan.rows[first:last]

    def bucket(self, epoch: int, index: int) -> int:
        """The length bucket of a batch; 0 where rows are packed."""
        plan, _, _ = self._batch(epoch, index)
        return int(plan.bucket[index])

    def row_length(self, longest: np.ndarray) -> np.ndarray:
        """Tokens of a row, padding included, for the longest sample of its batch: rounded up, at most max_length."""
        return np.minimum(-(-longest // self.round_to) * self.round_to, self.max_length)

    def shape(self, longest: int, num_samples: int) -> tuple[int, int]:
        """Rows and row length of a batch; packed ones all have the same."""
        if self.batching == "packed":
            return self.packed_rows, self.max_length
        return num_samples, int(self.row_length(np.array(longest)))

    def padding_share(self, epoch: int = 0) -> float:
        """Share of an epoch's target tokens that are padding."""
        plan = self._epoch(epoch)
        real = int(self._lengths.sum(dtype=np.int64))
        if self.batching == "packed":
            return 1.0 - real / (len(plan.bucket) * self.packed_rows * self.max_length)
        by_sample = np.zeros(int(self._ids.max()) + 1, dtype=np.int32)
        by_sample[self._ids] = self._lengths
        longest = np.maximum.reduceat(by_sample[plan.ids], plan.first[:-1]).astype(np.int64)
        return 1.0 - real / int((self.row_length(longest) * np.diff(plan.first)).sum())

    def describe(self) -> list[str]:
        """What a start prints: samples, batches per epoch, a line a bucket, and the padding share."""
        plan = self._epoch(0)
        rows = np.diff(plan.first)
        lines = [
            f"{self.num_samples} samples loaded (Arrow-backed, lazy access)",
            f"Batches per epoch: {len(rows)} (min={rows.min()} max={rows.max()} avg={rows.mean():.1f})",
        ]
        if self.batching == "bucketed":
            batches = np.bincount(plan.bucket, minlength=len(self.edges))
            lines += bucket_lines(self.edges, batches, int(self._lengths.max()))
        else:
            lines.append(f"  Packed into {self.packed_rows} rows of {self.max_length} tokens")
        return [*lines, f"Padding: {100.0 * self.padding_share():.2f}% of the target's tokens"]

    def _rows_for(self, longest: np.ndarray) -> np.ndarray:
        return np.clip(self.token_budget // self.row_length(longest), self.min_rows, self.max_rows)

    def _batch(self, epoch: int, index: int) -> tuple[_Epoch, int, int]:
        plan = self._epoch(epoch)
        if not 0 <= index < len(plan.bucket):
            raise IndexError(f"epoch {epoch} has batches 0..{len(plan.bucket) - 1}, got {index}")
        return plan, int(plan.first[index]), int(plan.first[index + 1])

    def _epoch(self, epoch: int) -> _Epoch:
        with self._lock:
            plan = self._epochs.get(epoch)
            if plan is None:
                random = np.random.default_rng([_PLAN_STREAM, self.seed, epoch])
                plan = self._packed(random) if self.batching == "packed" else self._bucketed(random)
                self._epochs[epoch] = plan
                self._counts[epoch] = len(plan.bucket)
                if len(self._epochs) > _EPOCHS_KEPT:
                    self._epochs.popitem(last=False)
            self._epochs.move_to_end(epoch)
            return plan

    def _bucketed(self, random: np.random.Generator) -> _Epoch:
        bucket_of_sample = bucket_of(self._lengths, self.edges)
        parts, sizes, buckets = [], [], []
        for bucket in range(len(self.edges)):
            members = np.flatnonzero(bucket_of_sample == bucket)
            if len(members):
                order, rows = self._cut_bucket(members, random)
                parts.append(order)
                sizes.append(rows)
                buckets.append(np.full(len(rows), bucket, dtype=np.int16))
        order, size = np.concatenate(parts), np.concatenate(sizes)
        first = np.cumsum(size) - size
        shuffled = random.permutation(len(size))
        size_shuffled = size[shuffled]
        offsets = np.concatenate([[0], np.cumsum(size_shuffled)])
        # sample j of the shuffled batch b stood at first[shuffled[b]] + j
        source = np.repeat(first[shuffled] - offsets[:-1], size_shuffled) + np.arange(len(order))
        ids = self._ids[order[source]]
        return _Epoch(ids, offsets, np.concatenate(buckets)[shuffled], None)

    def _cut_bucket(self, members: np.ndarray, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """The bucket's samples in order, and the rows of each batch."""
        members = random.permutation(members)
        lengths = self._lengths[members]
        mean_rows = float(self._rows_for(lengths.astype(np.int64)).mean())
        window = max(int(2 * mean_rows), min(int(_WINDOW_BATCHES * mean_rows), -(-len(members) // _LEAST_WINDOWS)))
        order = np.lexsort((-lengths, np.arange(len(members)) // window))
        members, lengths = members[order], lengths[order]
        fit = self._rows_for(lengths.astype(np.int64)).tolist()
        full, sizes, left = [], [], []
        for begin in range(0, len(members), window):
            end, at = min(begin + window, len(members)), begin
            while at < end and at + fit[at] <= end:
                sizes.append(fit[at])
                at += fit[at]
            full.append(members[begin:at])
            left.append(members[at:end])
        rest = np.concatenate(left)
        if sizes and 0 < len(rest) < self.min_rows:  # join the neighbours: the last batch of the last full window
            last = max(part for part, rows in enumerate(full) if len(rows))
            rest = np.concatenate([full[last][len(full[last]) - sizes[-1] :], rest])
            full[last] = full[last][: len(full[last]) - sizes.pop()]
        rest = rest[np.argsort(-self._lengths[rest], kind="stable")]
        rest_sizes = self._cut_rest(self._lengths[rest])
        return np.concatenate([*full, rest]), np.array(sizes + rest_sizes, dtype=np.int64)

    def _cut_rest(self, lengths: np.ndarray) -> list[int]:
        """Rows of the batches made of what the windows left, longest first; a short last one shares evenly."""
        fit = self._rows_for(lengths.astype(np.int64)).tolist()
        sizes, at = [], 0
        while at < len(lengths):
            sizes.append(min(fit[at], len(lengths) - at))
            at += sizes[-1]
        both = sum(sizes[-2:])
        if len(sizes) > 1 and sizes[-1] < self.min_rows and both >= 2 * self.min_rows:
            sizes[-2:] = [both - both // 2, both // 2]
        return sizes

    def _packed(self, random: np.random.Generator) -> _Epoch:
        order = random.permutation(len(self._ids))
        rows = np.empty(len(order), dtype=np.int64)
        num_rows = 0
        for begin in range(0, len(order), _PACKING_WINDOW):
            window = order[begin : begin + _PACKING_WINDOW]
            in_window = pack(self._lengths[window], self.max_length)
            rows[begin : begin + len(window)] = num_rows + in_window
            num_rows += int(in_window.max()) + 1
        # rows are dealt to batches at random: a window's fullest rows must not stand together
        place = random.permutation(num_rows)[rows]
        by_place = np.argsort(place, kind="stable")
        place = place[by_place]
        num_batches = -(-num_rows // self.packed_rows)
        first = np.searchsorted(place, np.arange(num_batches + 1) * self.packed_rows)
        ids = self._ids[order[by_place]]
        return _Epoch(ids, first, np.zeros(num_batches, dtype=np.int16), (place % self.packed_rows).astype(np.int32))


def split_heldout(num_samples: int, heldout: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Split a store's samples into those trained on and those held out, from the seed alone.

    At most one sample in five is held out; fewer than asked for is logged as a warning.

    Returns:
        Training ids and held-out ids, int64, each ascending.

    Raises:
        InputError: the store has no sample, or too few to hold any out.
    """
    if num_samples < 1:
        raise InputError("the store has no samples; run draftmill prepare on more data")
    if heldout == 0:
        return np.arange(num_samples), np.empty(0, dtype=np.int64)
    taken = min(heldout, num_samples // _HELDOUT_SHARE)
    if taken == 0:
        raise InputError(
            f"the store has {num_samples} samples, too few to hold any out of training (one in {_HELDOUT_SHARE}); "
            "set data.heldout=0 or run draftmill prepare on more data"
        )
    if taken < heldout:
        _logger.warning(
            "Held out %d samples, not %d: at most one in %d of the store's %d",
            taken,
            heldout,
            _HELDOUT_SHARE,
            num_samples,
        )
    order = np.random.default_rng([_SPLIT_STREAM, seed]).permutation(num_samples)
    return np.sort(order[taken:]), np.sort(order[:taken])
