"""README, docs and recipes against the code: links, paths, commands, options, settings. Nothing here is run."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from draftmill.cli import app
from draftmill.config import Config, build_config

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
DOCUMENTS = [README, *sorted((ROOT / "docs").glob("*.md"))]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
NEEDED: dict[str, Any] = {"target": {"model": "a/model"}, "data": {"path": "data/chats"}}
"""What a configuration can't do without, for fragments that leave it out."""

by_name = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)


def fenced(text: str) -> list[tuple[str, str]]:
    """(language, content) of every fenced block."""
    return re.findall(r"^```(\w*)\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


def indented(text: str) -> list[str]:
    """Lines of indented code, without the indentation; fenced blocks left out."""
    without = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    return [line[4:] for line in without.splitlines() if line.startswith("    ")]


def inline(text: str) -> list[str]:
    """Contents of `code` in running text."""
    without = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    return [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", without)]


def command_lines(text: str) -> list[list[str]]:
    """Arguments of every `draftmill ...` line in code blocks; continued lines joined, comments dropped."""
    lines = [line for _, block in fenced(text) for line in joined(block).splitlines()]
    lines += joined("\n".join(indented(text))).splitlines()
    return [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("draftmill ")]


def joined(block: str) -> str:
    return re.sub(r"\\\n\s*", " ", block)


def slugs(text: str) -> set[str]:
    """The anchors that GitHub makes of the headings."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def command_of(arguments: list[str]) -> tuple[Any, list[str]]:
    """The click command that arguments name, and the arguments left for it."""
    command: Any = typer.main.get_command(app)
    rest = list(arguments)
    while hasattr(command, "commands") and rest and not rest[0].startswith("-"):
        assert rest[0] in command.commands, f"draftmill has no command {rest[0]!r}"
        command = command.commands[rest.pop(0)]
    return command, rest


def options_of(command: Any) -> set[str]:
    return {"--help", "-h"} | {
        name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)
    }


def all_documents() -> Iterator[tuple[Path, str]]:
    for path in (*DOCUMENTS, *RECIPES):
        text = path.read_text()
        yield path, re.sub(r"^# ?", "", text, flags=re.MULTILINE) if path.suffix == ".yaml" else text


def test_readme_is_short() -> None:
    assert len(README.read_text().splitlines()) <= 150


def test_readme_has_a_place_for_the_demos_output() -> None:
    text = README.read_text()
    assert text.count("<!-- demo:begin -->") == text.count("<!-- demo:end -->") == 1
    assert text.index("<!-- demo:begin -->") < text.index("<!-- demo:end -->")


@by_name
def test_links_lead_somewhere(document: Path) -> None:
    text = document.read_text()
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("http://", "https://")):
            continue
        name, _, fragment = target.partition("#")
        path = (document.parent / name).resolve() if name else document
        assert path.exists(), f"{document.name} links to {target}"
        assert path.is_relative_to(ROOT), f"{document.name} links to {target}, outside the repository"
        if fragment:
            assert fragment in slugs(path.read_text()), f"{document.name} links to {target}: no such heading"


@by_name
def test_named_files_exist(document: Path) -> None:
    """Paths in code that begin with a folder of the repository or with a room."""
    rooms = {path.name for path in (ROOT / "src" / "draftmill").iterdir() if path.is_dir()}
    for code in (*inline(document.read_text()), *indented(document.read_text())):
        for word in code.split():
            first, slash, _ = word.partition("/")
            if not slash or not word.endswith((".py", ".md", ".json", ".jsonl", ".gz", "/")):
                continue
            if first in ("bench", "scripts", "tests", "src", "docs", "recipes"):
                assert (ROOT / word).exists(), f"{document.name} names {word}"
            elif first in rooms and word.endswith(".py"):
                assert (ROOT / "src" / "draftmill" / word).exists(), f"{document.name} names {word}"


@by_name
def test_make_targets_exist(document: Path) -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    for code in (*inline(document.read_text()), *indented(document.read_text())):
        if match := re.match(r"make (\w+)", code):
            assert match[1] in targets, f"{document.name} says {code}"


def test_every_room_is_on_the_map() -> None:
    rooms = {path.name for path in (ROOT / "src" / "draftmill").iterdir() if (path / "__init__.py").exists()}
    for document in (README, ROOT / "docs" / "architecture.md"):
        on_map = set(re.findall(r"^\| `(\w+)/`", document.read_text(), flags=re.MULTILINE))
        assert rooms <= on_map, f"{document.name} leaves out {rooms - on_map}"


def test_command_lines_parse() -> None:
    """Whole lines in code blocks and recipes: command, options, required arguments and the values' types."""
    seen = 0
    for path, text in all_documents():
        for arguments in command_lines(text):
            command, rest = command_of(arguments)
            try:
                command.make_context("draftmill", [word for word in rest if word != "..."])
            except Exception as error:
                raise AssertionError(f"{path.name}: draftmill {shlex.join(arguments)}: {error}") from error
            seen += 1
    assert seen > 20


def bench_options(text: str) -> set[str]:
    """Options of the benchmarks that a text names."""
    scripts = {ROOT / name for name in re.findall(r"bench/\w+\.py", text)}
    return {option for script in scripts for option in re.findall(r'add_argument\(\s*"(--[\w-]+)"', script.read_text())}


def test_commands_and_options_in_text_exist() -> None:
    """`draftmill COMMAND` and `--option` in running text; an option alone must be some command's, or one of a
    benchmark that the text names."""
    root = typer.main.get_command(app)
    commands = [root, *root.commands.values()]  # type: ignore[attr-defined]
    commands += [inner for command in commands[1:] for inner in getattr(command, "commands", {}).values()]
    anywhere = set().union(*map(options_of, commands))
    for path, text in all_documents():
        for code in inline(text):
            words = code.split()
            known = anywhere | bench_options(text)
            if words[0] == "draftmill":
                command, _ = command_of([word for word in words[1:] if word != "COMMAND"][:2])
                known = options_of(command)
            elif not words[0].startswith("--"):
                continue
            for word in words:
                if word.startswith("--"):
                    names = [word.split("=")[0], *(f"--{other}" for other in word.split("|")[1:])]
                    assert names[0].split("|")[0] in known, f"{path.name}: {code}"


def test_yaml_blocks_are_accepted() -> None:
    for path in DOCUMENTS:
        for language, block in fenced(path.read_text()):
            if language == "yaml":
                sections = yaml.safe_load(block)
                merged = {name: {**NEEDED.get(name, {}), **sections.get(name, {})} for name in {*NEEDED, *sections}}
                build_config(merged, source=f"a block of {path.name}")


def test_settings_named_in_text_exist() -> None:
    """`section.key` and `section.key: value` in code, as in `train.num_anchors`."""
    sections = {name: field.annotation for name, field in Config.model_fields.items()}
    endings = {"py", "md", "json", "jsonl", "yaml", "log", "safetensors"}
    for path, text in all_documents():
        for code in inline(text):
            match = re.match(rf"({'|'.join(sections)})\.(\w+)(?::\s*(.+)|=(.+))?$", code)
            if match is None or match[2] in endings:
                continue
            keys = sections[match[1]].model_fields  # type: ignore[union-attr]
            assert match[2] in keys, f"{path.name} names {code}"
            if value := match[3] or match[4]:
                merged = {**NEEDED, match[1]: {**NEEDED.get(match[1], {}), match[2]: yaml.safe_load(value)}}
                build_config(merged, source=f"{path.name}: {code}")


def test_the_contracts_table_of_taps() -> None:
    """The tap ids that docs/dflash.md gives are those that the code taps."""
    from draftmill.drafter.shape import default_layer_ids

    text = (ROOT / "docs" / "dflash.md").read_text()
    found = re.findall(r"(?:taps )?of (\d+) layers(?: are)? ([\d, ]+\d)", text)
    assert {int(layers) for layers, _ in found} == {32, 36, 64}
    for layers, ids in found:
        assert default_layer_ids(int(layers), 5) == tuple(map(int, ids.split(", ")))
