"""Paths with `~`, and what can only be a path."""

from __future__ import annotations

from pathlib import Path

import pytest

from draftmill.config import build_config
from draftmill.names import expanded, expanded_argument, is_missing_folder, looks_local


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def test_the_home_folder_stands_for_a_leading_tilde_alone(home: Path) -> None:
    assert expanded("~/runs/a") == f"{home}/runs/a"
    assert expanded("~") == str(home)
    for name in ("runs/~a", "Qwen/Qwen3-8B", "", "a~"):
        assert expanded(name) == name


@pytest.mark.parametrize(
    ("argument", "wanted"),
    [
        ("run.dir=~/a", "run.dir=HOME/a"),
        ("--output=~/a", "--output=HOME/a"),
        ("~/run.yaml", "HOME/run.yaml"),
        ("~", "HOME"),
        ("run.dir=~", "run.dir=HOME"),
        ("run.dir=a~/b", "run.dir=a~/b"),
        ("prompt with ~/a", "prompt with ~/a"),
        ("~ is not a word", "~ is not a word"),
        ("--draft-tokens=1,2", "--draft-tokens=1,2"),
        ("a=b=~/c", "a=b=~/c"),
    ],
)
def test_arguments_that_a_shell_leaves_alone(argument: str, wanted: str, home: Path) -> None:
    assert expanded_argument(argument) == wanted.replace("HOME", str(home))


def test_every_place_in_a_configuration(home: Path) -> None:
    config = build_config(
        {
            "run": {"dir": "~/runs/a"},
            "target": {"model": "~/models/t", "devices": ["cpu"]},
            "data": {"path": "~/store"},
            "drafter": {"devices": ["cpu"], "from_checkpoint": "~/drafter"},
        },
        ["pipeline.costs=~/costs.json"],
    )
    places = (config.run.dir, config.target.model, config.data.path, config.drafter.from_checkpoint)
    assert places == tuple(f"{home}/{name}" for name in ("runs/a", "models/t", "store", "drafter"))
    assert config.pipeline.costs == f"{home}/costs.json"


def test_what_can_only_be_a_path(home: Path) -> None:
    for name in ("./a", "../a", "/a", "~/a", "a/b/c", str(home)):
        assert looks_local(name)
    for name in ("Qwen/Qwen3-8B", "gpt2", "z-lab/Qwen3-8B-DFlash-b16"):
        assert not looks_local(name)
        assert not is_missing_folder(name)
    assert is_missing_folder("/nowhere/at/all")
    assert not is_missing_folder(str(home))
    (home / "file").touch()
    assert is_missing_folder(str(home / "file")), "a file is no folder"
