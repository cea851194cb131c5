"""`draftmill status` on real processes: every phase and every ending, as a user sees it, exit code included."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from draftmill.monitor.phases import Phase
from monitor_doubles import FakeRun, draftmill, wait_until


@pytest.mark.parametrize(
    ("phase", "code"),
    [("starting", 3), ("loading data", 3), ("loading targets", 3), ("warming up", 3), ("evaluating", 0), ("saving", 0)],
)
def test_phases(tmp_path: Path, phase: str, code: int) -> None:
    with FakeRun(tmp_path / "run", f"phase:{phase}") as run:
        status = run.wait_phase(Phase(phase))
        assert (status.exit_code, status.presence, status.pid) == (code, "running", run.pid)
        if phase in ("loading data", "saving"):  # the whole way through the command line for one of each code
            done = draftmill("status", "run", folder=tmp_path)
            assert done.returncode == code
            assert done.stdout.startswith(f"run  {phase}  for ")


def test_training_then_finished(tmp_path: Path) -> None:
    with FakeRun(tmp_path / "runs" / "a", "finish") as run:
        run.wait_phase(Phase.TRAINING, min_step=2)
        done = draftmill("status", "a", "--json", folder=tmp_path)
        status = json.loads(done.stdout)
        assert status["phase"] in ("training", "finished")
        assert status["exit_code"] == done.returncode == 0
        assert run.wait_end() == 0
    done = draftmill("status", "a", folder=tmp_path)
    assert done.returncode == 0
    assert done.stdout.startswith("runs/a  finished  ")
    assert "step 40 / 40 (100.0 %)" in done.stdout
    assert "100.0 Ktok/s (mean 100.0)   loss 0.8000" in done.stdout


@pytest.mark.parametrize("worker", ["target-0", "target-1", "drafter-0"])
def test_an_exception_in_each_worker(tmp_path: Path, worker: str) -> None:
    with FakeRun(tmp_path / "run", f"raise:{worker}") as run:
        assert run.wait_end() == 1
        done = draftmill("status", "run", folder=tmp_path)
    assert done.returncode == 5
    assert f"ArithmeticError: made up in {worker} (in {worker} on cpu at step 5)" in done.stdout
    assert f'raise ArithmeticError(f"made up in {{name}}")' in done.stdout  # noqa: F541 - the braces are meant
    assert "whole log: run/run.log" in done.stdout


def test_a_full_disk_that_ends_the_run(tmp_path: Path) -> None:
    with FakeRun(tmp_path / "run", "full") as run:
        assert run.wait_end() == 1
        status = run.status()
    assert status is not None
    assert (status.phase, status.exit_code) == (Phase.CRASHED, 5)
    assert "No space left on device: 'checkpoints/step-5' (in drafter-0 on cpu at step 5)" in status.reason


def test_kill_9(tmp_path: Path) -> None:
    with FakeRun(tmp_path / "run", "wait") as run:
        run.wait_phase(Phase.TRAINING, min_step=2)
        run.process.kill()
        run.wait_end()
        done = draftmill("status", "run", folder=tmp_path)
        assert done.returncode == 5
        assert f"process {run.pid} is gone without a word" in done.stdout
        assert "last said: training" in done.stdout
        assert "drafter-0 cpu | step 1 / 40" in done.stdout  # the last lines of the log
    # The dead run's lock is there still, and stands in nobody's way.
    assert (tmp_path / "run" / "lock").exists()
    with FakeRun(tmp_path / "run", "finish", resume=True) as again:
        assert again.wait_end() == 0
        status = again.status()
    assert status is not None
    assert status.phase is Phase.FINISHED
    assert [warning["text"] for warning in status.warnings] == [
        f"took over the lock of process {run.pid} on {status.host}, which is gone"
    ]


def test_sigstop_and_sigcont(tmp_path: Path) -> None:
    with FakeRun(tmp_path / "run", "wait") as run:
        run.wait_phase(Phase.TRAINING, min_step=2)
        os.kill(run.pid, signal.SIGSTOP)
        run.wait_phase(Phase.STALLED)
        done = draftmill("status", "run", folder=tmp_path)
        assert done.returncode == 4
        assert f"is paused by a signal; `kill -CONT {run.pid}` lets it go on" in done.stdout
        os.kill(run.pid, signal.SIGCONT)
        assert run.wait_phase(Phase.TRAINING).exit_code == 0


def test_a_worker_that_hangs(tmp_path: Path) -> None:
    with FakeRun(tmp_path / "run", "hang", stall_s=1.0) as run:
        run.wait_phase(Phase.STALLED)
        log = tmp_path / "run" / "run.log"
        wait_until(lambda: "Thread target-1:" in log.read_text(), "the run's own account of it")
        done = draftmill("status", "run", folder=tmp_path)
        assert done.returncode == 4
        assert "not waiting: target-1 in working" in done.stdout


def test_the_machines_clock_jumps(tmp_path: Path) -> None:
    with FakeRun(tmp_path / "run", "jump", stall_s=20.0) as run:
        run.wait_phase(Phase.TRAINING, min_step=30)
        wait_until(lambda: (status := run.status()) and status.progress["step"] >= 60, "states after the jump")
        status = run.status()
        assert status is not None
        state = json.loads((tmp_path / "run" / "state.json").read_text())
        assert state["written_time"] - state["started_time"] > 86000  # the wall clock did jump
        assert (status.phase, status.exit_code) == (Phase.TRAINING, 0)
        assert status.state_age_s is not None
        assert status.state_age_s < 10
        assert status.running_s is not None
        assert status.running_s < 60


def test_a_run_that_leaves_without_a_word_of_its_own(tmp_path: Path) -> None:
    with FakeRun(tmp_path / "run", "silent") as run:
        run.wait_phase(Phase.TRAINING, min_step=2)
        os.kill(run.pid, signal.SIGTERM)
        run.wait_end()
        status = run.status()
    assert status is not None
    assert (status.phase, status.exit_code) == (Phase.CRASHED, 5)
    assert "left without finish() or crash()" in status.reason


@contextlib.contextmanager
def small_disk(path: Path) -> Iterator[Path]:
    """A file system of half a megabyte; skips where it can't be mounted."""
    path.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(path)], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip(f"can't mount a small file system: {mounted.stderr.decode().strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", str(path)], check=False)


def test_a_full_disk_that_the_run_survives(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk, FakeRun(disk / "run", "wait") as run:
        run.wait_phase(Phase.TRAINING, min_step=2)
        filler = open(disk / "filler", "wb", buffering=0)  # noqa: SIM115 - closed below
        with contextlib.suppress(OSError):
            while filler.write(b"x" * 4096):
                pass
        with contextlib.suppress(OSError):
            while filler.write(b"x"):
                pass
        wait_until(lambda: "metrics.jsonl can't be written" in str(run.status()), "the warning")
        full = run.status()
        assert full is not None
        wait_until(lambda: (now := run.status()) and now.progress["step"] > full.progress["step"], "newer states")
        done = draftmill("status", str(disk / "run"), folder=tmp_path)
        assert done.returncode == 0
        assert "metrics.jsonl can't be written: No space left on device; lines wait in memory" in done.stdout
        filler.close()
        (disk / "filler").unlink()
        wait_until(lambda: "metrics.jsonl is written again, no lines lost" in str(run.status()), "the disk again")
        os.kill(run.pid, signal.SIGTERM)
        assert run.wait_end() == 0
        status = run.status()
        assert status is not None
        assert status.phase is Phase.STOPPED
        steps = [json.loads(line)["step"] for line in (disk / "run" / "metrics.jsonl").read_text().splitlines()]
        assert steps == list(range(1, len(steps) + 1))


def test_a_second_run_in_the_same_directory(tmp_path: Path) -> None:
    with FakeRun(tmp_path / "run", "wait") as first:
        first.wait_phase(Phase.TRAINING)
        with FakeRun(tmp_path / "run", "finish") as second:
            assert second.wait_end() == 1
            assert second.process.stderr is not None
            assert f"in use by process {first.pid} on " in second.process.stderr.read().decode()
        status = first.status()
        assert status is not None
        assert (status.phase, status.pid) == (Phase.TRAINING, first.pid)


def test_all_runs_one_line_each(tmp_path: Path) -> None:
    nothing = draftmill("status", folder=tmp_path)
    assert nothing.returncode == 6
    assert "no runs under runs/" in nothing.stderr
    with FakeRun(tmp_path / "runs" / "a", "finish") as a:
        assert a.wait_end() == 0
    with FakeRun(tmp_path / "runs" / "b", "wait") as b:
        b.wait_phase(Phase.TRAINING)
        done = draftmill("status", folder=tmp_path)
        listed = draftmill("status", "--json", folder=tmp_path)
    assert done.returncode == 0
    rows = [line.split()[:2] for line in done.stdout.splitlines()]
    assert rows == [["run", "phase"], ["runs/a", "finished"], ["runs/b", "training"]]
    assert [(run["run"], run["phase"]) for run in json.loads(listed.stdout)] == [
        ("runs/a", "finished"), ("runs/b", "training"),
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["nope", "a file", "an empty folder", "rubbish"])
def test_no_such_run(tmp_path: Path, name: str) -> None:
    (tmp_path / "a file").write_text("x")
    (tmp_path / "an empty folder").mkdir()
    (tmp_path / "rubbish").mkdir()
    (tmp_path / "rubbish" / "state.json").write_bytes(b"\x00\xff")
    done = draftmill("status", name, folder=tmp_path)
    assert (done.returncode, done.stdout) == (6, "")
    assert len(done.stderr.splitlines()) == 1
    assert name in done.stderr
    as_json = draftmill("status", name, "--json", folder=tmp_path)
    assert (as_json.returncode, json.loads(as_json.stdout)["exit_code"]) == (6, 6)


def test_it_imports_nothing_heavy(tmp_path: Path) -> None:
    script = (
        "import sys\nfrom draftmill.cli import main\n"
        "try:\n    main(['status', 'nope'])\nexcept SystemExit as leave:\n    code = leave.code\n"
        "print(code, [m for m in ('torch', 'transformers', 'datasets', 'numpy', 'tensorboard', 'yaml')"
        " if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "6 []"


def test_another_user_may_read(tmp_path: Path) -> None:
    with FakeRun(tmp_path / "run", "finish") as run:
        assert run.wait_end() == 0
    for entry in (tmp_path / "run").iterdir():
        assert entry.stat().st_mode & 0o444 == 0o444 & ~current_umask(), entry


def current_umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
