"""The step as pieces, run eagerly: the reference that the other ways of running it must equal.

    trunk      features + blocks -> hidden states, with the graph for backward
    rows       which slots are scored, with which label and weight
    chunk      some rows of hidden states -> costs and the gradient to those rows; as many chunks as have rows
    count      right and supervised slots
    backward   gradient to the hidden states -> gradients of the weights, added to the flat buffer

Between the pieces nothing is read back to the host: how many chunks have rows is known there from the batch.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.nn.attention.flex_attention import flex_attention

from draftmill.compiling import BUILD_LOCK, own_code
from draftmill.drafter.attention import Attention, dense_attention, flex_masked_attention, per_document_attention
from draftmill.drafter.loss import ROW_WORK, block_tokens, loss_chunk, scored_rows, target_places
from draftmill.drafter.loss_float8 import ROW_WORK_FLOAT8
from draftmill.drafter.mask import TileLists
from draftmill.records import Blocks
from draftmill.step.state import StepState

FlexKernel = Callable[..., Any]
AttentionChoice = Callable[[StepState], Callable[[Blocks], Attention]]


class EagerStep:
    """Forward and backward of one batch on a replica's static buffers, piece by piece."""

    name = "eager"

    def __init__(self, state: StepState, attention: AttentionChoice | None = None) -> None:
        """attention: how the layers attend; by default document by document on a CPU, dense on CUDA."""
        self.state = state
        self.row_work = ROW_WORK if state.float8 is None else ROW_WORK_FLOAT8
        size = state.drafter_shape
        slots = size.block_size - 1
        # Under D-PACE a chunk holds whole blocks.
        self.whole_blocks = state.rule.alpha is not None
        unit = slots if self.whole_blocks else 1
        self.chunk_rows = max(unit, min(state.shape.chunk_rows, state.shape.anchor_slots * slots) // unit * unit)
        self.num_chunks = -(-state.shape.anchor_slots * slots // self.chunk_rows)
        self.attention = (attention or default_attention)(state)

    def warm_up(self) -> None:
        """Nothing to prepare."""

    def running(self) -> AbstractContextManager[None]:
        """What is held around a run, an evaluation or an update: nobody traces meanwhile."""
        return BUILD_LOCK.running()

    def run(self, num_scored: int, num_blocks: int) -> None:
        """One batch: adds its gradient, sums and counts to the state.

        num_scored: supervised slots of the batch; num_blocks: used blocks. Both known on the host.
        """
        hidden = self.trunk()
        with torch.no_grad():
            self.score(hidden.detach(), num_scored, num_blocks, with_slope=True)
        hidden.backward(self.state.slope_RH[:-1])

    @torch.no_grad()
    def evaluate(self, num_scored: int, num_blocks: int) -> None:
        """Forward only: sums, counts and `correct_AK` of the batch; no gradient."""
        self.score(self.trunk(), num_scored, num_blocks, with_slope=False)

    def trunk(self) -> torch.Tensor:
        """Static inputs -> hidden states of slots 1..K-1, [A*(K-1), H]."""
        state = self.state
        size = state.drafter_shape
        ids, positions = block_tokens(state.blocks, size.block_size, size.mask_token_id)
        return state.drafter(
            state.features_TF,
            state.blocks.positions_T,
            state.head.embed(ids),
            positions,
            self.attention(state.blocks),
            drafted_only=True,
        )

    def score(self, hidden_RH: torch.Tensor, num_scored: int, num_blocks: int, with_slope: bool) -> None:
        """Hidden states [A*(K-1), H] -> sums, counts, correct_AK, and slope_RH where wanted."""
        rows, labels, weights = self.rows()
        for index in range(self.chunks_to_run(num_scored, num_blocks)):
            part = slice(index * self.chunk_rows, (index + 1) * self.chunk_rows)
            self.chunk(hidden_RH, rows[part], labels[part], weights[part], with_slope)
        self.count()

    def rows(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rows, labels and weights of the loss head, filled up to whole chunks; clears what chunks scatter into."""
        state = self.state
        state.correct_AK.zero_()
        state.slope_RH.zero_()
        rows, labels, weights = scored_rows(state.blocks, state.drafter_shape.block_size, state.rule)
        # Fillers point at row 0, the first block's given token, which has no loss.
        missing = self.num_chunks * self.chunk_rows - rows.shape[0]
        return tuple(torch.nn.functional.pad(x, (0, missing)) for x in (rows, labels, weights))  # type: ignore[return-value]

    def chunks_to_run(self, num_scored: int, num_blocks: int) -> int:
        """How many chunks have rows that carry weight, from the batch's counts."""
        rows = num_blocks * (self.state.drafter_shape.block_size - 1) if self.whole_blocks else num_scored
        return -(-rows // self.chunk_rows)

    def chunk(
        self, hidden_RH: torch.Tensor, rows: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor, with_slope: bool
    ) -> None:
        """One chunk of the loss head, its results scattered to the static outputs."""
        state, block_size = self.state, self.state.drafter_shape.block_size
        # Place among the rows of slots 1..K-1; a filler's is -1, the last one.
        drafted, target_RH = rows - rows // block_size - 1, None
        if state.rule.needs_target:
            target_RH = state.last_TH[target_places(state.blocks, rows, block_size)]
        costs, weights, correct, slopes = loss_chunk(
            self.row_work.take(hidden_RH, drafted),
            target_RH,
            state.head,
            labels,
            weights,
            state.rule,
            block_size - 1,
            with_slope,
            self.row_work.score,
        )
        state.totals += torch.stack([(weights * costs).sum(), weights.sum()])
        state.correct_AK.view(-1)[rows] = correct
        if slopes is not None:
            self.row_work.place(state.slope_RH, drafted, slopes)

    def count(self) -> None:
        """Add the batch's right and supervised slots to the counts."""
        state = self.state
        slots = torch.arange(state.drafter_shape.block_size, device=state.device)
        scored = (slots <= state.blocks.slots_A[:, None]) & (slots > 0)
        state.correct_AK &= scored
        state.correct_K += state.correct_AK.sum(dim=0)
        state.scored_K += scored.sum(dim=0)


DENSE_LIMIT = 2**28
"""Query-key pairs up to which CUDA attends densely when run eagerly; past it the mask alone would take gigabytes."""


def default_attention(state: StepState) -> Callable[[Blocks], Attention]:
    """Document by document on a CPU; on CUDA the dense reference, or, where large, flex attention alone compiled."""
    shape = state.drafter_shape
    if state.device.type == "cpu":
        return lambda blocks: per_document_attention(shape, blocks)
    queries = state.shape.anchor_slots * shape.block_size
    if queries * (state.shape.context_slots + queries) <= DENSE_LIMIT:
        return dense_attention_choice(state)
    return flex_attention_choice(state, _flex_alone())


def _flex_alone() -> FlexKernel:
    """Flex attention compiled by itself, for this worker alone.

    Of its own code, or another worker's device would be a recompilation, which a compiled step anywhere in the process
    forbids. It compiles with and without gradients, for each rule of a mask, and then no more.
    """
    compiled = torch.compile(own_code(_attend, f"eager_{threading.get_native_id()}_{uuid.uuid4().hex}"), dynamic=False)
    built: set[tuple[bool, Any]] = set()

    def kernel(*arguments: Any, **options: Any) -> Any:
        kind = torch.is_grad_enabled(), options["block_mask"].mask_mod.__code__
        if kind in built:
            return compiled(*arguments, **options)
        # Before torch 2.12 the setting is the process's: outside the lock workers would put back one another's.
        with BUILD_LOCK, torch._dynamo.config.patch(error_on_recompile=False):
            out = compiled(*arguments, **options)
        built.add(kind)
        return out

    return kernel


def _attend(*arguments: Any, **options: Any) -> Any:
    return flex_attention(*arguments, **options)


def dense_attention_choice(state: StepState) -> Callable[[Blocks], Attention]:
    """The dense reference; reads nothing on the host, so it can be compiled on a CPU."""
    return lambda blocks: dense_attention(state.drafter_shape, blocks)


def flex_attention_choice(state: StepState, kernel: FlexKernel = flex_attention) -> Callable[[Blocks], Attention]:
    """Flex attention under tile lists built from each batch's blocks; `kernel` as it is inside a compiled step."""
    shape = state.drafter_shape
    slots = state.shape
    tiles = TileLists(slots.context_slots, slots.anchor_slots, shape.block_size, state.device, slots.short_blocks)
    windows = {shape.window(layer) for layer in range(shape.num_layers)}

    def attention(blocks: Blocks) -> Attention:
        return flex_masked_attention(shape, {window: tiles.mask(blocks, window) for window in windows}, kernel)

    return attention
