"""Caches of fixed shape for both models, written and cropped through one shared length.

Owns the buffers. `length` is a 0-dim int64 tensor: the number of tokens that both caches hold. A forward writes its
keys and values at the slots from `length` on and does not move it; whoever decides how many of those tokens stay adds
them to `length`, and what lies beyond is overwritten by the next forward. So cropping costs nothing, no shape ever
changes, and a whole decoding step can be captured.

Sliding layers of the target keep all tokens too: their mask leaves out what lies before the window. Recurrent layers
have no slots to crop to; their state is copied before a forward and put back after it. Never runs a model.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from transformers import StaticCache
from transformers.cache_utils import Cache, LinearAttentionLayer, StaticLayer, StaticSlidingWindowLayer

from draftmill.drafter.cache import DrafterCache
from draftmill.drafter.shape import DrafterShape
from draftmill.errors import InputError


class FixedLayer(StaticLayer):
    """Keys and values [1, M, capacity, D] of one attention layer of the target."""

    def __init__(self, capacity: int, length: torch.Tensor) -> None:
        super().__init__(max_cache_len=capacity)
        self._length = length

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate, once the first forward shows number of heads, head size, type and device."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys, self.values = (
            state.new_zeros(*state.shape[:2], self.max_cache_len, state.shape[-1])
            for state in (key_states, value_states)
        )
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write new keys and values [1, M, N, D] from slot `length` on; return all slots. The mask hides the rest."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None
        assert self.values is not None
        slots = self._length.to(key_states.device) + torch.arange(key_states.shape[-2], device=key_states.device)
        self.keys.index_copy_(2, slots, key_states)
        self.values.index_copy_(2, slots, value_states)
        return self.keys, self.values

    def get_seq_length(self) -> Any:
        """The shared length, as a tensor: the mask is computed from it on the device."""
        return self._length


class TargetCache:
    """The target's cache: fixed slots for attention layers, a state for recurrent ones.

    `layers` goes into the model's forward. Raises InputError, naming the layer's type, for a cache of another kind.
    """

    def __init__(self, config: Any, capacity: int, length: torch.Tensor) -> None:
        layers: list[Any] = []
        for layer in _static_layers(config, capacity):
            if type(layer) in (StaticLayer, StaticSlidingWindowLayer):
                layer = FixedLayer(capacity, length)
            elif type(layer) is not LinearAttentionLayer and type(layer).__name__ != "DummyLayer":
                raise InputError(
                    f"the target type {config.model_type!r} caches in {type(layer).__name__}, which can't be set back "
                    "after refused tokens; evaluate on a target with attention, sliding or linear-attention layers"
                )
            layers.append(layer)
        if not any(isinstance(layer, FixedLayer) for layer in layers):
            raise InputError(
                f"the target type {config.model_type!r} has no attention layer, and DFlash decoding needs one"
            )
        self.layers = Cache(layers=layers)
        self._states = [layer for layer in layers if type(layer) is LinearAttentionLayer]

    @property
    def recurrent(self) -> bool:
        """Whether some layer keeps a state that only `snapshot` and `restore` can set back."""
        return bool(self._states)

    def snapshot(self) -> list[dict[Any, torch.Tensor]]:
        """Copies of the recurrent layers' states."""
        return [{key: state.clone() for key, state in _state_tensors(layer)} for layer in self._states]

    def restore(self, snapshot: list[dict[Any, torch.Tensor]]) -> None:
        """Put the recurrent layers' states back as they were at the snapshot."""
        for layer, states in zip(self._states, snapshot, strict=True):
            for key, state in _state_tensors(layer):
                state.copy_(states[key])


class FixedDrafterCache(DrafterCache):
    """The drafter's context keys and values at fixed slots, for `Drafter.extend` and `Drafter.draft`."""

    def __init__(
        self,
        shape: DrafterShape,
        capacity: int,
        device: torch.device | str,
        dtype: torch.dtype,
        shared_length: torch.Tensor,
    ) -> None:
        super().__init__(shape, capacity, device, dtype)
        self._shared_length = shared_length

    def append(self, keys_values: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Write N tokens from slot `length` on: for each layer keys and values [N, M, D]."""
        count = keys_values[0][0].shape[0]
        slots = self._shared_length + torch.arange(count, device=self.buffer.device)
        for index, (keys, values) in enumerate(keys_values):
            self.buffer[index, 0].index_copy_(0, slots, keys)
            self.buffer[index, 1].index_copy_(0, slots, values)

    def crop(self, length: int) -> None:
        """Refused: the shared length alone says how much is kept."""
        raise RuntimeError("a cache of fixed slots is cropped by its shared length")

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [capacity, M, D] of a layer, as views; `visible` hides the slots past the length."""
        return self.buffer[index, 0], self.buffer[index, 1]

    def visible(self, positions_K: torch.Tensor, window: int | None) -> torch.Tensor | None:
        """What a block at positions [K] sees of [slots | block]: boolean [K, capacity + K]."""
        slots = torch.arange(self.capacity, device=positions_K.device)
        block = torch.arange(positions_K.shape[0], device=positions_K.device)
        context = (slots < self._shared_length).expand(positions_K.shape[0], -1)
        if window is None:
            return torch.cat([context, torch.ones_like(context[:, :1]).expand(-1, block.shape[0])], dim=1)
        context = context & (positions_K[:, None] - slots < window)
        return torch.cat([context, block[None, :] <= block[:, None]], dim=1)


def forward_options(model: Any, cache: Any) -> dict[str, Any]:
    """What this model's forward takes besides token ids. transformers renamed the cache's argument in 5.2x."""
    parameters = inspect.signature(model.forward).parameters
    options: dict[str, Any] = {"cache" if "cache" in parameters else "past_key_values": cache, "use_cache": True}
    if "position_ids" in parameters:
        options["position_ids"] = None
    if "logits_to_keep" in parameters:
        options["logits_to_keep"] = 0
    return options


def _static_layers(config: Any, capacity: int) -> list[Any]:
    try:
        return StaticCache(config=config, max_cache_len=capacity).layers
    except (KeyError, AttributeError, TypeError) as error:
        raise InputError(
            f"the target type {config.model_type!r} has no cache of fixed size in this transformers ({error!r}), and "
            "decoding needs one; evaluate on another target, or with a newer transformers"
        ) from error


def _state_tensors(layer: Any) -> list[tuple[Any, torch.Tensor]]:
    """Every tensor that a recurrent layer keeps, by name; some versions keep several of a kind in a mapping."""
    found: list[tuple[Any, torch.Tensor]] = []
    for name, value in vars(layer).items():
        if isinstance(value, torch.Tensor):
            found.append((name, value))
        elif isinstance(value, dict):
            found += [((name, key), item) for key, item in value.items() if isinstance(item, torch.Tensor)]
    return found
