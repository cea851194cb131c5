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
from draftmill.records import HostBatch
from draftmill.target.head import TargetHead
from draftmill.target.load import load_target
from draftmill.target.model import Target
from draftmill.train.setup import Setup


class TapsReplica:
    """A cut target on one device, giving its tapped layers' outputs."""

    def __init__(self, target: Target, layer_ids: tuple[int, ...]) -> None:
        self.target, self.layer_ids = target, layer_ids

    def forward(self, batch: HostBatch) -> list[torch.Tensor]:
        """L tensors [B, S, H] of the batch's rows, right padding included."""
        device = self.target.device
        tokens = batch.tokens_BS.to(device, non_blocking=True)
        with self.target.taps(self.layer_ids) as taps:
            self.target.forward_layers(tokens)
            return [taps.outputs[layer] for layer in self.layer_ids]


@dataclass(frozen=True)
class Loaded:
    """What was read from the target: a cut replica a device, the head, and first weights for the drafters."""

    targets: list[Target]
    head: TargetHead
    weights: dict[str, torch.Tensor] | None


def load_targets(setup: Setup, run: RunDirectory) -> Loaded:
    """Read the target once, put a replica on each target device, with progress in log and phase."""
    settings, groups = setup.config.target, setup.placement.targets
    run.log.info(f"Loading {len(groups)} target model{'s' if len(groups) > 1 else ''}...")
    first = load_target(
        settings.model,
        dtype=settings.dtype,
        revision=settings.revision,
        trust_remote_code=settings.trust_remote_code,
        with_tokenizer=False,
    )
    head = first.head()
    weights = _first_weights(setup, first)
    first.cut_after(setup.shape.target_layer_ids[-1])
    targets = []
    for index, group in enumerate(groups):
        run.phase(Phase.LOADING_TARGETS, f"{index + 1}/{len(groups)}")
        run.log.info(f"  Target {index} on {group[0]}...")
        targets.append(first if group[0].type == "cpu" and index == 0 else first.replica(group[0]))
    return Loaded(targets, head, weights)


def _first_weights(setup: Setup, target: Target) -> dict[str, torch.Tensor] | None:
    """What the drafters start from; None leaves them random."""
    drafter = setup.config.drafter
    if setup.warm_weights is not None:
        return setup.warm_weights
    if drafter.init == "normal":
        return None
    final_norm = getattr(target.model.get_decoder(), "norm", None)
    return weights_from_target(first_drafter(setup), target.layers, final_norm)


def first_drafter(setup: Setup) -> Drafter:
    """The network with the run's random first weights, the same on every device and host."""
    return Drafter(setup.shape, seed=setup.config.run.seed)
