"""One target over several devices: consecutive layers on each, inputs moved to a layer's device once a forward.

Owns which part lies where, and the hooks that move tensors. A tensor that several layers of a device share (positions,
rotary tables) crosses over once in a forward: then the first device is free for the next batch while the last one still
works on this one, and as many batches are under way as there are devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from draftmill.target.model import Target

AFTER_LAYERS = ("norm", "ln_f")
"""Parts of the names of what runs after the layers; the rest of the decoder runs before them."""


def parts_of(target: Target, devices: Sequence[torch.device]) -> dict[str, torch.device]:
    """The device of every part of the model, by its path: layers in equal shares of bytes, the rest at the ends."""
    layer_device = dict(zip(map(id, target.layers), _shares(list(target.layers), devices), strict=True))
    parts: dict[str, torch.device] = {}

    def walk(module: nn.Module, prefix: str) -> None:
        for name, child in module.named_children():
            path = f"{prefix}{name}"
            if id(child) in layer_device:
                parts[path] = layer_device[id(child)]
            elif any(id(one) in layer_device for one in child.modules()):
                walk(child, f"{path}.")
            else:
                last = any(part in name for part in (*AFTER_LAYERS, "lm_head"))
                parts[path] = devices[-1] if last else devices[0]

    walk(target.model, "")
    return parts


def spread(target: Target, devices: Sequence[torch.device]) -> Target:
    """A copy of the target over these devices."""
    parts = parts_of(target, devices)
    device_of: dict[int, torch.device] = {}
    for path, device in parts.items():
        module = target.model.get_submodule(path)
        for tensor in (*module.parameters(), *module.buffers()):
            device_of.setdefault(id(tensor), device)
    copied = target.copied(lambda tensor: device_of.get(id(tensor), devices[0]))
    connect(copied, parts)
    return copied


def connect(target: Target, parts: dict[str, torch.device]) -> None:
    """Make every part get its inputs on its own device."""
    crossing = _Crossing()
    target.decoder.register_forward_pre_hook(lambda *_: crossing.clear())
    target.decoder.register_forward_hook(lambda *_: crossing.clear())
    for path, device in parts.items():
        target.model.get_submodule(path).register_forward_pre_hook(crossing.hook(device), with_kwargs=True)


def _shares(layers: Sequence[nn.Module], devices: Sequence[torch.device]) -> list[torch.device]:
    """Consecutive layers to each device, about equally many bytes."""
    sizes = [sum(p.numel() * p.element_size() for p in layer.parameters()) for layer in layers]
    total = sum(sizes)
    middles = [end - size / 2 for end, size in zip(accumulate(sizes), sizes, strict=True)]
    return [devices[min(len(devices) - 1, int(middle * len(devices) / total))] for middle in middles]


class _Crossing:
    """The tensors that were moved in the forward under way, each kept with its original."""

    def __init__(self) -> None:
        self.moved: dict[tuple[int, torch.device], tuple[torch.Tensor, torch.Tensor]] = {}

    def clear(self) -> None:
        self.moved.clear()

    def hook(self, device: torch.device) -> Any:
        def move(_module: nn.Module, arguments: Any, options: Any) -> tuple[Any, Any]:
            return self._on(arguments, device), self._on(options, device)

        return move

    def _on(self, value: Any, device: torch.device) -> Any:
        if isinstance(value, torch.Tensor):
            if value.device == device:
                return value
            key = (id(value), device)
            if key not in self.moved:
                self.moved[key] = (value, value.to(device, non_blocking=True))
            return self.moved[key][1]
        if type(value) in (tuple, list):
            return type(value)(self._on(part, device) for part in value)
        if type(value) is dict:
            return {key: self._on(part, device) for key, part in value.items()}
        return value
