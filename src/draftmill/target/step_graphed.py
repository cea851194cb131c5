"""A target's forward captured as one CUDA graph, for packed rows: they have one shape.

    tokens, positions, bounds ─copy─► static inputs ─► [forward up to the last tap] ─► static outputs, one a tap

The graph owns inputs and outputs; a run overwrites both, so a batch's features are read, on the same stream, before the
next run. Documents vary in number: unused bounds repeat the end, which gives documents without tokens. A batch with
more documents than the graph has room for is captured anew with twice the room. Another shape is an error.
"""

from __future__ import annotations

import logging

import torch

from draftmill.compiling import BUILD_LOCK, record_graph
from draftmill.target.attention import Packing
from draftmill.target.step import EagerForward, Forward

_logger = logging.getLogger(__name__)

WARM_UPS = 2
LEAST_ROOM = 64
"""Documents that a first graph has room for at least; each costs a little in every launch of the attention."""


class GraphedForward:
    """Another way of running the target, captured when it first runs and replayed from then on."""

    name = "graphed"

    def __init__(self, inner: Forward) -> None:
        """inner: how the captured forward runs; it stays applied as long as this is used."""
        if not isinstance(inner, EagerForward):
            raise RuntimeError(f"a forward that runs eagerly is captured, got {inner.name}")
        if inner.target.device.type != "cuda":
            raise ValueError(f"a CUDA graph needs a CUDA device, got {inner.target.device}")
        if not inner.by_document:
            raise RuntimeError("a forward is captured under attention by document only: masks are made anew each time")
        self.inner = inner
        self._graph: torch.cuda.CUDAGraph | None = None
        self._tokens = self._positions = self._bounds = torch.empty(0)
        self._outputs: list[torch.Tensor] = []

    def apply(self) -> None:
        """The inner way is applied already."""

    def undo(self) -> None:
        """Let the graph and its memory go."""
        self._graph, self._outputs = None, []

    def run(self, tokens_BS: torch.Tensor, packing: Packing | None) -> list[torch.Tensor]:
        """Packed rows -> L tensors [B, S, H], overwritten by the next run.

        Raises RuntimeError for rows of another shape than the first, or that are not packed.
        """
        if packing is None:
            raise RuntimeError("a captured target forward expects packed rows, got rows of one document each")
        if self._graph is None or packing.bounds.shape[0] > self._bounds.shape[0]:
            self._capture(tokens_BS, packing)
        if tokens_BS.shape != self._tokens.shape:
            raise RuntimeError(
                f"a captured target forward expects rows of shape {tuple(self._tokens.shape)}, "
                f"got {tuple(tokens_BS.shape)}"
            )
        self._load(tokens_BS, packing)
        assert self._graph is not None
        self._graph.replay()
        return self._outputs

    def _load(self, tokens_BS: torch.Tensor, packing: Packing) -> None:
        self._tokens.copy_(tokens_BS, non_blocking=True)
        self._positions.copy_(packing.positions_BS, non_blocking=True)
        count = packing.bounds.shape[0]
        self._bounds[:count].copy_(packing.bounds, non_blocking=True)
        self._bounds[count:].fill_(tokens_BS.numel())

    def _capture(self, tokens_BS: torch.Tensor, packing: Packing) -> None:
        """Warm up and capture on the current stream of this thread."""
        room = LEAST_ROOM
        while room + 1 < packing.bounds.shape[0]:
            room *= 2
        if self._graph is not None:
            _logger.info("target forward captured anew: %d documents in a batch", packing.bounds.shape[0] - 1)
        with BUILD_LOCK.beside(), torch.no_grad():
            self._graph, self._outputs = None, []
            self._tokens = torch.zeros_like(tokens_BS)
            self._positions = torch.zeros_like(packing.positions_BS)
            self._bounds = torch.zeros(room + 1, dtype=torch.int32, device=tokens_BS.device)
            self._load(tokens_BS, packing)
            static = Packing(self._positions, self._bounds, packing.longest)
            for _ in range(WARM_UPS):
                self.inner.run(self._tokens, static)
            torch.cuda.current_stream().synchronize()

            def forward() -> None:
                self._outputs = self.inner.run(self._tokens, static)

            self._graph = record_graph(forward)
