"""The rows that are decoding together on a GPU: each in a slot of its own for as long as it is written, several steps a
captured graph away from the host.

    slot r   keys and values [M, S, D] of every layer, filled up to lengths_R[r]; what lies beyond is hidden
    a step   reads all slots, writes one token in each: no shape ever changes, so it is captured once and replayed
    the host looks after every few steps at what was written, and gives the slots of finished rows to new ones

Finished rows cost nothing to leave and new ones one copy of their prompt's keys and values to join. For targets whose
layers all attend, with or without a sliding window; `unfit` says why another can't be decoded so. Never decides which
prompt comes next.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface, DynamicCache
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer, StaticLayer

from draftmill.compiling import BUILD_LOCK, record_graph
from draftmill.target.generate_rows import Row
from draftmill.target.generate_sampling import Sampling, choose_tokens, uniforms

SLOTS = "draftmill_slots"
"""Name under which transformers finds the attention function."""
STEPS_A_LOOK = 8
"""Steps between two looks of the host; a row that ends in between is decoded on for nothing until then."""
_CAPACITY_STEP = 64
_WARM_UPS = 2
_CHECKED = (5, 9)
"""Tokens already there in the two slots that the check decodes on from."""


class SlotRows:
    """Rows decoded in slots. The interface of `Rows`; deterministic given the order of calls.

    Args:
        model: a causal language model of Hugging Face, in eval mode.
        stop: ids that end an answer.
        slots: rows at once.
        capacity: tokens of the longest row, its answer included.

    Raises:
        RuntimeError: the model gives other logits so than at once, or can't be run or captured so.
    """

    can_join = True
    joins_at = 1 / 16
    """Share of the slots that must be free before new rows join: their prompts run together."""

    def __init__(self, model: Any, sampling: Sampling, stop: frozenset[int], slots: int, capacity: int) -> None:
        self._model, self._sampling, self._stop = model, sampling, stop
        self._device = model.get_input_embeddings().weight.device
        self._capacity = -(-capacity // _CAPACITY_STEP) * _CAPACITY_STEP
        self._rows: list[Row | None] = [None] * max(slots, len(_CHECKED))
        self._free = list(range(slots))[::-1]
        self.num_written = 0
        AttentionInterface.register(SLOTS, slot_attention)
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        self._graph: torch.cuda.CUDAGraph | None = None
        with torch.inference_mode(), self._on_stream():
            self._allocate()
            self._check()
            if self._stream is not None:
                self._capture()

    def __len__(self) -> int:
        """Rows that are being written."""
        return sum(row is not None for row in self._rows)

    def new_row(self, index: int, prompt: Sequence[int], limit: int, stream: int) -> Row:
        """A row that has written nothing; its random numbers follow from the seed and its stream."""
        numbers = uniforms(self._sampling.seed, stream, limit) if self._sampling.temperature > 0 else None
        return Row(index, prompt, limit, numbers)

    def add(self, rows: list[Row]) -> list[Row]:
        """Give new rows their slots, with all of their prompt but its last token. None of them ends here."""
        with torch.inference_mode(), self._on_stream():
            slots = [self._free.pop() for _ in rows]
            self._prefill([row.prompt[:-1] for row in rows], slots)
            at = torch.tensor(slots, device=self._device)
            self._tokens_R[at] = torch.tensor([row.prompt[-1] for row in rows], device=self._device)
            self._written_R[at] = 0
            if self._sampling.temperature > 0:
                for row, slot in zip(rows, slots, strict=True):
                    assert row.uniforms is not None
                    self._host_uniforms[slot, : row.limit] = torch.from_numpy(row.uniforms)
                self._uniforms_RL[at] = self._host_uniforms[slots].to(self._device)
            for row, slot in zip(rows, slots, strict=True):
                self._rows[slot] = row
        return []

    def step(self) -> list[Row]:
        """Take the steps until the next look; give back the rows that are finished, their slots free again."""
        with torch.inference_mode(), self._on_stream():
            self._turn.zero_()
            for _ in range(STEPS_A_LOOK):
                if self._graph is not None:
                    self._graph.replay()
                else:
                    self._step()
            columns = self._taken_KR.t().tolist()
        finished = []
        for slot, row in enumerate(self._rows):
            if row is None:
                continue
            before = len(row.written)
            for token in columns[slot]:
                row.written.append(token)
                row.ended = token in self._stop
                if row.is_finished:
                    finished.append(row)
                    self._rows[slot] = None
                    self._free.append(slot)
                    break
            self.num_written += len(row.written) - before
        return finished

    def _allocate(self) -> None:
        slots, device = len(self._rows), self._device

        def integers(*size: int) -> torch.Tensor:
            return torch.zeros(*size, dtype=torch.int64, device=device)

        self._tokens_R, self._lengths_R, self._written_R = integers(slots), integers(slots), integers(slots)
        self._taken_KR, self._turn = integers(STEPS_A_LOOK, slots), integers(1)
        limit = self._sampling.max_new_tokens if self._sampling.temperature > 0 else 0
        self._host_uniforms = torch.zeros(slots, limit, dtype=torch.float64)
        self._uniforms_RL = self._host_uniforms.to(device)
        text = self._model.config.get_text_config()
        self._layers = [_SlotLayer(self._capacity, slots, self._lengths_R) for _ in range(text.num_hidden_layers)]
        self._windows = {None, getattr(text, "sliding_window", None)}
        self._options = _options(self._model, Cache(layers=list(self._layers)))

    def _prefill(self, prompts: Sequence[Sequence[int]], slots: Sequence[int]) -> None:
        """Keys and values of these tokens into the slots, from their start on; right padding is behind what counts."""
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=self._device)
        at = torch.tensor(slots, device=self._device)
        self._lengths_R[at] = lengths
        longest = max(map(len, prompts))
        if longest == 0:
            return
        padded = torch.tensor([[*prompt, *[0] * (longest - len(prompt))] for prompt in prompts], device=self._device)
        cache = DynamicCache()
        options = _options(self._model, cache)
        if "position_ids" in options:
            options["position_ids"] = torch.arange(longest, device=self._device)[None]
        self._model(input_ids=padded, **options)
        for mine, theirs in zip(self._layers, cache.layers, strict=True):
            assert isinstance(theirs, DynamicLayer)
            mine.fill(at, theirs.keys, theirs.values)

    def _logits(self) -> torch.Tensor:
        """Logits [R, V] after every slot's last token, which is written into its slot."""
        places = torch.arange(self._capacity, device=self._device)
        back = self._lengths_R[:, None] - places
        masks = {
            window: (back >= 0 if window is None else (back >= 0) & (back < window))[:, None, None]
            for window in self._windows
        }
        options = dict(self._options)
        if "position_ids" in options:
            options["position_ids"] = self._lengths_R[:, None]
        with _attending_by_slots(self._model):
            logits: torch.Tensor = self._model(input_ids=self._tokens_R[:, None], slot_masks=masks, **options).logits
        return logits[:, -1]

    def _step(self) -> None:
        """One token more in every slot. What a free slot or a finished row gets is nobody's."""
        numbers = None
        if self._sampling.temperature > 0:
            numbers = self._uniforms_RL.gather(1, self._written_R[:, None])[:, 0]
        tokens_R = choose_tokens(self._logits(), self._sampling, numbers)
        self._taken_KR.index_copy_(0, self._turn, tokens_R[None])
        self._tokens_R.copy_(tokens_R)
        self._turn += 1
        self._lengths_R.add_(1).clamp_(max=self._capacity - 1)
        self._written_R.add_(1).clamp_(max=max(0, self._uniforms_RL.shape[1] - 1))

    def _capture(self) -> None:
        with BUILD_LOCK.beside():
            for _ in range(_WARM_UPS):
                self._turn.zero_()
                self._step()
            torch.cuda.current_stream().synchronize()
            self._turn.zero_()
            self._graph = record_graph(self._step)

    def _check(self) -> None:
        """Raise RuntimeError unless slots of different lengths give the logits that the model gives at once."""
        vocabulary = self._model.config.get_text_config().vocab_size
        last = max(_CHECKED)
        tokens = [(7 * index + 3) % vocabulary for index in range(last + 1)]
        whole = self._model(input_ids=torch.tensor([tokens], device=self._device), use_cache=False).logits[0]
        slots = list(range(len(_CHECKED)))
        self._prefill([tokens[:length] for length in _CHECKED], slots)
        self._tokens_R[: len(slots)] = torch.tensor([tokens[length] for length in _CHECKED], device=self._device)
        got, expected = self._logits()[: len(slots)].double(), whole[list(_CHECKED)].double()
        error = (got - expected).norm() / (expected - expected.mean()).norm().clamp_min(1e-12)
        # rounding alone gives 1e-6 in float32 and 1e-2 in bfloat16, a wrong cache about 1
        if not error < (1e-3 if whole.dtype == torch.float32 else 0.3):
            raise RuntimeError(f"logits from slots differ from the model's own by {float(error):.2g}")

    @contextmanager
    def _on_stream(self) -> Iterator[None]:
        """Everything runs on one stream, the graph's, after what was there on the caller's before."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield


class _SlotLayer(StaticLayer):
    """One layer's keys and values [R, M, S, D]; a token goes to its slot's own length."""

    def __init__(self, capacity: int, slots: int, lengths_R: torch.Tensor) -> None:
        super().__init__(max_cache_len=capacity)
        self._lengths_R = lengths_R
        self._rows = torch.arange(slots, device=lengths_R.device)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write one token's keys and values [R, M, 1, D]; return all slots. The mask hides what does not count."""
        assert self.keys is not None
        assert self.values is not None
        self.keys[self._rows, :, self._lengths_R] = key_states[:, :, 0]
        self.values[self._rows, :, self._lengths_R] = value_states[:, :, 0]
        return self.keys, self.values

    def fill(self, at: torch.Tensor, keys: torch.Tensor | None, values: torch.Tensor | None) -> None:
        """Copy prompts' keys and values [rows, M, length, D] to the start of slots `at`."""
        assert keys is not None
        assert values is not None
        if not self.is_initialized:
            size = (len(self._rows), keys.shape[1], self.max_cache_len)
            self.keys, self.values = (state.new_zeros(*size, state.shape[-1]) for state in (keys, values))
            self.dtype, self.device, self.is_initialized = keys.dtype, keys.device, True
        assert self.keys is not None
        assert self.values is not None
        self.keys[:, :, : keys.shape[2]].index_copy_(0, at, keys)
        self.values[:, :, : values.shape[2]].index_copy_(0, at, values)


def slot_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    slot_masks: dict[int | None, torch.Tensor] | None = None,
    **_others: Any,
) -> tuple[torch.Tensor, None]:
    """One query a slot against the slot's keys; transformers' signature of an attention function.

    query [R, N, 1, D], key and value [R, M, S, D] -> [R, 1, N, D]. slot_masks: by window, boolean [R, 1, 1, S]. The
    queries that share a key head are attended as if they stood one after another, so no key is copied.
    Raises RuntimeError for a bound on the scores, a sink, a mask, or a forward that does not hand on `slot_masks`.
    """
    if slot_masks is None or sliding_window not in slot_masks:
        raise RuntimeError("attention by slots was called without their masks")
    if attention_mask is not None or softcap is not None or s_aux is not None:
        raise RuntimeError("attention by slots takes no mask, no softcap and no sinks")
    slots, heads, _, dim = query.shape
    grouped = query.reshape(slots, key.shape[1], heads // key.shape[1], dim)
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):  # cuDNN would plan anew for every shape
        out = F.scaled_dot_product_attention(grouped, key, value, attn_mask=slot_masks[sliding_window], scale=scaling)
    return out.reshape(slots, 1, heads, out.shape[-1]), None


def unfit(model: Any) -> str | None:
    """Why a model can't be decoded in slots, as far as its configuration says; None where it may be tried."""
    if not model.config.get_text_config().num_hidden_layers:
        return "it has no layers"
    kinds = {type(layer) for layer in DynamicCache(config=model.config).layers}
    if others := kinds - {DynamicLayer, DynamicSlidingWindowLayer}:
        return f"it caches in {', '.join(sorted(kind.__name__ for kind in others))}"
    return None


def _options(model: Any, cache: Any) -> dict[str, Any]:
    """What this model's forward takes besides token ids. transformers renamed the cache's argument in 5.2x."""
    parameters = inspect.signature(model.forward).parameters
    options: dict[str, Any] = {"cache" if "cache" in parameters else "past_key_values": cache, "use_cache": True}
    if "position_ids" in parameters:
        options["position_ids"] = None
    if "logits_to_keep" in parameters:
        options["logits_to_keep"] = 1
    return options


@contextmanager
def _attending_by_slots(model: Any) -> Iterator[None]:
    """The model's attention is `slot_attention` meanwhile, for which transformers makes no mask."""
    configs = list({id(one): one for one in (model.config, model.config.get_text_config())}.values())
    before = [config._attn_implementation_internal for config in configs]
    for config in configs:
        config._attn_implementation_internal = SLOTS
    try:
        yield
    finally:
        for config, implementation in zip(configs, before, strict=True):
            config._attn_implementation_internal = implementation
