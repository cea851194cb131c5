"""Where every thread of this process stands, as text."""

from __future__ import annotations

import sys
import threading
import traceback


def all_stacks() -> str:
    """The stack of every Python thread, named, the calling one left out."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = []
    for ident, frame in sys._current_frames().items():
        if ident == threading.get_ident():
            continue
        parts.append(f"Thread {names.get(ident, ident)}:\n" + "".join(traceback.format_stack(frame)))
    return "\n".join(parts)
