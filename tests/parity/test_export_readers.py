"""Exports against the programs that read them: z-lab's dflash 0.1.0, speculators 0.9.0, transformers' rotary tables."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F  # noqa: N812
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRotaryEmbedding

from draftmill.checkpoint import check, export, speculators, zlab
from draftmill.checkpoint.check import check_export, ours, probes, rotary_difference
from draftmill.checkpoint.store import save
from draftmill.checkpoint.weights import read_weights
from draftmill.drafter import Drafter, DrafterShape
from draftmill.drafter.rope import Rotary
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
    max_position_embeddings=3000,
)

ROPES = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 4.0,
        "original_max_position_embeddings": 750,
    },
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 1024,
    },
}
PARTIAL = {
    "partial": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    "partial linear": {"rope_type": "linear", "rope_theta": 1e7, "factor": 2.0, "partial_rotary_factor": 0.25},
    "partial yarn": {**ROPES["yarn"], "partial_rotary_factor": 0.5},
}
NETWORKS = {
    **{name: {"rope": rope} for name, rope in ROPES.items()},
    "sliding": {"sliding_window": 16, "sliding_layers": (0, 2)},
    "all sliding": {"sliding_window": 16, "sliding_layers": (0, 1, 2)},
    "bounded": {"logit_scale": 0.0625, "logit_softcap": 3.0},
    "one layer": {"num_layers": 1, "target_layer_ids": (4,)},
}


def drafter_of(**changes) -> Drafter:
    torch.manual_seed(0)
    drafter = Drafter(replace(SHAPE, **changes)).eval()
    with torch.no_grad():
        for parameter in drafter.parameters():  # real norms, and weights large enough for attention to matter
            parameter.copy_(
                torch.randn_like(parameter) * (0.3 if parameter.dim() == 2 else 0.2) + (parameter.dim() == 1)
            )
    return drafter


def exported(drafter: Drafter, tmp_path: Path, layout: str = "zlab", dtype: str = "float32", **options) -> Path:
    named = {name: parameter.detach() for name, parameter in drafter.named_parameters()}
    state = {"shape": drafter.shape.to_dict(), "target": {"model": "org/target", "architectures": ["Qwen3ForCausalLM"]}}
    folder = save(tmp_path / "run", 1, named, {}, state)
    return export(folder, layout, tmp_path / "out", dtype=dtype, **options).folder


def line_of(lines: list[str], package: str) -> str:
    return next(line for line in lines if package in line)


@pytest.mark.parametrize("name", NETWORKS)
def test_dflash_reads_an_export_and_gives_our_logits(tmp_path, name):
    dflash = pytest.importorskip("dflash.model", reason="dflash 0.1.0 is not installed; `make test` installs it")
    drafter = drafter_of(**NETWORKS[name])
    model = dflash.DFlashDraftModel.from_pretrained(exported(drafter, tmp_path), dtype=torch.float32).eval()
    assert model.mask_token_id == drafter.shape.mask_token_id
    assert model.block_size == drafter.shape.block_size
    assert list(model.target_layer_ids) == list(drafter.shape.target_layer_ids)
    for probe in probes(drafter.shape):
        with torch.no_grad():
            hidden = model(
                target_hidden=probe.features[None],
                noise_embedding=probe.embeddings[None],
                position_ids=probe.positions[None],
            )[0]
            logits = model.compute_logits(hidden, partial(F.linear, weight=probe.head))
        own_hidden, own_logits = ours(drafter, probe)
        assert (hidden - own_hidden).abs().max() < 1e-5
        assert (logits - own_logits).abs().max() < 1e-5
        assert own_logits.abs().max() > 0.1


def test_the_probe_reaches_past_any_training_length():
    """B12: the last probe ends at the target's last position."""
    near, far = probes(SHAPE)
    assert near.positions[0] == 0
    assert far.positions[-1] == SHAPE.max_position_embeddings - 1


def test_the_probe_sees_what_sliding_and_features_change():
    """The comparison would not be worth much if its inputs did not matter."""
    drafter, probe = drafter_of(), probes(SHAPE)[0]
    hidden, _ = ours(drafter, probe)
    moved, _ = ours(drafter, replace(probe, features=probe.features.flip(0)))
    assert (hidden - moved).abs().max() > 0.01
    sliding = drafter_of(sliding_window=16, sliding_layers=(0, 1, 2))
    assert (hidden - ours(sliding, probe)[0]).abs().max() > 0.01


@pytest.mark.parametrize("name", ROPES)
def test_rotary_tables_rebuilt_from_the_written_config_are_the_trained_ones(name):
    """B11, B12: default, linear, YaRN and llama3, up to the target's position limit."""
    shape = replace(SHAPE, rope=ROPES[name])
    positions = torch.arange(shape.max_position_embeddings)
    cosines, sines = Rotary(shape)(positions)
    for config in (
        zlab.to_config(shape, "bfloat16"),
        speculators.to_config(shape, "bfloat16", "org/target", [])["transformer_layer_config"],
    ):
        written = json.loads(json.dumps(config))
        old_form = {key: value for key, value in written.items() if key != "rope_parameters"}
        new_form = {key: value for key, value in written.items() if key not in ("rope_theta", "rope_scaling")}
        for form in (written, old_form, new_form):
            rebuilt_cosines, rebuilt_sines = Qwen3RotaryEmbedding(Qwen3Config.from_dict(form))(
                torch.zeros(1), positions[None]
            )
            assert torch.equal(rebuilt_cosines[0], torch.cat([cosines, cosines], dim=-1))
            assert torch.equal(rebuilt_sines[0], torch.cat([sines, sines], dim=-1))
            assert rotary_difference(form, shape) == 0.0


@pytest.mark.parametrize("name", PARTIAL)
def test_partial_rotary_tables_are_the_trained_ones(name):
    """B11: a factor of 0.25 must be in the written config, where engines honour it, and in training."""
    shape = replace(SHAPE, rope=PARTIAL[name], head_dim=32)
    config = json.loads(json.dumps(zlab.to_config(shape, "bfloat16")))
    positions = torch.arange(shape.max_position_embeddings)
    rotary = Rotary(shape)
    assert rotary.rotary_dim == int(32 * shape.rope["partial_rotary_factor"])
    cosines, sines = rotary(positions)
    rebuilt = Qwen3NextRotaryEmbedding(Qwen3Config.from_dict(config))(torch.zeros(1), positions[None])
    assert torch.equal(rebuilt[0][0], torch.cat([cosines, cosines], dim=-1))
    assert torch.equal(rebuilt[1][0], torch.cat([sines, sines], dim=-1))
    assert rotary_difference(config, shape) == 0.0


def test_a_config_that_forgets_the_partial_factor_is_noticed():
    shape = replace(SHAPE, rope=PARTIAL["partial"])
    config = zlab.to_config(replace(shape, rope={"rope_type": "default", "rope_theta": 1e7}), "bfloat16")
    assert rotary_difference(config, shape) == float("inf")


def test_a_config_with_another_base_is_noticed():
    config = zlab.to_config(replace(SHAPE, rope={"rope_type": "default", "rope_theta": 20000.0}), "bfloat16")
    assert rotary_difference(config, SHAPE) > 0.1


def test_the_check_names_each_reader_and_its_version(tmp_path):
    drafter = drafter_of()
    lines = check_export(exported(drafter, tmp_path), "zlab", drafter.shape, dict(drafter.named_parameters()))
    assert lines[0] == f"checked: {11 * 3 + 3} tensors equal the trained ones, rounded to torch.float32"
    assert lines[1] == "checked: rotary tables up to position 2999 (difference 0.0e+00)"
    if find_spec("dflash") is not None:
        assert line_of(lines, "dflash").startswith("checked: dflash 0.1.0 gives the same hidden states and logits")


def test_a_reader_that_is_not_there_is_said(tmp_path, monkeypatch):
    monkeypatch.setitem(check.READERS, "zlab", {"no_such_reader": None})
    drafter = drafter_of()
    lines = check_export(exported(drafter, tmp_path), "zlab", drafter.shape, dict(drafter.named_parameters()))
    assert lines[-1] == "not checked: no_such_reader is not installed"


def test_a_reader_that_cannot_be_imported_is_said(tmp_path, monkeypatch):
    def broken(folder):
        raise ImportError("No module named 'openai'")

    monkeypatch.setitem(check.READERS, "zlab", {"pytest": broken})
    drafter = drafter_of()
    lines = check_export(exported(drafter, tmp_path), "zlab", drafter.shape, dict(drafter.named_parameters()))
    assert lines[-1].startswith("not checked: pytest")
    assert lines[-1].endswith("is installed but can't be imported: No module named 'openai'")


def test_bfloat16_exports_are_compared_as_they_are_stored(tmp_path):
    drafter = drafter_of()
    folder = exported(drafter, tmp_path, dtype="bfloat16")
    lines = check_export(folder, "zlab", drafter.shape, dict(drafter.named_parameters()))
    assert "rounded to torch.bfloat16" in lines[0]
    for name, parameter in drafter.named_parameters():
        assert torch.equal(read_weights(folder)[name], parameter.bfloat16())


def test_a_partial_rotary_drafter_is_not_given_to_readers_that_ignore_it(tmp_path):
    drafter = drafter_of(rope=PARTIAL["partial"])
    folder = exported(drafter, tmp_path)
    lines = check_export(folder, "zlab", drafter.shape, dict(drafter.named_parameters()))
    if find_spec("dflash") is not None:
        assert lines[-1] == "not checked: dflash 0.1.0 rotates whole heads and can't run this drafter"
    assert "rotate the whole head" in (folder / "README.md").read_text()


def test_scaled_embeddings_are_where_the_reader_looks(tmp_path):
    pytest.importorskip("dflash.model", reason="dflash 0.1.0 is not installed; `make test` installs it")
    drafter = drafter_of(embedding_scale=32**0.5)
    folder = exported(drafter, tmp_path)
    lines = check_export(folder, "zlab", drafter.shape, dict(drafter.named_parameters()))
    assert line_of(lines, "dflash").startswith("checked")
    config = json.loads((folder / "config.json").read_text())
    del config["dflash_config"]["input_embedding_scale"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=r"dflash 0\.1\.0 reads the export and differs by"):
        check_export(folder, "zlab", drafter.shape, dict(drafter.named_parameters()))


def test_a_changed_weight_is_noticed(tmp_path):
    drafter = drafter_of()
    folder = exported(drafter, tmp_path)
    named = load_file(folder / "model.safetensors")
    named["layers.1.mlp.up_proj.weight"][3, 4] += 1e-3
    save_file(named, folder / "model.safetensors")
    with pytest.raises(InputError, match=r"layers\.1\.mlp\.up_proj\.weight of the export is not the trained one"):
        check_export(folder, "zlab", drafter.shape, dict(drafter.named_parameters()))


def test_a_reader_that_differs_leaves_no_export(tmp_path, monkeypatch):
    monkeypatch.setitem(
        check.READERS, "zlab", {"pytest": lambda folder: lambda probe: (torch.zeros(8, 32), torch.zeros(8, 128))}
    )
    with pytest.raises(InputError, match=r"check failed: pytest .* reads the export and differs by"):
        exported(drafter_of(), tmp_path, check=True)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.fixture
def upstream_speculators():
    return pytest.importorskip(
        "speculators.models.dflash", reason="speculators 0.9.0 is not installed", exc_type=ImportError
    )


@pytest.mark.parametrize("name", list(NETWORKS))
def test_speculators_reads_an_export_and_gives_our_logits(tmp_path, upstream_speculators, name):
    drafter = drafter_of(**NETWORKS[name])
    folder = exported(drafter, tmp_path, layout="speculators")
    lines = check_export(folder, "speculators", drafter.shape, dict(drafter.named_parameters()))
    assert line_of(lines, "speculators").startswith(
        "checked: speculators 0.9.0 gives the same hidden states and logits"
    )


def test_speculators_own_converter_maps_our_zlab_export_to_our_speculators_config(tmp_path, upstream_speculators):
    from speculators.convert.dflash import DFlashConverter

    target = Qwen3Config(hidden_size=32, num_hidden_layers=8, vocab_size=97, architectures=["Qwen3ForCausalLM"])
    target.save_pretrained(tmp_path / "target")
    shape = replace(SHAPE, sliding_window=16, sliding_layers=(0,), rope=ROPES["yarn"])
    source = json.loads(json.dumps(zlab.to_config(shape, "bfloat16")))
    theirs = DFlashConverter()._build_config(source, str(tmp_path / "target"), None)
    ours_written = speculators.to_config(shape, "bfloat16", str(tmp_path / "target"), ["Qwen3ForCausalLM"])
    mine = upstream_speculators.DFlashSpeculatorConfig.from_dict(json.loads(json.dumps(ours_written)))
    for field in (
        "aux_hidden_state_layer_ids",
        "block_size",
        "mask_token_id",
        "draft_vocab_size",
        "sample_from_anchor",
        "sliding_window_non_causal",
        "speculators_model_type",
        "speculators_config",
    ):
        assert getattr(mine, field) == getattr(theirs, field), field
    for key in zlab.transformer_config(shape):
        if key not in ("rope_theta", "rope_scaling"):  # held in rope_parameters from there on
            read = getattr(mine.transformer_layer_config, key)
            assert read == getattr(theirs.transformer_layer_config, key), key
    assert speculators.from_config({**theirs.to_dict(), "num_target_layers": 8}, "config.json") == shape


def test_a_reader_that_can_not_read_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it raises: it is named, with its version and the first line of what it said."""

    def reader(folder: Path) -> None:
        raise TypeError("a field is not fully defined\nfor further information ...")

    monkeypatch.setitem(check.READERS, "zlab", {"numpy": reader})
    drafter = drafter_of()
    folder = exported(drafter, tmp_path)
    with pytest.raises(
        InputError, match=r"numpy [\d.]+ can't read the export: TypeError: a field is not fully defined$"
    ):
        check_export(folder, "zlab", drafter.shape, dict(drafter.named_parameters()))
