"""The updates on flat buffers equal torch's own optimizers, and compiled ones the eager ones."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from draftmill.config import TrainConfig
from draftmill.step.compiled import compile_piece
from draftmill.step.flat import FlatParameters
from draftmill.train import muon
from draftmill.train.muon import FlatMuon, orthogonalized, rate_factor
from draftmill.train.optimizer import FlatAdamW, FlatOptimizer

STEPS = 20
OPTIMIZERS: dict[str, type[FlatOptimizer]] = {"adamw": FlatAdamW, "muon": FlatMuon}


class Net(nn.Module):
    """Matrices tall, wide and square, two of one shape apart from each other, sizes that fill no alignment, vectors."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        for name, shape in (
            ("wide", (8, 20)),
            ("norm", (20,)),
            ("tall", (24, 8)),
            ("again", (8, 20)),
            ("square", (16, 16)),
            ("scale", (7,)),
            ("last", (8, 20)),
        ):
            setattr(self, name, nn.Parameter(torch.randn(shape, generator=generator) * 0.3))


def gradients(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return {name: torch.randn(p.shape, generator=generator) for name, p in Net().named_parameters()}


def ours(config: TrainConfig, dtype: torch.dtype = torch.float32, compiled: bool = False) -> FlatOptimizer:
    """20 updates at a falling rate; the gradient is the sum over weights of 7 in all."""
    net = Net()
    flat = FlatParameters(net, "cpu", dtype)
    optimizer = OPTIMIZERS[config.optimizer](flat, config)
    update = type(optimizer).update
    if compiled:
        update = compile_piece(update, f"test_{id(flat)}")
    for step in range(STEPS):
        for name, gradient in gradients(step).items():
            net.get_parameter(name).grad.copy_(gradient * 7.0)
        optimizer.lr.fill_(config.lr * (1.0 - step / STEPS))
        update(optimizer, torch.tensor(7.0))
    return optimizer


def theirs(config: TrainConfig) -> tuple[dict[str, torch.Tensor], float]:
    """The same with torch's optimizers: the masters, and the last norm of the gradient before clipping."""
    net = Net()
    matrices = [p for p in net.parameters() if p.dim() == 2]
    vectors = [p for p in net.parameters() if p.dim() == 1]
    adamw = {"lr": config.lr, "betas": config.betas, "eps": config.eps}
    optimizers: list[torch.optim.Optimizer] = [torch.optim.AdamW(vectors, weight_decay=0.0, **adamw)]
    if config.optimizer == "adamw":
        optimizers.append(torch.optim.AdamW(matrices, weight_decay=config.weight_decay, **adamw))
    else:
        optimizers.append(
            torch.optim.Muon(
                matrices,
                lr=config.muon_lr,
                weight_decay=config.weight_decay,
                momentum=config.muon_momentum,
                nesterov=config.muon_nesterov,
                ns_coefficients=config.muon_ns_coefficients,
                ns_steps=config.muon_ns_steps,
                adjust_lr_fn=config.muon_adjust_lr_fn,
            )
        )
    peaks = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    norm = 0.0
    for step in range(STEPS):
        for name, gradient in gradients(step).items():
            net.get_parameter(name).grad = gradient
        norm = float(nn.utils.clip_grad_norm_(net.parameters(), config.clip))
        for optimizer, peak in zip(optimizers, peaks, strict=True):
            optimizer.param_groups[0]["lr"] = peak * (1.0 - step / STEPS)
            optimizer.step()
    return {name: p.detach() for name, p in net.named_parameters()}, norm


CONFIGS = {
    "adamw": TrainConfig(optimizer="adamw", lr=3e-3, weight_decay=0.1, clip=0.5),
    "muon": TrainConfig(optimizer="muon", lr=3e-3, muon_lr=2e-2, weight_decay=0.1, clip=0.5),
    "muon, rates like AdamW's": TrainConfig(optimizer="muon", lr=3e-3, muon_adjust_lr_fn="match_rms_adamw", clip=50.0),
    "muon, no nesterov": TrainConfig(
        optimizer="muon", muon_nesterov=False, muon_momentum=0.8, muon_ns_steps=3, muon_ns_coefficients=(3.0, -3.2, 1.2)
    ),
}


@pytest.mark.parametrize("case", CONFIGS)
@pytest.mark.parametrize("batch_elements", [2**25, 1])
def test_twenty_updates_equal_torchs(case: str, batch_elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(muon, "BATCH_ELEMENTS", batch_elements)
    config = CONFIGS[case]
    optimizer = ours(config)
    expected, norm = theirs(config)
    start = {name: p.detach() for name, p in Net().named_parameters()}
    assert float(optimizer.grad_norm) == pytest.approx(norm, rel=1e-5)
    assert int(optimizer.count) == STEPS
    # Muon's iteration is in bfloat16: another order of its sums is 1 % of a step.
    allowed = 1e-4 if config.optimizer == "adamw" else 5e-3
    for name, master in optimizer.flat.named(optimizer.flat.master).items():
        moved = expected[name] - start[name]
        difference = float((master - expected[name]).norm() / moved.norm())
        assert difference < (1e-4 if expected[name].dim() == 1 else allowed), name


@pytest.mark.parametrize("case", ["adamw", "muon"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_updates_equal_eager_ones(case: str, dtype: torch.dtype) -> None:
    config = CONFIGS[case].model_copy(update={"ema_decay": 0.6})
    eager, compiled = ours(config, dtype), ours(config, dtype, compiled=True)
    moved = eager.flat.master - FlatParameters(Net(), "cpu", dtype).master
    allowed = 1e-4 if case == "adamw" else 2e-2
    assert float((compiled.flat.master - eager.flat.master).norm() / moved.norm()) < allowed
    assert torch.equal(compiled.flat.weights, compiled.flat.master.to(dtype))
    assert int(compiled.count) == STEPS
    assert eager.average is not None
    assert compiled.average is not None
    assert float((compiled.average.average - eager.average.average).norm() / moved.norm()) < allowed
    for kind, named in eager.moments().items():
        for name, moment in named.items():
            torch.testing.assert_close(compiled.moments()[kind][name], moment, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("case", ["adamw", "muon"])
def test_the_same_updates_give_the_same_bits(case: str) -> None:
    first, second = ours(CONFIGS[case]), ours(CONFIGS[case])
    assert torch.equal(first.flat.master, second.flat.master)


@pytest.mark.parametrize("case", ["adamw", "muon"])
def test_a_gradient_that_is_not_finite_leaves_the_weights(case: str) -> None:
    optimizer = ours(CONFIGS[case])
    before = optimizer.flat.master.clone()
    optimizer.flat.gradient.fill_(1.0)
    optimizer.flat.gradient[3] = float("nan")
    optimizer.update(torch.tensor(1.0))
    assert torch.equal(optimizer.flat.master, before)
    assert not torch.isfinite(optimizer.grad_norm)
    for named in optimizer.moments().values():
        for name, moment in named.items():
            assert torch.isfinite(moment).all(), name


def test_muon_brings_singular_values_near_one_and_keeps_the_directions() -> None:
    matrices = torch.randn(3, 12, 30, generator=torch.Generator().manual_seed(1))
    for given in (matrices, matrices.mT):
        found = orthogonalized(given, (3.4445, -4.7750, 2.0315), 5).float()
        values = torch.linalg.svdvals(found)
        assert values.min() > 0.6
        assert values.max() < 1.3
        left, _, right = torch.linalg.svd(given, full_matrices=False)
        inner = left.mT @ found @ right.mT
        off = inner - torch.diag_embed(inner.diagonal(dim1=1, dim2=2))
        assert off.abs().max() < 0.06


def test_muons_rates_by_shape() -> None:
    assert rate_factor("original", 400, 100) == 2.0
    assert rate_factor("original", 100, 400) == 1.0
    assert rate_factor("match_rms_adamw", 100, 400) == pytest.approx(4.0)


def test_muon_remembers_one_moment_a_matrix_and_two_a_vector() -> None:
    optimizer = ours(CONFIGS["muon"])
    names = {kind: set(named) for kind, named in optimizer.moments().items()}
    vectors = {"norm", "scale"}
    assert names == {
        "momentum_buffer": {"wide", "tall", "again", "square", "last"},
        "exp_avg": vectors,
        "exp_avg_sq": vectors,
    }
    flat = optimizer.flat
    assert optimizer.momentum.numel() == flat.num_matrix_elements == 3 * 192 + 192 + 256
    assert optimizer.first.numel() == optimizer.second.numel() == flat.size - flat.num_matrix_elements == 128


@pytest.mark.parametrize("case", ["adamw", "muon"])
def test_restored_moments_go_on_bit_for_bit_and_anothers_are_refused(case: str) -> None:
    whole = ours(CONFIGS[case])
    net = Net()
    flat = FlatParameters(net, "cpu", torch.float32)
    other = OPTIMIZERS[case](flat, CONFIGS[case])
    flat.load(whole.flat.named(whole.flat.master))
    other.restore(whole.moments(), int(whole.count))
    for optimizer in (whole, other):
        for name, gradient in gradients(50).items():
            optimizer.flat.view(optimizer.flat.gradient, name).copy_(gradient)
        optimizer.lr.fill_(1e-3)
        optimizer.update(torch.tensor(2.0))
    assert torch.equal(whole.flat.master, other.flat.master)
    wrong = ours(CONFIGS["muon" if case == "adamw" else "adamw"]).moments()
    with pytest.raises(RuntimeError, match=r"moments are .*exp_avg, exp_avg_sq, got "):
        other.restore(wrong, 3)


def test_reset_forgets_all_updates() -> None:
    optimizer = ours(CONFIGS["muon"])
    optimizer.reset()
    assert int(optimizer.count) == 0
    for named in optimizer.moments().values():
        for moment in named.values():
            assert not moment.any()
