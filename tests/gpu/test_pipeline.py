"""The pipeline on CUDA: time by the device's clock, features from device to device, sums over NCCL in threads."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist

from draftmill.monitor.gpus import read_gpus
from draftmill.pipeline.channel import Channel, ChannelClosed
from draftmill.pipeline.collective import Collective
from draftmill.pipeline.features import pack
from draftmill.pipeline.spans import Clock
from draftmill.pipeline.turns import Turns
from draftmill.pipeline.workers import own_stream
from draftmill.train.planning_memory import held_by_others

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")]
two_devices = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
SLEEP_CYCLES = 200_000_000
"""Of the device's clock: about a tenth of a second."""


def in_threads(*works: Callable[[], Any], timeout_s: float = 60.0) -> list[Any]:
    """What each returns in a thread of its own; raises the first error."""
    results: list[Any] = [None] * len(works)
    errors: list[BaseException] = []

    def run(index: int) -> None:
        try:
            results[index] = works[index]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout_s)
        assert not thread.is_alive(), "a thread hangs"
    if errors:
        raise errors[0]
    return results


def test_in_turns_a_device_has_one_stream_at_a_time() -> None:
    device = torch.device("cuda:0")
    turns, start = Turns(device), torch.cuda.Event(enable_timing=True)
    start.record(torch.cuda.current_stream(device))

    def work(first: bool) -> list[tuple[float, float]]:
        spans = []
        with own_stream(device) as stream:
            for _ in range(3):
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                with turns.take(first):
                    begin.record()
                    torch.cuda._sleep(SLEEP_CYCLES // 10)
                    end.record()
                assert stream is not None
                assert stream.query(), "a turn ends when its work is done"
                spans.append((start.elapsed_time(begin), start.elapsed_time(end)))
        return spans

    spans = sorted(span for each in in_threads(lambda: work(True), lambda: work(False)) for span in each)
    assert len(spans) == 6
    assert all(before[1] <= after[0] for before, after in pairwise(spans))


def test_a_wait_on_the_device_counts_though_the_host_goes_on() -> None:
    device = torch.device("cuda:0")

    def work() -> tuple[dict[str, float], dict[str, float]]:
        other = torch.cuda.Stream(device)
        with own_stream(device):
            clock = Clock(device)
            with torch.cuda.stream(other):
                torch.cuda._sleep(SLEEP_CYCLES)
                ready = torch.cuda.Event()
                ready.record()
            torch.cuda.current_stream().wait_event(ready)
            clock.cut("waiting for features")
            at_once = clock.finished()
            torch.cuda._sleep(SLEEP_CYCLES)
            last = clock.cut("work")
            assert last.seconds() > 0.02
            return at_once, clock.finished()

    ((at_once, later),) = in_threads(work)
    assert at_once == {}, "the device is not there yet, and nobody waits for it"
    assert later["waiting for features"] > 0.02
    assert later["work"] > 0.02


@pytest.mark.parametrize("drafter", ["cuda:0", pytest.param("cuda:1", marks=two_devices)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_features_arrive_in_the_slot_whichever_device_it_is_on(drafter: str, dtype: torch.dtype) -> None:
    """Slot after slot while the drafter's stream reads them: each holds its own batch's rows."""
    there, here = torch.device(drafter), torch.device("cuda:0")
    channel = Channel(2, 512, 3 * 64, there, dtype)
    generator = torch.Generator().manual_seed(0)
    batches = [[torch.randn(4, 128, 64, generator=generator) for _ in range(3)] for _ in range(8)]
    sources = [torch.randperm(512, generator=generator)[: 100 + 50 * index] for index in range(8)]

    def target() -> None:
        with own_stream(here):
            for number, (taps, source) in enumerate(zip(batches, sources, strict=True)):
                slot = channel.reserve(number)
                if slot.read is not None:
                    torch.cuda.current_stream().wait_event(slot.read)
                torch.cuda._sleep(SLEEP_CYCLES // 20)
                pack([tap.to(here) for tap in taps], source.to(here), slot.features_TF)
                written = torch.cuda.Event()
                written.record()
                channel.fill(number, None, written)  # type: ignore[arg-type]

    def reads() -> list[torch.Tensor]:
        found = []
        with own_stream(there):
            for number, source in enumerate(sources):
                slot = channel.take(number)
                assert slot.written is not None
                torch.cuda.current_stream().wait_event(slot.written)
                torch.cuda._sleep(SLEEP_CYCLES // 20)
                found.append(slot.features_TF[: len(source)].clone())
                read = torch.cuda.Event()
                read.record()
                channel.release(number, read)
            torch.cuda.current_stream().synchronize()
        return found

    _, found = in_threads(target, reads)
    for taps, source, rows in zip(batches, sources, found, strict=True):
        expected = torch.cat([tap.reshape(-1, 64)[source] for tap in taps], dim=1).to(dtype)
        assert torch.equal(rows.cpu(), expected)


def ends(store: dist.Store, device: int) -> Collective:
    return Collective(store, device, 2, torch.device("cuda", device), timeout_s=60.0)


@two_devices
def test_drafters_of_one_process_sum_over_nccl_and_leave_together() -> None:
    store = dist.HashStore()

    def drafter(number: int) -> float:
        with own_stream(torch.device("cuda", number)):
            collective = ends(store, number)
            gradient = torch.full((1 << 20,), float(number + 1), device=f"cuda:{number}", dtype=torch.bfloat16)
            counts = torch.full((3,), 10**number, device=f"cuda:{number}", dtype=torch.int64)
            for _ in range(3):
                collective.sum_(gradient, counts)
            torch.cuda.current_stream().synchronize()
            assert counts.tolist() == [44, 44, 44]
            collective.close()
            collective.close()
            assert collective.left(), "the group lets go"
            return float(gradient[-1])

    assert in_threads(lambda: drafter(0), lambda: drafter(1)) == [12.0, 12.0]


@two_devices
def test_whoever_waits_on_the_device_for_one_who_never_comes_is_let_go() -> None:
    store = dist.HashStore()
    collectives: dict[int, Collective] = {}
    there = threading.Barrier(3)

    def waits() -> float:
        with own_stream(torch.device("cuda:0")):
            collectives[0] = ends(store, 0)
            warm = torch.ones(4, device="cuda:0")
            collectives[0].sum_(warm)
            torch.cuda.current_stream().synchronize()
            there.wait()
            with contextlib.suppress(RuntimeError):
                collectives[0].sum_(warm)  # the other one never calls it
            torch.cuda.current_stream().synchronize()
            return 1.0

    def leaves() -> float:
        with own_stream(torch.device("cuda:1")):
            collectives[1] = ends(store, 1)
            collectives[1].sum_(torch.ones(4, device="cuda:1"))
            torch.cuda.current_stream().synchronize()
            there.wait()
            return 2.0

    def closes() -> float:
        there.wait()
        time.sleep(1.0)
        for collective in collectives.values():  # one after another, as a failure closes them
            collective.close()
        assert all(collective.left(30.0) for collective in collectives.values())
        return 3.0

    assert in_threads(waits, leaves, closes) == [1.0, 2.0, 3.0]
    with pytest.raises(ChannelClosed):
        collectives[0].sum_(torch.ones(4, device="cuda:0"))


def test_this_process_is_nobody_else() -> None:
    gpus, note = read_gpus()
    if not gpus:
        pytest.skip(f"no reading: {note}")
    uuids = {"cuda:0": f"GPU-{torch.cuda.get_device_properties(0).uuid}"}
    before = held_by_others(uuids)
    kept = torch.ones(2**30, dtype=torch.float32, device="cuda:0")
    after = held_by_others(uuids)
    held = [one.others_bytes for one in before], [one.others_bytes for one in after]
    assert abs(sum(held[1]) - sum(held[0])) < kept.numel(), "four GiB of its own are not taken for another's"
