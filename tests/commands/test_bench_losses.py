"""The losses' benchmark runs where there is no GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_script_runs_on_a_cpu() -> None:
    sizes = ["--rows", "16", "--vocabulary", "256", "--hidden", "32", "--repeats", "2"]
    done = subprocess.run(
        [sys.executable, "bench/losses.py", "--device", "cpu", *sizes],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    got = json.loads(done.stdout.splitlines()[-1])
    assert got["device"] == "cpu, 1 threads"
    assert set(got["losses"]) == {
        "products",
        "products, target too",
        "cross_entropy (plain)",
        "cross_entropy, labels of the target (plain)",
        "kl (plain)",
        "total_variation (plain)",
        "all three (plain)",
    }
    assert all(figures["ms"] > 0 for figures in got["losses"].values())
