"""Reading metrics back, and the charts drawn from them in a terminal."""

from __future__ import annotations

import io
import json
from collections import deque
from pathlib import Path

import pytest
from rich.console import Console

from draftmill.monitor.charts import bar, line_chart, resample
from draftmill.monitor.metrics import Metrics, MetricsFollower, read_metrics
from draftmill.monitor.phases import Phase
from draftmill.monitor.status import RunStatus
from draftmill.monitor.view import build_view


def write(directory: Path, records: list[dict], mode: str = "a") -> None:
    with open(directory / "metrics.jsonl", mode) as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def steps_of(metrics: Metrics) -> list[int]:
    return [record["step"] for record in metrics.steps]


def test_steps_done_over_after_a_resume_count_once_the_later_ones(tmp_path: Path) -> None:
    write(tmp_path, [{"step": s, "loss": 1.0} for s in (1, 2, 3, 4)])
    write(tmp_path, [{"step": 4, "accept_length": 2.0}])
    write(tmp_path, [{"step": s, "loss": 2.0} for s in (3, 4, 5)])  # resumed from step 2
    write(tmp_path, [{"step": 4, "accept_length": 3.0}])
    metrics = read_metrics(tmp_path)
    assert metrics.series("loss") == ([1, 2, 3, 4, 5], [1.0, 1.0, 2.0, 2.0, 2.0])
    assert metrics.series("accept_length", evaluations=True) == ([4], [3.0])


def test_half_lines_unknown_numbers_and_no_file(tmp_path: Path) -> None:
    assert read_metrics(tmp_path).steps == []
    (tmp_path / "metrics.jsonl").write_text(
        '{"step":1,"loss":null,"lr":0.1}\n{"step":2,"lo\n\n[]\n{"step":3,"loss":1.0}\n'
    )
    metrics = read_metrics(tmp_path)
    assert metrics.num_broken == 2
    assert metrics.series("loss") == ([3], [1.0])
    assert metrics.series("lr") == ([1], [0.1])


def test_a_follower_reads_only_what_was_added_whole_lines_only(tmp_path: Path) -> None:
    follower = MetricsFollower(tmp_path, ["lr"])
    assert follower.read().steps == []
    write(tmp_path, [{"step": 1, "loss": 1.0, "lr": 0.1, "grad_norm": 2.0}])
    assert follower.read().steps == [{"step": 1, "loss": 1.0, "lr": 0.1}]
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 2, "lo')
        file.flush()
        assert steps_of(follower.read()) == [1]
        file.write('ss": 3.0}\n')
    assert steps_of(follower.read()) == [1, 2]
    assert follower.read().num_broken == 0


def test_a_follower_of_a_long_file_begins_near_its_end(tmp_path: Path) -> None:
    write(tmp_path, [{"step": s, "loss": 1.0} for s in range(1, 1001)])
    steps = steps_of(MetricsFollower(tmp_path, [], num_bytes=300).read())
    assert 5 < len(steps) < 20
    assert steps[-1] == 1000
    assert steps == list(range(steps[0], 1001))


def test_resample_means_and_lines() -> None:
    assert resample([1.0, 3.0, 5.0, 7.0], 2) == [2.0, 6.0]
    assert resample([0.0, 1.0], 5) == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert resample([4.0], 3) == [4.0, 4.0, 4.0]
    assert resample(list(range(10)), 10) == list(range(10))


def dots(lines: list[str]) -> list[str]:
    """Braille back to rows of dots."""
    rows = []
    for line in lines:
        for row in range(4):
            bits = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))[row]
            cells = [0 if char == " " else ord(char) - 0x2800 for char in line]
            rows.append("".join("x" if cell & bit else "." for cell in cells for bit in bits))
    return rows


def test_line_chart_draws_the_line() -> None:
    assert dots(line_chart([0, 1, 2, 3], 2, 1)) == ["...x", "..x.", ".x..", "x..."]
    assert dots(line_chart([3, 0, 0, 3], 2, 1)) == ["x..x", ".x.x", ".x.x", ".xx."]  # steep parts are filled
    flat = dots(line_chart([5.0] * 4, 2, 1))
    assert flat.count("xxxx") == 1
    assert line_chart([], 3, 2) == ["   ", "   "]
    assert line_chart([0, 1, 2], 3, 2, ascii_only=True)[0] == "   "
    shades = line_chart([0, 1, 2], 3, 2, ascii_only=True)[1]
    assert (shades[0], shades[2], len(shades)) == (".", "@", 3)


def test_bar_is_as_wide_as_told() -> None:
    assert [bar(share, 4) for share in (0.0, 0.5, 1.0, 2.0, 0.125)] == ["    ", "██  ", "████", "████", "▌   "]
    assert bar(0.5, 4, ascii_only=True) == "##.."


def make_status() -> RunStatus:
    workers = {
        f"{kind}-{i}": {"device": f"cuda:{i}", "doing": doing, "step": 10, "busy_share": 0.5, "since_beat_s": 0.1}
        for kind, doing in (("target", "forward"), ("drafter", "waiting for target"))
        for i in range(4)
    }
    gpus = [
        {"index": i, "name": "H200", "device": f"cuda:{i}", "total_bytes": 2**37, "used_bytes": 2**36,
         "own_bytes": 2**36, "utilization": 90, "others": []}
        for i in range(8)
    ]  # fmt: skip
    return RunStatus(
        run="runs/a", phase=Phase.TRAINING, reported_phase=Phase.TRAINING, detail="", reason="", exit_code=0,
        presence="running", pid=1, host="box", started_time=0.0, running_s=60.0, since_s=30.0, state_age_s=0.5,
        since_progress_s=0.1, stall_s=600.0, progress={"step": 10, "steps": 20, "loss": 2.0}, eta_s=60.0,
        workers=workers, gpus={"note": "", "devices": gpus},
    )  # fmt: skip


@pytest.mark.parametrize(("width", "height", "charts", "gpu_lines"), [(150, 50, True, True), (80, 24, False, False)])
def test_the_view_fits_the_screen(width: int, height: int, charts: bool, gpu_lines: bool) -> None:
    metrics = Metrics()
    for step in range(1, 11):
        metrics.add(json.dumps({"step": step, "loss": 3.0 - 0.1 * step, "context_tokens_per_s": 1e5}))
    console = Console(width=width, height=height, file=io.StringIO(), force_terminal=True, color_system=None)
    lanes = {"target-0": deque(["working", "waiting for drafter"])}
    console.print(build_view(make_status(), metrics, lanes, console, live=True))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    lines = text.rstrip("\n").split("\n")
    assert len(lines) <= height
    assert max(len(line) for line in lines) <= width
    assert "50.0 %  step 10 / 20" in text
    assert ("loss  2.000" in text) is charts
    assert ("8 GPUs: 64.0 GiB to 64.0 GiB used, 90 to 90 % busy" in text) is not gpu_lines
    assert all(name in text for name in make_status().workers)
