"""A drafter replica as the pipeline runs it: static buffers, step and optimizer behind one interface.

Built and used in its worker thread. Nothing here waits for the device: what the main thread is told is copied to the
host beside the next step, and read there when it is due.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from draftmill.checkpoint.store import Checkpoint
from draftmill.evaluate.acceptance import acceptance_counts
from draftmill.pipeline.channel import Slot
from draftmill.records import BatchKind, HostBatch
from draftmill.step.choose import Built
from draftmill.step.flops import step_flops, work_of
from draftmill.step.state import StepState
from draftmill.train.optimizer import FlatOptimizer, Moments


class Late:
    """Values of a device on their way to the host; `numbers` waits for them, if they are not there yet."""

    def __init__(self, values: torch.Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if values.is_cuda:
            self._host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._host.copy_(values, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        else:
            self._host = values.clone()

    def numbers(self) -> torch.Tensor:
        """The values, on the host."""
        if self._event is not None:
            self._event.synchronize()
        return self._host


@dataclass(frozen=True)
class StepValues:
    """What a step reports: sums as in StepState and the gradient's norm, summed over all drafters."""

    values: Late
    lr: float
    block_size: int
    flops: float
    """Useful operations of this drafter's own step."""

    def read(self) -> dict[str, Any]:
        """loss, grad_norm, lr, context_tokens, supervised_tokens, accuracy_by_slot (None for a slot never scored).

        The loss of a step without a single scored slot is 0.
        """
        numbers = self.values.numbers().double()
        sums, grad_norm = numbers[:-1], float(numbers[-1])
        totals, tokens, correct, scored = sums.split([2, 2, self.block_size, self.block_size])
        return {
            "loss": float(totals[0] / totals[1]) if totals[1] != 0 else 0.0,
            "lr": self.lr,
            "grad_norm": grad_norm,
            "context_tokens": int(tokens[0]),
            "supervised_tokens": int(tokens[1]),
            "accuracy_by_slot": [
                float(right / seen) if seen > 0 else None
                for right, seen in zip(correct[1:].tolist(), scored[1:].tolist(), strict=True)
            ],
        }


@dataclass(frozen=True)
class EvaluationValues:
    """What an evaluation reports: acceptance counts summed over all drafters, and by how much their weights' checksums
    differ from this drafter's."""

    values: Late
    num_buckets: int

    def read(self) -> torch.Tensor:
        """Counts [buckets, 2, K-1].

        Raises RuntimeError where the drafters no longer hold the same weights: from then on they would train apart.
        """
        numbers = self.values.numbers()
        if int(numbers[-1]) != 0:
            raise RuntimeError(
                "the drafters' weights differ from each other, though all took the same updates: devices of different "
                "kinds round differently; use devices of one kind, and resume from the checkpoint before"
            )
        return numbers[:-1].view(self.num_buckets, 2, -1)


class Replica:
    """One drafter on one device."""

    def __init__(
        self,
        state: StepState,
        built: Built,
        optimizer: FlatOptimizer,
        learning_rate: Callable[[int], float],
        num_buckets: int,
    ) -> None:
        self.state, self.step, self.run_update, self.report = state, built.step, built.update, built.report
        self.optimizer, self.learning_rate = optimizer, learning_rate
        self.num_buckets, slots = num_buckets, state.drafter_shape.block_size - 1
        self.heldout_counts = torch.zeros(num_buckets, 2, slots, dtype=torch.int64, device=state.device)
        # Of the masters, and one for each drafter: summed over them, they tell whether all have the same.
        self.checksum = torch.zeros(2, dtype=torch.int64, device=state.device)
        self.batch: HostBatch | None = None
        self.num_scored = self.num_blocks = 0
        self.flops = self.batch_flops = 0.0
        self.lr = 0.0

    def load(self, slot: Slot, draw: int) -> None:
        """Copy a batch from its slot into the static inputs."""
        batch = slot.batch
        assert batch is not None
        blocks = batch.blocks[draw]
        self.state.load(slot.features_TF[: batch.num_tokens], blocks)
        self.batch = batch
        self.num_scored = batch.num_rows_scored[draw]
        # Counted on the host, where blocks come from.
        self.num_blocks = int((blocks.slots_A > 0).sum())
        shape = self.state.drafter_shape
        compares = self.state.rule.needs_target
        self.batch_flops = step_flops(shape, work_of(blocks, batch.num_tokens, shape), compares).total

    def begin(self) -> None:
        """Start an optimizer step."""
        self.flops = 0.0
        self.state.begin()

    def accumulate(self) -> None:
        """Forward and backward of the loaded batch."""
        assert self.batch is not None
        if self.batch.kind is BatchKind.EMPTY:
            self.state.flat.drop_gradient()
            return
        with self.step.running():
            self.step.run(self.num_scored, self.num_blocks)
        self.state.flat.add_gradient()
        self.flops += self.batch_flops
        self.state.tokens[0] += self.batch.num_tokens
        self.state.tokens[1] += self.num_scored

    def reducible(self) -> list[torch.Tensor]:
        """Gradient and sums."""
        return [self.state.flat.gradient_sum, self.state.sums]

    def update(self, step: int) -> None:
        """One optimizer update at the step's learning rate."""
        self.lr = self.learning_rate(step)
        self.optimizer.lr.fill_(self.lr)
        # A loss that is not finite voids the update, also where its gradient is finite: the denominator becomes NaN.
        self.state.totals[1] += self.state.totals[0] * 0.0
        with self.step.running():
            self.run_update()

    def step_result(self) -> StepValues:
        """The step's sums and gradient norm, on their way to the host."""
        values = torch.cat([self.state.sums, self.optimizer.grad_norm[None]])
        return StepValues(Late(values), self.lr, self.state.drafter_shape.block_size, self.flops)

    def begin_evaluation(self) -> None:
        """Start an evaluation, of the averaged weights where they are kept."""
        self.heldout_counts.zero_()
        if self.optimizer.average is not None:
            self.optimizer.average.show()

    def evaluate(self) -> None:
        """Count what the loaded batch's blocks would have had accepted."""
        assert self.batch is not None
        if self.batch.kind is BatchKind.EMPTY:
            return
        with self.step.running():
            self.step.evaluate(self.num_scored, self.num_blocks)
        counts = acceptance_counts(self.state.correct_AK, self.state.blocks.slots_A)
        self.heldout_counts[self.batch.bucket] += counts

    def evaluated(self) -> list[torch.Tensor]:
        """Acceptance counts [buckets, 2, K-1], and the checksum."""
        self._own_checksum = self._checksum()
        self.checksum[0] = self._own_checksum
        self.checksum[1] = 1
        return [self.heldout_counts, self.checksum]

    def _checksum(self) -> torch.Tensor:
        """The masters' bits as integers, added up: int64 []. Of integers, so that no order of adding matters."""
        return self.state.flat.master.view(torch.int32).sum(dtype=torch.int64)

    def evaluation_result(self) -> EvaluationValues:
        """The counts, on their way to the host; ends the evaluation."""
        differs = self.checksum[0] - self.checksum[1] * self._own_checksum
        if self.optimizer.average is not None:
            self.optimizer.average.hide()
        return EvaluationValues(Late(torch.cat([self.heldout_counts.flatten(), differs[None]])), self.num_buckets)

    def snapshot(self, request: Callable[[Replica], Any]) -> Any:
        """Whatever the main thread wants done with the weights between two steps."""
        return request(self)

    def weights(self) -> dict[str, torch.Tensor]:
        """The float32 masters by name."""
        return self.state.flat.named(self.state.flat.master)

    def moments(self) -> Moments:
        """The optimizer's moments by name."""
        return self.optimizer.moments()

    def average(self) -> dict[str, torch.Tensor] | None:
        """The averaged masters by name, where they are kept."""
        average = self.optimizer.average
        return average.named() if average is not None else None

    def restore(self, checkpoint: Checkpoint) -> None:
        """Go on from a checkpoint. Raises RuntimeError where it does not hold what this run's optimizer needs."""
        self.state.flat.load(checkpoint.tensors())
        self.optimizer.restore(checkpoint.optimizer(), checkpoint.step)
        saved, average = checkpoint.average(), self.optimizer.average
        if (saved is None) != (average is None):
            raise RuntimeError(f"{checkpoint.folder} {'lacks' if saved is None else 'has'} a moving average")
        if saved is not None and average is not None:
            average.restore(saved)
