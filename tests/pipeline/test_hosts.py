"""Drafters of one process in step, and the main threads of several hosts, without a run around them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from draftmill.errors import InputError
from draftmill.pipeline import meeting
from draftmill.pipeline.channel import ChannelClosed
from draftmill.pipeline.collective import Collective, Gate, Hosts, name_of_start
from draftmill.pipeline.meeting import Meeting
from draftmill.pipeline.supervision import HostEnded

CPU = torch.device("cpu")
SOON_S = 5.0
"""Nothing here takes long; a test that waits this long has failed."""


def start(function: Callable[[], Any]) -> threading.Thread:
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    return thread


# Sums over drafters


def collectives(size: int, store: dist.Store | None = None) -> list[Collective]:
    store = store or dist.HashStore()
    made: dict[int, Collective] = {}
    threads = [
        start(lambda rank=rank: made.__setitem__(rank, Collective(store, rank, size, CPU))) for rank in range(size)
    ]
    for thread in threads:
        thread.join(SOON_S)
    return [made[rank] for rank in range(size)]


def test_sums_are_over_all_drafters_in_float_and_integers() -> None:
    group = collectives(3)
    floats = [torch.tensor([rank + 0.5, 1.0]) for rank in range(3)]
    integers = [torch.tensor([rank, 2**40]) for rank in range(3)]
    threads = [start(lambda rank=rank: group[rank].sum_(floats[rank], integers[rank])) for rank in range(3)]
    for thread in threads:
        thread.join(SOON_S)
    assert all(torch.equal(value, torch.tensor([4.5, 3.0])) for value in floats)
    assert all(torch.equal(value, torch.tensor([3, 3 * 2**40])) for value in integers)
    for one in group:
        one.close()


def test_nobody_sums_before_all_of_a_process_have_come() -> None:
    """Time after time; the last one to come does not wait."""
    gate, passed = Gate(3), [0, 0, 0]
    come = [threading.Semaphore(0) for _ in range(3)]

    def drafter(rank: int) -> None:
        for _ in range(4):
            come[rank].acquire()
            gate.meet()
            passed[rank] += 1

    threads = [start(lambda rank=rank: drafter(rank)) for rank in range(3)]
    for turn, last in enumerate((2, 0, 1, 2)):
        others = [rank for rank in range(3) if rank != last]
        for rank in others:
            come[rank].release()
        time.sleep(0.05)
        assert passed == [turn] * 3
        come[last].release()
        deadline = time.monotonic() + SOON_S
        while passed != [turn + 1] * 3 and time.monotonic() < deadline:
            time.sleep(0.001)
        assert passed == [turn + 1] * 3
    for thread in threads:
        thread.join(SOON_S)
        assert not thread.is_alive()


def test_who_waits_at_the_gate_is_let_go_when_the_run_ends() -> None:
    gate, told = Gate(2), []

    def wait() -> None:
        try:
            gate.meet()
        except ChannelClosed:
            told.append("closed")

    thread = start(wait)
    time.sleep(0.05)
    gate.close()
    thread.join(SOON_S)
    assert told == ["closed"]
    with pytest.raises(ChannelClosed):
        collectives_behind(gate)[0].sum_(torch.ones(1))


def collectives_behind(gate: Gate) -> list[Collective]:
    store, made = dist.HashStore(), {}
    threads = [
        start(lambda rank=rank: made.__setitem__(rank, Collective(store, rank, 2, CPU, gate=gate))) for rank in range(2)
    ]
    for thread in threads:
        thread.join(SOON_S)
    return [made[rank] for rank in range(2)]


def test_who_leaves_ends_the_others_waiting() -> None:
    group, told = collectives(3), {}

    def wait(rank: int) -> None:
        try:
            group[rank].sum_(torch.ones(5))
        except RuntimeError as error:
            told[rank] = str(error)
        group[rank].close()

    waiting = [start(lambda rank=rank: wait(rank)) for rank in (0, 1)]
    time.sleep(0.1)
    group[0].close()  # in its own sum: left to those who are gone
    assert all(thread.is_alive() for thread in waiting)
    group[2].close()
    for thread in waiting:
        thread.join(SOON_S)
    assert sorted(told) == [0, 1]
    assert all(text.startswith("the sum over all 3 drafters was broken off (") for text in told.values())
    with pytest.raises(ChannelClosed):
        group[2].sum_(torch.ones(1))


def test_drafters_that_are_built_wait_for_the_others_outside_any_group() -> None:
    """B26: with a time limit that is said, and without holding up the end of a run."""
    with pytest.raises(RuntimeError, match=r"drafter 1 is built, but after 0.00333 minutes drafter 0, 2 of 3 is not"):
        Collective(dist.HashStore(), 1, 3, CPU, timeout_s=0.2)
    with pytest.raises(RuntimeError, match="2 drafters need a store"):
        Collective(None, 0, 2, CPU)


def test_who_waits_hears_of_each_that_is_built() -> None:
    """So that a wait for many, built one after another, is not taken for a stall."""
    shared, heard = dist.HashStore(), []
    waiting = [start(lambda: Collective(shared, 0, 3, CPU, built=heard.append))]
    waiting[0].join(0.2)
    waiting.append(start(lambda: Collective(shared, 1, 3, CPU)))
    waiting[0].join(0.3)
    assert heard == [2]
    waiting.append(start(lambda: Collective(shared, 2, 3, CPU)))
    for thread in waiting:
        thread.join(SOON_S)
        assert not thread.is_alive()


def test_a_run_that_ends_while_drafters_are_built_leaves_none_waiting() -> None:
    """Also one that is built only after the others have left, and on a host whose own run goes on."""
    began, closed, shared = time.monotonic(), threading.Event(), dist.HashStore()
    threading.Timer(0.1, closed.set).start()
    with pytest.raises(ChannelClosed):
        Collective(shared, 0, 3, CPU, closed=closed.is_set)
    with pytest.raises(ChannelClosed):
        Collective(shared, 1, 3, CPU, closed=closed.is_set)
    with pytest.raises(RuntimeError, match="drafter 2 is built, but another host's run is ending"):
        Collective(shared, 2, 3, CPU)
    assert time.monotonic() - began < SOON_S


def test_drafters_that_have_all_come_all_enter_though_the_run_ends() -> None:
    """Or the one that does not look at the run's end in time would wait in the group's making for ever."""
    shared, made = dist.HashStore(), {}
    first = start(lambda: made.__setitem__(0, Collective(shared, 0, 2, CPU)))
    first.join(0.05)
    made[1] = Collective(shared, 1, 2, CPU, closed=lambda: True)
    first.join(SOON_S)
    assert sorted(made) == [0, 1]


# Hosts


@pytest.fixture
def store() -> dist.Store:
    """As torchrun's agent serves it."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def hosts_of(store: dist.Store, count: int, **settings: Any) -> list[Meeting]:
    return [Meeting(Hosts(rank, count), store, lookahead=2, **settings) for rank in range(count)]


def test_hosts_exchange_and_wait_for_one_another(store: dist.Store) -> None:
    meetings, got = hosts_of(store, 3), {}
    threads = [
        start(lambda rank=rank: got.__setitem__(rank, meetings[rank].exchange("here", {"host": rank})))
        for rank in (2, 0)
    ]
    threads[0].join(0.2)
    assert got == {}
    meetings[1].exchange("here", {"host": 1})
    for thread in threads:
        thread.join(SOON_S)
    assert got[0] == got[2] == [{"host": 0}, {"host": 1}, {"host": 2}]
    assert Meeting(Hosts(), None, lookahead=2).exchange("alone", 7) == [7]


def test_a_host_that_does_not_come_is_named_and_told_about(store: dist.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftmill.pipeline.collective.TELL_AFTER_S", 0.05)
    told: list[str] = []
    meeting = hosts_of(store, 2, timeout_s=0.3)[0]
    with pytest.raises(RuntimeError, match=r"host 0 waited 0.005 minutes for host 1 of 2 at: loading targets"):
        meeting.exchange("loading targets", None, told.append)
    assert told == ["waiting for host 1 at: loading targets; 0.005 minutes at most"]


def test_hosts_that_are_not_set_up_alike_are_refused(store: dist.Store) -> None:
    meetings, errors = hosts_of(store, 2), []
    facts = [{"train.lr": 1e-3, "the number of drafters": 3}, {"train.lr": 1e-3, "the number of drafters": 2}]

    def compare(rank: int) -> None:
        with pytest.raises(InputError) as caught:
            meetings[rank].compare(facts[rank])
        errors.append(str(caught.value))

    threads = [start(lambda rank=rank: compare(rank)) for rank in range(2)]
    for thread in threads:
        thread.join(SOON_S)
    assert errors == ["host 1 is not set up as host 0 is: the number of drafters is 2, not 3; make them equal"] * 2


@pytest.mark.parametrize("wishes", [{1: (4, "graceful")}, {0: (6, "now")}, {0: (5, "graceful"), 1: (5, "now")}])
def test_hosts_stop_after_the_same_step_however_far_ahead_they_are(
    store: dist.Store, wishes: dict[int, tuple[int, str]]
) -> None:
    """Two main threads as far apart as their drafters, who do each step together, allow."""
    meetings = hosts_of(store, 2)
    done = [threading.Semaphore(0), threading.Semaphore(0)]  # steps that the other host's drafters have joined
    stopped: dict[int, tuple[int, str]] = {}

    def host(rank: int, slow_s: float) -> None:
        wished, how = wishes.get(rank, (10**9, "no"))
        for step in range(40):
            done[1 - rank].release()
            if step >= 2:  # two tickets ahead: the results of the step before last are waited for
                assert done[rank].acquire(timeout=SOON_S)
            time.sleep(slow_s)
            mode = meetings[rank].stop_after(step, how if step >= wished else "no")
            if mode != "no":
                stopped[rank] = (step, mode)
                return

    threads = [start(lambda: host(0, 0.002)), start(lambda: host(1, 0.0))]
    for thread in threads:
        thread.join(SOON_S)
    assert stopped[0] == stopped[1]
    step, mode = stopped[0]
    assert (step, mode) in [(at + 3, how) for at, how in wishes.values()]


def test_one_host_stops_at_once() -> None:
    meeting = Meeting(Hosts(), None, lookahead=2)
    assert [meeting.stop_after(5, wish) for wish in ("no", "graceful", "now")] == ["no", "graceful", "now"]


def test_the_environment_of_torchrun_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert Hosts.from_environment() == Hosts(0, 1, False)
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "4"), ("TORCHELASTIC_RUN_ID", "x")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert Hosts.from_environment() == Hosts(1, 4, True, 2)


# A start, and the end of another host


def names(store: dist.Store, count: int, late: float = 0.0) -> list[str]:
    """The name that each of so many processes is given; the first host comes first, the others later."""
    found = [""] * count

    def process(rank: int) -> None:
        found[rank] = name_of_start(store, Hosts(rank, count), lambda line: None, SOON_S)

    threads = [start(lambda: process(0))]
    time.sleep(late)
    threads += [start(lambda rank=rank: process(rank)) for rank in range(1, count)]
    for thread in threads:
        thread.join(2 * SOON_S)
    return found


def test_processes_of_one_start_share_a_name_and_those_of_the_next_have_another() -> None:
    """The store of torchrun's agent stays, with all that the processes before wrote."""
    store = dist.HashStore()
    starts = [names(store, 3), names(store, 3, late=0.4), names(store, 2)]
    for start_names in starts:
        assert len(set(start_names)) == 1
        assert start_names[0]
    assert len({start_names[0] for start_names in starts}) == 3


def test_a_process_that_died_before_it_answered_is_not_waited_for_nor_counted_on() -> None:
    store = dist.HashStore()
    store.set("here/1", "one that is dead")
    found = names(store, 2, late=0.4)  # the first host calls the dead one until the living one has come
    assert found[0] == found[1] != ""


def test_a_host_that_does_not_start_is_told_of_and_not_waited_for_without_end() -> None:
    with pytest.raises(RuntimeError, match=r"host 0 waited 0\.005 minutes for all 2 hosts to start the run"):
        name_of_start(dist.HashStore(), Hosts(0, 2), lambda line: None, 0.3)


def two_meetings() -> list[Meeting]:
    store = dist.HashStore()
    return [Meeting(Hosts(rank, 2), store, lookahead=2, timeout_s=2 * SOON_S) for rank in range(2)]


def raised_by(function: Callable[[], Any]) -> tuple[list[BaseException], threading.Thread]:
    errors: list[BaseException] = []

    def run() -> None:
        try:
            function()
        except BaseException as error:
            errors.append(error)

    return errors, start(run)


def test_a_host_that_fails_ends_the_others_wait_for_it() -> None:
    first, second = two_meetings()
    errors, thread = raised_by(lambda: first.exchange("loading targets", "no"))
    time.sleep(0.2)
    assert thread.is_alive()
    second.end("MemoryError: made up")
    thread.join(SOON_S)
    (error,) = errors
    assert isinstance(error, HostEnded)
    assert not error.stopped
    assert str(error) == "host 1 has ended its run: MemoryError: made up"


def test_a_wish_to_stop_ends_a_wait_on_all_hosts() -> None:
    """Also on the host that comes to the same point when the first has left it, and finds its word there."""
    first, second = two_meetings()
    wish = ["no"]
    errors, thread = raised_by(lambda: first.exchange("loading targets", "no", wish=lambda: wish[0]))
    time.sleep(0.2)
    assert thread.is_alive()
    wish[0] = "graceful"
    thread.join(SOON_S)
    with pytest.raises(HostEnded) as later:
        second.exchange("loading targets", "no")
    for error in (errors[0], later.value):
        assert isinstance(error, HostEnded)
        assert error.stopped
        assert "asked to stop while it waited for host 1 at: loading targets" in str(error)


def test_what_becomes_of_a_host_when_all_have_come_to_the_end_is_nobodys_business() -> None:
    store = dist.HashStore()
    hosts = [Meeting(Hosts(rank, 3), store, lookahead=2, timeout_s=2 * SOON_S) for rank in range(3)]
    errors, first = raised_by(hosts[0].leave)
    _, second = raised_by(hosts[1].leave)
    store.set("ending/2", "null")  # the third has come, and not yet left
    second.join(SOON_S)
    hosts[1].end("it has nothing to tell any more")
    assert not store.check(["ended"])
    store.set("ended", '{"rank": 1, "why": "made up", "stopped": false}')
    time.sleep(0.3)
    assert first.is_alive()
    store.set("leaving/2", "null")
    first.join(SOON_S)
    assert not first.is_alive()
    assert errors == []


def test_a_host_that_trains_hears_of_anothers_end_once_and_not_of_its_own() -> None:
    first, second = two_meetings()
    heard: list[list[HostEnded]] = [[], []]
    with first.watched(heard[0].append), second.watched(heard[1].append):
        second.end("worker drafter-2 on cuda:6 failed")
        second.end("a second word counts for nothing")
        deadline = time.monotonic() + SOON_S
        while not heard[0] and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(1.2)
    assert [str(one) for one in heard[0]] == ["host 1 has ended its run: worker drafter-2 on cuda:6 failed"]
    assert heard[1] == []


def test_a_store_that_has_gone_holds_nobody_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(meeting, "LAST_WORD_S", 0.2)
    served = dist.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", served.port, 2, is_master=False, timeout=timedelta(seconds=60))
    one = Meeting(Hosts(1, 2), client, lookahead=2)
    del served
    started = time.monotonic()
    one.end("made up")
    assert time.monotonic() - started < SOON_S
    assert "the other hosts could not be told that this one has ended" in caplog.text


def test_one_host_alone_tells_nobody() -> None:
    alone = Meeting(Hosts(), None, lookahead=2)
    alone.end("made up")
    with alone.watched(lambda ended: pytest.fail(str(ended))):
        assert alone.exchange("loading targets", "no") == ["no"]
