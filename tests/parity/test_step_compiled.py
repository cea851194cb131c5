"""The compiled step equals the eager one, on a CPU, where both run everywhere; a second shape is an error."""

from __future__ import annotations

import threading

import pytest
import torch

from draftmill.compiling import num_compilations
from draftmill.config import TrainConfig
from draftmill.step.choose import build_step, fill_randomly
from draftmill.train.optimizer import FlatAdamW
from small_steps import ANCHORS, BLOCK, small_state

STEPS = 20


def train(choice: str) -> tuple[torch.Tensor, list[float]]:
    state = small_state()
    optimizer = FlatAdamW(state.flat, TrainConfig())
    built = build_step(choice, state, optimizer)  # type: ignore[arg-type]
    losses = []
    for step in range(STEPS):
        fill_randomly(state)
        state.features_TF.copy_(torch.randn(32, 16, generator=torch.Generator().manual_seed(step)))
        state.blocks.slots_A[ANCHORS - 1] = step % BLOCK  # another mask of weights every step
        state.begin()
        built.step.run(int(state.blocks.slots_A.sum()), ANCHORS)
        optimizer.lr.fill_(1e-2)
        built.update()
        losses.append(float(state.totals[0] / state.totals[1]))
    return state.flat.master.clone(), losses


def test_twenty_steps_compiled_in_two_threads_end_at_eagers_weights() -> None:
    expected, expected_losses = train("eager")
    found: dict[int, tuple[torch.Tensor, list[float]]] = {}
    before = num_compilations()
    threads = [
        threading.Thread(target=lambda index=index: found.update({index: train("compiled")})) for index in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == [0, 1], "both workers compiled and ran"
    # each compiles its trunk and its update, whatever the number of steps
    assert before + 4 <= num_compilations() <= before + 8
    for weights, losses in found.values():
        assert losses == pytest.approx(expected_losses, rel=1e-4)
        torch.testing.assert_close(weights, expected, rtol=1e-3, atol=1e-4)


def test_the_update_equals_torchs_adamw() -> None:
    state = small_state()
    config = TrainConfig(weight_decay=0.1, clip=0.5)
    optimizer = FlatAdamW(state.flat, config)
    matrices = [p.detach().clone().requires_grad_() for p in state.drafter.parameters() if p.dim() == 2]
    vectors = [p.detach().clone().requires_grad_() for p in state.drafter.parameters() if p.dim() == 1]
    theirs = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        lr=3e-3,
        betas=config.betas,
        eps=config.eps,
    )
    generator = torch.Generator().manual_seed(5)
    for _ in range(5):
        gradients = [torch.randn(p.shape, generator=generator) for p in state.drafter.parameters()]
        for parameter, gradient in zip(state.drafter.parameters(), gradients, strict=True):
            parameter.grad.copy_(gradient * 7.0)  # the sum over weights of 7 in all
        own = dict(zip([id(p) for p in state.drafter.parameters()], gradients, strict=True))
        for kind, parameters in ((2, matrices), (1, vectors)):
            same = [p for p in state.drafter.parameters() if p.dim() == kind]
            for parameter, source in zip(parameters, same, strict=True):
                parameter.grad = own[id(source)].clone()
        norm = torch.nn.utils.clip_grad_norm_([*matrices, *vectors], config.clip)
        optimizer.lr.fill_(3e-3)
        optimizer.update(torch.tensor(7.0))
        theirs.step()
        assert float(optimizer.grad_norm) == pytest.approx(float(norm), rel=1e-5)
    ours = [p for p in state.drafter.parameters() if p.dim() == 2]
    for mine, expected in zip(ours, matrices, strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-6)


def test_a_gradient_that_is_not_finite_leaves_the_weights() -> None:
    state = small_state()
    optimizer = FlatAdamW(state.flat, TrainConfig())
    before = state.flat.master.clone()
    state.flat.gradient.fill_(1.0)
    state.flat.gradient[3] = float("nan")
    optimizer.lr.fill_(1e-2)
    optimizer.update(torch.tensor(1.0))
    assert torch.equal(state.flat.master, before)
    assert not torch.isfinite(optimizer.grad_norm)
