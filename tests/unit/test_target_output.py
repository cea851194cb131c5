"""The last hidden state that goes to the drafter: with the frozen head it gives the target's own logits.

Case B7: the final norm is applied, and once. Case B8: the state is the last layer's and no other's.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from draftmill.errors import InputError
from draftmill.pipeline.features import pack
from draftmill.target.features import TapsReplica
from draftmill.target.model import OUTPUT, Target
from draftmill.target.output_check import check_output
from draftmill.target.spread import spread
from packed_rows import bucketed_batch, documents_of, packed_batch, real_tokens
from target_kinds import KINDS, random_tokens, tiny_target

torch.set_num_threads(1)

LAYERS = (1, 3)
TAPS = (*LAYERS, OUTPUT)
LENGTHS = [9, 4, 12]


def final_norm(target: Target) -> torch.nn.Module:
    return target.decoder.ln_f if hasattr(target.decoder, "ln_f") else target.decoder.norm


def normed_target(kind: str) -> Target:
    """A target whose final norm does more than norm: applying it twice is something else."""
    target = tiny_target(kind)
    weight = final_norm(target).weight
    with torch.no_grad():
        weight.mul_(torch.linspace(0.5, 1.5, len(weight)))
    return target


def whole_decoder(kind: str) -> Target:
    target = normed_target(kind)
    target.cut_after(target.num_layers - 1)
    return target


def own_logits(kind: str, documents: list[torch.Tensor]) -> torch.Tensor:
    """What the model itself says of each document alone, [tokens, V]."""
    model = normed_target(kind).model
    with torch.no_grad():
        return torch.cat([model(input_ids=each[None], use_cache=False).logits[0] for each in documents])


@pytest.mark.parametrize("kind", KINDS)
def test_the_state_that_is_carried_gives_the_models_own_logits(kind: str) -> None:
    """Every family, norms not ones: Gemma's are 1 + w, Granite and Cohere scale logits, Gemma 2 caps them."""
    documents = documents_of(LENGTHS)
    batch = bucketed_batch(documents, 12)
    head = tiny_target(kind).head()
    carried = torch.zeros(30, 3 * head.head_VH.shape[1])
    taps = TapsReplica(whole_decoder(kind), TAPS).forward(batch)
    pack(taps, batch.source_T, carried)
    last = carried[: batch.num_tokens, 2 * head.head_VH.shape[1] :]
    expected = own_logits(kind, documents)
    assert expected.std() > 0.05
    torch.testing.assert_close(head.logits(last), expected, rtol=1e-4, atol=1e-4)
    for wrong in (final_norm(normed_target(kind))(last), taps[1].flatten(0, 1)[batch.source_T]):
        assert not torch.allclose(head.logits(wrong), expected, atol=1e-2)


@pytest.mark.parametrize("kind", ["llama", "gemma3", "gpt-oss"])
def test_packed_rows_give_it_too(kind: str) -> None:
    documents = documents_of(LENGTHS)
    batch = packed_batch([[documents[0], documents[1]], [documents[2]]], 16)
    replica = TapsReplica(whole_decoder(kind), TAPS, packed=True)
    last = real_tokens(replica.forward(batch)[2:], batch)
    logits = normed_target(kind).head().logits(last)
    torch.testing.assert_close(logits, own_logits(kind, documents), rtol=2e-4, atol=2e-4)


def test_the_tapped_layers_are_the_same_with_it_and_without() -> None:
    batch = bucketed_batch(documents_of(LENGTHS), 12)
    cut = normed_target("qwen3")
    cut.cut_after(LAYERS[-1])
    expected = TapsReplica(cut, LAYERS).forward(batch)
    got = TapsReplica(whole_decoder("qwen3"), TAPS).forward(batch)
    assert len(got) == 3
    for ours, theirs in zip(got[:2], expected, strict=True):
        assert torch.equal(ours, theirs)


def test_a_group_of_devices_gives_it_too() -> None:
    batch = bucketed_batch(documents_of(LENGTHS), 12)
    expected = TapsReplica(whole_decoder("qwen3"), TAPS).forward(batch)
    group = spread(whole_decoder("qwen3"), [torch.device("cpu"), torch.device("cpu")])
    for ours, theirs in zip(TapsReplica(group, TAPS).forward(batch), expected, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_kind_of_target_passes_the_check_and_is_left_whole(kind: str, dtype: torch.dtype) -> None:
    target = tiny_target(kind)
    target.model.to(dtype)
    tokens = random_tokens(1, 7)
    with torch.no_grad():
        before = target.model(input_ids=tokens).logits
        check_output(target, target.head())
        after = target.model(input_ids=tokens).logits
    assert len(target.layers) == 8
    assert torch.equal(before, after)


class NormedHead(torch.nn.Linear):
    """A head with a norm of its own, as where the decoder has none."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden / hidden.square().mean(-1, keepdim=True).sqrt())


def head_that_norms(target: Target) -> None:
    target.decoder.norm = torch.nn.Identity()
    old = target.model.lm_head
    target.model.lm_head = NormedHead(old.in_features, old.out_features, bias=False)
    target.model.lm_head.weight = old.weight


def logits_that_are_scaled(target: Target) -> None:
    def doubled(_module: Any, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
        return 1.1 * output

    target.model.lm_head.register_forward_hook(doubled)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("change", [head_that_norms, logits_that_are_scaled])
def test_logits_that_the_head_does_not_make_of_it_are_found(change: Any, dtype: torch.dtype) -> None:
    target = tiny_target("llama")
    change(target)
    target.model.to(dtype)
    with pytest.raises(InputError, match=r"the logits of LlamaForCausalLM are not what its LM head makes of its last"):
        check_output(target, target.head())
    assert len(target.layers) == 8, "left whole"
