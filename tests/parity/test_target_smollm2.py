"""The real small target against transformers itself: features, packed rows, logits rebuilt from the last layer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from draftmill.drafter.shape import default_layer_ids
from draftmill.target.features import TapsReplica
from draftmill.target.load import load_target
from draftmill.target.model import OUTPUT
from draftmill.target.output_check import check_output
from packed_rows import bucketed_batch, packed_batch, real_tokens

torch.set_num_threads(1)

pytestmark = pytest.mark.smollm2


def documents() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(100, 40000, (length,), generator=generator) for length in (23, 9, 30)]


def test_features_and_logits_are_the_models_own(smollm2_folder: Path) -> None:
    """Cases B7 and B8 on trained weights."""
    model = AutoModelForCausalLM.from_pretrained(smollm2_folder, dtype=torch.float32).eval()
    target = load_target(str(smollm2_folder), dtype="float32", with_tokenizer=False)
    layer_ids = default_layer_ids(target.num_layers, 5)
    batch = bucketed_batch(documents(), 32)
    with torch.no_grad():
        out = model(batch.tokens_BS, use_cache=False, output_hidden_states=True)
    for got, layer in zip(TapsReplica(target, layer_ids).forward(batch), layer_ids, strict=True):
        assert torch.equal(got, out.hidden_states[layer + 1])
    with target.taps([target.num_layers - 1]) as taps, torch.no_grad():
        target.forward_layers(batch.tokens_BS)
        logits = target.head().logits(target.decoder.norm(taps.outputs[target.num_layers - 1]))
    torch.testing.assert_close(logits, out.logits, rtol=1e-4, atol=1e-4)


def test_the_last_hidden_state_of_packed_rows_gives_the_models_own_logits(smollm2_folder: Path) -> None:
    """Case B7 as a loss against the target's predictions has it: normed once, trained weights."""
    whole = load_target(str(smollm2_folder), dtype="float32", with_tokenizer=False)
    head = whole.head()
    check_output(whole, head)
    held = documents()
    with torch.no_grad():
        expected = torch.cat([whole.model(each[None], use_cache=False).logits[0] for each in held])
    whole.cut_after(whole.num_layers - 1)
    batch = packed_batch([held], 64)
    last = real_tokens(TapsReplica(whole, (1, OUTPUT), packed=True).forward(batch)[1:], batch)
    torch.testing.assert_close(head.logits(last), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 0.1)])
def test_packed_rows(smollm2_folder: Path, dtype: str, tolerance: float) -> None:
    """Relative difference of the worst token, in the taps together."""
    found = []
    for packed in (False, True):
        target = load_target(str(smollm2_folder), dtype=dtype, with_tokenizer=False)
        layer_ids = default_layer_ids(target.num_layers, 5)
        target.cut_after(layer_ids[-1])
        replica = TapsReplica(target, layer_ids, packed=packed)
        assert replica.by_document == packed
        held = documents()
        batch = packed_batch([held], 64) if packed else bucketed_batch(held, 32)
        found.append(real_tokens(replica.forward(batch), batch).float())
    padded, together = found
    difference = (together - padded).norm(dim=-1) / padded.norm(dim=-1)
    assert difference.max() < tolerance
