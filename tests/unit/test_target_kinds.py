"""Targets of every common kind: features are the untruncated model's, whatever else is in the batch (case B8)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from draftmill.target.attention_check import check_causal
from draftmill.target.model import Target
from target_kinds import KINDS, random_tokens, tiny_model, tiny_target

torch.set_num_threads(1)

TAPS = (1, 3, 6)
LENGTH = 19


def hidden_states(model: Any, tokens: torch.Tensor) -> list[torch.Tensor]:
    """What transformers itself gives as the outputs of the embedding and of every layer."""
    with torch.no_grad():
        return list(model(input_ids=tokens, use_cache=False, output_hidden_states=True).hidden_states)


def features(target: Target, tokens: torch.Tensor) -> list[torch.Tensor]:
    with target.taps(TAPS) as taps:
        target.forward_layers(tokens)
        return [taps.outputs[layer].clone() for layer in TAPS]


def close(ours: list[torch.Tensor], expected: list[torch.Tensor], tolerance: float = 0.0) -> None:
    for one, other in zip(ours, expected, strict=True):
        assert other.abs().max() > 1e-3
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kind", KINDS)
def test_a_feature_is_the_output_of_its_layer_bit_for_bit(kind: str) -> None:
    tokens = random_tokens(3, LENGTH)
    expected = [hidden_states(tiny_model(kind), tokens)[layer + 1] for layer in TAPS]
    target = tiny_target(kind)
    close(features(target, tokens), expected)
    target.cut_after(TAPS[-1])
    assert len(target.layers) == TAPS[-1] + 1
    close(features(target, tokens), expected)
    copy = target.replica("cpu")
    assert not set(copy.model.modules()) & set(target.model.modules())
    close(features(copy, tokens), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_cut_takes_no_memory(kind: str) -> None:
    target = tiny_target(kind)
    target.cut_after(TAPS[-1])
    inside = {id(p) for p in target.decoder.parameters()} | {id(target.model.get_input_embeddings().weight)}
    assert {id(p) for p in target.model.parameters()} == inside


@pytest.mark.parametrize("kind", KINDS)
def test_padding_and_neighbours_change_nothing(kind: str) -> None:
    """Rows of other lengths in the batch, right padding of any content: sums in another order at most."""
    target = tiny_target(kind)
    lengths = (LENGTH, 5, 12)
    rows = [random_tokens(1, length, seed=length) for length in lengths]
    alone = [features(target, row) for row in rows]
    for fill in (0, 7):
        batch = torch.full((3, LENGTH + 4), fill)
        for index, row in enumerate(rows):
            batch[index, : row.shape[1]] = row
        together = features(target, batch)
        for index, length in enumerate(lengths):
            mine = [feature[index : index + 1, :length] for feature in together]
            close(mine, alone[index], 2e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_embedding_norm_and_head_rebuild_the_logits(kind: str) -> None:
    """Cases B7 and B8: with norms that are not ones, and whatever the target does to embeddings and logits."""
    model, tokens = tiny_model(kind), random_tokens(2, LENGTH)
    target = Target(model)
    head = target.head()
    with torch.no_grad():
        out = model(input_ids=tokens, use_cache=False, output_hidden_states=True)
        embedded = head.embed(tokens)
        if kind == "gpt2":  # it adds learned positions
            embedded = embedded + model.transformer.wpe(torch.arange(LENGTH))
        torch.testing.assert_close(embedded, out.hidden_states[0], rtol=1e-5, atol=1e-5)
        with target.taps([target.num_layers - 1]) as taps:
            target.forward_layers(tokens)
            last = taps.outputs[target.num_layers - 1]
        norm = getattr(target.decoder, "norm", None) or target.decoder.ln_f
        assert not torch.allclose(norm(last), last, atol=1e-2)
        torch.testing.assert_close(norm(last), out.hidden_states[-1], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(head.logits(norm(last)), out.logits, rtol=1e-4, atol=1e-4)
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert (head.head_VH is head.embedding_VH) == tied


@pytest.mark.parametrize("kind", ["gemma2", "gemma3", "granite", "llama"])
def test_embeddings_in_bfloat16_are_the_targets_own_bit_for_bit(kind: str) -> None:
    """A Gemma rounds its factor to the type of its embedding before it multiplies."""
    model, tokens = tiny_model(kind).to(torch.bfloat16), random_tokens(3, LENGTH)
    embedded = Target(model).head().embed(tokens)
    assert embedded.dtype == torch.bfloat16
    assert torch.equal(embedded, hidden_states(model, tokens)[0])


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_causal(kind: str) -> None:
    check_causal(tiny_target(kind), TAPS)


def test_caps_on_scores_are_not_left_out() -> None:
    """Transformers 5.17 loads Gemma 2 with an attention that has none, with which 5.24 raises."""
    model = tiny_model("gemma2")
    tokens = random_tokens(3, LENGTH)
    expected = hidden_states(model, tokens)[-1]
    for config in (model.config, model.model.config):
        config._attn_implementation_internal = "sdpa"
    assert torch.equal(hidden_states(Target(model).model, tokens)[-1], expected)
