"""Where a run lies when the user has not said so. Imports no torch."""

from __future__ import annotations

import re
import time
from pathlib import Path

from draftmill.config import Config


def with_directory(config: Config) -> Config:
    """The same configuration with its run directory named: as given, or runs/<target>-<time>."""
    if config.run.dir is not None:
        return config
    name = re.sub(r"[^A-Za-z0-9.]+", "-", Path(config.target.model).name).strip("-").lower() or "run"
    directory = Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    return config.model_copy(update={"run": config.run.model_copy(update={"dir": str(directory)})})
