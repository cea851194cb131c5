"""`draftmill evaluate` as a user types it, bad input included."""

from __future__ import annotations

import errno
import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from draftmill.checkpoint.store import save
from draftmill.cli import main
from draftmill.data.build import write_store
from draftmill.evaluate.progress import DecodingProgress
from draftmill.target.load import load_target
from draftmill.target.model import Target
from evaluate_doubles import (
    PLAIN_TEMPLATE,
    overfit,
    random_drafter,
    reference_greedy,
    save_pair,
    tiny_target,
    tiny_tokenizer,
)

torch.set_num_threads(1)

BRIEF = ["--max-new-tokens", "6", "--draft-tokens", "1,3", "--device", "cpu"]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A target and a z-lab drafter on the disk, prompts, and a run with a checkpoint and held-out samples."""
    folder = tmp_path_factory.mktemp("evaluate")
    target = tiny_target("llama")
    drafter = random_drafter(target)
    where_target, where_drafter = save_pair(folder, target, drafter)
    prompts = folder / "mine.jsonl"
    prompts.write_text('{"prompt": "w3 w9", "category": "x"}\n{"prompt": "w7", "category": "y"}\n')
    samples = [(np.arange(index, index + 8, dtype=np.int32), np.arange(8) >= 4) for index in range(20)]
    write_store(folder / "store", samples, vocab_size=64, max_length=64)
    state = {
        "shape": drafter.shape.to_dict(),
        "target": {"model": where_target, "revision": None},
        "config": {"data": {"path": str(folder / "store"), "heldout": 2}, "run": {"seed": 0}},
    }
    save(folder / "run", 5, {name: value.detach() for name, value in drafter.named_parameters()}, {}, state)
    return {
        "target": where_target,
        "drafter": where_drafter,
        "prompts": str(prompts),
        "run": str(folder / "run"),
        "folder": folder,
        "model": target,
    }


def evaluated(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[dict[str, Any], str]:
    """The JSON of the last line and all that was printed before it."""
    with pytest.raises(SystemExit) as left:
        main(["evaluate", *BRIEF, *arguments, "--json"])
    printed = capsys.readouterr()
    assert left.value.code == 0, printed.err
    *before, last = printed.out.splitlines()
    return json.loads(last), "\n".join(before)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line on standard error of a command that ends with exit code 2."""
    with pytest.raises(SystemExit) as left:
        main(["evaluate", *arguments])
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("draftmill: ")]
    assert left.value.code == 2
    assert len(errors) == 1
    return errors[0]


def test_a_published_drafter_on_a_file_of_prompts(
    pair: dict[str, Any], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    options = ["--target", pair["target"], "--prompts", pair["prompts"], "--batch-size", "1"]
    found, text = evaluated(capsys, pair["drafter"], *options)
    assert found["dtype"] == "float32"
    assert found["target"] == pair["target"]
    assert found["draft_tokens"] == [1, 3]
    assert found["best_draft_tokens"] in (1, 3)
    assert [(row["answers"], row["identical"]) for row in found["overall"]] == [(2, 2), (2, 2)]
    expected = sum(len(reference_greedy(pair["model"], ids, 6)) for ids in ([60, 3, 9, 61], [60, 7, 61]))
    assert found["overall"][0]["tokens"] == expected
    groups = [(row["draft_tokens"], row["category"]) for row in found["groups"]]
    assert groups == [(1, "all"), (1, "x"), (1, "y"), (3, "all"), (3, "x"), (3, "y")]
    named = {True: "best number of drafted tokens here:", False: "no number of drafted tokens was faster than plain"}
    for phrase in ("output identical to plain decoding: 2/2", "mine / x", named[found["worth_it"]]):
        assert phrase in text
    assert "not recorded" in text
    assert not (Path(pair["drafter"]) / "evaluation.json").exists()


def test_a_run_on_its_held_out_samples_is_recorded_for_the_export_s_card(
    pair: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    found, text = evaluated(capsys, pair["run"])
    assert found["step"] == 5
    assert [row["suite"] for row in found["groups"]] == ["heldout", "heldout"]
    assert found["answers"] == 2
    checkpoint = Path(pair["run"]) / "checkpoints/step-5"
    kept = json.loads((checkpoint / "evaluation.json").read_text())
    assert kept["best_draft_tokens"] == found["best_draft_tokens"]
    (best,) = [row for row in found["groups"] if row["draft_tokens"] == found["best_draft_tokens"]]
    assert kept["rows"][0]["tau (pooled)"] == best["tau_pooled"]
    assert "recorded with" in text

    exported = pair["folder"] / "exported"
    with pytest.raises(SystemExit):
        main(["export", pair["run"], "--layout", "zlab", "--output", str(exported), "--dtype", "float32"])
    card = (exported / "README.md").read_text()
    assert "Real speculative decoding (cpu, 1 thread; float32; greedy; answers of at most 6 tokens):" in card
    named = {
        True: "drafted tokens were the fastest when measured.",
        False: "was faster than plain decoding when measured",
    }
    assert kept["worth_it"] is found["worth_it"]
    assert named[found["worth_it"]] in card
    capsys.readouterr()
    # The export names its target, and keeps a newer evaluation in its own card.
    options = ["--prompts", pair["prompts"], "--limit", "1", "--temperature", "0.5"]
    found, text = evaluated(capsys, str(exported), *options)
    assert [row["suite"] for row in found["groups"]] == ["mine", "mine"]
    assert f"recorded in {exported / 'README.md'}" in text.replace("\n", "")
    card = (exported / "README.md").read_text()
    assert "| mine |" in card
    assert "| heldout |" in card  # of the run, and greedy
    assert "(cpu, 1 thread; float32; temperature 0.5, top-p 1, top-k all; answers of at most 6 tokens)" in card


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_who_ends_it_early_sees_what_was_decoded(
    pair: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    """The answer under way is the last; nothing is recorded."""
    shown = DecodingProgress.trial

    def ask(self: DecodingProgress, done: int, total: int, trial: Any) -> None:
        shown(self, done, total, trial)
        os.kill(os.getpid(), number)

    monkeypatch.setattr(DecodingProgress, "trial", ask)
    before = signal.getsignal(number)
    record = Path(pair["run"]) / "checkpoints/step-5/evaluation.json"
    record.unlink(missing_ok=True)
    with pytest.raises(SystemExit) as left:
        main(["evaluate", pair["run"], *BRIEF, "--json"])
    assert left.value.code == 128 + number
    text, last = capsys.readouterr().out.rstrip().rsplit("\n", 1)
    found = json.loads(last)
    assert (found["answers"], found["answers_missing"]) == (1, 1)
    assert "ended before its time: 1 more answers were not decoded" in text
    assert "not recorded: it was ended before its time" in text
    assert not record.exists()
    assert signal.getsignal(number) is before


def test_a_template_that_refuses_in_the_middle_costs_no_answer(
    pair: dict[str, Any], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    refusal = "{% if m.role == 'assistant' and m.content != 'Yes.' %}{{ raise_exception('no') }}{% endif %}"
    template = PLAIN_TEMPLATE.replace("%}", "%}" + refusal, 1)
    where, drafter = save_pair(tmp_path, pair["model"], random_drafter(pair["model"]), template)
    prompts = tmp_path / "turns.jsonl"
    prompts.write_text('{"turns": ["w3", "w4"]}\n{"prompt": "w7"}\n')
    with pytest.raises(SystemExit) as left:
        main(["evaluate", drafter, "--target", where, "--prompts", str(prompts), *BRIEF, "--json"])
    printed = capsys.readouterr()
    assert left.value.code == 2
    assert "the target's chat template refuses prompt '1': no (its follow-up 1" in printed.err.splitlines()[-1]
    text, last = printed.out.rstrip().rsplit("\n", 1)
    found = json.loads(last)
    assert (found["answers"], found["answers_missing"]) == (1, 2)
    assert "not recorded: it was ended before its time" in text


@pytest.mark.parametrize("option", [(), ("--json",)])
def test_a_plot_that_fails_at_its_end_costs_neither_the_record_nor_the_report(
    pair: dict[str, Any],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    option: tuple[str, ...],
) -> None:
    pytest.importorskip("matplotlib")

    def full(*arguments: Any, **options: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", full)
    record = Path(pair["run"]) / "checkpoints/step-5/evaluation.json"
    record.unlink(missing_ok=True)
    with pytest.raises(SystemExit) as left:
        main(["evaluate", pair["run"], *BRIEF, "--plot", str(tmp_path / "p.png"), *option])
    printed = capsys.readouterr()
    assert left.value.code == 2
    said = [line for line in printed.err.splitlines() if line.startswith("draftmill: ")]
    assert said == [
        f"draftmill: error: --plot {tmp_path}/p.png can't be written: No space left on device; give a file that can be"
    ]
    assert "recorded with" in printed.out
    assert record.exists()
    if option:
        assert json.loads(printed.out.splitlines()[-1])["answers"] == 2


def test_a_plot_is_told_before_the_json(
    pair: dict[str, Any], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    _, text = evaluated(capsys, pair["run"], "--no-record", "--plot", str(tmp_path / "p.png"))
    assert "plot: " in text.splitlines()[-2] + text.splitlines()[-1]
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_progress_is_told_where_there_is_no_terminal(
    pair: dict[str, Any], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("draftmill.evaluate.progress.LINE_EVERY_S", 0.0)
    with pytest.raises(SystemExit):
        main(["evaluate", pair["run"], *BRIEF, "--no-record"])
    told = [line for line in capfd.readouterr().err.splitlines() if line.startswith("decoded ")]
    assert [line.partition(",")[0] for line in told] == ["decoded 1/2", "decoded 2/2"]


def test_an_export_s_damaged_weights_are_named(pair: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    exported = pair["folder"] / "damaged"
    with pytest.raises(SystemExit):
        main(["export", pair["run"], "--layout", "zlab", "--output", str(exported)])
    weights = exported / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    line = refused(capsys, str(exported), "--prompts", pair["prompts"], "--device", "cpu")
    assert f"{weights} is damaged: its content does not match the checksum in draftmill.json" in line


def test_no_record_leaves_the_checkpoint_as_it_was(pair: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(pair["run"]) / "checkpoints/step-5/evaluation.json"
    before = path.read_bytes() if path.exists() else None
    evaluated(capsys, pair["run"], "--no-record")
    assert (path.read_bytes() if path.exists() else None) == before


def test_sampling_is_reproducible_and_claims_no_identity(
    pair: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--target", pair["target"], "--prompts", pair["prompts"], "--temperature", "0.9", "--top-p", "0.9"]
    first, text = evaluated(capsys, pair["drafter"], *options, "--seed", "3")
    second, _ = evaluated(capsys, pair["drafter"], *options, "--seed", "3")
    assert first["overall"][0]["identical"] is None
    assert "identical to plain" not in text
    assert [row["histogram"] for row in first["overall"]] == [row["histogram"] for row in second["overall"]]


def test_bad_input(pair: dict[str, Any], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    def error(*arguments: str, drafter: str = pair["drafter"], prompts: str = pair["prompts"]) -> str:
        return refused(capsys, drafter, "--target", pair["target"], "--prompts", prompts, "--device", "cpu", *arguments)

    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n")
    assert "holds no prompt" in error(prompts=str(empty))
    long = tmp_path / "long.jsonl"
    long.write_text(json.dumps({"prompt": "w1 " * 600}))
    assert "a prompt of 602 tokens is too long: the target holds 512" in error(prompts=str(long))
    assert "give --suite or --prompts, not both" in error("--suite", "humaneval")
    assert "no drafter at" in error(drafter=str(tmp_path / "nowhere"))
    assert "drafts 1 to 3 tokens a step, got 4" in error("--draft-tokens", "4")
    assert "prompts can't be read from /nowhere: No such file or directory; give" in error(prompts="/nowhere")
    assert "--draft-tokens must be numbers" in error("--draft-tokens", "many")
    assert "--limit must be at least 1, got 0" in error("--limit", "0")
    assert "temperature must be from 0" in error("--temperature", "-1")
    assert "--device must be auto, cpu, cuda or cuda:N, got 'tpu'" in error("--device", "tpu")
    assert "--dtype must be one of auto, bfloat16, float16, float32, got 'int4'" in error("--dtype", "int4")
    assert "--thinking must be one of auto, on, off, got 'maybe'" in error("--thinking", "maybe")
    assert "has no enable_thinking" in error("--thinking", "on")
    assert "there is no folder" in error("--plot", str(tmp_path / "nowhere/plot.png"))
    for size in ("0", "2", "-1"):
        line = f"--batch-size must be 1, got {size}: decoding is one sequence at a time"
        assert error("--batch-size", size).endswith(line)
    assert "--plot is empty; give a file to write" in error("--plot", "")
    assert f"--plot {tmp_path} is a folder; give a file, such as {tmp_path}/plot.png" in error("--plot", str(tmp_path))
    if not torch.cuda.is_available():
        assert "this machine has 0 CUDA devices" in error("--device", "cuda:0")
        assert "graphs can be captured on CUDA only" in error("--graphs", "on")


def save_in_float8(folder: Path, target: Target) -> tuple[str, str]:
    """The target as a checkpoint in fine-grained fp8, and as one of plain bfloat16 with the same rounded weights."""
    in_float8, rounded = {}, {}
    for name, value in target.model.state_dict().items():
        in_float8[name] = rounded[name] = value.to(torch.bfloat16)
        if name.endswith("_proj.weight"):
            scale = value.abs().max() / torch.finfo(torch.float8_e4m3fn).max
            in_float8[name] = (value / scale).to(torch.float8_e4m3fn)
            in_float8[f"{name}_scale_inv"] = scale.reshape(1, 1)
            rounded[name] = (in_float8[name].float() * scale).to(torch.bfloat16)
    how = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    config = {**target.config.to_dict(), "architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"}
    for kind, weights, more in (("float8", in_float8, {"quantization_config": how}), ("rounded", rounded, {})):
        tiny_tokenizer().save_pretrained(folder / kind)
        (folder / kind / "config.json").write_text(json.dumps({**config, **more}))
        save_file(weights, folder / kind / "model.safetensors", metadata={"format": "pt"})
    return str(folder / "float8"), str(folder / "rounded")


def test_a_drafter_serves_its_target_s_fine_grained_fp8_checkpoint(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Which CPUs run as bfloat16: as a checkpoint of the weights rounded so, and not as the original."""
    pytest.importorskip("accelerate", reason="transformers reads quantized checkpoints with accelerate")
    if torch.cuda.is_available():
        pytest.skip("where there is a GPU, transformers keeps the weights in float8, which no CPU multiplies")
    target = tiny_target("llama", hidden_size=128, intermediate_size=128, seed=3)
    in_float8, rounded = save_in_float8(tmp_path, target)
    prompt = [60, 3, 9, 61]
    text = reference_greedy(load_target(rounded, dtype="bfloat16"), prompt, 30)
    drafter = random_drafter(target)
    overfit(drafter, target, prompt + text, first=len(prompt), steps=20)
    own, where_drafter = save_pair(tmp_path, target, drafter)
    prompts = tmp_path / "one.jsonl"
    prompts.write_text('{"prompt": "w3 w9"}\n')

    def on(where: str) -> tuple[list[int], int]:
        options = ["--prompts", str(prompts), "--dtype", "bfloat16", "--max-new-tokens", "24", "--draft-tokens", "3"]
        found, _ = evaluated(capsys, where_drafter, "--target", where, *options)
        assert (found["target"], found["dtype"]) == (where, "bfloat16")
        (row,) = found["overall"]
        return row["histogram"], row["tokens"]

    histogram, num_tokens = on(in_float8)
    assert (histogram, num_tokens) == on(rounded) != on(own)
    assert sum(histogram[1:]) > histogram[0], "the drafter knows this text"


def test_a_drafter_without_target_or_prompts_says_what_to_give(
    pair: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert "does not name its target; give --target" in refused(
        capsys, pair["drafter"], "--prompts", pair["prompts"], "--device", "cpu"
    )
    assert "names no held-out samples to evaluate on; give --suite or --prompts" in refused(
        capsys, pair["drafter"], "--target", pair["target"], "--device", "cpu"
    )
    assert "no suite 'nope'" in refused(capsys, pair["drafter"], "--target", pair["target"], "--suite", "nope")


def test_a_drafter_for_another_target_is_refused_before_the_target_is_read(
    pair: dict[str, Any], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    other = tiny_target("llama", hidden_size=48, vocab_size=80)
    where, _ = save_pair(tmp_path, other, random_drafter(other))
    (Path(where) / "model.safetensors").unlink()
    message = refused(capsys, pair["drafter"], "--target", where, "--prompts", pair["prompts"], "--device", "cpu")
    assert "the drafter is for another target: its hidden size is 32, the target's is 48" in message
