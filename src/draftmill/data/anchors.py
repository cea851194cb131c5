"""Anchors: where the blocks of a drafter batch begin.

Owns the drawing, from (seed, epoch, index, draw) alone. Never reads samples and imports no torch.

Shape letters as in records.py: T context slots, A anchor slots, K block size; D documents of the batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

# Tell these streams of random numbers from one another and from the plan's, which is drawn from the same seed.
_ANCHOR_STREAM = 0xA2C4
_LENGTH_STREAM = 0x1E46


@dataclass(frozen=True, slots=True)
class Anchors:
    """The drawn blocks, as in records.Blocks, and what they cover.

    anchors_A, starts_A, slots_A, absent_A   int32 [A]; the first num_anchors are real, ascending; the rest are 0
    num_candidates                 positions that could have been anchors
    num_scored                     supervised slots of all blocks, the sum of slots_A
    candidates_D, drawn_D          int64 [D], candidates of each document and how many of them were drawn
    """

    anchors_A: np.ndarray
    starts_A: np.ndarray
    slots_A: np.ndarray
    absent_A: np.ndarray
    num_anchors: int
    num_candidates: int
    num_scored: int
    candidates_D: np.ndarray
    drawn_D: np.ndarray

    @property
    def coverage(self) -> float:
        """Share of the candidates that were drawn; 1 where there are none."""
        return self.num_anchors / self.num_candidates if self.num_candidates else 1.0

    @property
    def num_starved(self) -> int:
        """Documents that have candidates and got no anchor; above 0 only with more documents than anchor slots."""
        return int(np.count_nonzero((self.candidates_D > 0) & (self.drawn_D == 0)))


def draw_anchors(
    loss_mask_T: np.ndarray,
    lengths_D: np.ndarray,
    *,
    num_slots: int,
    block_size: int,
    seed: int,
    epoch: int,
    index: int,
    draw: int = 0,
    short_share: float = 0.0,
) -> Anchors:
    """Draw the anchors of one drafter batch (dflash.md, Blocks).

    A position is a candidate if its own token and the next one are supervised in the same document. All candidates
    are anchors where they fit in the slots; else exactly `num_slots` are, shared among the documents in proportion to
    their candidates, at least one each, uniformly inside a document.

    Args:
        loss_mask_T: bool [sum of lengths_D], document after document.
        lengths_D: tokens of each document.
        num_slots: A, anchor slots.
        block_size: K; a block has at most K - 1 supervised slots.
        seed, epoch, index, draw: the numbers that everything drawn depends on.
        short_share: the chance of each block to be a short one, with a last slot drawn evenly from 1..K-2. Which
            anchors are drawn does not depend on it.
    """
    lengths = np.asarray(lengths_D, dtype=np.int64)
    starts = np.cumsum(lengths) - lengths
    positions, slots = _candidates(np.asarray(loss_mask_T, dtype=np.bool_), starts, block_size)
    documents = np.searchsorted(starts, positions, side="right") - 1
    candidates = np.bincount(documents, minlength=len(lengths))
    if len(positions) > num_slots:
        random = np.random.Generator(
            np.random.Philox(np.random.SeedSequence([_ANCHOR_STREAM, seed, epoch, index, draw]))
        )
        drawn = _quotas(candidates, num_slots, random)
        chosen = _choose(documents, candidates, drawn, random)
        positions, slots, documents = positions[chosen], slots[chosen], documents[chosen]
    else:
        drawn = candidates
    numbers = [_LENGTH_STREAM, seed, epoch, index, draw]
    absent = _absent(len(positions), block_size, short_share, numbers)
    slots = np.minimum(slots, block_size - 1 - absent)
    return Anchors(
        anchors_A=_padded(positions, num_slots),
        starts_A=_padded(starts[documents], num_slots),
        slots_A=_padded(slots, num_slots),
        absent_A=_padded(absent, num_slots),
        num_anchors=len(positions),
        num_candidates=int(candidates.sum()),
        num_scored=int(slots.sum()),
        candidates_D=candidates,
        drawn_D=drawn,
    )


def _candidates(mask_T: np.ndarray, starts: np.ndarray, block_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Candidate positions, ascending, and the supervised slots after each."""
    num_tokens = len(mask_T)
    follows_T = mask_T.copy()  # token t continues a supervised run that can have begun at t - 1
    follows_T[starts[starts < num_tokens]] = False
    positions = np.flatnonzero(mask_T[:-1] & follows_T[1:]) if num_tokens > 1 else np.empty(0, np.int64)
    stops = np.append(np.flatnonzero(~follows_T), num_tokens)
    run_ends = stops[np.searchsorted(stops, positions, side="right")]
    return positions, np.minimum(run_ends - positions - 1, block_size - 1)


def _absent(num_blocks: int, block_size: int, share: float, numbers: list[int]) -> np.ndarray:
    """Slots that each block lacks at its end: 0 for whole ones, else such that the last one is drawn from 1..K-2."""
    if not share or block_size < 3:
        return np.zeros(num_blocks, dtype=np.int64)
    random = np.random.Generator(np.random.Philox(np.random.SeedSequence(numbers)))
    is_short = random.random(num_blocks) < share
    return np.where(is_short, random.integers(1, block_size - 1, num_blocks), 0)


def _quotas(candidates: np.ndarray, num_slots: int, random: np.random.Generator) -> np.ndarray:
    """Share num_slots (fewer than all candidates) among documents: in proportion, at least one each, exactly."""
    usable = np.flatnonzero(candidates)
    drawn = np.zeros_like(candidates)
    if len(usable) >= num_slots:
        drawn[random.choice(usable, num_slots, replace=False)] = 1
        return drawn
    # Documents whose proportion is below one get one; the others share what is left in proportion.
    usable_candidates = candidates[usable]
    small = np.zeros(len(usable), dtype=np.bool_)
    while True:
        rate = (num_slots - np.count_nonzero(small)) / usable_candidates[~small].sum()
        below = ~small & (usable_candidates * rate < 1.0)
        if not below.any():
            break
        small |= below
    exact = np.where(small, 1.0, usable_candidates * rate)
    whole = np.floor(exact).astype(np.int64)
    # The largest remainders round up. Ties fall at random: no document is favoured for its place in the batch.
    order = np.lexsort((random.random(len(usable)), whole - exact))
    whole[order[: num_slots - int(whole.sum())]] += 1
    drawn[usable] = whole
    return drawn


def _choose(
    documents: np.ndarray, candidates: np.ndarray, drawn: np.ndarray, random: np.random.Generator
) -> np.ndarray:
    """Indexes, ascending, of a uniform choice of drawn[d] among the candidates of each document d."""
    # Half a unit of noise: a whole one could round up into the next document.
    order = np.argsort(documents + 0.5 * random.random(len(documents)))
    first = np.cumsum(candidates) - candidates
    rank = np.arange(len(documents)) - first[documents]
    return np.sort(order[rank < drawn[documents]])


def _padded(values: np.ndarray, size: int) -> np.ndarray:
    padded = np.zeros(size, dtype=np.int32)
    padded[: len(values)] = values
    return padded
