"""The eager step's flex attention: what is compiled for it, when, and under which lock."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from draftmill.compiling import BUILD_LOCK
from draftmill.drafter.mask import TileLists
from draftmill.records import Blocks
from draftmill.step.eager import _flex_alone

CONTEXT, ANCHORS, SIZE = 256, 32, 8


def is_taken() -> bool:
    """Whether another thread than this one would find the lock taken."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(BUILD_LOCK.taken).result()


@pytest.fixture
def _strict() -> Iterator[None]:
    """As beside a compiled step. (Undone by pytest's monkeypatch, the setting would be gone for good.)"""
    with torch._dynamo.config.patch(error_on_recompile=True):
        yield


@pytest.mark.usefixtures("_strict")
def test_flex_attention_alone_compiles_under_the_lock_and_only_for_what_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    """With and without gradients, with a window and without: four times, however many batches there are."""
    locked: list[bool] = []

    def backend(module: Any, _inputs: Any) -> Any:
        locked.append(is_taken())
        return module.forward

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    kernel = _flex_alone()
    blocks, tiles = Blocks.empty(CONTEXT, ANCHORS), TileLists(CONTEXT, ANCHORS, SIZE, "cpu", False)
    generator = torch.Generator().manual_seed(0)
    queries, keys = (1, 2, ANCHORS * SIZE, 16), (1, 2, CONTEXT + ANCHORS * SIZE, 16)
    for gradients in (True, False, True, False):
        blocks.anchors_A.copy_(torch.randint(1, CONTEXT, (ANCHORS,), generator=generator).sort().values)
        blocks.slots_A.fill_(SIZE - 1)
        for window in (None, 16, None):
            q, k, v = torch.randn(queries), torch.randn(keys), torch.randn(keys)
            with torch.set_grad_enabled(gradients):
                assert kernel(q, k, v, block_mask=tiles.mask(blocks, window)).shape == queries
            assert torch._dynamo.config.error_on_recompile
    assert locked == [True] * 4
