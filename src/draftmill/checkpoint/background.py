"""Saving beside the training: the caller waits for a device-to-host copy, a thread does the rest.

    save(step, ...)  ── copy into host buffers ──►  writer thread: store.save, then store.prune
         ▲ waits here while the writer still reads the buffers of the save before it

Owns the host buffers and the writer thread. One save at a time: a second one waits for the first to be on the disk,
so none is lost and none is skipped. What went wrong in the thread is raised by the caller's next call, once.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from draftmill.checkpoint import store
from draftmill.checkpoint.store import Tensors

_TENSORS, _AVERAGE = "", "ema"
"""The groups of buffers that are not the optimizer's."""


@dataclass(frozen=True)
class HeldUp:
    """How long a save kept its caller: for the writer before it, and for its own copy. Seconds."""

    wait_s: float
    copy_s: float


@dataclass(frozen=True)
class Saved:
    """What the writer thread did, handed to `on_saved` in that thread."""

    folder: Path
    step: int
    write_s: float
    removed: list[Path]


class BackgroundSaver:
    """Writes a run's checkpoints in a thread of its own, for one calling thread. Close it; closing twice is harmless.

    Host buffers take as much memory as the tensors given (12 bytes a parameter for fp32 masters and AdamW, 8 with
    Muon, 4 more with a moving average), pinned where the tensors are on CUDA. They are made by `prepare`, or by the
    first save. Pinning memory breaks a CUDA graph capture in another thread, so call `prepare` before anything is
    captured.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        keep_last: int,
        keep_best: int,
        on_saved: Callable[[Saved], None] | None = None,
    ) -> None:
        self._run_dir, self._keep = run_dir, (keep_last, keep_best)
        self._on_saved = on_saved
        self._buffers: dict[str, Tensors] = {}
        self._changed = threading.Condition()
        self._job: tuple[int, dict[str, Any]] | None = None
        self._error: BaseException | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="checkpoint-writer", daemon=True)
        self._thread.start()

    def prepare(self, tensors: Tensors, optimizer: dict[str, Tensors], average: Tensors | None = None) -> None:
        """Make the host buffers for tensors of these names, shapes and dtypes. Nothing is copied or written."""
        self._allocate(_grouped(tensors, optimizer, average))

    def _allocate(self, grouped: dict[str, Tensors]) -> None:
        self._buffers = {
            group: {
                name: torch.empty(source.shape, dtype=source.dtype, pin_memory=source.is_cuda)
                for name, source in named.items()
            }
            for group, named in grouped.items()
        }

    def save(
        self,
        step: int,
        tensors: Tensors,
        optimizer: dict[str, Tensors],
        state: dict[str, Any],
        average: Tensors | None = None,
    ) -> HeldUp:
        """Copy everything to the host and let the thread write `checkpoints/step-N/`; see `store.save`.

        Returns when the copy is done, so the tensors may change at once, on any stream. The copies run on the current
        stream of each device. `state` is copied too. Raises what a save before this one failed with (InputError for
        a full disk), RuntimeError after `close` or where the tensors are not those of `prepare`.
        """
        state = json.loads(json.dumps(state))
        start_s = time.perf_counter()
        self.wait()
        if self._closed:
            raise RuntimeError(f"checkpoint of step {step}: the saver is closed")
        copy_start_s = time.perf_counter()
        self._copy(_grouped(tensors, optimizer, average))
        done_s = time.perf_counter()
        with self._changed:
            self._job = (step, state)
            self._changed.notify_all()
        return HeldUp(wait_s=copy_start_s - start_s, copy_s=done_s - copy_start_s)

    def wait(self) -> None:
        """Return when nothing is being written. Raises what the last save failed with."""
        with self._changed:
            self._changed.wait_for(lambda: self._job is None)
            error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self) -> None:
        """Wait for the save being written, end the thread, free the buffers. Raises what that save failed with."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()
        self._buffers = {}
        self.wait()

    def __enter__(self) -> BackgroundSaver:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _copy(self, grouped: dict[str, Tensors]) -> None:
        if not self._buffers:
            self._allocate(grouped)
        devices = set()
        if {group: set(named) for group, named in grouped.items()} != {g: set(n) for g, n in self._buffers.items()}:
            raise RuntimeError("a save must have the tensors that the buffers were prepared for, got other names")
        for group, named in grouped.items():
            for name, source in named.items():
                buffer = self._buffers[group][name]
                if (buffer.shape, buffer.dtype) != (source.shape, source.dtype):
                    raise RuntimeError(
                        f"{name}: the buffer holds {buffer.dtype} {tuple(buffer.shape)}, "
                        f"got {source.dtype} {tuple(source.shape)}"
                    )
                buffer.copy_(source.detach(), non_blocking=True)
                if source.is_cuda:
                    devices.add(source.device)
        for device in devices:
            torch.cuda.current_stream(device).synchronize()

    def _run(self) -> None:
        """Consumes the job; waits for one or for `close`; is unblocked by `save` and `close`."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._job is not None or self._closed)
                if self._job is None:
                    return
                step, state = self._job
            error: BaseException | None = None
            try:
                self._write(step, state)
            except BaseException as caught:
                error = caught
            with self._changed:
                self._job, self._error = None, error
                self._changed.notify_all()

    def _write(self, step: int, state: dict[str, Any]) -> None:
        start_s = time.perf_counter()
        optimizer = dict(self._buffers)
        tensors, average = optimizer.pop(_TENSORS), optimizer.pop(_AVERAGE, None)
        folder = store.save(self._run_dir, step, tensors, optimizer, state, average)
        write_s = time.perf_counter() - start_s
        removed = store.prune(self._run_dir, *self._keep)
        if self._on_saved is not None:
            self._on_saved(Saved(folder, step, write_s, removed))


def _grouped(tensors: Tensors, optimizer: dict[str, Tensors], average: Tensors | None) -> dict[str, Tensors]:
    grouped = {_TENSORS: tensors, **optimizer}
    return grouped if average is None else {**grouped, _AVERAGE: average}
