"""A run's directory, written by the run itself. Owns the files named in docs/monitoring.md and their meaning.

The pipeline and the loop report to one RunDirectory: phases, heartbeats, metrics, warnings, and how it ended. Nothing
here may slow a step down or end a run: what the disk or a tracker refuses is reported once, and the run goes on.
Never imports torch.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import yaml

from draftmill.errors import InputError
from draftmill.monitor.append import LineFile
from draftmill.monitor.gpus import GpuSource, GpuWatch, NvmlSource
from draftmill.monitor.heartbeat import Heartbeat
from draftmill.monitor.layout import (
    ENVIRONMENT_FILE,
    LOG_FILE,
    METRICS_FILE,
    STATE_FILE,
    STOP_FILE,
    TENSORBOARD,
    check_directory,
    previous_state,
    write_config,
)
from draftmill.monitor.lock import Lock
from draftmill.monitor.log import RunLog, place_of
from draftmill.monitor.phases import ENDINGS, Phase
from draftmill.monitor.recorder import Recorder
from draftmill.monitor.show import epoch, number
from draftmill.monitor.stacks import all_stacks
from draftmill.monitor.state import StateFile, finite, write_json
from draftmill.monitor.stopping import StopMode, StopWish
from draftmill.monitor.trackers import TrackedRun, TrackerFeed, check_installed

_RECENT_STEPS = 20


class RunDirectory:
    """One run's directory, open for writing by the process that runs it. Use `create`, in a `with` statement.

    Inside the `with` statement of the main thread, SIGTERM and SIGINT ask for a graceful stop the first time and for
    one at once the second time (SIGINT raises KeyboardInterrupt the third time), and SIGUSR1 writes every thread's
    stack to run.log.
    """

    def __init__(
        self,
        path: Path,
        lock: Lock,
        previous: dict[str, Any] | None,
        config: dict[str, Any],
        console: bool,
        gpu_source: Callable[[], GpuSource],
    ) -> None:
        self.path = path
        self._lock = lock
        self._owner_pid = os.getpid()
        self._log_every_s = float(_setting(config, "train", "log_every_s", 10.0))
        self._stall_s = float(_setting(config, "pipeline", "stall_s", 600.0))
        self._logged_at = -1e9
        self._stop = StopWish(path)
        self._told_stall = False
        self._num_tokens, self._token_s = 0.0, 0.0
        self._recent: deque[tuple[float, float]] = deque(maxlen=_RECENT_STEPS)
        self._closed = False
        self._recorder = Recorder(StateFile(path / STATE_FILE), self._stall_s, self._every_second, self.warn, previous)
        self._log = RunLog(path, self._device_of, self._recorder.add_warning, console=console)
        self._metrics = LineFile(path / METRICS_FILE, self.warn)
        tracked = TrackedRun(path, _setting(config, "monitor", "project", "draftmill"), self._recorder.run_id, config)
        self._trackers = TrackerFeed(_setting(config, "monitor", "trackers", ["tensorboard"]), tracked, self.warn)
        self._gpus = GpuWatch(gpu_source, self._set_gpus)

    @classmethod
    def create(
        cls,
        path: str | os.PathLike[str],
        config_yaml: str,
        environment: dict[str, Any],
        resume: bool = False,
        *,
        console: bool = True,
        gpu_source: Callable[[], GpuSource] = NvmlSource,
    ) -> RunDirectory:
        """Take a directory for a run, and write its first files.

        Args:
            path: the directory, made if missing
            config_yaml: the resolved configuration; its pipeline.stall_s, train.log_every_s and monitor section hold
            environment: versions, commit, devices; no secrets
            resume: go on with the run that the directory holds, instead of asking for a directory without one
            console: whether the log's lines go to standard error as well
            gpu_source: opens what GPUs are read through

        Raises:
            InputError: a living process has the directory; it holds another run, or files of something else;
                or, with resume, it holds no run; or it can't be written.
        """
        path = Path(path)
        config = yaml.safe_load(config_yaml) or {}
        check_installed(_setting(config, "monitor", "trackers", []))
        try:
            check_directory(path, resume)
            path.mkdir(parents=True, exist_ok=True)
            lock = Lock.take(path)
        except OSError as error:
            raise InputError(
                f"{path} can't be used as a run directory: {error.strerror}; choose another run.dir"
            ) from None
        try:
            previous = previous_state(path, resume)
            run = cls(path, lock, previous, config, console, gpu_source)
            (path / STOP_FILE).unlink(missing_ok=True)
            write_config(path, config_yaml)
            write_json(path / ENVIRONMENT_FILE, environment)
            (path / TENSORBOARD).mkdir(exist_ok=True)
            run._recorder.start()
            run._trackers.start()
            run._gpus.start()
        except BaseException as error:
            lock.release()
            if isinstance(error, OSError):
                raise InputError(f"{path} can't be written: {error.strerror}; choose another run.dir") from None
            raise
        if lock.taken_over:
            run.warn(lock.taken_over)
        return run

    # What the run says about itself

    @property
    def log(self) -> logging.Logger:
        """The package's logger, whose lines go to run.log with time, worker and device."""
        return self._log.logger

    def phase(self, phase: Phase, detail: str = "") -> None:
        """Enter a phase, or say more about the one that lasts, as in (LOADING_TARGETS, "2/5")."""
        if phase is not self._recorder.phase:
            self.log.info(f"phase: {phase}{f' {detail}' if detail else ''}")
        self._recorder.set_phase(phase, detail)

    def worker(self, name: str, device: str) -> Heartbeat:
        """The heartbeat of the worker thread with this name. The thread must carry the same name."""
        heartbeat = Heartbeat(name, device)
        self._recorder.workers[name] = heartbeat
        return heartbeat

    def metrics(self, record: dict[str, Any]) -> None:
        """Add one line to metrics.jsonl, and hand it to the trackers.

        Floats that are not finite become null; `elapsed_s`, the seconds that the run has run, is added.
        """
        record = finite({**record, "elapsed_s": round(self._recorder.elapsed_s(), 3)})
        self._metrics.write(json.dumps(record, separators=(",", ":")))
        self._trackers.put(record)
        tokens, rate = record.get("context_tokens"), record.get("context_tokens_per_s")
        if tokens and rate:
            self._num_tokens += tokens
            self._token_s += tokens / rate
            self._recent.append((tokens, tokens / rate))
        if record.get("accept_length") is not None:
            self._recorder.add_figures({"accept_length": record["accept_length"], "accept_step": record.get("step")})

    def use_gpus(self, uuids: Mapping[str, str], own_bytes: Callable[[str], int] | None = None) -> None:
        """Say which GPUs are the run's.

        Args:
            uuids: the driver's UUID of each device, as in {"cuda:0": "GPU-..."}
            own_bytes: bytes that this process holds of a device; asked where the driver doesn't tell (containers)
        """
        self._gpus.use(uuids, own_bytes)

    def progress(
        self,
        step: int,
        steps: int | None = None,
        epoch: int | None = None,
        epochs: int | None = None,
        loss: float | None = None,
        context_tokens_per_s: float | None = None,
        mean_context_tokens_per_s: float | None = None,
        accept_length: float | None = None,
        **more: float | int | None,
    ) -> None:
        """Say how far the run is; logs a step line every train.log_every_s seconds.

        None keeps the last value. step counts from 1, epoch from 0, as the run's files do.
        Speeds come from `metrics` where it was told of them: the mean over all steps, and as the present one that of
        the last 20, for steps that are reported together have no speed of their own. So does the acceptance length.
        """
        if self._recent:
            mean_context_tokens_per_s = self._num_tokens / self._token_s
            context_tokens_per_s = sum(tokens for tokens, _ in self._recent) / sum(s for _, s in self._recent)
        figures: dict[str, Any] = {
            "step": step,
            "steps": steps,
            "epoch": epoch,
            "epochs": epochs,
            "loss": loss,
            "context_tokens_per_s": context_tokens_per_s,
            "mean_context_tokens_per_s": mean_context_tokens_per_s,
            "accept_length": accept_length,
            **more,
        }
        self._recorder.set_progress(figures)
        now = time.monotonic()
        if now - self._logged_at >= self._log_every_s:
            self._logged_at = now
            self.log.info(_step_line(figures))

    def warn(self, text: str) -> None:
        """Log a warning, and show it among the last ones."""
        self.log.warning(text)

    def dump_stacks(self) -> None:
        """Write where every thread stands to run.log."""
        self._log.raw("Stacks of all threads:\n" + all_stacks())

    # How it ends

    def stop_requested(self) -> StopMode:
        """Whether to stop: "graceful" after the step, saving; "now" without either. Costs nothing to ask."""
        return self._stop.mode

    def finish(self, phase: Phase) -> None:
        """Record how the run ended: FINISHED, STOPPED or STALLED."""
        if phase not in ENDINGS or phase is Phase.CRASHED:
            raise RuntimeError(f"a run finishes as finished, stopped or stalled, got {phase}; a crash has crash()")
        self._end(phase, "")

    def crash(
        self, exception: BaseException, worker: str | None = None, device: str | None = None, step: int | None = None
    ) -> None:
        """Record the exception that ended the run, with its traceback in run.log. The first one counts."""
        if self._recorder.phase is Phase.CRASHED:
            return
        worker = worker or place_of(threading.current_thread().name)
        device = self._device_of(worker) if device is None else device
        text = f"{type(exception).__name__}: {exception}"
        lines = [] if isinstance(exception, InputError) else traceback.format_exception(exception)
        if lines:
            self._log.raw("".join(lines))
        where = f"{worker}{f' on {device}' if device else ''}{f' at step {step}' if step is not None else ''}"
        self.log.error(f"crashed in {where}: {text}")
        self._recorder.set_error(
            {"worker": worker, "device": device, "step": step, "text": text, "traceback": "".join(lines)[-4000:]}
        )
        self._end(Phase.CRASHED, text.splitlines()[0] if text else "")

    def close(self) -> None:
        """Write the last state, close every file and give the directory free. May be called twice."""
        if self._closed or os.getpid() != self._owner_pid:  # a forked child has no part in it
            return
        self._closed = True
        self._gpus.close()
        self._trackers.close()
        self._recorder.close()
        self._metrics.close()
        self._stop.restore_signals()
        self._log.close()
        self._lock.release()

    def __enter__(self) -> RunDirectory:
        self._recorder.hears_signals = self._stop.take_signals(self._log.file.fileno())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exception: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._recorder.phase not in ENDINGS:
                if isinstance(exception, KeyboardInterrupt):
                    self.finish(Phase.STOPPED)
                elif exception is not None:
                    self.crash(exception)
                else:
                    error = RuntimeError("the run was left without finish() or crash()")
                    self.crash(error)
                    raise error
        finally:
            self.close()

    # Inside

    def _end(self, phase: Phase, detail: str) -> None:
        self.phase(phase, detail)
        self._recorder.write_now()

    def _device_of(self, name: str) -> str:
        worker = self._recorder.workers.get(name)
        return worker.device if worker is not None else ""

    def _set_gpus(self, reading: dict[str, Any]) -> None:
        self._recorder.gpus = reading

    def _every_second(self, since_progress_s: float) -> None:
        self._stop.look()
        mode = self._stop.mode
        if self._recorder.stop_mode != mode:
            self._recorder.stop_mode = mode
            self.log.info("asked to stop " + ("at once" if mode == "now" else "after this step"))
        stalled = since_progress_s > self._stall_s and self._recorder.phase not in ENDINGS
        if stalled and not self._told_stall:
            self.warn(
                f"no progress for {since_progress_s:.0f} s in {self._recorder.phase}; all stacks are in {LOG_FILE}"
            )
            self.dump_stacks()
        self._told_stall = stalled


def _setting(config: dict[str, Any], section: str, name: str, default: Any) -> Any:
    value = (config.get(section) or {}).get(name)
    return default if value is None else value


def _step_line(figures: dict[str, Any]) -> str:
    def known(key: str, form: str, scale: float | None = None) -> str:
        return number(figures.get(key), form, scale)

    parts = [
        known("step", "step {:,}") + known("steps", " / {:,}"),
        epoch(figures),
        known("loss", "loss {:.4f}"),
        known("context_tokens_per_s", "{:.1f} Ktok/s", 1e-3)
        + known("mean_context_tokens_per_s", " (mean {:.1f})", 1e-3),
        known("accept_length", "acceptance {:.2f}"),
    ]
    return "  ".join(part for part in parts if part)
