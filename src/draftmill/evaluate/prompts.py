"""Prompts to evaluate on: what one is, and reading them from a user's file.

Owns the record, the file formats, and the samples a run held out. Never renders a chat template, never loads a model.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftmill.data import Store, split_heldout
from draftmill.errors import InputError

_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
_FORMS = "an object with `prompt` (text), `turns` (texts) or `messages` (role and content)"


@dataclass(frozen=True)
class Prompt:
    """A conversation to be continued.

    messages    role and content, up to and including the user's first turn that is answered
    follow_ups  the user's further turns, each asked after the target has answered the one before
    token_ids   the prompt as it is, where it came tokenized; messages are empty then
    """

    name: str
    suite: str
    category: str
    messages: tuple[dict[str, str], ...]
    follow_ups: tuple[str, ...] = ()
    token_ids: tuple[int, ...] = ()


def from_turns(name: str, suite: str, category: str, turns: Sequence[str]) -> Prompt:
    """A conversation from the user's turns alone, at least one."""
    return Prompt(name, suite, category, ({"role": "user", "content": turns[0]},), tuple(turns[1:]))


def text_lines(raw: bytes) -> list[str]:
    """The lines of UTF-8 text, with or without a byte order mark, as JSONL has them: ended by LF or CR LF.

    The other ends of lines that Unicode knows (U+2028, U+0085) may stand inside a JSON string. Raises
    UnicodeDecodeError.
    """
    return [line.rstrip("\r") for line in raw.decode("utf-8-sig").split("\n")]


def read_prompts(path: str | Path) -> list[Prompt]:
    """Prompts of a file: JSONL, or one prompt a line where its name ends in .txt.

    A line of JSONL holds `prompt` (text), `turns` (texts of the user) or `messages` / `conversations`, and may hold
    `category` and `id`. Answers at the end of messages are left out: the target gives its own.
    Raises InputError naming file and line; an empty file is one too.
    """
    path = Path(path)
    try:
        lines = text_lines(path.read_bytes())
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"prompts can't be read from {path}: {reason}; give a JSONL or .txt file") from None
    plain = path.suffix == ".txt"
    prompts = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        if plain:
            prompts.append(from_turns(str(number), path.stem, "all", [line]))
            continue
        try:
            raw = json.loads(line)
        except ValueError:
            raise InputError(f"{where} is not JSON; wanted {_FORMS}") from None
        prompts.append(_prompt(raw, path.stem, number, where))
    if not prompts:
        raise InputError(f"{path} holds no prompt; give at least one line")
    return prompts


def heldout_prompts(data_path: str | Path, num_heldout: int, seed: int, limit: int | None = None) -> list[Prompt]:
    """The openings of the samples that a run held out of its training: all before the target's first own token.

    Raises InputError where the store is gone or nothing was held out.
    """
    store = Store.open(data_path)
    _, heldout = split_heldout(store.num_samples, num_heldout, seed)
    prompts = []
    for sample_id, (input_ids, loss_mask) in zip(heldout.tolist(), store.read(heldout), strict=True):
        first = int(loss_mask.argmax())
        if first > 0 and loss_mask[first]:
            prompts.append(Prompt(str(sample_id), "heldout", "all", (), (), tuple(input_ids[:first].tolist())))
    if not prompts:
        raise InputError(f"the run held no sample of {data_path} out of training; give --suite or --prompts")
    return prompts if limit is None else prompts[:limit]


def _prompt(raw: Any, suite: str, number: int, where: str) -> Prompt:
    if not isinstance(raw, dict):
        raise InputError(f"{where} holds {type(raw).__name__}; wanted {_FORMS}")
    name, category = str(raw.get("id", number)), str(raw.get("category", "all"))
    turns = [raw["prompt"]] if "prompt" in raw else raw.get("turns")
    if turns is not None:
        if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn for turn in turns):
            raise InputError(f"{where}: `prompt` must be a text and `turns` a list of them, none empty")
        return from_turns(name, suite, category, turns)
    messages = raw.get("messages", raw.get("conversations"))
    if not isinstance(messages, list):
        raise InputError(f"{where} has none of `prompt`, `turns` and `messages`; wanted {_FORMS}")
    read = [_message(message, where) for message in messages]
    while read and read[-1]["role"] == "assistant":
        read.pop()
    if not read or read[-1]["role"] != "user":
        raise InputError(f"{where}: the messages hold no turn of the user to answer")
    return Prompt(name, suite, category, tuple(read))


def _message(raw: Any, where: str) -> dict[str, str]:
    if isinstance(raw, dict):
        role = _ROLES.get(str(raw.get("role", raw.get("from"))))
        content = raw.get("content", raw.get("value"))
        if role is not None and isinstance(content, str):
            return {"role": role, "content": content}
    raise InputError(f"{where}: a message must have a role ({', '.join(_ROLES)}) and a text, got {raw!r}")
