"""How fast is batched local generation, in slots and from a cache that rows join, beside transformers' own `generate`?

Both decode the same prompts greedily to at most --new-tokens, in one process, in turns; the first round of each is
warm-up. `generate` gets the prompts in batches of the same size, sorted by length. The last line is JSON.

On a GPU give many prompts and large batches, as in --prompts 4096 --batch-size 2048 --new-tokens 256 --device cuda.

    python bench/generate.py --target FOLDER [--prompts 96] [--batch-size 32] [--new-tokens 64] [--device cpu]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from draftmill.target.generate import RowsChoice, Sampling, encode, generate_batched
from draftmill.target.load import load_target


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--prompts", type=int, default=96)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    target = load_target(options.target, device=options.device, dtype=options.dtype)
    topics = ["rivers", "bees", "bridges and how they are built", "the history of bread in Europe", "chess", "2 + 2"]
    texts = [f"Tell me about {topics[n % len(topics)]}, in {n % 7 + 1} sentences." for n in range(options.prompts)]
    prompts = [encode(target.tokenizer, [{"role": "user", "content": text}]) for text in texts]

    runs: dict[str, Callable[[], int]] = {
        "slots": lambda: ours(target, prompts, options.batch_size, options.new_tokens, "slots"),
        "joined": lambda: ours(target, prompts, options.batch_size, options.new_tokens, "joined"),
        "transformers": lambda: theirs(target, prompts, options.batch_size, options.new_tokens),
    }
    rates: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(options.rounds + 1):
        for name, run in runs.items():
            start_s = time.perf_counter()
            num_tokens = run()
            seconds = time.perf_counter() - start_s
            print(f"{name}: {num_tokens} tokens in {seconds:.1f} s" + ("" if number else " (warm-up)"), flush=True)
            if number:
                rates[name].append(num_tokens / seconds)
    medians = {f"{name}_tokens_per_s": round(statistics.median(values), 1) for name, values in rates.items()}
    print(json.dumps({**medians, **vars(options)}))


def ours(target: Any, prompts: list[list[int]], batch_size: int, new_tokens: int, kept: RowsChoice) -> int:
    """Tokens written by generate_batched."""
    options: dict[str, Any] = {"batch_size": batch_size, "kept": kept}
    done = generate_batched(target.model, target.tokenizer, prompts, Sampling(new_tokens), **options)
    return sum(len(completion.token_ids) + completion.ended for completion in done)


def theirs(target: Any, prompts: list[list[int]], batch_size: int, new_tokens: int) -> int:
    """Tokens written by transformers, padding after an answer's end not counted."""
    end, num_tokens = target.tokenizer.eos_token_id, 0
    ordered = sorted(prompts, key=len, reverse=True)
    for start in range(0, len(ordered), batch_size):
        rows = ordered[start : start + batch_size]
        longest = max(map(len, rows))
        ids = torch.tensor([[end] * (longest - len(row)) + row for row in rows], device=target.device)
        mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows], device=target.device)
        with torch.inference_mode():
            written = target.model.generate(ids, attention_mask=mask, max_new_tokens=new_tokens, do_sample=False)
        for row in written[:, longest:].tolist():
            num_tokens += row.index(end) + 1 if end in row else len(row)
    return num_tokens


if __name__ == "__main__":
    main()
