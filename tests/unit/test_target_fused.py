"""Fused kernels go into one instance: the process's modules and other instances stay as they were."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch
from transformers.models.qwen3 import modeling_qwen3

from draftmill.target.step_fused import FusedForward, NoFusedKernels, patched
from target_kinds import random_tokens, tiny_target

torch.set_num_threads(1)

TAPS = (1, 3, 6)
CALLS: list[str] = []


def fused_rotary(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *_: Any) -> Any:
    CALLS.append("rotary")
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return tuple(x * cos + modeling_qwen3.rotate_half(x) * sin for x in (q, k))


class FusedNorm(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        CALLS.append("norm")
        return self.weight * torch.nn.functional.rms_norm(x, x.shape[-1:], eps=self.fused_eps)


def apply_fused(rope: bool = True, cross_entropy: bool = True, model: Any = None) -> None:
    """Patches as Liger does: names of the module, a method of a class, and the instance's own modules."""
    assert not cross_entropy
    if rope:
        modeling_qwen3.apply_rotary_pos_emb = fused_rotary
    modeling_qwen3.Qwen3RMSNorm = FusedNorm
    modeling_qwen3.Qwen3MLP.extra_repr = lambda _self: "fused"
    for layer in model.layers:
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            norm.fused_eps = 1e-6
            norm.forward = types.MethodType(FusedNorm.forward, norm)


def features(target: Any) -> torch.Tensor:
    with target.taps(TAPS) as taps:
        target.forward_layers(random_tokens(2, 12))
        return taps.concatenated()


def test_a_patch_stays_inside_its_instance_and_can_be_taken_back() -> None:
    names = ("apply_rotary_pos_emb", "Qwen3RMSNorm", "Qwen3MLP")
    before = {name: getattr(modeling_qwen3, name) for name in names}
    representation = modeling_qwen3.Qwen3MLP.extra_repr
    target, other = tiny_target("qwen3"), tiny_target("qwen3")
    expected = features(target)
    changes = patched(target, apply_fused)
    assert {name: getattr(modeling_qwen3, name) for name in names} == before
    assert modeling_qwen3.Qwen3MLP.extra_repr is representation
    CALLS.clear()
    torch.testing.assert_close(features(target), expected, rtol=1e-4, atol=1e-4)
    assert (CALLS.count("rotary"), CALLS.count("norm")) == (8, 16)
    CALLS.clear()
    assert torch.equal(features(other), expected)
    assert CALLS == []
    for change in reversed(changes):
        change.undo()
    assert torch.equal(features(target), expected)
    assert CALLS == []
    assert not hasattr(target.layers[0].input_layernorm, "fused_eps")
    assert "forward" not in vars(target.layers[0].self_attn)


def test_a_patch_that_fails_leaves_the_process_as_it_was() -> None:
    before = modeling_qwen3.apply_rotary_pos_emb

    def failing(model: Any) -> None:
        apply_fused(cross_entropy=False, model=model)
        raise RuntimeError("no kernel for this device")

    with pytest.raises(RuntimeError, match="no kernel"):
        patched(tiny_target("qwen3"), failing)
    assert modeling_qwen3.apply_rotary_pos_emb is before


def liger(monkeypatch: pytest.MonkeyPatch, known: dict[str, Any]) -> None:
    patches = types.ModuleType("liger_kernel.transformers.monkey_patch")
    patches.MODEL_TYPE_TO_APPLY_LIGER_FN = known  # type: ignore[attr-defined]
    parent = types.ModuleType("liger_kernel.transformers")
    parent.monkey_patch = patches  # type: ignore[attr-defined]
    for name, module in (
        ("liger_kernel", types.ModuleType("liger_kernel")),
        ("liger_kernel.transformers", parent),
        ("liger_kernel.transformers.monkey_patch", patches),
    ):
        monkeypatch.setitem(sys.modules, name, module)


def test_applying_and_undoing(monkeypatch: pytest.MonkeyPatch) -> None:
    liger(monkeypatch, {"qwen3": apply_fused})
    target = tiny_target("qwen3")
    expected = features(target)
    forward = FusedForward(target, TAPS)
    for _ in range(2):
        forward.apply()
        forward.apply()
        CALLS.clear()
        got = torch.cat(forward.run(random_tokens(2, 12), None), dim=-1)
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
        assert CALLS.count("rotary") == 8
        forward.undo()
        assert torch.equal(features(target), expected)


def test_what_liger_does_not_know_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    liger(monkeypatch, {"qwen3": apply_fused})
    with pytest.raises(NoFusedKernels, match="Liger knows no kernels for gpt2"):
        FusedForward(tiny_target("gpt2"), TAPS)
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", None)
    with pytest.raises(NoFusedKernels, match="liger-kernel can't be imported"):
        FusedForward(tiny_target("qwen3"), TAPS)
