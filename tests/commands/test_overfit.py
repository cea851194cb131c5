"""What is learned is what is served: case B1, a loss that looks right beside an acceptance length of one (B12, B13).

By commands alone. A drafter that has trained on one text must draft it in whole blocks where it is decoded for real: of
what training gives the drafter (features, positions, slots, labels, head) nothing may differ from what decoding does.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from draftmill.cli import main
from draftmill.monitor.metrics import read_metrics
from evaluate_doubles import reference_greedy, tiny_target, tiny_tokenizer

torch.set_num_threads(1)

PROMPT_TEXT, PROMPT = "w3 w9", [60, 3, 9, 61]
BLOCK, DRAFTS, DECODED = 6, 5, 40
KINDS: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "tied embedding": ("llama", {"tie_word_embeddings": True, "seed": 3}, []),
    "packed rows, several drafters": (
        "qwen3",
        {"seed": 1},
        ["data.batching=packed", "drafter.devices=[cpu, cpu]", "target.devices=[cpu, cpu]"],
    ),
}


def run(*arguments: str | Path) -> None:
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    assert not ended.value.code, arguments


def write_world(folder: Path, family: str, changes: dict[str, Any]) -> None:
    """A target, and the one text that it writes itself after PROMPT, five times: four to train on, one held out."""
    target = tiny_target(family, **changes)
    target.model.save_pretrained(folder / "target")
    tiny_tokenizer().save_pretrained(folder / "target")
    answer = reference_greedy(target, PROMPT, DECODED + 2 * BLOCK)
    assert len(set(answer)) > 8, "a text on which a shift shows"
    mask_token = next(token for token in range(60) if token not in {*PROMPT, *answer})
    row = {"input_ids": PROMPT + answer, "loss_mask": [0] * len(PROMPT) + [1] * len(answer)}
    (folder / "rows.jsonl").write_text((json.dumps(row) + "\n") * 5)
    (folder / "prompts.jsonl").write_text(json.dumps({"prompt": PROMPT_TEXT}) + "\n")
    sections = {
        "run": {"dir": str(folder / "run")},
        "target": {"model": str(folder / "target"), "devices": ["cpu"], "dtype": "float32"},
        "data": {"path": str(folder / "store"), "max_length": 128, "token_budget": 128, "min_rows": 1, "heldout": 1},
        "drafter": {
            "devices": ["cpu"],
            "num_layers": 2,
            "target_layer_ids": [0, 2],
            "block_size": BLOCK,
            "mask_token_id": mask_token,
            "dtype": "float32",
        },
        "train": {"epochs": 100, "max_steps": 80, "num_anchors": 192, "lr": 1e-2, "gamma": 4.0, "evaluate_every": 1000},
        "monitor": {"trackers": []},
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(sections))


def evaluated(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> dict[str, Any]:
    capsys.readouterr()
    options = ("--draft-tokens", str(DRAFTS), "--max-new-tokens", str(DECODED), "--dtype", "float32", "--json")
    run("evaluate", *arguments, *options, "--device", "cpu", "--thinking", "auto")
    return json.loads(capsys.readouterr().out.splitlines()[-1])["overall"][0]


def assert_serves_beyond_training(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """B12: prompts longer than any sample of the training, up to the target's own limit."""
    assert json.loads((folder / "drafter" / "config.json").read_text())["max_position_embeddings"] == 512
    assert json.loads((folder / "drafter" / "draftmill.json").read_text())["facts"]["training_length"] == 128
    prompts = folder / "long.jsonl"
    prompts.write_text(json.dumps({"prompt": "w7 w1 w9 " * 150}) + "\n")
    beyond = evaluated(capsys, folder / "drafter", "--prompts", prompts)
    assert (beyond["answers"], beyond["identical"], beyond["tokens"]) == (1, 1, DECODED)


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_that_was_learned_is_drafted_in_whole_blocks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    family, changes, overrides = KINDS[kind]
    write_world(tmp_path, family, changes)
    store = ("--input", tmp_path / "rows.jsonl", "--output", tmp_path / "store", "--max-length", "128")
    run("prepare", "--target", tmp_path / "target", *store, "--keep-duplicates")
    run("train", tmp_path / "run.yaml", *overrides)
    metrics = read_metrics(tmp_path / "run")
    (teacher_forced,) = [record["accept_length"] for record in metrics.evaluations]
    assert teacher_forced > 0.95 * BLOCK

    served = evaluated(capsys, tmp_path / "run")  # the held-out sample's own opening
    assert served["identical"] == served["answers"] == 1
    assert served["tau_pooled"] > 0.85 * BLOCK
    run("export", tmp_path / "run", "--layout", "zlab", "--output", tmp_path / "drafter", "--dtype", "float32")
    exported = evaluated(capsys, tmp_path / "drafter", "--prompts", tmp_path / "prompts.jsonl")
    assert exported["histogram"] == served["histogram"]
    assert exported["identical"] == 1
    assert_serves_beyond_training(tmp_path, capsys)
