"""A target replica as a worker uses it: a batch in, its tapped layers' outputs out, its last hidden state if wanted.

Owns how a batch's rows reach the target: packed or one document a row, whole or, where memory runs out, once in halves.
Runs in its worker thread only, where the way the forward runs is chosen on the first batch.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import nullcontext

import torch

from draftmill.config import StepChoice
from draftmill.records import HostBatch
from draftmill.target.attention import packing_of
from draftmill.target.attention_check import attend_by_document, check_causal, prepare_packing
from draftmill.target.model import Target
from draftmill.target.step import Decision, Forward, build_forward

_logger = logging.getLogger(__name__)


class DoesNotFit(RuntimeError):
    """A batch needs more memory than the target's device has, even in halves."""


class TapsReplica:
    """A cut target on its device or devices, giving its tapped layers' outputs.

    report: how the forward runs and why, once the first batch was run
    """

    def __init__(
        self,
        target: Target,
        layer_ids: Sequence[int],
        step: StepChoice = "eager",
        packed: bool = False,
        like: TapsReplica | None = None,
    ) -> None:
        """layer_ids: tapped layers, and OUTPUT last where the last hidden state is wanted, of a target not cut short.
        packed: whether rows hold several documents. like: another replica of this target, found fit already.

        Raises InputError where this target can't read such rows, or sees what comes after a token.
        """
        self.target, self.layer_ids, self.step, self.packed = target, tuple(layer_ids), step, packed
        if like is None:
            self.decision = Decision()
            device = target.output_device
            with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
                check_causal(target, layer_ids)
                self.by_document = prepare_packing(target, layer_ids) if packed else False
        else:
            self.by_document, self.decision = like.by_document, like.decision
            if self.by_document:
                attend_by_document(target)
        self.report = ""
        self._forward: Forward | None = None

    def forward(self, batch: HostBatch) -> list[torch.Tensor]:
        """L tensors [B, S, H] of the batch's rows, padding included, on the target's output device.

        The next batch may overwrite them. When memory runs out the rows are run in two halves, and that is logged.
        Raises DoesNotFit, saying what to lower, where that does not help either.
        """
        if (batch.documents_BS is not None) != self.packed:
            raise RuntimeError(f"expected {'packed' if self.packed else 'bucketed'} rows, got the other kind")
        rows = batch.tokens_BS.shape[0]
        try:
            return self._run(batch, slice(0, rows), self.step)
        except torch.OutOfMemoryError as error:
            if rows == 1 or (self.step == "graphed" and self._forward is None):
                raise self._does_not_fit(batch) from error
        # outside the handler, whose traceback would keep what the failed forward had made
        return self._in_halves(batch)

    def _in_halves(self, batch: HostBatch) -> list[torch.Tensor]:
        rows, length = batch.tokens_BS.shape
        device = self.target.output_device
        _logger.warning(
            "target on %s ran out of memory on batch %d (%d rows of %d tokens); it is run in two halves",
            self.target.device,
            batch.sequence,
            rows,
            length,
        )
        if device.type == "cuda":
            torch.cuda.empty_cache()
        out: list[torch.Tensor] = []
        try:
            for part in (slice(0, rows // 2), slice(rows // 2, rows)):
                taps = self._run(batch, part, "eager")
                if not out:
                    out = [torch.empty(rows, length, tap.shape[-1], dtype=tap.dtype, device=device) for tap in taps]
                for whole, tap in zip(out, taps, strict=True):
                    whole[part].copy_(tap)
        except torch.OutOfMemoryError as error:
            raise self._does_not_fit(batch) from error
        return out

    def _does_not_fit(self, batch: HostBatch) -> DoesNotFit:
        rows, length = batch.tokens_BS.shape
        return DoesNotFit(
            f"the target on {self.target.device} has too little memory for {rows} rows of {length} tokens; lower "
            "data.token_budget, data.min_rows or data.max_length, or give the target more devices"
        )

    def _run(self, batch: HostBatch, rows: slice, step: StepChoice) -> list[torch.Tensor]:
        """Run some rows; `step` says how from now on, where nothing was built before."""
        device = self.target.device
        tokens = batch.tokens_BS[rows].to(device, non_blocking=True)
        positions = None if batch.positions_BS is None else batch.positions_BS[rows]
        documents = None if batch.documents_BS is None else batch.documents_BS[rows]
        packing = packing_of(positions, documents, device)
        if self._forward is None:
            built = build_forward(step, self.target, self.layer_ids, tokens, packing, self.by_document, self.decision)
            _logger.info("target forward on %s: %s", device, built.report)
            self._forward, self.report = built.forward, built.report
        return self._forward.run(tokens, packing)
