"""First weights of a drafter: random, from a published drafter, or from the target's own last layers.

The last is for targets whose decoder layers have the drafter's own form (pre-norm, q/k/v/o and gated MLP without
biases): Llama, Qwen, Mistral and their like. Others are refused, not approximated.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from draftmill.drafter.network import Drafter, DrafterLayer
from draftmill.drafter.shape import DrafterShape
from draftmill.errors import InputError

COPIED = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
    "input_layernorm",
    "post_attention_layernorm",
)
NORMS = ("input_layernorm", "post_attention_layernorm")
OPTIONAL = ("self_attn.q_norm", "self_attn.k_norm")


def check_layers(layers: nn.ModuleList, shape: DrafterShape) -> None:
    """Raise InputError, naming layer and tensor, where a target's last layers can't be a drafter's first ones.

    The layers may be empty ones (on the meta device): nothing is asked of them but their form.
    """
    first = len(layers) - shape.num_layers
    if first < 0:
        raise InputError(
            f"drafter.init target: the target has {len(layers)} layers, fewer than drafter.num_layers "
            f"{shape.num_layers}; lower it, or use drafter.init=normal"
        )
    with torch.device("meta"):
        wanted = {name: parameter.shape for name, parameter in DrafterLayer(shape).named_parameters()}
    for number, layer in enumerate(layers[first:], start=first):
        if (problem := _other_form(layer)) is not None:
            raise InputError(
                f"drafter.init target: layer {number} of the target is not of the drafter's form, it {problem}; "
                "use drafter.init=normal"
            )
        for part in (*COPIED, *OPTIONAL):
            module = _find(layer, part)
            if module is None and part in OPTIONAL:
                continue
            given = getattr(module, "weight", None)
            if given is None or given.shape != wanted[f"{part}.weight"] or getattr(module, "bias", None) is not None:
                raise InputError(
                    f"drafter.init target: layer {number} of the target has no {part} of the drafter's form; "
                    "use drafter.init=normal"
                )


def weights_from_target(drafter: Drafter, layers: nn.ModuleList, final_norm: Any) -> dict[str, torch.Tensor]:
    """The drafter's first weights, float32, by name: its layers are the target's last ones.

    The context starts as the last tap alone, normed as the first copied layer norms its input. What the target lacks
    (query and key norms in Llama) keeps its own first value. Raises InputError as `check_layers` does.
    """
    shape = drafter.shape
    check_layers(layers, shape)
    weights = {name: parameter.detach().clone() for name, parameter in drafter.named_parameters()}
    for index, layer in enumerate(layers[len(layers) - shape.num_layers :]):
        for part in (*COPIED, *OPTIONAL):
            if (module := _find(layer, part)) is not None:
                weights[f"layers.{index}.{part}.weight"] = module.weight.detach().float().cpu()
    fc = torch.zeros_like(weights["fc.weight"])
    fc[:, -shape.hidden_size :].fill_diagonal_(1.0)
    # A little of the other taps, so that their gradients are not all alike.
    weights["fc.weight"] = fc + 0.1 * weights["fc.weight"]
    weights["hidden_norm.weight"] = weights["layers.0.input_layernorm.weight"].clone()
    if final_norm is not None and final_norm.weight.shape == weights["norm.weight"].shape:
        weights["norm.weight"] = final_norm.weight.detach().float().cpu()
    return weights


def _other_form(layer: nn.Module) -> str | None:
    """What a layer of these names computes otherwise than the drafter's: Gemma's sandwich norms, norms that add 1 to
    their weight, an activation that is not SiLU. None where nothing is known to differ."""
    others = [name for name, _ in layer.named_children() if "norm" in name and name not in NORMS]
    if others:
        return f"has a further {others[0]}"
    activation = _find(layer, "mlp.act_fn")
    if activation is not None and not _is_silu(activation):
        return "has another activation than SiLU"
    for name in NORMS:
        module = _find(layer, name)
        if getattr(module, "weight", None) is not None and not _is_plain_norm(module):
            return f"computes {name} otherwise"
    return None


def _is_silu(activation: Any) -> bool:
    x = torch.linspace(-2.0, 2.0, 64)
    learned = isinstance(activation, nn.Module) and any(True for _ in activation.parameters())
    return not learned and torch.allclose(activation(x), nn.functional.silu(x), atol=1e-5)


@torch.no_grad()
def _is_plain_norm(module: nn.Module) -> bool:
    """Whether it is the RMS norm times its weight. Tried on a copy with weights of its own: empty ones have none."""
    trial = copy.deepcopy(module).to_empty(device="cpu").float()
    for parameter in trial.parameters():
        parameter.copy_(torch.linspace(0.5, 1.5, parameter.numel()).view_as(parameter))
    weight = trial.get_parameter("weight")
    given = torch.linspace(-2.0, 2.0, weight.numel())
    plain = nn.functional.rms_norm(given, given.shape, weight, 1e-6)
    return torch.allclose(trial(given), plain, rtol=1e-3, atol=1e-3)


def _find(layer: Any, path: str) -> Any:
    for part in path.split("."):
        layer = getattr(layer, part, None)
    return layer
