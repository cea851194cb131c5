"""The rooms of docs/architecture.md: imports point downward only, and light commands stay light.

Every module's source is parsed; imports inside functions and under TYPE_CHECKING count like any other.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "src" / "draftmill"

ORDER = (
    "cli",
    "demo",
    "train",
    "evaluate",
    "checkpoint",
    "pipeline",
    "step",
    "drafter",
    "target",
    "data",
    "monitor",
    "compiling",
    "float8",
    "records",
    "config",
    "names",
    "errors",
)
"""From top to bottom: a room imports only what stands after it."""
ABOVE_ALL, BELOW_ALL = "__main__", "__init__"
"""`python -m draftmill`, which runs the command line, and the package itself, which holds the version and imports
nothing."""
ALONE = {
    "pipeline": {"errors", "config", "records"},
    "data": {"errors", "config", "names", "records"},
    "monitor": {"errors", "config"},
}
"""Rooms that may import less than what lies below them. `pipeline` knows no drafter mathematics, so that it can move
any record; `data` and `monitor` know no model."""
TORCH_ALLOWED = {"draftmill.data.loader": "it fills pinned tensors; only training imports it"}
MODEL_PACKAGES = {"torch", "accelerate", "safetensors", "peft", "liger_kernel"}


@dataclass(frozen=True)
class Import:
    """One imported name: where it stands, the module named there, and the name taken out of it (None: the module)."""

    file: Path
    line: int
    module: str
    name: str | None

    @property
    def source(self) -> str:
        """Dotted name of the importing module."""
        return ".".join(("draftmill", *self.file.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__")

    def __str__(self) -> str:
        what = self.module if self.name is None else f"{self.module}.{self.name}"
        return f"{self.file.relative_to(PACKAGE.parent)}:{self.line} imports {what}"


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def imports_of(file: Path) -> Iterator[Import]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(file, node.lineno, alias.name, None)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: write the whole name of a module"
            for alias in node.names:
                yield Import(file, node.lineno, node.module or "", alias.name)


def room_of_file(file: Path) -> str:
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


def room_of(found: Import) -> str | None:
    """The room that an import reaches, None where it is of another package."""
    parts = found.module.split(".")
    if parts[0] != "draftmill":
        return None
    if len(parts) > 1:
        return parts[1]
    return found.name if found.name in ORDER else BELOW_ALL


@cache
def all_imports() -> tuple[Import, ...]:
    return tuple(found for file in modules() for found in imports_of(file))


def height(room: str) -> int:
    """0 at the bottom; a room that ORDER does not name is an error of this test's reader."""
    if room in (ABOVE_ALL, BELOW_ALL):
        return len(ORDER) + 1 if room == ABOVE_ALL else 0
    return len(ORDER) - ORDER.index(room)


def test_every_room_has_its_place() -> None:
    assert {room_of_file(file) for file in modules()} == {*ORDER, ABOVE_ALL, BELOW_ALL}


def test_every_form_of_import_is_seen(tmp_path: Path) -> None:
    """The test's own eyes."""
    file = tmp_path / "module.py"
    file.write_text(
        "from typing import TYPE_CHECKING\n"
        "import draftmill.step.eager as eager\n"
        "from draftmill import __version__, train\n"
        "if TYPE_CHECKING:\n"
        "    from draftmill.data import Store\n"
        "def later():\n"
        "    from draftmill.monitor.run import RunDirectory\n"
    )
    assert [room_of(found) for found in imports_of(file)] == [None, "step", BELOW_ALL, "train", "data", "monitor"]


def test_imports_point_downward() -> None:
    upward = [
        str(found)
        for found in all_imports()
        if (reached := room_of(found)) is not None
        and reached != room_of_file(found.file)
        and height(reached) >= height(room_of_file(found.file))
    ]
    assert not upward, "\n".join(upward)


@pytest.mark.parametrize("room", ALONE)
def test_rooms_that_know_less(room: str) -> None:
    wrong = [
        str(found)
        for found in all_imports()
        if room_of_file(found.file) == room
        and (reached := room_of(found)) is not None
        and reached not in ALONE[room] | {room, BELOW_ALL}
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("room", ["data", "monitor"])
def test_data_and_monitor_import_no_model(room: str) -> None:
    """Of transformers `data` may use tokenizers and templates; nothing of it that is a model."""
    wrong = [
        str(found)
        for found in all_imports()
        if room_of_file(found.file) == room
        and (
            (found.module.split(".")[0] in MODEL_PACKAGES and found.source not in TORCH_ALLOWED)
            or (room == "monitor" and found.module.split(".")[0] == "transformers")
            or "Model" in (found.name or "")
            or ".models" in found.module
        )
    ]
    assert not wrong, "\n".join(wrong)


def test_exceptions_are_still_needed() -> None:
    for source in TORCH_ALLOWED:
        assert any(found.source == source and found.module == "torch" for found in all_imports()), source


def test_other_rooms_take_no_private_names() -> None:
    wrong = [
        str(found)
        for found in all_imports()
        if (reached := room_of(found)) is not None
        and reached != room_of_file(found.file)
        and any(
            part.startswith("_") and not part.endswith("__") for part in (*found.module.split("."), found.name or "")
        )
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "file", [file for file in modules() if file.name == "__init__.py"], ids=lambda f: f.parent.name
)
def test_inits_reexport_by_name(file: Path) -> None:
    """A docstring, imports of names from the package, `__all__` with just these names; nothing that runs."""
    tree = ast.parse(file.read_text())
    assert ast.get_docstring(tree), "say what the room owns"
    names: list[str] = []
    listed: list[str] = []
    for node in tree.body[1:]:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("draftmill."):
            names += [alias.asname or alias.name for alias in node.names]
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            listed = ast.literal_eval(node.value)
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__version__":
            assert file.parent == PACKAGE
        else:
            raise AssertionError(f"{file}:{node.lineno}: {ast.unparse(node)}")
    assert "*" not in names
    assert sorted(names) == sorted(listed)


def loaded_after(code: str) -> list[str]:
    """Heavy modules that a fresh interpreter has loaded once `code` has run."""
    script = (
        "import atexit, sys\n"
        "heavy = ('torch', 'transformers', 'datasets', 'safetensors', 'numpy')\n"
        "atexit.register(lambda: print('loaded:', *[name for name in heavy if name in sys.modules]))\n" + code
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    last = done.stdout.splitlines()[-1] if done.stdout else ""
    assert done.returncode == 0, done.stderr
    assert last.startswith("loaded:"), done.stdout
    return last.split()[1:]


@pytest.mark.parametrize(
    "module",
    [
        "draftmill",
        "draftmill.cli",
        "draftmill.config",
        "draftmill.monitor.status",
        "draftmill.monitor.run",
        "draftmill.data.prepare",
        "draftmill.train.command",
    ],
)
def test_light_modules_import_no_torch(module: str) -> None:
    assert "torch" not in loaded_after(f"import {module}")


@pytest.mark.parametrize("arguments", ["--help", "status --help", "prepare --help", "train --help", "evaluate --help"])
def test_help_is_light(arguments: str) -> None:
    code = f"from draftmill.cli import main\nmain({arguments.split()!r})"
    assert loaded_after(code) == []


def test_status_imports_nothing_heavy(tmp_path: Path) -> None:
    """A whole `draftmill status` of a run that does not exist: exit code 6, and still no torch, no numpy."""
    code = (
        "from draftmill.cli import main\n"
        "try:\n"
        f"    main(['status', {str(tmp_path / 'none')!r}])\n"
        "except SystemExit as end:\n"
        "    assert end.code == 6, end.code\n"
    )
    assert loaded_after(code) == []


def test_every_room_is_a_package() -> None:
    """A folder without `__init__.py` would be left out of a wheel."""
    folders = {path.parent for path in PACKAGE.rglob("*.py")}
    assert not [folder.name for folder in folders if not (folder / "__init__.py").exists()]
