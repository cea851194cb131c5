"""Rounding to float8, and where training in it is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from draftmill.checkpoint.resume import check_same_run
from draftmill.config import Float8Choice, build_config
from draftmill.drafter.float8 import GRADIENTS, VALUES, check_float8, column_major, product, round_float8
from draftmill.drafter.network import Drafter, Linear
from draftmill.errors import InputError
from draftmill.pipeline.collective import Hosts
from draftmill.train.setup import set_up
from small_steps import SHAPE, small_state
from tiny import config_of, small_world

GPU = torch.device("cuda:0")
WHOLE = replace(SHAPE, hidden_size=32, intermediate_size=48, head_dim=16, vocab_size=80)
"""Of sides that are multiples of 16."""


@pytest.mark.parametrize(("dtype", "most"), [(VALUES, 448.0), (GRADIENTS, 57344.0)])
def test_the_largest_becomes_the_types_largest(dtype: torch.dtype, most: float) -> None:
    for largest in (1e-12, 0.37, 3e4, 1e30):
        x = torch.tensor([[largest, -largest, largest / 3, 0.0]])
        rounded, scale = round_float8(x, dtype)
        assert rounded.dtype == dtype
        assert (scale.dtype, scale.shape) == (torch.float32, torch.Size([]))
        assert rounded.float()[0].tolist()[:2] == [most, -most]
        torch.testing.assert_close(rounded.float() * scale, x, rtol=0.0625 if dtype == VALUES else 0.125, atol=0.0)


@pytest.mark.parametrize("dtype", [VALUES, GRADIENTS])
def test_numbers_that_the_type_has_stay(dtype: torch.dtype) -> None:
    """All of them, at a scale of 1, from float32 and from bfloat16."""
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(dtype)
    numbers = codes.float()[codes.float().isfinite()]
    for wide in (torch.float32, torch.bfloat16):
        rounded, scale = round_float8(numbers.to(wide)[None], dtype)
        assert float(scale) == 1.0
        assert torch.equal(rounded.float()[0], numbers)


@pytest.mark.parametrize("dtype", [VALUES, GRADIENTS])
def test_zeros_stay_zeros_and_what_is_no_number_is_seen(dtype: torch.dtype) -> None:
    rounded, scale = round_float8(torch.zeros(3, 16), dtype)
    assert not rounded.float().any()
    assert 0.0 < float(scale) < 1e-20
    for bad in (float("nan"), float("inf"), -float("inf")):
        x = torch.ones(2, 2)
        x[1, 0] = bad
        rounded, scale = round_float8(x, dtype)
        assert not (rounded.float() * scale)[1, 0].isfinite()


def test_rounded_is_row_major_whatever_comes() -> None:
    x = torch.randn(4, 6).t()
    rounded, _ = round_float8(x, VALUES)
    assert rounded.is_contiguous()
    across = column_major(rounded)
    assert (across.stride(), across.shape) == ((1, 6), (6, 4))
    assert torch.equal(across.float(), rounded.float())
    one = torch.ones(())
    expected = rounded.float() @ across.float().t() * 6.0
    got = product(rounded, one * 2, across.t(), one * 3, torch.bfloat16)
    torch.testing.assert_close(got, expected.bfloat16())


def test_who_multiplies_in_float8() -> None:
    """A training state tells its drafter; another drafter, as a decoder has one, does not."""
    for choice, linears in ((None, False), ("head", False), ("all", True)):
        drafter = small_state(choice).drafter  # type: ignore[arg-type]
        assert {module.float8 for module in drafter.modules() if isinstance(module, Linear)} == {linears}
    assert not any(module.float8 for module in Drafter(SHAPE).modules() if isinstance(module, Linear))


# Refusals


def refused(choice: Float8Choice, **shape: int) -> str:
    with pytest.raises(InputError) as caught:
        check_float8(choice, replace(WHOLE, **shape), torch.bfloat16, [GPU])
    return str(caught.value)


def test_what_can_not_be_trained_in_float8(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9) if device.index == 0 else (8, 6))
    check_float8(None, SHAPE, torch.float32, [torch.device("cpu")])
    for choice in ("head", "all"):
        check_float8(choice, WHOLE, torch.bfloat16, [GPU])  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"capability 8\.9 or higher, got cuda:1; leave drafter\.float8 out"):
        check_float8("head", WHOLE, torch.bfloat16, [GPU, torch.device("cuda:1")])
    with pytest.raises(InputError, match=r"is computed in bfloat16, got drafter\.dtype float32; leave one of the two"):
        check_float8("head", WHOLE, torch.float32, [GPU])
    said = refused("head", vocab_size=81)
    assert said.endswith("multiples of 16, got LM head of 81 x 32; leave drafter.float8 out")
    said = refused("all", intermediate_size=40)
    assert "multiples of 16, got gate_proj of 40 x 32; leave drafter.float8 out or set it to head" in said
    assert "got q_proj of 24 x 32" in refused("all", head_dim=12)
    assert "got k_proj of 24 x 32" in refused("all", head_dim=24, num_heads=2, num_kv_heads=1)
    check_float8("head", replace(WHOLE, intermediate_size=40, head_dim=12), torch.bfloat16, [GPU])


def test_a_run_asks_when_it_is_set_up_and_may_not_change_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = small_world(tmp_path)
    monkeypatch.setattr("draftmill.drafter.float8.check_devices", lambda setting, devices: None)
    with pytest.raises(InputError, match=r"got drafter\.dtype float32"):
        set_up(config_of(world, "drafter.float8=all"), Hosts())
    setup = set_up(config_of(world, "drafter.float8=all", "drafter.dtype=bfloat16"), Hosts())
    assert setup.config.drafter.float8 == "all"
    facts = {"data_fingerprint": setup.store.fingerprint, "batches_per_step": 1}
    saved = {"config": setup.config.model_dump(mode="json"), "shape": setup.shape.to_dict(), **facts}
    assert check_same_run(saved, setup.config, setup.shape, **facts) == []
    with pytest.raises(InputError, match=r"drafter\.float8 was all, is None"):
        check_same_run(saved, config_of(world, "drafter.dtype=bfloat16"), setup.shape, **facts)
    del saved["config"]["drafter"]["float8"]  # from before there was any
    plain = build_config({**world, "drafter": {**world["drafter"], "dtype": "bfloat16"}})
    assert check_same_run(saved, plain, setup.shape, **facts) == []
