"""Processes that turn chunks into shards.

Owns the processes and their pipes. A worker parses, renders, tokenizes and writes; the parent reads and counts.

A worker ends when its pipe closes, so also when the parent is killed. The first failure of any worker is raised in
the parent, after which all are ended.
"""

from __future__ import annotations

import multiprocessing
import signal
from collections import Counter
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from draftmill.data.build import write_shard
from draftmill.data.chats import BadSample
from draftmill.data.encode import Encoder, EncodeSettings
from draftmill.data.sources import Chunk, Lines, rows_of
from draftmill.errors import InputError


def make_shard(encoder: Encoder, chunk: Chunk, folder: Path) -> dict[str, Any]:
    """Encode a chunk's rows and write them as its shard.

    Returns:
        Its record: rows, skipped and notes by reason, an example of each reason, and where its pieces come from.
    """
    names = [f"{piece.source}, {'line' if isinstance(piece, Lines) else 'row'}" for piece in chunk.pieces]
    numbered = [(piece, number, row) for piece, data in enumerate(chunk.pieces) for number, row in rows_of(data)]
    skipped: Counter[str] = Counter()
    notes: Counter[str] = Counter()
    examples: dict[str, str] = {}
    kept, kept_places, digests = [], [], []
    results = encoder.encode([row for _, _, row in numbered])
    for (piece, number, _), result in zip(numbered, results, strict=True):
        if isinstance(result, BadSample):
            skipped[result.reason] += 1
            where = f"{names[piece]} {number}"
            examples.setdefault(result.reason, where + (f": {result.detail}" if result.detail else ""))
        else:
            notes.update(result.notes)
            kept.append((result.input_ids, result.loss_mask))
            kept_places.append((piece, number))
            digests.append(result.digest)
    record = {"rows": len(numbered), "skipped": skipped, "examples": examples, "notes": notes, "sources": names}
    arrays = {
        "digests": np.frombuffer(b"".join(digests), dtype=np.uint64).reshape(-1, 2),
        "places": np.array(kept_places, dtype=np.int64).reshape(-1, 2),
    }
    write_shard(folder, chunk.index, kept, record, encoder.vocab_size, arrays)
    return record


class WorkerDied(RuntimeError):
    """A worker process ended without saying why, as when memory runs out."""


class Workers:
    """Processes of one kind of work; a context manager that ends them."""

    def __init__(self, num_processes: int, encoder: Encoder, folder: Path) -> None:
        """Start them. They are handed the tokenizer, which spares each the hub and the import of torch; one whose code
        came with the target is loaded again, as its class is known to this process alone."""
        tokenizer = None if encoder.settings.trust_remote_code else encoder.tokenizer
        context = multiprocessing.get_context("spawn")  # the parent may have threads, which do not survive a fork
        self._processes: dict[Connection, Any] = {}
        for number in range(num_processes):
            mine, theirs = context.Pipe()
            process = context.Process(
                target=_work,
                args=(theirs, encoder.settings, tokenizer, folder),
                name=f"draftmill-prepare-{number}",
                daemon=True,
            )
            process.start()
            theirs.close()
            self._processes[mine] = process
        self._idle: list[Connection] = list(self._processes)
        self._busy: dict[Connection, Chunk] = {}

    def submit(self, chunk: Chunk) -> Iterator[tuple[Chunk, dict[str, Any]]]:
        """Hand out a chunk, waiting for an idle worker, and yield what has been done meanwhile."""
        while not self._idle:
            yield from self._collect()
        connection = self._idle.pop()
        self._busy[connection] = Chunk(chunk.index, [], chunk.done_bytes)
        try:
            connection.send(chunk)
        except (BrokenPipeError, ConnectionResetError):
            raise self._died(connection) from None

    def drain(self) -> Iterator[tuple[Chunk, dict[str, Any]]]:
        """Wait for all that was handed out."""
        while self._busy:
            yield from self._collect()

    def _collect(self) -> Iterator[tuple[Chunk, dict[str, Any]]]:
        for connection in wait(list(self._busy)):
            assert isinstance(connection, Connection)
            try:
                result = connection.recv()
            except (EOFError, ConnectionResetError):
                raise self._died(connection) from None
            if isinstance(result, BaseException):
                raise result
            self._idle.append(connection)
            yield self._busy.pop(connection), result

    def _died(self, connection: Connection) -> WorkerDied:
        process = self._processes[connection]
        process.join(timeout=5)
        return WorkerDied(f"{process.name} died (exit code {process.exitcode}), as when memory runs out")

    def __enter__(self) -> Workers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for connection, process in self._processes.items():
            connection.close()
            if kind is not None:
                process.terminate()
        for process in self._processes.values():
            process.join()


def _work(connection: Connection, settings: EncodeSettings, tokenizer: Any, folder: Path) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent has it too, and closes the pipe
    encoder: Encoder | None = None
    while True:
        try:
            chunk = connection.recv()
        except EOFError:
            return
        try:
            encoder = encoder or Encoder(settings, tokenizer)
            result: Any = make_shard(encoder, chunk, folder)
        except (InputError, OSError) as error:
            result = error
        connection.send(result)
