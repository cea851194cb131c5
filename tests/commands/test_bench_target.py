"""The target benchmark's script runs where there is no GPU, and says what could not run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_the_script_runs_on_a_cpu(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    command = ["bench/target.py", "--tiny", "--device", "cpu", "--repeats", "1", "--out", str(out), "--sizes", "8x2048"]
    done = subprocess.run(
        [sys.executable, *command, "--contenders", "plain", "packed", "graphed"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    got = json.loads(done.stdout.splitlines()[-1])
    assert got == json.loads(out.read_text())
    assert list(got["sizes"]) == ["8x2048"]
    size = got["sizes"]["8x2048"]
    # 4 documents of 32 tokens in 6 layers: q, k, v, o and the MLP, then pairs that see each other
    layer = 64 * (64 + 32 + 32 + 64) + 3 * 64 * 96
    pairs = 4 * 32 * 33 // 2
    assert size["useful_tflop"] == pytest.approx(6 * (2 * layer * 4 * 32 + 4 * pairs * 64) / 1e12, rel=1e-4)
    assert size["contenders"]["plain"]["difference"] == 0
    assert size["contenders"]["packed"]["difference"] < 1e-4
    assert size["contenders"]["plain"]["runs"] == 2
    assert size["contenders"]["graphed"] == {"error": "ValueError: a CUDA graph needs a CUDA device, got cpu"}
