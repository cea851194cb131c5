"""The count of useful arithmetic, against torch's own count of a dense step and against the mask itself."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from draftmill.drafter.attention import dense_attention
from draftmill.drafter.loss import LossRule
from draftmill.drafter.mask import dense_mask
from draftmill.drafter.network import Drafter
from draftmill.drafter.shape import DrafterShape
from draftmill.records import Blocks
from draftmill.step.eager import EagerStep
from draftmill.step.flops import StepWork, step_flops, work_of
from draftmill.step.state import StepShape, StepState
from draftmill.target.head import TargetHead

BLOCK = 8


def shape_of(**changes: object) -> DrafterShape:
    values: dict[str, object] = dict(
        hidden_size=32,
        intermediate_size=48,
        num_layers=3,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        rms_norm_eps=1e-6,
        vocab_size=101,
        block_size=BLOCK,
        mask_token_id=100,
        target_layer_ids=(1, 3, 5),
        num_target_layers=8,
        rope={"rope_type": "default", "rope_theta": 10000.0},
        max_position_embeddings=512,
    )
    return DrafterShape(**{**values, **changes})  # type: ignore[arg-type]


def batch() -> tuple[Blocks, int]:
    """Two documents of 20 and 31 tokens in 64 context slots, six blocks in eight anchor slots."""
    blocks = Blocks.empty(64, 8)
    blocks.tokens_T[:51] = torch.arange(51)
    blocks.positions_T[:51] = torch.cat([torch.arange(20), torch.arange(31)])
    for index, (start, anchor, slots) in enumerate(
        [(0, 0, 7), (0, 7, 7), (0, 18, 1), (20, 21, 3), (20, 30, 7), (20, 45, 5)]
    ):
        blocks.anchors_A[index], blocks.starts_A[index], blocks.slots_A[index] = anchor, start, slots
    return blocks, 51


@pytest.mark.parametrize("window", [None, 1, 5, 9, 64])
@pytest.mark.parametrize("absent", [(0,) * 6, (0, 3, 6, 4, 6, 2)], ids=["whole", "short"])
def test_pairs_are_the_masks(window: int | None, absent: tuple[int, ...]) -> None:
    shape = shape_of(**({} if window is None else {"sliding_window": window, "sliding_layers": (0, 2)}))
    blocks, num_tokens = batch()
    blocks.absent_A[:6] = torch.tensor(absent)
    # An unused block sees itself, and a slot that is absent what the others see: nobody needs it.
    needed = (torch.arange(BLOCK) < BLOCK - blocks.absent_A[:, None]).flatten()[: 6 * BLOCK]
    expected = sum(int(dense_mask(blocks, BLOCK, shape.window(layer))[: 6 * BLOCK][needed].sum()) for layer in range(3))
    work = work_of(blocks, num_tokens, shape)
    tokens = 48 - sum(absent)
    assert work == StepWork(context_tokens=51, blocks=6, block_tokens=tokens, scored_rows=30, pairs=expected)


def test_an_empty_batch_holds_no_work() -> None:
    for windows in ({}, {"sliding_window": 4, "sliding_layers": (0,)}):
        assert work_of(Blocks.empty(64, 8), 0, shape_of(**windows)) == StepWork(0, 0, 0, 0, 0)
    assert step_flops(shape_of(), StepWork(0, 0, 0, 0, 0)).total == 0


def test_matrix_products_are_those_that_torch_counts() -> None:
    """A full batch, where nothing is padded: all products but attention's are useful."""
    torch.set_num_threads(1)
    shape = shape_of()
    drafter, matrix = Drafter(shape), torch.randn(101, 32)
    state = StepState(
        drafter, TargetHead(matrix, matrix), LossRule(4.0), StepShape(64, 6, 42), torch.device("cpu"), torch.float32
    )
    blocks = Blocks.empty(64, 6)
    blocks.tokens_T[:] = torch.arange(64)
    blocks.positions_T[:] = torch.arange(64)
    blocks.anchors_A[:] = torch.tensor([3, 9, 20, 33, 40, 56])
    blocks.slots_A[:] = 7
    state.load(torch.randn(64, shape.feature_size), blocks)
    step = EagerStep(state, lambda state: lambda blocks: dense_attention(shape, blocks))
    step.run(42, 6)
    state.begin()
    with FlopCounterMode(display=False) as counter:
        step.run(42, 6)
    counts = counter.get_flop_counts()["Global"]
    assert {str(name) for name in counts} == {"aten.mm"}  # torch does not count the CPU's attention
    flops = step_flops(shape, work_of(blocks, 64, shape))
    assert flops.context + flops.blocks + flops.head == sum(counts.values())


def test_attention_is_what_plain_products_take() -> None:
    """One layer, every key seen by every query, as four heads of plain matrix products, forward and backward."""
    q, k, v = (torch.randn(4, rows, 16, requires_grad=True) for rows in (24, 40, 40))
    with FlopCounterMode(display=False) as counter:
        (torch.softmax(q @ k.transpose(1, 2), dim=-1) @ v).sum().backward()
    assert step_flops(shape_of(), StepWork(0, 0, 0, 0, 24 * 40)).attention == counter.get_total_flops()


def test_the_published_shape() -> None:
    """Qwen3-8B, 5 layers and taps, one document of 3072 tokens, 512 full blocks: 70 TFLOP, most of it in the MLPs."""
    shape = shape_of(
        hidden_size=4096,
        intermediate_size=12288,
        num_layers=5,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        vocab_size=151936,
        block_size=16,
        target_layer_ids=(1, 9, 17, 25, 33),
        num_target_layers=36,
    )
    flops = step_flops(shape, StepWork(3072, 512, 8192, 7680, 5 * 8192 * (1536 + 16)))
    assert flops.context == 3072 * (4 * 5 * 4096 * 4096 + 6 * 5 * 2 * 4096 * 1024)
    all_slots, drafted = 2 * 4096 * 1024 + 4096 * 4096, 4096 * 4096 + 3 * 4096 * 12288
    assert flops.blocks == 6 * (8192 * 4 * (all_slots + drafted) + 513 * all_slots + 7680 * drafted)
    assert flops.attention == 12 * 5 * 8192 * 1552 * 4096
    assert flops.head == 4 * 7680 * 4096 * 151936
    assert flops.total == pytest.approx(69.8e12, rel=0.001)
