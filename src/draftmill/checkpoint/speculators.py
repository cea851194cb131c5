"""The speculators layout of a drafter's config.json, both ways: what vLLM serves by the drafter's name alone.

Owns the names of that layout: the network nested under transformer_layer_config, and tapped layers counted from 1
(aux_hidden_state_layer_ids = ids + 1). Weights need no mapping.

Source: speculators 0.9.0 models/dflash/config.py and convert/dflash/converter.py;
vllm-project/vllm transformers_utils/configs/speculators.
"""

from __future__ import annotations

from typing import Any

from draftmill.checkpoint.zlab import (
    ANCHOR_SLOT_GIVEN,
    ARCHITECTURE,
    need,
    scales,
    transformer_config,
    transformer_values,
)
from draftmill.drafter.shape import DrafterShape
from draftmill.errors import InputError

LAYOUT_VERSION = "0.9.0"

VERIFIER_TENSORS = frozenset(
    {"embed_tokens.weight", "lm_head.weight", "verifier_lm_head.weight", "verifier_norm.weight"}
)
"""Copies of the target's own tensors that older folders of this layout hold; they are not the drafter's."""


def to_config(shape: DrafterShape, dtype: str, target: str, target_architectures: list[str]) -> dict[str, Any]:
    """The config.json of a drafter for `target` (a hub id or folder, which the reader loads beside it).

    Raises InputError for what the layout has no place for: scaled embeddings (the Gemma family).
    """
    if shape.embedding_scale != 1.0:
        raise InputError(
            f"the speculators layout can't say that embeddings are scaled by {shape.embedding_scale:g}, as this "
            "target's are; use --layout zlab"
        )
    return {
        "architectures": [ARCHITECTURE],
        "speculators_model_type": "dflash",
        "speculators_version": LAYOUT_VERSION,
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": shape.block_size - 1,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {"name_or_path": target, "architectures": target_architectures},
        },
        "transformer_layer_config": transformer_config(shape),
        "draft_vocab_size": shape.vocab_size,
        "block_size": shape.block_size,
        "aux_hidden_state_layer_ids": [layer + 1 for layer in shape.target_layer_ids],
        "mask_token_id": shape.mask_token_id,
        "sample_from_anchor": False,
        "sliding_window_non_causal": False,
        "tie_word_embeddings": False,
        "dtype": dtype,
        # not of the layout; kept for the way back
        "num_target_layers": shape.num_target_layers,
        **scales(shape),
    }


def from_config(config: dict[str, Any], where: str, num_target_layers: int | None = None) -> DrafterShape:
    """The shape that a published config.json describes. `where` names it in errors.

    The layout does not hold the target's number of layers; a folder exported here does, for others give it. Raises
    InputError for another kind of speculator, for anything the network does not implement, and for what is missing.
    """
    kind = config.get("speculators_model_type")
    if kind != "dflash":
        raise InputError(f"{where} is a speculator of type {kind!r}; only 'dflash' can be read")
    for key in ("sample_from_anchor", "sliding_window_non_causal"):
        if config.get(key):
            wanted = ANCHOR_SLOT_GIVEN if key == "sample_from_anchor" else "; give one without it"
            raise InputError(f"{where}: {key} = true stands for another block layout, which is not implemented{wanted}")
    network = need(config.get("transformer_layer_config"), "transformer_layer_config", where)
    if config.get("draft_vocab_size") != network.get("vocab_size"):
        raise InputError(
            f"{where} drafts over {config.get('draft_vocab_size')} of the target's {network.get('vocab_size')} tokens; "
            "a reduced vocabulary is not implemented"
        )
    layers = config.get("num_target_layers", num_target_layers)
    softcap = config.get("final_logit_softcapping")
    return DrafterShape(
        **transformer_values({**network, "target_hidden_size": config.get("target_hidden_size")}, where),
        block_size=need(config.get("block_size"), "block_size", where),
        mask_token_id=need(config.get("mask_token_id"), "mask_token_id", where),
        target_layer_ids=tuple(
            i - 1 for i in need(config.get("aux_hidden_state_layer_ids"), "aux_hidden_state_layer_ids", where)
        ),
        num_target_layers=need(layers, "num_target_layers", where),
        logit_scale=float(config.get("output_multiplier") or 1.0),
        logit_softcap=float(softcap) if softcap else None,
    )
