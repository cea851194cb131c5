"""`target.devices: auto` and `drafter.devices: auto` on several GPUs: the split that `draftmill plan` finds best.

Owns when devices are chosen, and how a choice reaches the run's configuration. On a CPU, on one GPU, and where one of
the two lists is given, nothing is measured: placement (pipeline/placement.py) says what is left over.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import yaml

from draftmill.config import Config
from draftmill.errors import InputError
from draftmill.monitor.layout import CONFIG_FILE, ENVIRONMENT_FILE, write_config
from draftmill.monitor.phases import Phase
from draftmill.monitor.run import RunDirectory
from draftmill.monitor.state import write_json
from draftmill.pipeline.meeting import Meeting
from draftmill.train.planning_batches import batch_sizes
from draftmill.train.planning_costs import Costs, measure, read_costs
from draftmill.train.planning_splits import NOTHING_FITS, Pace, Split, pace_of, splits
from draftmill.train.setup import Setup, set_up

SHOWN = 3
"""Splits told in the log."""


def devices_as_before(config: Config, run_dir: Path) -> Config:
    """The same configuration with the devices that a run in this directory was given, where they were left to it.

    A run that is gone on with keeps its drafters: another measurement could choose another number of them.
    """
    if not _is_open(config) or not (run_dir / CONFIG_FILE).is_file():
        return config
    try:
        before = yaml.safe_load((run_dir / CONFIG_FILE).read_text(encoding="utf-8"))
        targets, drafters = before["target"]["devices"], before["drafter"]["devices"]
    except (OSError, UnicodeDecodeError, yaml.YAMLError, KeyError, TypeError):
        return config  # whoever resumes is told by the checkpoint what does not fit
    return config if "auto" in (targets, drafters) else _with_devices(config, targets, drafters)


def check_costs(setup: Setup) -> None:
    """Raise InputError where devices are to be chosen by a file of costs that can't be used."""
    config = setup.config
    if config.pipeline.costs is not None and setup.hosts.rank == 0 and _is_open(config):
        read_costs(config.pipeline.costs).check_same(config, config.pipeline.costs)


def with_best_split(
    setup: Setup, run: RunDirectory, meeting: Meeting, environment: Callable[[Setup], dict[str, Any]]
) -> Setup:
    """The setup with the devices that are fastest by measured or given costs; the same one where there is no choice.

    The first host measures and decides for all. Writes the choice into the run's configuration, and into its
    environment as `environment` describes it. Raises InputError where nothing fits, or the costs can't be used.
    """
    num_gpus = torch.cuda.device_count()
    if not _is_open(setup.config) or num_gpus < 2:
        return setup
    run.phase(Phase.STARTING, "choosing devices")
    found = meeting.first_decides(
        "choosing devices", lambda: _best(setup, run, num_gpus), lambda devices: devices, run.stop_requested
    )
    chosen = set_up(_with_devices(setup.config, *found), setup.hosts)
    write_config(run.path, chosen.config.to_yaml())
    write_json(run.path / ENVIRONMENT_FILE, environment(chosen))
    return chosen


def _is_open(config: Config) -> bool:
    return config.target.devices == config.drafter.devices == "auto"


def _with_devices(config: Config, targets: Any, drafters: Any) -> Config:
    return config.model_copy(
        update={
            "target": config.target.model_copy(update={"devices": targets}),
            "drafter": config.drafter.model_copy(update={"devices": drafters}),
        }
    )


def _best(setup: Setup, run: RunDirectory, num_gpus: int) -> tuple[Any, Any]:
    file = setup.config.pipeline.costs
    if file is None:
        run.log.info(f"measuring a target and a drafter, to choose among the splits of {num_gpus} GPUs...")
        costs = measure(setup)
        _let_go()
    else:
        costs = read_costs(file)
    train = setup.config.train
    pace = pace_of(costs, batch_sizes(setup.plan, setup.store.lengths), train.accumulate, train.anchor_draws)
    found = splits(costs, pace, num_gpus)
    for line in _told(costs, pace, found, train.accumulate):
        run.log.info(line)
    if not found[0].fits:
        raise InputError(f"no split of {num_gpus} GPUs fits: {NOTHING_FITS}")
    return found[0].devices()


def _told(costs: Costs, pace: Pace, found: list[Split], accumulate: int) -> list[str]:
    lines = [
        f"a batch takes {1e3 * pace.target_s:.4g} ms on a target ({costs.target_step or 'as given'}) and "
        f"{1e3 * pace.drafter_s:.4g} ms on a drafter ({costs.drafter_step or 'as given'})"
    ]
    for split in [split for split in found if split.fits][:SHOWN]:
        what = f"{split.targets} of both" if split.shared else f"{split.targets} targets + {split.drafters} drafters"
        lines.append(
            f"  {what}: {split.ktokens_per_s:.4g} Ktok/s expected, bounded by {split.bottleneck}; "
            f"{split.batches_per_step(accumulate)} batches a step"
        )
    return lines


def _let_go() -> None:
    """Give back what the measuring took, before the run takes its own."""
    gc.collect()
    torch.cuda.empty_cache()
