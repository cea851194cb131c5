"""`train`: a configuration in, a trained drafter in a run directory out."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from draftmill import __version__
from draftmill.config import Config
from draftmill.errors import InputError
from draftmill.monitor.layout import STATE_FILE
from draftmill.monitor.phases import Phase
from draftmill.monitor.run import RunDirectory
from draftmill.pipeline.collective import Hosts, hosts_store
from draftmill.pipeline.meeting import Meeting, warn
from draftmill.pipeline.supervision import Failure, HostEnded, Stalled, WorkerFailed
from draftmill.train.assemble import LOOKAHEAD, Parts, running_team
from draftmill.train.loading import Loaded, load_targets
from draftmill.train.loop import training_loop
from draftmill.train.naming import with_directory
from draftmill.train.planning_devices import check_costs, devices_as_before, with_best_split
from draftmill.train.planning_memory import check_memory, held_by_others
from draftmill.train.replica import Replica
from draftmill.train.report import NotFinite, Reporter
from draftmill.train.saving import Saver
from draftmill.train.setup import Setup, facts_to_share, set_up
from draftmill.train.start import Start, find_start


class Unusable(InputError):
    """Input of the run can't be used, which only shows with its directory taken: the target's weights are damaged, or
    no split of the devices fits."""


def train(
    config: Config,
    *,
    resume: bool = False,
    console: bool = True,
    observe: Callable[[dict[str, Any]], None] = lambda _record: None,
    begun: Callable[[Path], None] = lambda _directory: None,
) -> Path:
    """Train a drafter; returns its run directory.

    resume: go on from the run directory's newest checkpoint. console: whether the log also goes to standard error.
    observe: gets every record of metrics.jsonl as it is written, in this thread. begun: called with this host's
    directory once it is taken; from there on whatever goes wrong is recorded in it.
    Raises InputError for what the user can change, before anything is written, or Unusable where it shows later, before
    anything is trained; WorkerFailed, naming worker and device, for a worker's failure; NotFinite for a loss that is
    not; HostEnded where another host's run has ended; Stalled when nothing moves any more. Should this thread itself
    hang in a device that never answers, the process ends with the exit code of `ended_by`.
    """
    hosts = Hosts.from_environment()
    if hosts.count > 1 and config.run.dir is None:
        raise InputError(f"{hosts.count} hosts need one run directory that all of them see; set run.dir")
    config = with_directory(config)
    run_dir = Path(str(config.run.dir))
    store = hosts_store(hosts, warn)
    meeting = Meeting(hosts, store, lookahead=LOOKAHEAD)
    try:
        setup = set_up(devices_as_before(config, run_dir), hosts)
        check_costs(setup)
        check_memory(setup, held_by_others(_gpu_uuids(setup)))
        start = _met(setup, run_dir, resume, meeting)
        if start.finished is not None:
            warn(start.finished)
            meeting.leave()
            return run_dir
        with _directory(setup, run_dir, start, meeting, console) as run:
            begun(run.path)
            try:
                run.finish(_train(setup, run, run_dir, start, store, meeting, observe))
            except HostEnded as ended:
                if not ended.stopped:
                    _record(run, ended)
                    raise
                run.log.info(str(ended))
                run.finish(Phase.STOPPED)
            except (WorkerFailed, NotFinite, Stalled) as failure:
                _record(run, failure)
                raise
    except BaseException as error:
        meeting.end(str(error) or type(error).__name__, stopped=isinstance(error, KeyboardInterrupt))
        raise
    return run_dir


def _met(setup: Setup, run_dir: Path, resume: bool, meeting: Meeting) -> Start:
    """Where the run begins, once the hosts have compared their set-ups. Raises InputError, on all of them."""
    try:
        meeting.compare(facts_to_share(setup))
        return find_start(setup, run_dir, resume, meeting)
    except HostEnded as ended:  # no run has begun that could record it
        raise InputError(str(ended)) from ended


def ended_by(failure: BaseException | None) -> int:
    """The exit code of a run that a failure ended: 4 stalled, 2 the user's input can't be used, 1 crashed."""
    if failure is None or isinstance(failure, Stalled):
        return 4
    return 2 if isinstance(failure, Unusable) else 1


def _record(run: RunDirectory, failure: Failure | NotFinite | None) -> None:
    """Write down how the run ended."""
    if isinstance(failure, WorkerFailed):
        run.crash(failure, failure.worker, failure.device, failure.step)
    elif isinstance(failure, NotFinite):
        run.crash(failure, step=failure.step)
    elif isinstance(failure, HostEnded):
        run.crash(failure)
    else:
        run.log.error(f"{failure or 'the main thread hangs'}; where every thread stood is above")
        run.finish(Phase.STALLED)


def _directory(setup: Setup, run_dir: Path, start: Start, meeting: Meeting, console: bool) -> RunDirectory:
    """The run's directory; of a host that is not the first, a folder of its own inside it, with log, state, metrics."""

    def create(path: Path, config: Config, resumes: bool) -> RunDirectory:
        return RunDirectory.create(path, config.to_yaml(), environment(setup), resumes, console=console)

    rank, config = setup.hosts.rank, setup.config
    taken = meeting.first_decides(
        "taking the run directory", lambda: create(run_dir, config, start.resumes), lambda _run: None
    )
    if isinstance(taken, RunDirectory):
        return taken
    path = run_dir / f"host-{rank}"
    quiet = config.monitor.model_copy(update={"trackers": []})
    return create(path, config.model_copy(update={"monitor": quiet}), (path / STATE_FILE).exists())


def _load(setup: Setup, run: RunDirectory, start: Start, meeting: Meeting) -> tuple[Setup, Loaded]:
    """The setup with its devices chosen, and the targets on them. Raises InputError."""
    setup = with_best_split(setup, run, meeting, environment)
    setup.placement.make_current()
    run.phase(Phase.LOADING_DATA)
    for line in (*setup.plan.describe(), *setup.notes, *start.notes):
        run.log.info(line)
    run.use_gpus(_gpu_uuids(setup), own_bytes=torch.cuda.memory_reserved)
    held = held_by_others(_gpu_uuids(setup))
    for one in held:
        run.log.warning(one.line())
    check_memory(setup, held)  # the devices may be others than those looked at before the directory was taken
    run.phase(Phase.LOADING_TARGETS)
    return setup, load_targets(setup, run)


def _train(
    setup: Setup,
    run: RunDirectory,
    run_dir: Path,
    start: Start,
    store: dist.Store | None,
    meeting: Meeting,
    observe: Callable[[dict[str, Any]], None],
) -> Phase:
    try:
        setup, loaded = _load(setup, run, start, meeting)
        wish = run.stop_requested
        wishes = meeting.exchange("loading targets", wish(), run.log.info, wish)
    except InputError as error:
        raise Unusable(str(error)) from error
    if any(wish != "no" for wish in wishes):
        meeting.leave(run.log.info)
        return Phase.STOPPED  # nothing was trained yet, so there is nothing to save
    run.phase(Phase.WARMING_UP)
    checkpoint = start.checkpoint

    def prepare(replica: Replica, number: int) -> None:
        if number == 0:
            saver.prepare(replica)
        if checkpoint is not None:
            replica.restore(checkpoint)

    def abandon(failure: Failure | None) -> None:
        _record(run, failure)
        meeting.end(str(failure or "its main thread hangs"))
        run.close()
        os._exit(ended_by(failure))

    parts = Parts(setup, run, loaded, start.first_step, store, prepare)
    with Saver(setup, run, run_dir, observe) as saver, running_team(parts, abandon) as running:
        reporter = Reporter(setup, run, observe, running)
        if start.resumes:
            reporter.resumed(start.first_step)
        with meeting.watched(running.team.supervisor.fail):
            phase = training_loop(setup, running.team, meeting, saver, reporter, start.first_step)
        meeting.leave(run.log.info)
        return phase


def _gpu_uuids(setup: Setup) -> dict[str, str]:
    """The driver's UUID of each CUDA device of this host's replicas."""
    return {
        str(device): f"GPU-{torch.cuda.get_device_properties(device).uuid}"
        for device in _devices(setup)
        if device.type == "cuda"
    }


def _devices(setup: Setup) -> set[torch.device]:
    return {*setup.placement.drafters, *(device for group in setup.placement.targets for device in group)}


def environment(setup: Setup) -> dict[str, Any]:
    """Versions and devices, for environment.json. No secrets, no environment variables."""
    import datasets
    import transformers

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
        "gpus": {str(d): torch.cuda.get_device_name(d) for d in _devices(setup) if d.type == "cuda"},
    }
