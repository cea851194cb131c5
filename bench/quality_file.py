"""The experiment's data in one compact file, and the store that is made from it.

Owns the file's layout: tokens, loss masks and kinds of the training samples, prompts and answers of the evaluation, and
a JSON text that says how it was all made. Arrays alone, no pickle.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from draftmill.data.prepare import prepare
from draftmill.data.store import Store
from draftmill.errors import InputError
from quality_data import Item
from quality_settings import Paths, Settings


@dataclass(frozen=True)
class Data:
    """What the file holds.

    samples  token ids and loss mask of each training chat
    items    the evaluation's answers
    facts    target, counts, settings
    """

    samples: list[tuple[np.ndarray, np.ndarray]]
    items: list[Item]
    facts: dict[str, Any]


def write_file(path: Path, store: Store, items: Sequence[Item], facts: dict[str, Any]) -> None:
    """Write the samples of a store, and the rest, whole or not at all."""
    samples = store.read(np.arange(store.num_samples))
    tokens = np.concatenate([ids for ids, _ in samples])
    evaluated = np.concatenate([np.array([*item.prompt, *item.answer], dtype=np.int32) for item in items])
    narrow = np.uint16 if max(int(tokens.max()), int(evaluated.max())) < 2**16 else np.uint32
    labels = [[item.suite, item.name, item.turn, len(item.prompt), len(item.answer)] for item in items]
    text = json.dumps({"facts": facts, "items": labels})
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        np.savez_compressed(
            file,
            tokens=tokens.astype(narrow),
            lengths=store.lengths,
            mask=np.packbits(np.concatenate([mask for _, mask in samples])),
            evaluated=evaluated.astype(narrow),
            text=np.frombuffer(text.encode(), dtype=np.uint8),
        )
    partial.replace(path)


def read_file(path: Path) -> Data:
    """Read the file back. Raises InputError."""
    try:
        with np.load(path, allow_pickle=False) as found:
            arrays = {name: found[name] for name in ("tokens", "lengths", "mask", "evaluated", "text")}
    except (OSError, ValueError, KeyError, EOFError) as error:
        raise InputError(f"{path} is no data file of this experiment: {error}; run --stage data") from None
    text = json.loads(arrays["text"].tobytes())
    ends = np.cumsum(arrays["lengths"])
    mask = np.unpackbits(arrays["mask"], count=len(arrays["tokens"])).astype(bool)
    tokens = arrays["tokens"].astype(np.int32)
    samples = list(zip(np.split(tokens, ends[:-1]), np.split(mask, ends[:-1]), strict=True))
    items, at = [], 0
    for suite, name, turn, num_prompt, num_answer in text["items"]:
        ids = arrays["evaluated"][at : at + num_prompt + num_answer].tolist()
        items.append(Item(suite, name, turn, ids[:num_prompt], ids[num_prompt:]))
        at += num_prompt + num_answer
    return Data(samples, items, text["facts"])


def store_from_chats(settings: Settings, paths: Paths, target: str, rows: Sequence[dict[str, Any]]) -> Store:
    """The store of chats, by `prepare`."""
    chats = paths.parts / "chats.jsonl"
    chats.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    processes = min(8, os.cpu_count() or 1) if len(rows) >= _MANY_CHATS else 1
    _prepare(settings, paths, target, chats, processes)
    return Store.open(paths.store)


def store_from_file(settings: Settings, paths: Paths, target: str, data: Data) -> Store:
    """The same store from the compact file, by `prepare` on samples that are tokenized already."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    paths.parts.mkdir(parents=True, exist_ok=True)
    table = pa.table(
        {
            "input_ids": pa.array([ids for ids, _ in data.samples], pa.list_(pa.int32())),
            "loss_mask": pa.array([mask.astype(np.int8) for _, mask in data.samples], pa.list_(pa.int8())),
        }
    )
    pq.write_table(table, paths.parts / "samples.parquet")
    _prepare(settings, paths, target, paths.parts / "samples.parquet", 1)  # nothing is tokenized
    return Store.open(paths.store)


def _prepare(settings: Settings, paths: Paths, target: str, chats: Path, processes: int) -> None:
    """`draftmill prepare`."""
    prepare(target, [str(chats)], paths.store, max_length=settings.max_length, num_processes=processes)


_MANY_CHATS = 2000


def chosen_items(items: Sequence[Item], prompts: int, max_new_tokens: int) -> list[Item]:
    """At most `prompts` prompts of each suite, evenly spread, with answers cut at `max_new_tokens`."""
    names: dict[str, list[str]] = {}
    for item in items:
        listed = names.setdefault(item.suite, [])
        if item.name not in listed:
            listed.append(item.name)
    kept = {
        (suite, listed[index * len(listed) // count])
        for suite, listed in names.items()
        for count in [min(prompts, len(listed))]
        for index in range(count)
    }
    return [
        Item(item.suite, item.name, item.turn, item.prompt, item.answer[:max_new_tokens])
        for item in items
        if (item.suite, item.name) in kept
    ]
