"""The largest batch once at the start, on every target and every drafter: memory runs out then, or not at all.

Owns what such a batch is, and what is said where it does not fit. Numbers in it mean nothing.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from draftmill.compiling import BUILD_LOCK
from draftmill.pipeline.features import pack
from draftmill.records import BatchKind, HostBatch
from draftmill.step.choose import fill_randomly
from draftmill.target.features import DoesNotFit, TapsReplica
from draftmill.train.replica import Replica
from draftmill.train.setup import Setup


class StepDoesNotFit(RuntimeError):
    """A drafter's step needs more memory than its device has."""

    def __init__(self, setup: Setup, device: torch.device) -> None:
        shape = setup.step_shape
        super().__init__(
            f"a drafter step of {shape.context_slots} context slots and {shape.anchor_slots} anchors does not fit on "
            f"{device}; lower data.token_budget, data.max_length or train.num_anchors, or set "
            "drafter.checkpoint_activations"
        )


def worst_batch(setup: Setup) -> HostBatch:
    """As many of the longest rows as the run's largest batch has room for. Tokens are zeros."""
    plan = setup.plan
    _, length = plan.shape(int(setup.store.lengths.max()), 1)
    rows = max(1, plan.padded_slots // length)
    tokens_BS = torch.zeros(rows, length, dtype=torch.int64)
    positions_BS = documents_BS = None
    if plan.batching == "packed":
        positions_BS = torch.arange(length, dtype=torch.int32).expand(rows, -1).contiguous()
        documents_BS = torch.zeros(rows, length, dtype=torch.int32)
    return HostBatch(
        sequence=-1,
        kind=BatchKind.TRAIN,
        epoch=0,
        index=0,
        bucket=0,
        sample_ids_B=np.empty(0, dtype=np.int64),
        tokens_BS=tokens_BS,
        positions_BS=positions_BS,
        documents_BS=documents_BS,
        source_T=torch.arange(min(rows * length, setup.step_shape.context_slots)),
        blocks=(),
        num_rows_scored=(),
    )


def run_worst(setup: Setup, replica: TapsReplica) -> TapsReplica:
    """Run a target on the largest batch, features packed as for a drafter on another device; returns the target.

    Called in the worker's thread, on its stream, without gradients. What the target is run with from then on is chosen
    here. Raises DoesNotFit, saying what to lower.
    """
    batch, device = worst_batch(setup), replica.target.output_device
    try:
        taps = replica.forward(batch)
        packed = torch.empty(len(batch.source_T), setup.carried_size, dtype=setup.dtype, device=device)
        pack(taps, batch.source_T.to(device), packed)
    except torch.OutOfMemoryError as error:  # the forward says for itself
        raise DoesNotFit(
            f"the features of {len(batch.source_T)} tokens do not fit beside the target on {device}; lower "
            "data.token_budget, data.min_rows or data.max_length"
        ) from error
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    return replica


def _run_full(replica: Replica) -> None:
    """A batch of random numbers with every slot in use; leaves the inputs empty."""
    state = replica.state
    full = state.shape.anchor_slots
    fill_randomly(state)
    state.begin()
    replica.step.run(full * (state.drafter_shape.block_size - 1), full)
    state.begin()
    state.clear_inputs()


def built_and_run(setup: Setup, device: torch.device, build: Callable[[], Replica]) -> Replica:
    """Build a drafter replica and see to it that a full batch was run: building runs one, unless the step is eager.

    Called in the worker's thread, on its stream. Raises StepDoesNotFit.
    """
    try:
        replica = build()
        if device.type == "cuda" and replica.step.name == "eager":
            with BUILD_LOCK, torch.random.fork_rng(devices=[device]):  # its attention may be compiled
                _run_full(replica)
            torch.cuda.current_stream(device).synchronize()
    except torch.OutOfMemoryError as error:
        raise StepDoesNotFit(setup, device) from error
    return replica
