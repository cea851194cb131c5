"""The evaluate stage: real greedy speculative decoding with the weights that runs have left, by the evaluate room.

Plain decoding was done once, when the data was made; here each set of weights decodes every prompt speculatively, and
answers are compared with the plain ones. No time is measured, so several processes may share a GPU.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from draftmill.checkpoint.source import Source, read_published
from draftmill.drafter.network import Drafter
from draftmill.evaluate.command import build_drafter
from draftmill.evaluate.decode import Decoder
from draftmill.target.generate import stop_tokens
from draftmill.target.generate_sampling import Sampling
from draftmill.target.load import load_target
from draftmill.target.model import Target
from quality_data import Item
from quality_file import chosen_items, read_file
from quality_settings import Paths, Settings
from quality_train import append_line, read_lines
from quality_walk import Walker, tau_of


def evaluate_all(
    settings: Settings,
    paths: Paths,
    target_name: str,
    device: str,
    place: tuple[int, int],
    prompts: int,
    which: Sequence[str],
    stop_after: float | None = None,
) -> None:
    """Decode `prompts` prompts a suite with this process's part of the weights that have no line yet.

    which: "final", "half". Final weights come first and one seed before the next, so that what is there when the time
    is over is a fair selection. stop_after: seconds past which no decoding is begun that would not end.
    """
    began, longest = time.perf_counter(), 0.0
    done = {(line["run"], line["weights"]) for line in read_lines(paths.evaluations_file)}
    folders = [folder for name in which for folder in sorted(paths.runs.glob(f"*/{name}"), key=_by_seed)]
    mine = folders[place[0] :: place[1]]
    waiting = [folder for folder in mine if (folder.parent.name, folder.name) not in done]
    if not waiting:
        return
    items = chosen_items(read_file(paths.data_file).items, prompts, settings.max_new_tokens)
    target = load_target(target_name, device=device, dtype="float32" if device == "cpu" else "bfloat16")
    decoders: dict[str, tuple[Decoder, Walker]] = {}
    for folder in waiting:
        started = time.perf_counter()
        if stop_after is not None and started - began + longest > stop_after:
            print(f"evaluate {folder.parent.name} {folder.name}: left for another call", flush=True)
            continue
        source = read_published(str(folder))
        key = json.dumps(source.shape.to_dict())
        if key in decoders:
            _overwrite(decoders[key][0], source)
        else:
            drafter = build_drafter(source.shape, source.tensors, target)
            decoders[key] = Decoder(target, drafter), Walker(target, source.shape, items)
        decoder, walker = decoders[key]
        found = decode(decoder, target, items, settings.max_new_tokens)
        assert decoder.drafter is not None
        line = {
            "run": folder.parent.name,
            "weights": folder.name,
            **found,
            "walked_tau": walker.tau(decoder.drafter),
            "prompts": prompts,
            "why_eager": decoder.why_eager,
            "seconds": round(time.perf_counter() - started, 1),
        }
        append_line(paths.evaluations_file, line)
        longest = max(longest, line["seconds"])
        tau = ", ".join(f"{suite} {one['mean']:.3f}" for suite, one in found["tau"].items())
        same = f"{found['identical']}/{found['answers']} as plain"
        print(f"evaluate {line['run']} {folder.name}: tau {tau}; {same}; {line['seconds']} s", flush=True)


def decode(decoder: Decoder, target: Target, items: list[Item], max_new_tokens: int) -> dict[str, Any]:
    """tau by suite of decoding every prompt with whole blocks, and how many answers are token for token plain ones."""
    stop = stop_tokens(target.model, target.tokenizer)
    sampling, count = Sampling(max_new_tokens), decoder.max_drafts
    responses = [decoder.generate(item.prompt, num_drafts=count, sampling=sampling, stop=stop) for item in items]
    return {
        "tau": {
            suite: tau_of([one.steps for one, item in zip(responses, items, strict=True) if item.suite == suite])
            for suite in dict.fromkeys(item.suite for item in items)
        },
        "answers": len(items),
        "identical": sum(one.tokens == item.answer for one, item in zip(responses, items, strict=True)),
        "tokens": sum(len(one.tokens) for one in responses),
    }


def _by_seed(folder: Path) -> tuple[int, str]:
    name, _, seed = folder.parent.name.rpartition("-")
    return int(seed), name


def _overwrite(decoder: Decoder, source: Source) -> None:
    """Other weights into the decoder's drafter, in place: its captured steps read them."""
    drafter = decoder.drafter
    assert isinstance(drafter, Drafter)
    for name, parameter in drafter.named_parameters():
        parameter.data.copy_(source.tensors[name])
