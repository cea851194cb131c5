"""Float8 on GPUs that multiply in it: products, kernels, and steps that are the same however they run."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import cuda_steps
from cuda_steps import ANCHORS, BLOCK, CONTEXT, on_own_stream
from draftmill.config import Float8Choice, StepChoice, TrainConfig
from draftmill.drafter import loss_float8
from draftmill.drafter.float8 import GRADIENTS, VALUES, column_major, float8_linear, product, round_float8
from draftmill.drafter.loss import LossRule
from draftmill.drafter.network import Drafter
from draftmill.float8 import has_float8
from draftmill.step.choose import TOLERANCE_FLOAT8, build_step, fill_randomly
from draftmill.step.eager import EagerStep
from draftmill.step.state import StepShape, StepState
from draftmill.target.head import TargetHead, shape_logits
from draftmill.train.optimizer import FlatAdamW
from loss_chunks import whole_chunk

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (torch.cuda.is_available() and has_float8(torch.device("cuda:0"))),
        reason="no CUDA device of compute capability 8.9 or higher here",
    ),
]

CUDA = torch.device("cuda:0")
FULL = ANCHORS * (BLOCK - 1)
SHAPE = replace(cuda_steps.SHAPE, vocab_size=1008, mask_token_id=1007)  # multiples of 16
RULES = {
    "cross entropy": LossRule(7.0),
    "cross entropy to the target's labels": LossRule(7.0, target_labels=True),
    "kl": LossRule(7.0, cross_entropy=0.0, kl=1.0),
    "all, the target's labels": LossRule(7.0, cross_entropy=0.3, kl=0.5, total_variation=0.2, target_labels=True),
}


def normal(*size: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(size, device=CUDA, generator=torch.Generator(CUDA).manual_seed(seed)).to(dtype)


def apart(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over the norm of what is expected."""
    return float((got.float() - expected.float()).norm() / expected.float().norm())


def make_state(
    float8: Float8Choice | None, rule: LossRule | None = None, *, checkpointed: bool = False, anchors: int = ANCHORS
) -> StepState:
    matrix = torch.randn(SHAPE.vocab_size, SHAPE.hidden_size, generator=torch.Generator().manual_seed(1)) * 0.1
    drafter = Drafter(SHAPE, seed=0)
    drafter.checkpoint_activations = checkpointed
    shape = StepShape(CONTEXT, anchors, 512)
    return StepState(
        drafter, TargetHead(matrix, matrix), rule or LossRule(7.0), shape, CUDA, torch.bfloat16, float8=float8
    )


def gradient_of(step: EagerStep) -> tuple[torch.Tensor, float]:
    """Gradient and loss of a batch of random numbers, the same for everybody."""
    state = step.state
    with torch.random.fork_rng([CUDA]):
        torch.cuda.manual_seed(7)
        fill_randomly(state)
    state.begin()
    full = state.shape.anchor_slots
    step.run(full * (BLOCK - 1), full)
    return state.flat.gradient.float(), float(state.totals[0] / state.totals[1])


# Products


@pytest.mark.parametrize(("left", "fast"), [(VALUES, True), (VALUES, False), (GRADIENTS, False), (GRADIENTS, True)])
def test_a_product_is_that_of_the_rounded_numbers(left: torch.dtype, fast: bool) -> None:
    """But for bfloat16's rounding of the result, and fewer bits of the sums where they are fast."""
    a, a_scale = round_float8(normal(96, 512), left)
    b, b_scale = round_float8(normal(64, 512, seed=1), VALUES)
    expected = (a.float() * a_scale).double() @ (b.float() * b_scale).double().t()
    got = product(a, a_scale, b.t(), b_scale, torch.bfloat16, fast=fast)
    assert got.dtype == torch.bfloat16
    assert apart(got, expected) < (1e-2 if fast else 3e-3)
    assert torch.equal(product(a, a_scale, column_major(b.t().contiguous()), b_scale, torch.bfloat16, fast=fast), got)


@pytest.mark.parametrize("rows", [256, 120])
def test_a_linear_layer_equals_the_cpus(rows: int) -> None:
    """The CPU multiplies the same rounded numbers in float32; 120 rows are no multiple of 16."""
    found = []
    for device in (CUDA, torch.device("cpu")):
        x, weight = (normal(*size).to(device).requires_grad_() for size in ((rows, 128), (80, 128)))
        y = float8_linear(x, weight)
        y.backward(normal(rows, 80, seed=2).to(device))
        assert x.grad is not None
        assert weight.grad is not None
        found.append([y.detach().cpu(), x.grad.cpu(), weight.grad.cpu()])
    for got, expected in zip(*found, strict=True):
        assert apart(got, expected) < 1e-2


# Loss head


@pytest.mark.parametrize("softcap", [None, 10.0])
@pytest.mark.parametrize("size", [48, 4096, 50016])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_the_kernels_slope_is_the_references(rule: LossRule, size: int, softcap: float | None) -> None:
    """Both round the same float32 numbers but for their last bits, so a few go to the neighbouring float8 number."""
    from draftmill.drafter import loss_kernel

    logits, target = normal(64, size) * 3, normal(64, size, seed=1) * 3
    labels = torch.randint(size, (64,), device=CUDA, generator=torch.Generator(CUDA).manual_seed(2))
    # One largest of each row, the label of every other row; then bounded, as a head bounds them.
    everybody = torch.arange(64, device=CUDA)
    logits[everybody[::2], labels[::2]] = 20.0
    target[everybody, everybody % size] = 20.0
    logits, target = (shape_logits(each, 1.0, softcap) for each in (logits, target))
    needed = target if rule.needs_target else None
    expected = loss_float8.score_rows_float8(logits.clone(), target.clone(), labels, rule, softcap, True)
    kept = logits.clone()
    got = loss_kernel.score_rows_float8(kept, needed, labels, rule, softcap, True)
    assert torch.equal(kept, logits)
    assert got.slope_RV.dtype == expected.slope_RV.dtype == (GRADIENTS if rule.needs_target else VALUES)
    assert torch.equal(got.correct_R, expected.correct_R)
    for name in ("cross_entropy_R", "costs_R", "factor_R", "label_slope_R"):
        ours, plain = getattr(got, name), getattr(expected, name)
        assert (ours is None) == (plain is None)
        if ours is not None:
            torch.testing.assert_close(ours, plain, rtol=1e-4, atol=2e-5)
    assert apart(got.slope_RV, expected.slope_RV) < 0.01
    assert (got.slope_RV.view(torch.uint8) != expected.slope_RV.view(torch.uint8)).float().mean() < 0.01


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_a_chunk_of_the_loss_head(rule: LossRule) -> None:
    """Head and kernel together, against bfloat16's products and the plain arithmetic."""
    from draftmill.drafter import loss_kernel

    matrix = normal(1008, 256) * 0.1
    head = TargetHead(matrix, matrix)
    hidden, target = normal(480, 256, seed=1), normal(480, 256, seed=2)
    labels = torch.randint(1008, (480,), device=CUDA, generator=torch.Generator(CUDA).manual_seed(3))
    options = (labels, torch.ones(480, device=CUDA), rule, BLOCK - 1)
    exact = whole_chunk(hidden, target, head, *options)
    rounded = loss_float8.Float8Head.of(head)
    got = whole_chunk(hidden, target, rounded, *options, score=loss_kernel.score_rows_float8)
    assert abs(float(got[0].sum() / exact[0].sum()) - 1.0) < 0.02
    assert got[3].isfinite().all()
    assert apart(got[3], exact[3]) < 0.12


# Steps


@pytest.mark.parametrize("choice", ["head", "all"])
@pytest.mark.parametrize("way", ["compiled", "graphed"])
@pytest.mark.parametrize("anchors", [ANCHORS, 72], ids=["whole", "drafted rows no multiple of 16"])
def test_compiled_and_captured_equal_eager(choice: Float8Choice, way: StepChoice, anchors: int) -> None:
    def work() -> None:
        expected, expected_loss = gradient_of(EagerStep(make_state(choice, anchors=anchors)))
        state = make_state(choice, anchors=anchors)
        built = build_step(way, state, FlatAdamW(state.flat, TrainConfig()))
        gradient, loss = gradient_of(built.step)
        assert apart(gradient, expected) < TOLERANCE_FLOAT8[0]
        assert loss == pytest.approx(expected_loss, rel=TOLERANCE_FLOAT8[1])
        print(f"{choice} {way}: {apart(gradient, expected):.2e} from eager")

    on_own_stream(work)


@pytest.mark.parametrize("choice", ["head", "all"])
def test_the_gradient_is_near_bfloat16s(choice: Float8Choice) -> None:
    """Expected from the rounding alone: some 3 % with the head, 6 % a product and so up to 12 % with all of them."""

    def work() -> None:
        exact, exact_loss = gradient_of(EagerStep(make_state(None)))
        got, loss = gradient_of(EagerStep(make_state(choice)))
        print(
            f"{choice}: {apart(got, exact):.3f} from bfloat16 in the gradient, {loss / exact_loss - 1:.1e} in the loss"
        )
        assert apart(got, exact) < 0.15
        assert float(torch.cosine_similarity(got, exact, dim=0)) > 0.99
        assert loss == pytest.approx(exact_loss, rel=1e-2)

    on_own_stream(work)


@pytest.mark.parametrize("choice", ["head", "all"])
def test_auto_rejects_no_way_of_running_for_its_rounding(choice: Float8Choice) -> None:
    def work() -> None:
        state = make_state(choice)
        built = build_step("auto", state, FlatAdamW(state.flat, TrainConfig()))
        print(built.report)
        assert "rejected" not in built.report

    on_own_stream(work)


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("rule", [LossRule(7.0), LossRule(7.0, cross_entropy=0.5, kl=0.5)], ids=["ce", "ce and kl"])
@pytest.mark.parametrize("choice", ["head", "all"])
def test_twenty_captured_steps_learn_as_bfloat16s(choice: Float8Choice, rule: LossRule, checkpointed: bool) -> None:
    """On one batch, over and over."""

    def losses_of(float8: Float8Choice | None) -> list[float]:
        state = make_state(float8, rule, checkpointed=checkpointed)
        optimizer = FlatAdamW(state.flat, TrainConfig())
        built = build_step("graphed", state, optimizer)
        losses = []
        for _ in range(20):
            with torch.random.fork_rng([CUDA]):
                torch.cuda.manual_seed(3)
                fill_randomly(state)
            state.begin()
            built.step.run(FULL, ANCHORS)
            optimizer.lr.fill_(1e-3)
            built.update()
            losses.append(float(state.totals[0] / state.totals[1]))
        return losses

    exact, got = on_own_stream(lambda: losses_of(None)), on_own_stream(lambda: losses_of(choice))
    print(f"{choice}: {got[0]:.3f} to {got[-1]:.3f}, in bfloat16 {exact[0]:.3f} to {exact[-1]:.3f}")
    assert exact[-1] < 0.8 * exact[0]
    assert got == pytest.approx(exact, rel=0.05)
