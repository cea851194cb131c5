"""Before a run takes its GPUs: who else holds their memory, and whether what it will surely need is free.

Owns the least that a run needs on a device: weights, masters, moments, and the buffers whose sizes are known before
anything is loaded. Activations come on top; whether those fit is found out by the first, largest batch.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

import torch

from draftmill.drafter.network import Drafter
from draftmill.errors import InputError
from draftmill.monitor.gpus import Gpu, GpuProcess, read_gpus
from draftmill.target.load import DTYPES, empty_target, is_quantized
from draftmill.train.assemble import num_slots
from draftmill.train.setup import Setup

GIB = 2**30
NOTICED = 2 * GIB
"""Memory without a process that is taken for others'; less is the driver's own, and this process's context."""
Reading = Callable[[], tuple[list[Gpu], str]]
"""The machine's GPUs now, and a note where they can't be read."""


@dataclass(frozen=True)
class Needs:
    """Least bytes of a replica on a device; `target` is None where it can't be told before it is loaded."""

    target: int | None
    drafter: int


@dataclass(frozen=True)
class Held:
    """A device's memory, and what others hold of it."""

    device: str
    total_bytes: int
    others_bytes: int
    others: tuple[GpuProcess, ...]

    def line(self) -> str:
        """For the log."""
        who = "; ".join(_shown(process) for process in self.others) or "by processes that can't be seen from here"
        return f"{self.device}: {_gib(self.others_bytes)} of {_gib(self.total_bytes)} are held by others: {who}"


def held_by_others(uuids: dict[str, str], reading: Reading = read_gpus) -> list[Held]:
    """Those of these devices (name -> UUID) of which others hold memory, as far as the driver tells."""
    gpus = {gpu.uuid.removeprefix("GPU-"): gpu for gpu in (reading()[0] if uuids else [])}
    found = []
    for device, uuid in sorted(uuids.items()):
        gpu = gpus.get(uuid.removeprefix("GPU-"))
        if gpu is not None:
            others = tuple(process for process in gpu.processes if process.pid != os.getpid())
            others_bytes = max(0, gpu.used_bytes - _own_bytes(gpu, device))
            if others or others_bytes > NOTICED:
                found.append(Held(device, gpu.total_bytes, others_bytes, others))
    return found


def check_memory(setup: Setup, held: list[Held], needs: Needs | None = None) -> None:
    """Raise InputError where others leave a device less than the run needs at least, naming them and what to do."""
    if not held:
        return
    needs = least_needs(setup) if needs is None else needs
    drafters = {str(device) for device in setup.placement.drafters}
    targets = {str(device): len(group) for group in setup.placement.targets for device in group}
    for one in held:
        target = (needs.target or 0) // targets.get(one.device, 1) if one.device in targets else 0
        drafter = needs.drafter if one.device in drafters else 0
        free = one.total_bytes - one.others_bytes
        if target + drafter > free:
            parts = [
                f"{_gib(size)} for the {name}" for name, size in (("target", target), ("drafter", drafter)) if size
            ]
            raise InputError(
                f"{one.device} has {_gib(free)} free, and the run needs at least {' and '.join(parts)} there. "
                f"{one.line()}. End them (draftmill stop, kill), or name other devices in target.devices and "
                "drafter.devices"
            )


def least_needs(setup: Setup) -> Needs:
    """The least bytes of a target replica and of a drafter replica, from their shapes alone."""
    return Needs(_target_bytes(setup), _drafter_bytes(setup))


def _target_bytes(setup: Setup) -> int | None:
    settings = setup.config.target
    if is_quantized(setup.target_config):
        return None  # how many bytes a weight takes is its method's secret
    target = empty_target(settings.model, setup.target_config, settings.trust_remote_code)
    target.cut_after(setup.last_layer)
    dtype = DTYPES[settings.dtype]
    weights = {id(tensor): tensor for tensor in target.model.parameters()}.values()
    return sum(
        tensor.numel() * (dtype.itemsize if isinstance(dtype, torch.dtype) else tensor.element_size())
        for tensor in weights
    )


def _drafter_bytes(setup: Setup) -> int:
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in Drafter(setup.shape).parameters())
    one = setup.dtype.itemsize
    train = setup.config.train
    # Muon keeps one moment of a matrix, and matrices are nearly all.
    masters, moments = 4 * size, (4 if train.optimizer == "muon" else 8) * size
    masters += 4 * size if train.ema_decay is not None else 0
    masters += 4 * size if setup.stream.accumulate > 1 else 0  # on a GPU a step's sum is apart in any type
    copies = size * one + (0 if setup.dtype == torch.float32 else size * one)  # gradient, and weights beside masters
    shape, slots = setup.shape, setup.step_shape
    # In float8 the head is there twice more, a byte an element.
    head = shape.vocab_size * shape.hidden_size * (one if setup.config.drafter.float8 is None else one + 2)
    features = (num_slots(setup) + 1) * slots.context_slots * setup.carried_size * one
    return masters + moments + copies + head + features


def _own_bytes(gpu: Gpu, device: str) -> int:
    """What this process holds: as the driver lists it, else what its allocator has taken."""
    held = [process.used_bytes for process in gpu.processes if process.pid == os.getpid()]
    if held and None not in held:
        return sum(used for used in held if used is not None)
    return torch.cuda.memory_reserved(device) if torch.cuda.is_available() else 0


def _shown(process: GpuProcess) -> str:
    size = "" if process.used_bytes is None else f" {_gib(process.used_bytes)}"
    return f"process {process.pid}{f' ({process.name})' if process.name else ''}{size}"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f} GiB"
