"""One small drafter and its step's state, for tests that need any."""

from __future__ import annotations

import torch

from draftmill.config import Float8Choice
from draftmill.drafter.loss import LossRule
from draftmill.drafter.network import Drafter
from draftmill.drafter.shape import DrafterShape
from draftmill.step.state import StepShape, StepState
from draftmill.target.head import TargetHead

CONTEXT, ANCHORS, BLOCK = 32, 8, 4
SHAPE = DrafterShape(
    hidden_size=16,
    intermediate_size=24,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    rms_norm_eps=1e-6,
    vocab_size=40,
    block_size=BLOCK,
    mask_token_id=39,
    target_layer_ids=(1,),
    num_target_layers=4,
    rope={"rope_type": "default", "rope_theta": 1e4},
    max_position_embeddings=64,
)


def small_state(float8: Float8Choice | None = None, overwrite: bool = False) -> StepState:
    """Float32 on the CPU, three chunks of rows, always with the same weights; its inputs are empty."""
    matrix = torch.randn(SHAPE.vocab_size, SHAPE.hidden_size, generator=torch.Generator().manual_seed(0))
    return StepState(
        Drafter(SHAPE, seed=1),
        TargetHead(matrix, matrix),
        LossRule(4.0),
        StepShape(CONTEXT, ANCHORS, 8),
        torch.device("cpu"),
        torch.float32,
        float8,
        overwrite,
    )
