"""A chat as the target's own chat template writes it, and where in that text the target's turns lie.

Owns the template and what is known of its form. Never tokenizes; never changes what the template writes.

The text is rendered once, whole, as it would be served. A template may alter earlier turns (Qwen3 leaves out their
thinking), so an earlier rendering need not be a prefix of a later one; turns are therefore looked for in the final
text alone:

1. Where the template marks what the target writes (`{% generation %}`), the marks say it.
2. Else the header that opens the target's turns and the tokens that close them are learned once, from a made-up chat.
   A text in which the header occurs as often as the target has turns, and whose messages hold neither header nor
   closing tokens themselves, is cut at them.
3. Else each turn is located by rendering the chat again with one letter of a message changed: where the two texts
   differ is where that message stands.

What none of them finds is refused (BadSample), never guessed.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from draftmill.data.chats import BadSample, Chat, Message, is_written_by_target

Span = tuple[int, int]
"""Characters first..last-1 of a rendered text."""

_GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")
_QUESTIONS = ("Kestrels hover where?", "Herons fish when?")
_ANSWERS = ("Over open meadows.", "Around early dawn.")
_TAIL = 24  # letters of a turn's end that must stand in its span


class ChatTemplate:
    """The template of a tokenizer: `render` gives the text, `turns` the spans that the target writes in it."""

    def __init__(self, tokenizer: Any, arguments: dict[str, Any], stop_tokens: list[str]) -> None:
        """Learn the template's form.

        Args:
            tokenizer: a Hugging Face tokenizer with a chat template.
            arguments: passed to the template, as in enable_thinking=False.
            stop_tokens: the tokens that end the target's answer when it is served.
        """
        self._tokenizer = tokenizer
        self._arguments = arguments
        marked = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
        self._form = _learn_form(self, sorted(marked | set(tokenizer.all_special_tokens)), stop_tokens)

    @property
    def header(self) -> str | None:
        """What opens the target's turns, where the template has one such text."""
        return self._form.header

    @property
    def closers(self) -> tuple[str, ...]:
        """The tokens that can close the target's turns."""
        return self._form.closers

    def render(
        self, messages: list[Message], tools: list[dict[str, Any]] | None = None, *, prompt: bool = False
    ) -> str:
        """The text as served; with `prompt`, followed by what makes the target answer.

        Raises:
            BadSample: the template refuses the chat.
        """
        try:
            return self._tokenizer.apply_chat_template(
                messages, tools=tools, tokenize=False, add_generation_prompt=prompt, **self._arguments
            )
        except Exception as error:  # a template runs code of its own: whatever it raises is about this chat
            raise BadSample("the chat template refuses it", f"{type(error).__name__}: {error}") from error

    def turns(self, chat: Chat, text: str) -> list[Span]:
        """What the target writes in `text`, the chat's own rendering: one span for each of its turns, in order,
        the token that ends the turn included, but for a last turn that was cut.

        Raises:
            BadSample: a turn can't be found.
        """
        spans = self._whole_turns(chat, text)
        if not chat.ended:
            first, last = spans[-1]
            closer = next((closer for closer in self.closers if text.endswith(closer, first, last)), "")
            spans[-1] = (first, last - len(closer))
        return spans

    def _whole_turns(self, chat: Chat, text: str) -> list[Span]:
        num_turns = sum(map(is_written_by_target, chat.messages))
        source = self._tokenizer.get_chat_template(None, chat.tools)
        if "generation" in source and _GENERATION_TAG.search(source):
            return self._marked_turns(chat, text, source, num_turns)
        spans = self._cut_at_headers(chat, text, num_turns)
        return self._probe_turns(chat, text) if spans is None else spans

    def _marked_turns(self, chat: Chat, text: str, source: str, num_turns: int) -> list[Span]:
        from transformers.utils.chat_template_utils import render_jinja_template

        render: Any = render_jinja_template
        texts, marks = render(
            [chat.messages],
            tools=chat.tools,
            chat_template=source,
            return_assistant_tokens_mask=True,
            **{**self._tokenizer.special_tokens_map, **self._arguments},
        )
        if texts[0] != text or len(marks[0]) != num_turns:
            raise BadSample(
                "the template's generation marks do not fit the turns", f"{len(marks[0])} marks, {num_turns} turns"
            )
        return [(first, self._with_closer(text, last)) for first, last in marks[0]]

    def _with_closer(self, text: str, last: int) -> int:
        if any(text.endswith(closer, 0, last) for closer in self.closers):
            return last
        return next((last + len(closer) for closer in self.closers if text.startswith(closer, last)), last)

    def _cut_at_headers(self, chat: Chat, text: str, num_turns: int) -> list[Span] | None:
        """Way 2, or None where it is not certain."""
        header = self._form.header
        if header is None or not self.closers or text.count(header) != num_turns:
            return None
        written = "\0".join(_strings(chat.messages))
        if header in written or any(closer in written for closer in self.closers):
            return None
        spans: list[Span] = []
        at = 0
        for message in filter(is_written_by_target, chat.messages):
            first = text.index(header, at) + len(header)
            if self._form.prompt_rest and text.startswith(self._form.prompt_rest, first):
                first += len(self._form.prompt_rest)
            end = self._first_closed(text, first, len(text))
            if end is None and len(spans) == num_turns - 1:
                end = self._open_end(text)
            if end is None:
                return None
            at = end
            tail = (message.get("content") or "").rstrip()[-_TAIL:]
            if tail and text.find(tail, first, at) < 0:
                return None
            spans.append((first, at))
        return spans

    def _probe_turns(self, chat: Chat, text: str) -> list[Span]:
        """Way 3: exact, at the price of a few renderings a message."""
        shown = _Shown(self, chat.messages, chat.tools, text, prompt=False)
        spans = []
        for index, message in enumerate(chat.messages):
            if not is_written_by_target(message):
                continue
            extent = shown.extent(index)
            if extent is None:
                raise BadSample("an assistant turn is not in the rendered text", f"message {index + 1}")
            earlier = chat.messages[:index]
            prompt = self.render(earlier, chat.tools, prompt=True)
            opening = prompt[_Shown(self, earlier, chat.tools, prompt, prompt=True).end_of(index - 1) :]
            first = _after_opening(opening, text, shown.end_of(index - 1), extent[0])
            if first is None:
                raise BadSample("the prompt's end is not in the rendered text", f"message {index + 1}: {opening!r}")
            spans.append((first, self._turn_end(message, extent[1], shown.start_after(index), text)))
        return spans

    def _turn_end(self, message: Message, last: int, following: int, text: str) -> int:
        end = self._first_closed(text, last, following)
        if end is None and following == len(text):
            end = self._open_end(text)
        if end is not None and end >= last:
            return end
        if message.get("tool_calls"):
            raise BadSample("the end of a tool call is not in the rendered text")
        return last

    def _first_closed(self, text: str, first: int, last: int) -> int | None:
        """The end of the first closing token inside these bounds."""
        return min(
            (e + len(closer) for closer in self.closers if (e := text.find(closer, first, last)) >= 0), default=None
        )

    def _open_end(self, text: str) -> int | None:
        """The end of a last turn that nothing closes; None where the template closes it."""
        rest = self._form.open_rest
        return len(text) - len(rest) if rest is not None and text.endswith(rest) else None


class _Shown:
    """Where a rendered text shows each message, found by changing a letter of it and rendering again."""

    def __init__(
        self,
        template: ChatTemplate,
        messages: list[Message],
        tools: list[dict[str, Any]] | None,
        text: str,
        prompt: bool,
    ) -> None:
        self._template, self._messages, self._tools = template, messages, tools
        self._text, self._prompt = text, prompt
        self._extents: dict[int, Span | None] = {}

    def extent(self, index: int) -> Span | None:
        """First and last-plus-one character that show message `index`; None where the text does not show it."""
        if index not in self._extents:
            found = [self._text_extent(index, path) for path in _string_paths(self._messages[index])]
            shown = [extent for extent in found if extent is not None]
            self._extents[index] = (min(a for a, _ in shown), max(b for _, b in shown)) if shown else None
        return self._extents[index]

    def _text_extent(self, index: int, path: list[str | int]) -> Span | None:
        """The same for one text of a message. Its beginning may be dropped (thinking before an answer): then the first
        letter that is shown is found by halving."""
        letters = [place for place, letter in enumerate(_value_at(self._messages[index], path)) if not letter.isspace()]
        last = self._difference(index, path, letters[-1])
        if last is None:
            return None
        first = self._difference(index, path, letters[0])
        low, high = 1, len(letters) - 1
        while first is None and low < high:
            middle = (low + high) // 2
            if self._difference(index, path, letters[middle]) is None:
                low = middle + 1
            else:
                high = middle
        return (first or self._difference(index, path, letters[high]) or last)[0], last[1]

    def end_of(self, index: int) -> int:
        """Where the last message that is shown, up to `index`, ends."""
        extents = (self.extent(earlier) for earlier in range(index, -1, -1))
        return next((extent[1] for extent in extents if extent is not None), 0)

    def start_after(self, index: int) -> int:
        """Where the first message that is shown after `index` begins."""
        extents = (self.extent(later) for later in range(index + 1, len(self._messages)))
        return next((extent[0] for extent in extents if extent is not None), len(self._text))

    def _difference(self, index: int, path: list[str | int], place: int) -> Span | None:
        """What of the text changes with one letter of a message; None where nothing does."""
        messages = list(self._messages)
        messages[index] = _with_changed_letter(messages[index], path, place)
        try:
            other = self._template.render(messages, self._tools, prompt=self._prompt)
        except BadSample:
            return None
        if other == self._text:
            return None
        return _common_prefix(self._text, other), len(self._text) - _common_prefix(self._text[::-1], other[::-1])


@dataclass(frozen=True, slots=True)
class _Form:
    """header: opens a turn of the target's, in history and in prompt. prompt_rest: what the prompt adds after it.
    closers: tokens that can close a turn. open_rest: what follows a last turn, where no token closes it."""

    header: str | None
    prompt_rest: str
    closers: tuple[str, ...]
    open_rest: str | None


def _learn_form(template: ChatTemplate, special_tokens: list[str], stop_tokens: list[str]) -> _Form:
    chat = [
        {"role": role, "content": text}
        for question, answer in zip(_QUESTIONS, _ANSWERS, strict=True)
        for role, text in (("user", question), ("assistant", answer))
    ]
    try:
        whole, prompt = template.render(chat), template.render(chat[:3], prompt=True)
    except BadSample:
        return _Form(None, "", tuple(stop_tokens), None)
    places = [whole.find(text) for pair in zip(_QUESTIONS, _ANSWERS, strict=True) for text in pair]
    if -1 in places or places != sorted(places) or _QUESTIONS[1] not in prompt:
        return _Form(None, "", tuple(stop_tokens), None)
    openings = [whole[places[i] + len(_QUESTIONS[i // 2]) : places[i + 1]].lstrip() for i in (0, 2)]
    tails = [whole[places[1] + len(_ANSWERS[0]) : places[2]], whole[places[3] + len(_ANSWERS[1]) :]]
    asked = prompt[prompt.rindex(_QUESTIONS[1]) + len(_QUESTIONS[1]) :].lstrip()
    opening = asked[: min(_common_prefix(asked, text) for text in openings)]
    header = next((text for text in _suffixes(opening, special_tokens) if whole.count(text) == 2), None)
    # what stands before a question a second time is the next turn's header, and closes nothing
    before = whole[: places[0]]
    own_tail = tails[0][: len(tails[0]) - _common_prefix(before[::-1], tails[0][::-1])]
    firsts = [_first_token(tail, special_tokens) for tail in tails]
    closers = {*stop_tokens, _first_token(own_tail, special_tokens)}
    closers.add(firsts[0] if firsts[0] == firsts[1] else None)
    closing = tuple(sorted(token for token in closers if token))
    open_rest = None if any(token in tails[1] for token in closing) else tails[1]
    return _Form(header, asked[len(opening) :], closing, open_rest)


def _after_opening(opening: str, text: str, first: int, last: int) -> int | None:
    """Where the target begins to write: past what the prompt's end and the text have in common, space before it
    aside. None where that is nothing."""
    between, opening = text[first:last], opening.lstrip()
    shared = _common_prefix(opening, between.lstrip())
    return None if opening and not shared else first + len(between) - len(between.lstrip()) + shared


def _suffixes(text: str, special_tokens: list[str]) -> list[str]:
    """Suffixes of a text that begin with a special token, shortest first; last the whole text."""
    starts = sorted({match for token in special_tokens for match in _occurrences(text, token)}, reverse=True)
    return [text[start:] for start in starts] + ([text] if text.strip() else [])


def _occurrences(text: str, token: str) -> list[int]:
    return [match.start() for match in re.finditer(re.escape(token), text)] if token else []


def _first_token(text: str, special_tokens: list[str]) -> str | None:
    """The special token that stands first in a text; of several that begin there, the longest."""
    places = [(text.find(token), -len(token), token) for token in special_tokens if token and token in text]
    return min(places)[2] if places else None


def _common_prefix(one: str, other: str) -> int:
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _strings(messages: list[Message]) -> list[str]:
    strings = []
    for message in messages:
        strings.append(message.get("content") or "")
        for key in message.keys() - {"role", "content"}:
            value = message[key]
            strings.append(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
    return strings


def _string_paths(message: Message) -> list[list[str | int]]:
    """Ways to the texts of a message that a template shows and that have a letter in them."""
    paths: list[list[str | int]] = [["content"], ["reasoning_content"]]
    for number, call in enumerate(message.get("tool_calls") or []):
        function: list[str | int] = ["tool_calls", number, "function"]
        paths.append([*function, "name"])
        paths += [[*function, "arguments", name] for name in call["function"]["arguments"]]
    return [path for path in paths if isinstance(value := _value_at(message, path), str) and value.strip()]


def _value_at(value: Any, path: list[str | int]) -> Any:
    for key in path:
        if isinstance(value, dict) and key not in value:
            return None
        value = value[key]
    return value


def _with_changed_letter(value: Any, path: list[str | int], place: int) -> Any:
    """A copy with one letter of the text at `path` exchanged for another."""
    if path:
        copy = dict(value) if isinstance(value, dict) else list(value)
        copy[path[0]] = _with_changed_letter(copy[path[0]], path[1:], place)  # type: ignore[index]
        return copy
    return f"{value[:place]}{'y' if value[place] == 'x' else 'x'}{value[place + 1 :]}"
