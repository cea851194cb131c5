"""Our own kernels on CUDA against the plain arithmetic that they stand in for."""

from __future__ import annotations

import pytest
import torch

from draftmill.config import TrainConfig
from draftmill.drafter import loss
from draftmill.drafter.loss import LossRule
from draftmill.step.flat import FlatParameters
from draftmill.train.optimizer import AdamWPart, FlatAdamW, adamw_update

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")]

RULES = {
    "cross entropy": LossRule(7.0),
    "kl": LossRule(7.0, cross_entropy=0.0, kl=1.0),
    "total variation": LossRule(7.0, cross_entropy=0.0, total_variation=1.0),
    "all, the target's labels": LossRule(7.0, cross_entropy=0.3, kl=0.5, total_variation=0.2, target_labels=True),
}


@pytest.mark.parametrize("softcap", [None, 10.0])
@pytest.mark.parametrize("size", [37, 4096, 50021])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_rows_of_the_loss(rule: LossRule, size: int, softcap: float | None) -> None:
    """Float32 logits with ties, and bfloat16 ones; value, right tokens, slope."""
    from draftmill.drafter.loss_kernel import score_rows

    generator = torch.Generator("cuda").manual_seed(0)
    logits = torch.randn(64, size, device="cuda", generator=generator) * 3
    target = torch.randn(64, size, device="cuda", generator=generator) * 3
    labels = torch.randint(size, (64,), device="cuda", generator=generator)
    logits[3, 5] = logits[3, 9] = 9.0
    labels[3] = 5
    logits[4, 5] = logits[4, 9] = 9.0
    labels[4] = 9
    for dtype, tolerance in ((torch.float32, 2e-5), (torch.bfloat16, 8e-3)):
        x, t = logits.to(dtype), target.to(dtype)
        given = t if rule.needs_target else None
        expected = loss.score_rows(x.clone().float(), t.clone().float(), labels, rule, softcap, True)
        got = score_rows(x.clone(), given, labels, rule, softcap, True)
        for ours, plain in zip(got[:2], expected[:2], strict=True):
            torch.testing.assert_close(ours, plain, rtol=2e-5, atol=2e-5)
        assert torch.equal(got[2], expected[2])
        factor = 1.0 if got[4] is None else got[4][:, None]
        torch.testing.assert_close(got[3].float() * factor, expected[3], rtol=tolerance, atol=tolerance)
        kept = x.clone()
        score_rows(kept, given, labels, rule, softcap, False)
        assert torch.equal(kept, x)


@pytest.mark.parametrize("label_apart", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_taken_and_slopes_placed(dtype: torch.dtype, label_apart: bool) -> None:
    """At Qwen3-8B's width and one that fills no piece; a place of -1 is the last row."""
    from draftmill.drafter.loss_kernel import place_rows, take_rows

    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(shape, device="cuda", generator=generator).to(dtype)

    for size in (4096, 576, 5000):
        hidden, places = normal(33, size), torch.tensor([3, 0, 31, -1], device="cuda")
        assert torch.equal(take_rows(hidden, places), loss.take_rows(hidden, places))
        factor, label_factor = (normal(4, dtype=torch.float32) for _ in range(2))
        labels = torch.tensor([8, 0, 2, 2], device="cuda")
        slopes = loss.RowSlopes(normal(4, size), factor, normal(9, size), labels, label_factor if label_apart else None)
        expected, got = torch.ones_like(hidden), torch.ones_like(hidden)
        loss.place_rows(expected, places, slopes)
        place_rows(got, places, slopes)
        torch.testing.assert_close(got, expected, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)


def test_a_loss_that_wants_the_targets_logits_and_gets_none() -> None:
    from draftmill.drafter.loss_kernel import score_rows

    with pytest.raises(RuntimeError, match="given none"):
        score_rows(torch.zeros(2, 8, device="cuda"), None, torch.zeros(2).long().cuda(), RULES["kl"], None, True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("factor", [0.5, 0.0])
def test_adamw(dtype: torch.dtype, factor: float) -> None:
    """One update of a length that fills no whole piece; a factor of 0 keeps a gradient that is not finite out."""
    from draftmill.train import adamw_kernel

    def part() -> AdamWPart:
        generator = torch.Generator("cuda").manual_seed(0)

        def tensor(*, spread: float = 1.0) -> torch.Tensor:
            return torch.randn(100_003, device="cuda", generator=generator) * spread

        gradient = tensor().to(dtype)
        if factor == 0.0:
            gradient[7] = float("nan")
        master = tensor()
        weights = master.to(dtype) if dtype != torch.float32 else None
        return AdamWPart(master, weights, gradient, tensor(spread=0.1), tensor(spread=0.1).abs(), 0.1)

    scalars = tuple(torch.tensor(value, device="cuda") for value in (1e-3 if factor else 0.0, factor, 0.1, 0.05))
    plain, ours = part(), part()
    adamw_update(plain, scalars, (0.9, 0.95, 1e-8))  # type: ignore[arg-type]
    adamw_kernel.adamw_update(ours, scalars, (0.9, 0.95, 1e-8))  # type: ignore[arg-type]
    for name in ("master", "first", "second"):
        torch.testing.assert_close(getattr(ours, name), getattr(plain, name), rtol=1e-6, atol=1e-7)
    if ours.weights is not None:
        assert torch.equal(ours.weights, ours.master.to(dtype))


def test_the_optimizer_takes_the_kernel_on_cuda() -> None:
    from draftmill.train import adamw_kernel

    flat = FlatParameters(torch.nn.Linear(8, 8), "cuda", torch.bfloat16)
    assert FlatAdamW(flat, TrainConfig())._adamw._update is adamw_kernel.adamw_update
