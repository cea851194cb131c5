"""First weights of a drafter: random, from a published drafter, or from the target's own last layers.

The last is for targets whose decoder layers have the drafter's own form (pre-norm, q/k/v/o and gated MLP without
biases): Llama, Qwen, Mistral and their like. Others are refused, not approximated.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from draftmill.drafter.network import Drafter
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


def weights_from_target(drafter: Drafter, layers: nn.ModuleList, final_norm: Any) -> dict[str, torch.Tensor]:
    """The drafter's first weights, float32, by name: its layers are the target's last ones.

    The context starts as the last tap alone, normed as the first copied layer norms its input. What the target lacks
    (query and key norms in Llama) keeps its own first value. Raises InputError, naming the tensor, for another form.
    """
    shape = drafter.shape
    weights = {name: parameter.detach().clone() for name, parameter in drafter.named_parameters()}
    first = len(layers) - shape.num_layers
    if first < 0:
        raise InputError(f"drafter.init target: the target has {len(layers)} layers, fewer than {shape.num_layers}")
    for index in range(shape.num_layers):
        _check_form(layers[first + index], first + index)
        for part in (*COPIED, *OPTIONAL):
            module = _find(layers[first + index], part)
            name = f"layers.{index}.{part}.weight"
            if module is None and part in OPTIONAL:
                continue
            given = getattr(module, "weight", None)
            if given is None or given.shape != weights[name].shape or getattr(module, "bias", None) is not None:
                raise InputError(
                    f"drafter.init target: layer {first + index} of the target has no {part} of the drafter's form; "
                    "use drafter.init=normal"
                )
            weights[name] = given.detach().float().cpu()
    fc = torch.zeros_like(weights["fc.weight"])
    fc[:, -shape.hidden_size :].fill_diagonal_(1.0)
    # A little of the other taps, so that their gradients are not all alike.
    weights["fc.weight"] = fc + 0.1 * weights["fc.weight"]
    weights["hidden_norm.weight"] = weights["layers.0.input_layernorm.weight"].clone()
    if final_norm is not None and final_norm.weight.shape == weights["norm.weight"].shape:
        weights["norm.weight"] = final_norm.weight.detach().float().cpu()
    return weights


def _check_form(layer: nn.Module, number: int) -> None:
    """Raise InputError where a layer of these names computes something else than the drafter's: Gemma's sandwich norms,
    norms that add 1 to their weight, an activation that is not SiLU."""
    x = torch.linspace(-2.0, 2.0, 64)
    others = [name for name, _ in layer.named_children() if "norm" in name and name not in NORMS]
    activation = _find(layer, "mlp.act_fn")
    problem = None
    if others:
        problem = f"has a further {others[0]}"
    elif activation is not None and not torch.allclose(activation(x), nn.functional.silu(x), atol=1e-5):
        problem = "has another activation than SiLU"
    else:
        for name in NORMS:
            module = _find(layer, name)
            weight = getattr(module, "weight", None)
            if weight is None:
                continue  # said by name where its weight is taken
            given = torch.linspace(-2.0, 2.0, weight.numel(), device=weight.device, dtype=weight.dtype)
            with torch.no_grad():
                plain = nn.functional.rms_norm(given.float(), given.shape, weight.float(), 1e-6)
                if not torch.allclose(module(given).float(), plain, rtol=2e-2, atol=2e-2):
                    problem = f"computes {name} otherwise"
    if problem is not None:
        raise InputError(
            f"drafter.init target: layer {number} of the target is not of the drafter's form, it {problem}; "
            "use drafter.init=normal"
        )


def _find(layer: Any, path: str) -> Any:
    for part in path.split("."):
        layer = getattr(layer, part, None)
    return layer
