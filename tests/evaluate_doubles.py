"""Tiny targets and drafters whose drafts are known, for the tests of decoding."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from draftmill.checkpoint import zlab
from draftmill.config import DrafterConfig
from draftmill.drafter.attention import dense_attention
from draftmill.drafter.cache import DrafterCache
from draftmill.drafter.loss import LossRule, block_tokens, scored_rows
from draftmill.drafter.network import Drafter
from draftmill.drafter.shape import DrafterShape, shape_for
from draftmill.records import Blocks
from draftmill.target.model import Target

COMMON: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 62,
    "eos_token_id": 63,
    "pad_token_id": 63,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"head_dim": 16},
    "mistral": {"sliding_window": 6, "head_dim": 8},
    "gemma3_text": {
        "head_dim": 16,
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "tie_word_embeddings": False,
    },
    "gpt_neox": {"num_key_value_heads": None},
    "qwen3_next": {
        "head_dim": 16,
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "num_experts": 0,
        "mlp_only_layers": [0, 1, 2, 3],
        "decoder_sparse_step": 1,
    },
}


def tiny_target(family: str = "qwen3", *, seed: int = 0, **changes: Any) -> Target:
    """A random target of a family in float32; weights large enough that its greedy output is not one token for ever."""
    facts = {
        key: value for key, value in {**COMMON, **FAMILIES.get(family, {}), **changes}.items() if value is not None
    }
    config = AutoConfig.for_model(family, **facts)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=0.1 if "embed" in name else 0.4)
    return Target(model)


def tiny_shape(
    target: Target, block_size: int = 4, *, layer_ids: tuple[int, ...] = (0, 2), mask_token_id: int = 5, **changes: Any
) -> DrafterShape:
    config = DrafterConfig(**{"num_layers": 2, **changes}, target_layer_ids=list(layer_ids), block_size=block_size)
    return shape_for(target.config, config, mask_token_id=mask_token_id)


def random_drafter(target: Target, block_size: int = 4, *, seed: int = 1, **changes: Any) -> Drafter:
    """A drafter with random weights: most of its drafts are refused."""
    torch.manual_seed(seed)
    drafter = Drafter(tiny_shape(target, block_size, **changes)).eval()
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=0.15)
    return drafter


class KnowingDrafter(Drafter):
    """Drafts known tokens by position: slot k of a block at position p is given `known[p + k]`, right or wrong."""

    def __init__(self, target: Target, block_size: int, known: dict[int, int]) -> None:
        super().__init__(tiny_shape(target, block_size))
        places = torch.zeros(1024, dtype=torch.int64)
        places[list(known)] = torch.tensor(list(known.values()))
        self.register_buffer("known", places)
        head_VH = target.head().head_VH.double()
        # Rows whose logits peak at their own token: the head's pseudo-inverse, which may not separate all of them.
        rows = torch.linalg.pinv(head_VH).t()
        peaked = (50.0 * rows).float()
        assert torch.equal((peaked @ head_VH.float().t()).argmax(dim=-1).cpu(), torch.arange(head_VH.shape[0]))
        self.register_buffer("rows_VH", peaked)

    def draft(self, cache: DrafterCache, embeddings_KH: torch.Tensor, positions_K: torch.Tensor) -> torch.Tensor:
        return self.rows_VH[self.known[positions_K]]


def reference_greedy(target: Target, prompt: list[int], count: int) -> list[int]:
    """The target's own greedy continuation, without any cache: the whole text anew for every token."""
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(count):
            ids = torch.tensor([tokens], device=target.device)
            logits = target.model(input_ids=ids, use_cache=False).logits[0, -1]
            tokens.append(int(logits.argmax()))
    return tokens[len(prompt) :]


def overfit(drafter: Drafter, target: Target, tokens: list[int], first: int, steps: int) -> None:
    """Train a drafter on one text until it knows it: every position from `first` on is an anchor, full batch."""
    shape, head = drafter.shape, target.head()
    last = len(tokens) - shape.block_size
    anchors = list(range(first, last + 1))
    blocks = Blocks.empty(len(tokens), len(anchors))
    blocks.tokens_T.copy_(torch.tensor(tokens))
    blocks.positions_T.copy_(torch.arange(len(tokens)))
    blocks.anchors_A.copy_(torch.tensor(anchors))
    blocks.slots_A.fill_(shape.block_size - 1)
    with torch.no_grad(), target.taps(shape.target_layer_ids) as taps:
        target.forward_layers(torch.tensor([tokens]))
        features_TF = taps.concatenated()[0]
    ids, positions = block_tokens(blocks, shape.block_size, shape.mask_token_id)
    rows, labels, _ = scored_rows(blocks, shape.block_size, LossRule(gamma=4.0))
    attention = dense_attention(shape, blocks)
    embeddings = head.embed(ids)
    optimizer = torch.optim.Adam(drafter.parameters(), lr=3e-3)
    for _ in range(steps):
        hidden = drafter(features_TF, blocks.positions_T, embeddings, positions, attention)
        loss = torch.nn.functional.cross_entropy(head.logits(hidden[rows]), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


THINKING_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}assistant {% if enable_thinking is defined and not enable_thinking %}w3 {% endif %}"
    "{% endif %}"
)
PLAIN_TEMPLATE = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}assistant "


def tiny_tokenizer(template: str | None = PLAIN_TEMPLATE) -> PreTrainedTokenizerFast:
    """Words w0..w59, the three roles and <end>: 64 ids, those of a tiny target."""
    words = {f"w{index}": index for index in range(60)} | {"user": 60, "assistant": 61, "system": 62, "<end>": 63}
    inner = Tokenizer(WordLevel(words, unk_token="w0"))
    inner.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>", unk_token="w0")
    tokenizer.chat_template = template
    return tokenizer


def save_pair(folder: Path, target: Target, drafter: Drafter, template: str | None = PLAIN_TEMPLATE) -> tuple[str, str]:
    """A target and a drafter in z-lab layout on the disk, as others publish them; the two folders."""
    where_target, where_drafter = folder / "target", folder / "drafter"
    target.model.save_pretrained(where_target)
    tiny_tokenizer(template).save_pretrained(where_target)
    where_drafter.mkdir()
    save_file(
        {name: tensor.contiguous() for name, tensor in drafter.state_dict().items()},
        where_drafter / "model.safetensors",
    )
    (where_drafter / "config.json").write_text(json.dumps(zlab.to_config(drafter.shape, "float32")))
    return str(where_target), str(where_drafter)
