"""First weights from the target: which targets give them, and which are refused by what they compute."""

from __future__ import annotations

import pytest

from draftmill.config import DrafterConfig
from draftmill.drafter.initial import weights_from_target
from draftmill.drafter.network import Drafter
from draftmill.drafter.shape import shape_for
from draftmill.errors import InputError
from target_kinds import tiny_target


def given_by(kind: str) -> None:
    target = tiny_target(kind)
    shape = shape_for(target.config, DrafterConfig(num_layers=2, num_taps=2, block_size=4), mask_token_id=1)
    drafter = Drafter(shape, seed=0)
    weights = weights_from_target(drafter, target.layers, target.decoder.norm)
    assert weights.keys() == dict(drafter.named_parameters()).keys()
    last = target.layers[-1]
    assert weights["layers.1.mlp.up_proj.weight"].equal(last.mlp.up_proj.weight.float())
    assert weights["layers.1.post_attention_layernorm.weight"].equal(last.post_attention_layernorm.weight.float())


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_layers_of_the_drafters_form_are_copied(kind: str) -> None:
    given_by(kind)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("gemma3", "has a further pre_feedforward_layernorm"),
        ("gemma2", "has a further pre_feedforward_layernorm"),
        ("qwen3-next", "computes (input|post_attention)_layernorm otherwise"),
        ("gpt-oss", "has no mlp|has no self_attn"),
    ],
)
def test_other_forms_are_refused_by_name(kind: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        given_by(kind)
