"""A drafter's shape from targets of every kind: heads, rotary embedding (case B11), scales; what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf

from draftmill.config import DrafterConfig
from draftmill.drafter.rope import inverse_frequencies
from draftmill.drafter.shape import shape_for
from draftmill.errors import InputError
from draftmill.target.attention_check import check_causal
from draftmill.target.model import Target
from target_kinds import DENSE, KINDS, LINEAR, VOCABULARY, tiny_model

torch.set_num_threads(1)

PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
GEMMA = {"rope_type": "default", "rope_theta": 1000000.0}
QUARTER = {**PLAIN, "partial_rotary_factor": 0.25}
ROOT = 32**0.5
EXPECTED: dict[str, tuple[int, int, int, dict[str, Any], float, float, float | None]] = {
    # heads, key/value heads, head size, rotary, factor on embeddings, factor on logits, bound on logits
    "llama": (4, 2, 16, PLAIN, 1.0, 1.0, None),
    "qwen3": (4, 2, 16, PLAIN, 1.0, 1.0, None),
    "qwen3-sliding": (4, 2, 16, PLAIN, 1.0, 1.0, None),
    "mistral": (4, 2, 16, PLAIN, 1.0, 1.0, None),
    "qwen3-moe": (4, 2, 16, PLAIN, 1.0, 1.0, None),
    "gemma2": (4, 2, 16, PLAIN, ROOT, 1.0, 15.0),
    "gemma3": (4, 2, 16, GEMMA, ROOT, 1.0, None),
    "gemma3-multimodal": (4, 2, 16, GEMMA, ROOT, 1.0, None),
    "gpt-oss": (
        4,
        2,
        16,
        {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        1.0,
        1.0,
        None,
    ),
    "qwen3-next": (4, 2, 16, QUARTER, 1.0, 1.0, None),
    "qwen3.5": (4, 2, 16, QUARTER, 1.0, 1.0, None),
    "qwen2.5-vl": (4, 2, 8, GEMMA, 1.0, 1.0, None),
    "gpt2": (4, 4, 8, PLAIN, 1.0, 1.0, None),
    "granite": (4, 2, 8, PLAIN, 3.0, 0.4, None),
    "cohere2": (4, 2, 16, PLAIN, 1.0, 0.25, None),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_shape_is_the_targets(kind: str) -> None:
    shape = shape_for(tiny_model(kind).config, DrafterConfig(num_taps=3), mask_token_id=96)
    assert (
        shape.num_heads,
        shape.num_kv_heads,
        shape.head_dim,
        shape.rope,
        pytest.approx(shape.embedding_scale),
        shape.logit_scale,
        shape.logit_softcap,
    ) == EXPECTED[kind]
    assert (shape.hidden_size, shape.vocab_size, shape.num_target_layers) == (32, VOCABULARY, 8)
    assert shape.intermediate_size == (128 if kind == "gpt2" else 48)
    assert (shape.max_position_embeddings, shape.target_layer_ids) == (256, (1, 3, 5))


def test_the_share_of_a_head_that_turns_is_the_targets_or_all_of_it() -> None:
    config = hf.Qwen3_5TextConfig(**DENSE, **LINEAR)
    own, full = (shape_for(config, DrafterConfig(num_taps=3, rotary=rotary), 96) for rotary in ("target", "full"))
    assert inverse_frequencies(own)[0].tolist() == pytest.approx([1.0, 0.01])  # 4 of 16 dimensions
    assert len(inverse_frequencies(full)[0]) == 8
    assert full.rope == PLAIN
    plain = hf.Qwen3Config(**DENSE)
    assert shape_for(plain, DrafterConfig(num_taps=3, rotary="full"), 96).rope == PLAIN


def test_the_last_layer_is_not_tapped() -> None:
    with pytest.raises(InputError, match=r"must lie in 0\.\.6 \(the last layer is not tapped\), got \[1, 7\]"):
        shape_for(hf.Qwen3Config(**DENSE), DrafterConfig(target_layer_ids=[1, 7]), 96)
    with pytest.raises(InputError, match="the target has 8 layers, too few for 6 taps"):
        shape_for(hf.Qwen3Config(**DENSE), DrafterConfig(num_taps=6), 96)


def _bert() -> Any:
    return hf.BertLMHeadModel(
        hf.BertConfig(vocab_size=97, hidden_size=32, num_hidden_layers=4, num_attention_heads=4, intermediate_size=32)
    )


def _bart() -> Any:
    return hf.BartForCausalLM(
        hf.BartConfig(
            vocab_size=97,
            d_model=32,
            decoder_layers=3,
            encoder_layers=2,
            decoder_attention_heads=2,
            encoder_attention_heads=2,
            decoder_ffn_dim=32,
            encoder_ffn_dim=32,
        )
    )


def _t5() -> Any:
    return hf.T5ForConditionalGeneration(
        hf.T5Config(vocab_size=97, d_model=32, num_layers=3, num_heads=2, d_ff=32, d_kv=8)
    )


def test_layers_that_cant_be_found_are_refused_by_name() -> None:
    with pytest.raises(InputError, match=r"architecture BartForCausalLM can't be found \(2 expected\)"):
        Target(_bart())
    with pytest.raises(InputError, match="T5ForConditionalGeneration has an encoder"):
        Target(_t5())


def test_a_target_that_sees_what_follows_is_refused_by_name() -> None:
    with pytest.raises(InputError, match="BertLMHeadModel is not causal"):
        check_causal(Target(_bert()), (0, 1))


def test_an_lm_head_with_a_bias_or_quantized_is_refused() -> None:
    model = tiny_model("llama")
    model.lm_head = torch.nn.Linear(32, 97, bias=True)
    with pytest.raises(InputError, match="LM head of LlamaForCausalLM has a bias"):
        Target(model).head()
    model = tiny_model("llama")
    model.lm_head.weight = torch.nn.Parameter(torch.zeros(97, 32, dtype=torch.int8), requires_grad=False)
    with pytest.raises(InputError, match=r"LM head of LlamaForCausalLM is quantized \(torch.int8"):
        Target(model).head()
    target = Target(tiny_model("llama"))
    target.cut_after(3)
    with pytest.raises(InputError, match="LlamaForCausalLM has no LM head"):
        target.head()
