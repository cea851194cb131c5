"""`draftmill prepare` as a user types it, bad input included."""

from __future__ import annotations

import gzip
import json
import os
import re
import signal
import subprocess
import sys
import time
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import data_doubles as doubles
from data_doubles import chat, save_target, write_lines
from draftmill.cli import main
from draftmill.data.encode import Encoder, EncodeSettings, hash_tokenizer
from draftmill.data.prepare import prepare
from draftmill.data.sources import Chunk
from draftmill.data.store import Store
from draftmill.data.worker import WorkerDied, Workers

GOOD = [
    {"messages": chat(f"question {number}?", f"the answer is {number} " * (1 + number % 9))} for number in range(40)
]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("target"))


def run(*arguments: str | Path) -> int:
    """The exit code of `draftmill prepare ARGUMENTS`."""
    with pytest.raises(SystemExit) as left:
        main(["prepare", *map(str, arguments)])
    return int(left.value.code or 0)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    """The one line of a refusal."""
    assert run(*arguments) == 2
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert captured.out == ""
    assert line.startswith("draftmill: error: ")
    return line.removeprefix("draftmill: error: ")


def command(target: Path, inputs: Path | str, output: Path, *more: str) -> list[str]:
    return ["--target", str(target), "--input", str(inputs), "--output", str(output), *more]


def test_it_makes_a_store_and_shows_what_became_of_the_rows(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [*GOOD, {"messages": []}, b"{", GOOD[3], {"messages": chat("q", "")}]
    path = write_lines(tmp_path / "chats.jsonl", rows)
    assert run(*command(target, path, tmp_path / "store", "--max-length", "256")) == 0
    shown = capsys.readouterr().out
    store = Store.open(tmp_path / "store", max_length=256)
    assert store.num_samples == 40
    tokens, supervised = int(store.lengths.sum()), int(store.num_supervised.sum())
    assert "miss: no store there yet; made" in shown
    assert f"40 samples kept of 44 rows; {tokens:,} tokens, {100 * supervised / tokens:.1f}% of them" in shown
    assert "3 rows skipped (6.8%):" in shown
    assert f"1  messages is empty; as in {path}, line 41" in shown
    assert f"1  not JSON; as in {path}, line 42: Expecting property name" in shown
    assert f"1  an assistant turn is empty; as in {path}, line 44: message 2 of 2" in shown
    assert f"1 duplicate rows left out; as {path}, line 43" in shown
    assert re.search(r"⟦the answer is \d+ .*<\|im_end\|>⟧", shown)
    assert "<|im_start|>user\nquestion" in shown
    report = json.loads((tmp_path / "store" / store.meta["folder"] / "report.json").read_text())
    assert (report["rows"], report["kept"], report["duplicates"]) == (44, 40, 1)
    assert report["skipped"] == {"messages is empty": 1, "not JSON": 1, "an assistant turn is empty": 1}
    assert sum(count for _, _, count in report["histogram"]) == 40


def test_the_store_holds_what_the_template_renders(target: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    path = write_lines(tmp_path / "chats.jsonl", GOOD)
    prepare(str(target), [str(path)], tmp_path / "store")
    tokenizer = AutoTokenizer.from_pretrained(target)
    store = Store.open(tmp_path / "store")
    for row, (ids, mask) in zip(GOOD, store.read(np.arange(40)), strict=True):
        assert ids.tolist() == tokenizer.apply_chat_template(row["messages"])["input_ids"]
        assert tokenizer.decode(ids[mask].tolist()) == row["messages"][1]["content"] + "<|im_end|>"
    assert store.meta["tokenizer_hash"] == hash_tokenizer(tokenizer)
    assert store.count(tokenizer.convert_tokens_to_ids("<|im_end|>")) == 80
    assert store.count(tokenizer.convert_tokens_to_ids("<|eot|>")) == 0


def test_a_second_run_is_a_hit_and_other_settings_are_a_miss(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, output = write_lines(tmp_path / "chats.jsonl", GOOD), tmp_path / "store"
    other = save_target(tmp_path / "other", doubles.CHATML_DEFAULT_SYSTEM)

    def verdict(target: Path = target, *more: str) -> str:
        assert run(*command(target, path, output, *more)) == 0
        return capsys.readouterr().out.splitlines()[0]

    assert verdict() == "miss: no store there yet; made"
    first = Store.open(output).fingerprint
    stamps = {file: file.stat().st_mtime_ns for file in output.rglob("*.arrow")}
    assert verdict().startswith("hit: ")
    assert {file: file.stat().st_mtime_ns for file in output.rglob("*.arrow")} == stamps
    assert "max_length 8192 -> 32)" in verdict(target, "--max-length", "32")
    assert Store.open(output).lengths.max() == 32
    assert "loss_on all -> last-turn" in verdict(target, "--max-length", "32", "--loss-on", "last-turn")
    assert "chat template" in verdict(other)
    assert "template_arguments {} -> {'enable_thinking': False}" in verdict(
        other, "--template-arg", "enable_thinking=false"
    )
    path.rename(tmp_path / "moved.jsonl")
    path = tmp_path / "moved.jsonl"
    assert verdict(other, "--template-arg", "enable_thinking=false").startswith("hit: ")
    write_lines(path, [*GOOD, {"messages": chat("one more", "row")}])
    assert "(inputs)" in verdict(other, "--template-arg", "enable_thinking=false")
    assert "made anew" in verdict()
    assert Store.open(output).fingerprint != first


def test_a_damaged_store_is_made_again(target: Path, tmp_path: Path) -> None:
    path, output = write_lines(tmp_path / "chats.jsonl", GOOD), tmp_path / "store"
    prepare(str(target), [str(path)], output)
    next(output.rglob("*.arrow")).write_bytes(b"")
    assert not prepare(str(target), [str(path)], output).hit
    assert Store.open(output).num_samples == 40
    assert prepare(str(target), [str(path)], output).hit


def test_mixed_formats_and_schemas_in_one_store(target: Path, tmp_path: Path) -> None:
    write_lines(
        tmp_path / "a.jsonl", [{"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "A"}]}]
    )
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(json.dumps({"prompt": "b", "completion": "B"}).encode()))
    (tmp_path / "c.json").write_text(json.dumps([{"messages": chat("c", "C"), "prompt": None}]))
    pq.write_table(pa.Table.from_pylist([{"messages": chat("d", "D"), "note": None}]), tmp_path / "d.parquet")
    write_lines(tmp_path / "e.jsonl", [{"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1]}])
    report = prepare(str(target), [str(tmp_path / "[a-e].*")], tmp_path / "store")
    assert (report.rows, report.kept, report.skipped) == (5, 5, {})
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(target)
    read = Store.open(tmp_path / "store").read(np.arange(5))
    answers = [tokenizer.decode(ids[mask].tolist()) for ids, mask in read[:4]]
    assert answers == [f"{letter}<|im_end|>" for letter in "ABCD"]
    assert read[4][0].tolist() == [1, 2, 3]


def test_several_processes_make_the_same_store(target: Path, tmp_path: Path) -> None:
    rows = [{"messages": chat(f"q{number}", "word " * 2500)} for number in range(90)]
    path = write_lines(tmp_path / "chats.jsonl", [*rows, *rows[:10], {"messages": []}])
    reports = [
        prepare(str(target), [str(path)], tmp_path / f"store{count}", num_processes=count, max_length=64)
        for count in (1, 2)
    ]
    one, two = (Store.open(tmp_path / f"store{count}") for count in (1, 2))
    assert len(one._chunks) >= 3
    assert one.fingerprint == two.fingerprint
    assert reports[0].to_json() == reports[1].to_json()
    for (ids, mask), (other_ids, other_mask) in zip(one.read(np.arange(90)), two.read(np.arange(90)), strict=True):
        assert ids.tolist() == other_ids.tolist()
        assert mask.tolist() == other_mask.tolist()


def test_a_worker_that_is_killed_is_noticed(target: Path, tmp_path: Path) -> None:
    encoder = Encoder(EncodeSettings(str(target), max_length=64))
    with Workers(1, encoder, tmp_path) as workers:
        next(iter(workers._processes.values())).kill()
        with pytest.raises(WorkerDied, match=r"draftmill-prepare-0 died \(exit code -9\)"):
            list(chain(workers.submit(Chunk(0)), workers.drain()))


def test_duplicates_can_be_kept(target: Path, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "chats.jsonl", [GOOD[0], GOOD[1], GOOD[0]])
    assert prepare(str(target), [str(path)], tmp_path / "a").kept == 2
    assert prepare(str(target), [str(path)], tmp_path / "b", keep_duplicates=True).kept == 3


def test_killed_while_it_runs_it_goes_on_from_what_is_done(target: Path, tmp_path: Path) -> None:
    rows = [{"messages": chat(f"q{number}", "word " * 2500)} for number in range(150)]
    path, output = write_lines(tmp_path / "chats.jsonl", rows), tmp_path / "store"
    arguments = [sys.executable, "-m", "draftmill", "prepare", *command(target, path, output, "--max-length", "64")]
    process = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while len(list(output.glob("*/shard-*.json"))) < 2 and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    done = {file: file.stat().st_mtime_ns for file in output.glob("*/shard-*.json")}
    assert done
    assert not (output / "store.json").exists()
    made: list[int] = []

    def count(*_: int) -> None:
        made.append(1)

    report = prepare(str(target), [str(path)], output, max_length=64, progress=count)
    assert (report.rows, report.kept) == (150, 150)
    assert len(made) > len(done)
    store = Store.open(output)
    fresh = prepare(str(target), [str(path)], tmp_path / "fresh", max_length=64)
    assert fresh.to_json() == report.to_json()
    other = Store.open(tmp_path / "fresh")
    assert all(
        a[0].tolist() == b[0].tolist()
        for a, b in zip(store.read(np.arange(150)), other.read(np.arange(150)), strict=True)
    )


def test_two_at_once_one_is_refused(target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from draftmill.data.build import StoreBuild

    path = write_lines(tmp_path / "chats.jsonl", GOOD)
    with StoreBuild(tmp_path / "store", "0" * 32):
        line = refused(capsys, *command(target, path, tmp_path / "store"))
    assert line.startswith(f"another process (pid {os.getpid()}) is writing the store at {tmp_path / 'store'}")


def test_a_full_disk_is_one_line_and_the_next_run_goes_on(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"messages": chat(f"q{number}", "word " * 3000)} for number in range(100)]
    path, output = write_lines(tmp_path / "chats.jsonl", rows), tmp_path / "store"
    fsync, left = os.fsync, [9]

    def until_full(descriptor: int) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(28, "No space left on device")
        fsync(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", until_full)
        line = refused(capsys, *command(target, path, output, "--max-length", "64"))
    assert line.startswith(f"the disk is full at {output}; 2 shards are done and kept")
    report = prepare(str(target), [str(path)], output, max_length=64)
    assert (report.kept, Store.open(output).num_samples) == (100, 100)


def test_too_many_bad_rows_are_refused_with_reasons_and_nothing_is_written(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_lines(tmp_path / "chats.jsonl", [*GOOD[:8], {"messages": []}, chat("x", "y")[1:]])
    line = refused(capsys, *command(target, path, tmp_path / "store"))
    assert line.startswith("2 of 10 rows can't be used, more than --max-bad-share 0.1: 1 × messages is empty")
    assert f"1 × starts with the assistant ({path}, line 10: message 1 of 1)" in line
    assert not (tmp_path / "store").exists()
    (tmp_path / "empty").mkdir()
    refused(capsys, *command(target, path, tmp_path / "empty"))
    assert not list((tmp_path / "empty").iterdir())
    assert run(*command(target, path, tmp_path / "store", "--max-bad-share", "0.2")) == 0
    assert Store.open(tmp_path / "store").num_samples == 8


def test_a_refusal_leaves_the_earlier_store_alone(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, output = write_lines(tmp_path / "chats.jsonl", GOOD), tmp_path / "store"
    prepare(str(target), [str(path)], output)
    before = {file: file.read_bytes() for file in output.rglob("*") if file.is_file() and file.name != "lock"}
    write_lines(path, [{"messages": []}])
    assert refused(capsys, *command(target, path, output)).startswith(
        "1 of 1 rows can't be used: 1 × messages is empty"
    )
    assert {file: file.read_bytes() for file in output.rglob("*") if file.is_file() and file.name != "lock"} == before


def test_a_row_of_ten_megabytes_is_one_bad_row(target: Path, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "chats.jsonl", [*GOOD, {"messages": chat("q", "x" * 10_000_000)}])
    report = prepare(str(target), [str(path)], tmp_path / "store")
    assert (report.kept, report.skipped) == (40, {"longer than 4,194,304 characters": 1})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"\n\n", "holds no rows"),
        (b"[]", "holds no rows"),
        (b"hello\n", "1 of 1 rows can't be used: 1 × not JSON (FILE, line 1: Expecting value, column 1)"),
        (b'{"text": "hello"}\n', "no messages, no prompt with completion, no input_ids (FILE, line 1: columns: text)"),
        (b'{"prompt": "hello"}\n', "columns: prompt); mend the rows; draftmill regenerate answers prompts"),
        (b'[{"role": "user", "content": "hello"}]\n', "mend the rows; draftmill regenerate answers prompts"),
        (b'[{"messages": [}]', "FILE, line 1 is not JSON: Expecting value"),
        (b'{"input_ids": [1, 2], "loss_mask": [0, 1]}', "fewer than two supervised tokens in a row"),
        (b'{"input_ids": [1, 2], "loss_mask": [0, 0]}', "fewer than two supervised tokens in a row"),
    ],
)
def test_files_without_a_usable_row(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes, message: str
) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_bytes(content)
    assert message.replace("FILE", str(path)) in refused(capsys, *command(target, path, tmp_path / "store"))
    assert not (tmp_path / "store").exists()


def test_wrong_options_and_paths(target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, output = write_lines(tmp_path / "chats.jsonl", GOOD), tmp_path / "store"
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "precious").write_text("x")
    cases = [
        (command(target, tmp_path / "no.jsonl", output), "no file at"),
        (command(tmp_path / "no" / "target", path, output), "no model folder at"),
        (command(target, path, output, "--revision", "v2"), "--revision v2 is of the hub, and "),
        (command(tmp_path / "other", path, output), "other holds no model (config.json, tokenizer.json, "),
        (command(target, path, output, "--chat-template", "no.jinja"), "no.jinja can't be read: No such file or dir"),
        (command(target, path, output, "--max-lenght", "8"), "No such option: --max-lenght (Possible options: --max-"),
        (command(target, path, tmp_path / "other"), "already holds something else (precious)"),
        (command(target, path, path), "is a file; give a folder as --output"),
        (command(target, path, output, "--max-length", "0"), "--max-length must be at least 8 tokens, got 0"),
        (command(target, path, output, "--loss-on", "none"), "--loss-on must be all or last-turn, got none"),
        (command(target, path, output, "--max-bad-share", "2"), "--max-bad-share must lie in 0..1, got 2"),
        (command(target, path, output, "--processes", "0"), "--processes must lie in 1..512, got 0"),
        (command(target, path, output, "--template-arg", "x"), "--template-arg 'x' is not of the form NAME=VALUE"),
        (command(target, path, output, "--max-length", "many"), "Invalid value for '--max-length'"),
    ]
    for arguments, message in cases:
        assert message in refused(capsys, *arguments)
        assert not output.exists()
    assert [file.name for file in (tmp_path / "other").iterdir()] == ["precious"]


def test_a_target_without_a_template(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = save_target(tmp_path / "target", None)
    path, output = write_lines(tmp_path / "chats.jsonl", GOOD), tmp_path / "store"
    assert "has no chat template; give one with --chat-template FILE" in refused(capsys, *command(target, path, output))
    assert not output.exists()
    (tmp_path / "chatml.jinja").write_text(doubles.CHATML)
    assert run(*command(target, path, output, "--chat-template", str(tmp_path / "chatml.jinja"))) == 0
    assert Store.open(output).num_samples == 40
    write_lines(path, [{"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1]}])
    assert run(*command(target, path, tmp_path / "ids")) == 0


def test_help_needs_no_torch_and_no_transformers() -> None:
    code = (
        "import sys\nfrom draftmill.cli import main\n"
        "try:\n    main(['prepare', '--help'])\nexcept SystemExit:\n    pass\n"
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'datasets')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0
    assert "--max-bad-share" in done.stdout


@pytest.mark.smollm2
def test_on_the_real_target(smollm2_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_lines(tmp_path / "chats.jsonl", GOOD)
    assert run(*command(smollm2_folder, path, tmp_path / "store", "--max-length", "512")) == 0
    shown: Any = capsys.readouterr().out
    assert "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>" in shown
    assert re.search(r"⟦the answer is \d+ .*<\|im_end\|>⟧", shown)
    store = Store.open(tmp_path / "store")
    assert store.meta["vocab_size"] == 49152
    assert store.count(2) == 120  # system, user and assistant of 40 chats
