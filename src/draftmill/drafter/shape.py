"""What a drafter is, in numbers: everything its weights' shapes, its masks and its served config depend on.

JSON-able. Derives the default shape from a target's Hugging Face configuration; refuses what the network
does not implement, and never approximates it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from draftmill.config import DrafterConfig
from draftmill.errors import InputError
from draftmill.target.head import embedding_scale, logit_scale

IMPLEMENTED_ROPE = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class DrafterShape:
    """Shapes and constants of one drafter; sizes in elements, positions in tokens. Layer ids are 0-based."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    vocab_size: int
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int
    rope: dict[str, Any]
    max_position_embeddings: int
    sliding_window: int | None = None
    sliding_layers: tuple[int, ...] = ()
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None
    pad_token_id: int | None = None

    def __post_init__(self) -> None:
        check_rope(self.rope)
        if self.num_heads % self.num_kv_heads:
            raise InputError(
                f"a drafter's heads must be a multiple of its key/value heads, got {self.num_heads}/{self.num_kv_heads}"
            )
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise InputError(
                f"mask token id {self.mask_token_id} lies outside the target's embedding of {self.vocab_size} rows; "
                "set drafter.mask_token_id to a row the data never uses"
            )
        check_layer_ids(self.target_layer_ids, self.num_target_layers)

    @property
    def feature_size(self) -> int:
        """Width of a context token's features: taps x hidden size."""
        return len(self.target_layer_ids) * self.hidden_size

    def window(self, layer: int) -> int | None:
        """The sliding window of a drafter layer, or None where it sees its whole document."""
        return self.sliding_window if layer in self.sliding_layers else None

    def to_dict(self) -> dict[str, Any]:
        """JSON-able mapping that `from_dict` reads back to an equal shape."""
        return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()}

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> DrafterShape:
        """Inverse of `to_dict`. Raises InputError for unknown or missing keys."""
        names = {field.name for field in fields(cls)}
        if unknown := sorted(set(raw) - names):
            raise InputError(f"a drafter's shape has no {', '.join(unknown)}")
        values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in raw.items()}
        try:
            return cls(**values)
        except TypeError as error:
            raise InputError(f"a drafter's shape is incomplete: {error}") from None


def default_layer_ids(num_target_layers: int, num_taps: int) -> tuple[int, ...]:
    """Tapped layers spread over the target: one in the middle, else from layer 1 to the third from the end.

    Source: z-lab/dflash@44947fb dflash/model.py, build_target_layer_ids. Raises InputError for too few layers.
    """
    if num_taps > max(1, num_target_layers - 3):
        raise InputError(
            f"the target has {num_target_layers} layers, too few for {num_taps} taps "
            f"(at most {max(1, num_target_layers - 3)}); lower drafter.num_taps or name drafter.target_layer_ids"
        )
    if num_taps == 1:
        return (num_target_layers // 2,)
    return tuple(round(1 + j * (num_target_layers - 4) / (num_taps - 1)) for j in range(num_taps))


def check_layer_ids(layer_ids: tuple[int, ...], num_target_layers: int) -> None:
    """Raise InputError unless the ids are distinct, ascending layers of the target."""
    if not layer_ids or list(layer_ids) != sorted(set(layer_ids)):
        raise InputError(f"tapped layer ids must be distinct and ascending, got {list(layer_ids)}; name others")
    # The last layer's output is read before the final norm by some engines and after it by others.
    if layer_ids[0] < 0 or layer_ids[-1] >= num_target_layers - 1:
        raise InputError(
            f"tapped layer ids must lie in 0..{num_target_layers - 2} (the last layer is not tapped), "
            f"got {list(layer_ids)}; name others"
        )


def check_rope(rope: dict[str, Any]) -> None:
    """Raise InputError for a rotary embedding that the network does not implement."""
    kind = rope.get("rope_type", "default")
    if kind not in IMPLEMENTED_ROPE:
        raise InputError(
            f"the target's rotary embedding is of type {kind!r}; the drafter implements {', '.join(IMPLEMENTED_ROPE)}: "
            "take a target with one of these"
        )
    if rope.get("rope_theta") is None:
        raise InputError("the target's configuration gives no rope_theta for its rotary embedding")


def text_config(config: Any) -> Any:
    """The language model's own configuration, also where it is nested in a multimodal one."""
    getter = getattr(config, "get_text_config", None)
    return getter() if getter is not None else config


def shape_for(config: Any, drafter: DrafterConfig, mask_token_id: int) -> DrafterShape:
    """The drafter's shape for a target's Hugging Face configuration and the run's drafter section.

    Heads, head size, MLP width, rotary embedding and position limit are the target's. Raises InputError for a target
    without the needed facts, with too few layers, or with a rotary embedding that is not implemented.
    """
    text = text_config(config)
    name = getattr(text, "model_type", type(text).__name__)

    def need(key: str) -> Any:
        value = getattr(text, key, None)
        if value is None:
            raise InputError(f"the configuration of target type {name!r} has no {key}; the drafter needs it")
        return value

    num_target_layers = need("num_hidden_layers")
    heads = need("num_attention_heads")
    hidden = need("hidden_size")
    layer_ids = (
        tuple(drafter.target_layer_ids)
        if drafter.target_layer_ids is not None
        else default_layer_ids(num_target_layers, drafter.num_taps)
    )
    eos = getattr(text, "eos_token_id", None)
    return DrafterShape(
        hidden_size=hidden,
        intermediate_size=_mlp_width(text, hidden),
        num_layers=drafter.num_layers,
        num_heads=heads,
        num_kv_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=getattr(text, "head_dim", None) or hidden // heads,
        rms_norm_eps=float(getattr(text, "rms_norm_eps", None) or getattr(text, "layer_norm_eps", None) or 1e-6),
        vocab_size=need("vocab_size"),
        block_size=drafter.block_size,
        mask_token_id=mask_token_id,
        target_layer_ids=layer_ids,
        num_target_layers=num_target_layers,
        rope=_rope_for(text, drafter),
        max_position_embeddings=need("max_position_embeddings"),
        sliding_window=drafter.sliding_window,
        sliding_layers=tuple(sorted(set(drafter.sliding_layers))),
        embedding_scale=embedding_scale(text),
        logit_scale=logit_scale(text),
        logit_softcap=getattr(text, "final_logit_softcapping", None),
        bos_token_id=getattr(text, "bos_token_id", None),
        eos_token_id=tuple(eos) if isinstance(eos, list) else eos,
        pad_token_id=getattr(text, "pad_token_id", None),
    )


def rope_of(text: Any) -> dict[str, Any]:
    """The target's rotary parameters: one flat mapping with rope_type and rope_theta.

    Where the target has one set for each kind of layer (Gemma 3), the full-attention layers' is taken.
    """
    raw = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    rope = dict(raw)
    if rope and all(value is None or isinstance(value, dict) for value in rope.values()):
        rope = dict(rope.get("full_attention") or next(value for value in rope.values() if value))
    rope.setdefault("rope_type", rope.pop("type", "default"))
    if rope.get("rope_theta") is None:
        rope["rope_theta"] = getattr(text, "rope_theta", None) or 10000.0
    partial = getattr(text, "partial_rotary_factor", None)
    if partial is not None:
        rope.setdefault("partial_rotary_factor", partial)
    if rope.get("mrope_section") is not None:  # text positions are equal in all sections: plain rotary
        rope.pop("mrope_section", None)
        rope.pop("mrope_interleaved", None)
        if rope["rope_type"] == "mrope":
            rope["rope_type"] = "default"
    return {key: value for key, value in rope.items() if value is not None}


def _rope_for(text: Any, drafter: DrafterConfig) -> dict[str, Any]:
    rope = rope_of(text)
    if drafter.rotary == "full":
        rope.pop("partial_rotary_factor", None)
    return rope


def _mlp_width(text: Any, hidden: int) -> int:
    width = getattr(text, "intermediate_size", None)
    if isinstance(width, list):
        width = width[0]
    return int(width) if width else 4 * hidden
