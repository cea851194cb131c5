"""The store: tokenized, masked samples on disk, memory-mapped and read lazily.

Owns the layout on disk and the reading of it. Never writes (build.py does), never draws an order (plan.py does),
and imports no torch.

    OUTPUT/
      store.json              what it was made from, written last: a folder without it is no store
      lock                    held by the process that writes
      data-FINGERPRINT/       a folder that `datasets.load_from_disk` opens: input_ids list<int32>, loss_mask list<bool>
        data-K-of-N.arrow     the samples, in the order of the inputs
        lengths.npy           int32 [num_samples], tokens of each sample
        num_supervised.npy    int32 [num_samples], supervised tokens of each sample
        token_counts.npy      int64 [vocab_size], how often each id occurs
        report.json           rows in, kept and skipped
      building-FINGERPRINT/   the same, unfinished; the next `prepare` with these settings goes on from it
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from draftmill.errors import InputError

STORE_FORMAT = 1
META_FILE = "store.json"
LOCK_FILE = "lock"
DATA_PREFIX = "data-"
BUILD_PREFIX = "building-"


def read_meta(path: Path) -> dict[str, Any] | None:
    """The description of the store at `path`, or None where there is none (yet).

    Raises:
        InputError: there is a description, but not one this version can read.
    """
    try:
        text = (path / META_FILE).read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path / META_FILE} can't be read: {error}") from None
    try:
        meta = json.loads(text)
    except json.JSONDecodeError:
        raise InputError(f"{path / META_FILE} is damaged; remove {path} and run draftmill prepare again") from None
    if not isinstance(meta, dict) or meta.get("kind") != "draftmill store":
        raise InputError(f"{path / META_FILE} was not written by draftmill prepare; give another folder")
    if meta.get("format") != STORE_FORMAT:
        raise InputError(
            f"the store at {path} has format {meta.get('format')}, this version reads {STORE_FORMAT}; "
            "run draftmill prepare again"
        )
    return meta


class Store:
    """A finished store, open for reading. Safe to read from several threads at once.

    lengths         int32 [num_samples], tokens of each sample
    num_supervised  int32 [num_samples], tokens of each sample that the target would have written
    meta            tokenizer_name, tokenizer_hash, vocab_size, template_hash, template_arguments, max_length, loss_on,
                    num_samples, num_tokens, num_supervised, inputs, version
    """

    def __init__(self, path: Path, meta: dict[str, Any]) -> None:
        self.path = path
        self.meta = meta
        self.fingerprint: str = meta["fingerprint"]
        self._folder = path / meta["folder"]
        self.lengths = self._index("lengths.npy", np.int32)
        self.num_supervised = self._index("num_supervised.npy", np.int32)
        self.num_samples: int = meta["num_samples"]
        if not len(self.lengths) == len(self.num_supervised) == self.num_samples:
            raise self._damaged("its index does not have one entry a sample")
        self._chunks = self._open_arrow()
        self._first_rows = np.cumsum([0, *(len(chunk.offsets) - 1 for chunk in self._chunks)])
        if self._first_rows[-1] != self.num_samples:
            raise self._damaged(f"{self._first_rows[-1]} samples on disk, {self.num_samples} in its index")

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, max_length: int | None = None) -> Store:
        """Open a store made by `draftmill prepare`; nothing but its indexes is read.

        Args:
            path: its folder.
            max_length: the longest sample a run asks for, in tokens; the store must have been cut at it.

        Raises:
            InputError: no such folder, no finished store in it, damaged files, or another max_length.
        """
        path = Path(path)
        if not path.is_dir():
            raise InputError(f"no store at {path}; make one with draftmill prepare --output {path}")
        meta = read_meta(path)
        if meta is None:
            if any(path.glob(f"{BUILD_PREFIX}*")):
                raise InputError(f"the store at {path} is unfinished; run the same draftmill prepare command again")
            raise InputError(f"{path} holds no store (no {META_FILE} in it); make one with draftmill prepare")
        if max_length is not None and meta["max_length"] != max_length:
            raise InputError(
                f"the store at {path} was cut at max_length {meta['max_length']}, the run asks for {max_length}; "
                f"set data.max_length={meta['max_length']} or run draftmill prepare --max-length {max_length}"
            )
        return cls(path, meta)

    def __len__(self) -> int:
        return self.num_samples

    def read(self, sample_ids: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
        """The samples themselves, in the order asked for.

        Args:
            sample_ids: integers [n] in 0..num_samples-1; repeats are allowed.

        Returns:
            For each, input_ids int32 [length] (a read-only view of the mapped file) and loss_mask bool [length].
        """
        ids = np.asarray(sample_ids, dtype=np.int64)
        if ids.size and (ids.min() < 0 or ids.max() >= self.num_samples):
            raise IndexError(f"sample ids must lie in 0..{self.num_samples - 1}, got {ids.min()}..{ids.max()}")
        chunks = np.searchsorted(self._first_rows, ids, side="right") - 1
        return [
            self._chunks[chunk].sample(row)
            for chunk, row in zip(chunks.tolist(), (ids - self._first_rows[chunks]).tolist(), strict=True)
        ]

    def count(self, token_id: int) -> int:
        """How often a token id occurs in all samples; 0 for an id the data never uses."""
        counts = self.token_counts
        return int(counts[token_id]) if 0 <= token_id < len(counts) else 0

    @property
    def token_counts(self) -> np.ndarray:
        """Occurrences of each token id, int64 [vocab_size], mapped from disk."""
        return self._index("token_counts.npy", np.int64, mapped=True)

    def _index(self, name: str, dtype: type[np.generic], *, mapped: bool = False) -> np.ndarray:
        try:
            array = np.load(self._folder / name, mmap_mode="r" if mapped else None, allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            raise self._damaged(f"{name}: {error}") from None
        if array.dtype != dtype or array.ndim != 1:
            raise self._damaged(f"{name} holds {array.dtype} of {array.ndim} dimensions")
        return array

    def _open_arrow(self) -> list[_Chunk]:
        import datasets
        import pyarrow as pa

        try:
            table = datasets.load_from_disk(str(self._folder), keep_in_memory=False).data
            columns = table.column("input_ids").chunks, table.column("loss_mask").chunks
            return [_Chunk(ids, mask) for ids, mask in zip(*columns, strict=True) if len(ids)]
        except (OSError, KeyError, ValueError, pa.ArrowException) as error:
            raise self._damaged(str(error)) from None

    def _damaged(self, why: str) -> InputError:
        return InputError(
            f"the store at {self.path} is damaged ({' '.join(why.split())}); remove it and run draftmill prepare again"
        )


class _Chunk:
    """One record batch: views of the mapped buffers, so that a sample costs one slice and no Arrow call."""

    __slots__ = ("bits", "first_bit", "mask_offsets", "offsets", "values")

    def __init__(self, ids: Any, mask: Any) -> None:
        self.offsets: np.ndarray = ids.offsets.to_numpy()
        self.mask_offsets: np.ndarray = mask.offsets.to_numpy()
        # .values keeps what lies before the first offset, as the offsets count from there
        self.values: np.ndarray = ids.values.to_numpy(zero_copy_only=True)
        self.bits: np.ndarray = np.frombuffer(mask.values.buffers()[1], dtype=np.uint8)
        self.first_bit: int = mask.values.offset

    def sample(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        start, stop = int(self.offsets[row]), int(self.offsets[row + 1])
        first, last = int(self.mask_offsets[row]) + self.first_bit, int(self.mask_offsets[row + 1]) + self.first_bit
        if last - first != stop - start:
            raise RuntimeError(f"a sample has {stop - start} tokens and a mask of {last - first}: the store is damaged")
        bits = np.unpackbits(self.bits[first // 8 : (last + 7) // 8], bitorder="little")
        return self.values[start:stop], bits[first % 8 : first % 8 + stop - start].view(np.bool_)
