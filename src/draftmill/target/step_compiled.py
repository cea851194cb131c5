"""A target's forward with compiled decoder layers: one compilation for all layers of a kind, for batches of any shape.

Layers are of one kind if they are built alike and attend alike; their weights are inputs of the compiled code. Batches
of one row and of several are compiled apart, since the compiler takes a size of one for a constant, and so are batches
that need a mask (rows longer than a sliding window) and those that need none. Rows, row length and number of documents
are marked as free otherwise; packed rows have one length. Each of these is compiled once, under the build lock, with
code objects of the worker's own; a second compilation of any is an error that names the guard.
"""

from __future__ import annotations

import threading
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch._inductor.config as inductor_config
from torch import nn
from torch.fx.experimental import _config as shape_config

from draftmill.compiling import BUILD_LOCK, own_code
from draftmill.target.attention import Packing
from draftmill.target.model import Target
from draftmill.target.step import EagerForward

WARM_ROWS, WARM_LENGTH = 3, 136
"""A warm-up batch; any would do."""


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
        self.packed_length, self.backend = packed_length, backend
        self.owner = f"target_{threading.get_native_id()}_{id(self)}"
        kinds: dict[Any, _LayerKind] = {}
        self.kinds = [
            kinds.setdefault(_kind(target, index, layer), _LayerKind(self, type(layer).forward, len(kinds)))
            for index, layer in enumerate(target.layers)
        ]
        self._warm = False

    def apply(self) -> None:
        """Compile what most batches need, the first time."""
        for layer, kind in zip(self.target.layers, self.kinds, strict=True):
            layer.forward = types.MethodType(kind.forward, layer)
        if not self._warm:
            for rows in (1, WARM_ROWS):
                self.run(*self._batch(rows))
            self._warm = True

    def undo(self) -> None:
        """Back to the layers' own forwards."""
        for layer in self.target.layers:
            vars(layer).pop("forward", None)

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


class _LayerKind:
    """The compiled forwards of the layers of one kind, by what the compiler takes for fixed in their inputs."""

    def __init__(self, owner: CompiledForward, function: Callable[..., Any], number: int) -> None:
        self.owner, self.function, self.number = owner, function, number
        self.compiled: dict[Any, Callable[..., Any]] = {}

        def forward(layer: nn.Module, hidden_states: torch.Tensor, *arguments: Any, **options: Any) -> Any:
            fixed = (hidden_states.shape[0] == 1, _form(arguments), _form(options))
            compiled = self.compiled.get(fixed)
            if compiled is None:
                return self.compile(fixed, layer, hidden_states, arguments, options)
            return compiled(layer, hidden_states, *arguments, **options)

        self.forward = forward

    def compile(self, fixed: Any, layer: nn.Module, hidden_states: torch.Tensor, arguments: Any, options: Any) -> Any:
        """Compile by running. Raises RuntimeError where the compiler breaks the layer's forward apart."""
        name = f"{self.owner.owner}_{self.number}_{len(self.compiled)}"
        compiled = torch.compile(own_code(self.function, name), dynamic=None, backend=self.owner.backend)
        rows, length = hidden_states.shape[:2]
        for tensor in _tensors((hidden_states, arguments, options)):
            _mark(tensor, rows, None if self.owner.packed_length else length)
        breaks = torch._dynamo.utils.counters["graph_break"]
        # Sizes that are equal in this batch are equal by chance, and padding would guard on how large they are.
        with (
            BUILD_LOCK,
            shape_config.patch(use_duck_shape=False),  # type: ignore[attr-defined]
            inductor_config.patch(shape_padding=False),
        ):
            before = sum(breaks.values())
            out = compiled(layer, hidden_states, *arguments, **options)
            if sum(breaks.values()) > before:
                reason = str(next(reversed(breaks))).splitlines()[0]
                raise RuntimeError(f"the compiler breaks the layers apart: {reason}")
            torch._dynamo.config.error_on_recompile = True
        self.compiled[fixed] = compiled
        return out


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


def _form(value: Any) -> Any:
    """What of a layer's inputs is not in sizes: which are given, types, and the values of those that are no tensor."""
    if isinstance(value, torch.Tensor):
        return value.dtype
    if isinstance(value, dict):
        return tuple((key, _form(part)) for key, part in value.items())
    if isinstance(value, tuple | list):
        return tuple(_form(part) for part in value)
    return value if isinstance(value, bool | int | float | str | None) else type(value)


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
