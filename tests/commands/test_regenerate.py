"""`draftmill regenerate` as a user types it: local and over HTTP, continued, and with input that can't be used."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import pytest
import torch

from answers_doubles import FaultyServer, completion, echo, save_tiny_target
from draftmill.cli import main

QUESTIONS = ["Hi", "Two words?", "Why is the sky blue, and the sea?", "7 + 5"]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return save_tiny_target(tmp_path_factory.mktemp("target"), seed=6, end_bias=0.5)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": question, "id": n}) + "\n" for n, question in enumerate(QUESTIONS)))
    return path


def _run(*arguments: Any) -> int:
    with pytest.raises(SystemExit) as leave:
        main(["regenerate", *map(str, arguments)])
    return int(leave.value.code or 0)


def _rows(path: Path) -> dict[int, dict[str, Any]]:
    return {row["id"]: row for row in map(json.loads, path.read_text().splitlines())}


def _answers(path: Path) -> dict[int, str]:
    return {number: row["messages"][-1]["content"] for number, row in _rows(path).items()}


def _local(target: Path, prompts: Path, output: Path, *more: Any) -> list[Any]:
    options = ["--dtype", "float32", "--device", "cpu", "--max-new-tokens", 24]
    return ["--target", target, "--input", prompts, "--output", output, *options, *more]


def test_local_answers_continue_to_the_same_file(
    target: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, parts = tmp_path / "whole.jsonl", tmp_path / "parts.jsonl"
    assert _run(*_local(target, prompts, whole)) == 0
    assert "4 answered" in capsys.readouterr().out
    rows = _rows(whole)
    assert sorted(rows) == [0, 1, 2, 3]
    assert [rows[n]["messages"][0]["content"] for n in range(4)] == QUESTIONS
    assert {row["ended"] for row in rows.values()} <= {True, False}

    first = tmp_path / "first.jsonl"
    first.write_text("".join(prompts.read_text().splitlines(keepends=True)[:2]))
    assert _run(*_local(target, first, parts)) == 0
    parts.write_bytes(parts.read_bytes()[:-9])  # as a kill in the middle of a line leaves it
    capsys.readouterr()
    assert _run(*_local(target, prompts, parts, "--batch-size", 1)) == 0
    out = capsys.readouterr().out
    assert "3 answered" in out
    assert "1 were there before" in out
    assert _rows(parts) == rows
    before = parts.read_bytes()
    assert _run(*_local(target, prompts, parts)) == 0
    assert "0 answered" in capsys.readouterr().out
    assert parts.read_bytes() == before


def test_sampling_is_seeded(target: Path, prompts: Path, tmp_path: Path) -> None:
    answers = []
    for number, (seed, batch) in enumerate([(1, 4), (1, 1), (3, 4)]):
        path = tmp_path / f"{number}.jsonl"
        assert _run(*_local(target, prompts, path, "--temperature", 1, "--seed", seed, "--batch-size", batch)) in (0, 1)
        answers.append(_answers(path))
    assert len(answers[0]) >= 3  # an answer may come out empty, and is then listed as a failure
    assert answers[0] == answers[1]
    assert answers[0] != answers[2]


def test_rows_without_a_question_are_listed_and_counted(
    target: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with prompts.open("a") as file:
        file.write('{"messages": []}\n{"prompt": "' + "x" * 300 + '", "id": 9}\n')
    output = tmp_path / "out.jsonl"
    assert _run(*_local(target, prompts, output)) == 1
    out = capsys.readouterr().out
    assert "4 answered" in out
    assert "2 got no answer" in out
    failures = [json.loads(line) for line in (tmp_path / "out.jsonl.failures.jsonl").read_text().splitlines()]
    assert [failure["where"] for failure in failures] == [f"{prompts}, line 5", f"{prompts}, line 6"]
    assert failures[0]["reason"] == "messages is empty"
    assert failures[1]["reason"].startswith("the prompt is too long: 319 tokens")


def test_bad_input_is_one_line(target: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty, notes = tmp_path / "empty.jsonl", tmp_path / "notes.jsonl"
    empty.write_text("")
    notes.write_text('{"my": "notes"}\n')
    output = tmp_path / "out.jsonl"
    cases = [
        (_local(target, tmp_path / "none.jsonl", output), "no file at"),
        (_local(target, empty, output), "is empty"),
        (_local(target, notes, output), "none of the 1 rows can be answered"),
        (_local(target, prompts, notes), "already holds something that was not made here"),
        (_local(tmp_path / "nowhere", prompts, output), "no folder at"),
        (_local(target, prompts, output, "--temperature", -1), "temperature must be from 0"),
        (_local(target, prompts, output, "--max-new-tokens", "many"), "--max-new-tokens"),
        (_local(target, prompts, output, "--turns", "first"), "--turns must be all or last, got first"),
        (_local(target, prompts, output, "--device", "tpu"), "--device must be cpu, cuda or cuda:N, got tpu"),
        (_local(target, prompts, output, "--device", "cuda:99"), "CUDA devices"),
        (_local(target, prompts, output, "--dtype", "int3"), "--dtype must be one of"),
        (_local(target, prompts, output, "--batch-size", 0), "--batch-size must be at least 1"),
        (_local(target, prompts, output, "--model", "m"), "--model is for servers, and no --endpoint is given"),
        (_local(target, prompts, output, "--endpoint", "http://127.0.0.1:9"), "--device, --dtype is for a local model"),
    ]
    for arguments, text in cases:
        assert _run(*arguments) == 2, text
        error = capsys.readouterr().err.strip().splitlines()[-1]
        assert error.startswith("draftmill: error: ")
        assert text in error
    assert notes.read_text() == '{"my": "notes"}\n'
    assert not list(tmp_path.glob("out.jsonl*"))


def _served(prompts: Path, output: Path, *urls: str, model: str = "tiny") -> list[Any]:
    endpoints = [part for url in urls for part in ("--endpoint", url)]
    return ["--target", model, "--input", prompts, "--output", output, "--timeout-s", 20, *endpoints]


def test_servers_share_the_work_and_the_key_is_never_written(
    prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    together = threading.Barrier(4, timeout=10)  # passed only if four requests are in flight at once

    def slow_echo(number: int, body: dict[str, Any]) -> tuple[int, dict[str, str], Any]:
        together.wait()
        return echo(number, body)

    output = tmp_path / "out.jsonl"
    with FaultyServer(slow_echo).running() as one, FaultyServer(slow_echo).running() as two:
        assert _run(*_served(prompts, output, one.url, two.url), "--concurrency", 4) == 0
    assert _answers(output) == {n: question.upper() for n, question in enumerate(QUESTIONS)}
    assert {len(one.bodies), len(two.bodies)} == {2}
    assert {headers["Authorization"] for headers in one.headers + two.headers} == {"Bearer sk-secret"}
    for path in tmp_path.iterdir():
        assert "sk-secret" not in path.read_text()
    assert "sk-secret" not in "".join(capsys.readouterr())


def test_failures_are_listed_and_tried_again_by_the_next_run(
    prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out.jsonl"
    failures = tmp_path / "out.jsonl.failures.jsonl"

    def picky(number: int, body: dict[str, Any]) -> tuple[int, dict[str, str], Any]:
        question = body["messages"][-1]["content"]
        if question == "7 + 5":
            return 400, {}, {"error": {"message": "no sums"}}
        return (429, {}, {}) if number == 0 else (200, {}, completion(question, "length"))

    with FaultyServer(picky).running() as server:
        assert _run(*_served(prompts, output, server.url)) == 1
    out = capsys.readouterr().out
    assert "3 answered" in out
    assert "1 got no answer" in out
    assert json.loads(failures.read_text())["reason"] == "refused (400): no sums"
    assert json.loads(failures.read_text())["where"] == f"{prompts}, line 4"
    assert sorted(_answers(output)) == [0, 1, 2]
    assert not any(row["ended"] for row in _rows(output).values())

    with FaultyServer(echo).running() as server:
        assert _run(*_served(prompts, output, server.url)) == 0
    assert [body["messages"][-1]["content"] for body in server.bodies] == ["7 + 5"]
    assert sorted(_answers(output)) == [0, 1, 2, 3]
    assert not failures.exists()


def test_servers_that_refuse_everybody_end_the_run(
    prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out.jsonl"
    with FaultyServer(lambda *_: (404, {}, {"error": {"message": "no model tiny"}})).running() as server:
        assert _run(*_served(prompts, output, server.url)) == 2
    assert "answered 404: no model tiny; check the base URL" in capsys.readouterr().err
    assert _run(*_served(prompts, output, server.url)) == 2  # it is gone by now
    assert f"no server answers at {server.url}" in capsys.readouterr().err
    assert not list(tmp_path.glob("out.jsonl*"))


@contextmanager
def _transformers_serve(target: Path, log: Path) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "transformers.cli.transformers", "serve", str(target)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--device", "cpu", "--dtype", "float32"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
    try:
        deadline_s = time.monotonic() + 120
        while True:
            try:
                with urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as reply:
                    if reply.status == 200:
                        break
            except URLError:
                pass
            if process.poll() is not None or time.monotonic() > deadline_s:
                pytest.fail(f"transformers serve did not come up:\n{log.read_text()[-3000:]}")
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        process.wait(30)


@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("fastapi", "uvicorn", "openai")),
    reason="transformers serve needs fastapi, uvicorn and openai: pip install 'draftmill[dev]'",
)
def test_a_real_server_gives_the_answers_of_the_local_model(target: Path, prompts: Path, tmp_path: Path) -> None:
    """Greedy, float32: the same target, served by transformers and run here, writes the same."""
    local, served = tmp_path / "local.jsonl", tmp_path / "served.jsonl"
    with prompts.open("a") as file:
        turns = [("user", "One"), ("assistant", "old"), ("user", "Two"), ("assistant", "old")]
        file.write(json.dumps({"messages": [{"role": r, "content": c} for r, c in turns], "id": 4}) + "\n")
    assert _run(*_local(target, prompts, local)) == 0
    with _transformers_serve(target, tmp_path / "serve.log") as url:
        assert _run(*_served(prompts, served, url, model=str(target)), "--max-new-tokens", 24, "--concurrency", 2) == 0
    assert {row["ended"] for row in _rows(local).values()} == {True, False}
    keep = ("messages", "ended")
    assert {n: {key: row[key] for key in keep} for n, row in _rows(served).items()} == {
        n: {key: row[key] for key in keep} for n, row in _rows(local).items()
    }
