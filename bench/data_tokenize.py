"""How near is `prepare`, per core, to the bare tokenizer's own speed on the same text?

Chats made of the standard library's documentation are written as JSON lines. `prepare`'s whole way (parse, render,
tokenize, mask, check, write and flush the shard) and the bare tokenizer (the texts are rendered beforehand; a list of
ids and nothing else, in calls of 64 texts, through the Hugging Face tokenizer and through the Rust one beneath it,
with and without offsets) take turns, chunk by chunk, in one process and one thread. One chunk of warm-up each.
Seconds are CPU seconds of the thread, as the machine may be shared; the flush to disk is wall time on top.

    python bench/data_tokenize.py --target FOLDER [--chats N] [--characters N]
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

os.environ["TOKENIZERS_PARALLELISM"] = "false"

from draftmill.data.encode import Encoder, EncodeSettings
from draftmill.data.sources import Chunk, find_sources, read_chunks, rows_of
from draftmill.data.worker import make_shard

MODULES = "argparse json decimal typing subprocess logging asyncio statistics datetime collections tarfile zipfile"
MODULES += " threading random pathlib os re socket unittest pdb doctest difflib fractions optparse csv email.message"


def documentation() -> list[str]:
    """Paragraphs of the standard library's docstrings."""
    texts = set()
    for name in MODULES.split():
        module = importlib.import_module(name)
        for thing in vars(module).values():
            texts.update((inspect.getdoc(thing) or "").split("\n\n"))
    return sorted(text for text in texts if len(text) > 40)


def write_chats(path: Path, num_chats: int, num_characters: int) -> None:
    """Chats whose answers have about so many characters."""
    paragraphs, random = documentation(), np.random.default_rng(0)
    with path.open("w") as file:
        for number in range(num_chats):
            answer = ""
            while len(answer) < num_characters:
                answer += paragraphs[random.integers(len(paragraphs))] + "\n\n"
            question = f"Question {number}: what of {paragraphs[random.integers(len(paragraphs))][:120]}?"
            messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer.strip()}]
            file.write(json.dumps({"messages": messages}) + "\n")


def in_calls_of_64(texts: list[str], call: Callable[[list[str]], Any]) -> None:
    for first in range(0, len(texts), 64):
        call(texts[first : first + 64])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--chats", type=int, default=6000)
    parser.add_argument("--characters", type=int, default=2000)
    arguments = parser.parse_args()
    encoder = Encoder(EncodeSettings(arguments.target, max_length=8192))
    tokenizer, rust = encoder.tokenizer, encoder.tokenizer.backend_tokenizer
    rust.no_truncation()
    rust.no_padding()
    bare: dict[str, Callable[[list[str]], Any]] = {
        "hugging_face": lambda texts: tokenizer(texts, add_special_tokens=False)["input_ids"],
        "rust": lambda texts: [each.ids for each in rust.encode_batch(texts, add_special_tokens=False)],
        "rust_no_offsets": lambda texts: [each.ids for each in rust.encode_batch_fast(texts, add_special_tokens=False)],
    }
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "chats.jsonl"
        write_chats(path, arguments.chats, arguments.characters)
        chunks = list(read_chunks(find_sources([str(path)])))
        seconds = dict.fromkeys(["prepare", *bare], 0.0)
        samples = characters = 0
        for chunk in chunks:
            texts = rendered(encoder, chunk)
            timed = time.thread_time()
            record = make_shard(encoder, chunk, Path(name))
            spent = {"prepare": time.thread_time() - timed}
            assert not record["skipped"]
            for kind, call in bare.items():
                timed = time.thread_time()
                in_calls_of_64(texts, call)
                spent[kind] = time.thread_time() - timed
            if chunk.index > 0:  # the first is the warm-up
                samples += len(texts)
                characters += sum(map(len, texts))
                for kind, value in spent.items():
                    seconds[kind] += value
    rates = {kind: round(samples / value, 1) for kind, value in seconds.items()}
    print(f"{samples} chats of {characters / samples:.0f} characters; samples/s of one core: {rates}")
    ratios = {f"of_{kind}_pct": round(100 * seconds[kind] / seconds["prepare"], 1) for kind in bare}
    print(json.dumps({"samples": samples, "characters_per_sample": round(characters / samples), **rates, **ratios}))


def rendered(encoder: Encoder, chunk: Chunk) -> list[str]:
    """The texts of a chunk's rows as the template gives them."""
    rows = [row for piece in chunk.pieces for _, row in rows_of(piece)]
    return [encoder.tokenizer.apply_chat_template(row["messages"], tokenize=False) for row in rows]


if __name__ == "__main__":
    main()
