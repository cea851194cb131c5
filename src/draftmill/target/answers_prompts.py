"""Prompts to be answered: rows brought to dialogues that are filled in turn by turn.

Owns which turns the target writes anew. Never renders a template, loads a model or talks to a server; the formats
and schemas are the data room's.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from draftmill.data.chats import BadSample, Chat, Message, parse_row
from draftmill.data.sources import Lines, find_sources, read_chunks, rows_of
from draftmill.errors import InputError

Turns = Literal["all", "last"]

_PLACE = "?"  # stands for an answer while a row is checked
_PLACES = ({"role": "assistant", "content": _PLACE}, {"from": "gpt", "value": _PLACE})
_CHAT_COLUMNS = {"messages", "conversations", "prompt", "completion", "tools"}


@dataclass(slots=True)
class Dialogue:
    """A chat whose answers are being written.

    key          names the prompt: a digest of what is asked, and its number among equal ones
    ahead        turns still to come; None where the target answers
    messages     the turns so far: what the next answer follows
    num_answers  turns written anew so far, which numbers the next one
    ended        whether the target ended every answer itself, rather than the limit on its length
    """

    key: str
    where: str
    ahead: list[Message | None]
    tools: list[dict[str, Any]] | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    messages: list[Message] = field(default_factory=list)
    num_answers: int = 0
    ended: bool = True

    def __post_init__(self) -> None:
        self._advance()

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to be answered."""
        return not self.ahead

    def answer(self, message: Message, *, ended: bool) -> None:
        """Take the target's next answer."""
        self.messages.append(message)
        self.num_answers += 1
        self.ended = self.ended and ended
        del self.ahead[0]
        self._advance()

    def row(self) -> dict[str, Any]:
        """The finished chat as a row of the output: other columns of its input row are kept."""
        tools = {} if self.tools is None else {"tools": self.tools}
        return {**self.extra, "messages": self.messages, **tools, "ended": self.ended, "prompt_key": self.key}

    def _advance(self) -> None:
        while self.ahead and self.ahead[0] is not None:
            self.messages.append(self.ahead.pop(0))  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Refused:
    """A row that asks nothing that can be answered, and why."""

    where: str
    reason: str


def read_dialogues(inputs: Sequence[str | os.PathLike[str]], turns: Turns = "all") -> list[Dialogue | Refused]:
    """The rows of files (every format that `prepare` reads), globs or hub datasets, in order.

    A row holds `messages` or `conversations` (role/content or from/value), or `prompt` (a text or messages). With
    turns="all" every turn of the assistant is written anew, each after the new ones before it; with "last" only the
    final one. A turn that calls tools is kept, since the results that follow belong to it. A row that ends with the
    user gets one more answer.

    Raises:
        InputError: a file is missing, empty or damaged, or no row of all can be answered.
    """
    seen: Counter[str] = Counter()
    read: list[Dialogue | Refused] = []
    for where, raw in read_rows(inputs):
        try:
            if isinstance(raw, BadSample):
                raise raw
            read.append(_dialogue(raw, where, turns, seen))
        except BadSample as bad:
            read.append(Refused(where, f"{bad.reason}: {bad.detail}" if bad.detail else bad.reason))
    refused = [row for row in read if isinstance(row, Refused)]
    if not read:
        raise InputError(f"{', '.join(map(str, inputs))} holds no rows; give at least one prompt")
    if len(refused) == len(read):
        raise InputError(
            f"none of the {len(read)} rows can be answered; {refused[0].where}: {refused[0].reason}"
            " (wanted: messages, conversations or prompt, with a turn of the user)"
        )
    return read


def read_rows(inputs: Sequence[str | os.PathLike[str]], option: str = "--input") -> Iterator[tuple[str, Any]]:
    """Each row with its place, as "FILE, line N"; BadSample in place of one that can't be parsed. Raises InputError.

    option: what gave the inputs, for errors.
    """
    for chunk in read_chunks(find_sources([os.fspath(path) for path in inputs], option)):
        for piece in chunk.pieces:
            for number, raw in rows_of(piece):
                yield f"{piece.source}, {'line' if isinstance(piece, Lines) else 'row'} {number}", raw


def stream_of(key: str, turn: int) -> int:
    """The number of the random stream of one turn of a dialogue."""
    return int.from_bytes(hashlib.sha256(f"{key} {turn}".encode()).digest()[:7])


def _dialogue(raw: Any, where: str, turns: Turns, seen: Counter[str]) -> Dialogue:
    chat = _checked(raw, turns)
    ahead: list[Message | None] = [
        None if message["role"] == "assistant" and not message.get("tool_calls") else message
        for message in chat.messages
    ]
    if ahead[-1] is not None:
        raise BadSample("the last turn calls a tool and its result is missing")
    if turns == "last":
        ahead = [*chat.messages[:-1], None]
    digest = hashlib.sha256(json.dumps([ahead, chat.tools], sort_keys=True).encode()).hexdigest()[:16]
    seen[digest] += 1
    key = digest if seen[digest] == 1 else f"{digest}-{seen[digest]}"
    extra = {column: value for column, value in raw.items() if column not in _CHAT_COLUMNS}
    return Dialogue(key, where, ahead, chat.tools, extra)


def _checked(raw: Any, turns: Turns) -> Chat:
    """The row through the data room's checks, with its last answer, if it has none, held open by a placeholder."""
    if not isinstance(raw, dict):
        raise BadSample("the row is not an object", f"got {type(raw).__name__}")
    row = {column: raw[column] for column in _CHAT_COLUMNS if raw.get(column) is not None}
    if "prompt" in row and not ({"messages", "conversations"} & row.keys()):
        row["completion"] = _PLACE
    for column in ("messages", "conversations"):
        if isinstance(row.get(column), list):
            row[column] = _with_places(row[column], turns)
    chat = parse_row(row, vocab_size=0)
    assert isinstance(chat, Chat)  # no input_ids were handed on
    return chat


def _with_places(messages: list[Any], turns: Turns) -> list[Any]:
    """Messages in which the turns to be written, and a missing last one, hold the placeholder."""
    places = list(messages)
    for index, message in enumerate(messages):
        is_wanted = turns == "all" or index == len(messages) - 1
        if is_wanted and _is_by_target(message) and not _calls_tools(message):
            places[index] = _PLACES["from" in message]
    if messages and isinstance(messages[-1], dict) and not _is_by_target(messages[-1]):
        places.append(_PLACES["from" in messages[-1]])
    return places


def _is_by_target(message: Any) -> bool:
    """Whether an unparsed message is a turn of the assistant's."""
    speakers = ("assistant", "gpt", "chatgpt", "bot", "model", "function_call")
    return isinstance(message, dict) and message.get("role", message.get("from")) in speakers


def _calls_tools(message: dict[str, Any]) -> bool:
    return bool(message.get("tool_calls")) or message.get("from") == "function_call"
