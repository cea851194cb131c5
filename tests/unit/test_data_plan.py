"""Plans: every sample once an epoch, budgets kept, any batch addressable, all of it from (seed, epoch)."""

from __future__ import annotations

import logging
from itertools import chain, product
from typing import Any

import numpy as np
import pytest

from draftmill.data.buckets import bucket_of, choose_edges
from draftmill.data.packing import pack
from draftmill.data.plan import BatchPlan, split_heldout
from draftmill.errors import InputError

SETTINGS: dict[str, Any] = {
    "max_length": 512,
    "token_budget": 2048,
    "min_rows": 3,
    "max_rows": 24,
    "num_buckets": 4,
    "bucket_edges": None,
    "round_to": 16,
    "seed": 7,
}


def draw_lengths(count: int, seed: int = 0, longest: int = 512) -> np.ndarray:
    lengths = np.exp(np.random.default_rng(seed).normal(4.5, 0.9, count))
    return np.clip(lengths, 2, longest).astype(np.int32)


def batches(plan: BatchPlan, epoch: int) -> list[list[int]]:
    return [plan.sample_ids(epoch, index).tolist() for index in range(plan.num_batches(epoch))]


@pytest.mark.parametrize("count", [1, 2, 5, 63, 1000, 3001])
@pytest.mark.parametrize("batching", ["bucketed", "packed"])
@pytest.mark.parametrize("changed", [{}, {"num_buckets": 1}, {"bucket_edges": [40, 200, 513]}, {"round_to": 1}])
def test_every_sample_once_an_epoch_and_budgets_kept(count: int, batching: Any, changed: dict[str, Any]) -> None:
    lengths = draw_lengths(count)
    plan = BatchPlan(lengths, **{**SETTINGS, **changed}, batching=batching)
    for epoch in (0, 5):
        every = batches(plan, epoch)
        assert sorted(chain.from_iterable(every)) == list(range(count))
        for index, ids in enumerate(every):
            rows = plan.rows(epoch, index)
            num_rows, row_length = plan.shape(int(lengths[ids].max()), len(ids))
            in_row = np.bincount(rows, weights=lengths[ids], minlength=num_rows)
            assert len(in_row) == num_rows
            assert (np.diff(rows) >= 0).all()
            assert in_row.max() <= row_length <= plan.max_length
            assert lengths[ids].sum() <= plan.context_slots
            assert num_rows * row_length <= plan.padded_slots
            if batching == "bucketed":
                assert num_rows <= 24
                assert num_rows * row_length <= 2048 or num_rows <= 3
                low, high = bucket_bounds(plan, plan.bucket(epoch, index))
                assert low <= lengths[ids].min() <= lengths[ids].max() < high


def bucket_bounds(plan: BatchPlan, bucket: int) -> tuple[int, int]:
    edges = [0, *plan.edges]
    return edges[bucket], edges[bucket + 1]


def test_a_batch_is_full_but_for_each_buckets_last() -> None:
    lengths = draw_lengths(4000)
    plan = BatchPlan(lengths, **SETTINGS)
    short = np.zeros(len(plan.edges), dtype=np.int64)
    for index, ids in enumerate(batches(plan, 0)):
        fit = np.clip(2048 // plan.row_length(lengths[ids].max()), 3, 24)
        short[plan.bucket(0, index)] += len(ids) < fit
    assert short.max() <= 2  # what is left at the end, which may share its rows with its neighbour
    assert min(map(len, batches(plan, 0))) >= 3


def test_neighbours_in_length_share_a_batch_and_others_do_in_the_next_epoch() -> None:
    lengths = draw_lengths(4000)
    plan = BatchPlan(lengths, **SETTINGS)
    assert plan.padding_share(0) < 0.11  # rounding up to 16 tokens alone costs 6 % here
    partners = [{frozenset(ids) for ids in batches(plan, epoch)} for epoch in (0, 1)]
    assert len(partners[0] & partners[1]) <= 0.02 * len(partners[0])


@pytest.mark.parametrize("batching", ["bucketed", "packed"])
def test_order_is_from_seed_and_epoch_alone(batching: Any) -> None:
    lengths = draw_lengths(700)

    def epoch(number: int, **changed: Any) -> list[list[int]]:
        return batches(BatchPlan(lengths, **{**SETTINGS, **changed}, batching=batching), number)

    assert epoch(3) == epoch(3)
    assert epoch(3) != epoch(4)
    assert epoch(3) != epoch(3, seed=8)


@pytest.mark.parametrize("batching", ["bucketed", "packed"])
def test_any_batch_addressed_directly_is_the_one_met_in_order(batching: Any) -> None:
    lengths = draw_lengths(900)
    in_order = BatchPlan(lengths, **SETTINGS, batching=batching)
    stream = [
        (epoch, index, in_order.sample_ids(epoch, index).tolist(), in_order.bucket(epoch, index))
        for epoch in range(5)
        for index in range(in_order.num_batches(epoch))
    ]
    assert in_order.total(5) == len(stream)
    for number in np.random.default_rng(0).permutation(len(stream))[:60].tolist():
        plan = BatchPlan(lengths, **SETTINGS, batching=batching)
        epoch, index = plan.locate(number)
        found = (epoch, index, plan.sample_ids(epoch, index).tolist(), plan.bucket(epoch, index))
        assert found == stream[number]


def test_numbers_outside_are_refused() -> None:
    plan = BatchPlan(draw_lengths(50), **SETTINGS)
    with pytest.raises(IndexError):
        plan.sample_ids(0, plan.num_batches(0))
    with pytest.raises(IndexError):
        plan.locate(-1)


def test_sample_ids_limit_the_plan_to_them() -> None:
    lengths = draw_lengths(300)
    chosen = np.arange(5, 300, 7)
    plan = BatchPlan(lengths, **SETTINGS, sample_ids=chosen)
    assert sorted(chain.from_iterable(batches(plan, 0))) == chosen.tolist()
    assert plan.num_samples == len(chosen)


def test_min_rows_may_exceed_the_budget_and_the_bound_says_so() -> None:
    lengths = np.full(30, 500, dtype=np.int32)
    plan = BatchPlan(lengths, **{**SETTINGS, "token_budget": 600})
    assert plan.context_slots == 1500
    assert plan.padded_slots == 1536
    assert {len(ids) for ids in batches(plan, 0)} == {3}


def test_row_length_never_exceeds_max_length() -> None:
    plan = BatchPlan(np.full(10, 500, dtype=np.int32), **{**SETTINGS, "max_length": 500, "round_to": 64})
    assert plan.shape(500, 3) == (3, 500)
    assert plan.shape(65, 3) == (3, 128)


def test_the_bound_on_real_tokens_is_reached() -> None:
    lengths = np.full(64, 128, dtype=np.int32)
    plan = BatchPlan(lengths, **SETTINGS)
    assert plan.context_slots == 2048
    assert max(int(lengths[ids].sum()) for ids in batches(plan, 0)) == 2048


def test_the_lines_of_a_start() -> None:
    lengths = np.array([100] * 40 + [300] * 12 + [512] * 9, dtype=np.int32)
    plan = BatchPlan(lengths, **{**SETTINGS, "bucket_edges": [200, 400, 513]})
    assert plan.describe() == [
        "61 samples loaded (Arrow-backed, lazy access)",
        "Batches per epoch: 8 (min=1 max=18 avg=7.6)",
        "  Bucket 0 [   0, 200):      3 batches ( 37.5%)",
        "  Bucket 1 [ 200, 400):      2 batches ( 25.0%)",
        "  Bucket 2 [ 400, 513):      3 batches ( 37.5%)",
        f"Padding: {100 * (1 - 12208 / (40 * 112 + 12 * 304 + 9 * 512)):.2f}% of the target's tokens",
    ]


def test_the_last_edge_may_be_the_longest_sample() -> None:
    lengths = np.array([10, 512], dtype=np.int32)
    plan = BatchPlan(lengths, **{**SETTINGS, "bucket_edges": [100, 512]})
    assert plan.describe()[3].startswith("  Bucket 1 [ 100, 512]:      1 batches")


def test_bad_settings_are_one_clear_line() -> None:
    lengths = draw_lengths(50)
    with pytest.raises(InputError, match=r"bucket_edges end at 60, the longest sample has \d+ tokens"):
        BatchPlan(lengths, **{**SETTINGS, "bucket_edges": [30, 60]})
    with pytest.raises(InputError, match=r"a sample has \d+ tokens, data.max_length is 64"):
        BatchPlan(lengths, **{**SETTINGS, "max_length": 64})
    with pytest.raises(InputError, match="no sample"):
        BatchPlan(lengths[:0], **SETTINGS)


def plain_cost(rounded: np.ndarray, edges: list[int]) -> int:
    tops = [
        max((r for r, b in zip(rounded, bucket_of(rounded, edges), strict=True) if b == k), default=0)
        for k in range(len(edges))
    ]
    return sum(tops[b] for b in bucket_of(rounded, edges).tolist())


def test_chosen_edges_waste_least() -> None:
    lengths = draw_lengths(60, seed=3, longest=128)
    rounded = -(-lengths.astype(np.int64) // 16) * 16
    for num_buckets in (1, 2, 3):
        edges = choose_edges(lengths, num_buckets, 128, 16)
        assert len(edges) <= num_buckets
        assert edges[-1] == 129
        best = min(
            plain_cost(rounded, [*sorted(set(inner)), 129])
            for inner in product([16 * k + 1 for k in range(1, 8)], repeat=num_buckets - 1)
        )
        assert plain_cost(rounded, edges) == best


def test_packing_is_best_fit_longest_first() -> None:
    rows = pack(np.array([6, 5, 4, 3, 2]), 10)
    assert rows.tolist() == [0, 1, 0, 1, 1]
    for seed in range(20):
        random = np.random.default_rng(seed)
        lengths = random.integers(1, 101, 200)
        rows = pack(lengths, 100)
        filled = np.bincount(rows, weights=lengths)
        assert filled.max() <= 100
        assert filled.min() > 0
        assert len(filled) <= 1.25 * lengths.sum() / 100 + 1


def test_packed_rows_are_nearly_full() -> None:
    plan = BatchPlan(draw_lengths(5000), **SETTINGS, batching="packed")
    assert plan.padding_share() < 0.005
    assert plan.describe()[2] == "  Packed into 4 rows of 512 tokens"


def test_the_heldout_split_is_from_the_seed_alone(caplog: pytest.LogCaptureFixture) -> None:
    train, heldout = split_heldout(1000, 64, seed=3)
    assert len(heldout) == 64
    assert sorted([*train.tolist(), *heldout.tolist()]) == list(range(1000))
    assert split_heldout(1000, 64, seed=3)[1].tolist() == heldout.tolist()
    assert split_heldout(1000, 64, seed=4)[1].tolist() != heldout.tolist()
    assert not caplog.records


def test_few_samples_hold_out_fewer_and_say_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        train, heldout = split_heldout(52, 64, seed=0)
    assert (len(train), len(heldout)) == (42, 10)
    assert caplog.messages == ["Held out 10 samples, not 64: at most one in 5 of the store's 52"]
    assert [len(part) for part in split_heldout(3, 0, seed=0)] == [3, 0]
    with pytest.raises(InputError, match="3 samples, too few to hold any out"):
        split_heldout(3, 64, seed=0)
    with pytest.raises(InputError, match="no samples"):
        split_heldout(0, 0, seed=0)
