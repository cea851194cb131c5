"""From a row to a sample: rendered, tokenized, masked, cut and checked.

Owns the tokenizer and what it is described by. Never reads a file and never writes the store.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from draftmill.data.chats import BadSample, Chat, Tokens, is_written_by_target, parse_row
from draftmill.data.places import TokenPlacer
from draftmill.data.render import ChatTemplate, Span
from draftmill.errors import InputError
from draftmill.names import expanded, is_missing_folder

LossOn = Literal["all", "last-turn"]

# Texts tokenized in one call: enough to share its fixed cost, few enough to stay small.
_BATCH = 64
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class EncodeSettings:
    """All that a sample depends on besides its row; goes to worker processes as it is."""

    target: str
    max_length: int
    loss_on: LossOn = "all"
    revision: str | None = None
    trust_remote_code: bool = False
    chat_template: str | None = None
    template_arguments: dict[str, Any] = field(default_factory=dict)

    @property
    def most_characters(self) -> int:
        """A longer text is refused: nearly all of it would be cut off, after being tokenized."""
        return max(4 * _MIB, 64 * self.max_length)


@dataclass(frozen=True, slots=True)
class Sample:
    """A sample to be kept. digest: 16 bytes, equal for equal tokens and masks."""

    input_ids: np.ndarray
    loss_mask: np.ndarray
    digest: bytes
    notes: tuple[str, ...] = ()


class Encoder:
    """Turns rows into samples; the target's tokenizer alone is loaded for it."""

    def __init__(self, settings: EncodeSettings, tokenizer: Any = None) -> None:
        """Load the tokenizer, or take the one that another process has loaded.

        Raises:
            InputError: no tokenizer there, or none that can tell where its tokens lie in the text.
        """
        self.settings = settings
        self.tokenizer = _load_tokenizer(settings) if tokenizer is None else tokenizer
        self.vocab_size = len(self.tokenizer)
        self._plain = _plain_json(self.tokenizer)
        added = {index: str(token) for index, token in self.tokenizer.added_tokens_decoder.items()}
        self._placer = TokenPlacer(self._plain, added)
        has_template = bool(self.tokenizer.chat_template)
        self._template = (
            ChatTemplate(self.tokenizer, settings.template_arguments, self._stops()) if has_template else None
        )

    @property
    def tokenizer_hash(self) -> str:
        """Equal for tokenizers that give the same ids."""
        return _hash(self._plain)

    @property
    def template_hash(self) -> str | None:
        """Of the template's text, the special tokens it can name, and the arguments it is given."""
        if self._template is None:
            return None
        parts = [self.tokenizer.chat_template, self.tokenizer.special_tokens_map, self.settings.template_arguments]
        return _hash(json.dumps(parts, sort_keys=True, default=str))

    def encode(self, rows: Sequence[Any]) -> list[Sample | BadSample]:
        """A sample, or the reason why there is none, for each row. A row may be a BadSample already."""
        results: list[Sample | BadSample] = []
        for first in range(0, len(rows), _BATCH):
            results += self._encode_batch(rows[first : first + _BATCH])
        return results

    def decode(self, input_ids: np.ndarray) -> str:
        """The text of token ids, special tokens included."""
        return self.tokenizer.decode(input_ids.tolist(), skip_special_tokens=False)

    def _encode_batch(self, rows: Sequence[Any]) -> list[Sample | BadSample]:
        prepared = [self._prepare(row) for row in rows]
        rendered = [item for item in prepared if isinstance(item, tuple)]
        encoded = iter(self._placer.encode([text for text, _, _ in rendered], [spans for _, spans, _ in rendered]))
        results: list[Sample | BadSample] = []
        for item in prepared:
            try:
                if isinstance(item, tuple):
                    results.append(self._finish(*next(encoded), item[2]))
                elif isinstance(item, Tokens):
                    results.append(self._finish(item.input_ids, item.loss_mask, ()))
                else:
                    results.append(item)
            except BadSample as bad:
                results.append(bad)
        return results

    def _prepare(self, row: Any) -> tuple[str, list[Span], tuple[str, ...]] | Tokens | BadSample:
        if isinstance(row, BadSample):
            return row
        try:
            sample = parse_row(row, self.vocab_size)
            if isinstance(sample, Tokens):
                return sample
            if self._template is None:
                raise InputError(
                    f"the tokenizer of {self.settings.target} has no chat template; give one with "
                    "--chat-template FILE, or rows of input_ids and loss_mask"
                )
            text = self._template.render(sample.messages, sample.tools)
            _check_text(text, self.settings.most_characters)
            spans = self._template.turns(sample, text)
        except BadSample as bad:
            return bad
        spans = spans[-1:] if self.settings.loss_on == "last-turn" else spans
        return text, spans, (*sample.notes, *_notes(sample, text))

    def _finish(self, ids: np.ndarray, mask: np.ndarray, notes: tuple[str, ...]) -> Sample:
        """Cut, then check: a block needs two supervised tokens in a row."""
        limit = self.settings.max_length
        if len(ids) > limit:
            notes = (*notes, "cut at max_length")
        whole, ids, mask = mask, ids[:limit], mask[:limit]
        if not (mask[:-1] & mask[1:]).any():
            lost = (whole[:-1] & whole[1:]).any()
            raise BadSample(
                "nothing to learn before max_length" if lost else "fewer than two supervised tokens in a row",
                f"{len(whole)} tokens, {int(whole.sum())} supervised",
            )
        return Sample(ids, mask, hashlib.blake2b(ids.tobytes() + mask.tobytes(), digest_size=16).digest(), notes)

    def _stops(self) -> list[str]:
        """The tokens that end an answer: the tokenizer's, and those of the model's generation settings."""
        ids = {self.tokenizer.eos_token_id, *_eos_ids(self.settings, "generation_config.json")}
        ids |= set(_eos_ids(self.settings, "config.json"))
        known = [token for token in ids if isinstance(token, int) and 0 <= token < self.vocab_size]
        return [text for text in self.tokenizer.convert_ids_to_tokens(sorted(known)) if text]


def hash_tokenizer(tokenizer: Any) -> str:
    """A store's `tokenizer_hash` if this is the tokenizer that it was made with: equal for equal ids."""
    return _hash(_plain_json(tokenizer))


def _plain_json(tokenizer: Any) -> str:
    """The tokenizer without what does not touch the ids of a text: its post-processor, which trims offsets and adds
    tokens, and cuts and padding from saved settings."""
    plain = json.loads(tokenizer.backend_tokenizer.to_str())
    plain.update(post_processor=None, truncation=None, padding=None)
    return json.dumps(plain, sort_keys=True)


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def _check_text(text: str, most_characters: int) -> None:
    if len(text) > most_characters:
        raise BadSample(f"longer than {most_characters:,} characters", f"{len(text):,} characters")
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            raise BadSample("text is not valid Unicode", "it holds half of a surrogate pair") from None


def _notes(chat: Chat, text: str) -> list[str]:
    for message in filter(is_written_by_target, chat.messages):
        reasoning = message.get("reasoning_content")
        if reasoning and reasoning.strip()[-24:] not in text:
            return ["reasoning that the template leaves out"]
    return []


_MODEL_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json")


def _load_tokenizer(settings: EncodeSettings) -> Any:
    from transformers import AutoTokenizer

    target = expanded(settings.target)
    folder = Path(target)
    if is_missing_folder(target):
        raise InputError(f"no model folder at {target}; give a folder or a hub id as --target")
    if folder.is_dir() and not any((folder / name).exists() for name in _MODEL_FILES):
        raise InputError(f"the folder {target} holds no model ({', '.join(_MODEL_FILES)}); give another as --target")
    if folder.is_dir() and settings.revision is not None:
        raise InputError(f"--revision {settings.revision} is of the hub, and {target} is a folder; leave one out")
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            target,
            revision=settings.revision,
            trust_remote_code=settings.trust_remote_code,
        )
    except Exception as error:  # its many causes are all the same to the user: no tokenizer there
        first_line = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise InputError(
            f"can't load the tokenizer of {target}: {first_line.rstrip('.')}; give a model folder or a hub id as "
            "--target"
        ) from error
    if not getattr(tokenizer, "is_fast", False):
        raise InputError(
            f"the tokenizer of {target} ({type(tokenizer).__name__}) can't say where its tokens lie in the text; "
            "prepare needs one backed by the tokenizers library (a tokenizer.json)"
        )
    if settings.chat_template is not None:
        tokenizer.chat_template = settings.chat_template
    return tokenizer


def _eos_ids(settings: EncodeSettings, name: str) -> list[int]:
    from transformers.utils import cached_file

    folder = Path(expanded(settings.target))
    local = folder / name
    path: str | os.PathLike[str] | None = local if local.is_file() else None
    if path is None and not folder.is_dir():
        try:
            path = cached_file(
                settings.target, name, revision=settings.revision, _raise_exceptions_for_missing_entries=False
            )
        except OSError:
            path = None
    if path is None:
        return []
    config = json.loads(Path(path).read_text(encoding="utf-8"))
    ids = config.get("eos_token_id", (config.get("text_config") or {}).get("eos_token_id"))
    return ids if isinstance(ids, list) else [ids]
