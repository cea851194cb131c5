"""Where metrics go besides metrics.jsonl. Owns the trackers by name and the thread that feeds them.

A tracker is a guest: it is opened, fed and closed in a thread of its own, so that a slow server delays no step; one
that fails is told once and left out; one that falls far behind loses records, told once.
"""

from __future__ import annotations

import importlib.util
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from draftmill.errors import InputError
from draftmill.monitor.layout import TENSORBOARD

_MAX_WAITING = 10_000
_CLOSE_S = 20.0
_NUM_DENSE = 1000
_SPARSE_S = 0.2
"""A run's first records all go to the trackers, later ones of optimizer steps at most this often: no plot has more
points, servers have limits, and checksums in Python cost. metrics.jsonl has every step."""


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """What a tracker is told about the run. `run_id` stays the same when the run is resumed."""

    directory: Path
    project: str
    run_id: str
    config: dict[str, Any]

    @property
    def name(self) -> str:
        """The run's name for people: its directory's."""
        return self.directory.resolve().name


class Tracker(Protocol):
    """One place that metrics go to. Called from one thread; whatever it raises leaves it out from then on."""

    def log(self, step: int, time_s: float, figures: dict[str, float]) -> None:
        """Take the figures of one step, by tag; `time_s` is seconds since 1970."""

    def close(self) -> None:
        """Send what is left, and end."""


class _TensorBoard:
    """Event files, written with the tensorboard package's own records; needs neither torch nor TensorFlow."""

    def __init__(self, run: TrackedRun) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        directory = run.directory / TENSORBOARD
        directory.mkdir(exist_ok=True)
        name = f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.{os.getpid()}.{time.monotonic_ns()}"
        self._file = open(directory / name, "xb")  # noqa: SIM115 - closed in close()
        self._writer = RecordWriter(self._file)
        self._write(self._event(wall_time=time.time(), file_version="brain.Event:2"))
        self._session = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._begun = False

    def _write(self, event: Any) -> None:
        self._writer.write(event.SerializeToString())
        self._writer.flush()

    def log(self, step: int, time_s: float, figures: dict[str, float]) -> None:
        if not self._begun:
            # Tells TensorBoard to drop what an earlier session wrote from this step on (a resumed run).
            self._begun = True
            self._write(self._event(wall_time=time_s, step=step, session_log=self._session))
        values = [self._summary.Value(tag=tag, simple_value=value) for tag, value in figures.items()]
        self._write(self._event(wall_time=time_s, step=step, summary=self._summary(value=values)))

    def close(self) -> None:
        self._file.close()


class _Wandb:
    def __init__(self, run: TrackedRun) -> None:
        import wandb

        online = wandb.setup().settings.mode in (None, "online", "shared")
        # Without prompt=False it would ask for a key on the terminal, and wait for an answer.
        if online and not wandb.login(prompt=False, verify=False):
            raise RuntimeError("no key: run `wandb login`, or set WANDB_MODE=offline")
        self._run = wandb.init(
            project=run.project,
            name=run.name,
            id=run.run_id,
            resume="allow",
            dir=str(run.directory),
            config=run.config,
            reinit="create_new",
            settings=wandb.Settings(console="off", silent=True),
        )
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, time_s: float, figures: dict[str, float]) -> None:
        self._run.log({**figures, "step": step})

    def close(self) -> None:
        self._run.finish()


class _Trackio:
    def __init__(self, run: TrackedRun) -> None:
        import trackio

        self._run = trackio.init(
            project=run.project,
            name=f"{run.name}-{run.run_id}",
            resume="allow",
            config=run.config,
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def log(self, step: int, time_s: float, figures: dict[str, float]) -> None:
        self._run.log(dict(figures), step=step)

    def close(self) -> None:
        self._run.finish()


class _Mlflow:
    """Through the client, for the module's own functions keep their run in the thread that began it."""

    def __init__(self, run: TrackedRun) -> None:
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient, is_tracking_uri_set

        if not is_tracking_uri_set() and importlib.util.find_spec("sqlalchemy") is None:
            raise RuntimeError("set MLFLOW_TRACKING_URI to your server; mlflow-skinny keeps nothing on its own")
        self._metric = Metric
        self._client = client = MlflowClient()
        experiment = client.get_experiment_by_name(run.project)
        experiment_id = experiment.experiment_id if experiment is not None else client.create_experiment(run.project)
        found = client.search_runs([experiment_id], f"tags.draftmill_run_id = '{run.run_id}'", max_results=1)
        if found:
            self._run_id = found[0].info.run_id
            client.update_run(self._run_id, status="RUNNING")
            return
        created = client.create_run(experiment_id, run_name=run.name, tags={"draftmill_run_id": run.run_id})
        self._run_id = created.info.run_id
        params = [
            Param(f"{section}.{key}", str(value)[:500])
            for section, values in run.config.items()
            if isinstance(values, dict)
            for key, value in values.items()
        ]
        for first in range(0, len(params), 100):  # the server takes 100 a call
            client.log_batch(self._run_id, params=params[first : first + 100])

    def log(self, step: int, time_s: float, figures: dict[str, float]) -> None:
        stamp = int(time_s * 1000)
        self._client.log_batch(
            self._run_id, metrics=[self._metric(tag, value, stamp, step) for tag, value in figures.items()]
        )

    def close(self) -> None:
        self._client.set_terminated(self._run_id)


TRACKERS: dict[str, Callable[[TrackedRun], Tracker]] = {
    "tensorboard": _TensorBoard,
    "wandb": _Wandb,
    "trackio": _Trackio,
    "mlflow": _Mlflow,
}
"""Every tracker by the name that monitor.trackers uses."""


def check_installed(names: Sequence[str]) -> None:
    """Refuse a tracker that is unknown or whose package is missing, before anything is loaded. Raises InputError."""
    for name in names:
        if name not in TRACKERS:
            raise InputError(f"monitor.trackers: {name!r} is none of {', '.join(TRACKERS)}")
        if importlib.util.find_spec(name) is None:
            raise InputError(
                f"monitor.trackers names {name}, which is not installed; `pip install 'draftmill[{name}]'`, "
                "or take it out of the list"
            )


_GROUPS = {
    "loss": "train",
    "lr": "train",
    "grad_norm": "train",
    "epoch": "train",
    "accuracy_by_slot": "accuracy",
    "accept_length": "acceptance",
    "accept_by_slot": "acceptance",
    "decoded_tau": "acceptance",
    "decoded_answers": "acceptance",
    "context_tokens": "speed",
    "context_tokens_per_s": "speed",
    "supervised_tokens_per_s": "speed",
    "useful_tflops": "speed",
    "share_of_peak": "speed",
    "target_wait_s": "waits",
    "drafter_wait_s": "waits",
    "queue_depth": "waits",
    "peak_bytes": "memory",
    "compilations": "speed",
}


def tagged(record: dict[str, Any]) -> dict[str, float]:
    """The numbers of one metrics record by tag, as in train/loss; a list gives one for each slot, counted from 1."""
    figures: dict[str, float] = {}
    for key, value in record.items():
        tag = f"{_GROUPS.get(key, 'other')}/{key}"
        if key == "step" or isinstance(value, bool):
            continue
        if isinstance(value, int | float):
            figures[tag] = float(value)
        elif isinstance(value, list):
            for slot, item in enumerate(value, start=1):
                if isinstance(item, int | float) and not isinstance(item, bool):
                    figures[f"{tag}/{slot:02d}"] = float(item)
    return figures


class TrackerFeed:
    """Feeds the trackers from a thread of its own.

    Args:
        names: keys of `trackers`
        run: what they are told
        report: told, in one line, of a tracker that fails
        trackers: the choice; TRACKERS, but for tests
    """

    def __init__(
        self,
        names: Sequence[str],
        run: TrackedRun,
        report: Callable[[str], None],
        trackers: dict[str, Callable[[TrackedRun], Tracker]] | None = None,
    ) -> None:
        self._makers = {name: (trackers or TRACKERS)[name] for name in names}
        self._run = run
        self._report = report
        self._queue: queue.Queue[tuple[int, float, dict[str, float]] | None] = queue.Queue(_MAX_WAITING)
        self._num_records, self._num_lost = 0, 0
        self._put_at = -1e9
        self._closed = False
        self._thread = threading.Thread(target=self._loop, name="trackers", daemon=True)

    def start(self) -> None:
        """Open the trackers and begin to feed them, in the thread."""
        if self._makers:
            self._thread.start()

    def put(self, record: dict[str, Any]) -> None:
        """Hand over one metrics record. Never waits."""
        if not self._thread.is_alive():
            return
        now = time.monotonic()
        self._num_records += 1
        if self._num_records > _NUM_DENSE and "loss" in record and now - self._put_at < _SPARSE_S:
            return
        self._put_at = now
        try:
            self._queue.put_nowait((int(record.get("step") or 0), time.time(), tagged(record)))
        except queue.Full:
            if self._num_lost == 0:
                self._report("trackers are too slow: records are left out of them; metrics.jsonl has them all")
            self._num_lost += 1

    def close(self) -> None:
        """Send what is left and end the trackers, within a time limit. May be called twice."""
        if self._closed or self._thread.ident is None:
            return
        self._closed = True
        try:
            self._queue.put(None, timeout=_CLOSE_S)
            self._thread.join(timeout=_CLOSE_S)
        except queue.Full:
            pass
        if self._thread.is_alive():
            self._report(f"trackers did not end within {_CLOSE_S:.0f} s and were left")

    def _loop(self) -> None:
        trackers: dict[str, Tracker] = {}

        def attempt(name: str, action: Callable[[], Any]) -> Any:
            try:
                return action()
            except Exception as error:  # whatever a guest raises must not end the run
                self._report(f"tracker {name} failed and is left out: {type(error).__name__}: {error}")
                trackers.pop(name, None)
                return None

        for name, maker in self._makers.items():
            tracker = attempt(name, lambda maker=maker: maker(self._run))  # type: ignore[misc]
            if tracker is not None:
                trackers[name] = tracker
        while (item := self._queue.get()) is not None:
            for name, tracker in list(trackers.items()):
                attempt(name, lambda tracker=tracker, item=item: tracker.log(*item))  # type: ignore[misc]
        for name, tracker in list(trackers.items()):
            attempt(name, tracker.close)
