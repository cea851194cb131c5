"""How fast a run would be with each split of the devices between targets and drafters, from measured costs.

Owns the model: targets and drafters work beside one another, and the slower side sets the pace. Measures nothing. What
it leaves out (waiting in between, transfers, launches that compete for one Python) makes a real run slower.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from draftmill.errors import InputError
from draftmill.train.planning_batches import BatchSizes
from draftmill.train.planning_costs import Costs

NOTHING_FITS = (
    "lower data.token_budget, data.min_rows, data.max_length or train.num_anchors, or spread the target over several "
    "devices"
)
"""What to do then."""
KEPT_FREE = 0.05
"""Share of a device's memory that a plan leaves to the driver, the libraries and the allocator's gaps."""


@dataclass(frozen=True)
class Pace:
    """Mean seconds of one batch of an epoch, on one replica.

    target_s           a forward
    drafter_s          forward and backward, and the batch's share of the update; all of it once for each anchor draw
    reduced_drafter_s  the same with the batch's share of the all-reduce, as with several drafters
    tokens             real tokens
    num_batches        of an epoch
    """

    target_s: float
    drafter_s: float
    reduced_drafter_s: float
    tokens: float
    num_batches: int


@dataclass(frozen=True)
class Split:
    """One way of using the devices, and what it would give.

    shared         whether every device holds a target and a drafter
    batches_per_s  over all devices
    bottleneck     the side that the other waits for, "both" where they take turns on shared devices
    busy           share of the time that targets and drafters work
    target_bytes, drafter_bytes  at the peak of a device that holds one, both where it is shared; None: not known
    free_bytes     what the fullest device has left, None: not known
    fits           whether that is enough
    num_devices, group  devices in all, and of one target
    """

    targets: int
    drafters: int
    shared: bool
    batches_per_s: float
    ktokens_per_s: float
    epoch_hours: float
    bottleneck: str
    target_busy: float
    drafter_busy: float
    target_bytes: int | None
    drafter_bytes: int | None
    free_bytes: int | None
    fits: bool
    num_devices: int
    group: int

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return asdict(self)

    def batches_per_step(self, accumulate: int) -> int:
        """Batches of one optimizer step, over all drafters."""
        return self.drafters * accumulate

    def devices(self) -> tuple[Any, Any]:
        """`target.devices` and `drafter.devices` as a configuration has them, CUDA devices numbered from 0."""
        names = [f"cuda:{index}" for index in range(self.num_devices)]
        if self.shared:
            return names, names
        group = self.group
        targets = [names[index * group : (index + 1) * group] for index in range(self.targets)]
        return [each[0] if group == 1 else each for each in targets], names[self.targets * group :]


def pace_of(costs: Costs, sizes: BatchSizes, accumulate: int, draws: int) -> Pace:
    """Mean costs of a batch. Raises InputError where the costs are of other buckets than the data's."""
    measured = {each.bucket: each for each in costs.buckets}
    if missing := sorted(set(sizes.buckets) - set(measured)):
        raise InputError(
            f"the costs are of length buckets {sorted(measured)}, the data has batches in {sizes.buckets} "
            f"(not measured: {missing}); measure them on this data"
        )
    target_s = drafter_s = 0.0
    for bucket in sizes.buckets:
        padded = sizes.padded[sizes.bucket == bucket]
        share = float(padded.sum()) / measured[bucket].num_padded
        target_s += share * measured[bucket].target_s
        drafter_s += len(padded) * measured[bucket].drafter_s  # its shape is the same for every batch
    count = len(sizes.bucket)
    alone = draws * (drafter_s / count + costs.update_s / accumulate)
    return Pace(
        target_s=target_s / count,
        drafter_s=alone,
        reduced_drafter_s=alone + draws * costs.all_reduce_s / accumulate,
        tokens=float(np.mean(sizes.real)),
        num_batches=count,
    )


def splits(costs: Costs, pace: Pace, num_devices: int) -> list[Split]:
    """Every split of the devices, the fastest that fits first, those that do not fit last.

    Raises InputError where there are too few devices for one target and one drafter.
    """
    found = []
    if costs.group == 1:
        found.append(_shared(costs, pace, num_devices))
    for targets in range(1, (num_devices - 1) // costs.group + 1):
        found.append(_apart(costs, pace, targets, num_devices - targets * costs.group, num_devices))
    if not found:
        raise InputError(
            f"{num_devices} devices are too few: a target takes {costs.group}, a drafter one; give --num-devices "
            "or fewer devices to a target"
        )
    return sorted(found, key=lambda split: (not split.fits, -split.batches_per_s))


def _apart(costs: Costs, pace: Pace, targets: int, drafters: int, num_devices: int) -> Split:
    step_s = pace.drafter_s if drafters == 1 else pace.reduced_drafter_s
    target_rate, drafter_rate = targets / pace.target_s, drafters / step_s
    rate = min(target_rate, drafter_rate)
    known = [size for size in (costs.target_bytes, costs.drafter_bytes) if size is not None]
    return _split(
        costs,
        pace,
        rate,
        max(known) if known else None,
        targets=targets,
        drafters=drafters,
        shared=False,
        bottleneck="targets" if target_rate < drafter_rate else "drafters",
        target_busy=rate / target_rate,
        drafter_busy=rate / drafter_rate,
        num_devices=num_devices,
    )


def _shared(costs: Costs, pace: Pace, num_devices: int) -> Split:
    step_s = pace.drafter_s if num_devices == 1 else pace.reduced_drafter_s
    rate = num_devices / (pace.target_s + step_s)
    known = costs.target_bytes is not None and costs.drafter_bytes is not None
    return _split(
        costs,
        pace,
        rate,
        (costs.target_bytes or 0) + (costs.drafter_bytes or 0) if known else None,
        targets=num_devices,
        drafters=num_devices,
        shared=True,
        bottleneck="both",
        target_busy=rate * pace.target_s / num_devices,
        drafter_busy=rate * step_s / num_devices,
        num_devices=num_devices,
    )


def _split(costs: Costs, pace: Pace, rate: float, fullest: int | None, **of_split: Any) -> Split:
    free = None if costs.device_bytes is None or fullest is None else costs.device_bytes - fullest
    return Split(
        batches_per_s=rate,
        ktokens_per_s=rate * pace.tokens / 1e3,
        epoch_hours=pace.num_batches / rate / 3600.0,
        target_bytes=costs.target_bytes,
        drafter_bytes=costs.drafter_bytes,
        free_bytes=free,
        fits=free is None or costs.device_bytes is None or free >= KEPT_FREE * costs.device_bytes,
        group=costs.group,
        **of_split,
    )
