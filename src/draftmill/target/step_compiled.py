"""A target's forward with compiled decoder layers: one compilation for all layers of a kind, for batches of any shape.

Layers are of one kind if they are built alike and attend alike; their weights are inputs of the compiled code. Batches
of one row and of several are compiled apart, since the compiler takes a size of one for a constant; rows, row length
and number of documents are marked as free otherwise (packed rows have one length). Every worker compiles code objects
of its own, all of it before the first real batch, and a compilation after that is an error that names the guard.
"""

from __future__ import annotations

import threading
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from draftmill.compiling import own_code
from draftmill.target.attention import Packing
from draftmill.target.model import Target
from draftmill.target.step import EagerForward

WARM_LENGTH = 136
"""Tokens of a warm-up row: no size that a target's dimensions have, so that the compiler takes none for the other."""
WARM_ROWS = 3


class CompiledForward(EagerForward):
    """The model with its layers' forwards compiled, while it is applied."""

    name = "compiled"

    def __init__(
        self,
        target: Target,
        layer_ids: Sequence[int],
        by_document: bool = False,
        packed_length: int | None = None,
        backend: str = "inductor",
    ) -> None:
        """packed_length: tokens of a packed row, None where a row is one document. backend: of torch.compile."""
        super().__init__(target, layer_ids, by_document)
        self.packed_length = packed_length
        owner = f"target_{threading.get_native_id()}_{id(self)}"
        self.marking = False
        kinds: dict[Any, dict[bool, Callable[..., Any]]] = {}
        self._forwards: list[Callable[..., Any]] = []
        for index, layer in enumerate(target.layers):
            kind = _kind(target, index, layer)
            if kind not in kinds:
                kinds[kind] = {
                    single: torch.compile(
                        own_code(type(layer).forward, f"{owner}_{len(kinds)}_{single}"), dynamic=None, backend=backend
                    )
                    for single in (True, False)
                }
            self._forwards.append(self._dispatch(kinds[kind]))
        self._warm = False

    def apply(self) -> None:
        """Compile everything the first time. The caller holds BUILD_LOCK."""
        for layer, forward in zip(self.target.layers, self._forwards, strict=True):
            layer.forward = types.MethodType(forward, layer)
        if not self._warm:
            self._warm_up()
            self._warm = True

    def undo(self) -> None:
        """Back to the layers' own forwards."""
        for layer in self.target.layers:
            vars(layer).pop("forward", None)

    def _dispatch(self, compiled: dict[bool, Callable[..., Any]]) -> Callable[..., Any]:
        def forward(layer: nn.Module, hidden_states: torch.Tensor, *arguments: Any, **options: Any) -> Any:
            rows, length = hidden_states.shape[:2]
            if self.marking:
                for tensor in _tensors((hidden_states, arguments, options)):
                    _mark(tensor, rows, None if self.packed_length else length)
            return compiled[rows == 1](layer, hidden_states, *arguments, **options)

        return forward

    def _warm_up(self) -> None:
        """Run both kinds of batches; raises RuntimeError where the compiler breaks a layer's forward apart."""
        counters = torch._dynamo.utils.counters
        breaks = sum(counters["graph_break"].values())
        self.marking = True
        try:
            for rows in (1, WARM_ROWS):
                self.run(*self._batch(rows))
        finally:
            self.marking = False
        if sum(counters["graph_break"].values()) > breaks:
            reason = next(reversed(counters["graph_break"]), "")
            raise RuntimeError(f"the compiler breaks the layers apart: {str(reason).splitlines()[0]}")
        torch._dynamo.config.error_on_recompile = True

    def _batch(self, rows: int) -> tuple[torch.Tensor, Packing | None]:
        """Rows of zeros; packed ones hold two documents each."""
        device, length = self.target.device, self.packed_length or WARM_LENGTH
        tokens = torch.zeros(rows, length, dtype=torch.int64, device=device)
        if self.packed_length is None:
            return tokens, None
        half = length // 2
        positions = torch.cat([torch.arange(half), torch.arange(length - half)]).expand(rows, -1).contiguous()
        starts = torch.arange(rows)[:, None] * length + torch.tensor([0, half])
        bounds = torch.cat([starts.flatten(), torch.tensor([rows * length])]).int()
        return tokens, Packing(positions.to(device), bounds.to(device), length)


def _kind(target: Target, index: int, layer: nn.Module) -> Any:
    """Equal for layers that one compilation serves: of the same modules, settings and kind of attention."""
    kinds = getattr(target.text_config, "layer_types", None)
    settings = tuple(
        (path, type(module), tuple(sorted((k, v) for k, v in vars(module).items() if _is_setting(k, v))))
        for path, module in layer.named_modules()
    )
    return (kinds[index] if kinds else None, settings)


def _is_setting(name: str, value: Any) -> bool:
    return not name.startswith("_") and name != "layer_idx" and isinstance(value, bool | int | float | str)


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, tuple | list):
        return [tensor for part in value for tensor in _tensors(part)]
    return []


def _mark(tensor: torch.Tensor, rows: int, length: int | None) -> None:
    """Mark the sizes of a layer's input that vary from batch to batch."""
    for dim, size in enumerate(tensor.shape):
        if size == length or (dim == 0 and (tensor.dim() == 1 or size == rows > 1)):
            torch._dynamo.maybe_mark_dynamic(tensor, dim)
