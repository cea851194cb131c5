"""Files that survive a power cut, and digests that notice a flipped byte.

Owns fsync, atomic renames and checksums. Knows nothing of drafters, steps or layouts.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from draftmill.errors import InputError

CHUNK_BYTES = 16 * 2**20
"""Files are hashed in pieces of this size, several at once. Measured on one core of a Xeon with SHA instructions:
sha256 1.2 GB/s, blake2b 0.5 GB/s."""


def digest(path: Path) -> str:
    """Hex digest of a file's content: sha256 over the sha256 of each 16 MiB piece and the size.

    Reading and hashing release the GIL, so a digest may be taken beside a training thread. Raises OSError.
    """
    handle = os.open(path, os.O_RDONLY)
    try:
        size = os.fstat(handle).st_size
        offsets = range(0, size, CHUNK_BYTES)

        def piece(offset: int) -> bytes:
            return hashlib.sha256(os.pread(handle, CHUNK_BYTES, offset)).digest()

        whole = hashlib.sha256(size.to_bytes(8, "little"))
        if len(offsets) <= 1:
            pieces = [piece(offset) for offset in offsets]
        else:
            with ThreadPoolExecutor(min(len(offsets), os.cpu_count() or 1, 8)) as pool:
                pieces = list(pool.map(piece, offsets))
        for part in pieces:
            whole.update(part)
        return whole.hexdigest()
    finally:
        os.close(handle)


def sync_file(path: Path) -> None:
    """Wait until a file's content is on the disk. Raises OSError."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_folder(path: Path) -> None:
    """Wait until the names inside a folder are on the disk. Raises OSError."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file and wait until it is on the disk. Raises OSError, or TypeError for what JSON can't hold."""
    with path.open("w", encoding="utf-8") as file:
        file.write(json.dumps(value, indent=1) + "\n")
        file.flush()
        os.fsync(file.fileno())


def replace_json(path: Path, value: Any) -> None:
    """Write a JSON file in place of one that stays whole until the new one is on the disk. Raises as `write_json`."""
    new = path.with_name(f".{path.name}.new")
    try:
        write_json(new, value)
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)


def read_json(path: Path) -> Any:
    """Read a JSON file. Raises InputError that names the file: it is missing, unreadable or no JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path} is missing") from None
    except OSError as error:
        raise InputError(f"{path} can't be read: {error.strerror or error}") from None
    except ValueError as error:
        raise InputError(f"{path} is not JSON: {error}") from None


def write_tensors(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write named tensors, from any device, as a safetensors file and wait until it is on the disk. Raises OSError."""
    plain = {}
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu().contiguous()
        # safetensors refuses tensors that are parts of one buffer, as flat optimizer buffers have
        plain[name] = tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()
    try:
        save_file(plain, path, metadata={"format": "pt"})
    except SafetensorError as error:
        # it hands the system's number on inside its text only
        number = re.search(r"os error (\d+)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error
    sync_file(path)


def replace_folder(new: Path, final: Path) -> None:
    """Rename a written folder into place, over an older one of that name if there is one, durably.

    At every moment `final`, or else `final` under its set-aside name (`aside`), is whole. Raises OSError.
    """
    old = aside(final)
    if final.exists():
        final.rename(old)
    new.rename(final)
    sync_folder(final.parent)
    if old.exists():
        shutil.rmtree(old)


def aside(final: Path) -> Path:
    """Where `replace_folder` keeps the older folder while the new one takes its place."""
    return final.with_name(f".replaced-{final.name}")


def remove_folder(path: Path) -> None:
    """Delete a folder so that a kill in between leaves no half of it under its own name. Raises OSError."""
    trash = path.with_name(f".removed-{path.name}")
    if trash.exists():
        shutil.rmtree(trash)
    path.rename(trash)
    shutil.rmtree(trash)


@contextmanager
def clear_write_errors(what: str, advice: str) -> Iterator[None]:
    """Turn what the system says about a failed write into one InputError line with the file's name."""
    try:
        yield
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        raise InputError(f"{what} was not written: {error.strerror or error}{where}; {advice}") from error
