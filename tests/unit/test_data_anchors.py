"""Anchors: against a plain triple loop, exactly as many as there is room for, none starved, the same every time."""

from __future__ import annotations

import numpy as np
import pytest

from draftmill.data.anchors import Anchors, draw_anchors

SEEDS = {"seed": 5, "epoch": 2, "index": 7}


def documents(random: np.random.Generator, count: int, longest: int, share: float) -> tuple[np.ndarray, np.ndarray]:
    lengths = random.integers(1, longest + 1, count)
    return random.random(lengths.sum()) < share, lengths


def plain_candidates(mask: np.ndarray, lengths: np.ndarray, block_size: int) -> dict[int, tuple[int, int]]:
    """Start of the document and supervised slots, by position of the anchor."""
    found, start = {}, 0
    for length in lengths:
        for position in range(start, start + length):
            slots = 0
            if mask[position]:
                for slot in range(1, block_size):
                    if position + slot >= start + length or not mask[position + slot]:
                        break
                    slots = slot
            if slots:
                found[position] = (start, slots)
        start += length
    return found


def real(anchors: Anchors) -> list[tuple[int, int, int]]:
    n = anchors.num_anchors
    return list(zip(*(x[:n].tolist() for x in (anchors.anchors_A, anchors.starts_A, anchors.slots_A)), strict=True))


@pytest.mark.parametrize("block_size", [2, 3, 8, 16])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.9, 1.0])
def test_all_candidates_and_their_slots_where_they_fit(block_size: int, share: float) -> None:
    random = np.random.default_rng(0)
    for count, longest in ((1, 1), (1, 40), (12, 3), (9, 50)):
        mask, lengths = documents(random, count, longest, share)
        expected = plain_candidates(mask, lengths, block_size)
        anchors = draw_anchors(mask, lengths, num_slots=600, block_size=block_size, **SEEDS)
        assert real(anchors) == [(p, *expected[p]) for p in sorted(expected)]
        assert anchors.num_candidates == len(expected)
        assert anchors.num_scored == sum(slots for _, slots in expected.values())
        assert anchors.coverage == 1.0
        for padded in (anchors.anchors_A, anchors.starts_A, anchors.slots_A):
            assert (padded.dtype, padded.shape) == (np.int32, (600,))
            assert not padded[anchors.num_anchors :].any()


def test_exactly_the_slots_are_filled_with_candidates_ascending() -> None:
    random = np.random.default_rng(1)
    for num_slots in (1, 5, 37, 200):
        mask, lengths = documents(random, 30, 60, 0.9)
        expected = plain_candidates(mask, lengths, 8)
        assert len(expected) > num_slots
        anchors = draw_anchors(mask, lengths, num_slots=num_slots, block_size=8, **SEEDS)
        drawn = real(anchors)
        positions = [position for position, _, _ in drawn]
        assert len(drawn) == num_slots
        assert positions == sorted(set(positions))
        assert all(expected[position] == (start, slots) for position, start, slots in drawn)


def test_short_documents_get_their_share_beside_a_long_one() -> None:
    lengths = np.array([6000, 200, 200, 187, 200, 5])
    mask = np.ones(lengths.sum(), dtype=np.bool_)
    anchors = draw_anchors(mask, lengths, num_slots=512, block_size=16, **SEEDS)
    candidates = lengths - 1
    assert anchors.candidates_D.tolist() == candidates.tolist()
    assert anchors.drawn_D.sum() == 512
    exact = 512 * candidates / candidates.sum()
    assert np.abs(anchors.drawn_D - exact).max() <= 1.0
    assert anchors.drawn_D.min() >= 1
    assert anchors.num_starved == 0


def test_one_each_where_documents_outnumber_half_the_slots() -> None:
    lengths = np.array([4000, *[3] * 60])
    mask = np.ones(lengths.sum(), dtype=np.bool_)
    anchors = draw_anchors(mask, lengths, num_slots=64, block_size=4, **SEEDS)
    assert anchors.drawn_D.tolist() == [4, *[1] * 60]  # in proportion each would get less than one
    assert anchors.num_starved == 0


def test_more_documents_than_slots_is_said() -> None:
    lengths = np.full(20, 5)
    anchors = draw_anchors(np.ones(100, dtype=np.bool_), lengths, num_slots=8, block_size=4, **SEEDS)
    assert anchors.drawn_D.sum() == 8
    assert anchors.drawn_D.max() == 1
    assert anchors.num_starved == 12


def test_a_block_never_crosses_into_the_next_document() -> None:
    lengths = np.array([10, 10])
    anchors = draw_anchors(np.ones(20, dtype=np.bool_), lengths, num_slots=64, block_size=16, **SEEDS)
    assert all(position + slots < start + 10 for position, start, slots in real(anchors))
    assert 9 not in anchors.anchors_A[: anchors.num_anchors]


def test_the_draw_depends_on_each_number_and_on_nothing_else() -> None:
    mask, lengths = documents(np.random.default_rng(2), 20, 60, 0.9)

    def draw(**changed: int) -> list[int]:
        numbers = {**SEEDS, "draw": 0, **changed}
        return draw_anchors(mask, lengths, num_slots=50, block_size=8, **numbers).anchors_A.tolist()

    assert draw() == draw()
    others = [draw(seed=6), draw(epoch=3), draw(index=8), draw(draw=1)]
    assert all(other != draw() for other in others)
    assert len({tuple(other) for other in others}) == 4


@pytest.mark.parametrize("share", [0.25, 1.0])
def test_short_blocks_are_so_many_and_of_every_length(share: float) -> None:
    mask, lengths = documents(np.random.default_rng(2), 40, 600, 0.99)
    sizes = {"num_slots": 4000, "block_size": 8, **SEEDS}
    whole, mixed = (draw_anchors(mask, lengths, short_share=each, **sizes) for each in (0.0, share))
    assert mixed.anchors_A.tolist() == whole.anchors_A.tolist()
    assert mixed.starts_A.tolist() == whole.starts_A.tolist()
    assert not whole.absent_A.any()
    absent = mixed.absent_A[: mixed.num_anchors]
    assert mixed.num_anchors == 4000
    assert not mixed.absent_A[mixed.num_anchors :].any()
    assert mixed.slots_A.tolist() == np.minimum(whole.slots_A, 7 - mixed.absent_A).tolist()
    assert mixed.num_scored == mixed.slots_A.sum()
    counts = np.bincount(absent, minlength=7)
    expected = 4000 * np.array([1 - share, *[share / 6] * 6])  # the last slot is any of 1..6, or 7 in a whole block
    assert len(counts) == 7
    assert np.abs(counts - expected).max() < 5 * np.sqrt(expected.max())


def test_what_is_short_depends_on_each_number_and_on_nothing_else() -> None:
    mask, lengths = documents(np.random.default_rng(2), 20, 60, 0.9)

    def draw(**changed: int) -> list[int]:
        numbers = {**SEEDS, "draw": 0, **changed}
        return draw_anchors(mask, lengths, num_slots=2000, block_size=8, short_share=0.5, **numbers).absent_A.tolist()

    assert draw() == draw()
    others = [draw(seed=6), draw(epoch=3), draw(index=8), draw(draw=1)]
    assert len({tuple(other) for other in [*others, draw()]}) == 5


def test_blocks_of_two_are_never_short() -> None:
    anchors = draw_anchors(np.ones(20, bool), np.array([20]), num_slots=30, block_size=2, short_share=1.0, **SEEDS)
    assert not anchors.absent_A.any()
    assert anchors.num_scored == 19


def test_every_candidate_is_as_likely_as_another() -> None:
    lengths = np.array([31, 61, 11])
    mask = np.ones(lengths.sum(), dtype=np.bool_)
    counts = np.zeros(lengths.sum())
    draws = 3000
    for index in range(draws):
        anchors = draw_anchors(mask, lengths, num_slots=20, block_size=4, seed=0, epoch=0, index=index)
        counts[anchors.anchors_A] += 1
    candidates = np.ones(lengths.sum(), dtype=np.bool_)
    candidates[np.cumsum(lengths) - 1] = False
    assert (counts[~candidates] == 0).all()
    # 20 of 100 candidates: 30 + 60 + 10; five standard deviations of a binomial
    assert np.abs(counts[candidates] / draws - 0.2).max() < 5 * np.sqrt(0.2 * 0.8 / draws)


def test_no_document_at_all() -> None:
    anchors = draw_anchors(np.zeros(0, bool), np.zeros(0, np.int64), num_slots=4, block_size=4, **SEEDS)
    assert anchors.num_anchors == 0
    assert anchors.anchors_A.tolist() == [0, 0, 0, 0]
    assert anchors.coverage == 1.0
