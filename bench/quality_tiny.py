"""A tiny random chat target for bench/quality.py --tiny: every stage runs on it in seconds on a CPU.

Owns its files alone. What comes of it says that the script works, and nothing about any recipe.
"""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def tiny_target(folder: Path) -> Path:
    """The folder with a random Llama of six layers and a tokenizer of one token a character; made once."""
    if (folder / "model.safetensors").exists():
        return folder
    characters = ["\n", *map(chr, range(32, 127))]
    vocabulary = {token: number for number, token in enumerate([*_SPECIAL, *characters])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token=_SPECIAL[0]))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    inner.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        bos_token=_SPECIAL[1],
        eos_token=_SPECIAL[2],
        pad_token=_SPECIAL[2],
        unk_token=_SPECIAL[0],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = _TEMPLATE
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=104,  # a few rows without a token, one of which is the mask token
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0.0, 0.2)
        model.lm_head.weight[2] += 0.5 * model.lm_head.weight[40]  # answers come to an end at times
        model.lm_head.weight[:2] = 0.0
        model.lm_head.weight[99:] = 0.0
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
