"""A small world for tests: a random target on disk, a store, a configuration that trains on them in seconds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from draftmill.config import Config, build_config
from draftmill.data.prepare import prepare

TEMPLATE = (
    "{% for m in messages %}<s>{{ m['role'] }} {{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant {% endif %}"
)
WORDS = 60


def save_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """A word tokenizer with a reserved token, in the folder."""
    names = [
        "<pad>",
        "<s>",
        "</s>",
        "<unk>",
        "<reserved_0>",
        "user",
        "assistant",
        "system",
        *(f"w{i}" for i in range(WORDS)),
    ]
    inner = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
        additional_special_tokens=["<reserved_0>"],
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return tokenizer


def save_target(
    folder: Path, kind: str = "llama", num_layers: int = 6, tied: bool = True, vocab: int = 80, head_dim: int = 8
) -> Path:
    """A random causal LM of hidden size 32 with its tokenizer."""
    torch.manual_seed(0)
    settings: dict[str, Any] = dict(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim,
        vocab_size=vocab,
        max_position_embeddings=256,
        tie_word_embeddings=tied,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        initializer_range=0.2,
    )
    config, model = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen3": (Qwen3Config, Qwen3ForCausalLM)}[kind]
    model(config(**settings)).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def save_chats(path: Path, count: int = 40, seed: int = 0) -> Path:
    """Chats of random words, 5 to 40 of them in an answer."""
    generator = torch.Generator().manual_seed(seed)

    def words(low: int, high: int) -> str:
        length = int(torch.randint(low, high, (1,), generator=generator))
        return " ".join(f"w{int(i)}" for i in torch.randint(WORDS, (length,), generator=generator))

    with path.open("w") as file:
        for _ in range(count):
            turns = [{"role": "user", "content": words(2, 10)}, {"role": "assistant", "content": words(5, 40)}]
            file.write(json.dumps({"messages": turns}) + "\n")
    return path


def small_world(folder: Path, count: int = 40, **target: Any) -> dict[str, Any]:
    """Target, store and a configuration's sections for a run on one CPU target and one CPU drafter."""
    model = save_target(folder / "target", **target)
    chats = save_chats(folder / "chats.jsonl", count)
    prepare(str(model), [str(chats)], folder / "store", max_length=64, num_processes=1)
    return {
        "run": {"dir": str(folder / "run")},
        "target": {"model": str(model), "devices": ["cpu"], "dtype": "float32"},
        "data": {
            "path": str(folder / "store"),
            "max_length": 64,
            "token_budget": 128,
            "min_rows": 1,
            "max_rows": 8,
            "num_buckets": 2,
            "round_to": 8,
            "heldout": 6,
        },
        "drafter": {"devices": ["cpu"], "num_layers": 2, "num_taps": 2, "block_size": 4, "dtype": "float32"},
        "train": {"epochs": 2, "num_anchors": 16, "lr": 1e-2, "evaluate_every": 5},
        "monitor": {"trackers": []},
    }


def config_of(sections: dict[str, Any], *overrides: str) -> Config:
    """The checked configuration of these sections, with dotted overrides."""
    return build_config(sections, list(overrides))


def metrics_of(run_dir: Path | str) -> list[dict[str, Any]]:
    """The lines of a run's metrics.jsonl."""
    return [json.loads(line) for line in (Path(run_dir) / "metrics.jsonl").read_text().splitlines()]
