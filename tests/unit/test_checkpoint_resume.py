"""Which checkpoint a run goes on from, and which changes make it another run."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from draftmill.checkpoint import check_same_run, finished_message, pick, store
from draftmill.checkpoint.resume import MAY_CHANGE, SHAPE_SETTINGS, TARGET_SETTINGS
from draftmill.config import Config, build_config
from draftmill.drafter.shape import DrafterShape
from draftmill.errors import InputError

torch.set_num_threads(1)

SHAPE = DrafterShape(
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    rms_norm_eps=1e-6,
    vocab_size=97,
    block_size=8,
    mask_token_id=96,
    target_layer_ids=(1, 3, 5),
    num_target_layers=8,
    rope={"rope_type": "default", "rope_theta": 10000.0},
    max_position_embeddings=512,
    eos_token_id=(3, 4),
)


def config_with(**sections) -> Config:
    raw = {"target": {"model": "org/target"}, "data": {"path": "data"}, "drafter": {"num_taps": 3, "block_size": 8}}
    return build_config({key: {**raw.get(key, {}), **sections.get(key, {})} for key in {*raw, *sections}})


def saved_with(**changes) -> dict:
    return {
        "config": config_with().model_dump(mode="json"),
        "shape": SHAPE.to_dict(),
        "data_fingerprint": "aaaa",
        "batches_per_step": 6,
        **changes,
    }


def compare(saved: dict, config: Config, shape: DrafterShape = SHAPE, **changes) -> list[str]:
    options = {"data_fingerprint": "aaaa", "batches_per_step": 6, **changes}
    return check_same_run(saved, config, shape, **options)


def test_an_unchanged_run_changes_nothing():
    assert compare(saved_with(), config_with()) == []


def test_what_makes_no_number_of_the_run_may_change_and_is_said():
    changed = config_with(
        run={"dir": "runs/b"},
        target={"devices": ["cuda:0", "cuda:1"], "step": "eager"},
        data={"path": "elsewhere"},
        drafter={"devices": ["cuda:2"], "step": "graphed"},
        train={"log_every_s": 1, "accumulate": 2},
        checkpoint={"every_steps": 10, "keep_last": 5},
        pipeline={"costs": "costs.json"},
        monitor={"project": "x"},
    )
    lines = compare(saved_with(), changed)
    assert "data.path was data, is elsewhere" in lines
    assert "target.devices was auto, is ['cuda:0', 'cuda:1']" in lines
    assert "checkpoint.every_steps was 1000, is 10" in lines
    assert "pipeline.costs was None, is costs.json" in lines
    assert len(lines) == 12


@pytest.mark.parametrize(
    ("section", "change", "said"),
    [
        ("run", {"seed": 1}, "run.seed was 0, is 1"),
        ("target", {"model": "org/other"}, "target.model was org/target, is org/other"),
        ("target", {"revision": "abc"}, "target.revision was None, is abc"),
        ("target", {"dtype": "float32"}, "target.dtype was bfloat16, is float32"),
        ("data", {"max_length": 64}, "data.max_length was 8192, is 64"),
        ("data", {"token_budget": 64}, "data.token_budget was 32768, is 64"),
        ("data", {"heldout": 3}, "data.heldout was 64, is 3"),
        ("train", {"lr": 1e-3}, "train.lr was 0.0006, is 0.001"),
        ("train", {"epochs": 7}, "train.epochs was 6, is 7"),
        ("train", {"max_steps": 7}, "train.max_steps was None, is 7"),
        ("train", {"num_anchors": 7}, "train.num_anchors was 2048, is 7"),
        ("train", {"betas": [0.9, 0.999]}, "train.betas was [0.9, 0.95], is [0.9, 0.999]"),
        ("drafter", {"from_checkpoint": "x/y"}, "drafter.from_checkpoint was None, is x/y"),
        ("drafter", {"dtype": "float32"}, "drafter.dtype was auto, is float32"),
    ],
)
def test_what_makes_another_run_is_refused_by_name(section, change, said):
    with pytest.raises(InputError, match="this is not the run of the checkpoint") as caught:
        compare(saved_with(), config_with(**{section: change}))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"block_size": 16}, "the drafter's block_size was 8, is 16"),
        ({"target_layer_ids": (1, 3, 6)}, "the drafter's target_layer_ids was [1, 3, 5], is [1, 3, 6]"),
        ({"mask_token_id": 5}, "the drafter's mask_token_id was 96, is 5"),
        ({"num_layers": 3}, "the drafter's num_layers was 2, is 3"),
        ({"rope": {"rope_type": "default", "rope_theta": 1e6}}, "the drafter's rope was"),
    ],
)
def test_another_shape_is_refused_by_name(change, said):
    with pytest.raises(InputError) as caught:
        compare(saved_with(), config_with(), replace(SHAPE, **change))
    assert said in str(caught.value)


def test_every_refused_change_is_named_at_once():
    with pytest.raises(InputError) as caught:
        compare(saved_with(), config_with(run={"seed": 5}, train={"lr": 1e-3}), data_fingerprint="bbbb")
    for said in ("run.seed", "train.lr", "the data's fingerprint was aaaa, is bbbb"):
        assert said in str(caught.value)


def test_taps_by_number_and_by_name_are_the_same_run():
    assert compare(saved_with(), config_with(drafter={"num_taps": 5, "target_layer_ids": [1, 3, 5]})) == []


def test_drafters_and_accumulation_may_change_together_only():
    assert compare(saved_with(), config_with(train={"accumulate": 3})) == ["train.accumulate was 1, is 3"]
    with pytest.raises(InputError, match=r"drafters x train\.accumulate was 6, is 4"):
        compare(saved_with(), config_with(), batches_per_step=4)


def test_a_target_that_moved_is_the_same_where_its_weights_are_known():
    moved = config_with(target={"model": "/models/target", "revision": "abc"})
    lines = compare(saved_with(target_identity="w1"), moved, target_identity="w1")
    assert lines == ["target.model was org/target, is /models/target", "target.revision was None, is abc"]
    with pytest.raises(InputError, match=r"target\.model was.*target's weights were w1, are w2"):
        compare(saved_with(target_identity="w1"), moved, target_identity="w2")
    with pytest.raises(InputError, match="the target's weights were w1, are w2"):
        compare(saved_with(target_identity="w1"), config_with(), target_identity="w2")
    assert compare(saved_with(), config_with(), target_identity="w1") == []


def test_a_setting_that_is_newer_than_the_checkpoint_counts_as_its_default():
    older = saved_with()
    del older["config"]["data"]["round_to"]
    assert compare(older, config_with()) == []
    with pytest.raises(InputError, match=r"data\.round_to was 64, is 128"):
        compare(older, config_with(data={"round_to": 128}))


def test_every_listed_setting_exists():
    known = {f"{section}.{name}" for section, named in config_with().model_dump().items() for name in named}
    assert known >= MAY_CHANGE | SHAPE_SETTINGS | TARGET_SETTINGS


def save(run: Path, step: int, **state) -> Path:
    return store.save(run, step, {"norm.weight": torch.full((4,), float(step))}, {}, state)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_the_newest_is_picked(tmp_path):
    for step in (9, 10):
        save(tmp_path, step)
    assert pick(tmp_path).step == 10


def test_picking_changes_nothing_of_a_run_that_another_process_may_be_writing(tmp_path):
    save(tmp_path, 1)
    (tmp_path / "checkpoints" / ".writing-step-2-abcd").mkdir()
    (tmp_path / "checkpoints" / "step-1").rename(tmp_path / "checkpoints" / ".replaced-step-1")
    assert pick(tmp_path).step == 1
    assert sorted(os.listdir(tmp_path / "checkpoints")) == [".replaced-step-1", ".writing-step-2-abcd"]


def test_a_damaged_newest_is_said_with_the_whole_one_before_it(tmp_path):
    for step in (10, 20, 30):
        save(tmp_path, step)
    flip(tmp_path / "checkpoints" / "step-30" / "drafter.safetensors")
    os.truncate(tmp_path / "checkpoints" / "step-20" / "state.json", 3)
    with pytest.raises(InputError) as caught:
        pick(tmp_path)
    assert "step-30/drafter.safetensors is damaged" in str(caught.value)
    assert "step-10 before it is whole" in str(caught.value)
    assert len(store.checkpoints(tmp_path)) == 3


def test_a_damaged_newest_is_passed_over_only_when_asked_and_logged(tmp_path):
    for step in (10, 20, 30):
        save(tmp_path, step)
    flip(tmp_path / "checkpoints" / "step-30" / "optimizer.safetensors")
    lines: list[str] = []
    assert pick(tmp_path, skip_damaged=True, log=lines.append).step == 20
    assert len(lines) == 1
    assert "step-30 is passed over" in lines[0]
    assert "optimizer.safetensors is damaged" in lines[0]


def test_no_whole_one_is_said(tmp_path):
    with pytest.raises(InputError, match="has no checkpoint to resume from"):
        pick(tmp_path)
    flip(save(tmp_path, 1) / "state.json")
    for skip_damaged in (False, True):
        with pytest.raises(InputError, match=r"state\.json is damaged.*no other checkpoint of .* is whole"):
            pick(tmp_path, skip_damaged=skip_damaged, log=lambda line: None)


def test_a_finished_run_says_so(tmp_path):
    assert finished_message(store.load(save(tmp_path, 7))) is None
    message = finished_message(store.load(save(tmp_path, 8, finished=True)))
    assert message is not None
    assert message.startswith("the run is finished at step 8")
