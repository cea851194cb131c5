"""Before a run takes its GPUs: the split it is given, whose memory is in the way, the largest batch at the start."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from draftmill.config import Config
from draftmill.errors import InputError
from draftmill.monitor.gpus import Gpu, GpuProcess
from draftmill.monitor.run import RunDirectory
from draftmill.pipeline.collective import Hosts
from draftmill.pipeline.meeting import Meeting
from draftmill.pipeline.placement import Placement
from draftmill.target.features import DoesNotFit, TapsReplica
from draftmill.target.load import load_target
from draftmill.train import run as run_module
from draftmill.train.planning_devices import devices_as_before, with_best_split
from draftmill.train.planning_memory import GIB, Needs, check_memory, held_by_others, least_needs
from draftmill.train.planning_worst import StepDoesNotFit, built_and_run, run_worst, worst_batch
from draftmill.train.setup import Setup, set_up
from monitor_doubles import FakeGpus
from tiny import config_of, small_world

torch.set_num_threads(1)
UUIDS = {f"cuda:{index}": f"GPU-{index}" for index in range(2)}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return small_world(tmp_path_factory.mktemp("world"))


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight GPUs, as far as counting goes."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)


AUTO = ("target.devices=auto", "drafter.devices=auto")


def costs_file(folder: Path, target_s: float, drafter_s: float, **changes: Any) -> str:
    path = folder / "costs.json"
    buckets = [dict(bucket=bucket, num_padded=128, target_s=target_s, drafter_s=drafter_s) for bucket in range(2)]
    costs = dict(
        device="made up",
        device_bytes=80 * GIB,
        group=1,
        buckets=buckets,
        update_s=0.0,
        target_bytes=50 * GIB,
        drafter_bytes=60 * GIB,
    )
    path.write_text(json.dumps(costs | changes))
    return str(path)


def chosen(world: dict[str, Any], folder: Path, *overrides: str) -> tuple[Setup, Setup, str]:
    """The setup before and after, and the run's log."""
    setup = set_up(config_of(world, *overrides), Hosts())
    with RunDirectory.create(folder / "run", setup.config.to_yaml(), {}, console=False, gpu_source=FakeGpus) as run:
        meeting = Meeting(Hosts(), None, lookahead=2)
        after = with_best_split(setup, run, meeting, lambda made: {"drafters": len(made.placement.drafters)})
        run.crash(RuntimeError("the test's end"))
    return setup, after, (folder / "run" / "run.log").read_text()


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize(
    ("target_s", "drafter_s", "split"), [(0.3, 0.1, (6, 2)), (0.1, 0.3, (2, 6)), (0.1, 0.1, (4, 4))]
)
def test_auto_takes_the_best_split(
    world: dict[str, Any], tmp_path: Path, target_s: float, drafter_s: float, split: tuple[int, int]
) -> None:
    costs = costs_file(tmp_path, target_s, drafter_s)
    before, after, log = chosen(world, tmp_path, *AUTO, f"pipeline.costs={costs}")
    assert len(before.placement.drafters) == 3, "five and three until costs are known"
    assert (len(after.placement.targets), len(after.placement.drafters)) == split
    assert after.stream.num_drafters == split[1]
    saved = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert saved["target"]["devices"] == [f"cuda:{index}" for index in range(split[0])]
    assert saved["drafter"]["devices"] == [f"cuda:{index}" for index in range(split[0], 8)]
    assert json.loads((tmp_path / "run" / "environment.json").read_text()) == {"drafters": split[1]}
    assert f"{split[0]} targets + {split[1]} drafters: " in log


@pytest.mark.usefixtures("gpus")
def test_devices_that_are_named_stay_and_what_is_left_over_goes_to_the_other_side(
    world: dict[str, Any], tmp_path: Path
) -> None:
    before, after, _ = chosen(world, tmp_path, "target.devices=auto", "drafter.devices=[cuda:1, cuda:3]")
    assert after is before
    assert [str(group[0]) for group in after.placement.targets] == [f"cuda:{index}" for index in (0, 2, 4, 5, 6, 7)]
    every = [f"cuda:{index}" for index in range(8)]
    setup = set_up(config_of(world, f"target.devices=[{', '.join(every)}]", "drafter.devices=auto"), Hosts())
    assert [str(device) for device in setup.placement.drafters] == every, "none is left: they share"
    on_cpu = set_up(config_of(world, "target.devices=auto", "drafter.devices=[cpu, cpu]"), Hosts())
    assert on_cpu.placement.targets == ((torch.device("cpu"),),)


@pytest.mark.usefixtures("gpus")
def test_two_drafters_on_one_gpu_are_refused(world: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"drafter.devices names cuda:1 more than once"):
        set_up(config_of(world, "target.devices=[cuda:0]", "drafter.devices=[cuda:1, cuda:1]"), Hosts())


@pytest.mark.usefixtures("gpus")
def test_nothing_fits(world: dict[str, Any], tmp_path: Path) -> None:
    costs = costs_file(tmp_path, 0.1, 0.1, device_bytes=40 * GIB)
    with pytest.raises(InputError, match=r"no split of 8 GPUs fits: lower data.token_budget"):
        chosen(world, tmp_path, *AUTO, f"pipeline.costs={costs}")


def test_a_run_that_is_gone_on_with_keeps_its_devices(world: dict[str, Any], tmp_path: Path) -> None:
    config = config_of(world, *AUTO)
    assert devices_as_before(config, tmp_path) is config
    given = config_of(world, "target.devices=[cuda:0, cuda:1]", "drafter.devices=[cuda:2]")
    (tmp_path / "config.yaml").write_text(given.to_yaml())
    again = devices_as_before(config, tmp_path)
    assert (again.target.devices, again.drafter.devices) == (["cuda:0", "cuda:1"], ["cuda:2"])
    assert isinstance(again, Config)
    named = config_of(world, "target.devices=[cpu]", "drafter.devices=auto")
    assert devices_as_before(named, tmp_path) is named
    (tmp_path / "config.yaml").write_text("target: 3")
    assert devices_as_before(config, tmp_path) is config


# Memory


def reading(*used: int, processes: dict[int, list[GpuProcess]] | None = None) -> Any:
    found = [
        Gpu(index, f"GPU-{index}", "made up", 80 * GIB, gib * GIB, 0, tuple((processes or {}).get(index, ())))
        for index, gib in enumerate(used)
    ]
    return lambda: (found, "")


def on_two(world: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Setup:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    return set_up(config_of(world, "target.devices=[cuda:0]", "drafter.devices=[cuda:0, cuda:1]"), Hosts())


def test_whose_memory_is_in_the_way(world: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    setup = on_two(world, monkeypatch)
    mine = GpuProcess(os.getpid(), 5 * GIB, "me")
    other = GpuProcess(4242, 30 * GIB, "python old.py")
    held = held_by_others(UUIDS, reading(35, 1, processes={0: [mine, other]}))
    assert [one.line() for one in held] == [
        "cuda:0: 30.0 GiB of 80.0 GiB are held by others: process 4242 (python old.py) 30.0 GiB"
    ]
    check_memory(setup, held, Needs(target=20 * GIB, drafter=30 * GIB))  # 50 of 50 GiB
    with pytest.raises(InputError) as caught:
        check_memory(setup, held, Needs(target=21 * GIB, drafter=30 * GIB))
    assert str(caught.value) == (
        "cuda:0 has 50.0 GiB free, and the run needs at least 21.0 GiB for the target and 30.0 GiB for the drafter "
        "there. cuda:0: 30.0 GiB of 80.0 GiB are held by others: process 4242 (python old.py) 30.0 GiB. End them "
        "(draftmill stop, kill), or name other devices in target.devices and drafter.devices"
    )


def test_in_a_container_others_have_no_name(world: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    setup = on_two(world, monkeypatch)
    held = held_by_others(UUIDS, reading(1, 79))
    assert [one.line() for one in held] == [
        "cuda:1: 79.0 GiB of 80.0 GiB are held by others: by processes that can't be seen from here"
    ]
    with pytest.raises(
        InputError, match=r"cuda:1 has 1.0 GiB free, and the run needs at least 2.0 GiB for the drafter"
    ):
        check_memory(setup, held, Needs(target=None, drafter=2 * GIB))
    assert held_by_others({}, reading(79)) == []
    assert held_by_others(UUIDS, lambda: ([], "no driver")) == []


@pytest.mark.usefixtures("gpus")
def test_the_memory_of_the_chosen_devices_is_looked_at_too(
    world: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until costs are known cuda:2 is a target's, for which there is room; by them it is a drafter's."""
    monkeypatch.setattr("draftmill.train.planning_memory.least_needs", lambda _setup: Needs(1 * GIB, 30 * GIB))
    uuids = {f"cuda:{index}": f"GPU-{index}" for index in range(8)}
    monkeypatch.setattr(run_module, "_gpu_uuids", lambda _setup: uuids)
    monkeypatch.setattr(run_module, "held_by_others", partial(held_by_others, reading=reading(0, 0, 60, 0, 0, 0, 0, 0)))
    monkeypatch.setattr(run_module, "environment", lambda _setup: {})
    monkeypatch.setattr(Placement, "make_current", lambda _self: None)

    def start(run_dir: Path, target_s: float, drafter_s: float) -> None:
        costs = costs_file(tmp_path, target_s, drafter_s)
        run_module.train(config_of(world, *AUTO, f"pipeline.costs={costs}", f"run.dir={run_dir}"), console=False)

    run_dir = tmp_path / "run"
    with pytest.raises(run_module.Unusable, match=r"^cuda:2 has 20.0 GiB free, .* at least 30.0 GiB for the drafter"):
        start(run_dir, 0.1, 0.3)
    log = (run_dir / "run.log").read_text()
    assert "2 targets + 6 drafters: " in log
    assert "cuda:2: 60.0 GiB of 80.0 GiB are held by others" in log
    loaded: list[Setup] = []

    def load(setup: Setup, _run: RunDirectory) -> Any:
        loaded.append(setup)
        raise InputError("made up: the test's end")

    monkeypatch.setattr(run_module, "load_targets", load)
    with pytest.raises(run_module.Unusable, match="the test's end"):
        start(tmp_path / "another", 0.1, 0.1)
    assert [len(setup.placement.drafters) for setup in loaded] == [4], "of four and four, cuda:2 is a target's"


def test_the_least_that_a_run_needs(world: dict[str, Any]) -> None:
    setup = set_up(config_of(world), Hosts())
    needs = least_needs(setup)
    target = load_target(world["target"]["model"], dtype="float32", last_layer=setup.shape.target_layer_ids[-1])
    assert needs.target == sum(4 * parameter.numel() for parameter in target.model.parameters())
    # hidden 32, MLP 64, 4/2 heads of 8: layers of 32*32*2 + 32*16*2 + 3*32*64 + norms, and the features' projection
    layer = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64 + 2 * 32 + 2 * 8
    weights = 2 * layer + 2 * 32 * 32 + 2 * 32
    slots = setup.step_shape.context_slots
    rest = 4 * 80 * 32 + 3 * slots * 2 * 32 * 4
    # master, gradient and two moments in float32; Muon has one moment, an average or a sum is one more buffer
    assert needs.drafter == 16 * weights + rest
    drafter = setup.config.drafter.model_copy(update={"float8": "head"})
    in_float8 = replace(setup, config=setup.config.model_copy(update={"drafter": drafter}))
    assert least_needs(in_float8).drafter == 16 * weights + rest + 2 * 80 * 32, "the head twice more"
    for settings, each in ((["train.optimizer=muon"], 12), (["train.ema_decay=0.9"], 20), (["train.accumulate=2"], 20)):
        assert least_needs(set_up(config_of(world, *settings), Hosts())).drafter == each * weights + rest


# The largest batch


@pytest.mark.parametrize("batching", ["bucketed", "packed"])
def test_the_largest_batch_runs_once(world: dict[str, Any], batching: str) -> None:
    setup = set_up(config_of(world, f"data.batching={batching}"), Hosts())
    batch = worst_batch(setup)
    rows, length = batch.tokens_BS.shape
    longest = int(setup.store.lengths.max())
    assert length == (64 if batching == "packed" else -(-longest // 8) * 8)
    assert setup.plan.padded_slots - length < rows * length <= setup.plan.padded_slots
    target = load_target(world["target"]["model"], dtype="float32")
    replica = TapsReplica(target, setup.taps, "eager", batching == "packed")
    assert run_worst(setup, replica) is replica
    assert replica.report == "eager (as configured)"


def test_a_target_without_room_for_it_says_what_to_lower(
    world: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = set_up(config_of(world), Hosts())
    replica = TapsReplica(load_target(world["target"]["model"], dtype="float32"), setup.taps, "eager")

    def full(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("made up")

    monkeypatch.setattr("draftmill.train.planning_worst.pack", full)
    with pytest.raises(DoesNotFit, match=r"do not fit beside the target on cpu; lower data.token_budget"):
        run_worst(setup, replica)
    monkeypatch.setattr(replica.target, "forward_layers", full)
    with pytest.raises(DoesNotFit, match=r"the target on cpu has too little memory for .* lower data.token_budget"):
        run_worst(setup, replica)


def test_a_drafter_without_room_for_its_step_says_what_to_lower(world: dict[str, Any]) -> None:
    setup = set_up(config_of(world), Hosts())

    def full() -> Any:
        raise torch.OutOfMemoryError("made up")

    with pytest.raises(
        StepDoesNotFit, match=r"context slots and 16 anchors does not fit on cpu; lower data.token_budget"
    ):
        built_and_run(setup, torch.device("cpu"), full)
    replica = SimpleNamespace(step=SimpleNamespace(name="eager"))
    assert built_and_run(setup, torch.device("cpu"), lambda: replica) is replica  # type: ignore[arg-type,return-value]
