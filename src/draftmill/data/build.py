"""Writing a store: shards by several processes, one lock, atomic from the first byte to the last.

Owns the folder while it is being built. Never tokenizes and never reads inputs (prepare.py does).

A shard is written under another name, flushed, renamed; its record (`shard-K.json`) is written after it and is what
says that shard K is done. So a kill at any moment loses at most the shards in flight, and the next build with the
same fingerprint goes on from those that are done. `store.json` comes last: until then nobody sees the new store, and
the one that was there before stays whole and readable.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np

from draftmill.data.store import BUILD_PREFIX, DATA_PREFIX, LOCK_FILE, META_FILE, STORE_FORMAT, read_meta
from draftmill.errors import InputError

_OURS = re.compile(rf"({DATA_PREFIX}|{BUILD_PREFIX})[0-9a-f]{{16}}|\.{re.escape(META_FILE)}\.\d+")
# A record batch's offsets are int32, and a reader maps whole batches.
_TOKENS_PER_RECORD_BATCH = 1 << 24

Sample = tuple[np.ndarray, np.ndarray]
"""input_ids int32 [length] and loss_mask bool [length]."""


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[IO[bytes]]:
    """A file that appears under its name only when it is whole and on the disk."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def sync_folder(path: Path) -> None:
    """Put the names in a folder on the disk, not only the files."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_shard(
    folder: Path,
    index: int,
    samples: Sequence[Sample],
    record: dict[str, Any],
    vocab_size: int,
    arrays: dict[str, np.ndarray] | None = None,
) -> None:
    """Write samples as shard `index` of an unfinished store, then its record.

    Called by any process, for an index that no other process writes. Raises OSError, as on a full disk.

    Args:
        record: anything JSON can hold; see StoreBuild.record.
        arrays: more by name, one entry a sample; see StoreBuild.array.
    """
    with atomic_file(folder / f"shard-{index:06d}.arrow") as file:
        _write_arrow(file, samples)
    with atomic_file(folder / f"shard-{index:06d}.npz") as file:
        ids = np.concatenate([ids for ids, _ in samples]) if samples else np.empty(0, np.int32)
        counts = np.bincount(ids, minlength=vocab_size)
        used = np.flatnonzero(counts)
        index_arrays: dict[str, Any] = {
            "lengths": np.array([len(ids) for ids, _ in samples], dtype=np.int32),
            "num_supervised": np.array([np.count_nonzero(mask) for _, mask in samples], dtype=np.int32),
            "used": used.astype(np.int32),
            "counts": counts[used].astype(np.int64),
            **(arrays or {}),
        }
        np.savez(file, **index_arrays)
    with atomic_file(folder / f"shard-{index:06d}.json") as file:
        file.write(json.dumps(record, ensure_ascii=False).encode("utf-8", "surrogatepass"))
    sync_folder(folder)


def _features() -> Any:
    import datasets

    return datasets.Features(
        {"input_ids": datasets.List(datasets.Value("int32")), "loss_mask": datasets.List(datasets.Value("bool"))}
    )


def _write_arrow(file: IO[bytes], samples: Sequence[Sample]) -> None:
    import pyarrow as pa

    schema = _features().arrow_schema
    with pa.ipc.new_stream(file, schema) as writer:
        for first, last in _record_batches([len(ids) for ids, _ in samples]):
            part = samples[first:last]
            offsets = pa.array(np.cumsum([0, *(len(ids) for ids, _ in part)]), type=pa.int32())
            ids = pa.array(np.concatenate([ids for ids, _ in part]).astype(np.int32, copy=False))
            mask = pa.array(np.concatenate([mask for _, mask in part]))
            arrays = [pa.ListArray.from_arrays(offsets, ids), pa.ListArray.from_arrays(offsets, mask)]
            writer.write_batch(pa.record_batch(arrays, schema=schema))


def _record_batches(lengths: Sequence[int]) -> Iterator[tuple[int, int]]:
    first = tokens = 0
    for row, length in enumerate(lengths):
        if tokens and tokens + length > _TOKENS_PER_RECORD_BATCH:
            yield first, row
            first, tokens = row, 0
        tokens += length
    if first < len(lengths):
        yield first, len(lengths)


class StoreBuild:
    """The right to write a store at `output`, held until `close`; a context manager.

    finished   the description of the store already there, or None
    folder     where the shards go, made by `start`
    """

    def __init__(self, output: str | os.PathLike[str], fingerprint: str) -> None:
        """Lock the folder, making it where there is none.

        Raises:
            InputError: the folder holds something else, can't be written, or another process is writing in it.
        """
        self.output = Path(output)
        self.fingerprint = fingerprint
        self.folder = self.output / f"{BUILD_PREFIX}{fingerprint[:16]}"
        self._made_output = not self.output.exists()
        self._lock: int | None = None
        refuse_foreign(self.output)
        self._lock = _take_lock(self.output)
        try:
            self.finished = read_meta(self.output)
        except InputError:
            self.close()
            raise

    def start(self) -> set[int]:
        """Make the folder of shards and say which shards an earlier, broken-off build has left done."""
        target = self.output / f"{DATA_PREFIX}{self.fingerprint[:16]}"
        if target.exists() and (self.finished is None or self.finished["folder"] != target.name):
            target.rename(self.folder)  # killed after it was whole and before store.json said so
        self.folder.mkdir(exist_ok=True)
        for leftover in [*self.folder.glob(".*"), *self.output.glob(f".{META_FILE}.*")]:
            leftover.unlink()
        return {int(path.stem.removeprefix("shard-")) for path in self.folder.glob("shard-*.json")}

    def record(self, index: int) -> dict[str, Any]:
        """What `write_shard` was given as the record of shard `index`."""
        text = (self.folder / f"shard-{index:06d}.json").read_bytes().decode("utf-8", "surrogatepass")
        return json.loads(text)

    def array(self, index: int, name: str) -> np.ndarray:
        """An array that `write_shard` was given for shard `index`."""
        with np.load(self.folder / f"shard-{index:06d}.npz", allow_pickle=False) as arrays:
            return arrays[name]

    def finish(
        self,
        num_shards: int,
        meta: dict[str, Any],
        report: dict[str, Any],
        vocab_size: int,
        kept: Callable[[int], np.ndarray | None] = lambda index: None,
    ) -> dict[str, Any]:
        """Turn shards 0..num_shards-1 into the store, and remove the one that was there before.

        Args:
            meta: goes into store.json, beside the counts.
            report: goes into report.json.
            kept: for a shard, bool [rows] of the samples to keep, or None for all.

        Returns:
            The description of the finished store.
        """
        lengths, supervised, counts = [], [], np.zeros(vocab_size, dtype=np.int64)
        for index in range(num_shards):
            rows = self._finish_shard(index, num_shards, kept(index), counts)
            lengths.append(rows[0])
            supervised.append(rows[1])
        arrays = {
            "lengths": np.concatenate([np.empty(0, np.int32), *lengths]),
            "num_supervised": np.concatenate([np.empty(0, np.int32), *supervised]),
            "token_counts": counts,
        }
        for name, array in arrays.items():
            whole = io.BytesIO()  # straight into a file NumPy writes past Python, and can't say that the disk is full
            np.save(whole, array)
            with atomic_file(self.folder / f"{name}.npy") as file:
                file.write(whole.getbuffer())
        self._describe_for_datasets(num_shards)
        _write_json(self.folder / "report.json", report)
        sync_folder(self.folder)
        return self._publish(meta, arrays)

    def _finish_shard(
        self, index: int, num_shards: int, kept: np.ndarray | None, counts: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        staged = self.folder / f"shard-{index:06d}.arrow"
        final = self.folder / f"data-{index:05d}-of-{num_shards:05d}.arrow"
        with np.load(self.folder / f"shard-{index:06d}.npz", allow_pickle=False) as index_arrays:
            rows = index_arrays["lengths"], index_arrays["num_supervised"]
            used, used_counts = index_arrays["used"], index_arrays["counts"]
        if kept is not None and not kept.all():
            rows = rows[0][kept], rows[1][kept]
            if not final.exists():
                _rewrite(staged, final, kept)
            used, used_counts = np.unique(_token_ids(final), return_counts=True)
        elif not final.exists():
            staged.rename(final)
        counts[used] += used_counts
        return rows

    def _describe_for_datasets(self, num_shards: int) -> None:
        import datasets

        files = [{"filename": f"data-{index:05d}-of-{num_shards:05d}.arrow"} for index in range(num_shards)]
        state: dict[str, Any] = {
            "_data_files": files,
            "_fingerprint": self.fingerprint[:16],
            "_format_columns": None,
            "_format_kwargs": {},
            "_format_type": None,
            "_output_all_columns": False,
            "_split": None,
        }
        _write_json(self.folder / datasets.config.DATASET_STATE_JSON_FILENAME, state)
        info = datasets.DatasetInfo(features=_features())
        info.write_to_directory(str(self.folder))

    def _publish(self, meta: dict[str, Any], arrays: dict[str, np.ndarray]) -> dict[str, Any]:
        name = f"{DATA_PREFIX}{self.fingerprint[:16]}"
        target = self.output / name
        if target.exists():  # a damaged store of the same fingerprint
            shutil.rmtree(target)
        self.folder.rename(target)
        description = {
            "kind": "draftmill store",
            "format": STORE_FORMAT,
            "fingerprint": self.fingerprint,
            "folder": name,
            "num_samples": len(arrays["lengths"]),
            "num_tokens": int(arrays["lengths"].sum(dtype=np.int64)),
            "num_supervised": int(arrays["num_supervised"].sum(dtype=np.int64)),
            **meta,
        }
        _write_json(self.output / META_FILE, description)
        sync_folder(self.output)
        for path in target.glob("shard-*"):
            path.unlink()
        for path in self.output.iterdir():
            if path.is_dir() and path.name != name and _OURS.fullmatch(path.name):
                shutil.rmtree(path)
        self.finished = description
        return description

    def discard(self) -> None:
        """Remove what this build has written, and the folder itself where this build made it."""
        shutil.rmtree(self.folder, ignore_errors=True)
        if self.finished is None:
            (self.output / LOCK_FILE).unlink(missing_ok=True)
        if self._made_output:
            with contextlib.suppress(OSError):  # not empty: another build's leftovers
                self.output.rmdir()

    def close(self) -> None:
        """Give the lock back; can be called twice."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> StoreBuild:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def write_store(
    output: str | os.PathLike[str],
    samples: Sequence[Sample],
    *,
    vocab_size: int,
    max_length: int,
    fingerprint: str = "0" * 32,
    meta: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Write samples that are already tokenized as a whole store, in one process.

    Returns:
        The description of the store, as in `Store.meta`.
    """
    described = {
        "tokenizer_name": None,
        "tokenizer_hash": None,
        "vocab_size": vocab_size,
        "template_hash": None,
        "template_arguments": {},
        "max_length": max_length,
        "loss_on": "all",
        "inputs": [],
        **(meta or {}),
    }
    with StoreBuild(output, fingerprint) as build:
        build.start()
        write_shard(build.folder, 0, samples, {}, vocab_size)
        return build.finish(1, described, {}, vocab_size)


def is_disk_full(error: OSError) -> bool:
    """Whether a write failed for want of room."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def refuse_foreign(output: Path) -> None:
    if not output.exists():
        return
    if not output.is_dir():
        raise InputError(f"{output} is a file; give a folder as --output")
    try:
        names = {path.name for path in output.iterdir()}
    except OSError as error:
        raise InputError(f"{output} can't be read: {error.strerror}; give another --output") from None
    foreign = sorted(name for name in names - {META_FILE, LOCK_FILE} if not _OURS.fullmatch(name))
    if foreign:
        raise InputError(
            f"{output} already holds something else ({foreign[0]}); it was left as it is; give an empty or new --output"
        )


def _take_lock(output: Path) -> int:
    while True:
        try:
            output.mkdir(parents=True, exist_ok=True)
            lock = os.open(output / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise InputError(f"can't write in {output}: {error.strerror}; give another --output") from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            owner = os.pread(lock, 32, 0).decode("ascii", "replace").strip() or "unknown"
            os.close(lock)
            raise InputError(
                f"another process (pid {owner}) is writing the store at {output}; wait for it or give another --output"
            ) from None
        with contextlib.suppress(FileNotFoundError):
            if os.stat(output / LOCK_FILE).st_ino == os.fstat(lock).st_ino:
                break
        os.close(lock)  # its last owner removed the file after we had opened it
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
    return lock


def _rewrite(source: Path, target: Path, kept: np.ndarray) -> None:
    import pyarrow as pa

    with (
        pa.memory_map(str(source)) as mapped,
        pa.ipc.open_stream(mapped) as reader,
        atomic_file(target) as file,
        pa.ipc.new_stream(file, reader.schema) as writer,
    ):
        first = 0
        for batch in reader:
            part = batch.filter(pa.array(kept[first : first + len(batch)]))
            first += len(batch)
            if len(part):
                writer.write_batch(part)


def _token_ids(path: Path) -> np.ndarray:
    import pyarrow as pa

    with pa.memory_map(str(path)) as mapped, pa.ipc.open_stream(mapped) as reader:
        parts = [batch.column("input_ids").flatten().to_numpy() for batch in reader]
    return np.concatenate([np.empty(0, np.int32), *parts])


def _write_json(path: Path, value: Any) -> None:
    with atomic_file(path) as file:
        file.write((json.dumps(value, indent=1, ensure_ascii=True) + "\n").encode())
