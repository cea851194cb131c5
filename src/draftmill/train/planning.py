"""`draftmill plan`: measured or given costs in, every split of the devices out, best first."""

from __future__ import annotations

import json
from typing import Any

from rich.console import Console
from rich.table import Table

from draftmill.config import Config
from draftmill.errors import InputError
from draftmill.pipeline.collective import Hosts
from draftmill.train.planning_batches import batch_sizes
from draftmill.train.planning_costs import Costs, measure, read_costs
from draftmill.train.planning_splits import NOTHING_FITS, Pace, Split, pace_of, splits
from draftmill.train.setup import Setup, set_up

GIB = 2**30
SHOWN = 12
"""Splits shown in the table; JSON has all."""


def plan(config: Config, costs_file: str | None, num_devices: int | None, as_json: bool) -> list[Split]:
    """The command: measure or read costs, predict, print. Raises InputError.

    num_devices: devices to plan for; None: those of the configuration.
    """
    if num_devices is not None and num_devices < 1:
        raise InputError(f"--num-devices must be at least 1, got {num_devices}")
    setup = set_up(config, Hosts())
    if costs_file is None:
        costs = measure(setup)
    else:
        costs = read_costs(costs_file)
        costs.check_same(config, costs_file)
    pace = pace_of(
        costs, batch_sizes(setup.plan, setup.store.lengths), config.train.accumulate, config.train.anchor_draws
    )
    count = num_devices if num_devices is not None else _devices_of(setup)
    found = splits(costs, pace, count)
    if as_json:
        print(json.dumps(_to_json(setup, costs, pace, found, count)))
    else:
        _show(setup, costs, pace, found)
    return found


def _devices_of(setup: Setup) -> int:
    """Devices that the configuration names. All CPU workers share the cores: they are one device."""
    placement = setup.placement
    used = {*placement.drafters, *(device for group in placement.targets for device in group)}
    return len(used)


def _to_json(setup: Setup, costs: Costs, pace: Pace, found: list[Split], num_devices: int) -> dict[str, Any]:
    return {
        "num_devices": num_devices,
        "batches_per_epoch": pace.num_batches,
        "tokens_per_batch": pace.tokens,
        "context_slots": setup.step_shape.context_slots,
        "anchor_slots": setup.step_shape.anchor_slots,
        "target_s_per_batch": pace.target_s,
        "drafter_s_per_batch": pace.drafter_s,
        "costs": costs.to_dict(),
        "splits": [split.to_dict() for split in found],
        "best": found[0].to_dict() if found[0].fits else None,
    }


def _show(setup: Setup, costs: Costs, pace: Pace, found: list[Split]) -> None:
    console = Console(highlight=False)
    for line in _facts(setup, costs, pace):
        console.print(line, soft_wrap=True, markup=False)
    console.print(_table(found))
    for line in _advice(costs, found, setup.config.train.accumulate):
        console.print(line, soft_wrap=True, markup=False)


def _facts(setup: Setup, costs: Costs, pace: Pace) -> list[str]:
    per_bucket = ", ".join(
        f"{each.bucket}: {_short(1e3 * each.target_s)} / {_short(1e3 * each.drafter_s)} ms ({each.num_padded} tokens)"
        for each in costs.buckets
    )
    lines = [
        f"data     {pace.num_batches} batches an epoch of {pace.tokens:.0f} tokens on average",
        f"costs    {costs.device}; target / drafter by bucket {per_bucket}; update {_short(1e3 * costs.update_s)} ms",
        f"a batch  {_short(1e3 * pace.target_s, 4)} ms on a target, {_short(1e3 * pace.drafter_s, 4)} ms on a drafter",
    ]
    if costs.device_bytes is not None:
        lines.append(
            f"memory   target {_gib(costs.target_bytes)}, drafter {_gib(costs.drafter_bytes)} at the largest batch, "
            f"of {_gib(costs.device_bytes)} a device"
        )
    if costs.target_step:
        lines.append(f"target   {costs.target_step}")
    if costs.drafter_step:
        lines.append(f"drafter  {costs.drafter_step}")
    return lines


def _table(found: list[Split]) -> Table:
    table = Table(box=None, pad_edge=False)
    for title in ("targets + drafters", "ktok/s", "hours an epoch", "slower side", "busy", "free"):
        right = title not in ("targets + drafters", "slower side")
        table.add_column(title, justify="right" if right else "left", no_wrap=True)
    for split in found[:SHOWN]:
        targets = f"{split.targets}" + (f" x {split.group} devices" if split.group > 1 else "")
        table.add_row(
            f"{split.targets} of both" if split.shared else f"{targets} + {split.drafters}",
            _short(split.ktokens_per_s, 4),
            _short(split.epoch_hours),
            split.bottleneck,
            f"{100 * split.target_busy:.0f} + {100 * split.drafter_busy:.0f} %",
            _gib(split.free_bytes) if split.fits else "no room",
        )
    return table


def _advice(costs: Costs, found: list[Split], accumulate: int) -> list[str]:
    best = found[0]
    if not best.fits:
        return [f"nothing fits: {NOTHING_FITS}"]
    if costs.device_bytes is None:
        return ["best     all CPU workers share the cores: target and drafter take turns, however many there are"]
    targets, drafters = best.devices()
    lines = [
        f"best     target.devices={json.dumps(targets)} drafter.devices={json.dumps(drafters)}",
        f"         a step is then {best.batches_per_step(accumulate)} batches (drafters x train.accumulate), which "
        "changes what is learned and not only how fast",
    ]
    if best.num_devices > 1 and costs.all_reduce_s == 0.0:
        lines.append("         the gradient's all-reduce is not counted: it was not measured (costs.all_reduce_s)")
    return lines


def _short(value: float, digits: int = 3) -> str:
    """So many significant digits, and never an exponent for a large number."""
    return f"{value:,.0f}" if value >= 10**digits else f"{value:.{digits}g}"


def _gib(num_bytes: int | None) -> str:
    return "unknown" if num_bytes is None else f"{num_bytes / GIB:.1f} GiB"
