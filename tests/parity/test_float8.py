"""Float8 products against float32, on a CPU, where the rounded numbers are multiplied in float32: layer, head, step."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest
import torch

from draftmill.config import Float8Choice, TrainConfig
from draftmill.drafter.float8 import GRADIENTS, VALUES, float8_linear, product, round_float8, rounded_once
from draftmill.drafter.loss import LossRule, score_rows
from draftmill.drafter.loss_float8 import Float8Head, score_rows_float8
from draftmill.drafter.network import Linear
from draftmill.step.choose import build_step, fill_randomly
from draftmill.step.compiled import CompiledStep
from draftmill.step.eager import EagerStep
from draftmill.target.head import TargetHead
from draftmill.train.optimizer import FlatAdamW
from loss_chunks import whole_chunk
from small_steps import ANCHORS, BLOCK, small_state

VALUE_ERROR, GRADIENT_ERROR = 0.027, 0.054
"""Norm of the rounding over the norm of what is rounded, of normally distributed numbers. With steps of 1/8 (1/4 in
e5m2) of an octave's lower end the error's root mean square is 0.036 (0.072) of that end; numbers lie 1.34 above it."""
FULL = ANCHORS * (BLOCK - 1)
RULES = {
    "cross entropy": LossRule(7.0),
    "d-pace": LossRule(7.0, 0.5),
    "kl": LossRule(7.0, cross_entropy=0.0, kl=1.0),
    "total variation": LossRule(7.0, cross_entropy=0.0, total_variation=1.0),
    "all, the target's labels": LossRule(7.0, cross_entropy=0.3, kl=0.5, total_variation=0.2, target_labels=True),
    "the target's labels": LossRule(7.0, target_labels=True),
}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    torch.set_num_threads(1)
    yield
    torch._dynamo.config.error_on_recompile = False


def normal(*size: int, seed: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def apart(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over the norm of what is expected."""
    return float((got - expected).norm() / expected.norm())


def by_hand(x: torch.Tensor, dtype: torch.dtype, most: float) -> torch.Tensor:
    """x after rounding with one scale, in float32."""
    scale = x.abs().max() / most
    return (x / scale).to(dtype).float() * scale


# Linear layers


@pytest.mark.parametrize("rows", [64, 60])
def test_a_linear_layer_and_its_gradients(rows: int) -> None:
    """60 rows: the gradient to the weight adds up over them, which a float8 product can't."""
    x, weight, slope = (normal(*size, seed=seed) for seed, size in enumerate([(rows, 96), (80, 96), (rows, 80)]))
    for tensor in (x, weight):
        tensor.requires_grad_()
    y = float8_linear(x, weight)
    y.backward(slope)
    assert x.grad is not None
    assert weight.grad is not None
    plain_x, plain_weight = x.detach().clone().requires_grad_(), weight.detach().clone().requires_grad_()
    plain = plain_x @ plain_weight.t()
    plain.backward(slope)
    x8, weight8 = by_hand(x.detach(), VALUES, 448.0), by_hand(weight.detach(), VALUES, 448.0)
    slope8 = by_hand(slope, GRADIENTS, 57344.0)
    to_weight = slope8.t() @ x8 if rows % 16 == 0 else slope.t() @ x.detach()
    for got, same, exact, bound in (
        (y.detach(), x8 @ weight8.t(), plain.detach(), 2**0.5 * VALUE_ERROR),
        (x.grad, slope8 @ weight8, plain_x.grad, (VALUE_ERROR**2 + GRADIENT_ERROR**2) ** 0.5),
        (weight.grad, to_weight, plain_weight.grad, (VALUE_ERROR**2 + GRADIENT_ERROR**2) ** 0.5),
    ):
        assert apart(got, same) < 2e-5, "as rounded by hand, but for a number on the boundary"
        assert apart(got, exact) < 1.05 * bound


def test_what_is_rounded_once_serves_several_layers_and_wants_its_gradient_from_all() -> None:
    x = normal(32, 16, seed=0).requires_grad_()
    layers = [Linear(16, 32), Linear(16, 48)]
    for seed, layer in enumerate(layers):
        layer.weight.data = normal(*layer.weight.shape, seed=seed + 1)
        layer.float8 = True
    once = layers[0].shared(x)
    sum(layer(once).square().sum() for layer in layers).backward()
    together, weights = x.grad, [layer.weight.grad.clone() for layer in layers]
    x.grad = None
    for layer in layers:
        layer.weight.grad = None
        layer(x).square().sum().backward()
    torch.testing.assert_close(x.grad, together)
    for layer, expected in zip(layers, weights, strict=True):
        assert torch.equal(layer.weight.grad, expected)


def test_no_gradient_where_none_is_wanted() -> None:
    x, weight = normal(32, 16, seed=0), normal(16, 16, seed=1).requires_grad_()
    float8_linear(x, weight).sum().backward()
    assert x.grad is None
    with torch.no_grad():
        assert not float8_linear(x, weight).requires_grad


def test_a_number_that_is_none_reaches_output_and_gradients() -> None:
    for bad in (float("nan"), float("inf")):
        x, weight = normal(32, 16, seed=0), normal(16, 16, seed=1).requires_grad_()
        x[3, 4] = bad
        float8_linear(x, weight).sum().backward()
        assert not float8_linear(x, weight)[3].isfinite().any()
        assert weight.grad is not None
        assert not weight.grad.isfinite().all()


@pytest.mark.parametrize("left", [VALUES, GRADIENTS])
def test_a_product_is_torchs_own(left: torch.dtype) -> None:
    """What a GPU is asked for, by the CPU's implementation of it."""
    a, a_scale = round_float8(normal(24, 64, seed=0), left)
    b, b_scale = round_float8(normal(32, 64, seed=1), VALUES)
    theirs = torch._scaled_mm(a, b.t(), scale_a=a_scale, scale_b=b_scale, out_dtype=torch.bfloat16)
    assert apart(product(a, a_scale, b.t(), b_scale, torch.bfloat16).float(), theirs.float()) < 1e-3


# Loss head


def head_of(scale: float, softcap: float | None, vocabulary: int = 512, hidden: int = 64) -> TargetHead:
    matrix = normal(vocabulary, hidden, seed=3)
    return TargetHead(matrix, matrix, logit_scale=scale, logit_softcap=softcap)


@pytest.mark.parametrize(("scale", "softcap"), [(1.0, None), (0.5, None), (1.0, 8.0)])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_a_chunk_of_the_loss_head(rule: LossRule, scale: float, softcap: float | None) -> None:
    """Spread logits (of some 4 in the root mean square), a third of the labels likely ones."""
    rows, slots = 60, 15
    head, hidden, target = head_of(scale, softcap), normal(rows, 64, seed=4) / 2, normal(rows, 64, seed=5) / 2
    labels = torch.randint(512, (rows,), generator=torch.Generator().manual_seed(6))
    labels[::3] = head.logits(hidden)[::3].argmax(dim=-1)
    weights = torch.ones(rows)
    given = (labels, weights, rule, slots)
    exact = whole_chunk(hidden, target, head, *given)
    got = whole_chunk(hidden, target, Float8Head.of(head), *given, score=score_rows_float8)
    assert abs(float(got[0].sum() / exact[0].sum()) - 1.0) < 0.02
    assert apart(got[1], exact[1]) < 0.03
    assert (got[2] == exact[2]).float().mean() > 0.9
    # The slope of total variation jumps where drafter and target are equal, and float8 logits are on the other side.
    bound, least = (0.25, 0.97) if rule.total_variation == 1.0 else (0.08, 0.995)
    assert apart(got[3], exact[3]) < bound
    assert float(torch.cosine_similarity(got[3].flatten(), exact[3].flatten(), dim=0)) > least
    without = whole_chunk(hidden, target, Float8Head.of(head), *given, False, score_rows_float8)
    for value, same in zip(without[:3], got[:3], strict=True):
        torch.testing.assert_close(value, same)


@pytest.mark.parametrize("softcap", [None, 20.0])
def test_the_slope_of_labels_that_are_nearly_certain(softcap: float | None) -> None:
    """It is a few hundredths of the label's row, and right in itself. Whole numbers up to 7, which float8 has."""
    matrix = torch.randint(-7, 8, (512, 64), generator=torch.Generator().manual_seed(0)).float()
    head = TargetHead(matrix, matrix, logit_scale=0.015, logit_softcap=softcap)
    labels = torch.arange(32)
    given = (matrix[labels], None)
    options = (labels, torch.ones(32), LossRule(7.0), 1)
    exact = whole_chunk(*given, head, *options)
    got = whole_chunk(*given, Float8Head.of(head), *options, score=score_rows_float8)
    torch.testing.assert_close(got[0], exact[0], rtol=1e-4, atol=1e-6)
    assert apart(got[3], exact[3]) < 0.05
    assert float(exact[3].norm() / (0.015 * matrix[labels]).norm()) < 0.05


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_the_slope_to_the_logits_is_within_its_type(rule: LossRule) -> None:
    """Also where a label is as unlikely as can be, and all of the target's mass elsewhere."""
    logits, target = normal(6, 40, seed=0) * 3, normal(6, 40, seed=1) * 3
    logits[0, 3], target[0, 5], target[1, 3], logits[1, 5] = 60.0, 60.0, 60.0, 60.0
    labels = torch.full((6,), 7)
    exact = score_rows(logits.clone(), target.clone(), labels, rule, None, True)
    got = score_rows_float8(logits.clone(), target.clone(), labels, rule, None, True)
    assert got.slope_RV.dtype == (GRADIENTS if rule.needs_target else VALUES)
    assert got.factor_R is not None
    slope = got.slope_RV.float() * got.factor_R[:, None]
    if got.label_slope_R is not None:
        assert not slope[:, 7].any()
        slope[:, 7] = got.label_slope_R
    assert slope.isfinite().all()
    assert apart(slope, exact.slope_RV) < (GRADIENT_ERROR if rule.needs_target else VALUE_ERROR) * 1.5
    for mine, plain in zip(got[:3], exact[:3], strict=True):
        torch.testing.assert_close(mine, plain)


def test_the_head_is_rounded_once_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    head = head_of(1.0, None)
    whole, scale = round_float8(head.head_VH, VALUES)
    monkeypatch.setattr("draftmill.drafter.loss_float8.PIECE_ROWS", 100)
    rounded = Float8Head.of(head)
    assert torch.equal(rounded.head8_VH.float(), whole.float())
    assert torch.equal(rounded.head8_HV.float(), whole.t().float())
    assert rounded.head8_HV.is_contiguous()
    assert torch.equal(rounded.head_scale, scale)
    hidden = normal(8, 64, seed=9)
    assert torch.equal(rounded.logits(hidden), head.logits(hidden)), "the target's own logits are not rounded"
    assert apart(product(*rounded_once(hidden)[1:], whole.t(), scale, torch.float32), head.logits(hidden)) < 0.04


# Steps


def gradient_of(step: EagerStep) -> torch.Tensor:
    """Of a batch of random numbers, the same for everybody."""
    state = step.state
    with torch.random.fork_rng():
        torch.manual_seed(7)
        fill_randomly(state)
    state.begin()
    step.run(FULL, ANCHORS)
    return state.flat.gradient.clone()


@pytest.mark.parametrize("choice", ["head", "all"])
def test_a_steps_gradient(choice: Float8Choice) -> None:
    exact = gradient_of(EagerStep(small_state()))
    got = gradient_of(EagerStep(small_state(choice)))
    assert 1e-3 < apart(got, exact) < 0.15
    assert float(torch.cosine_similarity(got, exact, dim=0)) > 0.99


@pytest.mark.parametrize("checkpointed", [False, True])
def test_the_trunk_is_one_graph_and_gives_the_same(checkpointed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced whole, forward and backward, which is what a device's compiler is given."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager", fullgraph=True))
    state = small_state("all")
    state.drafter.checkpoint_activations = checkpointed
    step = CompiledStep(state)
    step.warm_up()
    torch.testing.assert_close(gradient_of(step), gradient_of(EagerStep(small_state("all"))), rtol=1e-4, atol=1e-5)


def test_checkpointed_activations_give_the_same() -> None:
    state = small_state("all")
    state.drafter.checkpoint_activations = True
    assert torch.equal(gradient_of(EagerStep(state)), gradient_of(EagerStep(small_state("all"))))


def trained(choice: Float8Choice | None) -> list[float]:
    """Losses of 30 steps on one batch."""
    state = small_state(choice)
    optimizer = FlatAdamW(state.flat, TrainConfig())
    built = build_step("eager", state, optimizer)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        fill_randomly(state)
    losses = []
    for _ in range(30):
        state.begin()
        built.step.run(FULL, ANCHORS)
        optimizer.lr.fill_(1e-2)
        built.update()
        losses.append(float(state.totals[0] / state.totals[1]))
    return losses


@pytest.mark.parametrize("choice", ["head", "all"])
def test_thirty_steps_learn_as_much(choice: Float8Choice) -> None:
    exact, got = trained(None), trained(choice)
    assert sum(got) == pytest.approx(sum(exact), rel=0.05)
    assert got[-1] < exact[-4] < 0.15 * exact[0], "three steps behind at most"
