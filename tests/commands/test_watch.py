"""`draftmill watch` and `draftmill report`: the views, in a real terminal and in a real browser."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import shutil
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

from draftmill.monitor.phases import Phase
from draftmill.monitor.report import build_report
from monitor_doubles import FakeRun, draftmill


def test_without_a_terminal_it_prints_once(tmp_path: Path) -> None:
    with FakeRun(tmp_path / "run", "finish") as run:
        run.wait_end()
        done = draftmill("watch", "run", folder=tmp_path)
    assert done.returncode == 0
    assert "100.0 %  step 40 / 40   epoch 1 / 1 " in done.stdout
    assert "loss  0.800" in done.stdout
    assert "\033" not in done.stdout


def test_in_a_terminal_it_follows_and_q_leaves_the_run_alone(tmp_path: Path) -> None:
    with FakeRun(tmp_path / "run", "wait") as run:
        run.wait_phase(Phase.TRAINING, min_step=3)
        pid, terminal = pty.fork()
        if pid == 0:
            os.environ.update(COLUMNS="100", LINES="40", TERM="xterm-256color", LC_ALL="C.UTF-8")
            os.execv(sys.executable, [sys.executable, "-m", "draftmill", "watch", str(tmp_path / "run")])
        text = b""
        pressed = False
        end = time.monotonic() + 30
        while time.monotonic() < end:
            if select.select([terminal], [], [], 0.1)[0]:
                try:
                    data = os.read(terminal, 65536)
                except OSError:  # the other side has left
                    break
                if not data:
                    break
                text += data
            if not pressed and text.count(b"q leaves; the run goes on") >= 3:  # drawn several times
                os.write(terminal, b"q")
                pressed = True
        os.close(terminal)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert pressed
        shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text.decode())
        steps = [int(step.replace(",", "")) for step in re.findall(r"step ([\d,]+) / 40", shown)]
        assert steps[-1] > steps[0]  # it moved while we looked
        assert text.count(b"\x1b[?1049h") == text.count(b"\x1b[?1049l") == 1  # the screen is given back
        status = run.status()
        assert status is not None
        assert status.phase is Phase.TRAINING


def make_run(directory: Path, factor: float, num_steps: int = 1200) -> Path:
    """A finished run's directory with metrics of every kind."""
    with FakeRun(directory, "finish") as run:
        assert run.wait_end() == 0
    with open(directory / "metrics.jsonl", "w") as file:
        for step in range(1, num_steps + 1):
            record = {
                "step": step, "epoch": 0, "loss": factor * 4 / (1 + step / 100), "lr": 1e-4, "grad_norm": 0.5,
                "context_tokens": 1000, "context_tokens_per_s": 5e4 * factor, "accuracy_by_slot": [0.9, 0.5, None],
                "target_wait_s": 0.01, "drafter_wait_s": 0.02, "peak_bytes": 3 * 2**30, "padding_share": 0.02,
                "elapsed_s": step * 2.0,
            }  # fmt: skip
            file.write(json.dumps(record) + "\n")
            if step % 400 == 0:
                evaluation = {"step": step, "accept_length": factor * step / 400, "accept_by_slot": [0.8, 0.4]}
                file.write(json.dumps(evaluation) + "\n")
    return directory


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    for name, factor in (("one", 1.0), ("two", 2.0)):
        make_run(folder / "runs" / name, factor)
    with open(folder / "runs" / "two" / "config.yaml", "a") as file:
        file.write("drafter: {num_layers: '</script><b>8'}\n")
    done = draftmill("report", "one", "two", "--output", "pages/both.html", folder=folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("pages/both.html: ")
    return folder


def test_the_page_stands_alone(two_runs: Path) -> None:
    page = (two_runs / "pages" / "both.html").read_text()
    assert not re.search(r"""(src|href)\s*=|url\(|@import|https?://(?!www\.w3\.org/2000/svg)""", page)
    assert page.count("</script>") == 2  # nothing from a run ends the script
    assert "&lt;/script&gt;&lt;b&gt;8" in page


def test_the_pages_numbers_are_the_runs(two_runs: Path) -> None:
    page = (two_runs / "pages" / "both.html").read_text()
    match = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    assert match is not None
    data = json.loads(match.group(1))
    one, two = data["runs"]
    assert (one["name"], two["name"]) == ("one", "two")
    assert one["series"]["accept_length"]["step"] == [400, 800, 1200]
    assert two["series"]["accept_length"]["y"] == [2.0, 4.0, 6.0]
    loss = one["series"]["loss"]
    assert len(loss["y"]) == len(loss["low"]) == len(loss["step"]) == 800  # of 1200 steps, within a band
    assert all(low <= y <= high for low, y, high in zip(loss["low"], loss["y"], loss["high"], strict=True))
    assert (loss["step"][-1], loss["hours"][-1], loss["tokens"][-1]) == (1200, 0.66667, 1.2)
    assert set(two["series"]["context_tokens_per_s"]["y"]) == {100.0}
    assert set(one["series"]["peak_bytes"]["y"]) == {3.0}
    assert one["slots"]["accept_by_slot"][-1] == {"step": 1200, "y": [0.8, 0.4]}
    assert one["slots"]["accuracy_by_slot"][0]["y"] == [0.9, 0.5, None]
    recent = sum(4 / (1 + step / 100) for step in range(1141, 1201)) / 60  # the last twentieth
    cells = re.findall(r"<td>(.*?)</td>", page.split("</table>")[0])
    assert cells[1:] [:7] == [
        '<span class="good">finished</span>', "1,200", "40 min", "1.2 M", f"{recent:.4f}", "3.00 (step 1,200)", "50.0",
    ]  # fmt: skip
    assert "<td>drafter.num_layers</td>" in page.split("Settings that differ")[1].split("<details>")[0]


def test_a_run_without_a_step_has_a_page(tmp_path: Path) -> None:
    with FakeRun(tmp_path / "run", "phase:loading data") as run:
        run.wait_phase(Phase.LOADING_DATA)
        page = build_report([tmp_path / "run"])
    assert "loading data" in page
    assert '"charts":[]' in page


def test_a_small_run_without_a_gpu_shows_its_tokens_and_no_memory(two_runs: Path, tmp_path: Path) -> None:
    shutil.copytree(two_runs / "runs" / "one", tmp_path / "small")
    path = tmp_path / "small" / "metrics.jsonl"
    steps = [json.loads(line) for line in path.read_text().splitlines()[:2]]
    path.write_text("".join(json.dumps({**step, "context_tokens": 700, "peak_bytes": 0}) + "\n" for step in steps))
    page = build_report([tmp_path / "small"])
    assert "<td>1.4 K</td>" in page
    assert "Peak GPU memory" not in page
    assert '"key":"loss"' in page


def test_output_that_cannot_be_written(two_runs: Path) -> None:
    (two_runs / "file").write_text("x")
    done = draftmill("report", "one", "--output", "file/page.html", folder=two_runs)
    assert done.returncode == 2
    assert "can't be written" in done.stderr
    (two_runs / "folder").mkdir()
    assert draftmill("report", "one", "--output", "folder", folder=two_runs).returncode == 2
    assert not list(two_runs.glob(".*"))


def test_a_real_browser_draws_it(two_runs: Path, tmp_path: Path) -> None:
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no chromium here: apt-get install chromium")
    options = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        f"--user-data-dir={tmp_path}/profile",
    ]
    page = (two_runs / "pages" / "both.html").as_uri()
    dumped = subprocess.run(
        [browser, *options, "--window-size=1400,1000", "--dump-dom", page], capture_output=True, text=True, timeout=120
    ).stdout
    assert 'data-ready="true"' in dumped  # the script came to its end
    sections = dict(re.findall(r'<section class="card chart" id="chart-(\w+)">(.*?)</section>', dumped, re.S))
    assert list(sections) == [
        "loss", "accept_length", "accept_by_slot", "accuracy_by_slot", "context_tokens_per_s", "target_wait_s",
        "drafter_wait_s", "peak_bytes", "padding_share", "grad_norm", "lr",
    ]  # fmt: skip
    for name, section in sections.items():
        assert section.count('class="line"') == 2, name  # both runs
        assert "NaN" not in section, name
    assert sections["accept_length"].count("<circle") == 6
    assert re.findall(r"<b>(.*?)</b>", sections["accept_length"]) == ["3.00", "6.00"]
    shot = tmp_path / "page.png"
    subprocess.run(
        [browser, *options, "--window-size=1400,1000", f"--screenshot={shot}", page], capture_output=True, timeout=120
    )
    assert shot.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert shot.stat().st_size > 40_000  # a blank page of this size takes a few kilobytes


def test_the_pages_files_are_part_of_the_package() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["draftmill"]
    for name in ("monitor/page/report.css", "monitor/page/report.js"):
        assert any(Path(name).match(pattern) for pattern in patterns), f"package-data lacks {name}: {patterns}"
