"""From results to metrics, log and progress. Checks what must never pass: a loss that is not finite."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any

import torch

from draftmill.compiling import num_compilations
from draftmill.data.loader import Coverage
from draftmill.evaluate.acceptance import accept_by_slot, accept_length
from draftmill.monitor.phases import Phase
from draftmill.monitor.run import RunDirectory
from draftmill.pipeline.tickets import Evaluate, Result, Step
from draftmill.train.assemble import Running
from draftmill.train.replica import EvaluationValues, StepValues
from draftmill.train.saving import Heldout
from draftmill.train.setup import Setup


class NotFinite(RuntimeError):
    """A step whose loss or gradient is not finite; it was not applied."""

    def __init__(self, step: int, loss: float, grad_norm: float) -> None:
        """step: counted from 1."""
        super().__init__(
            f"step {step}: loss {loss}, gradient norm {grad_norm}; the update was not applied. Lower train.lr, or "
            "resume from the last checkpoint"
        )
        self.step = step


class Reporter:
    """Turns each ticket's results into one line of metrics."""

    def __init__(
        self,
        setup: Setup,
        run: RunDirectory,
        observe: Callable[[dict[str, Any]], None],
        running: Running,
    ) -> None:
        """observe: gets every record of metrics.jsonl as well."""
        self.setup, self.run, self.observe, self.running = setup, run, observe, running
        self._heldout_after, self._heldout = -1, Heldout()
        self._last_wait_s = 0.0

    def resumed(self, first_step: int) -> None:
        """Mark in the metrics that lines above from this step on (0-based) are void: it is done again, below."""
        self.run.metrics({"step": first_step + 1, "resumed": True})

    def heldout_after(self, step: int) -> Heldout:
        """What was measured on the weights after this step (0-based)."""
        return self._heldout if step == self._heldout_after else Heldout()

    def take(self, finished: Iterable[list[Result]]) -> None:
        """Report results, one list a ticket. Raises NotFinite for a loss or gradient that is not finite."""
        for results in finished:
            first = results[0]
            if isinstance(first.ticket, Step):
                self._step(first.ticket.step, results)
            elif isinstance(first.ticket, Evaluate):
                self._evaluation(first.ticket.step, first.value)
                self.run.phase(Phase.TRAINING)

    def _step(self, step: int, results: list[Result]) -> None:
        values: StepValues = results[0].value
        record = values.read()
        self.running.team.check()  # what a device says after its group was aborted is not to be believed
        if not (math.isfinite(record["loss"]) and math.isfinite(record["grad_norm"])):
            raise NotFinite(step + 1, record["loss"], record["grad_norm"])
        stream = self.setup.stream
        self.run.phase(Phase.EVALUATING if stream.evaluates_after(step) else Phase.TRAINING)
        took_s = max(result.span.seconds() for result in results)
        wait_s = self.running.team.drafter_wait_s()
        record = {
            "step": step + 1,
            "epoch": stream.epoch_of(step),
            **record,
            "context_tokens_per_s": record["context_tokens"] / took_s,
            "supervised_tokens_per_s": record["supervised_tokens"] / took_s,
            "target_wait_s": max(result.wait_s for result in results),
            "drafter_wait_s": wait_s - self._last_wait_s,
            "drafter_work_s": max(result.work_s for result in results),
            "queue_depth": sum(result.queue_depth for result in results),
            **_speed(self.setup, sum(result.value.flops for result in results), took_s),
            **_padding(results),
            "peak_bytes": _peak_bytes(self.setup),
            "compilations": num_compilations(),
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
        if stream.ends_epoch(step):
            self._coverage(f"end of epoch {record['epoch'] + 1}")
        elif step + 1 == stream.total_steps:
            self._coverage(f"end by train.max_steps {stream.max_steps}, in epoch {record['epoch'] + 1}")

    def _write(self, record: dict[str, Any]) -> None:
        self.run.metrics(record)
        self.observe(record)

    def _evaluation(self, step: int, value: EvaluationValues) -> None:
        counts = value.read()
        total = counts.sum(dim=0)
        heldout = Heldout(float(accept_length(total)), accept_by_slot(total).tolist())
        self._heldout_after, self._heldout = step, heldout
        self._write(
            {
                "step": step + 1,
                **asdict(heldout),
                "accept_length_by_bucket": [
                    float(accept_length(bucket)) if int(bucket[0, 0]) else None for bucket in counts
                ],
            }
        )
        self.run.log.info(f"held-out acceptance length {heldout.accept_length:.3f} after step {step + 1}")

    def _coverage(self, ended: str) -> None:
        """Log what ended, and how much of what could have been anchored was, from the start of this process on."""
        coverage: Coverage = self.running.loader.coverage()
        starved = f"; {coverage.num_starved:,} documents got no anchor" if coverage.num_starved else ""
        self.run.log.info(
            f"{ended}: {coverage.num_anchors:,} anchors so far, {100 * coverage.share:.1f}% of the "
            f"positions that {coverage.num_documents:,} documents offered{starved}"
        )


PEAK_TFLOPS = {"H200": 989.0, "H100": 989.0, "A100": 312.0, "B200": 2250.0, "L40S": 362.0}
"""Dense bfloat16 rates by the makers' data sheets, by what a device's name holds."""


def _speed(setup: Setup, flops: float, took_s: float) -> dict[str, float]:
    """Useful TFLOP/s of this host's drafters, and their share of the devices' peak where that is known."""
    tflops = flops / took_s / 1e12
    drafters = setup.placement.drafters
    names = [torch.cuda.get_device_name(device) for device in drafters if device.type == "cuda"]
    peaks = [peak for name in names for part, peak in PEAK_TFLOPS.items() if part in name]
    known = len(peaks) == len(drafters)
    return {"useful_tflops": tflops, **({"share_of_peak": tflops / sum(peaks)} if known else {})}


def _padding(results: list[Result]) -> dict[str, float]:
    """Share of the targets' tokens that were padding; nothing for a step that took no batch (a further draw)."""
    num_padded = sum(result.num_padded for result in results)
    return {"padding_share": 1.0 - sum(result.num_tokens for result in results) / num_padded} if num_padded else {}


def _peak_bytes(setup: Setup) -> int:
    """Most memory that tensors took on any of the host's devices since the start; 0 without CUDA."""
    devices = {d for d in (*setup.placement.drafters, *(g[0] for g in setup.placement.targets)) if d.type == "cuda"}
    return max((torch.cuda.max_memory_allocated(device) for device in devices), default=0)
