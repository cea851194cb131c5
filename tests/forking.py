"""Runs as processes of their own, forked from one that has done nothing but import: a start takes half a second."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaForCausalLM  # noqa: F401 - loaded before the forks

from draftmill.train import run  # noqa: F401 - likewise

os.environ.setdefault("HF_HUB_OFFLINE", "1")


def forked(work: Callable[[], Any], log: Path, **environment: str) -> int:
    """Do it in a child, with more environment variables, its output in a file; returns its pid.

    The child ends with the code that `work` returns or leaves with, 1 where it raises.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 1)
        os.dup2(1, 2)
        os.environ.update(environment)
        torch.set_num_threads(1)
        code = work() or 0
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def code_of(pid: int, timeout_s: float = 120.0) -> int:
    """Wait for a child; its exit code, negative for a signal, and -999 where it had to be ended after the time."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    return -999
