"""Saving beside the training: what is copied, who waits, where errors come out, when a save is due."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from draftmill.checkpoint import BackgroundSaver, SaveSchedule, store
from draftmill.errors import InputError

torch.set_num_threads(1)


class Gate:
    """Stands in for the writing: holds it until opened, and notes what was given to it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open = threading.Event()
        self.entered = threading.Semaphore(0)
        self.steps: list[int] = []
        self.failure: Exception | None = None
        self._save = store.save
        monkeypatch.setattr(store, "save", self)

    def __call__(self, run_dir: Path, step: int, *rest) -> Path:
        self.steps.append(step)
        self.entered.release()
        assert self.open.wait(20)
        if self.failure is not None:
            raise self.failure
        return self._save(run_dir, step, *rest)


@pytest.fixture
def gate(monkeypatch):
    return Gate(monkeypatch)


def weights(value: float) -> dict[str, torch.Tensor]:
    return {"norm.weight": torch.full((4,), value), "fc.weight": torch.full((4, 8), value)}


def saver_for(run: Path, **options) -> BackgroundSaver:
    return BackgroundSaver(run, **{"keep_last": 9, "keep_best": 0, **options})


def test_the_values_of_the_call_are_written_though_they_change_at_once(tmp_path, gate):
    named, moments, average = weights(1.0), {"exp_avg": weights(2.0)}, weights(3.0)
    state = {"accept_length": 1.0, "nested": [1]}
    with saver_for(tmp_path) as saver:
        saver.save(10, named, moments, state, average)
        assert gate.entered.acquire(timeout=20)
        for tensor in (*named.values(), *moments["exp_avg"].values(), *average.values()):
            tensor.fill_(-1.0)
        state["nested"].append(2)
        gate.open.set()
    checkpoint = store.load(tmp_path / "checkpoints" / "step-10")
    assert torch.equal(checkpoint.tensors()["fc.weight"], torch.full((4, 8), 1.0))
    assert torch.equal(checkpoint.optimizer()["exp_avg"]["norm.weight"], torch.full((4,), 2.0))
    assert list(checkpoint.optimizer()) == ["exp_avg"]
    assert torch.equal(checkpoint.average()["fc.weight"], torch.full((4, 8), 3.0))
    assert checkpoint.state["nested"] == [1]


def test_the_caller_does_not_wait_for_the_disk(tmp_path, gate):
    saver = saver_for(tmp_path)
    saver.save(1, weights(1.0), {}, {})  # returns while the writer is held
    assert gate.entered.acquire(timeout=20)
    assert store.checkpoints(tmp_path) == []
    gate.open.set()
    saver.close()
    assert [entry.step for entry in store.checkpoints(tmp_path)] == [1]


def test_a_second_save_waits_for_the_first_and_none_is_lost(tmp_path, gate):
    saver = saver_for(tmp_path)
    saver.save(1, weights(1.0), {}, {})
    assert gate.entered.acquire(timeout=20)
    returned = threading.Event()

    def second():
        saver.save(2, weights(2.0), {}, {})
        returned.set()

    thread = threading.Thread(target=second)
    thread.start()
    assert not returned.wait(0.1)
    assert gate.steps == [1]
    gate.open.set()
    thread.join(20)
    saver.close()
    for step in (1, 2):
        loaded = store.load(tmp_path / "checkpoints" / f"step-{step}").tensors()
        assert torch.equal(loaded["norm.weight"], torch.full((4,), float(step)))


def test_a_failure_comes_out_of_the_next_call_once(tmp_path, gate):
    gate.open.set()
    gate.failure = InputError("checkpoint step-1 was not written: No space left on device")
    saver = saver_for(tmp_path)
    saver.save(1, weights(1.0), {}, {})
    with pytest.raises(InputError, match="step-1 was not written: No space left"):
        saver.save(2, weights(2.0), {}, {})
    assert gate.steps == [1]
    gate.failure = None
    saver.save(3, weights(3.0), {}, {})
    saver.wait()
    assert [entry.step for entry in store.checkpoints(tmp_path)] == [3]
    saver.close()


def test_a_failure_of_the_last_save_comes_out_of_close(tmp_path, gate):
    gate.open.set()
    gate.failure = InputError("full")
    saver = saver_for(tmp_path)
    saver.save(1, weights(1.0), {}, {})
    with pytest.raises(InputError, match="full"):
        saver.close()
    saver.close()


def test_closing_waits_for_the_disk_and_twice_is_harmless(tmp_path):
    saver = saver_for(tmp_path)
    saver.save(1, weights(1.0), {"exp_avg": weights(0.0)}, {})
    saver.close()
    assert store.load(tmp_path / "checkpoints" / "step-1").step == 1
    saver.close()
    with pytest.raises(RuntimeError, match="the saver is closed"):
        saver.save(2, weights(1.0), {}, {})
    assert not [thread for thread in threading.enumerate() if thread.name == "checkpoint-writer"]


def test_old_ones_are_pruned_and_each_save_is_told(tmp_path):
    told = []
    with saver_for(tmp_path, keep_last=1, keep_best=1, on_saved=told.append) as saver:
        for step, length in ((1, 2.0), (2, 5.0), (3, 3.0), (4, None)):
            saver.save(step, weights(step), {}, {"accept_length": length})
    assert [entry.step for entry in store.checkpoints(tmp_path)] == [2, 4]
    assert [saved.step for saved in told] == [1, 2, 3, 4]
    assert [[folder.name for folder in saved.removed] for saved in told] == [[], ["step-1"], [], ["step-3"]]
    assert told[1].folder == tmp_path / "checkpoints" / "step-2"


def test_a_state_that_json_cannot_hold_fails_in_the_call(tmp_path):
    with saver_for(tmp_path) as saver, pytest.raises(TypeError):
        saver.save(1, weights(1.0), {}, {"rng": torch.zeros(1)})
    assert store.checkpoints(tmp_path) == []


def test_other_tensors_than_prepared_are_a_broken_protocol(tmp_path):
    with saver_for(tmp_path) as saver:
        saver.prepare(weights(0.0), {"exp_avg": weights(0.0)})
        with pytest.raises(RuntimeError, match="other names"):
            saver.save(1, weights(1.0), {}, {})
        wrong = {**weights(1.0), "norm.weight": torch.zeros(5)}
        with pytest.raises(RuntimeError, match=r"norm\.weight: the buffer holds torch\.float32 \(4,\)"):
            saver.save(1, wrong, {"exp_avg": weights(0.0)}, {})
        saver.save(2, weights(2.0), {"exp_avg": weights(0.5)}, {})
    assert [entry.step for entry in store.checkpoints(tmp_path)] == [2]


def test_parts_of_one_flat_buffer_are_copied_each(tmp_path):
    flat = torch.arange(12.0)
    with saver_for(tmp_path) as saver:
        saver.save(1, {"a": flat[:4].view(2, 2), "b": flat[4:]}, {}, {})
    loaded = store.load(tmp_path / "checkpoints" / "step-1").tensors()
    assert torch.equal(loaded["a"], torch.tensor([[0.0, 1.0], [2.0, 3.0]]))
    assert torch.equal(loaded["b"], torch.arange(4.0, 12.0))


def test_a_save_is_due_every_n_steps_and_every_m_minutes():
    now_s = 100.0
    schedule = SaveSchedule(every_steps=5, every_minutes=2.0, clock_s=lambda: now_s)
    assert [step for step in range(1, 12) if schedule.due(step)] == [5, 10]
    now_s = 219.9
    assert not schedule.due(11)
    now_s = 220.0
    assert schedule.due(11)
    schedule.saved()
    assert not schedule.due(12)
    now_s = 340.0
    assert schedule.due(12)
