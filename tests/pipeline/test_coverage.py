"""How many anchors each document gets, as a run logs it (case B6): shared by document, and none starved in silence."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draftmill.pipeline.collective import Hosts
from draftmill.train.run import train
from draftmill.train.setup import Setup, set_up
from tiny import config_of, small_world

LINE = re.compile(
    r"end of epoch (\d+): ([\d,]+) anchors so far, ([\d.]+)% of the positions that ([\d,]+) documents offered"
    r"(?:; ([\d,]+) documents got no anchor)?$",
    re.MULTILINE,
)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    sections = small_world(tmp_path_factory.mktemp("world"))
    sections["data"] |= {"heldout": 0, "token_budget": 256, "min_rows": 6, "max_rows": 8}
    return sections


def candidates_by_batch(setup: Setup) -> list[list[int]]:
    """Of each document of each batch of the first epoch, the positions that could be anchors."""
    found = []
    for index in range(setup.plan.num_batches(0)):
        masks = [mask for _, mask in setup.store.read(setup.plan.sample_ids(0, index))]
        found.append([int(np.count_nonzero(mask[:-1] & mask[1:])) for mask in masks])
    return found


@pytest.mark.parametrize("num_anchors", [3, 16, 400])
def test_what_the_anchors_cover_is_logged_and_who_got_none(
    world: dict[str, Any], tmp_path: Path, num_anchors: int
) -> None:
    config = config_of(world, f"run.dir={tmp_path}", f"train.num_anchors={num_anchors}", "train.epochs=1")
    batches = candidates_by_batch(set_up(config, Hosts()))
    assert max(len(batch) for batch in batches) > 3
    train(config, console=False)
    ((epoch, anchors, share, documents, starved),) = LINE.findall((tmp_path / "run.log").read_text())
    drawn = sum(min(num_anchors, sum(batch)) for batch in batches)
    offered = sum(map(sum, batches))
    assert (epoch, anchors, documents) == ("1", f"{drawn:,}", str(sum(map(len, batches))))
    assert share == f"{100 * drawn / offered:.1f}"
    without = sum(max(0, len(batch) - num_anchors) for batch in batches)
    assert starved == (str(without) if without else "")
    assert (without > 0) == (num_anchors == 3)


@pytest.mark.parametrize("max_steps", [2, None])
def test_what_ended_is_told(world: dict[str, Any], tmp_path: Path, max_steps: int | None) -> None:
    """An epoch that `train.max_steps` breaks off has not ended; people count epochs from 1."""
    limit = "null" if max_steps is None else max_steps
    config = config_of(world, f"run.dir={tmp_path}", "train.epochs=2", f"train.max_steps={limit}")
    assert set_up(config, Hosts()).plan.num_batches(0) > 2
    train(config, console=False)
    log = (tmp_path / "run.log").read_text()
    ends = re.findall(r"(end .*?): [\d,]+ anchors so far", log)
    assert ends == (
        ["end of epoch 1", "end of epoch 2"] if max_steps is None else ["end by train.max_steps 2, in epoch 1"]
    )
    assert re.findall(r"  (epoch \d+ / \d+)  loss", log)[0] == "epoch 1 / 2"


def test_there_are_no_more_slots_than_tokens(world: dict[str, Any], tmp_path: Path) -> None:
    """However many anchors are asked for: it may stand for all that there are, and must not take all memory."""
    config = config_of(world, f"run.dir={tmp_path}", "train.num_anchors=1000000000", "train.max_steps=2")
    setup = set_up(config, Hosts())
    assert setup.step_shape.anchor_slots == setup.step_shape.context_slots <= 64 * 8
    train(config, console=False)
    assert "100.0% of the positions" in (tmp_path / "run.log").read_text()
