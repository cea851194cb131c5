"""A run with nothing to train: a RunDirectory, worker threads, and one way of ending. Started as a process by tests.

python fake_run.py DIRECTORY BEHAVIOUR [STALL_S [resume]]

Behaviours: finish, wait (trains until told to stop), hang (one worker hangs in its work, the others wait for it),
deaf (hears no wish to stop), child (has a child process), jump (the wall clock jumps by a day at step 5),
full (a checkpoint finds the disk full at step 5), raise:WORKER, phase:NAME (stays in that phase), silent (ends without
saying how).
"""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
import time

from draftmill.monitor.phases import Phase
from draftmill.monitor.run import RunDirectory

WORKERS = {"target-0": "cpu", "target-1": "cpu", "drafter-0": "cpu"}
STEPS = 40
CONFIG = "pipeline: {{stall_s: {stall_s}}}\ntrain: {{log_every_s: 0.2}}\nmonitor: {{trackers: []}}\n"


def work(run: RunDirectory, name: str, behaviour: str, ending: threading.Event, failures: list) -> None:
    """One worker: works 20 ms, waits 10 ms, forty times or until the end."""
    heart = run.worker(name, WORKERS[name])
    try:
        step = 0
        while not ending.is_set() and (behaviour != "finish" or step < STEPS):
            step += 1
            heart.beat("working", step, wait_s=0.01)
            if behaviour == "hang" and step == 3:
                if name == "target-1":
                    ending.wait()
                heart.beat("waiting for target", step)
                ending.wait()
            if behaviour == "jump" and step == 5 and name == "drafter-0":
                jump()
            if behaviour == "full" and step == 5 and name == "drafter-0":
                run.phase(Phase.SAVING)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "checkpoints/step-5")
            if behaviour == f"raise:{name}" and step == 5:
                raise ArithmeticError(f"made up in {name}")
            ending.wait(0.02)
            heart.beat("waiting for drafter" if name.startswith("target") else "waiting for target", step, busy_s=0.02)
            ending.wait(0.01)
            if name == "drafter-0":
                report_step(run, step)
    except Exception as error:
        failures.append((error, name, step))
        ending.set()


def jump() -> None:
    """What this process takes for the time moves on by a day, as after a correction of the machine's clock."""
    real = time.time
    time.time = lambda: real() + 86400.0


def report_step(run: RunDirectory, step: int) -> None:
    """What the loop tells after a step."""
    loss = 4.0 / (1 + 0.1 * step)
    run.metrics({"step": step, "epoch": 0, "loss": loss, "context_tokens": 3000, "context_tokens_per_s": 1e5})
    run.progress(step, STEPS, epoch=0, epochs=1, loss=loss, context_tokens_per_s=1e5)


def main(directory: str, behaviour: str, stall_s: str = "600", resume: str = "") -> int:
    """Run it; the exit code is that of a real run."""
    config = CONFIG.format(stall_s=stall_s)
    with RunDirectory.create(directory, config, {"python": sys.version}, resume=resume == "resume") as run:
        run.phase(Phase.LOADING_DATA)
        run.phase(Phase.LOADING_TARGETS, "1/2")
        if behaviour.startswith("phase:"):
            run.phase(Phase(behaviour.removeprefix("phase:")))
            while run.stop_requested() == "no":
                time.sleep(0.02)
            run.finish(Phase.STOPPED)
            return 0
        if behaviour == "child":  # as a loader's worker would be: of the same process group, and left behind by a kill
            child = subprocess.Popen(["sleep", "60"], stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            run.log.info(f"child {child.pid}")
        run.phase(Phase.TRAINING)
        ending, failures = threading.Event(), []
        threads = [
            threading.Thread(target=work, args=(run, name, behaviour, ending, failures), name=name, daemon=True)
            for name in WORKERS
        ]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            if run.stop_requested() != "no" and behaviour != "deaf":
                ending.set()
            time.sleep(0.01)
        if failures:
            error, name, step = failures[0]
            run.crash(error, worker=name, device=WORKERS[name], step=step)
            return 1
        if behaviour == "silent":
            return 0
        run.finish(Phase.FINISHED if behaviour == "finish" else Phase.STOPPED)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
