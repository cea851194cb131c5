"""What a target's rows may hold, found out on the target itself: padding on the right, and several documents.

Owns the choice of attention for packed rows: the document attention where the architecture takes it, else transformers'
own masks, else a refusal by name. Nothing is taken on trust: documents are run together and alone, and compared.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Literal

import torch

from draftmill.errors import InputError
from draftmill.target.attention import DOCUMENTS, Packing, observed_windows, packing_of, register
from draftmill.target.model import Target

_logger = logging.getLogger(__name__)

PACKABLE = ("full_attention", "sliding_attention")
"""Kinds of layers that see nothing but what their attention lets them see."""
LENGTHS, ROW = (11, 7, 9), 32
"""Tokens of the documents that are compared, and of the row that holds them and some padding."""
EXACT = 1e-4
"""Median relative difference of a token's features in float32 that a row of another length may make by rounding."""
SHARE_OF_A_LEAK = 0.25
"""The same in half precision, as a share of what it is where the documents do see one another. Of SmolLM2-135M in
bfloat16 rounding makes 0.012, and a leak 0.53."""
SAME_SHAPE = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 1e-2}
"""The same between two rows of one length, where a causal target without experts has no difference at all."""


def prepare_packing(target: Target, layer_ids: Sequence[int]) -> bool:
    """Set the target up for packed rows; returns whether it attends by document, and not under transformers' masks.

    Raises InputError, naming the architecture, where documents in one row would see one another.
    """
    name = type(target.model).__name__
    kinds = getattr(target.text_config, "layer_types", None) or ()
    if others := sorted(set(kinds[: len(target.layers)]) - set(PACKABLE)):
        raise InputError(
            f"data.batching=packed: {name} has layers of kind {', '.join(others)}, which see across the documents of a "
            "row; use data.batching=bucketed"
        )
    alone = _features_alone(target, layer_ids)
    allowed = EXACT
    if target.dtype != torch.float32:
        allowed = SHARE_OF_A_LEAK * _difference(target, layer_ids, alone, how=None)
    if _attends_by_document(target, layer_ids, alone, allowed):
        return True
    difference = _difference(target, layer_ids, alone, how="masks")
    if not difference <= allowed:
        raise InputError(
            f"data.batching=packed: in {name} documents of one row see one another (features differ by "
            f"{difference:.1e} from those of the documents alone); use data.batching=bucketed"
        )
    return False


def check_causal(target: Target, layer_ids: Sequence[int]) -> None:
    """Raise InputError, naming the architecture, where a token's features depend on what comes after it.

    Right padding without a mask, blocks and decoding all rest on it.
    """
    tokens = torch.cat(_documents(target))[None].to(target.device)
    changed = tokens.clone()
    changed[:, LENGTHS[0] :] = tokens[:, LENGTHS[0] :].flip(1)
    found = []
    with target.taps(layer_ids) as taps:
        for each in (tokens, changed):
            target.forward_layers(each)
            features = [taps.outputs[layer][0, : LENGTHS[0]].to(target.output_device) for layer in layer_ids]
            found.append(torch.cat(features, dim=-1).float())
    difference = float(((found[1] - found[0]).norm(dim=-1) / found[0].norm(dim=-1)).median())
    if not difference <= SAME_SHAPE.get(target.dtype, 1e-2):
        raise InputError(
            f"{type(target.model).__name__} is not causal: a token's features change by {difference:.1e} with what "
            "comes after it; a drafter needs a causal target"
        )


def attend_by_document(target: Target) -> None:
    """Switch a target to the document attention, which `prepare_packing` has found right for its like."""
    register()
    target.decoder.set_attn_implementation(DOCUMENTS)


def _attends_by_document(target: Target, layer_ids: Sequence[int], alone: list[torch.Tensor], allowed: float) -> bool:
    """Switch to the document attention and keep it if it is right here; else leave everything as it was."""
    decoder = target.decoder
    before = _implementations(target)
    if not getattr(decoder, "_can_set_attn_implementation", lambda: False)():
        return False
    try:
        attend_by_document(target)
        with observed_windows() as windows:
            difference = _difference(target, layer_ids, alone, how="documents")
        if difference <= allowed and _windows_are_handed_on(target, windows):
            return True
        reason = f"features differ by {difference:.1e}"
    except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
        reason = str(error).strip().splitlines()[0]
    for config, implementation in before:
        config._attn_implementation_internal = implementation
    _logger.warning("%s does not take attention by document: %s", type(target.model).__name__, reason)
    return False


def _implementations(target: Target) -> list[tuple[Any, Any]]:
    configs = (target.config, target.text_config, getattr(target.decoder, "config", target.config))
    return [(config, config._attn_implementation) for config in {id(one): one for one in configs}.values()]


def _windows_are_handed_on(target: Target, windows: dict[int, int | None]) -> bool:
    """Whether exactly the sliding layers called the attention with a window: without masks it is all they have."""
    text = target.text_config
    kinds = getattr(text, "layer_types", None)
    window = getattr(text, "sliding_window", None)
    for layer in range(len(target.layers)):
        slides = bool(window) and (kinds is None or kinds[layer] == "sliding_attention")
        if layer not in windows or (windows[layer] is not None) != slides:
            return False
    return True


def _documents(target: Target) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    rows = target.text_config.vocab_size
    return [torch.randint(rows, (length,), generator=generator) for length in LENGTHS]


def _features_alone(target: Target, layer_ids: Sequence[int]) -> list[torch.Tensor]:
    """Each document's features, [tokens, L*H]."""
    found = []
    with target.taps(layer_ids) as taps:
        for document in _documents(target):
            target.forward_layers(document[None].to(target.device))
            found.append(torch.cat([taps.outputs[layer][0].to(target.output_device) for layer in layer_ids], dim=-1))
    return found


def _difference(
    target: Target,
    layer_ids: Sequence[int],
    alone: list[torch.Tensor],
    how: Literal["documents", "masks"] | None,
) -> float:
    """Median over tokens of how far the features of documents in one row are from those of the documents alone.

    how: what keeps them apart; None: nothing does.
    """
    tokens, packing = _one_row(target)
    inputs = {} if how is None else packing.inputs(by_document=how == "documents")
    with target.taps(layer_ids) as taps:
        target.forward_layers(tokens, **inputs)
        packed = torch.cat([taps.outputs[layer][0].to(target.output_device) for layer in layer_ids], dim=-1)
    expected = torch.cat(alone[1:]).float()  # the first document has nothing before it
    got = packed[LENGTHS[0] : sum(LENGTHS)].float()
    return float(((got - expected).norm(dim=-1) / expected.norm(dim=-1)).median())


def _one_row(target: Target) -> tuple[torch.Tensor, Packing]:
    tokens = torch.zeros(1, ROW, dtype=torch.int64)
    positions, documents = torch.zeros(1, ROW, dtype=torch.int32), torch.full((1, ROW), -1, dtype=torch.int32)
    at = 0
    for index, document in enumerate(_documents(target)):
        span = slice(at, at + len(document))
        tokens[0, span], positions[0, span], documents[0, span] = document, torch.arange(len(document)).int(), index
        at += len(document)
    packing = packing_of(positions, documents, target.device)
    assert packing is not None
    return tokens.to(target.device), packing
