"""Loading: nested text towers, groups of devices, quantized checkpoints, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from torch import nn

from draftmill.errors import InputError
from draftmill.target import load as loading
from draftmill.target.load import TargetSource, load_target
from draftmill.target.model import Target
from draftmill.target.spread import connect, parts_of, spread
from target_kinds import DENSE, KINDS, LINEAR, random_tokens, tiny_model, tiny_target

torch.set_num_threads(1)

CPU = torch.device("cpu")
TAPS = (1, 3, 6)


def features(target: Target, tokens: torch.Tensor) -> torch.Tensor:
    with target.taps(TAPS) as taps:
        target.forward_layers(tokens)
        return taps.concatenated()


def saved(folder: Path, kind: str) -> str:
    tiny_model(kind).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("kind", ["llama", "gemma3-multimodal", "qwen2.5-vl", "gpt2"])
def test_a_target_is_loaded_as_transformers_loads_it(tmp_path: Path, kind: str) -> None:
    tokens = random_tokens(2, 9)
    with torch.no_grad():
        model = tiny_model(kind)
        states = model(input_ids=tokens, output_hidden_states=True, use_cache=False).hidden_states
    name = saved(tmp_path, kind)
    for last in (None, 6):
        target = load_target(name, dtype="float32", last_layer=last, with_tokenizer=False)
        assert type(target.model) is type(model)
        assert torch.equal(features(target, tokens), torch.cat([states[layer + 1] for layer in TAPS], dim=-1))
    assert load_target(name, with_tokenizer=False).decoder.dtype is torch.bfloat16


def test_the_text_tower_alone_is_read_where_transformers_has_a_class_for_it(tmp_path: Path) -> None:
    """Qwen3.5 is published as a multimodal model, which AutoModelForCausalLM reads as its text tower."""
    torch.manual_seed(0)
    vision = dict(depth=1, hidden_size=16, intermediate_size=16, num_heads=2, out_hidden_size=32, patch_size=4)
    config = hf.Qwen3_5Config(text_config=dict(DENSE, **LINEAR), vision_config=vision)
    whole = hf.Qwen3_5ForConditionalGeneration(config).eval()
    whole.save_pretrained(tmp_path)
    target = load_target(str(tmp_path), dtype="float32", with_tokenizer=False)
    assert type(target.model).__name__ == "Qwen3_5ForCausalLM"
    tokens = random_tokens(2, 9)
    with torch.no_grad():
        states = whole(input_ids=tokens, output_hidden_states=True, use_cache=False).hidden_states
    assert torch.equal(features(target, tokens), torch.cat([states[layer + 1] for layer in TAPS], dim=-1))


@pytest.mark.parametrize("kind", KINDS)
def test_a_group_gives_the_same_features(kind: str) -> None:
    target, tokens = tiny_target(kind), random_tokens(2, 9)
    expected = features(target, tokens)
    target.cut_after(TAPS[-1])
    group = spread(target, [CPU, CPU])
    assert torch.equal(features(group, tokens), expected)
    assert torch.equal(features(group, tokens), expected)


def test_layers_are_shared_out_by_their_bytes() -> None:
    """On devices without memory, so that two of them can be told apart."""
    target = tiny_target("llama")
    first, second = CPU, torch.device("meta")
    parts = parts_of(target, [first, second])
    assert [parts[f"model.layers.{layer}"] for layer in range(8)] == [first] * 4 + [second] * 4
    assert parts["model.embed_tokens"] == parts["model.rotary_emb"] == first
    assert parts["model.norm"] == parts["lm_head"] == second
    group = spread(target, [first, second])
    assert (group.device, group.output_device) == (first, second)
    group.layers[4].register_forward_pre_hook(lambda _m, arguments: seen.append(arguments[0].device))
    seen: list[torch.device] = []
    group.forward_layers(random_tokens(2, 9))
    assert seen == [second]


def test_a_shared_tensor_crosses_over_once_in_a_forward() -> None:
    """Were the rotary tables moved for every layer, the first device would wait for the second at each of them."""
    target = tiny_target("llama")
    meta = torch.device("meta")
    group = spread(target, [CPU, meta])
    received: list[tuple[int, int]] = []

    def note(_module: nn.Module, _arguments: Any, options: Any) -> None:
        received.append((id(options["position_embeddings"][0]), id(options["position_embeddings"][1])))

    for layer in group.layers[4:]:
        layer.register_forward_pre_hook(note, with_kwargs=True)
    group.forward_layers(random_tokens(2, 9))
    assert len(received) == 4
    assert len(set(received)) == 1
    assert received[0][0] != received[0][1]


def test_connecting_leaves_other_devices_tensors_alone() -> None:
    target = tiny_target("qwen3")
    connect(target, parts_of(target, [CPU, CPU]))
    assert torch.equal(features(target, random_tokens(1, 5)), features(tiny_target("qwen3"), random_tokens(1, 5)))


def test_a_target_on_a_group_of_cpus_is_placed_by_the_source(tmp_path: Path) -> None:
    source = TargetSource(saved(tmp_path, "qwen3"), "float32")
    first = source.read([CPU, CPU])
    tokens = random_tokens(2, 9)
    expected = features(first, tokens)
    head = first.head()
    for move in (False, False, True):
        replica = source.place(first, [CPU, CPU], TAPS[-1], move=move)
        assert torch.equal(features(replica, tokens), expected)
        assert len(replica.layers) == TAPS[-1] + 1
    assert head.head_VH.shape == (97, 32)
    assert source.place(first, [CPU], TAPS[-1], move=True) is first


def quantized(folder: Path, **quantization: Any) -> str:
    name = saved(folder, "llama")
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": quantization}))
    return name


@pytest.mark.parametrize(
    ("quantization", "said"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
        ({"quant_method": "gptq", "bits": 4}, "gptq"),
    ],
)
def test_a_quantized_target_without_its_package_is_one_clear_line(
    tmp_path: Path, quantization: dict[str, Any], said: str
) -> None:
    name = quantized(tmp_path, **quantization)
    with pytest.raises(InputError) as refused:
        load_target(name, with_tokenizer=False)
    message = str(refused.value)
    assert said in message.lower()
    assert message.startswith(f"target {name!r} can't be loaded: ")
    assert "\n" not in message


def test_a_quantized_target_without_accelerate_is_one_clear_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = quantized(tmp_path, quant_method="fp8")
    monkeypatch.setattr(loading.importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(InputError, match="is quantized, which transformers loads with the package accelerate"):
        load_target(name, with_tokenizer=False)


def saved_in_fp8(folder: Path) -> tuple[str, str]:
    """The folders of a checkpoint as fp8 ones are published, with a scale for each block of 128 x 128, and of one in
    bfloat16 with the values that its weights stand for."""
    torch.manual_seed(0)
    sizes = dict(DENSE, hidden_size=128, intermediate_size=256, head_dim=64, num_hidden_layers=4)
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**sizes)).to(torch.bfloat16)
    in_fp8, plain = folder / "fp8", folder / "bfloat16"
    model.save_pretrained(in_fp8)
    tensors: dict[str, torch.Tensor] = {}
    for name, weight in model.state_dict().items():
        tensors[name] = weight.clone()
        if name.endswith("_proj.weight"):
            blocks = weight.float().unflatten(0, (-1, 128)).unflatten(2, (-1, 128))
            scale = blocks.abs().amax(dim=(1, 3), keepdim=True) / 448.0  # the largest number of float8_e4m3fn
            rounded = (blocks / scale).to(torch.float8_e4m3fn)
            tensors[name] = rounded.reshape(weight.shape)
            tensors[f"{name}_scale_inv"] = scale[:, 0, :, 0].clone()
            weight.copy_((rounded.float() * scale).reshape(weight.shape))
    model.save_pretrained(plain)
    save_file(tensors, in_fp8 / "model.safetensors", metadata={"format": "pt"})
    method = dict(quant_method="fp8", weight_block_size=[128, 128], activation_scheme="dynamic")
    path = in_fp8 / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": method}))
    return str(in_fp8), str(plain)


def test_an_fp8_checkpoint_gives_the_features_of_the_weights_it_stands_for(tmp_path: Path) -> None:
    """On a CPU transformers puts its weights into bfloat16 as it reads them."""
    name, plain = saved_in_fp8(tmp_path)
    tokens, taps = random_tokens(2, 9), (1, 2)

    def of(target: Target) -> torch.Tensor:
        with target.taps(taps) as tapped:
            target.forward_layers(tokens)
            return tapped.concatenated()

    expected = of(load_target(plain, with_tokenizer=False))
    source = TargetSource(name)
    first = source.read([CPU])
    another, group = source.place(first, [CPU], taps[-1]), source.place(first, [CPU, CPU], taps[-1])
    moved = source.place(first, [CPU], taps[-1], move=True)
    assert moved is first
    for target in (another, group, moved):
        assert {parameter.dtype for parameter in target.model.parameters()} == {torch.bfloat16}
        assert len(target.layers) == taps[-1] + 1
        torch.testing.assert_close(of(target), expected)


def test_a_quantized_target_keeps_its_types_and_is_read_anew_for_each_replica(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one kind that CPUs run here: its config says so, and how it was loaded is recorded."""
    name = quantized(tmp_path, quant_method="fp8")
    asked: list[dict[str, Any]] = []

    def from_pretrained(_name: str, **options: Any) -> Any:
        asked.append(options)
        return tiny_model("llama"), {"missing_keys": set(), "mismatched_keys": set()}

    monkeypatch.setattr(loading.AutoModelForCausalLM, "from_pretrained", from_pretrained)
    source = TargetSource(name, "bfloat16")
    first = source.read([CPU])
    first.config.quantization_config = {"quant_method": "fp8"}
    assert source.place(first, [CPU], TAPS[-1], move=True) is first
    other = source.place(first, [CPU], TAPS[-1])
    assert other is not first
    assert [options["dtype"] for options in asked] == ["auto", "auto"]
    assert [options["device_map"] for options in asked] == [{"": CPU}, {"": CPU}]


@pytest.mark.parametrize("damage", ["missing", "mismatched"])
def test_weights_that_would_be_drawn_at_random_are_refused(tmp_path: Path, damage: str) -> None:
    """Case B1: a head or a layer that was not in the checkpoint must not be made up."""
    name = saved(tmp_path, "llama")
    weights = load_file(tmp_path / "model.safetensors")
    if damage == "missing":
        del weights["lm_head.weight"], weights["model.layers.3.mlp.up_proj.weight"]
        said = "lacks 2 of the weights that LlamaForCausalLM needs.*lm_head.weight, model.layers.3.mlp.up_proj.weight;"
    else:
        weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"][:5].clone()
        said = "lacks 1 of the weights.*or has them in another shape: model.embed_tokens.weight;"
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match=said) as refused:
        load_target(name, with_tokenizer=False)
    assert "\n" not in str(refused.value)


def test_a_tied_head_is_not_missing(tmp_path: Path) -> None:
    name = saved(tmp_path, "qwen3")
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    head = load_target(name, dtype="float32", with_tokenizer=False).head()
    assert head.head_VH is head.embedding_VH


def test_a_damaged_file_is_one_clear_line(tmp_path: Path) -> None:
    name = saved(tmp_path, "llama")
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:5000])
    with pytest.raises(InputError, match="can't be loaded") as refused:
        load_target(name, with_tokenizer=False)
    assert "\n" not in str(refused.value)


def test_a_target_too_large_for_its_device_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = TargetSource(saved(tmp_path, "llama"), "float32")
    first = source.read([CPU])

    def full(*_: Any) -> Target:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Target, "replica", full)
    with pytest.raises(InputError, match=r"does not fit into the memory of cpu; spread it over several devices"):
        source.place(first, [CPU], TAPS[-1])


def test_float8_says_what_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = TargetSource(saved(tmp_path, "llama"), quantize="float8")
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *_: None)
    with pytest.raises(InputError, match=r"compute capability 8\.9 or higher, got cpu; leave target\.quantize out"):
        source.read([torch.device("cpu")])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0) if device.index == 0 else (8, 0))
    with pytest.raises(InputError, match=r"8\.9 or higher, got cuda:1"):
        source.read([torch.device("cuda:0"), torch.device("cuda:1")])
    with pytest.raises(InputError, match="needs the package torchao; pip install torchao"):
        source.read([torch.device("cuda:0")])


def test_a_quantized_checkpoint_is_not_quantized_again(tmp_path: Path) -> None:
    folder = Path(saved(tmp_path, "llama"))
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8"}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match="is quantized as it is"):
        TargetSource(str(folder), quantize="float8").read([torch.device("cpu")])
