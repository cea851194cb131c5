"""How regular are chats? The acceptance length of a back-off n-gram drafter, by category, without any training.

    python scripts/ngram_acceptance.py --target FOLDER src/draftmill/demo/data/chats.jsonl.gz

Per category, counts of up to 5-grams are taken from three quarters of the answers; blocks of 8 (one given token, 7
drafted) are then drafted on the other quarter, each continuing where the one before was accepted up to. Printed is
the mean over answers of tokens per step: what a drafter that only knows its category's phrases would reach.
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections import Counter, defaultdict
from pathlib import Path
from random import Random

from transformers import AutoTokenizer

_ORDER = 5
_BLOCK = 8

Counts = dict[tuple[int, ...], Counter[int]]


def main() -> None:
    """Parse, count, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="folder whose tokenizer and template are used")
    parser.add_argument("chats", type=Path)
    options = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(options.target)
    by_category: dict[str, list[tuple[list[int], list[int]]]] = defaultdict(list)
    opened = gzip.open if options.chats.suffix == ".gz" else open
    with opened(options.chats, "rt", encoding="utf-8") as file:
        for row in map(json.loads, file):
            text = tokenizer.apply_chat_template(row["messages"][:-1], tokenize=False, add_generation_prompt=True)
            prompt = tokenizer(text, add_special_tokens=False).input_ids
            answer = tokenizer(row["messages"][-1]["content"], add_special_tokens=False).input_ids
            by_category[row["category"]].append((prompt, [*answer, tokenizer.eos_token_id]))
    for category, samples in by_category.items():
        Random(0).shuffle(samples)
        cut = len(samples) // 4
        counts = count(samples[cut:])
        taus = [acceptance(counts, prompt, answer) for prompt, answer in samples[:cut]]
        length = sum(len(answer) for _, answer in samples) / len(samples)
        print(f"{category}: {sum(taus) / len(taus):.2f} ({len(samples)} chats, {length:.0f} tokens an answer)")


def count(samples: list[tuple[list[int], list[int]]]) -> Counts:
    """What followed each run of 1 to 5 tokens."""
    counts: Counts = defaultdict(Counter)
    for prompt, answer in samples:
        tokens = prompt[-_ORDER:] + answer
        for place in range(len(tokens) - len(answer), len(tokens)):
            for length in range(1, min(_ORDER, place) + 1):
                counts[tuple(tokens[place - length : place])][tokens[place]] += 1
    return counts


def acceptance(counts: Counts, prompt: list[int], answer: list[int]) -> float:
    """Tokens per step of one answer; its first token comes from the prompt's own forward."""
    place, steps = 1, 0
    while place < len(answer):
        tokens = prompt + answer[:place]
        accepted = 0
        while accepted < _BLOCK - 1 and place + accepted < len(answer):
            if guess(counts, tokens) != answer[place + accepted]:
                break
            tokens.append(answer[place + accepted])
            accepted += 1
        place += accepted + 1
        steps += 1
    return (len(answer) - 1) / steps if steps else 1.0


def guess(counts: Counts, tokens: list[int]) -> int | None:
    """The likeliest next token after the longest run that has been seen."""
    for length in range(_ORDER, 0, -1):
        if (found := counts.get(tuple(tokens[-length:]))) is not None:
            return found.most_common(1)[0][0]
    return None


if __name__ == "__main__":
    main()
