"""Checkpoints on the disk: whole or not at all, verified, kept and deleted by rule."""

from __future__ import annotations

import errno
import json
import os
import random
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from draftmill.checkpoint import durable, store
from draftmill.errors import InputError

torch.set_num_threads(1)


def tensors_of(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {
        "layers.0.self_attn.q_proj.weight": torch.randn(12, 8, generator=generator),
        "norm.weight": torch.full((8,), float(step)),
    }


def save(run: Path, step: int, **state) -> Path:
    named = tensors_of(step)
    moments = {"exp_avg": named, "exp_avg_sq": {name: tensor.square() for name, tensor in named.items()}}
    return store.save(run, step, named, moments, {"epoch": 1, **state})


def assert_is(checkpoint: store.Checkpoint, step: int) -> None:
    assert checkpoint.step == checkpoint.state["step"] == step
    for name, tensor in tensors_of(step).items():
        assert torch.equal(checkpoint.tensors()[name], tensor)
        assert torch.equal(checkpoint.optimizer()["exp_avg"][name], tensor)
        assert torch.equal(checkpoint.optimizer()["exp_avg_sq"][name], tensor.square())


def test_a_moving_average_has_its_own_verified_file(tmp_path):
    without = store.load(save(tmp_path, 1))
    assert without.average() is None
    assert not (without.folder / "ema.safetensors").exists()
    average = {name: 2.0 * tensor for name, tensor in tensors_of(2).items()}
    folder = store.save(tmp_path, 2, tensors_of(2), {}, {}, average)
    for optimizer in (True, False):
        loaded = store.load(folder, optimizer=optimizer)
        assert torch.equal(loaded.tensors()["norm.weight"], torch.full((8,), 2.0))
        assert torch.equal(loaded.average()["norm.weight"], torch.full((8,), 4.0))
    content = bytearray((folder / "ema.safetensors").read_bytes())
    content[-1] ^= 1
    (folder / "ema.safetensors").write_bytes(content)
    with pytest.raises(InputError, match=r"ema\.safetensors is damaged: its content does not match"):
        store.load(folder, optimizer=False)
    (folder / "ema.safetensors").unlink()
    with pytest.raises(InputError, match=r"ema\.safetensors is missing"):
        store.load(folder)
    assert "ema.safetensors is missing" in (store.latest(tmp_path).problem or "")


def names_in(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def test_what_is_loaded_is_what_was_saved(tmp_path):
    folder = save(tmp_path, 7, sequence=4711, loss=0.1 + 0.2, rng=[1, 2], accept_length=None)
    assert folder == tmp_path / "checkpoints" / "step-7"
    checkpoint = store.load(folder)
    assert_is(checkpoint, 7)
    assert checkpoint.state == {
        "epoch": 1,
        "sequence": 4711,
        "loss": 0.30000000000000004,
        "rng": [1, 2],
        "accept_length": None,
        "step": 7,
    }


def test_only_safetensors_and_json_are_written(tmp_path):
    folder = save(tmp_path, 1)
    assert sorted(path.name for path in folder.iterdir()) == [
        "drafter.safetensors",
        "manifest.json",
        "optimizer.safetensors",
        "state.json",
    ]
    assert set(load_file(folder / "drafter.safetensors")) == set(tensors_of(1))
    assert json.loads((folder / "state.json").read_text())["epoch"] == 1


def test_dtypes_are_kept(tmp_path):
    """B10: a resume that casts bf16 to fp32 on some ranks diverges."""
    named = {
        "a": torch.randn(5).bfloat16(),
        "b": torch.tensor(3, dtype=torch.int64),
        "c": torch.randn(2, 3).double(),
        "d": torch.randn(4).half(),
    }
    checkpoint = store.load(store.save(tmp_path, 1, named, {"step": {"a": torch.tensor(2.0)}}, {}))
    for name, tensor in named.items():
        assert checkpoint.tensors()[name].dtype == tensor.dtype
        assert torch.equal(checkpoint.tensors()[name], tensor)
    assert checkpoint.optimizer()["step"]["a"].shape == ()


def test_parts_of_one_flat_buffer_and_transposes_can_be_saved(tmp_path):
    flat = torch.arange(24.0)
    named = {"a": flat[:12].view(3, 4), "b": flat[12:].view(4, 3).t(), "whole": flat, "empty": flat[:0]}
    loaded = store.load(store.save(tmp_path, 1, named, {}, {})).tensors()
    assert all(torch.equal(loaded[name], named[name]) for name in named)


def test_without_the_optimizer_its_file_is_not_needed(tmp_path):
    folder = save(tmp_path, 3)
    (folder / "optimizer.safetensors").unlink()
    assert torch.equal(store.load(folder, optimizer=False).tensors()["norm.weight"], torch.full((8,), 3.0))
    with pytest.raises(InputError, match=r"optimizer\.safetensors is missing"):
        store.load(folder)


def test_a_kill_at_any_moment_leaves_the_last_whole_one(tmp_path):
    """B27: killed mid-save, the checkpoint before stays loadable. kill -9 at 30 random moments of frequent saves."""
    chooser = random.Random(0)
    reached = 0
    for _ in range(30):
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                os.close(reading)
                for step in range(reached + 1, reached + 10_000):
                    save(tmp_path, step)
                    os.write(writing, step.to_bytes(4, "little"))
                    store.prune(tmp_path, keep_last=2, keep_best=0)
            finally:
                os._exit(1)
        os.close(writing)
        told = int.from_bytes(os.read(reading, 4), "little")  # the first save of this child is on the disk
        time.sleep(chooser.uniform(0.0, 0.05))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        while said := os.read(reading, 4):
            told = int.from_bytes(said, "little")
        os.close(reading)
        newest = store.latest(tmp_path)
        assert newest is not None
        assert newest.step in (told, told + 1)  # it may have been killed between the rename and its word
        assert_is(store.load(newest.folder), newest.step)
        assert all(entry.problem is None for entry in store.checkpoints(tmp_path))
        reached = newest.step
    store.remove_leftovers(tmp_path)
    assert all(name.startswith("step-") for name in names_in(tmp_path))


def test_everything_is_on_the_disk_before_the_name_appears(tmp_path, monkeypatch):
    save(tmp_path, 4)
    events: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def told_fsync(handle):
        events.append(f"sync {Path(os.readlink(f'/proc/self/fd/{handle}')).name.partition('-step')[0]}")
        fsync(handle)

    def told_rename(self, target):
        events.append(f"rename to {Path(target).name}")
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", told_fsync)
    monkeypatch.setattr(Path, "rename", told_rename)
    save(tmp_path, 5)
    assert events == [
        "sync drafter.safetensors",
        "sync optimizer.safetensors",
        "sync state.json",
        "sync manifest.json",
        "sync .writing",
        "rename to step-5",
        "sync checkpoints",
    ]


def full_disk(*_args, **_kwargs):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "a/file")


def full_disk_by_safetensors(*_args, **_kwargs):
    raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")


@pytest.mark.parametrize(
    ("name", "failure"),
    [
        ("durable.save_file", full_disk_by_safetensors),
        ("durable.sync_file", full_disk),
        ("store.write_tensors", full_disk),
        ("store.write_json", full_disk),
        ("store.sync_folder", full_disk),
        ("store.replace_folder", full_disk),
        ("store._write_manifest", full_disk),
    ],
)
def test_a_full_disk_is_one_line_and_harms_nothing(tmp_path, monkeypatch, name, failure):
    save(tmp_path, 1)
    monkeypatch.setattr(f"draftmill.checkpoint.{name}", failure)
    with pytest.raises(InputError) as caught:
        save(tmp_path, 2)
    assert re.search(r"step-2 was not written: No space left on device \(\S+\)", str(caught.value))
    assert "earlier checkpoints are untouched" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert names_in(tmp_path) == ["step-1"]
    assert_is(store.load(tmp_path / "checkpoints" / "step-1"), 1)
    monkeypatch.undo()
    save(tmp_path, 2)
    assert_is(store.load(tmp_path / "checkpoints" / "step-2"), 2)


def test_a_really_full_disk(tmp_path):
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("mounting a small file system needs root")
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(small)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"no small file system can be mounted here: {mounted.stderr.decode().strip()}")
    try:
        save(small, 1)
        with pytest.raises(InputError, match=r"step-2 was not written: No space left on device"):
            store.save(small, 2, {"norm.weight": torch.zeros(400_000)}, {}, {})
        assert names_in(small) == ["step-1"]
        assert_is(store.load(small / "checkpoints" / "step-1"), 1)
    finally:
        subprocess.run(["umount", str(small)], check=True)


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path, monkeypatch):
    (tmp_path / "checkpoints").write_text("a file")
    with pytest.raises(InputError, match=r"was not written: File exists \(.*checkpoints\)"):
        save(tmp_path, 1)
    (tmp_path / "checkpoints").unlink()
    save(tmp_path, 1)

    def read_only(self, *_args, **_kwargs):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(self))

    monkeypatch.setattr(Path, "mkdir", read_only)
    with pytest.raises(InputError, match=r"was not written: Read-only file system \(.*checkpoints/.*\)"):
        save(tmp_path, 2)
    assert_is(store.load(tmp_path / "checkpoints" / "step-1"), 1)


def test_a_read_only_folder_is_one_line(tmp_path):
    if os.geteuid() == 0:
        pytest.skip("root may write anywhere")
    save(tmp_path, 1)
    (tmp_path / "checkpoints").chmod(0o500)
    try:
        with pytest.raises(InputError, match="was not written: Permission denied"):
            save(tmp_path, 2)
    finally:
        (tmp_path / "checkpoints").chmod(0o700)
    assert_is(store.load(tmp_path / "checkpoints" / "step-1"), 1)


FILES = ["drafter.safetensors", "optimizer.safetensors", "state.json", "manifest.json"]


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_named(tmp_path, name):
    save(tmp_path, 1)
    damaged = save(tmp_path, 2)
    (damaged / name).unlink()
    with pytest.raises(InputError, match=rf"step-2/{name} is missing"):
        store.load(damaged)
    assert_is(store.load(tmp_path / "checkpoints" / "step-1"), 1)


@pytest.mark.parametrize("name", FILES)
def test_a_truncated_file_is_named(tmp_path, name):
    damaged = save(tmp_path, 2)
    size = (damaged / name).stat().st_size
    os.truncate(damaged / name, size // 2)
    with pytest.raises(InputError, match=rf"step-2/{name} is (damaged: it has {size // 2} bytes instead|not JSON)"):
        store.load(damaged)
    os.truncate(damaged / name, 0)
    with pytest.raises(InputError, match=rf"step-2/{name} is (damaged: it has 0 bytes instead|not JSON)"):
        store.load(damaged)


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_anywhere_is_noticed(tmp_path, name):
    damaged = save(tmp_path, 2)
    content = (damaged / name).read_bytes()
    for place in {0, 9, len(content) // 2, len(content) - 2}:
        changed = bytearray(content)
        changed[place] ^= 0x04
        (damaged / name).write_bytes(changed)
        with pytest.raises(InputError, match=rf"{name} (is damaged|is not JSON|is not the manifest|is of version)"):
            store.load(damaged)
    (damaged / name).write_bytes(content)
    assert_is(store.load(damaged), 2)


def test_a_flip_in_a_later_piece_of_a_long_file_is_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr(durable, "CHUNK_BYTES", 64)
    path = tmp_path / "long"
    content = bytes(range(256)) * 3 + b"tail"
    path.write_bytes(content)
    whole = durable.digest(path)
    assert whole == durable.digest(path)
    for place in (0, 63, 64, 500, len(content) - 1):
        changed = bytearray(content)
        changed[place] ^= 1
        path.write_bytes(changed)
        assert durable.digest(path) != whole
    path.write_bytes(content[64:128] + content[:64] + content[128:])
    assert durable.digest(path) != whole
    path.write_bytes(content + b"\0")
    assert durable.digest(path) != whole


def test_a_version_from_the_future_is_refused(tmp_path):
    folder = save(tmp_path, 1)
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**manifest, "version": 2}))
    with pytest.raises(InputError, match="is of version 2, this Draftmill reads version 1"):
        store.load(folder)


def test_a_folder_that_is_no_checkpoint_is_said(tmp_path):
    with pytest.raises(InputError, match="no checkpoint at"):
        store.load(tmp_path / "nowhere")
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(InputError, match="is not the manifest of a Draftmill checkpoint"):
        store.load(tmp_path)


def test_listing_is_by_step_and_sees_damage_by_size(tmp_path):
    for step in (900, 1000, 20):
        save(tmp_path, step, accept_length=step / 100)
    (tmp_path / "checkpoints" / "step-abc").mkdir()
    (tmp_path / "checkpoints" / "notes.txt").write_text("mine")
    assert [(entry.step, entry.accept_length) for entry in store.checkpoints(tmp_path)] == [
        (20, 0.2),
        (900, 9.0),
        (1000, 10.0),
    ]
    os.truncate(tmp_path / "checkpoints" / "step-1000" / "optimizer.safetensors", 10)
    newest = store.latest(tmp_path)
    assert newest is not None
    assert newest.step == 1000
    assert "optimizer.safetensors is damaged: it has 10 bytes" in (newest.problem or "")


def test_an_empty_run_has_none(tmp_path):
    assert store.checkpoints(tmp_path) == []
    assert store.latest(tmp_path) is None
    assert store.best(tmp_path) is None


def test_the_best_is_the_newest_of_the_greatest_acceptance_length(tmp_path):
    for step, length in ((1, 3.0), (2, 4.5), (3, None), (4, 4.5), (5, 4.0), (6, float("nan"))):
        save(tmp_path, step, accept_length=length)
    best = store.best(tmp_path)
    assert best is not None
    assert (best.step, best.accept_length) == (4, 4.5)
    os.truncate(best.folder / "drafter.safetensors", 3)
    best = store.best(tmp_path)
    assert best is not None
    assert best.step == 2


@pytest.mark.parametrize(
    ("keep_last", "keep_best", "kept"),
    [(2, 1, [2, 5, 6]), (1, 0, [6]), (3, 2, [2, 4, 5, 6]), (1, 9, [1, 2, 4, 5, 6]), (9, 0, [1, 2, 3, 4, 5, 6])],
)
def test_pruning_keeps_the_newest_and_the_best(tmp_path, keep_last, keep_best, kept):
    for step, length in ((1, 3.0), (2, 9.0), (3, None), (4, 6.0), (5, 4.0), (6, 4.5)):
        save(tmp_path, step, accept_length=length)
    removed = store.prune(tmp_path, keep_last, keep_best)
    assert [entry.step for entry in store.checkpoints(tmp_path)] == kept
    assert len(removed) == 6 - len(kept)
    assert names_in(tmp_path) == [f"step-{step}" for step in kept]


def test_pruning_neither_counts_nor_deletes_the_damaged(tmp_path):
    for step in (1, 2, 3):
        save(tmp_path, step)
    os.truncate(tmp_path / "checkpoints" / "step-3" / "drafter.safetensors", 3)
    store.prune(tmp_path, keep_last=1, keep_best=0)
    assert names_in(tmp_path) == ["step-2", "step-3"]


def test_what_a_killed_writer_left_is_removed(tmp_path):
    save(tmp_path, 1)
    root = tmp_path / "checkpoints"
    (root / ".writing-step-2-abcd").mkdir()
    (root / ".writing-step-2-abcd" / "drafter.safetensors").write_bytes(b"half")
    (root / ".removed-step-0").mkdir()
    save(tmp_path, 3)
    assert names_in(tmp_path) == ["step-1", "step-3"]


def test_a_step_written_again_replaces_the_older_one(tmp_path):
    save(tmp_path, 2, sequence=1)
    save(tmp_path, 2, sequence=2)
    assert names_in(tmp_path) == ["step-2"]
    assert store.load(tmp_path / "checkpoints" / "step-2").state["sequence"] == 2


def test_killed_while_replacing_the_older_one_comes_back(tmp_path):
    save(tmp_path, 2, sequence=1)
    root = tmp_path / "checkpoints"
    (root / "step-2").rename(root / ".replaced-step-2")  # the moment between the two renames
    assert [(entry.step, entry.problem) for entry in store.checkpoints(tmp_path)] == [(2, None)]
    store.remove_leftovers(tmp_path)
    assert names_in(tmp_path) == ["step-2"]
    assert store.load(root / "step-2").state["sequence"] == 1
    shutil.copytree(root / "step-2", root / ".replaced-step-2")  # killed after both
    assert [entry.folder.name for entry in store.checkpoints(tmp_path)] == ["step-2"]
    save(tmp_path, 3)
    assert names_in(tmp_path) == ["step-2", "step-3"]
