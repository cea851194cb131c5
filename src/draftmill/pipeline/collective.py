"""All drafters in step: one process group a worker thread over a shared store.

Owns how drafters of one host or of several sum their gradients. NCCL on CUDA, Gloo on CPUs; one drafter alone needs
none. Reads the environment that torchrun sets, and nothing else does so but the command line.
"""

from __future__ import annotations

import json
import os
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from draftmill.pipeline.channel import ChannelClosed

TIMEOUT_S = 20 * 60.0
"""How long a drafter waits for the others: for all of them to be built, and in a collective."""
LEAVE_S = 20.0
"""How long a drafter that is done waits for its group to let go."""
HOSTS_S = 60 * 60.0
"""How long a host waits for another to come to the same point."""
_VERDICT, _ENTER, _LEAVE = "verdict", "enter", "leave"
T = TypeVar("T")
TELL_AFTER_S = 10.0
"""A wait for other hosts that lasts longer is told once."""
LOOK_EVERY_S = 0.1
"""How often a store is asked for what is not there yet: its own way of waiting can't be ended from here."""


@dataclass(frozen=True)
class Hosts:
    """This host's place among the run's hosts; one host where torchrun did not start the process.

    elastic: torchrun started the process, and may start it again after a failure.
    here: how many of the run's processes are on this machine; more than one only to try things out on a CPU.
    """

    rank: int = 0
    count: int = 1
    elastic: bool = False
    here: int = 1

    @classmethod
    def from_environment(cls) -> Hosts:
        """What torchrun says: one process a host."""
        return cls(
            int(os.environ.get("RANK", "0")),
            int(os.environ.get("WORLD_SIZE", "1")),
            "TORCHELASTIC_RUN_ID" in os.environ,
            int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        )


def hosts_store(
    hosts: Hosts, tell: Callable[[str], None] = lambda line: None, timeout_s: float = HOSTS_S
) -> dist.Store | None:
    """The store over which hosts and their drafters find one another: torchrun's; None for one host alone.

    tell: given a line where it takes long. Raises RuntimeError where not all hosts come in time.
    """
    if hosts.count == 1:
        return None
    # torchrun's agent serves its own store at this address; every process is a client of it.
    agent_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        hosts.count,
        is_master=hosts.rank == 0 and not agent_store,
        timeout=timedelta(seconds=TIMEOUT_S),
        wait_for_workers=False,
    )
    name = name_of_start(dist.PrefixStore("draftmill/starts", store), hosts, tell, timeout_s)
    return dist.PrefixStore(f"draftmill/{name}", store)


def name_of_start(store: dist.Store, hosts: Hosts, tell: Callable[[str], None], timeout_s: float) -> str:
    """A name that the processes of this start of the run share, and those of no other start.

    The store outlives processes that are started again, with all that they wrote, and no number that torchrun gives
    says which start it is: an agent counts only those of its own failures. So each process writes who it is, the first
    host calls the roll, and it holds once every process that is on it has answered. The dead do not answer.

    Raises RuntimeError where not all hosts come in time.
    """
    me, others = uuid.uuid4().hex, range(1, hosts.count)
    roll: list[str] = []
    name = ""

    def call() -> str | None:
        nonlocal roll, name
        if store.check([f"here/{rank}" for rank in others]):
            found = [me, *(store.get(f"here/{rank}").decode() for rank in others)]
            if found != roll:
                roll, name = found, uuid.uuid4().hex
                store.set("roll", json.dumps({"name": name, "processes": roll}))
            elif store.check([f"{name}/{rank}" for rank in others]):
                store.set(f"{name}/holds", "")
                return name
        return None

    def answer() -> str | None:
        nonlocal name
        if store.check(["roll"]):
            called = json.loads(store.get("roll"))
            if me in called["processes"] and called["name"] != name:
                name = called["name"]
                store.set(f"{name}/{hosts.rank}", "")
        return name if name and store.check([f"{name}/holds"]) else None

    if hosts.rank:
        store.set(f"here/{hosts.rank}", me)
    whom = f"for all {hosts.count} hosts to start the run"
    return wait_for(answer if hosts.rank else call, whom, tell, timeout_s, f"host {hosts.rank} waited {{}} {whom}")


def wait_for(look: Callable[[], T | None], whom: str, tell: Callable[[str], None], timeout_s: float, late: str) -> T:
    """Look again and again until there is something; returns it.

    whom: "for ...", told once where it takes long. late: the error's message, {} the time that was waited.
    Raises RuntimeError after timeout_s.
    """
    limit = f"{timeout_s / 60:.3g} minutes"
    pause, started, told = threading.Event(), time.monotonic(), False
    while (found := look()) is None:
        waited_s = time.monotonic() - started
        if waited_s > timeout_s:
            raise RuntimeError(late.format(limit))
        if not told and waited_s > TELL_AFTER_S:
            told = True
            tell(f"waiting {whom}; {limit} at most")
        pause.wait(LOOK_EVERY_S)
    return found


class Gate:
    """Where a process's drafters meet, before each sum and once it is launched.

    An NCCL kernel holds its device until the others' have come. Whatever waits for that device meanwhile waits too, be
    it the loading of a kernel that is used for the first time, which keeps other threads from the device as well, or
    what stands behind it in one of the device's few queues. So none launches a sum before all have launched the work
    that comes before it, features of targets on the same devices included, and none launches more before all have
    launched the sum.

    Closing it lets those through who have met and not yet woken, as aborting a `threading.Barrier` would not.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._changed = threading.Condition()
        self._arrived = 0
        self._closed = False

    def meet(self) -> None:
        """Wait for all of them. Raises ChannelClosed."""
        with self._changed:
            if self._closed:
                raise ChannelClosed
            self._arrived += 1
            due = -(-self._arrived // self._size) * self._size
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._closed or self._arrived >= due)
            if self._arrived < due:
                raise ChannelClosed

    def close(self) -> None:
        """Let go of those who wait for one that does not come. Can be called twice."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


class Collective:
    """One drafter's end of the group of all drafters. Made and used in its worker thread; any thread may close it."""

    def __init__(
        self,
        store: dist.Store | None,
        rank: int,
        size: int,
        device: torch.device,
        *,
        gate: Gate | None = None,
        closed: Callable[[], bool] = lambda: False,
        built: Callable[[int], None] = lambda num_built: None,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """Waits until all drafters are there.

        rank, size: this drafter's number among all drafters, and how many there are. gate: where those of this process
        meet before a sum, None for one that is alone here. closed: whether the run is ending.
        built: told how many are built, whenever more are.
        Raises RuntimeError, naming them, where drafters do not come in time; ChannelClosed where the run ends.
        """
        self.rank, self.size, self._gate = rank, size, gate
        self._group: Any = None
        self._lock = threading.Lock()
        self._in_flight = self._closed = False
        self._leaving: threading.Thread | None = None
        if size == 1:
            return
        if store is None:
            raise RuntimeError(f"{size} drafters need a store to find one another")
        # A call that waits holds up every other call of the same client. (torch's stubs lack this method.)
        store = store.clone()  # type: ignore[attr-defined]
        _meet(store, rank, size, closed, built, timeout_s)
        timeout = timedelta(seconds=timeout_s)
        if device.type == "cuda":
            # A failure is this run's to report: NCCL's own watch, which torchrun asks for, would end the process
            # without a word. Hosts tell one another when they end (meeting.py).
            os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
            options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)  # as the drafters' own are
            options._timeout = timeout
            self._group = dist.ProcessGroupNCCL(dist.PrefixStore("nccl", store), rank, size, options)
        else:
            self._group = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, timeout)
        self._aborts = device.type == "cuda"

    def sum_(self, *tensors: torch.Tensor) -> None:
        """Add up each tensor over all drafters, in place, on the current stream.

        Raises ChannelClosed where the run is ending, RuntimeError where another drafter can't be reached any more.
        """
        if self.size == 1:
            return
        self._meet()
        with self._lock:
            if self._closed:
                raise ChannelClosed
            group, self._in_flight = self._group, True
        try:
            launched = [group.allreduce([tensor]) for tensor in tensors]
            self._meet()
            for work in launched:
                work.wait()
        except RuntimeError as error:
            reason = str(error).partition(". ")[0]
            raise RuntimeError(
                f"the sum over all {self.size} drafters was broken off ({reason}); where another host's run has ended, "
                "its log says why"
            ) from error
        finally:
            del group  # a traceback must not keep the group, or others would wait for this drafter
            with self._lock:
                self._in_flight = False

    def _meet(self) -> None:
        if self._gate is not None:
            self._gate.meet()

    def close(self) -> None:
        """Leave the group, which ends the others' waiting for this drafter. Waits for nothing; can be called twice.

        A Gloo group can't be left while its own sum waits for others; those who are gone end that wait.
        """
        with self._lock:
            self._closed = True
            if self._group is None or (self._in_flight and not self._aborts):
                return
            group, self._group = self._group, None
            if self._aborts:
                # An end of an NCCL group that is aborted may wait for the others, which are closed one after another.
                self._leaving = threading.Thread(target=_abort, args=(group,), name="leave-group", daemon=True)
                self._leaving.start()

    def left(self, timeout_s: float = LEAVE_S) -> bool:
        """Wait for a group that was closed to let go; whether it has."""
        if self._leaving is not None:
            self._leaving.join(timeout_s)
        return self._leaving is None or not self._leaving.is_alive()


def _abort(group: Any) -> None:
    group.abort()


def _meet(
    store: dist.Store,
    rank: int,
    size: int,
    closed: Callable[[], bool],
    built: Callable[[int], None],
    timeout_s: float,
) -> None:
    """Wait until every drafter is built, before any of them enters the group: nobody is in a collective meanwhile.

    Entering a group can't be broken off, so either all enter or none: the first word on it, of the last to come or of
    one that has to leave, holds for all.
    """
    store.set(f"built/{rank}", "")
    num_built = store.add("num_built", 1)
    if num_built == size:
        store.compare_set(_VERDICT, "", _ENTER)
    pause, deadline = threading.Event(), time.monotonic() + timeout_s
    late = False
    while not store.check([_VERDICT]):
        if (now := store.add("num_built", 0)) > num_built:
            num_built = now
            built(now)
        late = time.monotonic() > deadline
        if closed() or late:
            store.compare_set(_VERDICT, "", _LEAVE)
        else:
            pause.wait(LOOK_EVERY_S)
    if store.get(_VERDICT).decode() == _ENTER:
        return
    if closed():
        raise ChannelClosed
    missing = [str(other) for other in range(size) if not store.check([f"built/{other}"])]
    if late and missing:
        raise RuntimeError(
            f"drafter {rank} is built, but after {timeout_s / 60:.3g} minutes drafter {', '.join(missing)} of {size} "
            "is not; the log of its host says what it does"
        )
    raise RuntimeError(f"drafter {rank} is built, but another host's run is ending; the log of that host says why")
