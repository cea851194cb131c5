"""Reading inputs: every format, by content and not by name, with the place of each row; damage named."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_doubles import chat, write_lines
from draftmill.data import sources
from draftmill.data.chats import BadSample
from draftmill.data.sources import content_hash, find_sources, read_chunks, rows_of
from draftmill.errors import InputError

ROWS = [{"messages": chat(f"question {number}", "answer " * (number % 7))} for number in range(200)]


def read(*inputs: str | Path) -> list[tuple[str, int, Any]]:
    """Source, number and content of every row."""
    return [
        (piece.source, number, row)
        for chunk in read_chunks(find_sources([str(each) for each in inputs]))
        for piece in chunk.pieces
        for number, row in rows_of(piece)
    ]


def contents(*inputs: str | Path) -> list[Any]:
    return [row for _, _, row in read(*inputs)]


def zstd(data: bytes) -> bytes:
    return pa.Codec("zstd").compress(data, asbytes=True)


def test_every_format_gives_the_same_rows(tmp_path: Path) -> None:
    plain = write_lines(tmp_path / "a.jsonl", ROWS).read_bytes()
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(plain))
    (tmp_path / "c.jsonl.zst").write_bytes(zstd(plain))
    (tmp_path / "d.json").write_text(json.dumps(ROWS))
    (tmp_path / "e.json").write_text(json.dumps(ROWS, indent=2))
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "f.parquet")
    (tmp_path / "named_wrongly.txt").write_bytes(gzip.compress(plain))
    (tmp_path / "windows.jsonl").write_bytes(b"\xef\xbb\xbf" + plain.replace(b"\n", b"\r\n") + b"\r\n\r\n")
    for path in tmp_path.iterdir():
        assert contents(path) == ROWS, path.name
        assert [number for _, number, _ in read(path)] == list(range(1, 201)), path.name


def test_streams_of_several_members_are_read_to_their_end(tmp_path: Path) -> None:
    half = [write_lines(tmp_path / "x", part).read_bytes() for part in (ROWS[:90], ROWS[90:])]
    (tmp_path / "b.gz").write_bytes(gzip.compress(half[0]) + gzip.compress(half[1]))
    (tmp_path / "c.zst").write_bytes(zstd(half[0]) + zstd(half[1]))
    assert contents(tmp_path / "b.gz") == ROWS
    assert contents(tmp_path / "c.zst") == ROWS


def test_chunks_depend_on_the_content_alone_and_are_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    big = [{"messages": chat("q", "word " * 2000)} for _ in range(150)]
    path = write_lines(tmp_path / "a.jsonl", big)

    def cut() -> list[tuple[int, int]]:
        return [
            (chunk.index, sum(1 for piece in chunk.pieces for _ in rows_of(piece)))
            for chunk in read_chunks(find_sources([str(path)]))
        ]

    assert cut() == cut()
    assert [index for index, _ in cut()] == list(range(len(cut())))
    assert len(cut()) > 4
    assert sum(rows for _, rows in cut()) == 150
    done = [chunk.done_bytes for chunk in read_chunks(find_sources([str(path)]))]
    assert done == sorted(done)
    assert done[-1] == path.stat().st_size


def test_long_arrays_are_read_piece_by_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"text": "é" * 5000, "n": n} for n in range(300)]
    (tmp_path / "a.json").write_text("  \n" + json.dumps(rows, ensure_ascii=False, indent=1))
    monkeypatch.setattr(sources, "_MIB", 1000)
    assert contents(tmp_path / "a.json") == rows


@pytest.mark.parametrize(
    ("text", "rows"),
    [("[]", []), ("[\n]", []), ('[[{"role": "user"}], 3, "x", null]', [[{"role": "user"}], 3, "x", None])],
)
def test_small_arrays(tmp_path: Path, text: str, rows: list[Any]) -> None:
    (tmp_path / "a.json").write_text(text)
    assert contents(tmp_path / "a.json") == rows


def test_lines_that_are_arrays_are_rows(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [[], chat("x", "y"), []])
    assert read(path) == [(str(path), 1, []), (str(path), 2, chat("x", "y")), (str(path), 3, [])]


def test_bad_lines_are_named_and_their_neighbours_kept(tmp_path: Path) -> None:
    rows = [{"n": 1}, b'{"n": 2', b"\xff\xfe{}", b"", b"[" * 100_000, {"n": 6}]
    path = write_lines(tmp_path / "a.jsonl", rows)
    found = read(path)
    assert [(number, row) for _, number, row in found if not isinstance(row, BadSample)] == [
        (1, {"n": 1}),
        (6, {"n": 6}),
    ]
    bad = [(number, row.reason, row.detail) for _, number, row in found if isinstance(row, BadSample)]
    assert bad == [
        (2, "not JSON", "Expecting ',' delimiter, column 8"),
        (3, "not valid UTF-8", "byte 1 of the line"),
        (5, "not JSON", "nested too deeply"),
    ]


@pytest.mark.parametrize("place", [0, 1, 2])
def test_an_endless_line_is_let_go_and_the_rest_is_read(tmp_path: Path, place: int, monkeypatch: Any) -> None:
    monkeypatch.setattr(sources, "_LONGEST_LINE", 300_000)
    rows: list[Any] = [{"n": 1}, {"n": 2}]
    rows.insert(place, b"x" * 1_000_000)
    found = read(write_lines(tmp_path / "a.jsonl", rows))
    assert [number for _, number, _ in found] == [1, 2, 3]
    assert [row["n"] for _, _, row in found if not isinstance(row, BadSample)] == [1, 2]
    assert found[place][2].reason.startswith("line longer than")


def test_columns_of_tables_that_hold_nothing_are_left_out(tmp_path: Path) -> None:
    call = {"function": {"name": "f", "arguments": {"city": "Bern"}}}
    other = {"function": {"name": "g", "arguments": {"days": 3}}}
    rows = [
        {"messages": [{"role": "assistant", "tool_calls": [call]}, {"role": "assistant", "content": "x"}], "id": 1},
        {"messages": [{"role": "assistant", "tool_calls": [other]}], "id": 2},
        {"messages": None, "id": 3},
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    assert contents(tmp_path / "a.parquet") == [
        {"messages": rows[0]["messages"]},
        {"messages": rows[1]["messages"]},
        {},
    ]


def test_several_inputs_globs_sorted_and_in_order(tmp_path: Path) -> None:
    for name in ("b", "a", "c"):
        write_lines(tmp_path / f"{name}.jsonl", [{"n": name}])
    found = contents(tmp_path / "c.jsonl", tmp_path / "[ab].jsonl", tmp_path / "c.jsonl")
    assert [row["n"] for row in found] == ["c", "a", "b", "c"]


def test_damaged_files_are_one_clear_line(tmp_path: Path) -> None:
    plain = write_lines(tmp_path / "x.jsonl", ROWS).read_bytes()
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "x.parquet")
    table = (tmp_path / "x.parquet").read_bytes()
    damaged = {
        "cut.gz": gzip.compress(plain)[:-40],
        "cut.zst": zstd(plain)[:-40],
        "wrong.gz": gzip.compress(plain)[:60] + b"\0" * 200,
        "cut.parquet": table[: len(table) // 2],
    }
    for name, data in damaged.items():
        (tmp_path / name).write_bytes(data)
        with pytest.raises(InputError, match=rf"{name} is damaged or can't be read"):
            read(tmp_path / name)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[\n{"a": 1},\n{"a" 2}\n]', "line 3 is not JSON: Expecting ':' delimiter"),
        ('[\n{"a": 1}\n{"a": 2}\n]', "line 3 is not JSON: Expecting ',' or ']'"),
        ('[\n{"a": 1},\n', "line 3 is not JSON: Unexpected end of file"),
    ],
)
def test_a_malformed_array_names_its_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(InputError) as failure:
        read(tmp_path / "a.json")
    assert message in str(failure.value)


def test_inputs_that_are_not_there(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").touch()
    cases = {
        str(tmp_path / "no.jsonl"): "no file at",
        str(tmp_path / "*.parquet"): "no file matches",
        str(tmp_path): "is a folder",
        str(tmp_path / "empty.jsonl"): "is empty",
        "nobody/no-such-dataset": "no dataset of that name could be loaded",
    }
    for text, message in cases.items():
        with pytest.raises(InputError, match=message):
            find_sources([text])
    with pytest.raises(InputError, match="no input"):
        find_sources([])


def test_a_dataset_of_the_hub_gives_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    asked = []

    def load_dataset(name: str, split: str) -> datasets.Dataset:
        asked.append((name, split))
        return datasets.Dataset.from_list(ROWS[:50])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    found = read("someone/chats:validation")
    assert [row for _, _, row in found] == ROWS[:50]
    assert [number for _, number, _ in found] == list(range(1, 51))
    assert set(asked) == {("someone/chats", "validation")}


def test_the_hash_is_of_the_content(tmp_path: Path) -> None:
    a, b = write_lines(tmp_path / "a", ROWS), write_lines(tmp_path / "b", ROWS)
    one, two = (find_sources([str(path)])[0] for path in (a, b))
    assert content_hash(one) == content_hash(two)
    write_lines(b, ROWS[:-1])
    assert content_hash(one) != content_hash(two)
