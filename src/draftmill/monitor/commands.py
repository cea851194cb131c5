"""The commands `status`, `stop` and `ps`: reads, judges, prints, and gives the exit code. Imports nothing heavy."""

from __future__ import annotations

import json
import os
import sys

from draftmill.monitor.layout import RUNS
from draftmill.monitor.show import render_list, render_status
from draftmill.monitor.status import ExitCode, NoRun, read_all, read_status


def status_command(run: str | None, *, as_json: bool = False) -> int:
    """Print one run's status, or a line for each run under runs/; gives the exit code of the verdict.

    Several runs give 0, whatever they do; none gives that of no such run.
    """
    if run is None:
        statuses = read_all()
        if not statuses:
            print(f"draftmill: no runs under {RUNS}/ of {os.getcwd()}; give a run's directory", file=sys.stderr)
            return int(ExitCode.NO_RUN)
        print(json.dumps([s.to_json() for s in statuses]) if as_json else render_list(statuses, colour=_colour()))
        return int(ExitCode.WORKING)
    try:
        status = read_status(run)
    except NoRun as error:
        if as_json:
            print(json.dumps({"run": run, "phase": None, "reason": str(error), "exit_code": int(ExitCode.NO_RUN)}))
        else:
            print(f"draftmill: {error}; `draftmill status` lists the runs under {RUNS}/", file=sys.stderr)
        return int(ExitCode.NO_RUN)
    print(json.dumps(status.to_json()) if as_json else render_status(status, colour=_colour()))
    return status.exit_code


def stop_command(run: str, *, now: bool, timeout_s: float) -> int:
    """Stop a run; 0 once its process is gone, 1 where it is not."""
    from draftmill.monitor.stop import stop_run

    outcome = stop_run(run, now=now, timeout_s=timeout_s, tell=lambda line: print(line, flush=True))
    print(outcome.message)
    return 0 if outcome.ended else 1


def ps_command() -> int:
    """List every process of a run on this machine and what it holds of the GPUs; 0 always."""
    from draftmill.monitor.gpus import read_gpus
    from draftmill.monitor.leftovers import render_processes, run_processes

    gpus, note = read_gpus()
    print(render_processes(run_processes(gpus), f"GPU memory is not shown: {note}" if note else ""))
    return 0


def _colour() -> bool:
    return sys.stdout.isatty() and "NO_COLOR" not in os.environ
