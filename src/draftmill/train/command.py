"""`draftmill train` from the command line: in the foreground or detached, and the exit code at the end.

Imports the trainer only where the training runs, so that a detached start answers at once.
"""

from __future__ import annotations

import sys
from pathlib import Path

from draftmill.config import Config
from draftmill.monitor.detach import start_detached
from draftmill.monitor.layout import LOG_FILE
from draftmill.monitor.leftovers import leftovers
from draftmill.train.naming import with_directory

CRASHED, STALLED = 1, 4


def run(config: Config, arguments: list[str], *, detach: bool, resume: bool) -> int:
    """Train; returns the process's exit code: 0 finished or stopped, 1 crashed, 4 stalled. Raises InputError.

    arguments: the command line's own, handed on to a detached process.
    """
    config = with_directory(config)
    directory = Path(str(config.run.dir))
    for process in leftovers():
        print(f"draftmill: warning: process {process.pid} of an earlier run still holds GPU memory", file=sys.stderr)
    if detach:
        again = ["train", *arguments, f"run.dir={directory}", *(["--resume"] if resume else [])]
        for line in start_detached(again, directory).lines():
            print(line)
        return 0
    from draftmill.pipeline.supervision import WorkerFailed
    from draftmill.pipeline.team import Stalled
    from draftmill.train.run import train

    try:
        train(config, resume=resume)
    except (WorkerFailed, Stalled) as error:
        print(f"draftmill: error: {error}; the whole story is in {directory / LOG_FILE}", file=sys.stderr)
        return STALLED if isinstance(error, Stalled) else CRASHED
    return 0
