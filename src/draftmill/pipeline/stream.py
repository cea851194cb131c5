"""The run's one stream of batches: which number is which batch, and which drafter gets it.

    numbers   0 ................ G-1 | G ......... 2G-1 | ... | held-out ... | ...
    step      0                      | 1                |     | evaluation   |
    drafter   number mod D, always

A pure function of the plan: timing never changes it, and every number can be found again after a restart. G, the
batches of a step, is drafters x accumulate; where an epoch's or an evaluation's batches do not fill the last group,
EMPTY batches do, so that all drafters take equally many.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from draftmill.records import BatchKind, WorkItem


@dataclass(frozen=True)
class Stream:
    """How the batches follow one another.

    num_drafters      drafters of the whole run, all hosts together
    accumulate        batches a drafter adds up before an update
    draws             drafter steps taken on each group of batches, each with its own anchors
    num_batches       training batches in all
    num_heldout       held-out batches of one evaluation
    evaluate_every    steps between evaluations; one more follows the last step
    max_steps         steps at most, or None
    locate            training batch number -> (epoch, index in it)
    """

    num_drafters: int
    accumulate: int
    draws: int
    num_batches: int
    num_heldout: int
    evaluate_every: int
    max_steps: int | None
    locate: Callable[[int], tuple[int, int]]

    @property
    def group(self) -> int:
        """Batches of one group: one for each drafter and accumulation."""
        return self.num_drafters * self.accumulate

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the run."""
        steps = -(-self.num_batches // self.group) * self.draws
        return steps if self.max_steps is None else min(steps, self.max_steps)

    @property
    def heldout_per_drafter(self) -> int:
        """Held-out batches each drafter gets in an evaluation, empty ones included."""
        return -(-self.num_heldout // self.num_drafters)

    def evaluates_after(self, step: int) -> bool:
        """Whether an evaluation follows step `step` (0-based): only where a group ends, so that no slot is held."""
        done = step + 1
        if self.num_heldout == 0 or not self.ends_group(step):
            return False
        return done == self.total_steps or done // self.evaluate_every > (done - self.draws) // self.evaluate_every

    def ends_group(self, step: int) -> bool:
        """Whether the batches of this step's group are not needed any more after it."""
        return (step + 1) % self.draws == 0 or step + 1 == self.total_steps

    def epoch_of(self, step: int) -> int:
        """The epoch that step `step` reads."""
        return self.locate(min(step // self.draws * self.group, self.num_batches - 1))[0]

    def ends_epoch(self, step: int) -> bool:
        """Whether step `step` is the last that reads its epoch; not so where max_steps ends the run before that."""
        following = (step // self.draws + 1) * self.group
        if (step + 1) % self.draws:
            return False
        return following >= self.num_batches or self.locate(following)[0] != self.epoch_of(step)

    def items(self, first_step: int = 0) -> Iterator[WorkItem]:
        """All batches from the start of a step on, in order. Numbers are the same wherever the run starts.

        After a restart between two draws of a group, the group's batches come again first.
        """
        sequence = self.sequence_before(first_step)
        step = first_step - first_step % self.draws
        while step < self.total_steps:
            if step % self.draws == 0:
                first_batch = step // self.draws * self.group
                for number in range(first_batch, first_batch + self.group):
                    yield self._train_item(sequence, number)
                    sequence += 1
            if step >= first_step and self.evaluates_after(step):
                for index in range(self.heldout_per_drafter * self.num_drafters):
                    kind = BatchKind.HELDOUT if index < self.num_heldout else BatchKind.EMPTY
                    yield WorkItem(sequence, kind, 0, index)
                    sequence += 1
            step += 1

    def sequence_before(self, first_step: int) -> int:
        """The number of the first batch that a run starting at this step reads."""
        step = first_step - first_step % self.draws
        evaluations = sum(self.evaluates_after(s) for s in range(first_step))
        groups = step // self.draws
        return groups * self.group + evaluations * self.heldout_per_drafter * self.num_drafters

    def step_of(self, sequence: int) -> tuple[int, bool]:
        """The step (0-based) that a batch is of, the first of its group's, and whether an evaluation after it reads it.

        By arithmetic alone, for it is asked for each batch: of any groups in a row but the last, evaluations follow as
        many as there are multiples of evaluate_every in their steps, one a group at most.
        """
        size = self.heldout_per_drafter * self.num_drafters

        def first_batch(group: int) -> int:
            return group * self.group + size * min(group, group * self.draws // self.evaluate_every)

        groups = range(-(-self.total_steps // self.draws))
        group = bisect_right(groups, sequence, key=first_batch) - 1
        if sequence - first_batch(group) < self.group:
            return group * self.draws, False
        return min((group + 1) * self.draws, self.total_steps) - 1, True

    def _train_item(self, sequence: int, number: int) -> WorkItem:
        if number >= self.num_batches:
            return WorkItem(sequence, BatchKind.EMPTY, 0, 0)
        epoch, index = self.locate(number)
        return WorkItem(sequence, BatchKind.TRAIN, epoch, index)
