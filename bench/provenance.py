"""What a benchmark's result says of where it comes from: the commit, and the versions of packages."""

from __future__ import annotations

import subprocess
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed


def commit() -> str | None:
    """The checkout's commit, with -dirty where it was changed; None outside a checkout."""
    try:
        done = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() or None


def version(package: str) -> str | None:
    """A package's installed version, None where it is not there."""
    try:
        return installed(package)
    except PackageNotFoundError:
        return None
