"""`draftmill stop`, `ps` and detached starts, on real processes."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from draftmill.errors import InputError
from draftmill.monitor.detach import start_detached
from draftmill.monitor.phases import Phase
from draftmill.monitor.process import Presence, ProcessIdentity
from draftmill.monitor.status import read_status
from draftmill.monitor.stop import stop_run
from monitor_doubles import FAKE_RUN, FakeRun, draftmill, wait_until


def test_stop_is_graceful(tmp_path: Path) -> None:
    with FakeRun(tmp_path / "runs" / "a", "wait") as run:
        run.wait_phase(Phase.TRAINING, min_step=2)
        with FakeRun(tmp_path / "runs" / "b", "wait") as other:
            other.wait_phase(Phase.TRAINING, min_step=2)
            done = draftmill("stop", "a", folder=tmp_path)
            assert done.returncode == 0
            assert done.stdout.splitlines()[-1] == "runs/a has stopped"
            assert run.wait_end() == 0
            status = run.status()
            assert status is not None
            assert (status.phase, status.exit_code) == (Phase.STOPPED, 0)
            assert "asked to stop after this step" in (tmp_path / "runs/a/run.log").read_text()
            left = other.status()
            assert left is not None
            assert left.phase is Phase.TRAINING  # only ever that run's process
    again = draftmill("stop", "a", folder=tmp_path)
    assert again.returncode == 0
    assert "is not running" in again.stdout


def test_stop_now(tmp_path: Path) -> None:
    with FakeRun(tmp_path / "run", "wait") as run:
        run.wait_phase(Phase.TRAINING, min_step=2)
        done = draftmill("stop", "run", "--now", folder=tmp_path)
        assert done.returncode == 0
        assert run.wait_end() == 0
        assert "asked to stop at once" in (tmp_path / "run/run.log").read_text()


def test_a_run_that_hears_nothing_is_killed_in_the_end_and_that_is_no_crash(tmp_path: Path) -> None:
    with FakeRun(tmp_path / "run", "deaf") as run:
        run.wait_phase(Phase.TRAINING, min_step=2)
        told: list[str] = []
        outcome = stop_run(tmp_path / "run", timeout_s=0.3, firm_s=0.3, tell=told.append)
        assert outcome.ended
        assert "was killed" in outcome.message
        assert [line.split()[0] for line in told] == ["asked", "the", "asked"]
        assert run.wait_end() == -signal.SIGKILL
        done = draftmill("status", "run", folder=tmp_path)
        assert done.returncode == 0
        assert "stopped" in done.stdout
        assert "killed by `draftmill stop`" in done.stdout


def test_a_paused_run_is_let_go_on_to_stop(tmp_path: Path) -> None:
    with FakeRun(tmp_path / "run", "wait") as run:
        run.wait_phase(Phase.TRAINING, min_step=2)
        os.kill(run.pid, signal.SIGSTOP)
        run.wait_phase(Phase.STALLED)
        done = draftmill("stop", "run", folder=tmp_path)
        assert done.returncode == 0
        assert "is paused; it is let go on" in done.stdout
        assert run.wait_end() == 0


def test_a_pid_given_to_another_process_is_left_alone(tmp_path: Path) -> None:
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        with FakeRun(tmp_path / "run", "wait") as run:
            run.wait_phase(Phase.TRAINING, min_step=2)
            run.process.kill()
            run.wait_end()
        state = json.loads((tmp_path / "run" / "state.json").read_text())
        state["process"] = dataclasses.asdict(ProcessIdentity.of(bystander.pid)) | {"start_ticks": 1}
        (tmp_path / "run" / "state.json").write_text(json.dumps(state))
        outcome = stop_run(tmp_path / "run", now=True, firm_s=0.1)
        assert outcome.ended
        assert "is not running" in outcome.message
        assert ProcessIdentity.of(bystander.pid).presence() is Presence.RUNNING
        assert read_status(tmp_path / "run").phase is Phase.CRASHED
    finally:
        bystander.kill()
        bystander.wait()


def test_a_directory_that_cannot_be_written_is_stopped_by_signals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    with FakeRun(tmp_path / "run", "wait") as run:
        run.wait_phase(Phase.TRAINING, min_step=2)
        wait_until(lambda: (status := run.status()) and status.hears_signals, "the signals to be heard")
        monkeypatch.setattr("draftmill.monitor.stop.write_request", refuse)
        assert stop_run(tmp_path / "run", timeout_s=20.0).message.endswith("has stopped")
        assert run.wait_end() == 0


def test_a_run_on_another_host_is_asked_and_no_process_here_is_touched(tmp_path: Path) -> None:
    with FakeRun(tmp_path / "run", "finish") as run:
        run.wait_end()
    state = json.loads((tmp_path / "run" / "state.json").read_text())
    process = {**state["process"], "pid": os.getpid(), "host": "other", "boot_id": "x"}
    state.update(process=process, ended=False, phase="training")
    (tmp_path / "run" / "state.json").write_text(json.dumps(state))
    outcome = stop_run(tmp_path / "run", timeout_s=0.1)
    assert not outcome.ended
    assert "run `draftmill stop` on other" in outcome.message
    assert json.loads((tmp_path / "run" / "stop").read_text()) == {"process": process, "mode": "graceful"}


@pytest.mark.parametrize("command", ["stop", "watch", "report"])
def test_no_such_run_is_one_line_and_code_2(tmp_path: Path, command: str) -> None:
    done = draftmill(command, "nope", folder=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("draftmill: error: no run at nope")
    assert len(done.stderr.splitlines()) == 1


def test_ps_lists_runs_and_how_to_end_them(tmp_path: Path) -> None:
    with FakeRun(tmp_path / "runs" / "a", "wait") as run:
        run.wait_phase(Phase.TRAINING)
        done = draftmill("ps", folder=tmp_path)
        assert done.returncode == 0
        lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
        assert any(line.startswith(f"{run.pid} runs/a training") for line in lines)
        assert f"to end: process {run.pid}: draftmill stop runs/a" in lines


def test_a_detached_run_outlives_its_starter_and_its_group(tmp_path: Path) -> None:
    script = (
        "import signal\nimport sys\nfrom pathlib import Path\nfrom draftmill.monitor.detach import start_detached\n"
        "signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"  # whoever runs the tests may have it ignored, as nohup does
        "run = start_detached(sys.argv[2:], Path(sys.argv[2]), program=[sys.executable, sys.argv[1]])\n"
        "print('\\n'.join(run.lines()), flush=True)\nsys.stdin.read()\n"
    )
    starter = subprocess.Popen(
        [sys.executable, "-c", script, str(FAKE_RUN), str(tmp_path / "run"), "wait"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    assert starter.stdout is not None
    lines = [starter.stdout.readline().split() for _ in range(3)]
    assert [line[0] for line in lines] == ["run", "process", "log"]
    assert lines[0][-1] == str(tmp_path / "run")
    assert lines[2][-1] == str(tmp_path / "run" / "run.log")
    pid = int(lines[1][-1])
    os.killpg(starter.pid, signal.SIGHUP)  # what a closing terminal sends
    starter.wait()
    starter.stdout.close()
    assert starter.stdin is not None
    starter.stdin.close()
    try:
        time.sleep(0.3)
        status = read_status(tmp_path / "run")
        assert (status.pid, status.presence) == (pid, "running")
        log = (tmp_path / "run" / "run.log").read_text()
        assert log.count("phase: training") == 1  # the console is the log itself: no line twice
    finally:
        outcome = stop_run(tmp_path / "run")
    assert outcome.ended
    assert read_status(tmp_path / "run").phase is Phase.STOPPED


def test_a_detached_run_that_does_not_begin_says_why(tmp_path: Path) -> None:
    says = "import sys; print('draftmill: error: no such file'); sys.exit(2)"
    with pytest.raises(InputError, match=r"^no such file$"):
        start_detached(["x"], tmp_path / "run", program=[sys.executable, "-c", says])
    assert not (tmp_path / "run").exists()
    with pytest.raises(InputError, match="ended with code 3 before it began"):
        start_detached([], tmp_path / "other", program=[sys.executable, "-c", "import sys; sys.exit(3)"])
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("precious")
    with pytest.raises(InputError, match=r"^no such file$"):
        start_detached(["x"], tmp_path / "mine", program=[sys.executable, "-c", says])
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "precious"
