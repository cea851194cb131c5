"""However batches are shared among drafters, the training is the same: cases B23, B24, B25 and B26."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from draftmill.checkpoint import latest, load
from draftmill.data import loader as loading
from draftmill.data.anchors import draw_anchors
from draftmill.monitor.metrics import read_metrics
from draftmill.records import BatchKind
from draftmill.train import assemble
from draftmill.train import replica as replicas
from draftmill.train.run import train
from tiny import config_of, small_world


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    sections = small_world(tmp_path_factory.mktemp("world"))
    sections["data"]["heldout"] = 0
    return sections


def run(world: dict[str, Any], folder: Path, drafters: int, accumulate: int, *more: str) -> tuple[list[float], Any]:
    """Losses and last weights."""
    config = config_of(
        world,
        f"run.dir={folder}",
        f"drafter.devices=[{', '.join(['cpu'] * drafters)}]",
        f"train.accumulate={accumulate}",
        *more,
    )
    train(config, console=False)
    entry = latest(folder)
    assert entry is not None
    return [record["loss"] for record in read_metrics(folder).steps], load(entry.folder).tensors()


def assert_same_training(ours: tuple[list[float], Any], expected: tuple[list[float], Any]) -> None:
    """Up to float32 sums in another order, after AdamW has divided by small second moments."""
    assert len(ours[0]) == len(expected[0])
    assert ours[0] == pytest.approx(expected[0], rel=2e-5)
    for name, tensor in expected[1].items():
        torch.testing.assert_close(ours[1][name], tensor, rtol=1e-3, atol=2e-4, msg=lambda text, name=name: name + text)


def anchors_by_batch(monkeypatch: pytest.MonkeyPatch, most: dict[int, int]) -> None:
    """Let batch n of an epoch have at most most[n mod len] supervised documents' worth of anchors: 0 has none."""

    def limited(mask_T: np.ndarray, lengths_D: np.ndarray, *, index: int, **more: Any) -> Any:
        limit = most[index % len(most)]
        kept = np.flatnonzero(mask_T[:-1] & mask_T[1:])[:limit]
        sparse = np.zeros_like(mask_T)
        sparse[kept] = True
        sparse[kept + 1] = True
        return draw_anchors(sparse, lengths_D, index=index, **more)

    monkeypatch.setattr(loading, "draw_anchors", limited)


def test_a_drafter_whose_batches_have_no_anchor_goes_along_with_the_others(
    world: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B23: every second batch, all of the second drafter's in the first epochs, has nothing to learn from."""
    updates: dict[str, list[int]] = {}
    update = replicas.Replica.update

    def counted(self: replicas.Replica, step: int) -> None:
        updates.setdefault(threading.current_thread().name, []).append(step)
        update(self, step)

    anchors_by_batch(monkeypatch, {0: 8, 1: 0})
    expected = run(world, tmp_path / "one", 1, 2)
    monkeypatch.setattr(replicas.Replica, "update", counted)
    assert_same_training(run(world, tmp_path / "two", 2, 1), expected)
    assert updates["drafter-0"] == updates["drafter-1"] == list(range(len(expected[0])))


def test_a_step_without_any_anchor_counts_and_changes_no_number_of_the_next(
    world: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    anchors_by_batch(monkeypatch, dict.fromkeys(range(4), 0) | {4: 5, 5: 5})
    expected = run(world, tmp_path / "one", 1, 2)
    assert expected[0][:2] == [0.0, 0.0]
    assert 0.0 not in expected[0][2:3]
    assert_same_training(run(world, tmp_path / "two", 2, 1), expected)


@pytest.mark.parametrize(("drafters", "accumulate"), [(3, 1), (4, 3)])
def test_uneven_ends_leave_all_drafters_equally_many_steps(
    world: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drafters: int, accumulate: int
) -> None:
    """B24: the last step's batches do not fill its group; the empty ones have no loss and no denominator."""
    loaded: dict[str, list[BatchKind]] = {}
    load_batch = replicas.Replica.load

    def recorded(self: replicas.Replica, slot: Any, draw: int) -> None:
        loaded.setdefault(threading.current_thread().name, []).append(slot.batch.kind)
        load_batch(self, slot, draw)

    expected = run(world, tmp_path / "one", 1, drafters * accumulate)
    monkeypatch.setattr(replicas.Replica, "load", recorded)
    assert_same_training(run(world, tmp_path / "many", drafters, accumulate), expected)
    kinds = [kind for share in loaded.values() for kind in share]
    assert 0 < kinds.count(BatchKind.EMPTY) < drafters * accumulate, "the end is uneven"
    assert [len(share) for share in loaded.values()] == [len(expected[0]) * accumulate] * drafters
    tokens = [
        sum(record["context_tokens"] for record in read_metrics(tmp_path / name).steps) for name in ("many", "one")
    ]
    assert tokens[0] == tokens[1], "every sample once an epoch, none twice to fill up"


@pytest.mark.parametrize("most", [{0: 1, 1: 40}, {0: 1, 1: 1, 2: 40, 3: 40}])
def test_gradients_do_not_depend_on_how_very_different_batches_are_shared(
    world: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: dict[int, int]
) -> None:
    """B25: one drafter's batches have one anchor where the other's have all of their slots full.

    Means of each drafter, averaged, would weigh the one anchor as much as the sixteen.
    """
    gradients: dict[int, list[torch.Tensor]] = {1: [], 2: []}
    update = replicas.Replica.update

    def recorded(self: replicas.Replica, step: int) -> None:
        if threading.current_thread().name == "drafter-0":
            gradients[drafters].append((self.state.flat.gradient / self.state.totals[1]).clone())
        update(self, step)

    anchors_by_batch(monkeypatch, most)
    monkeypatch.setattr(replicas.Replica, "update", recorded)
    results = {}
    for drafters in (1, 2):
        results[drafters] = run(world, tmp_path / str(drafters), drafters, 4 // drafters)
    assert_same_training(results[2], results[1])
    first, second = gradients[1][0], gradients[2][0]
    assert float((first - second).norm() / first.norm()) < 1e-5
    scored = [record["supervised_tokens"] for record in read_metrics(tmp_path / "1").steps]
    assert scored == [record["supervised_tokens"] for record in read_metrics(tmp_path / "2").steps]


def test_what_takes_long_is_done_before_any_drafter_enters_the_group(
    world: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B26: one drafter is built slowly; the others wait outside the group, each collective's time limit untouched."""
    events: list[str] = []
    build, group = assemble.build_replica, dist.ProcessGroupGloo

    def slow(*arguments: Any) -> Any:
        name = threading.current_thread().name
        if name == "drafter-1":
            time.sleep(0.5)
        replica = build(*arguments)
        events.append(f"{name} built")
        return replica

    def entered(*arguments: Any) -> Any:
        events.append(f"{threading.current_thread().name} enters")
        return group(*arguments)

    monkeypatch.setattr(assemble, "build_replica", slow)
    monkeypatch.setattr(dist, "ProcessGroupGloo", entered)
    run(world, tmp_path / "run", 3, 1, "train.max_steps=1")
    assert sorted(events[:3]) == [f"drafter-{number} built" for number in range(3)]
    assert sorted(events[3:]) == [f"drafter-{number} enters" for number in range(3)]
    assert events[2] == "drafter-1 built"
