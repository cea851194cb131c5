"""The verdict on a run, from its own word and what is seen of its process."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from draftmill.monitor.phases import Phase
from draftmill.monitor.process import Presence, ProcessIdentity
from draftmill.monitor.show import columns, duration, render_list, render_status, worker_state
from draftmill.monitor.status import LATE_S, NoRun, RunStatus, judge, read_all, read_status
from draftmill.monitor.stopping import write_request

ME = ProcessIdentity.of_this()


def make_state(age_s: float = 0.0, **more: Any) -> dict[str, Any]:
    """A training run's state, written so many seconds ago."""
    now = time.monotonic() - age_s
    state = {
        "version": 1,
        "phase": "training",
        "detail": "",
        "ended": False,
        "phase_at": now - 100.0,
        "phase_time": time.time() - age_s - 100.0,
        "seconds_in": {"loading targets": 20.0},
        "process": ME.to_json(),
        "started_at": now - 130.0,
        "started_time": time.time() - age_s - 130.0,
        "written_at": now,
        "written_time": time.time() - age_s,
        "stall_s": 600.0,
        "since_progress_s": 2.0,
        "progress": {"step": 250, "steps": 1000, "epoch": 1, "epochs": 4, "loss": 1.5},
        "eta_s": 300.0,
        "workers": {
            "target-0": {"device": "cuda:0", "doing": "forward", "step": 251, "since_beat_s": 1.0,
                         "since_progress_s": 1.0, "wait_s": 3.0, "busy_share": 0.9},
            "drafter-0": {"device": "cuda:1", "doing": "waiting for target", "step": 250, "since_beat_s": 2.0,
                          "since_progress_s": 2.0, "wait_s": 5.0, "busy_share": 0.5},
        },
        "gpus": {"note": "no NVIDIA driver answers", "devices": []},
        "warnings": [{"time": 0, "text": "careful"}],
        "stop": "no",
        "error": None,
    }  # fmt: skip
    return {**state, **more}


def verdict(
    tmp_path: Path, state: dict[str, Any], presence: Presence, process: ProcessIdentity = ME
) -> tuple[Phase, int, str]:
    status = judge(tmp_path, state, process, presence)
    return status.phase, status.exit_code, status.reason


@pytest.mark.parametrize(
    ("phase", "code"),
    [("starting", 3), ("loading data", 3), ("loading targets", 3), ("warming up", 3), ("training", 0),
     ("evaluating", 0), ("saving", 0)],
)  # fmt: skip
def test_a_living_run_is_what_it_says(tmp_path: Path, phase: str, code: int) -> None:
    assert verdict(tmp_path, make_state(phase=phase), Presence.RUNNING) == (Phase(phase), code, "")


@pytest.mark.parametrize(("phase", "code"), [("finished", 0), ("stopped", 0), ("stalled", 4), ("crashed", 5)])
def test_an_ended_run_is_what_it_said_last(tmp_path: Path, phase: str, code: int) -> None:
    state = make_state(age_s=86400.0, phase=phase, ended=True)
    assert verdict(tmp_path, state, Presence.GONE)[:2] == (Phase(phase), code)
    assert judge(tmp_path, state, ME, Presence.GONE).since_s == pytest.approx(86500.0, abs=5.0)


def test_gone_without_a_word_is_crashed(tmp_path: Path) -> None:
    (tmp_path / "run.log").write_text("one\ntwo\nthree\n")
    phase, code, reason = verdict(tmp_path, make_state(), Presence.GONE)
    assert (phase, code) == (Phase.CRASHED, 5)
    assert f"process {os.getpid()} is gone" in reason
    status = judge(tmp_path, make_state(), ME, Presence.GONE)
    assert status.last_lines == ["one", "two", "three"]
    assert status.log == str(tmp_path / "run.log")
    assert status.eta_s is None


def test_killed_by_stop_is_stopped(tmp_path: Path) -> None:
    write_request(tmp_path, ME, "now", killed=True)
    assert verdict(tmp_path, make_state(), Presence.GONE)[:2] == (Phase.STOPPED, 0)
    other = dataclasses.replace(ME, pid=ME.pid + 1)
    assert verdict(tmp_path, make_state(), Presence.GONE, other)[:2] == (Phase.CRASHED, 5)


def test_paused_is_stalled_and_told_how_to_go_on(tmp_path: Path) -> None:
    phase, code, reason = verdict(tmp_path, make_state(), Presence.PAUSED)
    assert (phase, code) == (Phase.STALLED, 4)
    assert f"kill -CONT {os.getpid()}" in reason


def test_no_progress_for_stall_s_is_stalled_and_names_who_does_not_wait(tmp_path: Path) -> None:
    just_not = make_state(since_progress_s=599.0)
    assert verdict(tmp_path, just_not, Presence.RUNNING)[0] is Phase.TRAINING
    phase, code, reason = verdict(tmp_path, make_state(since_progress_s=601.0), Presence.RUNNING)
    assert (phase, code, reason) == (Phase.STALLED, 4, "no progress for 601 s; not waiting: target-0 in forward")


def test_a_living_process_that_writes_no_state_is_stalled(tmp_path: Path) -> None:
    assert verdict(tmp_path, make_state(age_s=LATE_S - 5), Presence.RUNNING)[0] is Phase.TRAINING
    phase, code, reason = verdict(tmp_path, make_state(age_s=LATE_S + 5), Presence.RUNNING)
    assert (phase, code) == (Phase.STALLED, 4)
    assert "wrote no state for 35 s" in reason


@pytest.mark.parametrize("jump_s", [-86400.0, 86400.0, 1e9])
def test_a_jump_of_the_wall_clock_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump_s: float
) -> None:
    state, real = make_state(age_s=1.0), time.time
    monkeypatch.setattr(time, "time", lambda: real() + jump_s)
    status = judge(tmp_path, state, ME, Presence.RUNNING)
    assert (status.phase, status.exit_code) == (Phase.TRAINING, 0)
    assert status.state_age_s == pytest.approx(1.0, abs=1.0)
    assert status.since_s == pytest.approx(101.0, abs=1.0)
    assert status.workers["drafter-0"]["since_beat_s"] == pytest.approx(3.0, abs=1.0)


def test_elsewhere_only_the_heartbeat_counts_and_it_is_said(tmp_path: Path) -> None:
    elsewhere = dataclasses.replace(ME, host="other", boot_id="x")
    phase, code, reason = verdict(tmp_path, make_state(), Presence.UNSEEN, elsewhere)
    assert (phase, code) == (Phase.TRAINING, 0)
    assert "heartbeat alone" in reason
    phase, code, reason = verdict(tmp_path, make_state(age_s=3600.0), Presence.UNSEEN, elsewhere)
    assert (phase, code) == (Phase.STALLED, 4)
    assert "no heartbeat for 3600 s; its process is on other" in reason


def write_run(directory: Path, state: dict[str, Any]) -> Path:
    directory.mkdir(parents=True)
    (directory / "state.json").write_text(json.dumps(state))
    return directory


def test_reading_by_path_by_name_and_all(tmp_path: Path) -> None:
    write_run(tmp_path / "old", make_state(phase="finished", ended=True))
    write_run(tmp_path / "new", make_state())
    os.utime(tmp_path / "old" / "state.json", (1, 1))
    (tmp_path / "not a run").mkdir()
    write_run(tmp_path / "broken", {"some": "thing"})
    assert [status.phase for status in read_all(tmp_path)] == [Phase.FINISHED, Phase.TRAINING]
    assert read_status("new", tmp_path).phase is Phase.TRAINING
    assert read_status(tmp_path / "new").exit_code == 0
    for name in ("nothing", "not a run"):
        with pytest.raises(NoRun, match="no run at"):
            read_status(tmp_path / name)
    with pytest.raises(NoRun, match="is not a run's state"):
        read_status(tmp_path / "broken")
    (tmp_path / "broken" / "state.json").write_text("{")
    with pytest.raises(NoRun):
        read_status(tmp_path / "broken")


def shown(tmp_path: Path, state: dict[str, Any], presence: Presence = Presence.RUNNING) -> str:
    return render_status(judge(tmp_path, state, ME, presence))


def test_text_of_a_living_run(tmp_path: Path) -> None:
    progress = {
        "step": 250, "steps": 1000, "epoch": 1, "epochs": 4, "loss": 1.5, "context_tokens_per_s": 83_210.0,
        "mean_context_tokens_per_s": 80_000.0, "accept_length": 3.456, "accept_step": 200,
    }  # fmt: skip
    text = shown(tmp_path, make_state(progress=progress))
    assert f"training  for 1 min 40 s  (process {os.getpid()} on {ME.host}: alive)" in text
    assert "step 250 / 1,000 (25.0 %)   epoch 2 / 4   5 min 00 s to go" in text
    assert "83.2 Ktok/s (mean 80.0)   loss 1.5000   held-out acceptance length 3.46 (step 200)" in text
    assert "before this phase: loading targets 20 s" in text
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "target-0 cuda:0 forward 251 90 % 3.0 s 1.0 s ago" in lines
    assert "drafter-0 cuda:1 waiting for target 250 50 % 5.0 s 2.0 s ago" in lines
    assert "GPUs: no NVIDIA driver answers" in lines
    assert any(line.startswith("warning") and line.endswith("careful") for line in lines)
    assert "\033[" not in text
    assert "\033[" in render_status(judge(tmp_path, make_state(), ME, Presence.RUNNING), colour=True)


def test_text_of_a_crash_has_the_worker_the_last_lines_and_the_log(tmp_path: Path) -> None:
    (tmp_path / "run.log").write_text("Traceback\n  raise X\nValueError: bad\n")
    error = {"worker": "target-2", "device": "cuda:2", "step": 7, "text": "ValueError: bad", "traceback": ""}
    text = shown(tmp_path, make_state(phase="crashed", ended=True, error=error, detail="x"), Presence.GONE)
    assert "ValueError: bad (in target-2 on cuda:2 at step 7)" in text
    assert "    Traceback\n      raise X\n    ValueError: bad\n" in text
    assert f"whole log: {tmp_path / 'run.log'}" in text


def test_text_of_gpus_tells_own_memory_from_that_of_others(tmp_path: Path) -> None:
    gib = 2**30
    gpu = {"index": 0, "name": "H200", "device": "cuda:0", "total_bytes": 140 * gib, "used_bytes": 70 * gib,
           "own_bytes": 60 * gib, "utilization": 97,
           "others": [{"pid": 9, "used_bytes": 9 * gib, "name": "x"}]}  # fmt: skip
    unknown = {**gpu, "index": 1, "own_bytes": None, "others": []}
    text = shown(tmp_path, make_state(gpus={"note": "", "devices": [gpu, unknown]}))
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "0 H200 cuda:0 60.0 GiB 10.0 GiB 70.0 GiB 140.0 GiB 97 %" in lines
    assert "1 H200 cuda:0 ? ? 70.0 GiB 140.0 GiB 97 %" in lines
    assert "GPU 0: 9.0 GiB held by process 9 x" in lines


def test_list_has_one_line_a_run(tmp_path: Path) -> None:
    statuses: list[RunStatus] = [
        judge(tmp_path / "a", make_state(), ME, Presence.RUNNING),
        judge(tmp_path / "b", make_state(), ME, Presence.GONE),
    ]
    head, first, second = render_list(statuses).splitlines()
    assert head.split() == ["run", "phase", "since", "step", "Ktok/s", "loss", "acceptance", "process"]
    assert first.split()[1:3] == ["training", "1"]
    assert second.split()[1] == "crashed"
    assert "250 / 1,000" in first


def test_words_and_columns() -> None:
    seconds = [0.44, 9.96, 59.4, 60, 605, 3600, 7500, 90000, None]
    assert [duration(s) for s in seconds] == [
        "0.4 s", "10.0 s", "59 s", "1 min 00 s", "10 min", "1 h 00 min", "2 h 05 min", "1 d 1 h", "?",
    ]  # fmt: skip
    assert columns([["a", "", "1"], ["bcd", "", "200"]], right={2}) == ["a      1", "bcd  200"]
    doings = ["forward", "waiting for target", "waiting for drafters", "waiting for data"]
    assert [worker_state({"doing": doing}) for doing in doings] == [
        "working", "waiting for target", "waiting for drafter", "waiting",
    ]  # fmt: skip
