"""Files that stay whole: state.json on a full disk, lines never torn, numbers that JSON can hold."""

from __future__ import annotations

import errno
import json
import os
import threading
import time
from pathlib import Path

import pytest

from draftmill.monitor.append import LineFile
from draftmill.monitor.state import StateFile, finite, read_json

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_state_is_read_back_and_replaced_whole(tmp_path: Path) -> None:
    file = StateFile(tmp_path / "state.json")
    for number in range(5):
        file.write({"number": number, "text": "x" * 3000 * number})
        assert read_json(tmp_path / "state.json") == {"number": number, "text": "x" * 3000 * number}


def test_a_reader_never_sees_half_a_state(tmp_path: Path) -> None:
    path, ending = tmp_path / "state.json", threading.Event()
    file = StateFile(path)
    file.write({"number": 0, "again": 0})

    def write() -> None:
        number = 0
        while not ending.is_set():
            number += 1
            file.write({"number": number, "padding": "y" * (number % 7) * 2000, "again": number})
            time.sleep(0.0005)

    writer = threading.Thread(target=write)
    writer.start()
    seen = []
    for _ in range(300):
        state = read_json(path)
        assert state is not None
        assert state["number"] == state["again"]
        seen.append(state["number"])
    ending.set()
    writer.join()
    assert seen == sorted(seen)


def test_state_goes_on_being_written_into_blocks_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = StateFile(tmp_path / "state.json")
    file.write({"number": 0})
    file.write({"number": 1})
    opened = []
    real_open = os.open

    def no_new_file(path: str, flags: int, *rest: int, **more: int) -> int:
        opened.append(os.path.exists(path))
        return real_open(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", no_new_file)
    inodes = {os.stat(tmp_path / name).st_ino for name in ("state.json", ".state.json.spare")}
    for number in range(2, 6):
        file.write({"number": number})
        assert {os.stat(tmp_path / name).st_ino for name in ("state.json", ".state.json.spare")} == inodes
    assert opened == [True] * 4
    assert read_json(tmp_path / "state.json") == {"number": 5}


def test_a_refused_state_leaves_the_last_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = StateFile(tmp_path / "state.json")
    file.write({"number": 1})

    def refuse(*_: object) -> int:
        raise FULL

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", refuse)
        with pytest.raises(OSError, match="No space"):
            file.write({"number": 2})
        assert read_json(tmp_path / "state.json") == {"number": 1}
    file.write({"number": 3})
    assert read_json(tmp_path / "state.json") == {"number": 3}


def test_read_json_of_nothing_and_of_something_else(tmp_path: Path) -> None:
    assert read_json(tmp_path / "none.json") is None
    (tmp_path / "list.json").write_text("[1]")
    assert read_json(tmp_path / "list.json") is None
    (tmp_path / "torn.json").write_text('{"a": ')
    assert read_json(tmp_path / "torn.json", tries=2) is None


def test_finite_keeps_what_json_holds() -> None:
    numpy = pytest.importorskip("numpy")
    value = {
        "nan": float("nan"),
        "inf": [1.0, float("inf"), -float("inf")],
        "array": numpy.array([1.0, numpy.nan]),
        "number": numpy.float32(0.5),
        "flag": True,
        "path": Path("a/b"),
        3: (1, None),
    }
    expected = {
        "nan": None,
        "inf": [1.0, None, None],
        "array": [1.0, None],
        "number": 0.5,
        "flag": True,
        "path": "a/b",
        "3": [1, None],
    }
    assert finite(value) == expected
    assert json.loads(json.dumps(finite(value), allow_nan=False)) == expected


def test_lines_wait_while_the_disk_is_full_and_none_is_torn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reports: list[str] = []
    file = LineFile(tmp_path / "metrics.jsonl", reports.append)
    real_write, room = os.write, [15]

    def small_disk(descriptor: int, data: bytes) -> int:
        if descriptor != file.fileno():
            return real_write(descriptor, data)
        if room[0] == 0:
            raise FULL
        written = real_write(descriptor, bytes(data)[: room[0]])
        room[0] -= written
        return written

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", small_disk)
        assert [file.write(f"line {number}") for number in range(5)] == [True, True, False, False, False]
        assert (tmp_path / "metrics.jsonl").read_text() == "line 0\nline 1\n"
        assert reports == ["metrics.jsonl can't be written: No space left on device; lines wait in memory"]
    assert file.write("line 5")
    assert (tmp_path / "metrics.jsonl").read_text().split("\n") == [f"line {n}" for n in range(6)] + [""]
    assert reports[1:] == ["metrics.jsonl is written again, no lines lost"]
    file.close()
    file.close()


def test_lines_lost_at_the_end_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reports: list[str] = []
    file = LineFile(tmp_path / "run.log", reports.append)

    def refuse(*_: object) -> int:
        raise FULL

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", refuse)
        file.write("a")
        file.write("b")
        file.close()
    assert reports[-1] == "run.log: 2 lines were lost: No space left on device"


def test_half_a_line_of_a_killed_writer_is_ended_first(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step":1}\n{"st')
    file = LineFile(tmp_path / "metrics.jsonl", lambda line: None)
    file.write('{"step":2}')
    file.close()
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step":1}\n{"st\n{"step":2}\n'


def test_lines_of_many_threads_do_not_mix(tmp_path: Path) -> None:
    file = LineFile(tmp_path / "run.log", lambda line: None)
    threads = [threading.Thread(target=lambda n=n: [file.write(f"{n}" * 200) for _ in range(50)]) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    file.close()
    lines = (tmp_path / "run.log").read_text().splitlines()
    assert sorted(lines) == sorted([f"{n}" * 200 for n in range(4) for _ in range(50)])
