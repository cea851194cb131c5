"""From results to metrics, log and progress. Checks what must never pass: a loss that is not finite."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import torch

from draftmill.evaluate.acceptance import accept_by_slot, accept_length
from draftmill.monitor.phases import Phase
from draftmill.monitor.run import RunDirectory
from draftmill.pipeline.workers import Evaluate, Result, Step
from draftmill.train.replica import Late, StepValues
from draftmill.train.setup import Setup


class Reporter:
    """Turns each ticket's results into one line of metrics."""

    def __init__(
        self,
        setup: Setup,
        run: RunDirectory,
        observe: Callable[[dict[str, Any]], None],
        drafter_wait_s: Callable[[], float],
    ) -> None:
        """observe: gets every record of metrics.jsonl as well. drafter_wait_s: waits of the targets so far."""
        self.setup, self.run, self.observe = setup, run, observe
        self.accept_length: float | None = None
        self.drafter_wait_s = drafter_wait_s
        self._last_s, self._last_wait_s = time.monotonic(), 0.0

    def take(self, finished: list[list[Result]]) -> None:
        """Report results, one list a ticket. Raises RuntimeError for a loss or gradient that is not finite."""
        for results in finished:
            first = results[0]
            if isinstance(first.ticket, Step):
                self._step(first.ticket.step, results)
            elif isinstance(first.ticket, Evaluate):
                self._evaluation(first.ticket.step, first.value)

    def _step(self, step: int, results: list[Result]) -> None:
        values: StepValues = results[0].value
        record = values.read()
        if not (math.isfinite(record["loss"]) and math.isfinite(record["grad_norm"])):
            raise RuntimeError(
                f"step {step + 1}: loss {record['loss']}, gradient norm {record['grad_norm']}; the update "
                "was not applied. Lower train.lr, or resume from the last checkpoint"
            )
        now = time.monotonic()
        elapsed, self._last_s = now - self._last_s, now
        stream = self.setup.stream
        self.run.phase(Phase.TRAINING)
        wait_s = self.drafter_wait_s()
        record = {
            "step": step + 1,
            "epoch": stream.epoch_of(step),
            **record,
            "context_tokens_per_s": record["context_tokens"] / elapsed,
            "supervised_tokens_per_s": record["supervised_tokens"] / elapsed,
            "target_wait_s": max(result.wait_s for result in results),
            "drafter_wait_s": wait_s - self._last_wait_s,
            "drafter_work_s": max(result.work_s for result in results),
            "queue_depth": sum(result.queue_depth for result in results),
            "peak_bytes": _peak_bytes(self.setup),
        }
        self._last_wait_s = wait_s
        self._write(record)
        self.run.progress(
            step + 1,
            steps=stream.total_steps,
            epoch=record["epoch"],
            epochs=self.setup.config.train.epochs,
            loss=record["loss"],
            context_tokens_per_s=record["context_tokens_per_s"],
        )

    def _write(self, record: dict[str, Any]) -> None:
        self.run.metrics(record)
        self.observe(record)

    def _evaluation(self, step: int, value: Late) -> None:
        counts = value.numbers()
        total = counts.sum(dim=0)
        self.accept_length = float(accept_length(total))
        self._write(
            {
                "step": step + 1,
                "accept_length": self.accept_length,
                "accept_by_slot": accept_by_slot(total).tolist(),
                "accept_length_by_bucket": [
                    float(accept_length(bucket)) if int(bucket[0, 0]) else None for bucket in counts
                ],
            }
        )
        self.run.log.info(f"held-out acceptance length {self.accept_length:.3f} after step {step + 1}")
        self._last_s = time.monotonic()


def _peak_bytes(setup: Setup) -> int:
    """Most memory that tensors took on any of the host's devices since the start; 0 without CUDA."""
    devices = {d for d in (*setup.placement.drafters, *(g[0] for g in setup.placement.targets)) if d.type == "cuda"}
    return max((torch.cuda.max_memory_allocated(device) for device in devices), default=0)
