"""Names that users give for what lies on the disk or on the hub.

Owns what `~` stands for and what can only be a path. Never reads a file or asks the hub.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

_ARGUMENT = re.compile(r"(?P<option>[-\w.]+=)?(?P<value>~[-\w]*(/.*)?)", re.DOTALL)
"""A place in the home folder, alone or after an option's `=`."""


def expanded(name: str) -> str:
    """A path with the home folder in place of a leading `~` or `~user`; every other name as it is."""
    return os.path.expanduser(name) if name.startswith("~") else name


def expanded_argument(argument: str) -> str:
    """The same for an argument of the command line, also after its `=`, where a shell leaves the `~` alone."""
    found = _ARGUMENT.fullmatch(argument)
    return argument if found is None else (found["option"] or "") + expanded(found["value"])


def looks_local(name: str) -> bool:
    """Whether a name can only be a path: hub ids have at most one slash and start with neither a dot nor a slash."""
    return name.startswith((".", "/", "~")) or name.count("/") > 1 or Path(name).exists()


def is_missing_folder(name: str) -> bool:
    """Whether a name can only be a path, and no folder is there."""
    return looks_local(name) and not Path(name).is_dir()
