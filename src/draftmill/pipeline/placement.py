"""Which replica runs on which device.

Turns the configuration's device names into torch devices that exist here. Chooses where it says auto; refuses, by name,
what this host does not have.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from draftmill.config import Devices, cuda_index
from draftmill.errors import InputError


@dataclass(frozen=True)
class Placement:
    """The devices of this host's replicas; a target's group of several devices holds one replica."""

    targets: tuple[tuple[torch.device, ...], ...]
    drafters: tuple[torch.device, ...]

    @property
    def uses_cuda(self) -> bool:
        """Whether any replica is on a GPU."""
        return any(d.type == "cuda" for d in (*self.drafters, *(d for group in self.targets for d in group)))

    def make_current(self) -> None:
        """Let this thread, which pins memory, have its CUDA context on a GPU of the run and on no other."""
        if self.uses_cuda:
            torch.cuda.set_device(self.targets[0][0])


def ask_for_queues() -> None:
    """Have CUDA give a device 32 queues in place of 8, before it is first used, unless the environment says how many.

    A device runs what stands in one queue in order, whichever streams it came from. A target, a drafter, the sum of
    gradients and copies of features, each on streams of their own, would wait for one another in 8.
    """
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")


def place(targets: Devices, drafters: Devices) -> Placement:
    """Resolve both lists. Raises InputError for a device that is not here, and for a mixture of CPU and CUDA."""
    if targets == "auto" and drafters == "auto":
        targets, drafters = _choose(torch.cuda.device_count())
    elif targets == "auto":
        targets = _others(drafters)
    elif drafters == "auto":
        drafters = _others(targets)
    groups = tuple(
        tuple(_device(name, "target.devices") for name in (group if isinstance(group, list) else [group]))
        for group in targets
    )
    singles = tuple(_device(str(name), "drafter.devices") for name in drafters)
    kinds = sorted({device.type for device in (*singles, *(device for group in groups for device in group))})
    if len(kinds) > 1:  # slots are handed over by events of CUDA, or by nothing where a call is done when it returns
        raise InputError(
            f"targets and drafters must all be on CUDA or all on the CPU, got {' and '.join(kinds)}; change "
            "target.devices or drafter.devices"
        )
    if doubled := sorted({str(device) for device in singles if device.type == "cuda" and singles.count(device) > 1}):
        raise InputError(
            f"drafter.devices names {', '.join(doubled)} more than once; drafters sum their gradients over NCCL, which "
            "takes one of them a GPU (train.accumulate makes a step of more batches)"
        )
    return Placement(groups, singles)


def _others(given: Devices) -> Devices:
    """The GPUs that are not in the list, or those in it where none is left; the CPU beside the CPU."""
    names = [name for device in given for name in (device if isinstance(device, list) else [device])]
    if "cpu" in names:
        return ["cpu"]
    gpus = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    return [gpu for gpu in gpus if gpu not in names] or list(dict.fromkeys(names))


def _choose(num_gpus: int) -> tuple[Devices, Devices]:
    """Five targets to three drafters, as near as the GPUs allow; both on the only device where there is one.

    Where nothing was measured: training with several GPUs takes what `draftmill plan` finds best.
    """
    if num_gpus == 0:
        return ["cpu"], ["cpu"]
    if num_gpus == 1:
        return ["cuda:0"], ["cuda:0"]
    num_targets = min(num_gpus - 1, max(1, round(num_gpus * 5 / 8)))
    names = [f"cuda:{index}" for index in range(num_gpus)]
    return list(names[:num_targets]), list(names[num_targets:])


def _device(name: str, field: str) -> torch.device:
    index, available = cuda_index(name), torch.cuda.device_count()
    if index is not None and index >= available:
        here = f"cuda:0..{available - 1}" if available else "no CUDA device, only cpu"
        raise InputError(f"{field}: {name} is not on this host, which has {here}")
    return torch.device(name)


def has_bfloat16(device: torch.device) -> bool:
    """Whether the device computes bfloat16 in hardware: CUDA from Ampere on, CPUs with AVX512-BF16 or AMX."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    checks = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, name, lambda: False)() for name in checks)
