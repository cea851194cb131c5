"""Which devices multiply in float8. Owns the one check, for targets and drafters alike; rounds nothing."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from draftmill.errors import InputError

LEAST_CAPABILITY = (8, 9)
"""Compute capability from which NVIDIA GPUs multiply in float8."""


def has_float8(device: torch.device) -> bool:
    """Whether a device multiplies in float8."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= LEAST_CAPABILITY


def check_devices(setting: str, devices: Sequence[torch.device]) -> None:
    """Raise InputError where a device does not multiply in float8. setting: what asked for it, as the user types it."""
    for device in devices:
        if not has_float8(device):
            raise InputError(
                f"{setting}: float8 needs NVIDIA GPUs of compute capability 8.9 or higher, got {device}; "
                f"leave {setting} out"
            )
