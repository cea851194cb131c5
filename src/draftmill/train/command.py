"""`draftmill train` from the command line: in the foreground or detached, and the exit code at the end.

Imports the trainer only where the training runs, so that a detached start answers at once.
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

from draftmill.config import Config
from draftmill.errors import InputError
from draftmill.monitor.detach import start_detached
from draftmill.monitor.layout import LOG_FILE
from draftmill.monitor.leftovers import start_warnings
from draftmill.train.naming import with_directory


def run(config: Config, arguments: list[str], *, detach: bool, resume: bool) -> int:
    """Train; returns the process's exit code: 0 finished or stopped, 1 crashed, 4 stalled; 2 where what the target's
    files hold can't be used, which shows only once they are read, in the run. Raises InputError for all else.

    arguments: the command line's own, handed on to a detached process.
    """
    if resume and config.run.dir is None:
        raise InputError("--resume goes on with the run in run.dir, which is not set; add run.dir=DIRECTORY")
    for line in start_warnings():
        print(f"draftmill: warning: {line}", file=sys.stderr)
    if detach:
        config = with_directory(config)
        directory = Path(str(config.run.dir))
        again = ["train", *arguments, f"run.dir={directory}", *(["--resume"] if resume else [])]
        for line in start_detached(again, directory).lines():
            print(line)
        return 0
    from draftmill.train.run import ended_by, train

    begun: list[Path] = []
    try:
        train(config, resume=resume, begun=begun.append)
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        if not begun:  # the user's input, or a bug with its traceback
            raise
        reason = " ".join(str(error).split()) or type(error).__name__
        print(f"draftmill: error: {reason}; the whole story is in {begun[0] / LOG_FILE}", file=sys.stderr)
        return _leave(ended_by(error))
    return 0


def _leave(code: int) -> int:
    """The code; where threads hang, which can keep Python from ending, the process ends with it at once."""
    from draftmill.pipeline.supervision import Worker

    if any(isinstance(thread, Worker) for thread in threading.enumerate()):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code
