"""One drafter that every way of running a step takes, and a stream of its own, for tests on GPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from draftmill.drafter.shape import DrafterShape

CONTEXT, ANCHORS, BLOCK = 1024, 64, 16
SHAPE = DrafterShape(
    hidden_size=256,
    intermediate_size=512,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    rms_norm_eps=1e-6,
    vocab_size=1000,
    block_size=BLOCK,
    mask_token_id=999,
    target_layer_ids=(1, 3),
    num_target_layers=8,
    rope={"rope_type": "default", "rope_theta": 1e6},
    max_position_embeddings=4096,
)


def on_own_stream(work: Callable[[], Any]) -> Any:
    """What `work` gives, run on a stream that can be captured, and waited for."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        result = work()
    stream.synchronize()
    return result
