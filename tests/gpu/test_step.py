"""The step on CUDA: compiled and captured equal eager, in threads, with masks that change at every step."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch

from cuda_steps import ANCHORS, BLOCK, CONTEXT, SHAPE, on_own_stream
from draftmill.config import TrainConfig
from draftmill.drafter.loss import LossRule
from draftmill.drafter.network import Drafter
from draftmill.records import Blocks
from draftmill.step.choose import build_step
from draftmill.step.eager import EagerStep
from draftmill.step.state import StepShape, StepState
from draftmill.target.head import TargetHead
from draftmill.train.optimizer import FlatAdamW

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")]


def make_state(
    dtype: torch.dtype, device: str = "cuda:0", window: int | None = None, block: int = BLOCK, short: bool = False
) -> StepState:
    layers = (1,) if window else ()
    shape = replace(SHAPE, block_size=block, sliding_window=window, sliding_layers=layers)
    generator = torch.Generator().manual_seed(1)
    matrix = torch.randn(1000, 256, generator=generator) * 0.1
    drafter = Drafter(shape, seed=0)
    return StepState(
        drafter,
        TargetHead(matrix, matrix),
        LossRule(7.0),
        StepShape(CONTEXT, ANCHORS, 512, short),
        torch.device(device),
        dtype,
    )


def batch(
    seed: int, num_blocks: int = ANCHORS, block: int = BLOCK, short: bool = False
) -> tuple[torch.Tensor, Blocks, int]:
    """Features and blocks over documents of random lengths; every call another mask."""
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(CONTEXT, 512, generator=generator)
    blocks = Blocks.empty(CONTEXT, ANCHORS)
    blocks.tokens_T.copy_(torch.randint(999, (CONTEXT,), generator=generator))
    cuts = torch.randint(20, CONTEXT - 20, (3,), generator=generator).unique().tolist()
    starts = torch.zeros(CONTEXT, dtype=torch.int64)
    for cut in cuts:
        starts[cut:] = cut
    blocks.positions_T.copy_(torch.arange(CONTEXT) - starts)
    anchors = torch.randperm(CONTEXT - block, generator=generator)[:num_blocks].sort().values
    blocks.anchors_A[:num_blocks] = anchors.int()
    blocks.starts_A[:num_blocks] = starts[anchors].int()
    ends = torch.tensor([*cuts, CONTEXT])
    room = ends[torch.searchsorted(ends, anchors, right=True)] - 1 - anchors
    absent = torch.randint(block - 1, (num_blocks,), generator=generator) if short else torch.zeros(num_blocks)
    blocks.absent_A[:num_blocks] = absent.int()
    blocks.slots_A[:num_blocks] = torch.minimum(room, block - 1 - absent).int()
    return features, blocks, int(blocks.slots_A.sum())


def train(choice: str, dtype: torch.dtype, steps: int, **shape) -> tuple[torch.Tensor, list[float]]:
    def work():
        state = make_state(dtype, **shape)
        optimizer = FlatAdamW(state.flat, TrainConfig())
        built = build_step(choice, state, optimizer)
        losses = []
        for step in range(steps):
            features, blocks, scored = batch(step, ANCHORS - step % 5, shape.get("block", BLOCK), "short" in shape)
            state.load(features.to(state.device, dtype), blocks)
            state.begin()
            built.step.run(scored, ANCHORS - step % 5)
            optimizer.lr.fill_(1e-3)
            built.update()
            losses.append(float(state.totals[0] / state.totals[1]))
        return state.flat.master.clone(), losses

    return on_own_stream(work)


@pytest.mark.parametrize("choice", ["compiled", "graphed"])
@pytest.mark.parametrize(
    "shape",
    [{}, {"window": 100, "block": 8}, {"short": True}, {"window": 100, "block": 8, "short": True}],
    ids=["full", "sliding, blocks of 8", "short blocks", "sliding, blocks of 8 and shorter"],
)
def test_one_batch_equals_the_dense_reference_in_float32(choice: str, shape: dict) -> None:
    def work():
        reference, state = make_state(torch.float32, **shape), make_state(torch.float32, **shape)
        built = build_step(choice, state, FlatAdamW(state.flat, TrainConfig()))
        features, blocks, scored = batch(7, ANCHORS - 3, shape.get("block", BLOCK), "short" in shape)
        for each in (reference, state):
            each.load(features.cuda(), blocks)
            each.begin()
        EagerStep(reference).run(scored, ANCHORS - 3)
        built.step.run(scored, ANCHORS - 3)
        assert torch.equal(state.scored_K, reference.scored_K)
        assert torch.equal(state.correct_AK, reference.correct_AK)
        torch.testing.assert_close(state.totals, reference.totals, rtol=1e-4, atol=1e-3)
        ours, expected = state.flat.gradient, reference.flat.gradient
        assert (ours - expected).norm() / expected.norm() < 1e-3

    on_own_stream(work)


@pytest.mark.parametrize("choice", ["compiled", "graphed"])
def test_twenty_steps_end_at_eagers_weights(choice: str) -> None:
    weights, losses = train(choice, torch.float32, 20)
    expected, expected_losses = train("eager", torch.float32, 20)
    assert losses == pytest.approx(expected_losses, rel=2e-3)
    assert (weights - expected).norm() / expected.norm() < 5e-3


def test_building_leaves_no_trace_in_weights_moments_and_random_numbers() -> None:
    def work():
        state = make_state(torch.bfloat16)
        optimizer = FlatAdamW(state.flat, TrainConfig())
        before, cpu, cuda = state.flat.master.clone(), torch.get_rng_state(), torch.cuda.get_rng_state()
        built = build_step("auto", state, optimizer)
        assert torch.equal(state.flat.master, before)
        assert torch.equal(state.flat.weights, before.bfloat16())
        assert not optimizer.first.any()
        assert not optimizer.second.any()
        assert int(optimizer.count) == 0
        assert torch.equal(torch.get_rng_state(), cpu)
        assert torch.equal(torch.cuda.get_rng_state(), cuda)
        assert built.report.startswith(("graphed", "compiled", "eager"))
        print(built.report)

    on_own_stream(work)


def test_three_drafter_threads_and_a_busy_target_thread_at_once() -> None:
    """Cases B30, B31, B34: capture, compile and pin from several threads; every mask differs; nothing recompiles."""
    results: dict[int, tuple[torch.Tensor, list[float]]] = {}
    errors: list[BaseException] = []
    done = threading.Event()

    def drafter(index: int) -> None:
        try:
            results[index] = train("graphed", torch.bfloat16, 20)
        except BaseException as error:
            errors.append(error)

    def target() -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                matrix = torch.randn(512, 512, device="cuda")
                while not done.is_set():
                    host = torch.empty(1024, 1024, pin_memory=True)
                    (matrix @ matrix).sum().item()
                    host.cuda(non_blocking=True)
                    torch.cuda.current_stream().synchronize()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=drafter, args=(index,)) for index in range(3)]
    busy = threading.Thread(target=target)
    busy.start()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    done.set()
    busy.join()
    assert not errors, errors
    alone, losses = train("graphed", torch.bfloat16, 20)
    for weights, theirs in results.values():
        assert theirs == pytest.approx(losses, rel=1e-2)
        assert (weights - alone).norm() / alone.norm() < 1e-2


def test_another_shape_is_an_error_that_names_it() -> None:
    state = make_state(torch.bfloat16)
    with pytest.raises(RuntimeError, match="anchors_A"):
        state.load(torch.zeros(4, 512), Blocks.empty(CONTEXT, ANCHORS + 1))
