"""Our own CUDA kernels, run by Triton's interpreter on the CPU, against the plain arithmetic that they stand in for.

Collected by tests/parity/test_kernels.py in a process of its own: Triton decides when it is imported.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from draftmill.drafter import loss, loss_float8, loss_kernel
from draftmill.drafter.float8 import GRADIENTS, VALUES
from draftmill.drafter.loss import LossRule
from draftmill.train import adamw_kernel
from draftmill.train.optimizer import AdamWPart, adamw_update

pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")

RULES = {
    "cross entropy": LossRule(7.0),
    "cross entropy to the target's labels": LossRule(7.0, target_labels=True),
    "kl": LossRule(7.0, cross_entropy=0.0, kl=1.0),
    "total variation": LossRule(7.0, cross_entropy=0.0, total_variation=1.0),
    "all, the target's labels": LossRule(7.0, cross_entropy=0.3, kl=0.5, total_variation=0.2, target_labels=True),
}


def given(size: int, sharp: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits of both sides and labels of 6 rows, two with ties; sharp: nearly all mass of the target on one token."""
    generator = torch.Generator().manual_seed(size)
    logits = torch.randn(6, size, generator=generator) * (0.1 if sharp else 3.0)
    target = torch.randn(6, size, generator=generator) * 3.0
    if sharp:
        target[:, 7] = 40.0
    labels = torch.randint(size, (6,), generator=generator)
    logits[3, 5] = logits[3, 9] = logits[4, 5] = logits[4, 9] = 12.0
    labels[3], labels[4] = 5, 9
    return logits, target, labels


@pytest.mark.parametrize("softcap", [None, 15.0])
@pytest.mark.parametrize(("size", "sharp"), [(37, False), (5000, False), (5000, True)])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_rows_of_the_loss(rule: LossRule, size: int, sharp: bool, softcap: float | None) -> None:
    logits, target, labels = given(size, sharp)
    expected = loss.score_rows(logits.clone().double(), target.double(), labels, rule, softcap, True)
    ours = logits.clone()
    found = loss_kernel.score_rows(ours, target if rule.needs_target else None, labels, rule, softcap, True)
    for got, plain in zip(found[:2], expected[:2], strict=True):
        torch.testing.assert_close(got.double(), plain.double(), rtol=1e-5, atol=2e-5)
    assert torch.equal(found[2], expected[2])
    assert found[2].tolist()[3:5] == ([True, False] if not rule.target_labels else found[2].tolist()[3:5])
    slope = found[3].double() if found[4] is None else found[3].double() * found[4].double()[:, None]
    assert float((slope - expected[3]).norm() / expected[3].norm()) < 1e-5
    assert found[3] is ours, "the slope takes the logits' place"
    kept = logits.clone()
    loss_kernel.score_rows(kept, target if rule.needs_target else None, labels, rule, softcap, False)
    assert torch.equal(kept, logits)


@pytest.mark.parametrize("softcap", [None, 15.0])
@pytest.mark.parametrize(("size", "sharp"), [(37, False), (5000, False), (5000, True)])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_rows_of_the_loss_in_float8(rule: LossRule, size: int, sharp: bool, softcap: float | None) -> None:
    """The slope as it is before it is rounded: the interpreter's own rounding to float8 goes far off."""
    logits, target, labels = given(size, sharp)
    exact = loss.score_rows(logits.clone().double(), target.double(), labels, rule, softcap, True)
    expected = loss_float8.score_rows_float8(logits.clone(), target.clone(), labels, rule, softcap, True)
    needed, ours = target if rule.needs_target else None, logits.clone()
    found = loss_kernel.score_rows_float8(ours, needed, labels, rule, softcap, True, torch.float32)
    assert torch.equal(ours, logits), "the logits stay"
    for name in ("cross_entropy_R", "costs_R", "label_slope_R", "factor_R"):
        got, plain = getattr(found, name), getattr(expected, name)
        assert (got is None) == (plain is None)
        if got is not None:
            torch.testing.assert_close(got, plain, rtol=1e-4, atol=2e-5)
    assert torch.equal(found.correct_R, expected.correct_R)
    assert found.factor_R is not None
    slope = found.slope_RV * found.factor_R[:, None]
    if found.label_slope_R is not None:
        assert not slope[torch.arange(6), labels].any()
        slope[torch.arange(6), labels] = found.label_slope_R
    assert float((slope - exact.slope_RV).norm() / exact.slope_RV.norm()) < 1e-5
    rounded = loss_kernel.score_rows_float8(ours, needed, labels, rule, softcap, True).slope_RV
    assert rounded.dtype == expected.slope_RV.dtype == (GRADIENTS if rule.needs_target else VALUES)


@pytest.mark.parametrize("label_apart", [False, True])
@pytest.mark.parametrize("size", [24, 5000])
def test_rows_are_taken_and_slopes_placed(size: int, label_apart: bool) -> None:
    """Also at a place of -1, which fillers have and which is the last row."""
    generator = torch.Generator().manual_seed(size)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    hidden, places = normal(7, size), torch.tensor([3, 0, 5, -1])
    assert torch.equal(loss_kernel.take_rows(hidden, places), loss.take_rows(hidden, places))
    label_factors = normal(4) if label_apart else None
    slopes = loss.RowSlopes(normal(4, size), normal(4), normal(9, size), torch.tensor([8, 0, 2, 2]), label_factors)
    expected, got = torch.ones(7, size), torch.ones(7, size)
    loss.place_rows(expected, places, slopes)
    loss_kernel.place_rows(got, places, slopes)
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)
    assert (got[1] == 1.0).all()


def test_a_loss_that_wants_the_targets_logits_and_gets_none() -> None:
    with pytest.raises(RuntimeError, match="given none"):
        loss_kernel.score_rows(torch.zeros(2, 8), None, torch.zeros(2).long(), RULES["kl"], None, True)


@pytest.mark.parametrize("factor", [0.5, 0.0])
@pytest.mark.parametrize("has_weights", [True, False])
def test_adamw(factor: float, has_weights: bool) -> None:
    """One update of a length that fills no whole piece; a factor of 0 keeps a gradient that is not finite out."""

    def part() -> AdamWPart:
        generator = torch.Generator().manual_seed(0)
        tensors = [torch.randn(5001, generator=generator) for _ in range(4)]
        if factor == 0.0:
            tensors[3][7] = float("nan")
        weights = torch.zeros(5001) if has_weights else None
        return AdamWPart(tensors[0], weights, tensors[3], tensors[1] * 0.1, tensors[2].abs() * 0.1, 0.1)

    scalars: Any = tuple(torch.tensor(value) for value in (1e-3 if factor else 0.0, factor, 0.1, 0.05))
    plain, ours = part(), part()
    adamw_update(plain, scalars, (0.9, 0.95, 1e-8))
    adamw_kernel.adamw_update(ours, scalars, (0.9, 0.95, 1e-8))
    for name in ("master", "first", "second"):
        torch.testing.assert_close(getattr(ours, name), getattr(plain, name), rtol=1e-6, atol=1e-7)
    if factor == 0.0:
        assert torch.equal(ours.master, part().master)
    if ours.weights is not None:
        assert torch.equal(ours.weights, ours.master)
