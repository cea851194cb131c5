"""Several hosts: processes of one run that find one another as torchrun's do, over loopback."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from draftmill.checkpoint import checkpoints, latest, load
from draftmill.monitor.metrics import read_metrics
from draftmill.monitor.state import read_json
from draftmill.monitor.status import read_status
from draftmill.train.run import train
from tiny import config_of, small_world

TWO_HOSTS = Path(__file__).parents[1] / "two_hosts.py"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


@contextmanager
def agents(folder: Path, *options: str) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Two hosts' torchrun on this machine, with one process each, training folder/run.yaml; killed at the end."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    where = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}", "--rdzv-id", folder.name]
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nnodes",
        "2",
        "--nproc-per-node",
        "1",
        *where,
        *options,
    ]
    command += ["-m", "draftmill", "train", str(folder / "run.yaml")]
    started = []
    for number in range(2):
        with (folder / f"agent-{number}").open("w") as out:
            started.append(subprocess.Popen(command, env=ENVIRONMENT, stdout=out, stderr=out, start_new_session=True))
    try:
        yield started
    finally:
        for agent in started:
            with suppress(ProcessLookupError):
                os.killpg(agent.pid, signal.SIGKILL)
            agent.wait()


def told(folder: Path) -> str:
    """What the agents and their processes printed last."""
    return "\n".join((folder / f"agent-{number}").read_text()[-3000:] for number in range(2))


@pytest.fixture(scope="module")
def scenarios(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """How each scenario of two_hosts.py ended."""
    folder = tmp_path_factory.mktemp("hosts")
    done = subprocess.run(
        [sys.executable, str(TWO_HOSTS), str(folder)],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_two_hosts_train_as_one_process_does(scenarios: dict[str, Any]) -> None:
    """Two hosts with a target and two drafters each, against one process with a target and four drafters."""
    ended = scenarios["alike"]
    assert ended["codes"] == [0, 0], ended["told"]
    assert ended["phases"] == ["finished", "finished"]
    assert ended["furthest"] <= 1.0
    first, second, one = ([loss for _, loss in losses] for losses in ended["losses"])
    assert first == second, "what is summed over all is the same on both"
    assert first == pytest.approx(one, rel=2e-5)
    assert ended["accept"][0] == ended["accept"][1]


def test_the_first_host_writes_and_the_other_has_a_folder_of_its_own(scenarios: dict[str, Any]) -> None:
    ended = scenarios["alike"]
    assert ended["workers"] == [["drafter-0", "drafter-1", "target-0"], ["drafter-2", "drafter-3", "target-0"]]
    assert {"run.log", "state.json", "metrics.jsonl"} <= set(ended["entries"])
    assert "checkpoints" not in ended["entries"]
    assert "lock" not in ended["entries"]


def test_a_wish_to_stop_on_any_host_stops_all_after_the_same_step(scenarios: dict[str, Any]) -> None:
    ended = scenarios["stopped"]
    assert ended["codes"][0] == [0, 0]
    assert ended["phases"] == ["stopped", "stopped"]
    saved, first, second = ended["cut"]
    assert saved == first == second
    assert 3 < saved < len(ended["losses"][1]), "it was stopped in the middle"


def test_started_again_they_go_on_unasked_and_a_finished_run_is_left_alone(scenarios: dict[str, Any]) -> None:
    ended = scenarios["stopped"]
    assert ended["codes"][1:] == [[0, 0], [0, 0]], ended["told"]
    assert ended["furthest"] <= 1.0
    ours, one = ended["losses"]
    assert [step for step, _ in ours] == [step for step, _ in one]
    assert [loss for _, loss in ours] == pytest.approx([loss for _, loss in one], rel=2e-5)
    assert all(line.startswith(f"the run is finished at step {len(one)}") for line in ended["told"])


def test_hosts_that_are_not_set_up_alike_are_refused_on_each(scenarios: dict[str, Any]) -> None:
    ended = scenarios["unlike"]
    assert ended["codes"] == [2, 2]
    assert not ended["written"]
    for line in ended["told"]:
        assert line.startswith("draftmill: error: host 1 is not set up as host 0 is: ")
        assert "the number of drafters is 1, not 2" in line
        assert "train.lr is 0.0001, not 0.01" in line


def test_what_the_first_host_refuses_is_told_on_each(scenarios: dict[str, Any]) -> None:
    ended = scenarios["refused"]
    assert ended["codes"] == [2, 2]
    assert ended["entries"] == ["thesis.txt"]
    assert all("holds files that are no run's (thesis.txt, ...)" in line for line in ended["told"])


def test_a_failure_on_one_host_ends_the_others_within_seconds(scenarios: dict[str, Any]) -> None:
    ended = scenarios["failing"]
    assert ended["codes"] == [1, 1]
    assert ended["seconds"] < 30
    assert "drafter-3 on cpu failed at step 3" in ended["reasons"][1] or "drafter-2" in ended["reasons"][1]
    assert "ArithmeticError: made up" in ended["reasons"][1]
    # whichever comes first: the other's own word, or the sum that it left
    by_word = "host 1 has ended its run: worker drafter-" in ended["told"][0]
    by_sum = "where another host's run has ended, its log says why" in ended["told"][0]
    assert by_word or by_sum, ended["told"][0]


def test_a_host_that_can_not_load_its_target_ends_the_one_that_waits_for_it(scenarios: dict[str, Any]) -> None:
    ended = scenarios["unloadable"]
    assert ended["codes"] == [1, 2]
    assert ended["seconds"] < 30
    assert "host 1 has ended its run: made up: its weights are damaged" in ended["told"][0]
    assert "made up: its weights are damaged" in ended["told"][1]


def test_torchrun_starts_a_killed_host_again_and_the_run_ends_as_if_nothing_was(tmp_path: Path) -> None:
    """An agent a host, and kill -9 of the second host's process in the middle: two drafters against one process with
    two. Only the second agent counts a failure; the first starts its process again because the other joins anew."""
    sections = small_world(tmp_path)
    settings = ("train.epochs=8", "checkpoint.every_steps=2", "train.evaluate_every=5")
    one, run = tmp_path / "one", tmp_path / "run"
    train(config_of(sections, f"run.dir={one}", "drafter.devices=[cpu, cpu]", *settings), console=False)
    (tmp_path / "run.yaml").write_text(config_of(sections, f"run.dir={run}", *settings).to_yaml())
    with agents(tmp_path, "--max-restarts", "3") as started:
        while all(agent.poll() is None for agent in started) and (latest(run) is None or latest(run).step < 6):
            time.sleep(0.01)
        state = read_json(run / "host-1" / "state.json")
        assert state is not None, told(tmp_path)
        os.kill(state["process"]["pid"], signal.SIGKILL)
        assert [agent.wait(timeout=150) for agent in started] == [0, 0], told(tmp_path)
    log = (run / "run.log").read_text()
    assert "going on from step-" in log
    assert str(read_status(run).phase) == "finished"
    marks = [line for line in (run / "metrics.jsonl").read_text().splitlines() if "resumed" in line]
    assert len(marks) == 1
    ours, expected = (
        {record["step"]: record["loss"] for record in read_metrics(folder).steps} for folder in (run, one)
    )
    assert ours.keys() == expected.keys()
    assert list(ours.values()) == pytest.approx(list(expected.values()), rel=2e-5)
    weights, their_weights = (load(checkpoints(folder)[-1].folder).tensors() for folder in (run, one))
    for name, tensor in their_weights.items():
        torch.testing.assert_close(weights[name], tensor, rtol=1e-3, atol=2e-4)
