"""The rows that are decoding together: one key/value cache, left-padded, from which finished rows leave and which
new rows join.

Owns the cache and the attention mask. Rows join only where every layer keeps plain keys and values; a cache with
windows or recurrent state takes new rows only once it is empty. Never decides which prompt comes next.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.nn.functional import pad
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from draftmill.target.generate_sampling import Sampling, choose_tokens, uniforms

_TRIM = 32
"""Columns that are padding in every row are cut once there are this many."""
_MOST_FINISHED = 1 / 8
"""Share of the rows that may be finished before they leave the cache: leaving copies all of it, staying costs their
part of each step."""


@dataclass(slots=True)
class Row:
    """One prompt under way. `limit` is the most tokens it may write; `ended` says that it wrote a stop token."""

    index: int
    prompt: Sequence[int]
    limit: int
    uniforms: np.ndarray | None
    written: list[int] = field(default_factory=list)
    ended: bool = False

    @property
    def is_finished(self) -> bool:
        """Whether it writes no more."""
        return self.ended or len(self.written) >= self.limit

    @property
    def num_cached(self) -> int:
        """Its tokens in the cache: all but the last one written, which is the next input."""
        return len(self.prompt) + len(self.written) - 1


class Rows:
    """Rows that are decoded one token a step. Deterministic given the order of calls.

    Args:
        model: a causal language model of Hugging Face, in eval mode.
        stop: ids that end an answer.
    """

    joins_at = 1 / 4
    """Share of the places that must be free before new rows join: joining copies the cache."""

    def __init__(self, model: Any, sampling: Sampling, stop: frozenset[int]) -> None:
        self._model = model
        self._sampling = sampling
        self._stop = stop
        self._device = model.get_input_embeddings().weight.device
        parameters = inspect.signature(model.forward).parameters
        # transformers renamed the argument in 5.2x and warns about the old name
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"
        self._takes_positions = "position_ids" in parameters
        self._keeps_logits = "logits_to_keep" in parameters
        self._cache: Any = None
        self._mask_BS = torch.zeros(0, 0, dtype=torch.int64, device=self._device)
        self._rows: list[Row] = []
        self._num_live = 0
        self.num_written = 0

    def __len__(self) -> int:
        """Rows that are still being written."""
        return self._num_live

    @property
    def can_join(self) -> bool:
        """Whether new rows may be added now."""
        return not self._num_live or all(type(layer) is DynamicLayer for layer in self._cache.layers)

    def new_row(self, index: int, prompt: Sequence[int], limit: int, stream: int) -> Row:
        """A row that has written nothing; its random numbers follow from the seed and its stream."""
        numbers = uniforms(self._sampling.seed, stream, limit) if self._sampling.temperature > 0 else None
        return Row(index, prompt, limit, numbers)

    @torch.inference_mode()
    def add(self, rows: list[Row]) -> list[Row]:
        """Run the prompts of new rows, write their first tokens; give back the rows that ended at once."""
        assert rows
        assert self.can_join
        longest = max(len(row.prompt) for row in rows)
        tokens = torch.zeros(len(rows), longest, dtype=torch.int64)
        mask = torch.zeros_like(tokens)
        for tokens_S, mask_S, row in zip(tokens, mask, rows, strict=True):
            start = longest - len(row.prompt)
            tokens_S[start:] = torch.tensor(row.prompt)
            mask_S[start:] = 1
        mask = mask.to(self._device)
        cache = DynamicCache(config=self._model.config)
        positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
        logits_BV = self._forward(tokens.to(self._device), mask, positions, cache)
        self._write(logits_BV, rows)
        self._leave()
        if self._rows:
            self._join(cache, mask)
        else:
            self._cache, self._mask_BS = cache, mask
        self._rows = self._rows + rows
        return self._newly_finished(rows)

    @torch.inference_mode()
    def step(self) -> list[Row]:
        """Write one more token in every row; give back the rows that have just finished."""
        last = torch.tensor([[row.written[-1]] for row in self._rows], device=self._device)
        positions = torch.tensor([[row.num_cached] for row in self._rows], device=self._device)
        self._mask_BS = pad(self._mask_BS, (0, 1), value=1)
        logits_BV = self._forward(last, self._mask_BS, positions, self._cache)
        live = [row for row in self._rows if not row.is_finished]
        self._write(logits_BV, self._rows)
        return self._newly_finished(live)

    def _forward(
        self, tokens_BS: torch.Tensor, mask_BS: torch.Tensor, positions_BS: torch.Tensor, cache: Any
    ) -> torch.Tensor:
        arguments: dict[str, Any] = {self._cache_name: cache, "attention_mask": mask_BS, "use_cache": True}
        if self._takes_positions:
            arguments["position_ids"] = positions_BS
        if self._keeps_logits:
            arguments["logits_to_keep"] = 1
        return self._model(input_ids=tokens_BS, **arguments).logits[:, -1]

    def _write(self, logits_BV: torch.Tensor, rows: list[Row]) -> None:
        numbers_B = None
        if self._sampling.temperature > 0:
            drawn = [row.uniforms[min(len(row.written), row.limit - 1)] for row in rows if row.uniforms is not None]
            numbers_B = torch.tensor(drawn, dtype=torch.float64, device=logits_BV.device)
        for row, token in zip(rows, choose_tokens(logits_BV, self._sampling, numbers_B).tolist(), strict=True):
            if not row.is_finished:  # what a finished row would write while it is still here is nobody's
                row.written.append(token)
                self.num_written += 1
                row.ended = token in self._stop

    def _newly_finished(self, rows: list[Row]) -> list[Row]:
        """Those of the rows that have just finished. All finished ones leave the cache once there are enough."""
        finished = [row for row in rows if row.is_finished]
        self._num_live = sum(not row.is_finished for row in self._rows)
        if len(self._rows) - self._num_live >= max(1.0, _MOST_FINISHED * len(self._rows)):
            self._leave()
        return finished

    def _leave(self) -> None:
        """Drop the finished rows from the cache."""
        kept = [number for number, row in enumerate(self._rows) if not row.is_finished]
        if len(kept) == len(self._rows):
            return
        self._rows = [self._rows[number] for number in kept]
        if not kept:
            self._cache, self._mask_BS = None, self._mask_BS[:0, :0]
            return
        select = torch.tensor(kept, device=self._device)
        self._cache.reorder_cache(select)
        self._mask_BS = self._mask_BS.index_select(0, select)
        self._trim()

    def _trim(self) -> None:
        """Cut leading columns that are padding in every row."""
        num_padding = self._mask_BS.shape[1] - max(row.num_cached for row in self._rows)
        if num_padding >= _TRIM and self.can_join:
            for layer in self._cache.layers:
                layer.keys, layer.values = layer.keys[:, :, num_padding:], layer.values[:, :, num_padding:]
            self._mask_BS = self._mask_BS[:, num_padding:]

    def _join(self, cache: Any, mask_BS: torch.Tensor) -> None:
        """Append another cache's rows, padding the shorter one on the left."""
        length = max(self._mask_BS.shape[1], mask_BS.shape[1])

        def padded(tensor: torch.Tensor) -> torch.Tensor:
            return pad(tensor, (0, 0, length - tensor.shape[-2], 0))

        for mine, other in zip(self._cache.layers, cache.layers, strict=True):
            mine.keys = torch.cat([padded(mine.keys), padded(other.keys)])
            mine.values = torch.cat([padded(mine.values), padded(other.values)])
        masks = [pad(mask, (length - mask.shape[1], 0)) for mask in (self._mask_BS, mask_BS)]
        self._mask_BS = torch.cat(masks)
