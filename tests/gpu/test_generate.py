"""Decoding in captured slots on a GPU: the tokens that eager decoding from a growing cache writes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from answers_doubles import tiny_config, tiny_model, tiny_tokenizer
from draftmill.target.generate import Completion, Sampling, generate_batched

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def _run(model: Any, sampling: Sampling, kept: Any, count: int = 40) -> list[Completion]:
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(1, 60, (count,), generator=generator).tolist()
    prompts = [torch.randint(3, 99, (length,), generator=generator).tolist() for length in lengths]
    found = generate_batched(model, tiny_tokenizer(), prompts, sampling, batch_size=16, kept=kept)
    return sorted(found, key=lambda completion: completion.index)


@pytest.mark.parametrize(("temperature", "top_p"), [(0.0, 1.0), (1.0, 1.0), (0.8, 0.9)])
def test_captured_slots_write_what_joined_rows_write(temperature: float, top_p: float) -> None:
    model = tiny_model(tiny_config(hidden_size=64)).cuda()
    sampling = Sampling(50, temperature=temperature, top_p=top_p, seed=1)
    assert _run(model, sampling, "slots") == _run(model, sampling, "joined")


def test_sliding_layers_in_captured_slots() -> None:
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=99, hidden_size=64, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=1, head_dim=16, sliding_window=8, max_position_embeddings=256, eos_token_id=2,
        pad_token_id=0, layer_types=["sliding_attention", "full_attention"] * 2,
    )  # fmt: skip
    model = Gemma3ForCausalLM(config).eval().cuda()
    assert _run(model, Sampling(30), "slots") == _run(model, Sampling(30), "joined")
