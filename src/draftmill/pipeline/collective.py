"""All drafters in step: one process group a worker thread over a shared store.

Owns how drafters of one host or of several sum their gradients. NCCL on CUDA, Gloo on CPUs; one drafter alone needs
none. Reads the environment that torchrun sets, and nothing else does so but the command line.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

TIMEOUT = timedelta(minutes=20)
"""How long a drafter waits for the others in a collective."""


@dataclass(frozen=True)
class Hosts:
    """This host's place among the run's hosts; one host where torchrun did not start the process."""

    rank: int = 0
    count: int = 1

    @classmethod
    def from_environment(cls) -> Hosts:
        """What torchrun says: one process a host."""
        return cls(int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")))


def shared_store(hosts: Hosts) -> dist.Store:
    """The store over which drafters find one another: in memory on one host, torchrun's TCP store on several."""
    if hosts.count == 1:
        return dist.HashStore()
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    # torchrun's agent serves its own store at this address; every process is a client of it.
    agent_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = dist.TCPStore(
        address,
        port,
        hosts.count,
        is_master=hosts.rank == 0 and not agent_store,
        timeout=TIMEOUT,
        wait_for_workers=False,
    )
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"draftmill/{attempt}", store)


class Collective:
    """One drafter's end of the group of all drafters. Made and used in its worker thread."""

    def __init__(self, store: dist.Store | None, rank: int, size: int, device: torch.device) -> None:
        """rank, size: this drafter's number among all drafters, and how many there are. Blocks until all are there."""
        self.rank, self.size = rank, size
        self._group: Any = None
        if size == 1:
            return
        if store is None:
            raise RuntimeError(f"{size} drafters need a store to find one another")
        if device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = TIMEOUT
            self._group = dist.ProcessGroupNCCL(dist.PrefixStore("nccl", store), rank, size, options)
        else:
            self._group = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, TIMEOUT)

    def sum_(self, *tensors: torch.Tensor) -> None:
        """Add up each tensor over all drafters, in place, on the current stream."""
        if self._group is None:
            return
        works = [self._group.allreduce([tensor]) for tensor in tensors]
        for work in works:
            work.wait()
