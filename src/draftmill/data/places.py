"""Token ids of texts, and the first token at or after a place in a text.

Owns the tokenizer's Rust core. Never renders and knows nothing of turns.

Byte-level tokenizers (Qwen, Llama 3, SmolLM, GPT-2 ...) cut a text's bytes into pieces without adding or dropping any,
so the lengths of the tokens themselves say where each lies; they are tokenized without offsets, which is a fifth
faster (bench/data_tokenize.py). Whether the lengths add up is checked for every text. Elsewhere, and where they do
not, the tokenizer's own offsets are used.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Sequence
from typing import Any

import numpy as np

_PROBE = "Naïve 東京 \U0001f600\n\n  def f(x):\treturn 'ſ' * 3  "


class TokenPlacer:
    """Tokenizes texts as they stand, and finds tokens by their place."""

    def __init__(self, tokenizer_json: str, added_tokens: dict[int, str]) -> None:
        """Build from a tokenizers file's text and the added tokens' texts by id."""
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_str(tokenizer_json)
        self._lengths = _byte_lengths(json.loads(tokenizer_json), added_tokens)
        if self._lengths is not None and not self._agrees(_PROBE):
            self._lengths = None

    @property
    def is_byte_level(self) -> bool:
        """Whether places follow from the tokens' own lengths."""
        return self._lengths is not None

    def encode(self, texts: Sequence[str], spans: Sequence[Sequence[tuple[int, int]]]) -> list[tuple[Any, Any]]:
        """For each text its token ids, int32, and a bool mask of the tokens that begin inside one of its spans.

        A span is first and last-plus-one character. A token that begins before a span and reaches into it is not in
        it.
        """
        if self._lengths is None:
            encodings = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
            return [_by_offsets(each, part) for each, part in zip(encodings, spans, strict=True)]
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [self._by_lengths(each, text, part) for each, text, part in zip(encodings, texts, spans, strict=True)]

    def _by_lengths(self, encoding: Any, text: str, spans: Sequence[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
        assert self._lengths is not None
        ids = np.array(encoding.ids, dtype=np.int32)
        lengths = self._lengths[ids]
        ends = np.cumsum(lengths)
        is_ascii = text.isascii()
        num_bytes = len(text) if is_ascii else len(text.encode())
        fits = len(ids) > 0 and ends[-1] == num_bytes and (is_ascii or unicodedata.is_normalized("NFC", text))
        if not fits:
            return _by_offsets(self._tokenizer.encode(text, add_special_tokens=False), spans)
        starts = ends - lengths
        mask = np.zeros(len(ids), dtype=np.bool_)
        for first, last in spans:
            bounds = (first, last) if is_ascii else (len(text[:first].encode()), len(text[:last].encode()))
            begin, end = np.searchsorted(starts, bounds)
            mask[begin:end] = True
        return ids, mask

    def _agrees(self, text: str) -> bool:
        """Whether lengths and offsets give the same, for spans from every character on."""
        exact = self._tokenizer.encode(text, add_special_tokens=False)
        for first in range(len(text)):
            spans = [(first, len(text))]
            quick = self._by_lengths(exact, text, spans)
            if not np.array_equal(quick[1], _by_offsets(exact, spans)[1]):
                return False
        return True


def _by_offsets(encoding: Any, spans: Sequence[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    ids = np.array(encoding.ids, dtype=np.int32)
    mask = np.zeros(len(ids), dtype=np.bool_)
    if len(ids):
        starts = np.array(encoding.offsets, dtype=np.int64)[:, 0]
        for first, last in spans:
            mask |= (starts >= first) & (starts < last)
    return ids, mask


def _byte_lengths(tokenizer: dict[str, Any], added_tokens: dict[int, str]) -> np.ndarray | None:
    """Bytes of each token, int64 by id; None where tokens are not plain pieces of the text's bytes."""
    normalizer = tokenizer.get("normalizer")
    parts = tokenizer.get("pre_tokenizer") or {}
    steps = parts.get("pretokenizers", [parts])
    byte_level = [step for step in steps if step.get("type") == "ByteLevel"]
    vocabulary = tokenizer["model"].get("vocab")
    if (
        tokenizer["model"].get("type") != "BPE"
        or not isinstance(vocabulary, dict)
        or not byte_level
        or any(step.get("add_prefix_space") for step in byte_level)
        or (normalizer is not None and normalizer.get("type") != "NFC")
    ):
        return None
    lengths = np.zeros(max([*vocabulary.values(), *added_tokens]) + 1, dtype=np.int64)
    for token, index in vocabulary.items():
        lengths[index] = len(token)  # in this alphabet a character stands for a byte
    for index, text in added_tokens.items():
        lengths[index] = len(text.encode("utf-8", "surrogatepass"))
    return lengths
