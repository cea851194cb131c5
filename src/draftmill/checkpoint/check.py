"""Whether an export is what was trained: its config, its rotary tables, and the logits of every installed reader.

Owns the comparison with programs that read an export. A reader that is not installed is named as not checked. Runs on
the CPU, in float32, on random features: it needs no target.

Cases B11 and B12 of the field: a factor honoured in serving and not in training, and positions past the training
length, both show here, because the config alone is asked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module, metadata
from importlib.util import find_spec
from math import inf, isfinite
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config
from transformers.utils import logging

from draftmill.checkpoint import weights
from draftmill.checkpoint.durable import read_json
from draftmill.checkpoint.store import Tensors
from draftmill.drafter import Drafter, DrafterShape
from draftmill.drafter.attention import dense_attention
from draftmill.drafter.network import spread_blocks
from draftmill.drafter.rope import Rotary
from draftmill.drafter.shape import check_layer_ids
from draftmill.errors import InputError
from draftmill.records import Blocks
from draftmill.target.head import shape_logits

TOLERANCE = 1e-5
"""Largest difference in float32 hidden states and logits, relative to the largest value where that exceeds 1."""
CONTEXT_TOKENS, HEAD_ROWS = 24, 128


@dataclass(frozen=True)
class Probe:
    """Random inputs of one block behind a context: float32, on the CPU.

    features [S, L*H], embeddings [K, H] of a token and K-1 mask tokens before any scale, positions [S + K] of context
    and block, head [HEAD_ROWS, H]
    """

    features: torch.Tensor
    embeddings: torch.Tensor
    positions: torch.Tensor
    head: torch.Tensor


Read = Callable[[Probe], tuple[torch.Tensor, torch.Tensor]]
"""A probe -> hidden states [K, H] and logits [K, HEAD_ROWS]."""
Reader = Callable[[Path], Read]
"""An exported folder, loaded by another program."""


def check_config(config: dict[str, Any], where: str) -> None:
    """Raise InputError for a config.json, of either layout, with which the weights could not be served."""
    network = config.get("transformer_layer_config", config)
    own = config.get("dflash_config", {})
    for part in (config, network):
        if part.get("tie_word_embeddings"):
            raise InputError(
                f"{where}: tie_word_embeddings is true: an engine would take the target's embedding for its LM head"
            )
        if part.get("auto_map"):
            raise InputError(f"{where}: auto_map names code that is not in the folder")
    rows = network.get("vocab_size", 0)
    mask = own.get("mask_token_id", config.get("mask_token_id"))
    if mask is None or not 0 <= mask < rows:
        raise InputError(f"{where}: mask token id {mask} lies outside the target's embedding of {rows} rows")
    first = 1 if "aux_hidden_state_layer_ids" in config else 0
    taps = config.get("aux_hidden_state_layer_ids") or own.get("target_layer_ids") or []
    try:
        check_layer_ids(tuple(tap - first for tap in taps), config.get("num_target_layers", 0))
    except InputError as error:
        raise InputError(f"{where}: {error}") from None


def check_export(folder: Path, layout: str, shape: DrafterShape, trained: Tensors) -> list[str]:
    """Compare an exported folder with the drafter it was made of; lines for the user.

    shape, trained  the drafter as it was trained
    Raises InputError where the config can't be served, a stored tensor is not the trained one rounded once, a rotary
    table differs, or an installed reader's hidden states or logits do.
    """
    config = read_json(folder / "config.json")
    check_config(config, str(folder / "config.json"))
    stored = weights.read_weights(folder)
    for name, tensor in trained.items():
        if not torch.equal(stored[name], tensor.to(stored[name].dtype)):
            raise InputError(
                f"check failed: {name} of the export is not the trained one, rounded to {stored[name].dtype}"
            )
    lines = [f"checked: {len(stored)} tensors equal the trained ones, rounded to {next(iter(stored.values())).dtype}"]
    lines.append(_check_rotary(config.get("transformer_layer_config", config), shape))
    drafter = Drafter(shape).float().eval()
    drafter.load_state_dict(stored)
    for package, reader in READERS[layout].items():
        lines.append(_check_reader(package, reader, folder, drafter))
    return lines


def ours(drafter: Drafter, probe: Probe) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states [K, H] and logits [K, HEAD_ROWS] of our own network for a probe."""
    shape, context = drafter.shape, probe.features.shape[0]
    blocks = Blocks.empty(context, 1)
    blocks.anchors_A[0] = context  # one past the last context slot: the block sees all of them
    positions = probe.positions
    with torch.no_grad():
        hidden = drafter(
            probe.features,
            positions[:context],
            probe.embeddings[:2] * shape.embedding_scale,
            positions[context:],
            dense_attention(shape, blocks),
        )
        return hidden, shape_logits(hidden @ probe.head.t(), shape.logit_scale, shape.logit_softcap)


def probes(shape: DrafterShape, seed: int = 0) -> list[Probe]:
    """A block near the first position and one that ends at the last, past any training length."""
    generator = torch.Generator().manual_seed(seed)

    def random(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator)

    length = min(CONTEXT_TOKENS, shape.max_position_embeddings - shape.block_size) + shape.block_size
    return [
        Probe(
            features=random(length - shape.block_size, shape.feature_size),
            embeddings=spread_blocks(random(2, shape.hidden_size), shape.block_size),
            positions=torch.arange(first, first + length),
            head=random(HEAD_ROWS, shape.hidden_size) / shape.hidden_size**0.5,
        )
        for first in (0, shape.max_position_embeddings - length)
    ]


def rotary_difference(config: dict[str, Any], shape: DrafterShape) -> float:
    """Largest difference between our cosines and sines and those rebuilt from a written configuration.

    transformers' Qwen3 code builds them, but for a partial factor on an unscaled embedding, which Qwen3's ignores:
    then Qwen3-Next's does. Infinite where another share of the head is rotated.
    """
    read = Qwen3Config.from_dict(config)
    rope: Any = read.rope_parameters
    if rope.get("partial_rotary_factor", 1.0) != 1.0 and rope["rope_type"] == "default":
        module = import_module("transformers.models.qwen3_next.modeling_qwen3_next").Qwen3NextRotaryEmbedding
    else:
        module = import_module("transformers.models.qwen3.modeling_qwen3").Qwen3RotaryEmbedding
    last = shape.max_position_embeddings - 1
    positions = torch.unique(torch.linspace(0, last, min(last + 1, 4096)).long())
    cosines, sines = module(read)(torch.zeros(1), positions[None])
    own_cosines, own_sines = Rotary(shape)(positions)
    half = own_cosines.shape[-1]
    if cosines.shape[-1] != 2 * half:
        return float("inf")
    differences = [(cosines[0, :, :half] - own_cosines).abs().max(), (sines[0, :, :half] - own_sines).abs().max()]
    return float(max(differences))


def _check_rotary(config: dict[str, Any], shape: DrafterShape) -> str:
    difference = rotary_difference(config, shape)
    if not difference <= TOLERANCE:
        raise InputError(
            f"check failed: cosines and sines built from the exported config differ from the trained ones by "
            f"{difference:.1e} (rope {config.get('rope_parameters')})"
        )
    return f"checked: rotary tables up to position {shape.max_position_embeddings - 1} (difference {difference:.1e})"


def _check_reader(package: str, reader: Reader, folder: Path, drafter: Drafter) -> str:
    if find_spec(package) is None:
        return f"not checked: {package} is not installed"
    version = metadata.version(package)
    if drafter.shape.rope.get("partial_rotary_factor", 1.0) != 1.0:
        return f"not checked: {package} {version} rotates whole heads and can't run this drafter"
    try:
        with _no_progress_bar():
            read = reader(folder)
    except ImportError as error:
        return f"not checked: {package} {version} is installed but can't be imported: {error}"
    except Exception as error:  # a reader of others, over a transformers of any version
        lines = str(error).strip().splitlines() or [""]
        raise InputError(
            f"check failed: {package} {version} can't read the export: {type(error).__name__}: {lines[0][:200]}"
        ) from error
    largest = 0.0
    for probe in probes(drafter.shape):
        for own, other in zip(ours(drafter, probe), read(probe), strict=True):
            difference = float((own - other).abs().max()) / max(1.0, float(own.abs().max()))
            largest = max(largest, difference if isfinite(difference) else inf)
    if largest > TOLERANCE:
        raise InputError(f"check failed: {package} {version} reads the export and differs by {largest:.1e}")
    return f"checked: {package} {version} gives the same hidden states and logits (difference {largest:.1e})"


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _dflash(folder: Path) -> Read:
    """z-lab's own model, used as its decoding loop uses it."""
    model = import_module("dflash.model").DFlashDraftModel.from_pretrained(folder, dtype=torch.float32).eval()
    scale = float(model.config.dflash_config.get("input_embedding_scale", 1.0))

    @torch.no_grad()
    def read(probe: Probe) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = model(
            target_hidden=probe.features[None],
            noise_embedding=probe.embeddings[None] * scale,
            position_ids=probe.positions[None],
        )[0]
        return hidden, model.compute_logits(hidden, lambda x: x @ probe.head.t())

    return read


def _speculators(folder: Path) -> Read:
    """speculators' model, layer by layer: its own forward pass draws anchors and wants the target's weights."""
    module = import_module("speculators.models.dflash")

    class WithoutTarget(module.DFlashDraftModel):  # type: ignore[name-defined]
        def load_verifier_weights(self) -> None:
            pass

    # transformers 5.24 names torch in its configuration's fields, where pydantic does not find it by itself.
    module.DFlashSpeculatorConfig.model_rebuild(_types_namespace={"torch": torch})
    config = module.DFlashSpeculatorConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "eager"
    config.speculators_config.verifier.name_or_path = None  # else the target's own config is looked up
    model: Any = WithoutTarget.from_pretrained(folder, config=config, dtype=torch.float32).eval()

    @torch.no_grad()
    def read(probe: Probe) -> tuple[torch.Tensor, torch.Tensor]:
        context, x = model.hidden_norm(model.fc(probe.features[None])), probe.embeddings[None]
        angles = model.rotary_emb(x, probe.positions[None])
        for index, layer in enumerate(model.layers):
            window = model.sliding_window if index in model.sliding_window_indices else None
            x = layer(
                hidden_states=x,
                target_hidden=context,
                attention_mask=None if window is None else _sliding_mask(probe, window),
                position_embeddings=angles,
            )
        hidden = model.norm(x)[0]
        return hidden, shape_logits(hidden @ probe.head.t(), *_logit_rule(config))

    return read


def _sliding_mask(probe: Probe, window: int) -> torch.Tensor:
    """What a sliding layer sees when served, added to scores [1, 1, K, S + K]: causal, and within the window."""
    distance = probe.positions[probe.features.shape[0] :, None] - probe.positions[None, :]
    seen = (distance >= 0) & (distance < window)
    return torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)[None, None]


def _logit_rule(config: Any) -> tuple[float, float | None]:
    return getattr(config, "output_multiplier", 1.0), getattr(config, "final_logit_softcapping", None)


READERS: dict[str, dict[str, Reader]] = {
    "zlab": {"dflash": _dflash},
    "speculators": {"speculators": _speculators},
}
