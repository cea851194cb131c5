"""The report of bench/quality.py on runs written by hand: figures over seeds, claims, table and plot."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[2] / "bench"))

from quality_report import report
from quality_settings import Paths, Settings

SUITES = ("mt_bench", "humaneval")


def run(recipe: str, seed: int, courses: dict[str, list[float]], peer: int | None = None) -> dict[str, Any]:
    """A run whose mean tau on each suite takes this course; pooled it is 0.1 less everywhere."""
    moments = len(next(iter(courses.values())))
    points = [
        {
            "share": (index + 1) / moments,
            "seconds": 10.0 * (index + 1),
            "step": 100 * (index + 1),
            "tau": {suite: {"mean": course[index], "pooled": course[index] - 0.1} for suite, course in courses.items()},
        }
        for index in range(moments)
    ]
    fixed = {
        "seconds": 20.0,
        "gpu_seconds": 20.0,
        "build_s": 1.0,
        "steps": 200 + seed,
        "context_tokens": 5,
        "loss": 1.0,
    }
    where = {"changes": {}, "notes": [], "overrides": [], "device": "GPU", "commit": "abc", "versions": {}}
    return {"recipe": recipe, "seed": seed, "peer": peer, "points": points, **fixed, **where}


def reported(tmp_path: Path, runs: list[dict[str, Any]], really: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    paths = Paths(tmp_path)
    for file, lines in ((paths.runs_file, runs), (paths.evaluations_file, really or [])):
        file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    report(Settings(), paths, "target", tiny=False)
    found: dict[str, Any] = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    return found


def ours_and_peers(peers_humaneval: float = 1.4) -> list[dict[str, Any]]:
    return [
        run("default", 0, {"mt_bench": [1.2, 2.0], "humaneval": [1.0, 1.5]}),
        run("default", 1, {"mt_bench": [1.6, 2.4], "humaneval": [1.2, 1.5]}),
        run("specforge", 0, {"mt_bench": [1.0, 1.2], "humaneval": [1.0, peers_humaneval]}, peer=4),
        run("specforge-1-row", 0, {"mt_bench": [1.0, 1.1], "humaneval": [1.0, 1.0]}, peer=1),
    ]


def test_figures_are_means_and_deviations_over_seeds(tmp_path: Path) -> None:
    found = reported(tmp_path, ours_and_peers())["recipes"]["default"]
    assert found["seeds"] == [0, 1]
    assert found["tau"]["mt_bench"] == {
        "mean": pytest.approx(2.2),
        "std": pytest.approx(0.08**0.5),
        "values": [2.0, 2.4],
    }
    assert found["tau"]["all"]["values"] == pytest.approx([1.75, 1.95])
    assert found["tau"]["all"]["std"] == pytest.approx(0.02**0.5)
    assert found["tau_pooled"]["humaneval"]["mean"] == pytest.approx(1.4)
    assert found["tau_pooled"]["humaneval"]["std"] == pytest.approx(0.0)
    assert found["steps"]["mean"] == 200.5
    assert [point["tau"]["all"]["mean"] for point in found["curve"]] == pytest.approx([1.25, 1.85])
    assert found["decoded_tau"] == {}


def test_claims_are_against_the_best_of_the_peers(tmp_path: Path) -> None:
    claims = reported(tmp_path, ours_and_peers())["claims"]
    assert claims["peer"] == "specforge"
    assert claims["above_on_every_suite"]
    assert claims["suites"]["humaneval"] == {"ours": 1.5, "peer": 1.4, "above": True}
    assert claims["peers_last_tau"] == pytest.approx(1.3)
    assert claims["reached_in_run_after_s"] == 20.0  # 1.25 after 10 s, 1.85 after 20
    assert claims["own_run_of_half_time"] is None


def test_a_suite_on_which_the_peer_is_above_is_not_claimed(tmp_path: Path) -> None:
    claims = reported(tmp_path, ours_and_peers(peers_humaneval=2.9))["claims"]
    assert not claims["above_on_every_suite"]
    assert not claims["suites"]["humaneval"]["above"]
    assert claims["suites"]["mt_bench"]["above"]
    assert claims["reached_in_run_after_s"] is None  # its mean over suites, 2.05, is above ours at every moment


def test_half_the_time_is_compared_with_the_peers_end(tmp_path: Path) -> None:
    for last, above in ((1.4, True), (1.2, False)):
        half = run("default-half-time", 0, {suite: [1.0, last] for suite in SUITES})
        claims = reported(tmp_path, [*ours_and_peers(), half])["claims"]
        assert claims["own_run_of_half_time"] == {"tau": pytest.approx(last), "above": above}


def test_walk_and_decoding_are_compared_on_the_same_prompts(tmp_path: Path) -> None:
    really = {
        "run": "default-0",
        "weights": "final",
        "tau": {"mt_bench": {"mean": 2.2, "pooled": 2.0}, "humaneval": {"mean": 0.9, "pooled": 0.9}},
        "walked_tau": {"mt_bench": {"mean": 2.0}, "humaneval": {"mean": 1.0}},
        "answers": 8,
        "identical": 3,
    }
    found = reported(tmp_path, ours_and_peers(), [really])
    agreement = found["walk_against_decoding"]
    assert (agreement["pairs"], agreement["answers"], agreement["identical"]) == (2, 8, 3)
    assert agreement["mean_relative_difference"] == pytest.approx(0.0)
    assert agreement["largest"] == pytest.approx(0.1)
    assert found["recipes"]["default"]["decoded_tau"]["mt_bench"]["values"] == [2.2]


def test_table_and_plot(tmp_path: Path) -> None:
    found = reported(tmp_path, ours_and_peers())
    table = (tmp_path / "report.md").read_text(encoding="utf-8")
    rows = [line for line in table.splitlines() if line.startswith("| ") and "tau" not in line]
    assert [row.split(" | ")[0].strip("| ") for row in rows] == ["default", "specforge", "specforge-1-row"]
    assert "2.200 ± 0.283" in rows[0]
    assert "1.850 ± 0.141" in rows[0]
    assert found["target"] == "target"
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")
