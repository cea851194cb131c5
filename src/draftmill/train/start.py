"""Where a run begins: at its first step, or at a checkpoint; the same on all hosts.

The first host decides and tells the others. Changes nothing on the disk.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftmill.checkpoint import resume as resuming
from draftmill.checkpoint import store
from draftmill.checkpoint.store import Checkpoint
from draftmill.errors import InputError
from draftmill.monitor.layout import CHECKPOINTS, STATE_FILE, check_directory
from draftmill.pipeline.meeting import Meeting
from draftmill.train.setup import Setup


@dataclass(frozen=True)
class Start:
    """Where a run begins.

    checkpoint  what it goes on from; None begins at the first step
    resumes     whether the directory holds the run already
    finished    why there is nothing to do, where torchrun started a finished run again
    notes       lines for the log
    """

    checkpoint: Checkpoint | None = None
    resumes: bool = False
    finished: str | None = None
    notes: tuple[str, ...] = ()

    @property
    def first_step(self) -> int:
        """The first step to do, counted from 0."""
        return self.checkpoint.step if self.checkpoint is not None else 0

    def told(self) -> dict[str, Any]:
        """What the other hosts need to know of it."""
        folder = self.checkpoint.folder.name if self.checkpoint is not None else None
        return {"checkpoint": folder, "resumes": self.resumes, "finished": self.finished}


def find_start(setup: Setup, run_dir: Path, resume: bool, meeting: Meeting) -> Start:
    """Decide where the run begins, from what its directory holds.

    Under torchrun a run that the directory holds is gone on with unasked, and a damaged checkpoint is passed over for
    the one before: nobody is there to answer. Raises InputError for a checkpoint that can't be used, or is of another
    run, for a finished run, and for a directory that holds none, where resuming was asked for.
    """
    found = meeting.first_decides(
        "choosing the checkpoint", lambda: _first_hosts_start(setup, run_dir, resume), lambda start: start.told()
    )
    start = found if isinstance(found, Start) else _told_start(run_dir, found)
    if start.checkpoint is None:
        return start
    changes = resuming.check_same_run(
        start.checkpoint.state,
        setup.config,
        setup.shape,
        data_fingerprint=setup.store.fingerprint,
        batches_per_step=setup.stream.group,
    )
    return Start(start.checkpoint, start.resumes, start.finished, (*start.notes, *changes))


def _first_hosts_start(setup: Setup, run_dir: Path, resume: bool) -> Start:
    unasked = setup.hosts.elastic and not resume and (run_dir / STATE_FILE).exists()
    if not (resume or unasked):
        return Start()
    check_directory(run_dir, resume=True)
    if not store.checkpoints(run_dir):
        return Start(resumes=True, notes=("no checkpoint was written yet: beginning at the first step",))
    notes: list[str] = []
    checkpoint = resuming.pick(run_dir, skip_damaged=unasked, log=notes.append)
    finished = resuming.finished_message(checkpoint)
    if finished is not None and not unasked:
        raise InputError(finished)
    return Start(checkpoint, True, finished, (*notes, f"going on from {checkpoint.folder.name}"))


def _told_start(run_dir: Path, told: dict[str, Any]) -> Start:
    name = told["checkpoint"]
    # Every host reads it from the directory that all share; a host that does not see it can't go on.
    checkpoint = store.load(run_dir / CHECKPOINTS / name) if name is not None else None
    return Start(checkpoint, told["resumes"], told["finished"])
