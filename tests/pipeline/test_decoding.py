"""Speculative decoding beside a run: what it measures, and that nothing about it ends the run or outlives it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from draftmill.checkpoint import checkpoints
from draftmill.checkpoint.background import Saved
from draftmill.errors import InputError
from draftmill.evaluate.command import Request, run
from draftmill.monitor.phases import Phase
from draftmill.monitor.status import read_status
from draftmill.train import decoding
from draftmill.train.run import train
from tiny import config_of, metrics_of, small_world

ENDED_WITHIN_S = 60.0


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    sections = small_world(tmp_path_factory.mktemp("world"))
    sections["train"].update(max_steps=6, evaluate_every=3, decode_prompts=3)
    sections["checkpoint"] = {"every_steps": 3, "keep_last": 9}
    return sections


def decoded(folder: Path) -> list[dict[str, Any]]:
    return [record for record in metrics_of(folder) if "decoded_tau" in record]


def log_of(folder: Path) -> str:
    return (folder / "run.log").read_text()


def acting(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """In place of the evaluation a few lines of Python; the request is sys.argv[1]."""
    monkeypatch.setattr(decoding, "PROGRAM", (sys.executable, "-c", f"import json, sys, time\n{code}"))


def test_a_run_says_what_decoding_with_its_checkpoint_gives(
    world: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(decoding, "WAIT_S", 400.0)
    monkeypatch.setattr(decoding, "MAX_NEW_TOKENS", 12)
    seen: list[dict[str, Any]] = []
    once = ("train.decode_prompts=2", "checkpoint.every_steps=1000")
    train(config_of(world, f"run.dir={tmp_path}", *once), console=False, observe=seen.append)
    (record,) = decoded(tmp_path)
    (checkpoint,) = checkpoints(tmp_path)
    asked = {"max_new_tokens": 12, "draft_tokens": "3", "device": "cpu", "record": False, "as_json": True}
    assert run(Request(str(checkpoint.folder), limit=2, **asked)) == 0
    by_hand = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert by_hand["answers"] == record["decoded_answers"] == 2
    assert record["decoded_tau"] == by_hand["overall"][0]["tau_response_mean"]
    assert 1.0 <= record["decoded_tau"] <= 4.0
    assert record["step"] == 6
    assert [line for line in seen if "decoded_tau" in line] == [
        {"step": 6, "decoded_tau": record["decoded_tau"], "decoded_answers": 2}
    ]
    assert not (checkpoint.folder / "evaluation.json").exists()


def test_it_is_asked_for_with_each_checkpoint_by_the_settings(
    world: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps are held up until the decoding begun before is done, so that none is left out."""
    acting(
        monkeypatch,
        "request = json.loads(sys.argv[1])\n"
        "assert (request['limit'], request['draft_tokens'], request['device']) == (3, '3', 'cpu'), request\n"
        "step = int(request['source'].rpartition('-')[2])\n"
        "print('tables')\n"
        "print(json.dumps({'answers': 3, 'overall': [{'tau_response_mean': step}]}))",
    )
    original = decoding.Decodings._begin

    def begin(self: decoding.Decodings, checkpoint: Any) -> None:
        original(self, checkpoint)
        assert self._under_way is not None
        self._under_way.process.wait()

    monkeypatch.setattr(decoding.Decodings, "_begin", begin)
    long = ("train.max_steps=14", "train.epochs=9", "checkpoint.every_steps=5")
    train(config_of(world, f"run.dir={tmp_path}", *long), console=False)
    assert [(line["step"], line["decoded_tau"]) for line in decoded(tmp_path)][-1] == (14, 14)
    assert {line["step"] for line in decoded(tmp_path)} <= {5, 10, 14}


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("print('no such target', file=sys.stderr); sys.exit(2)", "failed, exit code 2: no such target"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "failed, exit code -9: it said nothing"),
        ("print('{}')", "gave no result: KeyError('overall')"),
        ("", "gave no result: IndexError"),
    ],
)
def test_what_fails_there_is_told_and_the_run_finishes(
    world: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, said: str
) -> None:
    acting(monkeypatch, code)
    train(config_of(world, f"run.dir={tmp_path}", "checkpoint.every_steps=1000"), console=False)
    assert f"the decoding with step-6 {said}" in log_of(tmp_path)
    assert f"by hand: draftmill evaluate {tmp_path}/checkpoints/step-6 --limit 3 --draft-tokens 3" in log_of(tmp_path)
    assert read_status(tmp_path).phase is Phase.FINISHED
    assert decoded(tmp_path) == []


def test_a_program_that_can_not_be_started_is_told(
    world: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoding, "PROGRAM", (str(tmp_path / "missing"),))
    train(config_of(world, f"run.dir={tmp_path / 'run'}", "checkpoint.every_steps=1000"), console=False)
    assert "the decoding with step-6 can't begin: [Errno 2]" in log_of(tmp_path / "run")
    assert read_status(tmp_path / "run").phase is Phase.FINISHED


def test_one_at_a_time_and_the_end_does_not_wait_for_long(
    world: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two checkpoints are there before anybody looks, and the process is busy for ever."""
    acting(monkeypatch, "time.sleep(10000)")
    monkeypatch.setattr(decoding, "WAIT_S", 1.0)
    saved = decoding.Decodings.saved

    def twice(self: decoding.Decodings, checkpoint: Any) -> None:
        saved(self, checkpoint)
        saved(self, checkpoint)

    monkeypatch.setattr(decoding.Decodings, "saved", twice)
    train(config_of(world, f"run.dir={tmp_path}", "checkpoint.every_steps=1000"), console=False)
    log = log_of(tmp_path)
    assert "no decoding with step-6: a newer one is there" in log
    assert "waiting for the decoding with step-6, 1 s at most" in log
    assert "the decoding with step-6 is ended with the run; by hand: draftmill evaluate" in log
    (pid,) = {line.rpartition(" ")[2] for line in log.splitlines() if "in process" in line}
    assert not Path(f"/proc/{pid}").exists()
    assert read_status(tmp_path).phase is Phase.FINISHED


class Told:
    """The part of a run directory that decodings use."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.wish = "no"
        self.log = SimpleNamespace(info=self.lines.append)
        self.warn = self.lines.append

    def stop_requested(self) -> str:
        return self.wish


def decodings(world: dict[str, Any], told: Told) -> decoding.Decodings:
    run: Any = told
    return decoding.Decodings(config_of(world), 3, run)


def test_while_one_is_under_way_no_other_is_begun(world: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    acting(monkeypatch, "time.sleep(10000)")
    told = Told()
    some = decodings(world, told)
    for step in (3, 6):
        some.saved(Saved(Path(f"step-{step}"), step, 0.0, []))
        assert some.take() == []
    assert "no decoding with step-6: that with step-3 is still under way; by hand: draftmill evaluate" in told.lines[-1]
    some.abandon()


def test_what_has_ended_before_a_stop_counts(world: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    acting(monkeypatch, """print(json.dumps({"overall": [{"tau_response_mean": 1.5}], "answers": 3}))""")
    told = Told()
    some = decodings(world, told)
    some.saved(Saved(Path("step-3"), 3, 0.0, []))
    assert some.take() == []
    assert some._under_way is not None
    some._under_way.process.wait(ENDED_WITHIN_S)
    told.wish = "graceful"
    assert some.finish() == [{"step": 3, "decoded_tau": 1.5, "decoded_answers": 3}]
    assert "is ended with the run" not in "".join(told.lines)


def test_a_stop_waits_for_none(world: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    acting(monkeypatch, "time.sleep(10000)")
    monkeypatch.setattr(decoding, "WAIT_S", 10000.0)

    def stop(record: dict[str, Any]) -> None:
        if record["step"] == 8 and "loss" in record:
            os.kill(os.getpid(), signal.SIGTERM)

    long = ("train.max_steps=20", "train.epochs=9", "checkpoint.every_steps=1")
    train(config_of(world, f"run.dir={tmp_path}", *long), console=False, observe=stop)
    assert read_status(tmp_path).phase is Phase.STOPPED
    assert "is ended with the run" in log_of(tmp_path)
    assert "waiting for the decoding" not in log_of(tmp_path)


def test_the_process_ends_when_the_one_that_began_it_is_gone() -> None:
    """Its standard input ends while it is at work that takes hours."""
    read, write = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-c", "import time; from draftmill.evaluate import beside; beside.run = time.sleep;"
         "beside.Request = lambda **_: 10000; beside.main('{}')"],
        stdin=read,
    )  # fmt: skip
    os.close(read)
    try:
        os.close(write)
        assert process.wait(ENDED_WITHIN_S) == 1
    finally:
        process.kill()


def test_settings_that_can_not_be_are_refused(world: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match=r"^the configuration: train\.decode_prompts 3 are held-out samples' openings"):
        config_of(world, "data.heldout=0")
    with pytest.raises(
        InputError,
        match=r"train\.decode_device: a device is cpu or cuda:N with a plain number, as in cuda:0, got 'gpu'",
    ):
        config_of(world, "train.decode_device=gpu")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    settings = config_of(world, "train.decode_device=cuda:1").train
    decoding.check_decoding(settings, [torch.device("cuda:0")])
    with pytest.raises(InputError, match=r"train\.decode_device cuda:1 is one that the run uses"):
        decoding.check_decoding(settings, [torch.device("cuda:0"), torch.device("cuda:1")])
    with pytest.raises(InputError, match=r"train\.decode_device is cuda:2; this machine has 2 CUDA devices"):
        decoding.check_decoding(config_of(world, "train.decode_device=cuda:2").train, [])
