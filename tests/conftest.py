"""Fixtures shared by all tests: small random models, the real small target, one thread for repeatable sums."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def smollm2_folder() -> Path:
    """SmolLM2-135M-Instruct as safetensors. DRAFTMILL_CACHE names the cache; `make test` fills it."""
    cache = Path(os.environ.get("DRAFTMILL_CACHE", Path(__file__).parents[1] / ".cache"))
    folder = cache / "smollm2-135m-instruct"
    if not (folder / "model.safetensors").exists():
        pytest.skip(f"the real target is not in {cache}; `make target` fetches it")
    return folder
