"""What a target forward and a drafter step cost on the devices at hand, measured on the run's own data, or read back.

One batch of middle size stands for its length bucket, its time in proportion to the tokens of its rows. The largest
batch runs first, so that the memory counted is what the run needs at most. Owns the file of measured costs.
"""

from __future__ import annotations

import gc
import json
import logging
import platform
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

from draftmill.config import Config
from draftmill.data.loader import Loader
from draftmill.errors import InputError
from draftmill.pipeline.channel import Slot
from draftmill.pipeline.features import pack
from draftmill.records import BatchKind, HostBatch, WorkItem
from draftmill.step.bench import on_own_stream, timed
from draftmill.target.features import DoesNotFit, TapsReplica
from draftmill.target.head import TargetHead
from draftmill.target.load import TargetSource
from draftmill.train.assemble import build_replica, num_slots
from draftmill.train.loading import Loaded
from draftmill.train.planning_batches import batch_sizes
from draftmill.train.planning_worst import StepDoesNotFit
from draftmill.train.replica import Replica
from draftmill.train.setup import Setup

_logger = logging.getLogger(__name__)

TIMED_RUNS = 3


@dataclass(frozen=True)
class BucketCost:
    """Seconds of one batch of a length bucket.

    num_padded   tokens of its rows, padding included
    target_s     a forward up to the last tap, and its features packed
    drafter_s    forward and backward of a drafter step
    """

    bucket: int
    num_padded: int
    target_s: float
    drafter_s: float


@dataclass(frozen=True)
class Costs:
    """Measured costs of one replica of each kind. Bytes are of one device, at the largest batch.

    device          what they were measured on
    device_bytes    memory of such a device, None where it is shared with all else (a CPU)
    group           devices of one target
    target_bytes, drafter_bytes  at the peak, weights included; None where it can't be told
    update_s        one optimizer update
    all_reduce_s    summing the gradient over all drafters, 0 where it was not measured
    target_step, drafter_step  how they ran
    measured_for    the settings that costs depend on most, by dotted name; empty where a file does not say
    """

    device: str
    device_bytes: int | None
    group: int
    buckets: tuple[BucketCost, ...]
    update_s: float
    target_bytes: int | None
    drafter_bytes: int | None
    all_reduce_s: float = 0.0
    target_step: str = ""
    drafter_step: str = ""
    measured_for: dict[str, Any] = field(default_factory=dict)

    def check_same(self, config: Config, where: str) -> None:
        """Raise InputError where they were measured for another target, drafter or batch than this configuration's."""
        known = {**_BEFORE_IT_WAS_TOLD, **self.measured_for} if self.measured_for else {}
        for name, value in settings_of(config).items():
            if (before := known.get(name, value)) != value:
                raise InputError(
                    f"{where} was measured with {name}={before}, this run has {value}; measure again, with "
                    "draftmill plan RUN.YAML --json > FILE"
                )

    def to_dict(self) -> dict[str, Any]:
        """JSON-able mapping that `from_dict` reads back."""
        return asdict(self)

    @classmethod
    def from_dict(cls, raw: Any, where: str) -> Costs:
        """Inverse of `to_dict`. Raises InputError, naming the file and the key, for anything else."""
        if not isinstance(raw, dict):
            raise InputError(f"{where} holds no costs; write them with draftmill plan RUN.YAML --json > FILE")
        names = {field.name for field in fields(cls)}
        needed = names - {"all_reduce_s", "target_step", "drafter_step", "measured_for"}
        if wrong := sorted(set(raw) - names) or sorted(needed - set(raw)):
            known = ", ".join(sorted(names))
            raise InputError(f"{where}: the costs' keys are {known}; {', '.join(wrong)} is unknown or missing")
        try:
            buckets = tuple(BucketCost(**bucket) for bucket in raw["buckets"])
            costs = cls(**{**raw, "buckets": buckets})
            costs._check()
        except (TypeError, ValueError) as error:
            raise InputError(f"{where}: the costs can't be used: {error}") from None
        return costs

    def _check(self) -> None:
        if not self.buckets:
            raise ValueError("no bucket was measured")
        if self.group < 1:
            raise ValueError(f"group must be at least 1, got {self.group}")
        times = [self.update_s, self.all_reduce_s]
        for bucket in self.buckets:
            times += [bucket.target_s, bucket.drafter_s]
            if bucket.num_padded < 1 or bucket.target_s <= 0 or bucket.drafter_s <= 0:
                raise ValueError(f"bucket {bucket.bucket} must have tokens and times above 0, got {bucket}")
        if any(not 0 <= seconds < float("inf") for seconds in times):
            raise ValueError("times must be seconds, 0 or more")


MEASURED_FOR = (
    "target.model",
    "drafter.num_layers",
    "drafter.num_taps",
    "drafter.block_size",
    "drafter.float8",
    "train.num_anchors",
    "train.short_blocks",
    "data.token_budget",
    "data.batching",
)


_BEFORE_IT_WAS_TOLD = {"train.short_blocks": 0.0}
"""Settings that files of an earlier version do not name, and what they were then."""


def settings_of(config: Config) -> dict[str, Any]:
    """The values of the settings that costs depend on most; of the target its name, wherever it lies."""
    found = {name: getattr(getattr(config, name.split(".")[0]), name.split(".")[1]) for name in MEASURED_FOR}
    return {**found, "target.model": Path(config.target.model).name}


def read_costs(path: str) -> Costs:
    """Costs from a file: what `draftmill plan --json` printed, or its `costs` alone. Raises InputError."""
    try:
        lines = Path(path).read_text(encoding="utf-8").strip().splitlines()
    except FileNotFoundError:
        raise InputError(f"no file of costs at {path}; write one with draftmill plan RUN.YAML --json > FILE") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} can't be read: {error}") from None
    raw: Any = None
    for text in (lines[-1] if lines else "", "\n".join(lines)):
        try:
            raw = json.loads(text)
            break
        except ValueError:
            continue
    if raw is None:
        raise InputError(f"{path} is not JSON; write it with draftmill plan RUN.YAML --json > FILE")
    return Costs.from_dict(raw.get("costs", raw) if isinstance(raw, dict) else raw, path)


def measure(setup: Setup) -> Costs:
    """Load one target and build one drafter, one after the other, as the run would, and time them on its batches.

    Raises InputError for a target that can't be loaded or does not fit.
    """
    chosen = Chosen.of(setup)
    group, device = setup.placement.targets[0], setup.placement.drafters[0]
    with on_own_stream(group[-1]):
        _forget_peaks(group)
        head, target_s, target_bytes, target_step = _loaded_and_timed(setup, chosen)
    with on_own_stream(device):
        _forget_peaks([device])
        try:
            replica = build_replica(setup, Loaded([], head, None), device, _logger)
            drafter_s, update_s = time_drafter(setup, replica, chosen)
        except torch.OutOfMemoryError:
            raise InputError(str(StepDoesNotFit(setup, device))) from None
        drafter_bytes, drafter_step = _peak([device]), replica.report
    return costs_of(
        setup,
        chosen,
        target_s,
        drafter_s,
        update_s,
        target_bytes=target_bytes,
        drafter_bytes=drafter_bytes,
        target_step=target_step,
        drafter_step=drafter_step,
    )


@dataclass(frozen=True)
class Chosen:
    """The batches that costs are measured on: the largest, and of each length bucket that of middle size.

    batches   by index in the first epoch, on the host
    worst     index of the largest
    buckets   length bucket -> index
    """

    batches: dict[int, HostBatch]
    worst: int
    buckets: dict[int, int]

    @classmethod
    def of(cls, setup: Setup) -> Chosen:
        """Read them."""
        sizes = batch_sizes(setup.plan, setup.store.lengths)
        buckets, worst = {bucket: sizes.middle(bucket) for bucket in sizes.buckets}, sizes.largest()
        return cls(_read(setup, list(dict.fromkeys([worst, *buckets.values()]))), worst, buckets)


def costs_of(
    setup: Setup,
    chosen: Chosen,
    target_s: dict[int, float],
    drafter_s: dict[int, float],
    update_s: float,
    **of_costs: Any,
) -> Costs:
    """Costs from seconds by batch index; `of_costs` gives bytes and ways of running, as in Costs."""
    device = setup.placement.drafters[0]
    cuda = device.type == "cuda"
    return Costs(
        measured_for=settings_of(setup.config),
        device=torch.cuda.get_device_name(device) if cuda else platform.processor() or platform.machine(),
        device_bytes=torch.cuda.get_device_properties(device).total_memory if cuda else None,
        group=len(set(setup.placement.targets[0])),  # CPUs in it share the cores: they are one device
        buckets=tuple(
            BucketCost(bucket, int(chosen.batches[index].tokens_BS.numel()), target_s[index], drafter_s[index])
            for bucket, index in chosen.buckets.items()
        ),
        update_s=update_s,
        **of_costs,
    )


def time_target(setup: Setup, replica: TapsReplica, chosen: Chosen, timed_runs: int = TIMED_RUNS) -> dict[int, float]:
    """Seconds of a forward and its features packed, by batch index, in this thread; the largest batch runs first.

    Raises DoesNotFit.
    """
    device = replica.target.output_device
    features = torch.zeros(setup.step_shape.context_slots, setup.carried_size, device=device, dtype=setup.dtype)

    def forward(batch: HostBatch) -> None:
        taps = replica.forward(batch)
        pack(taps, batch.source_T.to(device, non_blocking=True), features)

    with torch.no_grad():
        forward(chosen.batches[chosen.worst])
        return {
            index: _median(lambda b=batch: forward(b), device, timed_runs)  # type: ignore[misc]
            for index, batch in chosen.batches.items()
        }


def time_drafter(
    setup: Setup, replica: Replica, chosen: Chosen, timed_runs: int = TIMED_RUNS
) -> tuple[dict[int, float], float]:
    """Seconds of a step without its update by batch index, and of the update, in this thread; features are random.

    Beside the replica lie the slots of its channel, as in a run. Raises OutOfMemoryError.
    """
    device = replica.state.device
    size = setup.step_shape.context_slots, setup.carried_size
    slots = [Slot(*size, device, setup.dtype) for _ in range(num_slots(setup))]
    for slot in slots:
        slot.features_TF.normal_()

    def step(batch: HostBatch) -> None:
        slots[0].batch = batch
        replica.begin()
        replica.load(slots[0], 0)
        replica.accumulate()

    step(chosen.batches[chosen.worst])
    seconds = {
        index: _median(lambda b=batch: step(b), device, timed_runs)  # type: ignore[misc]
        for index, batch in chosen.batches.items()
    }
    replica.begin()
    return seconds, _median(lambda: replica.update(0), device, timed_runs)


def _loaded_and_timed(setup: Setup, chosen: Chosen) -> tuple[TargetHead, dict[int, float], int | None, str]:
    """A target read for it: its head, seconds by batch, bytes at the peak, and how it ran."""
    settings, group = setup.config.target, setup.placement.targets[0]
    source = TargetSource.of(settings)
    first = source.read(group)
    head = first.head()
    target = source.place(first, group, setup.last_layer, move=True)
    replica = TapsReplica(target, setup.taps, settings.step, setup.config.data.batching == "packed")
    try:
        seconds = time_target(setup, replica, chosen)
    except DoesNotFit as error:
        raise InputError(str(error)) from None
    return head, seconds, _peak(group), replica.report


def _read(setup: Setup, indices: list[int]) -> dict[int, HostBatch]:
    """These batches of the first epoch, by index."""
    loader = Loader(
        setup.store,
        setup.plan,
        setup.heldout_plan,
        [WorkItem(index, BatchKind.TRAIN, 0, index) for index in indices],
        context_slots=setup.step_shape.context_slots,
        anchor_slots=setup.step_shape.anchor_slots,
        block_size=setup.shape.block_size,
        anchor_draws=1,
        seed=setup.config.run.seed,
        pin=setup.placement.uses_cuda,
        read_ahead=len(indices),
        buffers=len(indices),
        short_blocks=setup.config.train.short_blocks,
    )
    with loader:
        read = [loader.next() for _ in indices]
    return {batch.index: batch for batch in read if batch is not None}


def _forget_peaks(devices: Sequence[torch.device]) -> None:
    """Free what was measured before, and count peaks from here on."""
    gc.collect()
    for device in devices:
        if device.type == "cuda":
            with torch.cuda.device(device):
                torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)


def _peak(devices: Sequence[torch.device]) -> int | None:
    """Bytes of the fullest device; what the allocator holds counts, for a captured graph works in that."""
    found = [torch.cuda.max_memory_reserved(device) for device in devices if device.type == "cuda"]
    return max(found) if found else None


def _median(work: Callable[[], object], device: torch.device, timed_runs: int) -> float:
    return statistics.median(timed(work, device, timed_runs, warm_ups=1))
