"""`python -m draftmill.evaluate.beside REQUEST`: an evaluation as a process beside a run that started it.

Takes a Request as JSON, and prints what `draftmill evaluate` prints. Ends when its standard input does, so that it
never outlives the run, however that ends. Gives way to the run: it has a low priority, and is the first to go where
memory runs out.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
from pathlib import Path

from draftmill.errors import InputError
from draftmill.evaluate.command import Request, run

NICENESS = 10


def main(request: str) -> int:
    """Evaluate; returns the exit code."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # a terminal's is for the run, which then ends this one
    threading.Thread(target=_end_with_the_run, name="run-watch", daemon=True).start()
    os.nice(NICENESS)
    with contextlib.suppress(OSError):  # not on every system
        Path("/proc/self/oom_score_adj").write_text("1000")
    try:
        return run(Request(**json.loads(request)))
    except InputError as error:
        print(error, file=sys.stderr)
        return 2


def _end_with_the_run() -> None:
    """Waits for the end of standard input, which the run's process holds open and never writes to."""
    os.read(0, 1)  # past Python's buffer, whose lock a thread must not hold when the interpreter ends
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
