"""bench/optimizer.py as a user types it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_its_last_line_is_json() -> None:
    command = [sys.executable, "bench/optimizer.py", "--shape", "tiny", "--repeats", "1", "--powers", "0", "25"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    result = json.loads(done.stdout.splitlines()[-1])
    assert list(result["median_ms"]) == ["adamw", "adamw, ema", "muon, 2^0", "muon, 2^25", "muon, 2^25, ema", "torch"]
    assert all(milliseconds > 0.0 for milliseconds in result["median_ms"].values())
    # five iterations of 4 m^2 n + 2 m^3: q, k, v, o and the MLP's three in five layers, and fc
    layer = 2 * (6 * 64**3) + 2 * (4 * 32**2 * 64 + 2 * 32**3) + 3 * (4 * 64**2 * 96 + 2 * 64**3)
    expected = 5 * (5 * layer + 4 * 64**2 * 320 + 2 * 64**3)
    assert result["iteration_tflop"] == expected / 1e12
