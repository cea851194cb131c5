"""Makes what `draftmill demo` trains and is measured on: prompts, with the demo target's own greedy answers.

    pip install --no-deps reasoning-gym==0.1.25
    python scripts/make_demo_chats.py --cache .cache --work .cache/demo_chats --output src/draftmill/demo/data

Steps, each continued where it stopped: prompts are generated from a seed, answered by `draftmill regenerate`'s own
code (bfloat16 on the CPU, greedy), filtered, and written as chats.jsonl.gz and heldout.jsonl. `--only FAMILY` answers
one family and leaves it at that, so that several processes can share the work. docs/demo_data.md says what was kept.
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from demo_prompts import FAMILIES, DemoPrompt, distinct
from draftmill.demo.smollm2 import fetch
from draftmill.target.answers import Request, regenerate_locally
from draftmill.target.generate_sampling import Sampling

_SEED = 20261129
_NGRAM = 12  # an answer in which some run of this many tokens occurs _LOOPS times is a loop, and left out
_LOOPS = 3


@dataclass(frozen=True)
class Plan:
    """How many prompts of a family are tried, how long their answers may be, and how many chats are wanted."""

    tried: int
    max_new_tokens: int
    train: int
    heldout: int


_PLANS = {
    "gsm_symbolic": Plan(720, 160, 330, 16),
    "rectangles": Plan(290, 208, 210, 8),
    "units": Plan(340, 128, 210, 8),
    "records": Plan(250, 128, 183, 8),
    "general": Plan(552, 96, 240, 20),
}


def main() -> None:
    """Parse the command line and make the files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, required=True, help="where the demo's target lies or goes")
    parser.add_argument("--work", type=Path, required=True, help="folder for prompts and answers, kept between calls")
    parser.add_argument("--output", type=Path, required=True, help="folder for chats.jsonl.gz and heldout.jsonl")
    parser.add_argument("--only", choices=list(FAMILIES), nargs="+", help="answer only these and write no output")
    parser.add_argument("--no-answers", action="store_true", help="select from the answers that are there")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of this process")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    options.work.mkdir(parents=True, exist_ok=True)
    target = fetch(options.cache, print)
    prompts = {family: distinct(family, _SEED, plan.tried) for family, plan in _PLANS.items()}
    if not options.no_answers:
        for family in options.only or _PLANS:
            _answer(family, prompts[family], target, options.work)
    if not options.only:
        _select(prompts, target, options.work, options.output)


def _answer(family: str, prompts: list[DemoPrompt], target: Path, work: Path) -> None:
    asked = work / f"{family}.prompts.jsonl"
    rows = [{"prompt": prompt.text, "category": family, "key": prompt.key} for prompt in prompts]
    asked.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    sampling = Sampling(max_new_tokens=_PLANS[family].max_new_tokens)
    request = Request(str(target), [asked], work / f"{family}.answers.jsonl", sampling)
    print(family, *regenerate_locally(request, device="cpu").lines(), sep="\n  ", flush=True)


def _select(prompts: dict[str, list[DemoPrompt]], target: Path, work: Path, output: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(target)
    train: list[dict[str, Any]] = []
    heldout: list[dict[str, Any]] = []
    for family, plan in _PLANS.items():
        path = work / f"{family}.answers.jsonl"
        answers = {row["key"]: row for row in map(json.loads, path.open(encoding="utf-8"))} if path.exists() else {}
        counts: Counter[str] = Counter()
        kept = []
        for prompt in prompts[family]:  # in the order in which they were generated, whatever finished first
            row = answers.get(prompt.key)
            verdict = "not answered" if row is None else _verdict(row, tokenizer)
            counts[verdict] += 1
            if row is not None and verdict == "kept":
                kept.append(row)
        print(family, dict(counts), flush=True)
        for number, row in enumerate(kept[: plan.heldout]):
            question = row["messages"][0]["content"]
            heldout.append({"id": f"{family}-{number}", "category": family, "prompt": question})
        chosen = kept[plan.heldout : plan.heldout + plan.train]
        train += [{"messages": row["messages"], "category": family} for row in chosen]
    output.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in train)
    (output / "chats.jsonl.gz").write_bytes(gzip.compress(lines.encode(), compresslevel=9, mtime=0))
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in heldout)
    (output / "heldout.jsonl").write_text(lines, encoding="utf-8")
    print(f"{len(train)} chats and {len(heldout)} held-out prompts -> {output}")


def _verdict(row: dict[str, Any], tokenizer: Any) -> str:
    ids = tokenizer(row["messages"][-1]["content"], add_special_tokens=False).input_ids
    runs = Counter(tuple(ids[start : start + _NGRAM]) for start in range(len(ids) - _NGRAM + 1))
    if max(runs.values(), default=0) >= _LOOPS:
        return "loops"
    return "kept" if row["ended"] else "cut"


if __name__ == "__main__":
    main()
