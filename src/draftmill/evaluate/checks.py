"""Whether a target can be decoded by fixed caches, and whether a drafter is for it: found out before any decoding."""

from __future__ import annotations

from typing import Any

import torch

from draftmill.drafter.shape import DrafterShape
from draftmill.errors import InputError
from draftmill.evaluate.caches import TargetCache, forward_options
from draftmill.target.model import Target

_FLOAT32_ERROR = 1e-3
_NARROW_ERROR = 0.3


def check_pair(config: Any, shape: DrafterShape) -> None:
    """Raise InputError unless a drafter's shape fits a target's configuration: hidden size, vocabulary, layers."""
    text = config.get_text_config()
    facts = [
        ("hidden size", shape.hidden_size, text.hidden_size),
        ("vocabulary", shape.vocab_size, text.vocab_size),
        ("number of target layers", shape.num_target_layers, text.num_hidden_layers),
    ]
    wrong = [f"{name} is {has}, the target's is {wants}" for name, has, wants in facts if has != wants]
    if wrong:
        raise InputError(f"the drafter is for another target: its {'; its '.join(wrong)}; give the one it was made for")


@torch.inference_mode()
def check_cached_forward(target: Target) -> None:
    """Raise InputError unless the target gives the same logits in pieces, from a cache set back in between, as at once.

    Catches every architecture that can't go on from a cache over several tokens, before it decodes wrongly.
    """
    vocabulary = target.config.get_text_config().vocab_size
    tokens = [(7 * index + 3) % vocabulary for index in range(12)]
    device = target.device
    whole = target.model(input_ids=torch.tensor([tokens], device=device), use_cache=False).logits[0]
    length = torch.zeros((), dtype=torch.int64, device=device)
    cache = TargetCache(target.config.get_text_config(), 16, length)
    options = forward_options(target.model, cache.layers)

    def forward(piece: list[int]) -> torch.Tensor:
        positions = length + torch.arange(len(piece), device=device)
        if "position_ids" in options:
            options["position_ids"] = positions[None]
        return target.model(input_ids=torch.tensor([piece], device=device), **options).logits[0]

    forward(tokens[:5])
    length.fill_(5)
    snapshot = cache.snapshot()
    forward(tokens[:4])  # tokens that will be refused
    cache.restore(snapshot)
    pieces = [forward(tokens[5:11])]
    length.fill_(11)
    pieces.append(forward(tokens[11:]))
    expected, got = whole[5:].double(), torch.cat(pieces).double()
    error = (got - expected).norm() / (expected - expected.mean()).norm().clamp_min(1e-12)
    # Rounding alone: float32 gives about 1e-6, bfloat16 about 1e-2 (more where experts are chosen); a wrong cache, 1.
    if not error < (_FLOAT32_ERROR if whole.dtype == torch.float32 else _NARROW_ERROR):
        raise InputError(
            f"the target {type(target.model).__name__} gives other logits from a cache than at once (relative "
            f"difference {float(error):.2g}), so it would decode wrongly; take another target, or a newer transformers"
        )
