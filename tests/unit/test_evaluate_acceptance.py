"""The acceptance estimator: exact on whole blocks, unbiased on cut ones."""

from __future__ import annotations

import pytest
import torch

from draftmill.evaluate.acceptance import (
    StepRecord,
    accept_by_slot,
    accept_given_previous,
    accept_length,
    acceptance_counts,
    histogram,
    leading_run,
    step_counts,
    tau_pooled,
    tau_response_mean,
)


def test_leading_run_stops_at_the_first_wrong_slot_and_at_the_block_s_end() -> None:
    correct = torch.tensor(
        [
            [0, 1, 1, 0, 1],  # wrong at slot 3; the right one after it does not count
            [1, 0, 1, 1, 1],  # wrong at once; slot 0 is given and does not count
            [0, 1, 1, 1, 1],  # whole block
            [0, 1, 1, 1, 1],  # only two slots are scored
            [0, 1, 1, 1, 1],  # unused
        ],
        dtype=torch.bool,
    )
    assert leading_run(correct, torch.tensor([4, 4, 4, 2, 0])).tolist() == [2, 0, 4, 2, 0]


def test_counts_by_hand() -> None:
    correct = torch.tensor([[0, 1, 1, 0], [0, 1, 0, 1], [0, 1, 1, 1]], dtype=torch.bool)
    counts = acceptance_counts(correct, torch.tensor([3, 3, 1]))  # the third block is cut after its first slot
    assert counts.tolist() == [[3, 2, 1], [3, 1, 0]]
    assert accept_given_previous(counts).tolist() == [1.0, 0.5, 0.0]
    assert accept_by_slot(counts).tolist() == [1.0, 0.5, 0.0]
    assert accept_length(counts).item() == 2.5


def test_whole_blocks_give_the_plain_mean() -> None:
    generator = torch.Generator().manual_seed(0)
    correct = torch.rand(500, 8, generator=generator) < 0.7
    slots = torch.full((500,), 7)
    expected = 1.0 + leading_run(correct, slots).double().mean()
    assert accept_length(acceptance_counts(correct, slots)).item() == pytest.approx(expected.item(), abs=1e-12)


def test_cut_blocks_are_not_counted_as_wrong() -> None:
    always = torch.ones(10, 8, dtype=torch.bool)
    cut = torch.tensor([7, 6, 5, 4, 3, 2, 1, 1, 1, 7])
    assert accept_length(acceptance_counts(always, cut)).item() == 8.0

    # Random lengths, independent of what is right: the estimate stays at the truth, the plain mean of runs falls short.
    generator = torch.Generator().manual_seed(1)
    blocks, slots = 200_000, 7
    chances = torch.tensor([0.9, 0.8, 0.85, 0.7, 0.9, 0.6, 0.8])
    correct = torch.cat([torch.zeros(blocks, 1), torch.rand(blocks, slots, generator=generator) < chances], 1).bool()
    cut = torch.randint(1, slots + 1, (blocks,), generator=generator)
    truth = 1.0 + chances.cumprod(0).sum().item()
    assert accept_length(acceptance_counts(correct, cut)).item() == pytest.approx(truth, abs=0.02)
    assert 1.0 + leading_run(correct, cut).double().mean().item() < truth - 0.5


def test_counts_add_over_batches_and_unused_blocks_add_nothing() -> None:
    generator = torch.Generator().manual_seed(2)
    correct = torch.rand(64, 6, generator=generator) < 0.6
    slots = torch.randint(0, 6, (64,), generator=generator)
    whole = acceptance_counts(correct, slots)
    assert torch.equal(whole, acceptance_counts(correct[:20], slots[:20]) + acceptance_counts(correct[20:], slots[20:]))
    nothing = acceptance_counts(correct, torch.zeros(64, dtype=torch.int32))
    assert nothing.sum().item() == 0
    assert accept_length(nothing).item() == 1.0


def test_nothing_right_is_one_and_nobody_at_risk_is_a_lower_bound() -> None:
    wrong = torch.zeros(4, 5, dtype=torch.bool)
    assert accept_length(acceptance_counts(wrong, torch.full((4,), 4))).item() == 1.0
    right = torch.ones(4, 5, dtype=torch.bool)
    assert accept_length(acceptance_counts(right, torch.full((4,), 2))).item() == 3.0  # slots 3 and 4 never scored


def test_decoding_steps_use_the_same_estimator() -> None:
    # The second response ended inside its accepted drafts: slot 3 of that step has no verdict.
    steps = [StepRecord(3, 2, 3), StepRecord(1, 0, 3), StepRecord(2, 2, 2)]
    counts = step_counts(steps, 3)
    assert counts.tolist() == [[3, 2, 1], [2, 2, 0]]
    assert histogram(steps, 3) == [1, 0, 2, 0]


def test_the_two_means_differ_and_are_both_right() -> None:
    short = [StepRecord(4, 3, 3)]
    long = [StepRecord(1, 0, 3)] * 3
    assert tau_response_mean([short, long]) == pytest.approx(2.5)
    assert tau_pooled([short, long]) == pytest.approx(7 / 4)
    assert tau_response_mean([[], short]) == 4.0
    assert tau_response_mean([[]]) is None
    assert tau_pooled([]) is None
