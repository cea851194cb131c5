"""`draftmill plan` as a user types it: measured on a CPU, from a file of costs, and with bad input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from draftmill.cli import main
from draftmill.data.plan import BatchPlan
from draftmill.errors import InputError
from draftmill.train.planning_batches import BatchSizes, batch_sizes
from draftmill.train.planning_costs import Costs
from draftmill.train.planning_splits import pace_of, splits
from tiny import small_world

torch.set_num_threads(1)

GIB = 2**30


@pytest.fixture(scope="module")
def run_yaml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("world")
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(small_world(folder)))
    return path


def costs_of(**changes: Any) -> dict[str, Any]:
    """Made up: a target forward of 100 ms for 100 tokens, a drafter step of 50 ms and 10 ms for the update."""
    values = dict(
        device="made up",
        device_bytes=80 * GIB,
        group=1,
        buckets=[dict(bucket=bucket, num_padded=100, target_s=0.1, drafter_s=0.05) for bucket in range(2)],
        update_s=0.01,
        target_bytes=20 * GIB,
        drafter_bytes=50 * GIB,
    )
    return {**values, **changes}


def plan(*arguments: str) -> int:
    """Exit code of `draftmill plan` with these arguments."""
    with pytest.raises(SystemExit) as leaving:
        main(["plan", *arguments])
    code = leaving.value.code
    assert isinstance(code, int)
    return code


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert plan(*arguments, "--json") == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_measured_on_a_cpu_and_read_back(run_yaml: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    got = planned(capsys, str(run_yaml))
    costs = got["costs"]
    assert [each["bucket"] for each in costs["buckets"]] == [0, 1]
    assert all(each["target_s"] > 0 and each["drafter_s"] > 0 for each in costs["buckets"])
    assert costs["target_step"] == costs["drafter_step"] == "eager (auto: the choice on a CPU)"
    assert (costs["device_bytes"], costs["target_bytes"], got["num_devices"]) == (None, None, 1)
    (only,) = got["splits"]
    assert only["shared"]
    assert only["bottleneck"] == "both"
    assert only["target_busy"] + only["drafter_busy"] == pytest.approx(1.0)
    seconds = got["target_s_per_batch"] + got["drafter_s_per_batch"]
    assert only["ktokens_per_s"] == pytest.approx(got["tokens_per_batch"] / seconds / 1e3)
    assert only["epoch_hours"] == pytest.approx(got["batches_per_epoch"] * seconds / 3600)
    saved = tmp_path / "costs.json"
    saved.write_text(json.dumps(got))
    again = planned(capsys, str(run_yaml), "--costs", str(saved))
    assert again["costs"] == costs
    assert plan(str(run_yaml), "--costs", str(saved)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("data     ")
    assert not [line for line in lines if line.startswith("memory")]  # a CPU's is the machine's
    assert costs["measured_for"]["target.model"] == "target"
    assert plan(str(run_yaml), "--costs", str(saved), "train.num_anchors=7") == 2
    said = capsys.readouterr().err
    assert f"{saved} was measured with train.num_anchors=" in said
    assert "this run has 7; measure again" in said
    assert plan(str(run_yaml), "--costs", str(saved), "train.short_blocks=0.5") == 2
    assert "was measured with train.short_blocks=0.0, this run has 0.5" in capsys.readouterr().err
    del costs["measured_for"]["train.short_blocks"]  # as before there was such a setting
    saved.write_text(json.dumps(costs))
    assert plan(str(run_yaml), "--costs", str(saved), "train.short_blocks=0.5") == 2
    capsys.readouterr()
    assert plan(str(run_yaml), "--costs", str(saved)) == 0
    assert again["splits"] == got["splits"]


def test_the_table(run_yaml: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "costs.json"
    file.write_text(json.dumps(costs_of()))
    assert plan(str(run_yaml), "--costs", str(file), "--num-devices", "8") == 0
    printed = capsys.readouterr().out
    assert "made up; target / drafter by bucket 0: 100 / 50 ms (100 tokens), 1: 100 / 50 ms" in printed
    assert "memory   target 20.0 GiB, drafter 50.0 GiB at the largest batch, of 80.0 GiB a device" in printed
    rows = [line.split() for line in printed.splitlines() if line[1:4] == " + "]
    assert len(rows) == 7
    assert any(line.startswith("8 of both") and "10.0 GiB" in line for line in printed.splitlines())
    rates = [float(row[3]) for row in rows]
    assert rates == sorted(rates, reverse=True)
    assert "target.devices=" in printed
    best = next(line for line in printed.splitlines() if line.startswith("best "))
    drafters = len(json.loads(best.partition("drafter.devices=")[2]))
    assert f"a step is then {drafters} batches (drafters x train.accumulate)" in printed
    assert "all-reduce is not counted" in printed


def test_large_numbers_are_written_out(run_yaml: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "costs.json"
    file.write_text(json.dumps(costs_of(update_s=12345.0)))
    assert plan(str(run_yaml), "--costs", str(file)) == 0
    printed = capsys.readouterr().out
    assert "update 12,345,000 ms" in printed
    assert "e+0" not in printed


def test_packed_rows_are_planned_too(run_yaml: Path, capsys: pytest.CaptureFixture[str]) -> None:
    got = planned(capsys, str(run_yaml), "data.batching=packed")
    assert [each["num_padded"] for each in got["costs"]["buckets"]] == [128]


def test_a_target_spread_over_workers_of_a_cpu_takes_one_device(
    run_yaml: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    got = planned(capsys, str(run_yaml), "target.devices=[[cpu, cpu]]")
    assert (got["num_devices"], got["costs"]["group"]) == (1, 1)
    (only,) = got["splits"]
    assert (only["shared"], only["targets"], only["drafters"]) == (True, 1, 1)


def sizes_of(*padded: int) -> BatchSizes:
    """One bucket; a tenth of every batch is padding."""
    array = np.array(padded, dtype=np.int64)
    return BatchSizes(np.zeros_like(array), array, array * 9 // 10)


def test_every_split_of_eight_devices() -> None:
    """Targets of 300 ms and drafters of 60 + 10 ms for a batch, on eight devices."""
    costs = Costs.from_dict(costs_of(buckets=[dict(bucket=0, num_padded=100, target_s=0.3, drafter_s=0.06)]), "test")
    pace = pace_of(costs, sizes_of(50, 100, 150), accumulate=1, draws=1)
    assert pace.target_s == pytest.approx(0.3)  # in proportion to tokens, 100 on average
    assert pace.drafter_s == pytest.approx(0.07)
    assert pace.tokens == pytest.approx(90)
    found = splits(costs, pace, 8)
    assert len(found) == 8
    by_targets = {split.targets: split for split in found if not split.shared}
    for targets in range(1, 8):
        rate = min(targets / 0.3, (8 - targets) / 0.07)
        assert by_targets[targets].batches_per_s == pytest.approx(rate)
        assert by_targets[targets].ktokens_per_s == pytest.approx(0.09 * rate)
    assert by_targets[6].bottleneck == "targets"
    assert by_targets[7].bottleneck == "drafters"
    assert (by_targets[6].target_busy, by_targets[6].drafter_busy) == pytest.approx((1.0, 0.7))
    shared = next(split for split in found if split.shared)
    assert shared.batches_per_s == pytest.approx(8 / 0.37)
    assert found[0] is shared  # it fits: 20 + 50 GiB
    assert shared.free_bytes == 10 * GIB
    assert [split.batches_per_s for split in found] == sorted((s.batches_per_s for s in found), reverse=True)
    targets, drafters = by_targets[6].devices()
    assert targets == [f"cuda:{index}" for index in range(6)]
    assert drafters == ["cuda:6", "cuda:7"]


def test_what_does_not_fit_comes_last_and_is_not_the_best() -> None:
    costs = Costs.from_dict(costs_of(device_bytes=70 * GIB), "test")
    found = splits(costs, pace_of(costs, sizes_of(100), 1, 1), 4)
    assert found[-1].shared  # 20 + 50 GiB leave nothing free
    assert not found[-1].fits
    assert all(split.fits for split in found[:-1])
    tight = Costs.from_dict(costs_of(device_bytes=50 * GIB), "test")
    assert not any(split.fits for split in splits(tight, pace_of(tight, sizes_of(100), 1, 1), 4))


def test_groups_accumulation_draws_and_the_all_reduce() -> None:
    costs = Costs.from_dict(costs_of(group=2, all_reduce_s=0.02), "test")
    pace = pace_of(costs, sizes_of(100), accumulate=4, draws=3)
    assert pace.drafter_s == pytest.approx(3 * (0.05 + 0.01 / 4))
    assert pace.reduced_drafter_s == pytest.approx(3 * (0.05 + 0.03 / 4))
    found = splits(costs, pace, 6)
    assert sorted((split.targets, split.drafters) for split in found) == [(1, 4), (2, 2)]
    assert not any(split.shared for split in found)
    two = next(split for split in found if split.targets == 2)
    assert two.batches_per_s == pytest.approx(min(2 / 0.1, 2 / pace.reduced_drafter_s))
    assert two.devices()[0] == [["cuda:0", "cuda:1"], ["cuda:2", "cuda:3"]]
    assert two.devices()[1] == ["cuda:4", "cuda:5"]
    one_drafter = next(split for split in splits(costs, pace, 3) if split.drafters == 1)
    assert one_drafter.batches_per_s == pytest.approx(min(1 / 0.1, 1 / pace.drafter_s))
    with pytest.raises(InputError, match="2 devices are too few: a target takes 2, a drafter one"):
        splits(costs, pace, 2)


def test_sizes_are_those_of_the_plan() -> None:
    lengths = np.array([5, 9, 12, 30, 31, 32, 7, 8], dtype=np.int32)
    plan = BatchPlan(
        lengths,
        max_length=32,
        token_budget=64,
        min_rows=1,
        max_rows=8,
        num_buckets=2,
        bucket_edges=[16, 33],
        round_to=4,
        seed=0,
    )
    sizes = batch_sizes(plan, lengths)
    assert sizes.real.sum() == lengths.sum()
    for index in range(plan.num_batches(0)):
        own = lengths[plan.sample_ids(0, index)]
        assert sizes.real[index] == own.sum()
        assert sizes.padded[index] == len(own) * (-(-int(own.max()) // 4) * 4)
        assert sizes.bucket[index] == int(own.max() >= 16)
    assert sizes.buckets == [0, 1]
    assert sizes.padded[sizes.largest()] == sizes.padded.max()
    assert sizes.bucket[sizes.middle(1)] == 1


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line with which a command was refused."""
    assert plan(*arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("draftmill: error: ")
    assert printed.err.count("\n") == 1
    return printed.err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "no file of costs at"),
        ("", "is not JSON"),
        ("{", "is not JSON"),
        ("[1]", "holds no costs"),
        (json.dumps({"device": "x"}), "is unknown or missing"),
        (json.dumps(costs_of(speed=1)), "speed is unknown or missing"),
        (json.dumps(costs_of(buckets=[])), "no bucket was measured"),
        (json.dumps(costs_of(update_s=-1)), "times must be seconds, 0 or more"),
        (json.dumps(costs_of(update_s="soon")), "the costs can't be used"),
        (json.dumps(costs_of(group=0)), "group must be at least 1, got 0"),
        (json.dumps(costs_of(buckets=[{"bucket": 0}])), "the costs can't be used"),
        (json.dumps(costs_of(buckets=[dict(bucket=0, num_padded=9, target_s=0, drafter_s=1)])), "times above 0"),
        (json.dumps(costs_of(buckets=costs_of()["buckets"][:1])), "not measured: [1]"),
    ],
)
def test_wrong_costs(
    run_yaml: Path, tmp_path: Path, text: str | None, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "costs.json"
    if text is not None:
        path.write_text(text)
    message = refused(capsys, str(run_yaml), "--costs", str(path))
    assert said in message


def test_wrong_options(run_yaml: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no configuration file at" in refused(capsys, str(tmp_path / "none.yaml"))
    assert "--num-devices must be at least 1, got 0" in refused(capsys, str(run_yaml), "--num-devices", "0")
    assert "unknown key train.speed" in refused(capsys, str(run_yaml), "train.speed=3")
    assert "no folder at" in refused(capsys, str(run_yaml), "target.model=./nothing")
    assert "cuda:9 is not on this host" in refused(capsys, str(run_yaml), "target.devices=[cuda:9]")
    costs = tmp_path / "costs.json"
    costs.write_text(json.dumps(costs_of(group=2)))
    assert "2 devices are too few" in refused(capsys, str(run_yaml), "--costs", str(costs), "--num-devices", "2")
