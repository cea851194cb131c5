"""Peers in the benchmarks of whole runs: their step in a drafter's place, and a plain loop of forward and step.

Not a benchmark itself. The peer gets the same batches, tokens, features and anchors as ours; its rows are padded, as
its own trainer pads them. It has no all-reduce here.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from draftmill.compiling import BUILD_LOCK
from draftmill.config import gamma_for
from draftmill.pipeline.channel import Slot
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


class SpecForgeStep:
    """SpecForge's step on rows of any shape: forward, backward, clip, update."""

    def __init__(self, setup: Setup, device: torch.device) -> None:
        from step_peers import SpecForge

        shape, dtype = setup.shape, setup.dtype
        tokens = torch.zeros(1, 4 * shape.block_size, dtype=torch.int64, device=device)
        inputs: Any = SimpleNamespace(
            shape=shape,
            device=device,
            dtype=dtype,
            work=Workload(1, tokens.shape[1], 1),
            gamma=gamma_for(shape.block_size),
            token_rows=tokens,
            features_TF=torch.zeros(tokens.shape[1], shape.feature_size, device=device, dtype=dtype),
            anchor_places=torch.ones(1, dtype=torch.int64, device=device),
            drafter=lambda: random_drafter(shape, device),
            head=lambda: random_head(shape, device, dtype),
        )
        self.peer = SpecForge(inputs)
        self.peer.model._sample_anchor_positions = lambda *_arguments, **_named: self.anchors

    def forward_backward(self, rows: Rows, features: torch.Tensor) -> None:
        """features: [B, S, L*H]."""
        self.anchors = rows.anchors, rows.keep
        loss, _, _ = self.peer.model(rows.tokens, features, rows.mask)
        loss.backward()
        self.loss = loss.detach()

    def update(self) -> None:
        self.peer.optimizer.step()


class PeerReplica:
    """The peer's step as the pipeline runs a drafter."""

    def __init__(self, setup: Setup, device: torch.device) -> None:
        recompiling_allowed()
        self.step, self.device = SpecForgeStep(setup, device), device
        self.features = torch.zeros(setup.plan.padded_slots, setup.shape.feature_size, device=device, dtype=setup.dtype)
        self.rows: Rows | None = None

    def load(self, slot: Slot, draw: int) -> None:
        """The slot's features back into padded rows."""
        batch = slot.batch
        assert batch is not None
        recompiling_allowed()
        self.rows = rows_of(batch, self.device)
        source = batch.source_T.to(self.device, non_blocking=True)
        self.features.index_copy_(0, source, slot.features_TF[: batch.num_tokens])

    def begin(self) -> None:
        """Its optimizer clears its gradients."""

    def accumulate(self) -> None:
        assert self.rows is not None
        rows, length = self.rows.tokens.shape
        self.step.forward_backward(self.rows, self.features[: rows * length].view(rows, length, -1))

    def reducible(self) -> list[torch.Tensor]:
        return []

    def update(self, step: int) -> None:
        self.step.update()

    def step_result(self) -> torch.Tensor:
        return self.step.loss


def recompiling_allowed() -> None:
    """In this thread: a peer compiles for every shape that it meets, and our own setting would refuse it."""
    torch._dynamo.config.error_on_recompile = False
    torch._dynamo.config.recompile_limit = 256


def plain_loop(rig: Rig, targets: Sequence[Target], batches: Sequence[HostBatch]) -> Measured:
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
                    one = _PlainReplica(rig.setup, target)
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
    def __init__(self, setup: Setup, target: Target) -> None:
        recompiling_allowed()
        self.device = target.device
        self.forward = EagerForward(target, setup.shape.target_layer_ids)
        self.step = SpecForgeStep(setup, self.device)

    def run(self, batches: Sequence[HostBatch]) -> None:
        for batch in batches:
            rows = rows_of(batch, self.device)
            features = torch.cat(self.forward.run(rows.tokens, None), dim=-1)
            self.step.forward_backward(rows, features)
            self.step.update()
        wait_for([self.device])
