"""Rows as people store them, brought to one form: a chat for the template, or token ids with their mask.

Owns which schemas are understood and why a row is refused. Never renders or tokenizes, never reads a file.

Understood: `messages` or `conversations` (role/content or from/value), `prompt` with `completion`, `input_ids` with
`loss_mask`, or a bare list of messages; with `tools`, tool calls (arguments as object or as JSON text) and reasoning.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Message = dict[str, Any]

COLUMNS = ("messages", "conversations", "prompt", "completion", "input_ids", "loss_mask", "tools")
"""The columns that are read, of files that have columns."""

NO_CHAT, NO_ANSWER = "no messages, no prompt with completion, no input_ids", "no assistant turn"
"""Why a row that holds a prompt alone can't be used."""

_SPEAKERS = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "assistant": "assistant",
    "system": "system",
    "developer": "developer",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
    "function_call": "assistant",
}
# One name inside, and the ones that stores and servers use for it.
_REASONING = ("reasoning_content", "reasoning", "thinking")


class BadSample(Exception):
    """A row that can't be used. `reason` is a fixed phrase to count by, `detail` belongs to this row."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail


@dataclass(slots=True)
class Chat:
    """A conversation in the form chat templates take: role, content, reasoning_content, tool_calls."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    notes: list[str] = field(default_factory=list)
    ended: bool = True
    """Whether the target ended its last turn itself; False where a limit on its length cut it."""


@dataclass(slots=True)
class Tokens:
    """A sample that came tokenized: int32 ids and a bool mask of the same length."""

    input_ids: np.ndarray
    loss_mask: np.ndarray


def parse_row(row: Any, vocab_size: int) -> Chat | Tokens:
    """Bring a row to one form. `"ended": false`, as `regenerate` writes it, says that the last turn was cut.

    Raises:
        BadSample: the row can't be used.
    """
    if isinstance(row, list):
        return _chat(row, None)
    if not isinstance(row, dict):
        raise BadSample("row is not an object", f"got {type(row).__name__}")
    if row.get("input_ids") is not None:
        return _tokens(row["input_ids"], row.get("loss_mask"), vocab_size)
    for column in ("messages", "conversations"):
        if (messages := row.get(column)) is not None:
            return _chat(_decoded(messages), row.get("tools"), row.get("ended"))
    if row.get("prompt") is not None and row.get("completion") is not None:
        return _chat(
            _as_messages(row["prompt"], "user") + _as_messages(row["completion"], "assistant"),
            row.get("tools"),
            row.get("ended"),
        )
    columns = ", ".join(sorted(map(str, row))[:8]) or "none"
    empty = [column for column in COLUMNS if column in row and row[column] is None]
    detail = f"null: {', '.join(empty)}" if empty else f"columns: {columns}"
    raise BadSample(NO_CHAT, detail)


def is_written_by_target(message: Message) -> bool:
    """Whether the target writes this turn."""
    return message["role"] == "assistant"


def _tokens(ids: Any, mask: Any, vocab_size: int) -> Tokens:
    if mask is None:
        raise BadSample("input_ids without loss_mask")
    if not isinstance(ids, list) or not isinstance(mask, list):
        raise BadSample("input_ids or loss_mask is not a list")
    if len(ids) != len(mask):
        raise BadSample("input_ids and loss_mask differ in length", f"{len(ids)} and {len(mask)}")
    if not ids:
        raise BadSample("input_ids is empty")
    if not all(type(token) is int for token in ids):
        raise BadSample("input_ids holds something else than whole numbers")
    if min(ids) < 0 or max(ids) >= vocab_size:
        raise BadSample("token id outside the vocabulary", f"{min(ids)}..{max(ids)}, the vocabulary has {vocab_size}")
    if not all(value in (0, 1) for value in mask):
        raise BadSample("loss_mask holds something else than 0 and 1")
    return Tokens(np.array(ids, dtype=np.int32), np.array(mask, dtype=np.bool_))


def _decoded(value: Any) -> Any:
    """Tables keep lists as JSON text at times."""
    if isinstance(value, str):
        try:
            return json.loads(value)
        except (json.JSONDecodeError, RecursionError):
            raise BadSample("messages is text, not a list") from None
    return value


def _as_messages(value: Any, role: str) -> list[Any]:
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    if isinstance(value, list):
        return value
    raise BadSample("prompt or completion is neither text nor a list of messages", f"got {type(value).__name__}")


def _chat(messages: Any, tools: Any, ended: Any = None) -> Chat:
    if not isinstance(messages, list):
        raise BadSample("messages is not a list", f"got {type(messages).__name__}")
    if not messages:
        raise BadSample("messages is empty")
    chat = Chat([_message(message) for message in messages], _tools(tools), ended=ended is not False)
    while chat.messages and not is_written_by_target(chat.messages[-1]):
        chat.messages.pop()
    if not chat.messages:
        raise BadSample(NO_ANSWER, f"roles: {', '.join(_message(message)['role'] for message in messages)}")
    if not chat.ended:
        chat.notes.append("the last turn was cut: its end is not learned")
    if len(chat.messages) < len(messages):
        chat.notes.append("turns after the last assistant turn left out")
    asked = False
    for number, message in enumerate(chat.messages):
        asked = asked or message["role"] not in ("system", "developer", "assistant")
        if is_written_by_target(message):
            if not asked:
                raise BadSample("starts with the assistant", f"message {number + 1} of {len(messages)}")
            if not (_has_text(message) or message.get("reasoning_content") or message.get("tool_calls")):
                raise BadSample("an assistant turn is empty", f"message {number + 1} of {len(messages)}")
    return chat


def _has_text(message: Message) -> bool:
    content = message.get("content")
    return bool(content and content.strip())


def _message(raw: Any) -> Message:
    if not isinstance(raw, dict):
        raise BadSample("a message is not an object", f"got {type(raw).__name__}")
    role = raw.get("role")
    content = raw.get("content")
    if role is None and raw.get("from") is not None:
        speaker = raw["from"]
        role = _SPEAKERS.get(speaker.strip().lower()) if isinstance(speaker, str) else None
        if role is None:
            raise BadSample("unknown speaker in from", f"{speaker!r}; known: {', '.join(_SPEAKERS)}")
        content = raw.get("value")
        if speaker.strip().lower() == "function_call":
            return {"role": role, "content": "", "tool_calls": [_tool_call(content)]}
    if not isinstance(role, str) or not role.strip():
        raise BadSample("a message has no role", f"keys: {', '.join(sorted(map(str, raw))[:8])}")
    message = {key: value for key, value in raw.items() if value is not None and key not in ("from", "value")}
    message["role"] = _SPEAKERS.get(role.lower(), role)
    message["content"] = _text(content)
    if (reasoning := next((raw[key] for key in _REASONING if raw.get(key)), None)) is not None:
        if not isinstance(reasoning, str):
            raise BadSample("reasoning is not text", f"got {type(reasoning).__name__}")
        for key in _REASONING:
            message.pop(key, None)
        message["reasoning_content"] = reasoning
    if raw.get("tool_calls"):
        message["tool_calls"] = _tool_calls(raw["tool_calls"])
    else:
        message.pop("tool_calls", None)
    return message


def _text(content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        parts = []
        for part in content:
            text = part if isinstance(part, str) else part.get("text") if isinstance(part, dict) else None
            if not isinstance(text, str):
                kind = part.get("type") if isinstance(part, dict) else type(part).__name__
                raise BadSample("content is not text", f"a part of type {kind}")
            parts.append(text)
        return "".join(parts)
    raise BadSample("content is not text", f"got {type(content).__name__}")


def _tool_calls(calls: Any) -> list[dict[str, Any]]:
    if isinstance(calls, str):
        try:
            calls = json.loads(calls)
        except (json.JSONDecodeError, RecursionError):
            raise BadSample("tool_calls is not a list") from None
    if not isinstance(calls, list):
        raise BadSample("tool_calls is not a list", f"got {type(calls).__name__}")
    return [_tool_call(call) for call in calls]


def _tool_call(call: Any) -> dict[str, Any]:
    """As servers hand a call to the template: arguments are an object, under `function`."""
    if isinstance(call, str):
        try:
            call = json.loads(call)
        except (json.JSONDecodeError, RecursionError):
            raise BadSample("a tool call is not JSON", call[:80]) from None
    function = (call.get("function") or call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadSample("a tool call has no function name")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (json.JSONDecodeError, RecursionError):
            raise BadSample("tool call arguments are not JSON", str(function.get("arguments"))[:80]) from None
    elif arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise BadSample("tool call arguments are not an object", f"got {type(arguments).__name__}")
    rest = {k: value for k, value in call.items() if k not in ("function", "name", "arguments") and value is not None}
    return {"type": "function", **rest, "function": {"name": function["name"], "arguments": arguments}}


def _tools(tools: Any) -> list[dict[str, Any]] | None:
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) if tools.strip() else None
        except (json.JSONDecodeError, RecursionError):
            raise BadSample("tools is not JSON", str(tools)[:80]) from None
    if tools is None or tools == []:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise BadSample("tools is not a list of objects")
    return [tool if "function" in tool else {"type": "function", "function": tool} for tool in tools]
