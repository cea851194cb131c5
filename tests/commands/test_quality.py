"""bench/quality.py --tiny from beginning to end, and again from its data file."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draftmill.data.store import Store

pytestmark = pytest.mark.skipif(importlib.util.find_spec("reasoning_gym") is None, reason="needs reasoning-gym")

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "bench"))


def quality(work: Path, *arguments: str) -> dict[str, Any]:
    """The last line of a run, which must succeed."""
    command = [sys.executable, str(ROOT / "bench/quality.py"), "--tiny", "--work", str(work), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": str(work / "inductor")}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    last: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return last


def test_all_stages_and_the_store_again_from_the_data_file(tmp_path: Path) -> None:
    peer = ["specforge"] if importlib.util.find_spec("specforge") is not None else []
    first = quality(tmp_path / "a", "--seconds", "0.5", "--chats", "40", "--recipes", "default", *peer)
    assert list(first["recipes"]) == ["default", *peer]
    assert first["walk_against_decoding"]["largest"] == 0.0  # in float32 both find the same steps
    assert first["walk_against_decoding"]["identical"] == first["walk_against_decoding"]["answers"] > 0
    for found in first["recipes"].values():
        assert found["steps"] >= 1
        assert all(1.0 <= tau <= 4.0 for tau, _ in found["tau"].values())
    assert bool(first["claims"]) == bool(peer)
    report = (tmp_path / "a/report.md").read_text(encoding="utf-8")
    assert "| default |  | 1 |" in report
    runs = [json.loads(line) for line in (tmp_path / "a/runs.jsonl").read_text().splitlines()]
    assert [len(run["points"]) for run in runs] == [2] * len(runs)
    assert {path.name for path in (tmp_path / "a/runs/default-0").iterdir()} == {"run.json", "half", "final"}

    from quality_file import read_file, store_from_file
    from quality_settings import TINY, Paths

    data = read_file(tmp_path / "a/quality-data.npz")
    store = store_from_file(TINY, Paths(tmp_path / "b"), str(tmp_path / "a/target"), data)
    first_store = Store.open(tmp_path / "a/store")
    assert store.num_samples == first_store.num_samples == data.facts["chats"]
    for got, expected in zip(store.read(np.arange(len(store))), first_store.read(np.arange(len(store))), strict=True):
        assert (got[0] == expected[0]).all()
        assert (got[1] == expected[1]).all()
