"""Batched local generation with a Hugging Face causal language model.

Owns the order of prompts, when finished rows make room for new ones, and what ends an answer. Never loads a model,
reads a file or talks to a server.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from draftmill.errors import InputError
from draftmill.target.generate_rows import Row, Rows
from draftmill.target.generate_sampling import Sampling
from draftmill.target.generate_slots import SlotRows, unfit

__all__ = [
    "Completion",
    "Prompt",
    "Sampling",
    "encode",
    "encode_text",
    "generate_batched",
    "num_positions",
    "render",
    "stop_tokens",
]

Prompt = Sequence[Mapping[str, Any]] | Sequence[int]
"""Messages of a chat, or token ids."""

RowsChoice = Literal["auto", "joined", "slots"]
"""How rows are kept: in one cache that they join and leave, in slots of fixed size, or in slots on CUDA where the
target can be decoded so."""

_logger = logging.getLogger(__name__)
_CPU_ROWS = 64
_MOST_ROWS = {"joined": 512, "slots": 2048}
_PREFILL_TOKENS = {"cpu": 8192, "cuda": 65536}
_CACHE_SHARE = 0.5  # of the free GPU memory; the rest is for one prefill's activations and one layer's copy


@dataclass(frozen=True, slots=True)
class Completion:
    """What the model wrote for prompt number `index`: ids without the stop token, and whether it came to its end."""

    index: int
    prompt_ids: Sequence[int]
    token_ids: list[int]
    ended: bool


def generate_batched(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    sampling: Sampling = Sampling(),  # noqa: B008 - frozen
    *,
    batch_size: int | None = None,
    streams: Sequence[int] | None = None,
    extra_stop: Iterable[int] = (),
    progress: Callable[[int], None] | None = None,
    kept: RowsChoice = "auto",
) -> Iterator[Completion]:
    """Complete every prompt; yields in the order in which they finish, the index telling which is which.

    Long prompts come first, so that a batch that does not fit fails early. A finished row leaves; its place is taken
    once some places are free. Greedy output equals decoding each prompt alone in float32; in bfloat16
    near-ties can fall otherwise with the batch's shape.

    Args:
        prompts: messages (the chat template is applied, with the opening of an answer) or ids, taken as they are.
        batch_size: rows decoded together; by default 64 on a CPU, else what the free memory holds, up to 2048.
        streams: number of each prompt's random stream; by default its index. Equal streams draw equal numbers.
        extra_stop: ids that end an answer besides those of `stop_tokens`.
        progress: called after each step with the number of tokens written in it.
        kept: how rows are kept; "slots" raises RuntimeError for a target that can't be decoded so.

    Raises:
        InputError: a prompt is empty, or leaves no room for an answer within the model's positions.
    """
    if model.training:
        raise RuntimeError("generation needs a model in eval mode, got one in training mode")
    encoded = [encode(tokenizer, prompt) for prompt in prompts]
    limits = [_limit(model, ids, sampling, index) for index, ids in enumerate(encoded)]
    if not encoded:
        return
    stop = stop_tokens(model, tokenizer) | frozenset(extra_stop)
    longest = max(len(ids) + limit for ids, limit in zip(encoded, limits, strict=True))
    rows, places = _rows(model, sampling, stop, longest, len(encoded), batch_size, kept)
    waiting = deque(sorted(range(len(encoded)), key=lambda index: (-len(encoded[index]), index)))
    while waiting or len(rows):
        finished: list[Row] = []
        num_before = rows.num_written
        if len(rows):
            finished = rows.step()
        free = places - len(rows)
        while waiting and rows.can_join and free and (free >= max(1, int(places * rows.joins_at)) or not len(rows)):
            chosen = [waiting.popleft() for _ in range(_num_admitted(model, encoded[waiting[0]], free, len(waiting)))]
            fresh = [
                rows.new_row(index, encoded[index], limits[index], index if streams is None else streams[index])
                for index in chosen
            ]
            finished += rows.add(fresh)
            free -= len(fresh)
        if progress is not None:
            progress(rows.num_written - num_before)
        for row in finished:
            written = row.written[:-1] if row.ended else row.written
            yield Completion(row.index, row.prompt, written, row.ended)


def encode(tokenizer: Any, prompt: Prompt) -> list[int]:
    """Token ids of a prompt: messages through the chat template up to the opening of the answer, ids as they are.

    Raises:
        InputError: the tokenizer has no chat template, or the template refuses the messages.
    """
    if not len(prompt) or isinstance(prompt[0], int):
        return list(prompt)  # type: ignore[arg-type]
    return encode_text(tokenizer, render(tokenizer, list(prompt)))


def encode_text(tokenizer: Any, text: str) -> list[int]:
    """Token ids of text as a template renders it: nothing is added, special tokens are recognized."""
    return list(tokenizer(text, add_special_tokens=False).input_ids)


def render(tokenizer: Any, messages: list[Any], *, tools: list[Any] | None = None, answer: bool = True) -> str:
    """The chat template's text of messages, with the opening of an answer where `answer`. Raises InputError."""
    import jinja2

    if not tokenizer.chat_template:
        raise InputError("the target's tokenizer has no chat template; use a target that was tuned for chat")
    try:
        return tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=answer)
    except (jinja2.TemplateError, TypeError, KeyError, ValueError) as error:
        raise InputError(f"the target's chat template refuses these messages: {error}") from None


def stop_tokens(model: Any, tokenizer: Any) -> frozenset[int]:
    """Ids that end an answer: those of the generation config and the tokenizer's end of sequence."""
    configured = getattr(model.generation_config, "eos_token_id", None)
    if configured is None:
        configured = []
    found = {*([configured] if isinstance(configured, int) else configured), tokenizer.eos_token_id} - {None}
    if not found:
        raise InputError("neither the target's generation config nor its tokenizer names an end-of-sequence token")
    return frozenset(found)


def num_positions(model: Any) -> int | None:
    """Tokens that the model holds, prompt and answer together, where its configuration says."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None)


def _limit(model: Any, ids: Sequence[int], sampling: Sampling, index: int) -> int:
    """Tokens that may be written after a prompt: those asked for, within the model's positions."""
    if not ids:
        raise InputError(f"prompt {index} is empty; give at least one token")
    positions = num_positions(model)
    room = sampling.max_new_tokens if positions is None else positions - len(ids)
    if room < 1:
        raise InputError(f"prompt {index} has {len(ids)} tokens, the target holds {positions}; shorten it")
    return min(sampling.max_new_tokens, room)


def _rows(
    model: Any,
    sampling: Sampling,
    stop: frozenset[int],
    longest: int,
    num_prompts: int,
    batch_size: int | None,
    kept: RowsChoice,
) -> tuple[Rows | SlotRows, int]:
    """Where rows are kept, and how many at once."""
    on_cuda = model.get_input_embeddings().weight.device.type == "cuda"
    if kept == "slots" or (kept == "auto" and on_cuda):
        why = unfit(model)
        places = min(batch_size or _default_rows(model, longest, "slots"), num_prompts)
        if why is None:
            try:
                return SlotRows(model, sampling, stop, places, longest), places
            except RuntimeError as error:
                if kept == "slots" or isinstance(error, torch.OutOfMemoryError):
                    raise
                why = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        if kept == "slots":
            raise RuntimeError(f"{type(model).__name__} can't be decoded in slots: {why}")
        _logger.warning("%s is decoded from a growing cache, not in captured slots: %s", type(model).__name__, why)
    return Rows(model, sampling, stop), min(batch_size or _default_rows(model, longest, "joined"), num_prompts)


def _num_admitted(model: Any, first: Sequence[int], free: int, num_waiting: int) -> int:
    """Rows whose prompts run in one forward: the waiting ones are no longer than the first."""
    budget = _PREFILL_TOKENS.get(model.get_input_embeddings().weight.device.type, _PREFILL_TOKENS["cpu"])
    return max(1, min(free, num_waiting, budget // len(first)))


def _default_rows(model: Any, longest: int, kept: Literal["joined", "slots"]) -> int:
    weight = model.get_input_embeddings().weight
    if weight.device.type != "cuda":
        return _CPU_ROWS
    config = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    row_bytes = 2 * config.num_hidden_layers * heads * head_dim * weight.element_size() * longest
    free_bytes, _ = torch.cuda.mem_get_info(weight.device)
    return max(1, min(_MOST_ROWS[kept], int(free_bytes * _CACHE_SHARE) // row_bytes))
