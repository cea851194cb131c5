"""The z-lab layout of a drafter's config.json, both ways: what SGLang, vLLM and z-lab's own package read.

Owns the names of that layout. Weights need no mapping: their names inside are the upstream ones. What the network does
not implement is refused by name, never approximated.

Source: z-lab/dflash@44947fb dflash/model.py; sgl-project/sglang@00731f0 speculative/dflash_utils.py;
vllm-project/vllm@036a00d model_executor/models/qwen3_dflash.py.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from draftmill.drafter.shape import DrafterShape, default_layer_ids, rope_of
from draftmill.errors import InputError

ARCHITECTURE = "DFlashDraftModel"

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "use_swa": (None, False),
    "swa_window_size": (None,),
    "sample_from_anchor": (None, False),
    "shift_label": (None, False),
    "projector_type": (None, "dflash"),
    "pure_draft_prefix_len": (None, 0),
    "attention_mode": (None, "gqa"),
    "attention_sink_bias": (None, False),
    "attention_value_scale": (None, 1.0),
    "use_aux_hidden_state": (None, True),
    "conv_kernel_size": (None, 0),
    "conv_group_size": (None, 0),
    "selector_rank": (None, 0),
    "selector_top_k": (None, 0),
}
"""Keys, at the top or in dflash_config, that stand for another network or block layout, and the values that do not."""

_SHIFTS = ("sample_from_anchor", "shift_label")
"""Those by which a slot stands for another token than here."""

ANCHOR_SLOT_GIVEN = "; give one whose slot k stands for the k-th token after the anchor"
"""What errors say to do about them."""

_READ = (
    "mask_token_id",
    "mask_token",
    "target_layer_ids",
    "block_size",
    "num_target_layers",
    "input_embedding_scale",
    "output_multiplier",
    "final_logit_softcapping",
    "causal",
)


def to_config(shape: DrafterShape, dtype: str) -> dict[str, Any]:
    """The config.json of a drafter whose weights are stored in `dtype` ("bfloat16", "float16" or "float32")."""
    return {
        "architectures": [ARCHITECTURE],
        **transformer_config(shape),
        "block_size": shape.block_size,
        "num_target_layers": shape.num_target_layers,
        "dflash_config": {
            "mask_token_id": shape.mask_token_id,
            "target_layer_ids": list(shape.target_layer_ids),
            "block_size": shape.block_size,
            **scales(shape),
        },
        "dtype": dtype,
    }


def scales(shape: DrafterShape) -> dict[str, float]:
    """What a target of another family multiplies or bounds, under its names here; empty for a plain one."""
    found: dict[str, float] = {}
    if shape.embedding_scale != 1.0:
        found["input_embedding_scale"] = shape.embedding_scale
    if shape.logit_scale != 1.0:
        found["output_multiplier"] = shape.logit_scale
    if shape.logit_softcap is not None:
        found["final_logit_softcapping"] = shape.logit_softcap
    return found


def transformer_config(shape: DrafterShape) -> dict[str, Any]:
    """The part that both layouts share: the network as a Qwen3 configuration, read alike by transformers 4 and 5.

    The rotary embedding is written in its new form (rope_parameters) and its old (rope_theta, rope_scaling,
    partial_rotary_factor); readers of either find the same values.
    """
    rope = dict(shape.rope)
    old_form = {key: value for key, value in rope.items() if key not in ("rope_theta", "partial_rotary_factor")}
    partial = rope.get("partial_rotary_factor")
    eos = shape.eos_token_id
    return {
        "model_type": "qwen3",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": shape.rms_norm_eps,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "max_position_embeddings": shape.max_position_embeddings,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": None if rope["rope_type"] == "default" else old_form,
        "rope_parameters": rope,
        **({} if partial is None else {"partial_rotary_factor": partial}),
        "layer_types": [
            "sliding_attention" if layer in shape.sliding_layers else "full_attention"
            for layer in range(shape.num_layers)
        ],
        "sliding_window": shape.sliding_window,
        "use_sliding_window": bool(shape.sliding_layers),
        "max_window_layers": shape.num_layers,
        "tie_word_embeddings": False,
        "use_cache": True,
        "bos_token_id": shape.bos_token_id,
        "eos_token_id": list(eos) if isinstance(eos, tuple) else eos,
        "pad_token_id": shape.pad_token_id,
    }


def from_config(config: dict[str, Any], where: str) -> DrafterShape:
    """The shape that a published config.json describes. `where` names it in errors.

    Raises InputError for another architecture, for anything the network does not implement, and for what is missing.
    """
    names = config.get("architectures") or []
    if ARCHITECTURE not in names:
        raise InputError(
            f"{where} is of architecture {', '.join(names) or 'unknown'}; a DFlash drafter's is {ARCHITECTURE}"
        )
    own = config.get("dflash_config") or {}
    for key, value in own.items():
        if key not in _READ:
            _refuse_another_kind(f"{where}: dflash_config.", key, value)
    for key in _NEUTRAL:
        _refuse_another_kind(f"{where}: ", key, config.get(key))

    def either(key: str) -> Any:
        value = own.get(key)
        return config.get(key) if value is None else value

    taps = either("target_layer_ids")
    num_target_layers = need(either("num_target_layers"), "num_target_layers", where)
    softcap = either("final_logit_softcapping")
    shape_values = transformer_values(config, where, causal=either("causal"))
    if taps is None:  # older checkpoints leave them to the rule
        taps = default_layer_ids(num_target_layers, shape_values["num_layers"])
    return DrafterShape(
        **shape_values,
        block_size=need(either("block_size"), "block_size", where),
        mask_token_id=need(either("mask_token_id"), "mask_token_id", where),
        target_layer_ids=tuple(taps),
        num_target_layers=num_target_layers,
        embedding_scale=float(either("input_embedding_scale") or 1.0),
        logit_scale=float(either("output_multiplier") or 1.0),
        logit_softcap=float(softcap) if softcap else None,
    )


def _refuse_another_kind(where: str, key: str, value: Any) -> None:
    """Raise InputError for a value that stands for another network or block layout; the key follows `where` at once."""
    if value in _NEUTRAL.get(key, ()):
        return
    wanted = ANCHOR_SLOT_GIVEN if key in _SHIFTS else ""
    raise InputError(f"{where}{key} = {value!r} stands for a drafter that is not implemented{wanted}")


def need(value: Any, key: str, where: str) -> Any:
    """The value, or an InputError that names its key where there is none."""
    if value is None:
        raise InputError(f"{where} has no {key}; add it there")
    return value


def transformer_values(config: dict[str, Any], where: str, causal: bool | None = None) -> dict[str, Any]:
    """The shape's fields that `transformer_config` writes, read back from a configuration of either layout.

    Raises InputError for biases, another activation, quantized weights, an interleaved or nested rotary embedding, and
    for attention that is neither bidirectional in full layers nor causal in sliding ones.
    """

    def require(key: str, *values: Any) -> None:
        if config.get(key, values[0]) not in values:
            raise InputError(f"{where}: {key} = {config[key]!r} is not implemented; only {values[0]!r} is")

    require("hidden_act", "silu")
    require("attention_bias", False, None)
    require("quantization_config", None)
    require("is_neox_style", True, None)
    require("rope_is_neox_style", True, None)
    require("target_hidden_size", config.get("hidden_size"), None)
    require("draft_vocab_size", config.get("vocab_size"), None)
    heads = need(config.get("num_attention_heads"), "num_attention_heads", where)
    hidden = need(config.get("hidden_size"), "hidden_size", where)
    eos = config.get("eos_token_id")
    return {
        "hidden_size": hidden,
        "intermediate_size": need(config.get("intermediate_size"), "intermediate_size", where),
        "num_layers": need(config.get("num_hidden_layers"), "num_hidden_layers", where),
        "num_heads": heads,
        "num_kv_heads": config.get("num_key_value_heads") or heads,
        "head_dim": config.get("head_dim") or hidden // heads,
        "rms_norm_eps": config.get("rms_norm_eps", 1e-6),
        "vocab_size": need(config.get("vocab_size"), "vocab_size", where),
        "rope": _rope(config, where),
        "max_position_embeddings": need(config.get("max_position_embeddings"), "max_position_embeddings", where),
        **_sliding(config, where, config.get("is_causal") if causal is None else causal),
        "bos_token_id": config.get("bos_token_id"),
        "eos_token_id": tuple(eos) if isinstance(eos, list) else eos,
        "pad_token_id": config.get("pad_token_id"),
    }


def _rope(config: dict[str, Any], where: str) -> dict[str, Any]:
    forms = [config[key] for key in ("rope_parameters", "rope_scaling") if config.get(key)]
    if any(isinstance(value, dict) for form in forms for value in form.values()):
        raise InputError(f"{where}: a rotary embedding for each kind of layer is not implemented")
    ropes = []
    for form in forms or [{}]:
        rope = rope_of(SimpleNamespace(**{**config, "rope_parameters": form, "rope_scaling": None}))
        if rope["rope_type"] in ("llama3", "yarn"):
            # transformers fills it in alike
            rope.setdefault("original_max_position_embeddings", config.get("max_position_embeddings"))
        ropes.append(rope)
    if any(rope != ropes[0] for rope in ropes):
        raise InputError(f"{where}: rope_parameters and rope_scaling disagree: {ropes[0]} and {ropes[1]}")
    return ropes[0]


def _sliding(config: dict[str, Any], where: str, causal: bool | None) -> dict[str, Any]:
    num_layers = config.get("num_hidden_layers")
    types = config.get("layer_types")
    if types is None:
        if config.get("use_sliding_window"):
            raise InputError(f"{where}: use_sliding_window without layer_types does not say which layers slide")
        types = ["full_attention"] * (num_layers or 0)
    if len(types) != num_layers or set(types) - {"full_attention", "sliding_attention"}:
        raise InputError(
            f"{where}: layer_types must name full_attention or sliding_attention for each of {num_layers} layers, "
            f"got {types}"
        )
    sliding = tuple(layer for layer, kind in enumerate(types) if kind == "sliding_attention")
    if sliding and not (config.get("use_sliding_window") and config.get("sliding_window")):
        raise InputError(f"{where}: layer_types has sliding layers, but no sliding_window is in use")
    if causal is not None and any(causal != (layer in sliding) for layer in range(len(types))):
        raise InputError(
            f"{where}: causal = {causal} is not implemented; here sliding layers are causal and full ones are not"
        )
    return {"sliding_layers": sliding, "sliding_window": config.get("sliding_window") if sliding else None}
