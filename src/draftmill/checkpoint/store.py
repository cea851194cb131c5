"""Checkpoints of a run: `checkpoints/step-N/` with drafter.safetensors, optimizer.safetensors, where a moving average
is kept ema.safetensors, state.json and manifest.json.

Owns the folder's layout, its atomic writing, its checksums and its deletion. No pickle is written or read. Never asks
what a number in the state means: that is `resume`'s and the training loop's business.

A checkpoint is written into a hidden folder, synced to the disk and renamed, so that `step-N` exists only whole. The
manifest is written last and holds the size and digest of every other file, and its own.

Keys of the state that this room reads, where they are there: `shape` (DrafterShape.to_dict), `config` (the resolved
configuration), `target` ({model, revision, architectures}), `data_fingerprint`, `batches_per_step`, `finished`,
`accept_length` and `accept_by_slot` (held-out, of these very weights; None where they were not evaluated).
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from draftmill.checkpoint.durable import (
    aside,
    clear_write_errors,
    digest,
    read_json,
    remove_folder,
    replace_folder,
    sync_folder,
    write_json,
    write_tensors,
)
from draftmill.errors import InputError

FORMAT = "draftmill checkpoint"
VERSION = 1
DRAFTER_FILE, OPTIMIZER_FILE, AVERAGE_FILE, STATE_FILE, MANIFEST_FILE = (
    "drafter.safetensors",
    "optimizer.safetensors",
    "ema.safetensors",
    "state.json",
    "manifest.json",
)

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint. Tensors are read when asked for, mapped from the file: copy them, do not train on them."""

    folder: Path
    step: int
    state: dict[str, Any]
    has_average: bool = False

    def tensors(self) -> Tensors:
        """The fp32 masters by upstream name, on the CPU, in the dtype they were saved in."""
        return _load_tensors(self.folder / DRAFTER_FILE)

    def average(self) -> Tensors | None:
        """The masters' moving average, as `tensors`; None where none was kept."""
        return _load_tensors(self.folder / AVERAGE_FILE) if self.has_average else None

    def optimizer(self) -> dict[str, Tensors]:
        """The optimizer's tensors as they were saved: {"exp_avg": {name: tensor}, ...}, on the CPU."""
        groups: dict[str, Tensors] = {}
        for key, tensor in _load_tensors(self.folder / OPTIMIZER_FILE).items():
            group, _, name = key.partition("/")
            groups.setdefault(group, {})[name] = tensor
        return groups


@dataclass(frozen=True)
class Entry:
    """One checkpoint folder of a run, looked at without reading its tensors; `problem` says what is wrong with it."""

    folder: Path
    step: int
    accept_length: float | None
    problem: str | None


def save(
    run_dir: Path,
    step: int,
    tensors: Tensors,
    optimizer: dict[str, Tensors],
    state: dict[str, Any],
    average: Tensors | None = None,
) -> Path:
    """Write `checkpoints/step-N/` of a run; it appears whole or not at all. An older folder of that step is replaced.

    tensors    {name: tensor}, the fp32 masters, upstream names; any device; the dtype is kept
    optimizer  {"exp_avg": {name: tensor}, ...}
    state      JSON; see the module's text for the keys this room reads
    average    the masters' moving average, where one is kept
    Only one process may write into a run, and only one thread at a time: what earlier writers left half done is
    removed here. No collective is entered, so one drafter of several may save alone.

    Raises InputError, one line that names the file, where the disk is full or the folder can't be written.
    """
    root = run_dir / "checkpoints"
    final = root / f"step-{step}"
    advice = "earlier checkpoints are untouched; free space or make the folder writable"
    with clear_write_errors(f"checkpoint {final}", advice):
        if not root.is_dir():
            root.mkdir(parents=True)
            sync_folder(run_dir)
        remove_leftovers(run_dir)
        temporary = root / f".writing-step-{step}-{secrets.token_hex(4)}"
        temporary.mkdir()
        try:
            write_tensors(temporary / DRAFTER_FILE, tensors)
            write_tensors(
                temporary / OPTIMIZER_FILE,
                {f"{group}/{name}": tensor for group, named in optimizer.items() for name, tensor in named.items()},
            )
            if average is not None:
                write_tensors(temporary / AVERAGE_FILE, average)
            write_json(temporary / STATE_FILE, {**state, "step": step})
            _write_manifest(temporary, step)
            sync_folder(temporary)
            replace_folder(temporary, final)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
    return final


def load(folder: Path, *, optimizer: bool = True) -> Checkpoint:
    """Verify a checkpoint folder and open it; `optimizer=False` neither verifies nor needs the optimizer's file.

    Raises InputError that names the file which is missing, cut short or changed.
    """
    manifest = _read_manifest(folder)
    has_average = AVERAGE_FILE in manifest["files"]
    wanted = [DRAFTER_FILE, STATE_FILE] + [OPTIMIZER_FILE] * optimizer + [AVERAGE_FILE] * has_average
    for name in wanted:
        _check_size(folder, name, manifest)
    for name in wanted:
        try:
            found = digest(folder / name)
        except OSError as error:
            raise InputError(f"{folder / name} can't be read: {error.strerror or error}") from None
        if found != manifest["files"][name]["digest"]:
            raise InputError(f"{folder / name} is damaged: its content does not match the checksum written with it")
    return Checkpoint(folder, manifest["step"], read_json(folder / STATE_FILE), has_average)


def checkpoints(run_dir: Path) -> list[Entry]:
    """The checkpoints of a run, ascending by step; sizes are checked, contents are not. Empty where there is none.

    Changes nothing, so it may look at a run that is being written. One that a killed writer set aside, and whose
    replacement never came, is listed too.
    """
    root = run_dir / "checkpoints"
    folders: dict[int, Path] = {}
    for path in sorted(root.iterdir()) if root.is_dir() else ():  # .replaced-step-N comes before step-N
        step = path.name.removeprefix(".replaced-").removeprefix("step-")
        if step.isdigit() and path.name in (f"step-{step}", f".replaced-step-{step}"):
            folders[int(step)] = path
    return [_entry(folders[step], step) for step in sorted(folders)]


def latest(run_dir: Path) -> Entry | None:
    """The checkpoint of the highest step, whole or not; None where there is none."""
    return next(reversed(checkpoints(run_dir)), None)


def best(run_dir: Path) -> Entry | None:
    """The whole checkpoint with the greatest held-out acceptance length, the newest of equals; None without any."""
    return next(reversed(_by_acceptance(checkpoints(run_dir))), None)


def prune(run_dir: Path, keep_last: int, keep_best: int) -> list[Path]:
    """Delete checkpoints but the `keep_last` newest and the `keep_best` of greatest acceptance length; returns them.

    Damaged ones are neither counted nor deleted: someone may still want to look. Half-deleted and half-written
    folders of earlier processes go too. Raises InputError where a folder can't be deleted.
    """
    whole = [entry for entry in checkpoints(run_dir) if entry.problem is None]
    scored = _by_acceptance(whole)
    kept = {entry.step for entry in whole[-keep_last:] + scored[max(0, len(scored) - keep_best) :]}
    doomed = [entry.folder for entry in whole if entry.step not in kept]
    try:
        for folder in doomed:
            remove_folder(folder)
        remove_leftovers(run_dir)
    except OSError as error:
        raise InputError(f"old checkpoint {error.filename} can't be deleted: {error.strerror}; delete it") from error
    return doomed


def remove_leftovers(run_dir: Path) -> None:
    """Remove what a killed writer left: half-written and half-deleted folders. A set-aside checkpoint whose
    replacement never came goes back to its place. Only for the one process that writes into the run.
    """
    root = run_dir / "checkpoints"
    for path in root.iterdir() if root.is_dir() else ():
        if path.name.startswith((".writing-step-", ".removed-step-")):
            shutil.rmtree(path)
        elif path.name.startswith(".replaced-step-"):
            final = root / path.name.removeprefix(".replaced-")
            assert aside(final) == path
            if final.exists():
                shutil.rmtree(path)
            else:
                path.rename(final)


def _by_acceptance(entries: list[Entry]) -> list[Entry]:
    scored = [
        (entry.accept_length, entry.step, entry)
        for entry in entries
        if entry.problem is None and entry.accept_length is not None and math.isfinite(entry.accept_length)
    ]
    return [entry for _, _, entry in sorted(scored, key=lambda item: item[:2])]


def _load_tensors(path: Path) -> Tensors:
    try:
        return load_file(path)
    except Exception as error:  # safetensors raises several kinds for one damaged file
        raise InputError(f"{path} can't be read: {error}") from error


def _write_manifest(folder: Path, step: int) -> None:
    files = {
        name: {"bytes": (folder / name).stat().st_size, "digest": digest(folder / name)}
        for name in (DRAFTER_FILE, OPTIMIZER_FILE, AVERAGE_FILE, STATE_FILE)
        if (folder / name).exists()
    }
    body = {"format": FORMAT, "version": VERSION, "step": step, "files": files}
    write_json(folder / MANIFEST_FILE, {**body, "digest": _body_digest(body)})


def _read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST_FILE
    if not folder.is_dir():
        raise InputError(f"no checkpoint at {folder}")
    manifest = read_json(path)
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise InputError(f"{path} is not the manifest of a Draftmill checkpoint")
    if manifest.get("version") != VERSION:
        raise InputError(
            f"{path} is of version {manifest.get('version')}, this Draftmill reads version {VERSION}; use the "
            "Draftmill that wrote it"
        )
    if manifest.pop("digest", None) != _body_digest(manifest):
        raise InputError(f"{path} is damaged: its content does not match the checksum written with it")
    return manifest


def _body_digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _check_size(folder: Path, name: str, manifest: dict[str, Any]) -> None:
    wanted = manifest["files"][name]["bytes"]
    try:
        found = os.stat(folder / name).st_size
    except FileNotFoundError:
        raise InputError(f"{folder / name} is missing") from None
    except OSError as error:
        raise InputError(f"{folder / name} can't be read: {error.strerror or error}") from None
    if found != wanted:
        raise InputError(f"{folder / name} is damaged: it has {found} bytes instead of {wanted}")


def _entry(folder: Path, step: int) -> Entry:
    try:
        manifest = _read_manifest(folder)
        for name in manifest["files"]:
            _check_size(folder, name, manifest)
        if manifest["step"] != step:
            raise InputError(f"{folder} holds step {manifest['step']}; its name says {step}")
        return Entry(folder, step, read_json(folder / STATE_FILE).get("accept_length"), None)
    except InputError as error:
        return Entry(folder, step, None, str(error))
