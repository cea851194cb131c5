"""The files (or hub datasets) that rows come from, read in chunks whose bounds depend on the content alone.

Owns the formats on disk: JSON lines and JSON arrays, plain, gzip or zstd; Parquet; datasets of the hub. Never looks
into a row (chats.py does). Formats are told by content, not by name.

Reading is sequential and cheap: lines are cut but not parsed, tables pass as Arrow bytes. `rows_of` does the parsing,
in whatever process it is called.
"""

from __future__ import annotations

import codecs
import glob
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from draftmill.data.chats import COLUMNS, BadSample
from draftmill.errors import InputError
from draftmill.names import expanded, looks_local

_MIB = 1 << 20
_LONGEST_LINE = 64 * _MIB
_TABLE_ROWS = 1024
_COMPRESSIONS = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}
_GLOB_CHARACTERS = frozenset("*?[")


@dataclass(frozen=True, slots=True)
class Source:
    """A file, or a dataset of the hub (path is None). size: bytes on disk. compression: gzip, zstd or None."""

    name: str
    path: Path | None
    size: int
    compression: str | None = None
    is_parquet: bool = False


@dataclass(frozen=True, slots=True)
class Lines:
    """Whole lines as they stand in a file; `first` is the number of the first, from 1."""

    source: str
    first: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Rows:
    """Parsed rows, or the reason why one could not be; `first` is the number of the first, from 1."""

    source: str
    first: int
    rows: list[Any]


@dataclass(frozen=True, slots=True)
class TableBytes:
    """Rows of a table as an Arrow stream; `first` is the number of the first, from 1."""

    source: str
    first: int
    data: bytes


Piece = Lines | Rows | TableBytes


@dataclass(slots=True)
class Chunk:
    """What becomes one shard. done_bytes: how far its end lies in all sources' bytes on disk."""

    index: int
    pieces: list[Piece] = field(default_factory=list)
    done_bytes: int = 0


def find_sources(inputs: list[str], option: str = "--input") -> list[Source]:
    """The sources that paths, globs and hub ids name, in the order given; a glob's sorted by name.

    option: what gave them, for errors.

    Raises:
        InputError: nothing there, a folder, no permission, or no rows' bytes in any of them.
    """
    if not inputs:
        raise InputError(f"no input; give files, globs or a dataset id with {option}")
    sources = [source for text in inputs for source in _find(text, option)]
    if not any(source.size or source.path is None for source in sources):
        raise InputError(f"{', '.join(source.name for source in sources[:3])} is empty; give files with chats in them")
    return sources


def content_hash(source: Source) -> str:
    """Equal for equal content, whatever the file's name or time."""
    import xxhash

    if source.path is None:
        return f"hub:{_load_hub_dataset(source.name)._fingerprint}"
    digest = xxhash.xxh3_128()
    with source.path.open("rb") as file:
        while block := file.read(4 * _MIB):
            digest.update(block)
    return digest.hexdigest()


def read_chunks(sources: list[Source]) -> Iterator[Chunk]:
    """All rows of all sources, in order, cut into a few hundred chunks of like size.

    Raises:
        InputError: a file is damaged, or a JSON array is malformed (a malformed line is a row's own fault).
    """
    total = sum(source.size * (5 if source.compression else 1) for source in sources)
    chunk_bytes = 1 << max(18, min(26, (total // 256).bit_length()))
    chunk, size, before = Chunk(0), 0, 0
    for source in sources:
        for piece, num_bytes, position in _read(source, chunk_bytes):
            chunk.pieces.append(piece)
            size += num_bytes
            chunk.done_bytes = before + position
            if size >= chunk_bytes:
                yield chunk
                chunk, size = Chunk(chunk.index + 1), 0
        before += source.size
    if chunk.pieces:
        chunk.done_bytes = before
        yield chunk


def rows_of(piece: Piece) -> Iterator[tuple[int, Any]]:
    """The number and the parsed form of each row of a piece; BadSample in place of one that can't be parsed."""
    if isinstance(piece, Lines):
        for number, line in enumerate(piece.data.split(b"\n"), piece.first):
            if line.strip():
                yield number, _parse_line(line)
        return
    rows: Iterable[Any]
    if isinstance(piece, TableBytes):
        import pyarrow as pa

        rows = map(_without_nulls, pa.ipc.open_stream(piece.data).read_all().to_pylist())
    else:
        rows = piece.rows
    yield from enumerate(rows, piece.first)


def _parse_line(line: bytes) -> Any:
    try:
        return json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return BadSample("not valid UTF-8", f"byte {error.start + 1} of the line")
    except json.JSONDecodeError as error:
        return BadSample("not JSON", f"{error.msg}, column {error.colno}")
    except RecursionError:
        return BadSample("not JSON", "nested too deeply")


def _without_nulls(value: Any) -> Any:
    """Columnar files fill what a row does not have with nulls; a template would write them out."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value


def _find(text: str, option: str) -> list[Source]:
    path = Path(expanded(text))
    if path.is_file():
        return [_describe(path)]
    if path.is_dir():
        raise InputError(f"{text} is a folder; give its files, as in {option} '{path / '*.jsonl'}'")
    if _GLOB_CHARACTERS & set(text):
        found = sorted(Path(name) for name in glob.glob(str(path), recursive=True) if os.path.isfile(name))
        if not found:
            raise InputError(f"no file matches {text}; give existing files with {option}")
        return [_describe(each) for each in found]
    if looks_local(text) or path.suffix in _SUFFIXES:
        raise InputError(f"no file at {text}; give an existing file, a glob or a dataset id with {option}")
    _load_hub_dataset(text)
    return [Source(text, None, 0)]


_SUFFIXES = frozenset({".jsonl", ".json", ".ndjson", ".gz", ".zst", ".parquet", ".txt", ".csv", ".arrow"})


def _describe(path: Path) -> Source:
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise InputError(f"{path} can't be read: {error.strerror}") from None
    compression = next((name for mark, name in _COMPRESSIONS.items() if magic.startswith(mark)), None)
    return Source(str(path), path, path.stat().st_size, compression, magic == b"PAR1")


def _load_hub_dataset(text: str) -> Any:
    import datasets

    name, _, split = text.partition(":")
    try:
        return datasets.load_dataset(name, split=split or "train")
    except Exception as error:  # its many causes are all the same to the user: no such file and no such dataset
        first_line = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise InputError(
            f"no file at {text}, and no dataset of that name could be loaded ({first_line}); give an existing file, "
            "a glob or a dataset id (NAME or NAME:SPLIT) with --input"
        ) from error


def _read(source: Source, block_bytes: int) -> Iterator[tuple[Piece, int, int]]:
    """Pieces with their size in memory and the place reached in the source's bytes on disk."""
    import pyarrow as pa

    if source.path is None:
        batches = _load_hub_dataset(source.name).with_format("arrow").iter(batch_size=_TABLE_ROWS)
        yield from _read_tables(source, (table.combine_chunks().to_batches() for table in batches), 0)
        return
    try:
        if source.is_parquet:
            yield from _read_parquet(source, source.path)
        elif _is_array(source):
            yield from _read_array(source, block_bytes)
        else:
            yield from _read_lines(source, block_bytes)
    except (OSError, EOFError, pa.ArrowException) as error:
        raise InputError(f"{source.name} is damaged or can't be read: {error}; replace it") from None


def _read_parquet(source: Source, path: Path) -> Iterator[tuple[Piece, int, int]]:
    from pyarrow import parquet

    with parquet.ParquetFile(path) as file:
        known = [name for name in file.schema_arrow.names if name in COLUMNS]
        batches = file.iter_batches(batch_size=_TABLE_ROWS, columns=known or None)
        yield from _read_tables(source, ([batch] for batch in batches), max(1, file.metadata.num_rows))


def _read_tables(source: Source, tables: Iterable[list[Any]], num_rows: int) -> Iterator[tuple[Piece, int, int]]:
    import pyarrow as pa

    first = 1
    for batches in tables:
        for batch in batches:
            sink = pa.BufferOutputStream()
            with pa.ipc.new_stream(sink, batch.schema) as writer:
                writer.write_batch(batch)
            data = sink.getvalue().to_pybytes()
            piece = TableBytes(source.name, first, data)
            first += len(batch)
            yield piece, len(data), source.size * (first - 1) // num_rows if num_rows else 0


class _Stream:
    """A source's bytes, decompressed. `position` is the place in the file on disk."""

    def __init__(self, source: Source) -> None:
        import pyarrow as pa

        assert source.path is not None
        self._file: IO[bytes] = source.path.open("rb")
        self._stream: Any = (
            pa.CompressedInputStream(self._file, source.compression) if source.compression else self._file
        )

    @property
    def position(self) -> int:
        return self._file.tell()

    def read(self, num_bytes: int) -> bytes:
        return self._stream.read(num_bytes)

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()
        self._file.close()


def _is_array(source: Source) -> bool:
    """Whether the whole file is one JSON array, and not lines that are arrays (chats without a name)."""
    with _Stream(source) as stream:
        head = stream.read(1 << 16).removeprefix(codecs.BOM_UTF8).lstrip()
    line, _, rest = head.partition(b"\n")
    if not head.startswith(b"["):
        return False
    try:
        json.loads(line)
    except ValueError:
        return True
    return not rest.strip()


def _read_lines(source: Source, block_bytes: int) -> Iterator[tuple[Piece, int, int]]:
    with _Stream(source) as stream:
        number, begun, first_block = 1, bytearray(), True
        while block := stream.read(block_bytes):
            if first_block:
                block, first_block = block.removeprefix(codecs.BOM_UTF8), False
            cut = block.rfind(b"\n") + 1
            if cut == 0:
                begun += block[: _LONGEST_LINE + 1 - len(begun)]  # the rest of an endless line is let go
                continue
            end_of_begun = block.index(b"\n") + 1 if len(begun) > _LONGEST_LINE else 0
            if end_of_begun:
                yield Rows(source.name, number, [_too_long()]), 0, stream.position
                number, begun = number + 1, bytearray()
            lines = bytes(begun) + block[end_of_begun:cut]
            begun = bytearray(block[cut:])
            if lines:
                yield Lines(source.name, number, lines), len(lines), stream.position
                number += lines.count(b"\n")
        if len(begun) > _LONGEST_LINE:
            yield Rows(source.name, number, [_too_long()]), 0, stream.position
        elif begun:
            yield Lines(source.name, number, bytes(begun)), len(begun), stream.position


def _too_long() -> BadSample:
    return BadSample(f"line longer than {_LONGEST_LINE // _MIB} MiB")


def _read_array(source: Source, block_bytes: int) -> Iterator[tuple[Piece, int, int]]:
    first, rows, size = 1, [], 0
    with _Stream(source) as stream:
        for row, num_characters in _array_items(source.name, stream):
            rows.append(row)
            size += num_characters
            if size >= block_bytes:
                yield Rows(source.name, first, rows), size, stream.position
                first, rows, size = first + len(rows), [], 0
        if rows:
            yield Rows(source.name, first, rows), size, stream.position


def _array_items(name: str, stream: _Stream) -> Iterator[tuple[Any, int]]:
    """The items of a JSON array, parsed one by one as the text comes in."""
    decode, scan = codecs.getincrementaldecoder("utf-8")().decode, json.JSONDecoder().raw_decode
    text, lines_before, ended, at, expect_item = "", 0, False, 0, True
    while not text:
        text = decode(stream.read(_MIB)).removeprefix("\ufeff").lstrip()
    at = 1  # past the bracket
    while True:
        at = _skip_space(text, at)
        try:
            if at < len(text):
                if text[at] == "]":
                    return
                if not expect_item:
                    if text[at] != ",":
                        raise json.JSONDecodeError("Expecting ',' or ']'", text, at)
                    at, expect_item = at + 1, True
                    continue
                item, end = scan(text, at)
                if end < len(text) or ended or isinstance(item, dict | list | str):
                    yield item, end - at
                    at, expect_item = end, False
                    continue
            problem = json.JSONDecodeError("Unexpected end of file", text, len(text))
        except json.JSONDecodeError as error:
            problem = error
        except RecursionError:
            raise InputError(f"{name} is not JSON: it is nested too deeply") from None
        if ended:
            line = lines_before + problem.lineno
            raise InputError(f"{name}, line {line} is not JSON: {problem.msg}; mend the file") from None
        block = stream.read(max(_MIB, len(text) - at))  # at least double: a long item is not scanned over and over
        lines_before += text.count("\n", 0, at)
        try:
            text, at, ended = text[at:] + decode(block, not block), 0, not block
        except UnicodeDecodeError as error:
            raise InputError(f"{name} is not valid UTF-8: {error.reason}; mend the file") from None


def _skip_space(text: str, at: int) -> int:
    while at < len(text) and text[at] in " \t\r\n":
        at += 1
    return at
