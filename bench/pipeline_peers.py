"""Peers in the benchmarks of whole runs: their step in a drafter's place, and a plain loop of forward and step.

Not a benchmark itself. A peer gets the same batches, tokens, features and anchors as ours, in the layout of its own
trainer: padded rows (SpecForge), or documents packed into one row (speculators). It has no all-reduce here.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Protocol

import torch

from draftmill.compiling import BUILD_LOCK
from draftmill.config import gamma_for
from draftmill.pipeline.channel import Slot
from draftmill.pipeline.features import pack
from draftmill.pipeline.workers import own_stream
from draftmill.records import Blocks, HostBatch
from draftmill.step.workload import Workload, random_drafter, random_head
from draftmill.target.model import Target
from draftmill.target.step import EagerForward
from draftmill.train.setup import Setup
from pipeline_rig import Measured, Rig, wait_for

ROUND_ANCHORS = 8
"""A row's anchors are filled up to a multiple of this, so that the peer compiles for fewer shapes."""


@dataclass(frozen=True)
class Rows:
    """A batch as the peer takes it, on the device: tokens and mask [B, S], anchors and which of them count [B, n]."""

    tokens: torch.Tensor
    mask: torch.Tensor
    anchors: torch.Tensor
    keep: torch.Tensor


def rows_of(batch: HostBatch, device: torch.device) -> Rows:
    """The batch's rows and their anchors. A row is one document."""
    rows, length = batch.tokens_BS.shape
    mask = torch.zeros(rows * length)
    mask[batch.source_T] = 1.0
    anchors, keep = anchors_by_row(batch.blocks[0], batch.source_T, rows, length)

    def there(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(device, non_blocking=True)

    return Rows(there(batch.tokens_BS), there(mask.view(rows, length)), there(anchors), there(keep))


def anchors_by_row(blocks: Blocks, source_T: torch.Tensor, rows: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Anchors of the used blocks as places in their rows, int64 [B, n], and which entries are anchors, bool [B, n]."""
    used = blocks.slots_A > 0
    flat = source_T[blocks.anchors_A[used].long()]
    row, place = flat // length, flat % length
    counts = torch.bincount(row, minlength=rows)
    width = -(-max(1, int(counts.max())) // ROUND_ANCHORS) * ROUND_ANCHORS
    anchors, keep = torch.zeros(rows, width, dtype=torch.int64), torch.zeros(rows, width, dtype=torch.bool)
    within = torch.arange(len(row)) - (counts.cumsum(0) - counts)[row]
    anchors[row, within], keep[row, within] = place, True
    return anchors, keep


class PeerStep(Protocol):
    """A peer's optimizer step on batches that come one after another."""

    def from_slot(self, batch: HostBatch, features_TF: torch.Tensor) -> None:
        """Take a batch whose features lie packed in a slot."""

    def from_taps(self, batch: HostBatch, taps: list[torch.Tensor]) -> None:
        """Take a batch as the target gives it."""

    def run(self) -> None:
        """Forward, backward, clip, update."""


def dummy_inputs(setup: Setup, device: torch.device, tokens: torch.Tensor, anchors: torch.Tensor) -> Any:
    """What a peer of bench/step.py is built from, before any batch is there. tokens [1, T], anchors [A]."""
    shape, dtype = setup.shape, setup.dtype
    return SimpleNamespace(
        shape=shape,
        device=device,
        dtype=dtype,
        work=Workload(1, tokens.shape[1], len(anchors)),
        gamma=gamma_for(shape.block_size),
        token_rows=tokens,
        features_TF=torch.zeros(tokens.shape[1], shape.feature_size, device=device, dtype=dtype),
        anchor_places=anchors,
        drafter=lambda: random_drafter(shape, device),
        head=lambda: random_head(shape, device, dtype),
    )


class SpecForgeStep:
    """SpecForge's, on rows of any shape, padded to the batch's longest."""

    def __init__(self, setup: Setup, device: torch.device) -> None:
        from step_peers import SpecForge

        self.device = device
        tokens = torch.zeros(1, 4 * setup.shape.block_size, dtype=torch.int64, device=device)
        self.peer = SpecForge(dummy_inputs(setup, device, tokens, torch.ones(1, dtype=torch.int64, device=device)))
        self.peer.model._sample_anchor_positions = lambda *_arguments, **_named: (self.rows.anchors, self.rows.keep)
        self.padded = torch.zeros(setup.plan.padded_slots, setup.shape.feature_size, device=device, dtype=setup.dtype)

    def from_slot(self, batch: HostBatch, features_TF: torch.Tensor) -> None:
        """Back into padded rows."""
        self.rows = rows_of(batch, self.device)
        rows, length = self.rows.tokens.shape
        source = batch.source_T.to(self.device, non_blocking=True)
        self.padded.index_copy_(0, source, features_TF[: batch.num_tokens])
        self.features = self.padded[: rows * length].view(rows, length, -1)

    def from_taps(self, batch: HostBatch, taps: list[torch.Tensor]) -> None:
        """They are padded rows already."""
        self.rows = rows_of(batch, self.device)
        self.features = torch.cat(taps, dim=-1)

    def run(self) -> None:
        """One step."""
        loss, _, _ = self.peer.model(self.rows.tokens, self.features, self.rows.mask)
        loss.backward()
        self.peer.optimizer.step()
        self.loss = loss.detach()


ANCHORS_ON: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}
"""Anchors and which of them count, of the speculators step on each device."""


class SpeculatorsStep:
    """speculators', on documents packed into one row of fixed length, compiled for that one shape."""

    def __init__(self, setup: Setup, device: torch.device) -> None:
        from speculators.models.dflash import core

        from step_peers import Speculators

        slots, self.device = setup.step_shape, device
        self.tokens = torch.zeros(1, slots.context_slots, dtype=torch.int64, device=device)
        self.anchors = torch.zeros(slots.anchor_slots, dtype=torch.int64, device=device)
        self.valid = torch.zeros(slots.anchor_slots, dtype=torch.bool, device=device)
        inputs = dummy_inputs(setup, device, self.tokens, self.anchors)
        self.features = inputs.features_TF
        self.peer = Speculators(inputs)
        ANCHORS_ON[device] = (self.anchors, self.valid)
        core.select_anchors = lambda mask, *_arguments, **_named: ANCHORS_ON[mask.device]  # one for all devices
        self.batch = self.peer.batch

    def from_slot(self, batch: HostBatch, features_TF: torch.Tensor) -> None:
        """The slot's own layout."""
        self.features[: batch.num_tokens].copy_(features_TF[: batch.num_tokens])
        self._load(batch)

    def from_taps(self, batch: HostBatch, taps: list[torch.Tensor]) -> None:
        """Packed first."""
        pack(taps, batch.source_T.to(self.device, non_blocking=True), self.features)
        self._load(batch)

    def _load(self, batch: HostBatch) -> None:
        blocks, count = batch.blocks[0], batch.num_tokens
        documents = torch.full_like(blocks.positions_T, -1)
        documents[:count] = (blocks.positions_T[:count] == 0).cumsum(0) - 1
        self.tokens[0].copy_(blocks.tokens_T, non_blocking=True)
        self.batch["position_ids"][0].copy_(blocks.positions_T, non_blocking=True)
        self.batch["document_ids"][0].copy_(documents)
        self.batch["loss_mask"][0].copy_(documents >= 0)
        self.anchors.copy_(blocks.anchors_A, non_blocking=True)
        self.valid.copy_(blocks.slots_A > 0)
        # The target's own last hidden states in place of these: such that they give the next token.
        self.batch["verifier_last_hidden_states"].copy_(self.peer._hidden_of(self.tokens.roll(-1, dims=1)))

    def run(self) -> None:
        """One step."""
        self.peer.run()
        self.loss = self.peer._loss


PEERS: dict[str, type[SpecForgeStep] | type[SpeculatorsStep]] = {
    "specforge": SpecForgeStep,
    "speculators": SpeculatorsStep,
}
BARS = {"specforge": 1.4, "speculators": 1.2}


class PeerReplica:
    """A peer's step as the pipeline runs a drafter. Its update is part of its step.

    compiling: whether its steps may be traced, beside which no model may run.
    """

    def __init__(self, setup: Setup, device: torch.device, peer: str) -> None:
        recompiling_allowed()
        self.step: PeerStep = PEERS[peer](setup, device)
        self.compiling = True

    def load(self, slot: Slot, draw: int) -> None:
        """Take the slot's batch."""
        recompiling_allowed()
        assert slot.batch is not None
        self.step.from_slot(slot.batch, slot.features_TF)

    def begin(self) -> None:
        """Its optimizer clears its gradients."""

    def accumulate(self) -> None:
        with BUILD_LOCK if self.compiling else nullcontext():
            self.step.run()

    def reducible(self) -> list[torch.Tensor]:
        return []

    def update(self, step: int) -> None:
        """Done already."""

    def step_result(self) -> None:
        """Nobody asks."""


def recompiling_allowed() -> None:
    """In this thread: a peer compiles for every shape that it meets, and our own setting would refuse it."""
    torch._dynamo.config.error_on_recompile = False
    torch._dynamo.config.recompile_limit = 256


def plain_loop(rig: Rig, targets: Sequence[Target], batches: Sequence[HostBatch], peer: str) -> Measured:
    """On each of the targets' devices: the plain forward, then the peer's step, one batch after another.

    Device i of n takes batches i, i + n, ... and shares nothing with the others. First each of them runs its batches
    alone, so that all is compiled when the clock starts, which ends with the last device.
    """
    gate = threading.Barrier(len(targets) + 1)
    errors: list[BaseException] = []

    def run(index: int, target: Target) -> None:
        mine = batches[index :: len(targets)]
        try:
            with own_stream(target.device):
                with BUILD_LOCK:
                    one = _PlainReplica(rig.setup, target, peer)
                    one.run(mine)
                gate.wait()
                one.run(mine)
                gate.wait()
        except BaseException as error:
            errors.append(error)
            gate.abort()

    threads = [threading.Thread(target=run, args=each, daemon=True) for each in enumerate(targets)]
    for thread in threads:
        thread.start()
    try:
        gate.wait()
        started = time.perf_counter()
        gate.wait()
        seconds = time.perf_counter() - started
    except threading.BrokenBarrierError:
        raise errors[0] from None
    for thread in threads:
        thread.join()
    return Measured(seconds, len(batches), sum(batch.num_tokens for batch in batches))


class _PlainReplica:
    def __init__(self, setup: Setup, target: Target, peer: str) -> None:
        recompiling_allowed()
        self.device = target.device
        self.forward = EagerForward(target, setup.taps)
        self.step: PeerStep = PEERS[peer](setup, self.device)

    def run(self, batches: Sequence[HostBatch]) -> None:
        for batch in batches:
            taps = self.forward.run(batch.tokens_BS.to(self.device, non_blocking=True), None)
            self.step.from_taps(batch, taps)
            self.step.run()
        wait_for([self.device])
