"""A store is used again only where nothing that its content depends on has changed (case B20): the code included."""

from __future__ import annotations

import importlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from data_doubles import chat, save_target, write_lines
from draftmill.data.prepare import prepare
from draftmill.data.store import Store

preparing = importlib.import_module("draftmill.data.prepare")  # the package has a function of that name
RULES = Path(str(preparing.__file__)).parent


@pytest.fixture
def again(tmp_path: Path) -> Callable[..., str]:
    """Prepare the same rows, by the same names, once more; what it says of the store that is there."""
    target = save_target(tmp_path / "target")
    path = write_lines(tmp_path / "chats.jsonl", [{"messages": chat(f"q{n}?", f"answer {n}")} for n in range(5)])

    def run(**settings: Any) -> str:
        report = prepare(str(target), [str(path)], tmp_path / "store", **settings)
        assert report.hit == report.verdict.startswith("the store is there")
        return report.verdict

    assert run() == "no store there yet; made"
    return run


def changed(verdict: str) -> str:
    before, _, rest = verdict.partition(" (")
    assert before == "made anew, replacing a store with other settings"
    return rest.removesuffix(")")


def test_another_release_makes_the_store_anew(again: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert again().startswith("the store is there")
    monkeypatch.setattr(preparing, "__version__", "9.9.9")
    assert changed(again()) == f"version {importlib.import_module('draftmill').__version__} -> 9.9.9"
    assert again().startswith("the store is there")


@pytest.mark.parametrize("module", ["chats", "encode", "places", "render", "sources", "build", "store"])
def test_a_changed_rule_makes_the_store_anew(
    again: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str
) -> None:
    """As in a development checkout, whose version does not move."""
    shutil.copytree(RULES, tmp_path / "data", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(preparing, "__file__", str(tmp_path / "data" / "prepare.py"))
    assert again().startswith("the store is there")
    with (tmp_path / "data" / f"{module}.py").open("a") as file:
        file.write("# another rule\n")
    assert changed(again()) == "draftmill's rules"
    assert again().startswith("the store is there")


def test_all_that_encoding_a_row_imports_is_among_the_rules() -> None:
    """Or a new module's rules could change behind a store's back."""
    seen, left = set(), ["encode", "sources", "build"]
    while left:
        module = left.pop()
        seen.add(module)
        for line in (RULES / f"{module}.py").read_text().splitlines():
            words = line.split()
            if words[:1] == ["from"] and words[1].startswith("draftmill.data."):
                left += {words[1].removeprefix("draftmill.data.")} - seen
    assert seen <= set(preparing._RULES)


def test_another_tokenizer_under_the_same_name_makes_the_store_anew(again: Callable[..., str], tmp_path: Path) -> None:
    """The path is the same and so is the template: only what its files say has changed."""
    file = tmp_path / "target" / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    first, second, *_ = (token for token in tokenizer["model"]["vocab"] if token.isalpha())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    file.write_text(json.dumps(tokenizer))
    before = Store.open(tmp_path / "store").fingerprint
    assert changed(again()) == "tokenizer"
    assert Store.open(tmp_path / "store").fingerprint != before


def test_whether_duplicates_stay_is_part_of_it(again: Callable[..., str]) -> None:
    assert changed(again(keep_duplicates=True)) == "keep_duplicates False -> True"
    assert again(keep_duplicates=True).startswith("the store is there")
