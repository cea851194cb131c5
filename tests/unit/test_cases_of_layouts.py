"""Checkpoints that look like ours and are not: another token for a slot (case B3), another mask token (case B10)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from draftmill.checkpoint import read_published, speculators, warm_start, zlab
from draftmill.drafter.network import Drafter
from draftmill.errors import InputError
from draftmill.target.mask_token import resolve_mask_token
from small_steps import SHAPE
from tiny import save_tokenizer


def published(folder: Path, config: dict[str, Any]) -> str:
    """A drafter's folder as others publish it."""
    folder.mkdir()
    save_file(dict(Drafter(SHAPE, seed=0).state_dict()), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.mark.parametrize("key", ["sample_from_anchor", "shift_label"])
@pytest.mark.parametrize("section", [True, False], ids=["in its section", "at the top"])
def test_slots_that_stand_for_another_token_are_refused_wherever_it_is_said(
    tmp_path: Path, key: str, section: bool
) -> None:
    """B3: read as ours, such weights would draft every token one place off, and train on without a word."""
    config = zlab.to_config(SHAPE, "float32")
    plain = json.loads(json.dumps(config))
    (plain["dflash_config"] if section else plain)[key] = False
    assert read_published(published(tmp_path / "same", plain)).shape == SHAPE
    (config["dflash_config"] if section else config)[key] = True
    folder = published(tmp_path / "other", config)
    for read in (lambda: read_published(folder), lambda: warm_start(folder, SHAPE)):
        with pytest.raises(InputError) as refused:
            read()
        message = str(refused.value)
        assert f"config.json: {'dflash_config.' if section else ''}{key} = True stands for a drafter that" in message
        assert message.endswith("give one whose slot k stands for the k-th token after the anchor")
        assert "\n" not in message


def test_the_layout_of_slots_is_written_where_the_layout_has_a_word_for_it(tmp_path: Path) -> None:
    config = speculators.to_config(SHAPE, "float32", "org/target", [])
    assert config["sample_from_anchor"] is False
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == SHAPE.block_size - 1
    folder = published(tmp_path / "other", {**config, "sample_from_anchor": True})
    with pytest.raises(InputError, match=r"sample_from_anchor = true stands for .*; give one whose slot k stands for"):
        read_published(folder)


@pytest.mark.parametrize(
    ("key", "value"),
    [("projector_type", "domino"), ("selector_rank", 256), ("use_swa", True), ("attention_sink_bias", True)],
)
def test_another_network_is_refused_at_the_top_as_well(key: str, value: Any) -> None:
    config = zlab.to_config(SHAPE, "float32")
    with pytest.raises(InputError, match=f"config.json: {key} = {value!r} stands for a drafter that is not implement"):
        zlab.from_config({**config, key: value}, "config.json")
    with pytest.raises(InputError, match="causal = True is not implemented"):
        zlab.from_config({**config, "causal": True}, "config.json")


@pytest.mark.parametrize("role", ["pad_token", "eos_token", "bos_token"])
def test_a_tokenizers_mask_token_that_has_another_role_is_passed_over(tmp_path: Path, role: str) -> None:
    """B10: its row means something to the target, and the data holds it or an engine stops at it."""
    tokenizer = save_tokenizer(tmp_path)
    reserved = tokenizer.convert_tokens_to_ids("<reserved_0>")
    tokenizer.mask_token = "<reserved_0>"
    assert resolve_mask_token(tokenizer, len(tokenizer) + 4) == reserved
    tokenizer.mask_token = getattr(tokenizer, role)
    assert resolve_mask_token(tokenizer, len(tokenizer) + 4) == len(tokenizer)
    assert resolve_mask_token(tokenizer, len(tokenizer)) == reserved


def test_a_mask_token_outside_the_embedding_says_what_to_choose(tmp_path: Path) -> None:
    """B10: a row added in training would be missing where the target's embedding serves."""
    tokenizer = save_tokenizer(tmp_path)
    with pytest.raises(InputError, match=r"99 lies outside the target's 80 embeddings; choose an id below that"):
        resolve_mask_token(tokenizer, 80, explicit=99)
