"""`draftmill synthesize` as a user types it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from answers_doubles import save_tiny_target
from draftmill.cli import main
from draftmill.target import answers_synthetic
from draftmill.target.answers_synthetic import words_of


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return save_tiny_target(tmp_path_factory.mktemp("target"), end_bias=1.0)


@pytest.fixture(autouse=True)
def _small_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers_synthetic, "_ROUND", 8)
    monkeypatch.setattr(answers_synthetic, "_TRIED", 24)


def _run(target: Path, output: Path, num: int, *more: Any) -> int:
    options = ["--dtype", "float32", "--device", "cpu", "--max-new-tokens", 48, *more]
    arguments = ["synthesize", "--target", target, "--num", num, "--output", output, *options]
    with pytest.raises(SystemExit) as leave:
        main([str(argument) for argument in arguments])
    return int(leave.value.code or 0)


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _questions(path: Path) -> list[str]:
    return [row["messages"][0]["content"] for row in _rows(path)]


def test_chats_are_distinct_seeded_and_continued(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, parts, other = (tmp_path / f"{name}.jsonl" for name in ("whole", "parts", "other"))
    assert _run(target, whole, 12) == 0
    assert "12 chats in" in capsys.readouterr().out
    rows = _rows(whole)
    assert len(rows) == 12
    assert all([message["role"] for message in row["messages"]] == ["user", "assistant"] for row in rows)
    assert all(message["content"].strip() for row in rows for message in row["messages"])
    assert len({words_of(question) for question in _questions(whole)}) == 12
    assert not any("<|im_" in question for question in _questions(whole))

    assert _run(target, parts, 5) == 0
    assert _rows(parts) == rows[:5]
    assert _run(target, parts, 12, "--batch-size", 3) == 0
    assert "5 were there before" in capsys.readouterr().out
    assert _rows(parts) == rows  # as in one go
    before = parts.read_bytes()
    assert _run(target, parts, 12) == 0
    assert parts.read_bytes() == before

    assert _run(target, other, 5, "--seed", 1) == 0
    assert not {*_questions(other)} & {*_questions(whole)}


def test_answers_can_be_greedy(target: Path, tmp_path: Path) -> None:
    sampled, greedy, again = (tmp_path / f"{name}.jsonl" for name in ("sampled", "greedy", "again"))
    assert _run(target, sampled, 4) == 0
    assert _run(target, greedy, 4, "--answer-temperature", 0) == 0
    assert _questions(greedy)[:3] == _questions(sampled)[:3]
    asked = tmp_path / "asked.jsonl"
    asked.write_text("".join(json.dumps({"prompt": question}) + "\n" for question in _questions(greedy)))
    command = ["regenerate", "--target", target, "--input", asked, "--output", again, "--dtype", "float32"]
    with pytest.raises(SystemExit):
        main([*map(str, command), "--device", "cpu", "--max-new-tokens", "48"])
    answers = {row["messages"][0]["content"]: row["messages"][1] for row in _rows(again)}
    assert [row["messages"][1] for row in _rows(greedy)] == [answers[question] for question in _questions(greedy)]


def test_evaluation_prompts_are_left_out(target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = tmp_path / "first.jsonl", tmp_path / "second.jsonl"
    assert _run(target, first, 6) == 0
    questions = _questions(first)
    as_text, as_rows = tmp_path / "evaluation.txt", tmp_path / "evaluation.jsonl"
    as_text.write_text(questions[0].replace("\n", " ").upper() + "\n")
    as_rows.write_text(
        json.dumps({"prompt": questions[1] + " !"}) + "\n" + json.dumps({"turns": ["?", questions[2]]}) + "\n"
        '{"messages": [{"role": "user", "content": ' + json.dumps(questions[3]) + "}]}\n"
    )
    capsys.readouterr()
    assert _run(target, second, 6, "--exclude", as_text, "--exclude", as_rows) == 0
    assert "4 prompts left out: in an evaluation set" in capsys.readouterr().out
    assert _questions(second)[:2] == questions[4:]
    assert not {*questions[:4]} & {*_questions(second)}


def test_a_target_that_repeats_itself_is_reported(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run(target, tmp_path / "out.jsonl", 50, "--top-k", 1) == 2
    error = capsys.readouterr().err
    assert "sampled prompts were new and usable; raise --temperature or lower --num" in error
    output = tmp_path / "out.jsonl"
    assert not output.exists() or len(_rows(output)) == 1


def test_bad_input_is_one_line(target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output, strange = tmp_path / "out.jsonl", tmp_path / "strange.jsonl"
    strange.write_text('{"text": 1}\n')
    cases = [
        (0, [], "--num must be at least 1, got 0"),
        (3, ["--temperature", 0], "--temperature 0 would give one prompt over and over"),
        (
            3,
            ["--exclude", tmp_path / "none.jsonl"],
            "none.jsonl; give an existing file, a glob or a dataset id with --exclude",
        ),
        (3, ["--exclude", tmp_path / "none.txt"], "none.txt can't be read"),
        (3, ["--exclude", strange], f"{strange}, line 1 holds no prompt"),
        (3, ["--device", "tpu"], "--device must be"),
    ]
    for num, more, text in cases:
        assert _run(target, output, num, *more) == 2, text
        assert text in capsys.readouterr().err
    assert not list(tmp_path.glob("out.jsonl*"))
