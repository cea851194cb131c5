"""The live terminal view of a run. Owns the loop, the keys and the lanes' memory; only ever reads the run.

Leaving it, by q, Ctrl-C or a closed terminal, does nothing to the run: the view is another process that reads files.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import Console
from rich.live import Live

from draftmill.monitor.layout import require_run
from draftmill.monitor.metrics import Metrics, MetricsFollower
from draftmill.monitor.phases import ENDINGS, Phase
from draftmill.monitor.show import worker_state
from draftmill.monitor.status import NoRun, RunStatus, read_status
from draftmill.monitor.view import Lanes, build_view

_REFRESH_S = 0.5
_METRICS_EVERY_S = 2.0
_CHARTED = ("loss", "accept_length", "context_tokens_per_s")


def watch_command(run: str) -> int:
    """Follow a run until it ends or the user leaves; without a terminal, show it once.

    Raises:
        InputError: there is no such run.
    """
    directory = require_run(run)
    console = Console()
    if not console.is_terminal:
        metrics = MetricsFollower(directory, _CHARTED).read()
        console.print(build_view(read_status(directory), metrics, {}, console))
        return 0
    with contextlib.suppress(KeyboardInterrupt):
        follow(directory, console)
    return 0


def follow(directory: Path, console: Console) -> None:
    """Redraw until the run has ended or q is pressed."""
    watcher = _Watcher(directory)
    status, metrics, lanes = watcher.look()
    with (
        _single_keys() as key_pressed,
        Live(
            build_view(status, metrics, lanes, console, live=True), console=console, screen=True, auto_refresh=False
        ) as live,
    ):
        while key_pressed(_REFRESH_S) not in ("q", "Q", "\x1b", "\x03"):
            status, metrics, lanes = watcher.look()
            live.update(build_view(status, metrics, lanes, console, live=True), refresh=True)
    # The last picture stays on the ordinary screen.
    console.print(build_view(status, metrics, lanes, console))


class _Watcher:
    """Reads the run again and again, and remembers what the workers were doing."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._lanes: Lanes = {}
        self._follower = MetricsFollower(directory, _CHARTED)
        self._status: RunStatus | None = None
        self._metrics_at = -1e9

    def look(self) -> tuple[RunStatus, Metrics, Lanes]:
        """The run as it is now."""
        with contextlib.suppress(NoRun):  # a state that can't be read for a moment: the last one stays
            self._status = read_status(self._directory)
        if self._status is None:
            raise NoRun(f"no run at {self._directory}")
        now = time.monotonic()
        if now - self._metrics_at >= _METRICS_EVERY_S:
            self._metrics_at = now
            self._follower.read()
        if self._status.phase not in ENDINGS - {Phase.STALLED}:
            for name, worker in self._status.workers.items():
                self._lanes.setdefault(name, deque(maxlen=240)).append(worker_state(worker))
        return self._status, self._follower.metrics, self._lanes


@contextlib.contextmanager
def _single_keys() -> Iterator[Callable[[float], str]]:
    """Lets keys through one by one, unechoed; gives a function that waits for one, at most so many seconds."""
    if not sys.stdin.isatty():

        def no_key(wait_s: float) -> str:
            time.sleep(wait_s)
            return ""

        yield no_key
        return
    import termios
    import tty

    descriptor = sys.stdin.fileno()
    old = termios.tcgetattr(descriptor)

    def key(wait_s: float) -> str:
        ready, _, _ = select.select([descriptor], [], [], wait_s)
        if not ready:
            return ""
        pressed = os.read(descriptor, 32)
        return pressed.decode(errors="replace")[:1] if pressed else "q"  # end of input: the terminal is gone

    try:
        tty.setcbreak(descriptor)
        yield key
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, old)
