"""A target's layers in float8, for features at less time and memory: torchao's dynamic quantization, row by row.

Owns which layers, and what must be there for it. Embedding and LM head stay: the drafter computes with them.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

import torch
from torch import nn

from draftmill.errors import InputError
from draftmill.float8 import check_devices
from draftmill.target.model import Target

ROUTERS = ("router", "gate")
"""Last parts of the names of layers that choose experts, where rounding changes who is chosen."""


def check_float8(devices: Sequence[torch.device]) -> None:
    """Raise InputError where torchao is missing or a device cannot multiply in float8."""
    check_devices("target.quantize", devices)
    if importlib.util.find_spec("torchao") is None:
        raise InputError("target.quantize: float8 needs the package torchao; pip install torchao")


def quantize_layers(target: Target) -> int:
    """Put the linear layers of the target's decoder layers into float8, in place; how many they are.

    Weights are rounded once, a scale for each output row; activations as they come, a scale for each token. Experts
    that are no linear modules, routers, and layers whose sides are no multiples of 16 stay as they are.
    """
    from torchao.quantization import Float8DynamicActivationFloat8WeightConfig, PerRow, quantize_

    chosen: list[str] = []

    def is_chosen(module: nn.Module, name: str) -> bool:
        found = (
            isinstance(module, nn.Linear)
            and name.rpartition(".")[2] not in ROUTERS
            and module.in_features % 16 == 0
            and module.out_features % 16 == 0
        )
        if found:
            chosen.append(name)
        return found

    # The compiler's settings are the process's, and other workers' too.
    config = Float8DynamicActivationFloat8WeightConfig(granularity=PerRow(), set_inductor_config=False)
    quantize_(target.layers, config, filter_fn=is_chosen)
    return len(chosen)
