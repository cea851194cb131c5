"""Tiny tokenizers and chat templates in the forms that real ones have, for the tests of data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHATML_DEFAULT_SYSTEM = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nBe kind<|im_end|>\n{% endif %}" + CHATML
)
# Leaves out the thinking of turns before the last question, writes an empty one where there is none, knows tools.
THINKING = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.index0 > ns.last %}<think>\n{{ m.reasoning_content or '' }}\n</think>\n\n"
    "{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
# Every header ends alike; the system turn is in the text even when empty.
HEADERS = (
    "<s>{% for m in messages %}<|head|>{{ m.role }}<|/head|>\n\n{{ m.content | trim }}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|head|>assistant<|/head|>\n\n{% endif %}"
)
# No header of its own for the answer, no generation prompt, spaces around it, roles must alternate.
INSTRUCT = (
    "<s>{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %} {{ m.content }}</s>{% endif %}{% endfor %}"
)
# An answer is ended by the next turn's header, the last one by nothing.
OPEN_ENDED = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{{ '' if loop.last else '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
# Channels: thinking is a message of its own, and the last turn ends with another token than earlier ones.
CHANNELS = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% if m.reasoning_content %}"
    "<|start|>assistant<|channel|>thoughts<|message|>{{ m.reasoning_content }}<|end|>{% endif %}"
    "<|start|>assistant<|channel|>final<|message|>{{ m.content }}"
    "{% if loop.last %}<|return|>{% else %}<|end|>{% endif %}"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
# Whatever was thought, in every turn, is left out; the prompt opens the thinking.
FORGETFUL = (
    "{% for m in messages %}{% if m.role == 'user' %}<|user|>{{ m.content }}{% else %}"
    "<|assistant|>{{ m.content.split('</think>')[-1] }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|><think>{% endif %}"
)
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|head|>", "<|/head|>", "<|eot|>", "<s>", "</s>", "[INST]"]
SPECIAL += ["[/INST]", "<|user|>", "<|assistant|>", "<|system|>", "<|tool|>", "<|start|>", "<|end|>", "<|channel|>"]
SPECIAL += ["<|message|>", "<|return|>", "<tool_call>", "</tool_call>", "<think>", "</think>"]
_TEXTS = ["what is the answer to this question, please?", "the answer is seven\n\nand the other one is eleven"] * 4


def byte_level(*, normalizer: bool = False) -> Tokenizer:
    """As in GPT-2, Qwen and SmolLM: every byte has a token; spaces belong to the word that follows."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    if normalizer:
        tokenizer.normalizer = normalizers.NFC()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=[],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXTS, trainer)
    return tokenizer


def metaspace() -> Tokenizer:
    """As in Llama 2: words carry their leading space as a mark, and no token is a piece of the text's bytes."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="never")
    alphabet = [chr(code) for code in range(10, 127)]
    trainer = trainers.BpeTrainer(
        vocab_size=220, special_tokens=["<unk>"], initial_alphabet=[*alphabet, "\u2581"], show_progress=False
    )
    tokenizer.train_from_iterator(_TEXTS, trainer)
    return tokenizer


def save_target(
    folder: Path,
    template: str | None = CHATML,
    *,
    tokenizer: Tokenizer | None = None,
    eos: str = "<|im_end|>",
    stops: list[str] | None = None,
) -> Path:
    """A folder with a tokenizer alone, as `prepare` needs of a target."""
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer or byte_level(), eos_token=eos)
    fast.add_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    fast.chat_template = template
    fast.save_pretrained(folder)
    if stops is not None:
        ids = fast.convert_tokens_to_ids(stops)
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    return folder


def chat(*turns: str, system: str | None = None) -> list[dict[str, Any]]:
    """Messages, user and assistant in turn."""
    messages = [{"role": "system", "content": system}] if system is not None else []
    roles = ("user", "assistant")
    return [*messages, *({"role": roles[index % 2], "content": text} for index, text in enumerate(turns))]


def write_lines(path: Path, rows: list[Any]) -> Path:
    """JSON lines; a row that is bytes is written as it is."""
    lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return path
