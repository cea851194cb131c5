"""Answers and prompts from a local target.

Owns the way between chats and token ids for generation: the opening of an answer, the opening of a user's turn, what
ends each, and the text of what was written. Never reads or writes a file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from draftmill.data.chats import Message
from draftmill.errors import InputError
from draftmill.target.answers_prompts import Dialogue, stream_of
from draftmill.target.generate import Completion, Sampling, encode_text, generate_batched, num_positions, render
from draftmill.target.load import DTYPES, load_target

_USER_MARK = "draftmill user turn"
_THINK = "<think>"


@dataclass(frozen=True, slots=True)
class LocalTarget:
    """A target that writes: model and tokenizer, with what a batch is made of.

    batch_size  rows decoded together; None takes the default of `generate_batched`
    """

    model: Any
    tokenizer: Any
    batch_size: int | None = None


def load_local(
    name: str,
    *,
    device: str | None = None,
    dtype: str = "bfloat16",
    batch_size: int | None = None,
    trust_remote_code: bool = False,
) -> LocalTarget:
    """Load a whole target, by default onto the first GPU or else the CPU. Raises InputError."""
    if dtype not in DTYPES:
        raise InputError(f"--dtype must be one of {', '.join(DTYPES)}, got {dtype}")
    if batch_size is not None and batch_size < 1:
        raise InputError(f"--batch-size must be at least 1, got {batch_size}")
    chosen = device or ("cuda:0" if torch.cuda.is_available() else "cpu")
    kind, _, index = chosen.partition(":")
    if kind not in ("cpu", "cuda") or (kind == "cpu" and index) or (index and not index.isdigit()):
        raise InputError(f"--device must be cpu, cuda or cuda:N, got {chosen}")
    if kind == "cuda" and int(index or 0) >= torch.cuda.device_count():
        raise InputError(f"--device {chosen}: this machine has {torch.cuda.device_count()} CUDA devices")
    target = load_target(name, device=chosen, dtype=dtype, trust_remote_code=trust_remote_code)
    return LocalTarget(target.model, target.tokenizer, batch_size)


def answer_locally(
    target: LocalTarget,
    dialogues: Sequence[Dialogue],
    sampling: Sampling,
    progress: Callable[[int], None] | None = None,
) -> Iterator[tuple[Dialogue, str | None]]:
    """Answer dialogues, turn after turn; yields each as it is done, or with the reason why it can't be answered.

    A dialogue's random numbers follow from the seed, its key and the turn, whatever else is in the batch.
    """
    pending = list(dialogues)
    while pending:
        prompts: list[list[int]] = []
        openings: list[str] = []
        asked: list[Dialogue] = []
        for dialogue in pending:
            try:
                ids, opening = _prompt(target, dialogue.messages, dialogue.tools)
            except InputError as problem:
                yield dialogue, str(problem)
                continue
            prompts.append(ids)
            openings.append(opening)
            asked.append(dialogue)
        streams = [stream_of(dialogue.key, dialogue.num_answers) for dialogue in asked]
        pending = []
        for completion in generate_batched(
            target.model,
            target.tokenizer,
            prompts,
            sampling,
            batch_size=target.batch_size,
            streams=streams,
            progress=progress,
        ):
            dialogue = asked[completion.index]
            message = _answer(target, completion, openings[completion.index])
            if message is None:
                yield dialogue, "the answer is empty"
                continue
            dialogue.answer(message, ended=completion.ended)
            if dialogue.is_done:
                yield dialogue, None
            else:
                pending.append(dialogue)


def user_turn_opening(target: LocalTarget) -> tuple[list[int], frozenset[int]]:
    """Token ids up to where a user would write, and the ids that end what a user writes, beside the usual ones.

    The template's text for a chat of one made-up user turn is cut where that turn stands. Raises InputError where the
    template does not show it.
    """
    text = render(target.tokenizer, [{"role": "user", "content": _USER_MARK}], answer=False)
    before, found, after = text.rpartition(_USER_MARK)
    if not found:
        raise InputError("the target's chat template does not show a user's turn as it is; prompts can't be sampled")
    special = set(target.tokenizer.all_special_ids)
    closing = next((token for token in encode_text(target.tokenizer, after) if token in special), None)
    return encode_text(target.tokenizer, before), frozenset() if closing is None else frozenset({closing})


def text_of(target: LocalTarget, token_ids: Sequence[int]) -> str:
    """The text of ids, special tokens included, so that tokenizing it gives them back."""
    return target.tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def _prompt(target: LocalTarget, messages: list[Message], tools: list[Any] | None) -> tuple[list[int], str]:
    """Ids of a prompt, and what the template has already written of the answer: the opening of its reasoning."""
    text = render(target.tokenizer, messages, tools=tools)
    ids = encode_text(target.tokenizer, text)
    positions = num_positions(target.model)
    if positions is not None and len(ids) >= positions:
        raise InputError(f"the prompt is too long: {len(ids)} tokens, the target holds {positions}")
    opening = text[text.rindex(_THINK) :] if text.rstrip().endswith(_THINK) else ""
    return ids, opening


def _answer(target: LocalTarget, completion: Completion, opening: str) -> Message | None:
    text = text_of(target, completion.token_ids)
    return {"role": "assistant", "content": opening + text} if text.strip() else None
