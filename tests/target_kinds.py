"""Tiny random targets of every common kind, built from transformers' own configurations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf

from draftmill.target.model import Target

VOCABULARY = 97
COMMON: dict[str, Any] = dict(
    vocab_size=VOCABULARY,
    hidden_size=32,
    num_hidden_layers=8,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
    initializer_range=0.3,
)
DENSE = dict(COMMON, intermediate_size=48, head_dim=16)
WINDOW = 6
VISION = dict(
    hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14
)
LINEAR = dict(
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
    linear_conv_kernel_dim=3,
)


def _llama() -> Any:
    return hf.LlamaForCausalLM(hf.LlamaConfig(**DENSE))


def _qwen3() -> Any:
    return hf.Qwen3ForCausalLM(hf.Qwen3Config(**DENSE, tie_word_embeddings=True))


def _qwen3_sliding() -> Any:
    kinds = ["sliding_attention" if i % 2 else "full_attention" for i in range(8)]
    config = hf.Qwen3Config(**DENSE, use_sliding_window=True, sliding_window=WINDOW, layer_types=kinds)
    config.sliding_window = WINDOW
    return hf.Qwen3ForCausalLM(config)


def _mistral() -> Any:
    return hf.MistralForCausalLM(hf.MistralConfig(**DENSE, sliding_window=WINDOW))


def _qwen3_moe() -> Any:
    experts = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, decoder_sparse_step=1)
    return hf.Qwen3MoeForCausalLM(hf.Qwen3MoeConfig(**DENSE, **experts))


def _gemma2() -> Any:
    bounds = dict(attn_logit_softcapping=20.0, final_logit_softcapping=15.0)
    return hf.Gemma2ForCausalLM(hf.Gemma2Config(**DENSE, sliding_window=WINDOW, query_pre_attn_scalar=16, **bounds))


def _gemma3() -> Any:
    text = dict(DENSE, sliding_window=WINDOW, query_pre_attn_scalar=16, sliding_window_pattern=3)
    return hf.Gemma3ForCausalLM(hf.Gemma3TextConfig(**text))


def _gemma3_multimodal() -> Any:
    text = dict(DENSE, sliding_window=WINDOW, query_pre_attn_scalar=16)
    config = hf.Gemma3Config(text_config=text, vision_config=VISION, mm_tokens_per_image=4, image_token_index=96)
    return hf.Gemma3ForConditionalGeneration(config)


def _gpt_oss() -> Any:
    experts = dict(num_local_experts=4, num_experts_per_tok=2)
    return hf.GptOssForCausalLM(hf.GptOssConfig(**DENSE, **experts, sliding_window=WINDOW))


def _qwen3_next() -> Any:
    experts = dict(
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=24,
        decoder_sparse_step=1,
    )
    return hf.Qwen3NextForCausalLM(hf.Qwen3NextConfig(**DENSE, **LINEAR, **experts))


def _qwen3_5() -> Any:
    return hf.Qwen3_5ForCausalLM(hf.Qwen3_5TextConfig(**DENSE, **LINEAR))


def _qwen2_5_vl() -> Any:
    text = dict(COMMON, intermediate_size=48, rope_parameters={"mrope_section": [1, 1, 2], "rope_type": "default"})
    vision = dict(
        depth=1, hidden_size=16, intermediate_size=16, num_heads=2, out_hidden_size=32, fullatt_block_indexes=[0]
    )
    config = hf.Qwen2_5_VLConfig(text_config=text, vision_config=vision)
    return hf.Qwen2_5_VLForConditionalGeneration(config)


def _gpt2() -> Any:
    config = hf.GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=256,
        n_embd=32,
        n_layer=8,
        n_head=4,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.3,
    )
    return hf.GPT2LMHeadModel(config)


def _granite() -> Any:
    scales = dict(embedding_multiplier=3.0, logits_scaling=2.5, residual_multiplier=0.5, attention_multiplier=0.2)
    return hf.GraniteForCausalLM(hf.GraniteConfig(**{k: v for k, v in DENSE.items() if k != "head_dim"}, **scales))


def _cohere2() -> Any:
    return hf.Cohere2ForCausalLM(hf.Cohere2Config(**DENSE, sliding_window=WINDOW, logit_scale=0.25))


KINDS: dict[str, Callable[[], Any]] = {
    "llama": _llama,
    "qwen3": _qwen3,
    "qwen3-sliding": _qwen3_sliding,
    "mistral": _mistral,
    "qwen3-moe": _qwen3_moe,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "gemma3-multimodal": _gemma3_multimodal,
    "gpt-oss": _gpt_oss,
    "qwen3-next": _qwen3_next,
    "qwen3.5": _qwen3_5,
    "qwen2.5-vl": _qwen2_5_vl,
    "gpt2": _gpt2,
    "granite": _granite,
    "cohere2": _cohere2,
}


def tiny_model(kind: str) -> Any:
    """A random model of this kind, always the same, its norms' weights not all alike."""
    torch.manual_seed(0)
    model = KINDS[kind]().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 and "norm" in name:
                parameter.add_(0.3 * torch.rand_like(parameter))
            if name.endswith("sinks"):
                parameter.copy_(torch.randn_like(parameter))
    return model


def tiny_target(kind: str) -> Target:
    """The same, as a target."""
    return Target(tiny_model(kind))


def random_tokens(*shape: int, seed: int = 0) -> torch.Tensor:
    """Token ids that no configuration takes for an image or padding."""
    return torch.randint(3, 90, shape, generator=torch.Generator().manual_seed(seed))
