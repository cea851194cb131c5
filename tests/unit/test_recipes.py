"""Every recipe: its configuration, the shape it gives for its target, and one step of that drafter made narrow.

The targets' configurations are written down here, so that no hub is needed. Layers, head counts, vocabulary, rotary
embedding and mask token are the real ones in the step; only widths are divided.
"""

from __future__ import annotations

import copy
import math
import re
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, Qwen3_5Config, Qwen3Config

from draftmill.config import Config, load_config
from draftmill.drafter.loss import LossRule
from draftmill.drafter.network import Drafter
from draftmill.drafter.shape import shape_for
from draftmill.step.eager import EagerStep
from draftmill.step.state import StepShape, StepState
from draftmill.step.workload import Workload, random_blocks, random_features
from draftmill.target.head import TargetHead

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.yaml"))
NARROWER = 64
GPUS = (1, 2, 8)
CPU = torch.device("cpu")


def qwen3(**settings: Any) -> Qwen3Config:
    return Qwen3Config(
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151936,
        max_position_embeddings=40960,
        rope_theta=1000000.0,
        rms_norm_eps=1e-6,
        bos_token_id=151643,
        eos_token_id=151645,
        **settings,
    )


def qwen3_6_27b() -> Qwen3_5Config:
    """A multimodal configuration, its language model's nested inside, as the hub has it."""
    text = dict(
        hidden_size=5120,
        intermediate_size=17408,
        num_hidden_layers=64,
        num_attention_heads=24,
        num_key_value_heads=4,
        head_dim=256,
        vocab_size=248320,
        max_position_embeddings=262144,
        rms_norm_eps=1e-6,
        eos_token_id=248044,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000000.0,
            "partial_rotary_factor": 0.25,
            "mrope_section": [11, 11, 10],
            "mrope_interleaved": True,
        },
    )
    return Qwen3_5Config(text_config=text)


def llama() -> LlamaConfig:
    return LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        bos_token_id=128000,
        eos_token_id=[128001, 128008, 128009],
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    )


TARGETS: dict[str, Callable[[], Any]] = {
    "Qwen/Qwen3-4B": lambda: qwen3(hidden_size=2560, intermediate_size=9728, tie_word_embeddings=True),
    "Qwen/Qwen3-8B": lambda: qwen3(hidden_size=4096, intermediate_size=12288),
    "Qwen/Qwen3.6-27B": qwen3_6_27b,
    "meta-llama/Llama-3.1-8B-Instruct": llama,
}
TAPS = {32: (1, 8, 15, 22, 29), 36: (1, 9, 17, 25, 33), 64: (1, 16, 31, 46, 61)}

each_recipe = pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)


def target_of(config: Config) -> Any:
    return TARGETS[config.target.model]()


def narrowed(target: Any) -> Any:
    """The same target with its widths divided, head counts and all ids kept."""
    narrow = copy.deepcopy(target)
    text = narrow.get_text_config()
    text.head_dim = text.head_dim // NARROWER * 8  # 16 and 32: a partial factor must leave whole pairs
    text.hidden_size //= NARROWER
    text.intermediate_size //= NARROWER
    return narrow


def comment_of(recipe: Path) -> str:
    return "\n".join(line[2:] for line in recipe.read_text().splitlines() if line.startswith("# "))


def variants(recipe: Path) -> dict[int, list[str]]:
    """GPUs -> overrides, from the command lines of the comment."""
    lines = re.sub(r"\\\n\s*", " ", comment_of(recipe)).splitlines()
    found = {}
    for line in lines:
        if match := re.match(r"\s*(\d) GPUs?\s+draftmill train (.+)", line):
            path, *overrides = shlex.split(match[2])
            assert path == f"recipes/{recipe.name}"
            found[int(match[1])] = overrides
    return found


def batches_of_a_step(config: Config) -> int:
    return len(config.drafter.devices) * config.train.accumulate


def test_the_recipes_are_these() -> None:
    assert [path.stem for path in RECIPES] == ["llama-3.1-8b", "qwen3-4b", "qwen3-8b", "qwen3.6-27b"]


@each_recipe
def test_it_says_what_is_measured(recipe: Path) -> None:
    comment = comment_of(recipe)
    assert "Measured with this file:" in comment
    assert "Extrapolated:" in comment


@each_recipe
def test_numbers_of_gpus(recipe: Path) -> None:
    """Each command line uses as many GPUs as it says, and a step is the same anchors and context on all of them."""
    found = variants(recipe)
    assert tuple(sorted(found)) == GPUS
    work = set()
    for num_gpus, overrides in found.items():
        config = load_config(recipe, overrides)
        devices = {*config.target.devices, *config.drafter.devices}
        assert devices == {f"cuda:{index}" for index in range(num_gpus)}
        batches = batches_of_a_step(config)
        assert config.data.token_budget >= config.data.min_rows * config.data.max_length
        work.add((batches * config.train.num_anchors, batches * config.data.token_budget))
    assert len(work) == 1, work


@each_recipe
def test_shape_is_the_targets(recipe: Path) -> None:
    config = load_config(recipe)
    target = target_of(config)
    text = target.get_text_config()
    assert config.drafter.mask_token_id is not None
    shape = shape_for(target, config.drafter, config.drafter.mask_token_id)
    assert shape.target_layer_ids == TAPS[text.num_hidden_layers]
    assert (shape.hidden_size, shape.head_dim) == (text.hidden_size, text.head_dim)
    assert (shape.num_heads, shape.num_kv_heads) == (text.num_attention_heads, text.num_key_value_heads)
    assert shape.max_position_embeddings == text.max_position_embeddings
    with torch.device("meta"):  # where no table of scaled frequencies can be made; it has no parameters
        drafter = Drafter(replace(shape, rope={"rope_type": "default", "rope_theta": 1.0e4}))
    parameters = sum(parameter.numel() for parameter in drafter.parameters())
    assert f"{parameters:,} trained parameters" in comment_of(recipe)


def test_rotary_embeddings() -> None:
    """Qwen3.6's heads turn whole, or as the target's, without its multimodal sections; Llama's scaling is kept."""
    recipe = next(path for path in RECIPES if path.stem == "qwen3.6-27b")
    whole = {"rope_type": "default", "rope_theta": 10000000.0}
    for overrides, expected in (([], whole), (["drafter.rotary=target"], {**whole, "partial_rotary_factor": 0.25})):
        config = load_config(recipe, overrides)
        shape = shape_for(target_of(config), config.drafter, 248070)
        assert shape.rope == expected
        assert [shape.window(layer) for layer in range(5)] == [2048, 2048, 2048, 2048, None]
    config = load_config(next(path for path in RECIPES if path.stem == "llama-3.1-8b"))
    shape = shape_for(target_of(config), config.drafter, 128002)
    assert (shape.rope["rope_type"], shape.rope["factor"], shape.rope["rope_theta"]) == ("llama3", 8.0, 500000.0)


@each_recipe
def test_one_step(recipe: Path) -> None:
    """Random weights give the loss of a uniform guess, and every parameter a finite gradient that is not all zero."""
    config = load_config(recipe)
    assert config.drafter.mask_token_id is not None
    shape = shape_for(narrowed(target_of(config)), config.drafter, config.drafter.mask_token_id)
    work = Workload(documents=2, tokens_each=24, anchors=4)
    slots = StepShape(work.context_tokens, work.anchors, chunk_rows=32)
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(shape.vocab_size, shape.hidden_size, generator=generator).mul_(0.02)
    head = TargetHead(matrix, matrix)
    rule = LossRule.of(config.train, shape.block_size)
    state = StepState(Drafter(shape, seed=config.run.seed), head, rule, slots, CPU, torch.float32)
    state.load(random_features(work, shape, CPU, torch.float32), random_blocks(work, shape, slots))
    state.begin()
    EagerStep(state).run(work.anchors * (shape.block_size - 1), work.anchors)
    loss = float(state.totals[0] / state.totals[1])
    # logits of N(0, 0.02 sqrt(H)) before any training: cross entropy is log V plus half their variance
    assert loss == pytest.approx(math.log(shape.vocab_size) + 0.5 * 0.02**2 * shape.hidden_size, abs=0.1)
    for name, gradient in state.flat.named(state.flat.gradient).items():
        assert torch.isfinite(gradient).all(), name
        assert gradient.abs().max() > 0, name
