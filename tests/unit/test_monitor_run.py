"""The run directory from the run's side: what it refuses, what it writes, and what it survives."""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from draftmill.errors import InputError
from draftmill.monitor.gpus import Gpu, GpuProcess
from draftmill.monitor.heartbeat import Heartbeat
from draftmill.monitor.layout import all_runs, find_run, require_run
from draftmill.monitor.phases import Phase
from draftmill.monitor.run import RunDirectory
from draftmill.monitor.state import StateFile, read_json
from monitor_doubles import GIB, FakeGpus, wait_until

CONFIG = "pipeline: {stall_s: 50}\ntrain: {log_every_s: 1000, lr: 0.001}\nmonitor: {trackers: []}\n"


def create(path: Path, **more) -> RunDirectory:
    return RunDirectory.create(path, CONFIG, {"torch": "2"}, console=False, gpu_source=FakeGpus, **more)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunDirectory]:
    run = create(tmp_path / "run")
    yield run
    run.close()


def state(run: RunDirectory) -> dict:
    found = read_json(run.path / "state.json")
    assert found is not None
    return found


def test_the_directory_holds_what_the_design_names(run: RunDirectory) -> None:
    assert {entry.name for entry in run.path.iterdir()} >= {
        "config.yaml", "environment.json", "run.log", "state.json", "metrics.jsonl", "tensorboard", "lock",
    }  # fmt: skip
    assert (run.path / "config.yaml").read_text() == CONFIG
    assert json.loads((run.path / "environment.json").read_text()) == {"torch": "2"}
    first = state(run)
    assert (first["phase"], first["process"]["pid"], first["stall_s"]) == ("starting", os.getpid(), 50.0)


def test_close_gives_the_directory_free_and_may_come_twice(run: RunDirectory) -> None:
    run.finish(Phase.FINISHED)
    run.close()
    run.close()
    assert not (run.path / "lock").exists()
    assert not list(run.path.glob(".state*"))
    assert state(run)["phase"] == "finished"


def test_a_second_run_is_refused_with_pid_and_host(run: RunDirectory) -> None:
    with pytest.raises(InputError, match=rf"in use by process {os.getpid()} on "):
        create(run.path)
    assert state(run)["phase"] == "starting"  # and the first goes on


def test_a_run_that_trained_is_not_overwritten_but_resumed(tmp_path: Path) -> None:
    with create(tmp_path / "run") as run:
        run.metrics({"step": 1, "loss": 2.0})
        run.progress(1, 10)
        run.finish(Phase.STOPPED)
        run_id, elapsed_s = state(run)["run_id"], state(run)["elapsed_before_s"]
        assert elapsed_s == 0.0
    with pytest.raises(InputError, match=r"holds a run already \(last seen stopped at step 1\).*--resume"):
        create(tmp_path / "run")
    changed = CONFIG.replace("0.001", "0.002")
    with RunDirectory.create(tmp_path / "run", changed, {}, resume=True, console=False, gpu_source=FakeGpus) as again:
        again.metrics({"step": 2, "loss": 1.0})
        again.finish(Phase.FINISHED)
        resumed = state(again)
    assert (resumed["run_id"], resumed["resumes"]) == (run_id, 1)
    assert resumed["elapsed_before_s"] > 0.0
    assert (tmp_path / "run" / "config.yaml").read_text() == changed
    assert (tmp_path / "run" / "config.1.yaml").read_text() == CONFIG
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [1, 2]
    assert records[1]["elapsed_s"] > records[0]["elapsed_s"]


def test_a_run_that_never_trained_may_be_started_again(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such model"), create(tmp_path / "run"):
        raise InputError("no such model")
    with create(tmp_path / "run") as run:
        run.finish(Phase.FINISHED)
    log = (tmp_path / "run" / "run.log").read_text()
    assert "crashed in main: InputError: no such model" in log  # the first one's words are kept
    assert "Traceback" not in log


def test_what_is_no_place_for_a_run(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(InputError, match="is a file"):
        create(tmp_path / "file")
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("x")
    with pytest.raises(InputError, match=r"no run's \(thesis.tex"):
        create(tmp_path / "home")
    with pytest.raises(InputError, match="holds no run to resume"):
        create(tmp_path / "nothing", resume=True)
    assert not (tmp_path / "nothing").exists()
    with pytest.raises(InputError, match="can't be used as a run directory"):
        create(tmp_path / "file" / "below")


def test_a_tracker_that_is_not_installed_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    config = "monitor: {trackers: [tensorboard, other]}"
    with pytest.raises(InputError, match="'other' is none of tensorboard, wandb, trackio, mlflow"):
        RunDirectory.create(tmp_path / "run", config, {})
    assert not (tmp_path / "run").exists()


def test_metrics_are_one_line_each_with_finite_numbers(run: RunDirectory) -> None:
    run.metrics({"step": 1, "loss": float("nan"), "accuracy_by_slot": [0.5, float("inf")], "lr": 1e-3})
    line = (run.path / "metrics.jsonl").read_text()
    record = json.loads(line)
    assert record.pop("elapsed_s") >= 0.0
    assert record == {"step": 1, "loss": None, "accuracy_by_slot": [0.5, None], "lr": 1e-3}
    assert line.endswith("\n")


def test_progress_keeps_what_it_is_not_told_and_takes_speed_and_acceptance_from_metrics(run: RunDirectory) -> None:
    run.metrics({"step": 1, "loss": 2.0, "context_tokens": 1000, "context_tokens_per_s": 1000.0})
    run.metrics({"step": 2, "loss": 2.0, "context_tokens": 3000, "context_tokens_per_s": 1000.0 * 3})
    run.metrics({"step": 2, "accept_length": 3.5, "accept_by_slot": [0.9]})
    run.progress(2, 100, epoch=1, epochs=2, loss=2.0, context_tokens_per_s=123456.0)
    run.progress(3)
    run._recorder.write_now()
    assert state(run)["progress"] == {
        "step": 3, "steps": 100, "epoch": 1, "epochs": 2, "loss": 2.0, "context_tokens_per_s": 2000.0,
        "mean_context_tokens_per_s": 2000.0, "accept_length": 3.5, "accept_step": 2,
    }  # fmt: skip


def test_log_lines_carry_time_worker_and_device_and_steps_come_every_n_seconds(tmp_path: Path) -> None:
    run = create(tmp_path / "run")
    run.worker("drafter-0", "cuda:5")

    def work() -> None:
        run.log.info("compiled")
        logging.getLogger("draftmill.target").info("loaded")
        for step in range(1, 50):
            run.progress(step, 50, epoch=0, epochs=1, loss=1.25, context_tokens_per_s=83_210.0)

    thread = threading.Thread(target=work, name="drafter-0")
    thread.start()
    thread.join()
    run.warn("careful")
    run.finish(Phase.FINISHED)
    run.close()
    logging.getLogger("draftmill").info("after the end")
    lines = (tmp_path / "run" / "run.log").read_text().splitlines()
    assert all(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d \S", line) for line in lines)
    assert [line[20:] for line in lines] == [
        "drafter-0 cuda:5 | compiled",
        "drafter-0 cuda:5 | loaded",
        "drafter-0 cuda:5 | step 1 / 50  epoch 1 / 1  loss 1.2500  83.2 Ktok/s",
        "main WARNING | careful",
        "main | phase: finished",
    ]
    assert [warning["text"] for warning in state(run)["warnings"]] == ["careful"]


def test_state_goes_on_while_workers_hang(run: RunDirectory) -> None:
    heart = run.worker("target-0", "cpu")
    heart.beat("forward", 7)
    first = state(run)["num_writes"]
    wait_until(lambda: state(run)["num_writes"] >= first + 2, "two more states")
    worker = state(run)["workers"]["target-0"]
    assert (worker["doing"], worker["step"], worker["device"]) == ("forward", 7, "cpu")
    assert worker["since_beat_s"] >= 0.9


def test_the_state_is_not_written_at_every_step(run: RunDirectory) -> None:
    run.phase(Phase.TRAINING)
    first = state(run)["num_writes"]
    end = time.monotonic() + 0.5
    while time.monotonic() < end:
        run.phase(Phase.TRAINING)
        run.phase(Phase.EVALUATING)
    assert state(run)["num_writes"] - first <= 8


def test_a_stall_is_logged_once_with_all_stacks(tmp_path: Path) -> None:
    config = CONFIG.replace("50", "0.2")
    run = RunDirectory.create(tmp_path / "run", config, {}, console=False, gpu_source=FakeGpus)
    ending = threading.Event()

    def hang_here() -> None:
        ending.wait()

    thread = threading.Thread(target=hang_here, name="target-3")
    thread.start()
    log = tmp_path / "run" / "run.log"
    wait_until(lambda: "Thread target-3:" in log.read_text(), "the stacks")
    time.sleep(1.5)
    assert "in hang_here" in log.read_text()
    assert log.read_text().count("no progress for") == 1
    ending.set()
    thread.join()
    run.finish(Phase.STALLED)
    run.close()
    assert (state(run)["phase"], state(run)["ended"]) == ("stalled", True)


def test_a_crash_keeps_the_first_exception_and_where_it_was(run: RunDirectory) -> None:
    run.worker("drafter-1", "cuda:6")
    try:
        raise ArithmeticError("loss is nan")
    except ArithmeticError as error:
        run.crash(error, worker="drafter-1", step=12)
    run.crash(RuntimeError("channel closed"), worker="target-0")
    run.phase(Phase.TRAINING)  # a late worker's word
    found = state(run)
    assert found["phase"] == "crashed"
    assert {key: found["error"][key] for key in ("worker", "device", "step", "text")} == {
        "worker": "drafter-1", "device": "cuda:6", "step": 12, "text": "ArithmeticError: loss is nan",
    }  # fmt: skip
    assert "test_a_crash_keeps" in found["error"]["traceback"]
    assert 'raise ArithmeticError("loss is nan")' in (run.path / "run.log").read_text()


def test_a_crash_after_the_end_is_a_crash_and_nothing_else_is(run: RunDirectory) -> None:
    run.finish(Phase.FINISHED)
    run.finish(Phase.STOPPED)
    assert state(run)["phase"] == "finished"
    run.crash(RuntimeError("while closing"))
    assert state(run)["phase"] == "crashed"
    with pytest.raises(RuntimeError, match="a crash has crash"):
        run.finish(Phase.CRASHED)
    with pytest.raises(RuntimeError, match="got training"):
        run.finish(Phase.TRAINING)


def test_leaving_without_an_ending_is_a_broken_protocol(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="left without finish"), create(tmp_path / "run"):
        pass
    found = read_json(tmp_path / "run" / "state.json")
    assert found is not None
    assert found["phase"] == "crashed"


def test_interrupting_is_stopping(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), create(tmp_path / "run") as run:
        raise KeyboardInterrupt
    assert state(run)["phase"] == "stopped"


def test_signals_ask_once_gracefully_then_at_once_and_are_given_back(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with create(tmp_path / "run") as run:
        assert run.stop_requested() == "no"
        os.kill(os.getpid(), signal.SIGTERM)
        assert run.stop_requested() == "graceful"
        os.kill(os.getpid(), signal.SIGINT)
        assert run.stop_requested() == "now"
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGUSR1)
        wait_until(lambda: state(run)["stop"] == "now", "the wish in the state")
        run.finish(Phase.STOPPED)
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
    assert "Current thread" in (tmp_path / "run" / "run.log").read_text()  # SIGUSR1's stacks


def test_a_forked_child_ends_by_sigterm_and_leaves_the_lock(tmp_path: Path) -> None:
    with create(tmp_path / "run") as run:
        child = os.fork()
        if child == 0:
            run.close()  # must not take the parent's files along
            time.sleep(60)
            os._exit(7)
        time.sleep(0.1)
        os.kill(child, signal.SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
        assert run.stop_requested() == "no"
        assert (tmp_path / "run" / "lock").exists()
        run.finish(Phase.FINISHED)


def test_a_disk_that_refuses_the_state_is_told_once_and_the_run_goes_on(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: StateFile, value: dict) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with monkeypatch.context() as patch:
        patch.setattr(StateFile, "write", refuse)
        run.phase(Phase.TRAINING)
        run._recorder.write_now()
        run._recorder.write_now()
        run.metrics({"step": 1, "loss": 1.0})
    run._recorder.write_now()
    log = (run.path / "run.log").read_text()
    assert log.count("state.json can't be written: Read-only file system; the run goes on") == 1
    assert log.count("state.json is written again") == 1
    assert state(run)["phase"] == "training"


def test_gpus_of_the_state(tmp_path: Path) -> None:
    mine = GpuProcess(os.getpid(), 10 * GIB, "me")
    other = GpuProcess(1, 3 * GIB, "init")
    gpus = [
        Gpu(0, "GPU-aa", "H200", 140 * GIB, 14 * GIB, 97, (mine, other)),
        Gpu(1, "GPU-bb", "H200", 140 * GIB, 1 * GIB, None, ()),
    ]
    source = FakeGpus(gpus)
    run = RunDirectory.create(tmp_path / "run", CONFIG, {}, console=False, gpu_source=lambda: source)
    run.use_gpus({"cuda:0": "aa"})
    wait_until(lambda: run._recorder.gpus is not None, "a reading")
    run._recorder.write_now()
    devices = state(run)["gpus"]["devices"]
    assert [(gpu["own_bytes"], gpu["used_bytes"], gpu["utilization"]) for gpu in devices] == [
        (10 * GIB, 14 * GIB, 97),
        (0, 1 * GIB, None),
    ]
    assert devices[0]["others"] == [{"pid": 1, "used_bytes": 3 * GIB, "name": "init"}]
    run.finish(Phase.FINISHED)
    run.close()
    assert source.closed


def test_a_beat_with_nothing_new_is_no_progress() -> None:
    heart = Heartbeat("target-0", "cpu")
    heart.beat("waiting for drafter", 3)
    began = heart.progress_at
    for _ in range(3):
        heart.beat("waiting for drafter", 3, wait_s=1.0)
    assert heart.progress_at == began
    assert heart.beat_at >= began
    heart.beat("waiting for drafter", 4)
    assert heart.progress_at > began


def test_busy_share_is_that_of_the_recent_time() -> None:
    heart = Heartbeat("drafter-0", "cpu")
    assert heart.busy_share() is None
    heart.beat("working", 1, busy_s=1.0, wait_s=9.0)
    assert heart.busy_share() == pytest.approx(0.1)
    for _ in range(40):
        heart.sample()
    heart.beat("working", 2, busy_s=3.0, wait_s=1.0)
    assert heart.busy_share() == pytest.approx(0.75)


def test_runs_are_found_by_path_and_by_name(tmp_path: Path) -> None:
    path = tmp_path / "qwen3-8b"
    path.mkdir()
    assert find_run(path.name, tmp_path) is None  # no run yet
    (path / "state.json").write_text("{}")
    assert find_run(path, tmp_path) == find_run(path.name, tmp_path) == path
    assert all_runs(tmp_path) == [path]
    with pytest.raises(InputError, match=f"no run at nope .*runs here: {path.name}"):
        require_run("nope", tmp_path)


def test_nothing_of_it_imports_torch() -> None:
    modules = sorted(p.stem for p in (Path(__file__).parents[2] / "src/draftmill/monitor").glob("[a-z]*.py"))
    script = "import sys, importlib\nfor name in sys.argv[1:]: importlib.import_module('draftmill.monitor.' + name)\n"
    script += "print([m for m in ('torch', 'transformers', 'datasets', 'numpy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script, *modules], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
