"""Targets read from disk and put on their devices, with progress. Weights are read once a host; each further replica is
copied from the first on its way to its device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from draftmill.drafter.initial import weights_from_target
from draftmill.drafter.network import Drafter
from draftmill.monitor.phases import Phase
from draftmill.monitor.run import RunDirectory
from draftmill.target.features import TapsReplica
from draftmill.target.head import TargetHead
from draftmill.target.load import TargetSource, is_quantized
from draftmill.target.model import Target
from draftmill.target.output_check import check_output
from draftmill.train.setup import Setup


@dataclass(frozen=True)
class Loaded:
    """What was read from the target: a cut replica a device, the head, and first weights for the drafters."""

    targets: list[TapsReplica]
    head: TargetHead
    weights: dict[str, torch.Tensor] | None


def load_targets(setup: Setup, run: RunDirectory) -> Loaded:
    """Read the target once, put a replica on each target device, with progress in log and phase.

    Raises InputError for a target that can't be loaded, does not fit, or can't be read as the run would read it.
    """
    settings, groups = setup.config.target, setup.placement.targets
    run.log.info(f"Loading {len(groups)} target model{'s' if len(groups) > 1 else ''}...")
    source = TargetSource.of(settings)
    first = source.read(groups[0])
    head = first.head()
    weights = _first_weights(setup, first)
    packed = setup.config.data.batching == "packed"
    if setup.rule.needs_target:
        check_output(first, head)
    replicas: list[TapsReplica] = []
    for index, group in enumerate(groups):
        run.phase(Phase.LOADING_TARGETS, f"{index + 1}/{len(groups)}")
        run.log.info(f"  Target {index} on {' + '.join(str(device) for device in group)}...")
        stays = index == 0 and (group[0].type == "cpu" or is_quantized(first.config))
        target = source.place(first, group, setup.last_layer, move=stays)
        replicas.append(TapsReplica(target, setup.taps, settings.step, packed, replicas[0] if replicas else None))
    return Loaded(replicas, head, weights)


def _first_weights(setup: Setup, target: Target) -> dict[str, torch.Tensor] | None:
    """What the drafters start from; None leaves them random."""
    drafter = setup.config.drafter
    if setup.warm_weights is not None:
        return setup.warm_weights
    if drafter.init == "normal":
        return None
    final_norm = getattr(target.decoder, "norm", None)
    return weights_from_target(first_drafter(setup), target.layers, final_norm)


def first_drafter(setup: Setup) -> Drafter:
    """The network with the run's random first weights, the same on every device and host."""
    return Drafter(setup.shape, seed=setup.config.run.seed)
