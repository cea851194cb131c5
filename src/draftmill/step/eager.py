"""The step as three pieces, run eagerly: the reference that the other ways of running it must equal.

    trunk      features + blocks -> hidden states, with the graph for backward
    head chunk rows of hidden states -> cross entropies and the gradient to those rows; as many chunks as have rows
    backward   gradient to the hidden states -> gradients of the weights, added to the flat buffer

Between the pieces nothing is read back to the host: how many chunks have rows is known there from the batch.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from draftmill.drafter.attention import Attention, dense_attention, per_document_attention
from draftmill.drafter.loss import block_tokens, loss_chunk, scored_rows
from draftmill.step.state import StepState

Chunk = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
LossChunk = Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]]


class EagerStep:
    """Forward and backward of one batch on a replica's static buffers, piece by piece."""

    name = "eager"

    def __init__(self, state: StepState) -> None:
        self.state = state
        size = state.drafter_shape
        slots = size.block_size - 1
        self.d_pace = None if state.rule.alpha is None else (slots, state.rule.alpha)
        # Under D-PACE a chunk holds whole blocks.
        step = slots if self.d_pace else 1
        self.chunk_rows = max(step, state.shape.chunk_rows // step * step)
        self.num_rows = state.shape.anchor_slots * slots

    def run(self, num_scored: int, num_blocks: int) -> None:
        """One batch: adds its gradient, totals and counts to the state.

        num_scored: supervised slots of the batch; num_blocks: used blocks. Both known on the host.
        """
        hidden = self.trunk()
        with torch.no_grad():
            self.score(hidden.detach(), num_scored, num_blocks, with_slope=True)
        hidden.backward(self.state.slope_QH)

    @torch.no_grad()
    def evaluate(self, num_scored: int, num_blocks: int) -> None:
        """Forward only: totals, counts and `correct_AK` of the batch; no gradient."""
        self.score(self.trunk(), num_scored, num_blocks, with_slope=False)

    def trunk(self) -> torch.Tensor:
        """Static inputs -> hidden states [A*K, H]."""
        state = self.state
        size = state.drafter_shape
        ids, positions = block_tokens(state.blocks, size.block_size, size.mask_token_id)
        return state.drafter(
            state.features_TF, state.blocks.positions_T, state.head.embed(ids), positions, self.attention()
        )

    def attention(self) -> Attention:
        """How the drafter's layers attend in this batch."""
        on_host = self.state.device.type == "cpu"
        choose = per_document_attention if on_host else dense_attention
        return choose(self.state.drafter_shape, self.state.blocks)

    def score(self, hidden_QH: torch.Tensor, num_scored: int, num_blocks: int, with_slope: bool) -> None:
        """Hidden states [A*K, H] -> totals, counts, correct_AK, and slope_QH where wanted."""
        state = self.state
        rows, labels, weights = scored_rows(state.blocks, state.drafter_shape.block_size, state.rule)
        state.correct_AK.zero_()
        if with_slope:
            state.slope_QH.zero_()
        for start in range(0, self.rows_to_run(num_scored, num_blocks), self.chunk_rows):
            stop = start + self.chunk_rows
            self.chunk(hidden_QH, rows[start:stop], labels[start:stop], weights[start:stop], with_slope)
        self.count()

    def rows_to_run(self, num_scored: int, num_blocks: int) -> int:
        """Rows of the loss head that carry weight, from the batch's counts."""
        return num_blocks * (self.state.drafter_shape.block_size - 1) if self.d_pace else num_scored

    def chunk(
        self, hidden_QH: torch.Tensor, rows: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor, slope: bool
    ) -> None:
        """One chunk of the loss head, its results scattered to the static outputs."""
        state = self.state
        cross_entropy, weights, correct, slope_RH = self.loss_chunk(
            hidden_QH[rows], state.head, labels, weights, self.d_pace, slope
        )
        state.totals += torch.stack([(weights * cross_entropy).sum(), weights.sum()])
        state.correct_AK.view(-1)[rows] = correct
        if slope:
            state.slope_QH[rows] = slope_RH

    loss_chunk: LossChunk = staticmethod(loss_chunk)

    def count(self) -> None:
        """Add the batch's right and supervised slots to the counts."""
        state = self.state
        slots = torch.arange(state.drafter_shape.block_size, device=state.device)
        scored = (slots <= state.blocks.slots_A[:, None]) & (slots > 0)
        state.correct_AK &= scored
        state.correct_K += state.correct_AK.sum(dim=0)
        state.scored_K += scored.sum(dim=0)
