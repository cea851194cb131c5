"""The published layouts: configs both ways, weights in one file or several, what is refused, and warm starts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftmill.checkpoint import read_published, read_source, speculators, warm_start, weights, zlab
from draftmill.checkpoint.check import check_config
from draftmill.checkpoint.export import export
from draftmill.checkpoint.store import save
from draftmill.config import DrafterConfig
from draftmill.drafter import Drafter, DrafterShape, shape_for
from draftmill.errors import InputError

torch.set_num_threads(1)

SHAPE = DrafterShape(
    hidden_size=32,
    intermediate_size=48,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    rms_norm_eps=1e-6,
    vocab_size=97,
    block_size=8,
    mask_token_id=96,
    target_layer_ids=(1, 3, 5),
    num_target_layers=8,
    rope={"rope_type": "default", "rope_theta": 10000.0},
    max_position_embeddings=512,
    bos_token_id=1,
    eos_token_id=2,
)

SHAPES = {
    "plain": {},
    "linear": {"rope": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    "yarn": {
        "rope": {
            "rope_type": "yarn",
            "rope_theta": 1e6,
            "factor": 4.0,
            "original_max_position_embeddings": 128,
            "attention_factor": 1.1,
        }
    },
    "llama3": {
        "rope": {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
    "partial": {"rope": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}},
    "partial linear": {"rope": {"rope_type": "linear", "rope_theta": 1e7, "factor": 2.0, "partial_rotary_factor": 0.5}},
    "sliding": {"sliding_window": 16, "sliding_layers": (0, 2)},
    "two ends": {"eos_token_id": (2, 7), "pad_token_id": 0, "bos_token_id": None},
    "one tap": {"target_layer_ids": (4,)},
    "bounded": {"logit_scale": 0.0625, "logit_softcap": 30.0},
}


def shape_of(name: str) -> DrafterShape:
    return replace(SHAPE, **SHAPES[name])


def weights_of(shape: DrafterShape, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(size, generator=generator).to(dtype) for name, size in weights.tensor_shapes(shape).items()
    }


def checkpoint(run: Path, shape: DrafterShape = SHAPE, **state) -> Path:
    target = {"model": "org/target", "revision": "abc", "architectures": ["Qwen3ForCausalLM"]}
    facts = {"shape": shape.to_dict(), "target": target, "data_fingerprint": "f00d"}
    return save(run, 10, weights_of(shape), {}, {**facts, **state})


def test_tensor_names_and_sizes_are_the_network_s():
    for name in SHAPES:
        shape = shape_of(name)
        network = {n: tuple(parameter.shape) for n, parameter in Drafter(shape).named_parameters()}
        assert weights.tensor_shapes(shape) == network
    assert len(weights.tensor_shapes(SHAPE)) == 11 * SHAPE.num_layers + 3


@pytest.mark.parametrize("name", SHAPES)
def test_zlab_config_round_trip(name):
    config = json.loads(json.dumps(zlab.to_config(shape_of(name), "bfloat16")))
    assert zlab.from_config(config, "config.json") == shape_of(name)


def test_zlab_scaled_embeddings_round_trip():
    shape = replace(SHAPE, embedding_scale=32**0.5)
    config = json.loads(json.dumps(zlab.to_config(shape, "float32")))
    assert config["dflash_config"]["input_embedding_scale"] == 32**0.5
    assert zlab.from_config(config, "config.json") == shape


@pytest.mark.parametrize("name", SHAPES)
def test_speculators_config_round_trip(name):
    config = json.loads(json.dumps(speculators.to_config(shape_of(name), "bfloat16", "org/t", ["A"])))
    assert speculators.from_config(config, "config.json") == shape_of(name)


def test_zlab_config_is_the_contract_s():
    shape = replace(SHAPE, sliding_window=16, sliding_layers=(0, 2), logit_softcap=30.0)
    assert zlab.to_config(shape, "bfloat16") == {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "max_position_embeddings": 512,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "sliding_window": 16,
        "use_sliding_window": True,
        "max_window_layers": 3,
        "tie_word_embeddings": False,
        "use_cache": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": None,
        "block_size": 8,
        "num_target_layers": 8,
        "dflash_config": {
            "mask_token_id": 96,
            "target_layer_ids": [1, 3, 5],
            "block_size": 8,
            "final_logit_softcapping": 30.0,
        },
        "dtype": "bfloat16",
    }


def test_layer_ids_are_one_higher_in_the_speculators_layout():
    """B8: one convention inside; the other layout counts the embedding's output as 0."""
    config = speculators.to_config(SHAPE, "bfloat16", "org/target", ["Qwen3ForCausalLM"])
    assert config["aux_hidden_state_layer_ids"] == [2, 4, 6]
    assert config["transformer_layer_config"]["num_hidden_layers"] == 3
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 7
    assert config["speculators_config"]["verifier"] == {
        "name_or_path": "org/target",
        "architectures": ["Qwen3ForCausalLM"],
    }


def test_the_speculators_layout_has_no_place_for_scaled_embeddings():
    with pytest.raises(InputError, match=r"can't say that embeddings are scaled by 5\.65"):
        speculators.to_config(replace(SHAPE, embedding_scale=32**0.5), "bfloat16", "org/target", [])


def as_published(**changes) -> dict:
    """A config.json as published for Qwen3-8B: keys of transformers 4, block size at the top only."""
    config = {
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "block_size": 16,
        "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
        "dtype": "bfloat16",
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "layer_types": ["full_attention"] * 5,
        "max_position_embeddings": 40960,
        "model_type": "qwen3",
        "num_attention_heads": 32,
        "num_hidden_layers": 5,
        "num_key_value_heads": 8,
        "num_target_layers": 36,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "vocab_size": 151936,
    }
    return {key: value for key, value in {**config, **changes}.items() if value != "absent"}


def test_a_published_config_is_read():
    shape = zlab.from_config(as_published(), "config.json")
    assert shape.target_layer_ids == (1, 9, 17, 25, 33)
    assert (shape.block_size, shape.mask_token_id, shape.num_target_layers) == (16, 151669, 36)
    assert shape.rope == {"rope_type": "default", "rope_theta": 1000000}
    assert (shape.sliding_layers, shape.sliding_window) == ((), None)


def test_keys_are_found_at_the_top_and_in_their_section():
    moved = as_published(block_size="absent", dflash_config={"block_size": 10, "num_target_layers": 36})
    moved.update(mask_token_id=5, target_layer_ids=[24, 30, 34])
    shape = zlab.from_config({k: v for k, v in moved.items() if k != "num_target_layers"}, "config.json")
    assert (shape.block_size, shape.mask_token_id, shape.num_target_layers) == (10, 5, 36)
    assert shape.target_layer_ids == (24, 30, 34)


def test_taps_left_out_follow_the_rule():
    shape = zlab.from_config(as_published(dflash_config={"mask_token_id": 151669}), "config.json")
    assert shape.target_layer_ids == (1, 9, 17, 25, 33)


def test_an_old_form_of_yarn_is_read():
    scaling = {"type": "yarn", "factor": 4.0}
    shape = zlab.from_config(as_published(rope_scaling=scaling), "config.json")
    assert shape.rope == {
        "rope_type": "yarn",
        "factor": 4.0,
        "rope_theta": 1000000,
        "original_max_position_embeddings": 40960,
    }


SLIDING = {"layer_types": ["sliding_attention"] * 5, "sliding_window": 4096, "use_sliding_window": True}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"architectures": ["DFlash2DraftModel"]}, "is of architecture DFlash2DraftModel"),
        ({"architectures": ["Qwen3ForCausalLM"]}, "is of architecture Qwen3ForCausalLM"),
        ({"dflash_config": {"mask_token_id": 1, "selector_rank": 256}}, "dflash_config.selector_rank = 256"),
        (
            {"dflash_config": {"mask_token_id": 1, "sample_from_anchor": True}},
            "dflash_config.sample_from_anchor = True",
        ),
        (
            {"dflash_config": {"mask_token_id": 1, "projector_type": "domino"}},
            "dflash_config.projector_type = 'domino'",
        ),
        ({"dflash_config": {"mask_token_id": 1, "unheard_of": 3}}, "dflash_config.unheard_of = 3"),
        ({"attention_bias": True}, "attention_bias = True is not implemented"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not implemented"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config = "),
        ({"is_neox_style": False}, "is_neox_style = False is not implemented"),
        ({"target_hidden_size": 5120}, "target_hidden_size = 5120 is not implemented"),
        ({"draft_vocab_size": 32000}, "draft_vocab_size = 32000 is not implemented"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "rotary embedding is of type 'longrope'"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "for each kind of layer is not implemented"),
        ({"rope_parameters": {"rope_theta": 5e5}, "rope_scaling": {"rope_type": "linear", "factor": 2}}, "disagree"),
        ({"is_causal": True}, "causal = True is not implemented"),
        ({**SLIDING, "is_causal": False}, "causal = False is not implemented"),
        ({**SLIDING, "use_sliding_window": False}, "no sliding_window is in use"),
        ({"layer_types": ["full_attention"] * 4}, "layer_types must name"),
        ({"layer_types": None, "use_sliding_window": True}, "without layer_types"),
        ({"dflash_config": {"mask_token_id": 151936}}, "mask token id 151936 lies outside"),
        ({"dflash_config": {"mask_token_id": 1, "target_layer_ids": [1, 36]}}, r"must lie in 0\.\.34.*got \[1, 36\]"),
        ({"dflash_config": {}}, "has no mask_token_id"),
        ({"num_target_layers": "absent"}, "has no num_target_layers"),
        ({"vocab_size": "absent"}, "has no vocab_size"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(change, said):
    with pytest.raises(InputError, match=said):
        zlab.from_config(as_published(**change), "config.json")


def test_sliding_layers_of_a_published_config_are_read():
    shape = zlab.from_config(as_published(**{**SLIDING, "is_causal": True}), "config.json")
    assert (shape.sliding_layers, shape.sliding_window) == ((0, 1, 2, 3, 4), 4096)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"speculators_model_type": "eagle3"}, "is a speculator of type 'eagle3'"),
        ({"sample_from_anchor": True}, "sample_from_anchor = true"),
        ({"sliding_window_non_causal": True}, "sliding_window_non_causal = true"),
        ({"draft_vocab_size": 32}, "drafts over 32 of the target's 97 tokens"),
        ({"aux_hidden_state_layer_ids": None}, "has no aux_hidden_state_layer_ids"),
        ({"num_target_layers": None}, "has no num_target_layers"),
    ],
)
def test_speculators_that_are_not_such_drafters_are_refused(change, said):
    config = speculators.to_config(SHAPE, "bfloat16", "org/target", [])
    with pytest.raises(InputError, match=said):
        speculators.from_config({**config, **change}, "config.json")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"tie_word_embeddings": True}, "tie_word_embeddings is true"),
        ({"auto_map": {"AutoModel": "dflash.X"}}, "auto_map names code"),
        ({"vocab_size": 96}, "mask token id 96 lies outside the target's embedding of 96 rows"),
        ({"dflash_config": {"target_layer_ids": [1]}}, "mask token id None"),
        ({"num_target_layers": 5}, r"config\.json: tapped layer ids must lie in 0\.\.3.*got \[1, 3, 5\]"),
    ],
)
def test_a_config_that_could_not_be_served_is_refused(change, said):
    check_config(zlab.to_config(SHAPE, "bfloat16"), "config.json")
    with pytest.raises(InputError, match=said):
        check_config({**zlab.to_config(SHAPE, "bfloat16"), **change}, "config.json")


def test_a_speculators_config_that_could_not_be_served_is_refused():
    config = speculators.to_config(SHAPE, "bfloat16", "org/target", [])
    check_config(config, "config.json")
    for change, said in (
        ({"aux_hidden_state_layer_ids": [0, 3]}, r"must lie in 0\.\.6"),
        ({"aux_hidden_state_layer_ids": [9]}, r"must lie in 0\.\.6"),
        ({"transformer_layer_config": {"tie_word_embeddings": True}}, "tie_word_embeddings"),
    ):
        with pytest.raises(InputError, match=said):
            check_config({**config, **change}, "config.json")


@pytest.mark.parametrize("layout", ["zlab", "speculators"])
@pytest.mark.parametrize("name", SHAPES)
def test_weights_there_and_back_are_bit_identical(tmp_path, layout, name):
    shape = shape_of(name)
    export(checkpoint(tmp_path / "run", shape), layout, tmp_path / "out", dtype="float32")
    source = read_published(str(tmp_path / "out"))
    assert (source.layout, source.shape) == (layout, shape)
    for tensor_name, tensor in weights_of(shape).items():
        assert source.tensors[tensor_name].dtype == torch.float32
        assert torch.equal(source.tensors[tensor_name], tensor)


def test_from_one_layout_to_the_other_and_back(tmp_path):
    export(checkpoint(tmp_path / "run"), "zlab", tmp_path / "a", dtype="float32")
    export(tmp_path / "a", "speculators", tmp_path / "b", dtype="float32")
    export(tmp_path / "b", "zlab", tmp_path / "c", dtype="float32")
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "c" / name).read_bytes()
    record = json.loads((tmp_path / "c" / "draftmill.json").read_text())
    assert record["facts"]["target"]["revision"] == "abc"
    assert record["facts"]["data_fingerprint"] == "f00d"


def test_weights_are_split_where_they_are_large(tmp_path):
    exported = export(checkpoint(tmp_path / "run"), "zlab", tmp_path / "out", dtype="float32", max_file_bytes=40_000)
    shards = [name for name in exported.files if name.endswith(".safetensors")]
    assert len(shards) > 2
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(weights_of(SHAPE))
    assert index["metadata"]["total_size"] == sum(4 * tensor.numel() for tensor in weights_of(SHAPE).values())
    assert all((tmp_path / "out" / name).stat().st_size < 45_000 for name in shards)
    source = read_published(str(tmp_path / "out"))
    assert all(torch.equal(source.tensors[name], tensor) for name, tensor in weights_of(SHAPE).items())
    (tmp_path / "out" / shards[1]).unlink()
    with pytest.raises(InputError, match=rf"{shards[1]} is missing; the index beside it names it"):
        read_published(str(tmp_path / "out"))


def test_an_index_may_not_point_outside_its_folder(tmp_path):
    export(checkpoint(tmp_path / "run"), "zlab", tmp_path / "out", max_file_bytes=40_000)
    (tmp_path / "out" / "model.safetensors.index.json").write_text('{"weight_map": {"fc.weight": "../run/x"}}')
    with pytest.raises(InputError, match=r"names '\.\./run/x', which is not a file beside it"):
        read_published(str(tmp_path / "out"))


def test_weights_that_are_not_a_drafter_s_are_refused(tmp_path):
    export(checkpoint(tmp_path / "run"), "zlab", tmp_path / "out")
    path = tmp_path / "out" / "model.safetensors"
    named = load_file(path)

    def with_weights(changed: dict[str, torch.Tensor]) -> None:
        save_file(changed, path)

    with_weights({name: tensor for name, tensor in named.items() if name != "fc.weight"})
    with pytest.raises(InputError, match=r"lacks fc\.weight"):
        read_published(str(tmp_path / "out"))
    with_weights({**named, "embed_tokens.weight": torch.zeros(97, 32)})
    with pytest.raises(InputError, match=r"has embed_tokens\.weight, which a DFlash drafter does not have"):
        read_published(str(tmp_path / "out"))
    with_weights({**named, "fc.weight": torch.zeros(32, 64)})
    with pytest.raises(InputError, match=r"fc\.weight is of shape \(32, 64\); by the configuration it is \(32, 96\)"):
        read_published(str(tmp_path / "out"))
    path.write_bytes(b"\x08\0\0\0\0\0\0\0{}")
    with pytest.raises(InputError, match=r"model\.safetensors can't be read"):
        read_published(str(tmp_path / "out"))
    path.unlink()
    (tmp_path / "out" / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(InputError, match=r"as a pickle \(pytorch_model\.bin\), which is never read"):
        read_published(str(tmp_path / "out"))


def test_copies_of_the_target_s_tensors_in_a_speculators_folder_are_left_out(tmp_path):
    export(checkpoint(tmp_path / "run"), "speculators", tmp_path / "out")
    path = tmp_path / "out" / "model.safetensors"
    (tmp_path / "out" / "draftmill.json").unlink()  # it holds the checksum of what was exported
    save_file(
        {**load_file(path), "embed_tokens.weight": torch.zeros(97, 32), "lm_head.weight": torch.ones(97, 32)}, path
    )
    assert set(read_published(str(tmp_path / "out")).tensors) == set(weights_of(SHAPE))


TARGET = SimpleNamespace(
    model_type="qwen3",
    hidden_size=32,
    num_hidden_layers=8,
    num_attention_heads=2,
    num_key_value_heads=2,
    head_dim=16,
    intermediate_size=64,
    vocab_size=97,
    rms_norm_eps=1e-5,
    max_position_embeddings=4096,
    rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
    eos_token_id=9,
)


def wanted_with(**settings) -> DrafterShape:
    drafter = {"num_layers": 3, "target_layer_ids": [1, 3, 5], "block_size": 8, **settings}
    return shape_for(TARGET, DrafterConfig(**drafter), mask_token_id=96)


@pytest.mark.parametrize("layout", ["zlab", "speculators", "checkpoint"])
def test_a_warm_start_has_the_checkpoint_s_network_and_the_run_s_blocks(tmp_path, layout):
    folder = checkpoint(tmp_path / "run")
    if layout != "checkpoint":
        folder = export(folder, layout, tmp_path / "out", dtype="float32").folder
    shape, tensors, notes = warm_start(str(folder), wanted_with(block_size=16))
    assert shape == replace(
        SHAPE, block_size=16, max_position_embeddings=4096, bos_token_id=None, eos_token_id=9, pad_token_id=None
    )
    assert all(torch.equal(tensors[name], tensor) for name, tensor in weights_of(SHAPE).items())
    assert f"num_heads is 4 as in {folder}, not 2" in notes
    assert f"block_size is 16; {folder} was trained with 8" in notes
    assert any(note.startswith("rope is {") for note in notes)


def test_a_drafter_for_another_target_is_refused(tmp_path):
    folder = checkpoint(tmp_path / "run")
    for change, said in (
        ({"hidden_size": 64}, "its hidden_size is 32, this target's is 64"),
        ({"vocab_size": 100}, "its vocab_size is 97, this target's is 100"),
        ({"num_target_layers": 9}, "its num_target_layers is 8, this target's is 9"),
        ({"embedding_scale": 2.0}, "its embedding_scale is 1.0, this target's is 2.0"),
    ):
        with pytest.raises(InputError, match=f"is a drafter for another target: {said}"):
            warm_start(str(folder), replace(wanted_with(), **change))


def test_settings_that_do_not_fit_are_named_with_the_ones_that_would(tmp_path):
    folder = checkpoint(tmp_path / "run", replace(SHAPE, sliding_window=16, sliding_layers=(0,)))
    with pytest.raises(InputError) as caught:
        warm_start(str(folder), wanted_with(num_layers=5, target_layer_ids=[1, 2, 5]))
    assert (
        "set drafter.num_layers=3, drafter.target_layer_ids=[1,3,5], drafter.sliding_window=16, "
        "drafter.sliding_layers=[0]"
    ) in str(caught.value)


def test_a_drafter_that_is_nowhere_is_one_line():
    with pytest.raises(InputError, match=r"no drafter at \./nowhere; give a folder, or a hub id"):
        read_published("./nowhere")
    with pytest.raises(InputError, match="drafter 'z-lab/none' can't be fetched") as caught:
        read_published("z-lab/none")
    assert "\n" not in str(caught.value)


def test_a_hub_id_is_read_from_the_hub_s_cache(tmp_path, monkeypatch):
    folder = export(checkpoint(tmp_path / "run"), "zlab", tmp_path / "out", dtype="float32").folder
    cached = tmp_path / "hub" / "models--org--Drafter"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("c0ffee")
    (cached / "snapshots").mkdir()
    folder.rename(cached / "snapshots" / "c0ffee")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    shape, tensors, _ = warm_start("org/Drafter", wanted_with())
    assert shape.num_heads == 4
    assert torch.equal(tensors["fc.weight"], weights_of(SHAPE)["fc.weight"])


def test_of_a_run_the_best_is_read_or_else_the_newest(tmp_path):
    facts = {"shape": SHAPE.to_dict()}
    for step in (10, 20, 30):
        save(tmp_path, step, weights_of(SHAPE), {}, facts)
    assert read_source(tmp_path).note == "step-30, the newest; none was evaluated"
    save(tmp_path, 20, weights_of(SHAPE), {}, {**facts, "accept_length": 4.25})
    source = read_source(tmp_path)
    assert source.note == "step-20, of the greatest held-out acceptance length (4.250)"
    assert source.folder == tmp_path / "checkpoints" / "step-20"


def test_a_run_whose_newest_is_damaged_names_the_one_before(tmp_path):
    for step in (10, 20):
        save(tmp_path, step, weights_of(SHAPE), {}, {"shape": SHAPE.to_dict()})
    (tmp_path / "checkpoints" / "step-20" / "drafter.safetensors").unlink()
    with pytest.raises(InputError, match=r"step-20/drafter\.safetensors is missing; give .*step-10 for the newest"):
        read_source(tmp_path)


def test_a_checkpoint_of_no_run_is_said(tmp_path):
    folder = save(tmp_path, 1, {"norm.weight": torch.zeros(4)}, {}, {})
    with pytest.raises(InputError, match="does not say the drafter's shape"):
        read_source(folder)
