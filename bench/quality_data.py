"""The experiment's data: chats that the target answers itself, and its plain answers to the evaluation prompts.

    each process   its share of the prompts (sampled from the target, or fixed) ─► answers ─► parts/chats-I.jsonl
    the first one  also the evaluation suites and the held-out prompts, decoded plainly ─► parts/evaluation.json
    then           parts ─► one compact file (quality_file.py) ─► `prepare` ─► the store

Everything is greedy but the user turns that the target writes. Never trains.
"""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from draftmill.evaluate.suites import load_suite
from draftmill.target.answers_local import LocalTarget, answer_locally, load_local, text_of, user_turn_opening
from draftmill.target.answers_prompts import Dialogue
from draftmill.target.answers_synthetic import words_of
from draftmill.target.generate import Sampling, encode, encode_text, generate_batched
from quality_prompts import OPENINGS, SHARES, Exclusion, fixed_prompts
from quality_settings import Paths, Settings

_SPARE = 1.3
"""Sampled prompts for each that is wanted: some do not end, some are said twice."""
_ROUNDS = 4


@dataclass(frozen=True)
class Share:
    """Which of how many processes this is."""

    index: int
    count: int

    def of(self, number: int) -> int:
        """This process's part of a number of things."""
        return (number + self.count - 1 - self.index) // self.count


@dataclass(frozen=True)
class Item:
    """One plain greedy answer that drafters are measured on. suite "heldout" is of the training chats' kinds."""

    suite: str
    name: str
    turn: int
    prompt: list[int]
    answer: list[int]


def make_part(
    settings: Settings, paths: Paths, target_name: str, device: str, share: Share, suites: Sequence[str]
) -> None:
    """One process's chats, and of the first process the evaluation's answers."""
    done = paths.parts / f"part-{share.index}.json"
    if done.exists():
        return
    paths.parts.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    target = load_local(target_name, device=device, dtype="bfloat16" if device != "cpu" else "float32")
    loaded = time.perf_counter()
    meter = _Meter()
    exclusion, rejected = Exclusion(suites), Counter[str]()
    dialogues = _dialogues(settings, target, share, exclusion, rejected, meter)
    random.Random(share.index).shuffle(dialogues)
    heldout = dialogues[: settings.heldout] if share.index == 0 else []
    prompted, prompt_tokens = time.perf_counter(), meter.tokens
    if share.index == 0:
        items = _evaluation(settings, target, suites, heldout, meter)
        (paths.parts / "evaluation.json").write_text(json.dumps([asdict(item) for item in items]), encoding="utf-8")
    kept = dialogues[len(heldout) :]
    chats, num_cut = 0, 0
    with (paths.parts / f"chats-{share.index}.jsonl").open("w", encoding="utf-8") as file:
        for dialogue, problem in answer_locally(target, kept, Sampling(settings.answer_tokens), meter.count):
            if problem is not None:
                rejected[problem.split(":")[0]] += 1
                continue
            file.write(json.dumps(dialogue.row(), ensure_ascii=False) + "\n")
            chats, num_cut = chats + 1, num_cut + (not dialogue.ended)
    ended = time.perf_counter()
    report = {
        "chats": chats,
        "cut": num_cut,
        "rejected": dict(rejected),
        "excluded": dict(exclusion.excluded),
        "evaluation_turns": exclusion.num_known,
        "tokens": meter.tokens,
        "load_s": round(loaded - started, 1),
        "prompts_s": round(prompted - loaded, 1),
        "answers_s": round(ended - prompted, 1),
        "prompt_tokens_per_s": round(prompt_tokens / (prompted - loaded)),
        "answer_tokens_per_s": round((meter.tokens - prompt_tokens) / (ended - prompted)),
    }
    print(f"data {share.index}: {json.dumps(report)}", flush=True)
    done.write_text(json.dumps(report), encoding="utf-8")


def read_parts(paths: Paths) -> tuple[list[dict[str, Any]], list[Item], dict[str, Any]]:
    """Training chats without repeats, the evaluation's answers, and what the processes counted, added up."""
    items = [Item(**raw) for raw in json.loads((paths.parts / "evaluation.json").read_text(encoding="utf-8"))]
    counted: dict[str, Any] = {"excluded": Counter(), "rejected": Counter(), "tokens": 0, "chats": 0, "cut": 0}
    for path in sorted(paths.parts.glob("part-*.json")):
        part = json.loads(path.read_text(encoding="utf-8"))
        for name in counted:
            counted[name] += Counter(part[name]) if isinstance(counted[name], Counter) else part[name]
        counted["evaluation_turns"] = part["evaluation_turns"]
    seen = {item.name for item in items if item.suite == "heldout"}
    rows = []
    for path in sorted(paths.parts.glob("chats-*.jsonl")):
        for line in path.open(encoding="utf-8"):
            row = json.loads(line)
            words = words_of(row["messages"][0]["content"])
            if words not in seen:
                seen.add(words)
                rows.append(row)
    counted["said_by_several"] = counted["chats"] - len(rows)
    return rows, items, counted


class _Meter:
    """Counts tokens written."""

    def __init__(self) -> None:
        self.tokens = 0

    def count(self, number: int) -> None:
        self.tokens += number


def _dialogues(
    settings: Settings, target: LocalTarget, share: Share, exclusion: Exclusion, rejected: Counter[str], meter: _Meter
) -> list[Dialogue]:
    """This process's prompts, of all kinds, as chats to be answered."""
    wanted = {kind: share.of(round(settings.chats * part)) for kind, part in SHARES.items()}
    wanted["general"] += settings.heldout if share.index == 0 else 0
    seen: set[str] = set()
    found: list[Dialogue] = []

    def take(kind: str, text: str) -> bool:
        words = words_of(text)
        if not words or words in seen:
            rejected["no words" if not words else "said before"] += 1
            return False
        if exclusion.refuses(text):
            return False
        seen.add(words)
        found.append(
            Dialogue(
                f"{kind}-{share.index}-{len(found)}",
                "",
                [{"role": "user", "content": text}, None],
                extra={"kind": kind},
            )
        )
        return True

    for kind in ("gsm_symbolic", "demo"):
        for text in fixed_prompts(kind, round(settings.chats * SHARES[kind]))[share.index :: share.count]:
            take(kind, text)
    missing = {kind: wanted[kind] for kind in OPENINGS}
    stream = share.index
    for _ in range(_ROUNDS):
        asked = [kind for kind, number in missing.items() for _ in range(int(number * _SPARE) + (number > 0))]
        if not asked:
            break
        streams = [stream + share.count * number for number in range(len(asked))]
        stream += share.count * len(asked)
        for kind, text in _sampled(settings, target, asked, streams, rejected, meter):
            if missing[kind] > 0 and take(kind, text):
                missing[kind] -= 1
    return found


def _sampled(
    settings: Settings,
    target: LocalTarget,
    kinds: Sequence[str],
    streams: Sequence[int],
    rejected: Counter[str],
    meter: _Meter,
) -> list[tuple[str, str]]:
    """User turns that the target writes, one a kind given, those that come to an end."""
    opening, closing = user_turn_opening(target)
    begins = [OPENINGS[kind][stream % len(OPENINGS[kind])] for kind, stream in zip(kinds, streams, strict=True)]
    special = [str(token) for token in target.tokenizer.all_special_tokens]
    completions = generate_batched(
        target.model,
        target.tokenizer,
        [[*opening, *encode_text(target.tokenizer, begin)] for begin in begins],
        Sampling(settings.prompt_tokens, temperature=1.0),
        batch_size=target.batch_size,
        streams=streams,
        extra_stop=closing,
        progress=meter.count,
    )
    texts = []
    for completion in sorted(completions, key=lambda completion: completion.index):
        text = text_of(target, completion.token_ids)
        if not completion.ended or any(token in text for token in special):
            rejected["did not come to an end" if not completion.ended else "holds a special token"] += 1
            continue
        texts.append((kinds[completion.index], (begins[completion.index] + text).strip()))
    return texts


def _evaluation(
    settings: Settings, target: LocalTarget, suites: Sequence[str], heldout: list[Dialogue], meter: _Meter
) -> list[Item]:
    """Plain greedy answers to the suites' prompts and the held-out ones; a second turn follows the target's first."""
    asked: list[tuple[str, str, list[dict[str, str]], tuple[str, ...]]] = [
        (suite, prompt.name, list(prompt.messages), prompt.follow_ups)
        for suite in suites
        for prompt in load_suite(suite, limit=settings.prompts)
    ]
    asked += [
        ("heldout", words_of(dialogue.messages[0]["content"]), [dict(dialogue.messages[0])], ()) for dialogue in heldout
    ]
    items: list[Item] = []
    turn = 1
    while asked:
        prompts = [encode(target.tokenizer, messages) for _, _, messages, _ in asked]
        sampling = Sampling(settings.max_new_tokens)
        following = []
        completions = generate_batched(target.model, target.tokenizer, prompts, sampling, progress=meter.count)
        for completion in sorted(completions, key=lambda completion: completion.index):
            suite, name, messages, follow_ups = asked[completion.index]
            end = [target.tokenizer.eos_token_id] if completion.ended else []
            items.append(Item(suite, name, turn, prompts[completion.index], [*completion.token_ids, *end]))
            if follow_ups:
                answer = {"role": "assistant", "content": text_of(target, completion.token_ids)}
                question = {"role": "user", "content": follow_ups[0]}
                following.append((suite, name, [*messages, answer, question], follow_ups[1:]))
        asked, turn = following, turn + 1
    return items
