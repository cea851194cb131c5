"""Runs over packed rows: the same features as in padded ones, a drafter that learns, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from draftmill.checkpoint import latest, load
from draftmill.config import Config
from draftmill.data.loader import Loader
from draftmill.errors import InputError
from draftmill.pipeline.collective import Hosts
from draftmill.records import BatchKind, HostBatch, WorkItem
from draftmill.target.features import TapsReplica
from draftmill.target.load import load_target
from draftmill.train.run import train
from draftmill.train.setup import set_up
from packed_rows import real_tokens
from tiny import config_of, metrics_of, small_world

torch.set_num_threads(1)

PACKED = "data.batching=packed"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return small_world(tmp_path_factory.mktemp("world"), kind="qwen3", tied=False)


def batches(config: Config) -> list[HostBatch]:
    """All batches of the first epoch, as a run of this configuration reads them."""
    setup = set_up(config, Hosts())
    count = setup.plan.num_batches(0)
    loader = Loader(
        setup.store,
        setup.plan,
        setup.heldout_plan,
        [WorkItem(index, BatchKind.TRAIN, 0, index) for index in range(count)],
        context_slots=setup.step_shape.context_slots,
        anchor_slots=setup.step_shape.anchor_slots,
        block_size=setup.shape.block_size,
        anchor_draws=1,
        seed=0,
        pin=False,
        read_ahead=2,
        buffers=count,
    )
    with loader:
        read = [loader.next() for _ in range(count)]
    assert all(batch is not None for batch in read)
    return [batch for batch in read if batch is not None]


def features_by_sample(config: Config) -> dict[int, torch.Tensor]:
    """Every training sample's features, [tokens, L*H]."""
    layer_ids = set_up(config, Hosts()).shape.target_layer_ids
    target = load_target(config.target.model, dtype="float32", last_layer=layer_ids[-1], with_tokenizer=False)
    replica = TapsReplica(target, layer_ids, packed=config.data.batching == "packed")
    found: dict[int, torch.Tensor] = {}
    for batch in batches(config):
        features = real_tokens(replica.forward(batch), batch)
        positions = batch.blocks[0].positions_T[: batch.num_tokens]
        firsts = [*(positions == 0).nonzero()[:, 0].tolist(), batch.num_tokens]
        for index, sample in enumerate(batch.sample_ids_B.tolist()):
            found[sample] = features[firsts[index] : firsts[index + 1]]
    return found


def test_packed_samples_have_the_features_of_padded_ones(world: dict[str, Any]) -> None:
    """From the store through plan and loader: whatever shares a row, each sample's features are its own."""
    padded, packed = features_by_sample(config_of(world)), features_by_sample(config_of(world, PACKED))
    assert padded.keys() == packed.keys()
    assert len(padded) == 34
    for sample, expected in padded.items():
        assert expected.std() > 0.05
        torch.testing.assert_close(packed[sample], expected, rtol=1e-4, atol=1e-5)


def test_packed_rows_waste_less_and_hold_every_sample_once(world: dict[str, Any]) -> None:
    packed = batches(config_of(world, PACKED))
    samples = [sample for batch in packed for sample in batch.sample_ids_B.tolist()]
    assert sorted(samples) == sorted(set(samples))
    assert {tuple(batch.tokens_BS.shape) for batch in packed} == {(2, 64)}
    assert max(len(batch.sample_ids_B) for batch in packed) > 2
    for batch in packed:
        assert batch.documents_BS is not None
        assert int((batch.documents_BS >= 0).sum()) == batch.num_tokens


def run(world: dict[str, Any], folder: Path, *more: str) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
    train(config_of(world, f"run.dir={folder}", *more), console=False)
    entry = latest(folder)
    assert entry is not None
    return metrics_of(folder), load(entry.folder).tensors()


def test_a_run_over_packed_rows_learns_as_one_over_padded_rows_does(world: dict[str, Any], tmp_path: Path) -> None:
    """The same samples in other batches: the same tokens an epoch, about the same loss at the end."""
    means = {}
    for batching in ("bucketed", "packed"):
        lines, _ = run(world, tmp_path / batching, f"data.batching={batching}", "train.epochs=12")
        losses = [line["loss"] for line in lines if "loss" in line]
        assert sum(losses[-6:]) < 0.9 * sum(losses[:6])
        means[batching] = sum(losses[-6:]) / 6
        by_epoch: dict[int, int] = {}
        for line in lines:
            if "loss" in line:
                by_epoch[line["epoch"]] = by_epoch.get(line["epoch"], 0) + line["context_tokens"]
        means[f"{batching} tokens"] = set(by_epoch.values())
        assert any("accept_length" in line for line in lines)
    assert means["packed"] == pytest.approx(means["bucketed"], rel=0.1)
    assert means["packed tokens"] == means["bucketed tokens"]


def test_the_number_of_targets_changes_no_bit_of_a_packed_run(world: dict[str, Any], tmp_path: Path) -> None:
    options = (PACKED, "train.epochs=3")
    one, two = (
        run(world, tmp_path / str(count), *options, f"target.devices=[{', '.join(['cpu'] * count)}]")
        for count in (1, 2)
    )
    assert [line["loss"] for line in one[0] if "loss" in line] == [line["loss"] for line in two[0] if "loss" in line]
    assert all(torch.equal(two[1][name], expected) for name, expected in one[1].items())


def test_a_group_of_devices_trains_as_one_device_does(world: dict[str, Any], tmp_path: Path) -> None:
    alone = run(world, tmp_path / "alone", "train.epochs=1")
    group = run(world, tmp_path / "group", "train.epochs=1", "target.devices=[[cpu, cpu]]")
    assert all(torch.equal(group[1][name], expected) for name, expected in alone[1].items())
    assert "Target 0 on cpu + cpu..." in (tmp_path / "group" / "run.log").read_text()


def test_what_does_not_go_with_packed_rows_is_refused(world: dict[str, Any], tmp_path: Path) -> None:
    for options, said in (
        (("target.step=graphed",), r"target\.step=graphed needs data\.batching=packed"),
        (("target.step=graphed", PACKED), r"target\.step=graphed needs a CUDA device"),
        (("target.step=compiled", PACKED), "compiled reads packed rows on CUDA only"),
        (("target.step=compiled", "target.devices=[[cpu, cpu]]"), "needs the target on one device, not several"),
    ):
        with pytest.raises(InputError, match=said):
            train(config_of(world, f"run.dir={tmp_path / 'run'}", *options), console=False)
        assert not (tmp_path / "run").exists()
