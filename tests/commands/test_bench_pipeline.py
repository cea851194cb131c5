"""The benchmarks of whole runs as scripts on a CPU: every part comes to its figures, and they belong together."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from draftmill.config import TrainConfig
from draftmill.records import Blocks

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def run(script: str, *arguments: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, f"bench/{script}", *arguments],
        cwd=ROOT,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_the_pipelines_share_and_the_price_of_one_interpreter(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    options = ["--rounds", "1", "--batches", "4", "--gil-batches", "6", "--samples", "500", "--out", str(out)]
    got = run(
        "pipeline.py", "--tiny", "--parts", "share", "spread", "mixed", "gil", "--folder", str(tmp_path), *options
    )
    assert got == json.loads(out.read_text())
    share = got["share"]
    assert share["slower_side"] == min(("target", "drafter"), key=share["ktok_s"].get)
    assert share["share"] == pytest.approx(share["ktok_s"]["both"] / share["ktok_s"][share["slower_side"]])
    both = share["both"]
    assert both["batches"] == 4
    assert both["ktok_s"] == pytest.approx(both["tokens"] / both["seconds"] / 1e3, rel=1e-2)
    assert [worker["name"] for worker in both["workers"]] == ["target-0", "drafter-0"]
    for layout in ("spread", "mixed"):
        part = got[layout]
        assert list(part["rounds"]) == list(part["last"]) == [layout, f"{layout}, at once"]
        assert part["ktok_s"] == pytest.approx(part["rounds"][layout][0], rel=1e-3)
        for last in part["last"].values():
            assert last["batches"] == 8
            assert len(last["ready"]) == 2
            assert [worker["name"] for worker in last["workers"]] == ["target-0", "drafter-0"], "there is one device"
    gil = got["gil"]
    assert list(gil) == ["size", "ratio_bar", "eager", "part_s"], "nothing is captured on a CPU"
    assert [len(gil["eager"]["workers"][layout]) for layout in ("1+1", "5+3")] == [2, 8]
    assert not list(tmp_path.glob("draftmill-*")), "the store is removed"


def test_the_share_of_held_out_evaluations_at_the_default_interval(tmp_path: Path) -> None:
    options = ["--heldout", "16", "--every", "4", "--evaluations", "2", "--rounds", "1", "--samples", "500"]
    got = run("heldout.py", "--tiny", "--folder", str(tmp_path), *options)
    assert got["interval_steps"] == TrainConfig().evaluate_every
    assert (got["heldout_samples"], got["evaluations_by_round"]) == (16, {"without": [0], "with": [2]})
    assert 1 <= got["heldout_batches"] <= 16
    assert got["share"] == pytest.approx(got["evaluation_s"] / (got["interval_steps"] * got["step_s"]))
    assert got["evaluation_in_steps"] == pytest.approx(got["share"] * got["interval_steps"])
    assert not list(tmp_path.iterdir()), "the store is removed"


def test_eight_gpus_scaled_down(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    options = ["--samples", "1000", "--batches", "6", "--modes", "eager", "--out", str(out)]
    got = run("eight_gpus.py", "--tiny", "--num-devices", "3", "--folder", str(tmp_path), *options)
    assert got == json.loads(out.read_text())
    assert {moment: status["exit_code"] for moment, status in got["status"].items()} == {
        "loading": 3,
        "warming up": 3,
        "training": 0,
    }
    assert "loading targets 2/2" in got["status"]["loading"]["text"]
    layouts = [name for name in got if name.startswith("layout ")]
    assert layouts == ["layout 2+1", "layout 1+1", "layout 1+2"]
    for name in layouts:
        part = got[name]
        assert len(part["workers"]) == sum(int(number) for number in name.removeprefix("layout ").split("+"))
        assert part["of_predicted"] == pytest.approx(part["ktok_s"] / part["predicted_ktok_s"], rel=1e-3)
    ended = got["conclusions"]
    ratio = got["layout 2+1"]["per_gpu_ktok_s"] / got["layout 1+1"]["per_gpu_ktok_s"]
    assert ended["per_gpu_ratio"] == pytest.approx(ratio)
    assert list(ended["modes_ktok_s"]) == ["eager"]
    assert [line.split()[0] for line in got["data"][:2]] == ["1000", "Batches"]
    assert not list(tmp_path.glob("draftmill-*"))


def test_layouts_of_any_box(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    from eight_gpus import layouts_for

    assert layouts_for(8) == [(5, 3), (4, 4), (6, 2)]
    assert layouts_for(4) == [(2, 2), (1, 3), (3, 1)]
    assert layouts_for(2) == layouts_for(1) == [(1, 1)]


def test_a_peer_gets_our_anchors_in_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    pytest.importorskip("specforge")
    from pipeline_peers import anchors_by_row

    # rows of 10 tokens with 4, 7 and 2 real ones, in context slots 0..3, 4..10 and 11..12
    source_T = torch.cat([torch.arange(4), 10 + torch.arange(7), 20 + torch.arange(2)])
    blocks = Blocks.empty(16, 6)
    blocks.anchors_A[:4] = torch.tensor([1, 4, 8, 12])
    blocks.slots_A[:4] = torch.tensor([2, 3, 2, 1])
    anchors, keep = anchors_by_row(blocks, source_T, 3, 10)
    assert anchors.shape == keep.shape == (3, 8)
    assert [anchors[row][keep[row]].tolist() for row in range(3)] == [[1], [0, 4], [1]]
