"""`train`: a configuration in, a trained drafter in a run directory out."""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from draftmill import __version__
from draftmill.checkpoint import resume as resuming
from draftmill.checkpoint.store import Checkpoint
from draftmill.compiling import BUILD_LOCK
from draftmill.config import Config
from draftmill.errors import InputError
from draftmill.monitor.phases import Phase
from draftmill.monitor.run import RunDirectory
from draftmill.pipeline.collective import Hosts
from draftmill.pipeline.supervision import WorkerFailed
from draftmill.pipeline.team import Stalled
from draftmill.train.assemble import load_targets, running_team
from draftmill.train.loop import training_loop
from draftmill.train.naming import with_directory
from draftmill.train.replica import Replica
from draftmill.train.report import Reporter
from draftmill.train.saving import Saver
from draftmill.train.setup import Setup, set_up


def train(
    config: Config,
    *,
    resume: bool = False,
    console: bool = True,
    observe: Callable[[dict[str, Any]], None] = lambda _record: None,
) -> Path:
    """Train a drafter; returns its run directory.

    resume: go on from the run directory's newest checkpoint. console: whether the log also goes to standard error.
    observe: gets every record of metrics.jsonl as it is written, in this thread.
    Raises InputError for what the user can change, before anything is written; WorkerFailed, naming worker and device,
    for a worker's failure; Stalled when nothing moves any more.
    """
    hosts = Hosts.from_environment()
    config = with_directory(config)
    run_dir = Path(str(config.run.dir))
    setup = set_up(config, hosts)
    checkpoint = _checkpoint(setup, run_dir) if resume else None
    if checkpoint is not None:
        setup = replace(setup, notes=(*setup.notes, *_changes(setup, checkpoint)))
    with RunDirectory.create(run_dir, config.to_yaml(), environment(setup), resume, console=console) as run:
        try:
            run.finish(_train(setup, run, run_dir, checkpoint, observe))
        except Stalled:
            run.dump_stacks()
            run.finish(Phase.STALLED)
            raise
        except WorkerFailed as failure:
            run.crash(failure, failure.worker, failure.device)
            raise
    return run_dir


def _train(
    setup: Setup,
    run: RunDirectory,
    run_dir: Path,
    checkpoint: Checkpoint | None,
    observe: Callable[[dict[str, Any]], None],
) -> Phase:
    run.phase(Phase.LOADING_DATA)
    for line in (*setup.plan.describe(), *setup.notes):
        run.log.info(line)
    if checkpoint is not None:
        run.log.info(f"going on from {checkpoint.folder.name}")
    run.phase(Phase.LOADING_TARGETS)
    loaded = load_targets(setup, run)
    run.phase(Phase.WARMING_UP)
    first_step = checkpoint.step if checkpoint is not None else 0

    def prepare(replica: Replica, number: int) -> None:
        if number == 0:
            with BUILD_LOCK:  # pinned memory is not allocated while another worker captures
                saver.background.prepare(replica.weights(), replica.moments())
        if checkpoint is not None:
            replica.restore(checkpoint.tensors(), checkpoint.optimizer(), checkpoint.step)

    saver = Saver(setup, run, run_dir)
    try:
        with running_team(setup, run, loaded, first_step, prepare) as team:
            reporter = Reporter(setup, run, observe, team.drafter_wait_s)
            return training_loop(setup, team, saver, reporter, first_step)
    finally:
        saver.close()


def _checkpoint(setup: Setup, run_dir: Path) -> Checkpoint:
    checkpoint = resuming.pick(run_dir)
    if (message := resuming.finished_message(checkpoint)) is not None:
        raise InputError(message)
    return checkpoint


def _changes(setup: Setup, checkpoint: Checkpoint) -> list[str]:
    """What changed since the checkpoint and may. Raises InputError for what would make it another run."""
    return resuming.check_same_run(
        checkpoint.state,
        setup.config,
        setup.shape,
        data_fingerprint=setup.store.fingerprint,
        batches_per_step=setup.stream.group,
    )


def environment(setup: Setup) -> dict[str, Any]:
    """Versions and devices, for environment.json. No secrets, no environment variables."""
    import datasets
    import transformers

    devices = {*setup.placement.drafters, *(device for group in setup.placement.targets for device in group)}
    return {
        "draftmill": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "datasets": datasets.__version__,
        "host": platform.node(),
        "hosts": setup.hosts.count,
        "targets": [[str(device) for device in group] for group in setup.placement.targets],
        "drafters": [str(device) for device in setup.placement.drafters],
        "compute_dtype": str(setup.dtype).removeprefix("torch."),
        "gpus": {str(d): torch.cuda.get_device_name(d) for d in devices if d.type == "cuda"},
    }
