"""`draftmill train` as a user types it: bad input, every ending, detached and resumed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import yaml

from draftmill.cli import main
from draftmill.config import TrainConfig, load_config
from draftmill.data.prepare import prepare
from draftmill.monitor.lock import Lock
from draftmill.monitor.phases import Phase
from draftmill.monitor.status import read_status
from monitor_doubles import draftmill, wait_until
from tiny import save_chats, save_target, save_tokenizer, small_world

ENDINGS = Path(__file__).parents[1] / "endings.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, a store and run.yaml, whose run would be folder/run."""
    path = tmp_path_factory.mktemp("world")
    sections = small_world(path)
    sections["data"]["heldout"] = 0
    (path / "run.yaml").write_text(yaml.safe_dump(sections))
    return path


def train(*arguments: str | Path) -> int:
    """The exit code of `draftmill train ARGUMENTS`."""
    with pytest.raises(SystemExit) as left:
        main(["train", *map(str, arguments)])
    return int(left.value.code or 0)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    """The one line of a refusal."""
    capsys.readouterr()
    assert train(*arguments) == 2
    captured = capsys.readouterr()
    (line,) = [line for line in captured.err.splitlines() if not line.startswith("draftmill: warning: ")]
    assert captured.out == ""
    assert line.startswith("draftmill: error: ")
    return line.removeprefix("draftmill: error: ")


def contents(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in folder.rglob("*")}


# Bad input


def test_no_configuration_or_none_that_can_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(capsys, tmp_path / "no.yaml").startswith(f"no configuration file at {tmp_path}/no.yaml")
    assert "can't be read" in refused(capsys, tmp_path)
    bad = tmp_path / "bad.yaml"
    for text, said in (
        ("", "must hold a mapping of sections (run, target, data, ...), got NoneType"),
        ("run: [", "bad.yaml, line 1 is not YAML"),
        ("- target", "must hold a mapping of sections (run, target, data, ...), got list"),
        ("data: {path: x}", "target is missing"),
        ("train: {lr: 1.0e-3}\ndata: {path: x}\ntrain: {epochs: 2}\n", "line 3 is not YAML: train stands there twice"),
        ("train:\n  lr: 1.0e-3\n  lr: 2.0e-3\n", "line 3 is not YAML: lr stands there twice"),
        (
            "target: [cpu]\ndata: 3\n",
            "target must be a section of settings, as in target: {name: value}, got ['cpu']; ",
        ),
    ):
        bad.write_text(text)
        assert said in refused(capsys, bad)
    assert [path.name for path in tmp_path.iterdir()] == ["bad.yaml"]


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("train.lrr=1e-3", "unknown key train.lrr (did you mean lr?)"),
        ("trian.lr=1e-3", "unknown key trian (did you mean train?)"),
        ("train.lr=fast", "train.lr: Input should be a valid number"),
        ("train.lr=0", "train.lr: Input should be greater than 0, got 0"),
        ("train.epochs=1.5", "train.epochs: Input should be a valid integer"),
        ("train.accumulate=0", "train.accumulate: Input should be greater than or equal to 1, got 0"),
        ("train.anchor_draws=0", "train.anchor_draws: Input should be greater than or equal to 1, got 0"),
        ("train.short_blocks=-0.1", "train.short_blocks: Input should be greater than or equal to 0, got -0.1"),
        ("train.short_blocks=1.5", "train.short_blocks: Input should be less than or equal to 1, got 1.5"),
        ("train.anchor_draws=65", "train.anchor_draws: Input should be less than or equal to 64, got 65"),
        ("train.loss=mse", "train.loss: must be cross_entropy, kl, total_variation, d_pace, or a mapping of"),
        ("train.num_anchors=true", "train.num_anchors: must be a number, got true"),
        ("drafter.sliding_layers=[true]", "drafter.sliding_layers: must be a number, got [true]"),
        ("train.weight_decay=.inf", "train.weight_decay: Input should be a finite number, got inf"),
        ("target.devices=cpu", "target.devices: must be auto or a list, as in [cpu] or [cuda:0, cuda:1], got 'cpu'"),
        ("drafter.devices=cuda:1", "drafter.devices: must be auto or a list, as in [cpu] or [cuda:0, cuda:1], got 'cu"),
        ("pipeline.stall_s=0", "pipeline.stall_s: Input should be greater than 0"),
        ("train.lr", "override 'train.lr' is not of the form section.name=value"),
        ("lr=1e-3", "override 'lr=1e-3' is not of the form section.name=value"),
        ("drafter.step=fast", "drafter.step: Input should be 'eager', 'compiled', 'graphed' or 'auto'"),
        ("drafter.step=graphed", "drafter.step=graphed needs CUDA devices, got cpu; use eager, compiled or auto"),
        ("target.revision=v2", "target.revision v2 is of the hub, and target.model "),
        (
            "drafter.devices=[gpu]",
            "drafter.devices: a device is cpu or cuda:N with a plain number, as in cuda:0, got 'gpu'",
        ),
        ("target.devices=[3]", "target.devices: a device is cpu or cuda:N with a plain number, as in cuda:0, got 3"),
        ("target.devices=[[true]]", "with a plain number, as in cuda:0, got True"),
        ("target.devices=[[[cpu]]]", "with a plain number, as in cuda:0, got ['cpu']"),
        ("target.devices=[null]", "with a plain number, as in cuda:0, got None"),
        ("target.devices=[cuda]", "with a plain number, as in cuda:0, got 'cuda'"),
        ("target.devices=[cuda:00]", "with a plain number, as in cuda:0, got 'cuda:00'"),
        ("drafter.devices=[cuda:-1]", "with a plain number, as in cuda:0, got 'cuda:-1'"),
        ("target.devices=[cuda:1000]", "with a plain number, as in cuda:0, got 'cuda:1000'"),
        ("target.devices=[cuda:\u00b2]", "with a plain number, as in cuda:0, got 'cuda:\u00b2'"),
        ("target.devices=7", "target.devices: must be auto or a list, as in [cpu] or [cuda:0, cuda:1], got 7"),
        ("target.devices=[]", "target.devices: name at least one device, or auto"),
        ("target.devices=[[]]", "target.devices: an inner list names the devices of one replica, got an empty one in"),
        (
            "drafter.devices=[[]]",
            "drafter.devices: an inner list names the devices of one replica, got an empty one in",
        ),
        (
            "target.devices=[[cuda:0, cuda:0]]",
            "target.devices: a group takes a GPU once, got cuda:0 more than once in ['cuda:0', 'cuda:0']",
        ),
        ("target.devices=[cuda:128]", "target.devices: cuda:128 is not on this host, which has"),
        ("target.devices=[[cuda:256, cuda:257]]", "target.devices: cuda:256 is not on this host, which has"),
        ("drafter.devices=[[cpu, cpu]]", "a drafter lives on one device, got a group"),
        ("drafter.devices=[]", "name at least one device, or auto"),
        ("drafter.devices=[cuda:7]", "drafter.devices: cuda:7 is not on this host, which has"),
        ("target.devices=[cuda:7, cpu]", "target.devices: cuda:7 is not on this host, which has"),
        ("target.model=/no/such/model", "no folder at /no/such/model"),
        ("target.quantize=float8", "float8 needs NVIDIA GPUs of compute capability 8.9 or higher, got cpu"),
        ("drafter.float8=all", "drafter.float8: float8 needs NVIDIA GPUs of compute capability 8.9 or higher, got cpu"),
        ("drafter.float8=head", "got cpu; leave drafter.float8 out"),
        ("drafter.float8=fc", "drafter.float8: Input should be 'head' or 'all', got 'fc'"),
        ("target.quantize=int4", "target.quantize: Input should be 'float8', got 'int4'"),
        ("train.muon_ns_coefficients=[.nan, 1, 1]", "train.muon_ns_coefficients.0: Input should be a finite number"),
        ("drafter.num_taps=9", "the target has 6 layers, too few for 9 taps (at most 3); lower drafter.num_taps"),
        ("drafter.target_layer_ids=[1, 9]", "tapped layer ids must lie in 0..4"),
        ("drafter.target_layer_ids=[2, 1]", "tapped layer ids must be distinct and ascending, got [2, 1]"),
        ("drafter.mask_token_id=0", "drafter.mask_token_id 0 is a pad, eos or bos token"),
        ("drafter.mask_token_id=8", "drafter.mask_token_id 8 is a token that the data holds; choose an id"),
        ("drafter.mask_token_id=999", "drafter.mask_token_id 999 lies outside the target's 80 embeddings"),
        ("drafter.sliding_window=8", "sliding_window and sliding_layers go together"),
        ("drafter.from_checkpoint=/no/such", "/no/such"),
        ("data.path=/no/such/store", "no store at /no/such/store; make one with draftmill prepare"),
        ("data.max_length=32", "was cut at max_length 64, the run asks for 32; set data.max_length=64"),
        ("data.bucket_edges=[16]", "16"),
        ("data.max_rows=0", "data.max_rows: Input should be greater than or equal to 1, got 0"),
        ("monitor.trackers=[abacus]", "monitor.trackers"),
    ],
)
def test_a_wrong_setting_is_one_line_and_nothing_is_written(
    folder: Path, capsys: pytest.CaptureFixture[str], override: str, said: str
) -> None:
    before = contents(folder)
    assert said in refused(capsys, folder / "run.yaml", override)
    assert contents(folder) == before


def test_a_section_with_nothing_in_it_is_as_one_left_out(folder: Path, tmp_path: Path) -> None:
    """YAML reads `train:` with every line below commented out as null."""
    sections = yaml.safe_load((folder / "run.yaml").read_text())
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({**sections, "train": None, "run": None}))
    config = load_config(tmp_path / "run.yaml", ["run.dir=here"])
    assert config.train == TrainConfig()
    assert config.run.dir == "here"


def test_a_file_of_costs_that_is_not_there(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = contents(folder)
    costs = ("target.devices=auto", "drafter.devices=auto", "pipeline.costs=/no/such/costs.json")
    assert "no file of costs at /no/such/costs.json" in refused(capsys, folder / "run.yaml", *costs)
    assert contents(folder) == before


def test_a_store_of_another_tokenizer(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of as many tokens, so that no id lies outside the embedding: training would run, on nonsense."""
    model = save_target(tmp_path / "other")
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["w1"], vocabulary["w2"] = vocabulary["w2"], vocabulary["w1"]
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    said = refused(capsys, folder / "run.yaml", f"target.model={model}", f"run.dir={tmp_path / 'run'}")
    assert "was made with the tokenizer of" in said
    assert f"which gives other ids than that of target.model {model}; run draftmill prepare --target {model}" in said
    assert not (tmp_path / "run").exists()


def test_a_target_without_an_id_for_the_mask(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As many embeddings as tokens, and none of them reserved."""
    model = save_target(tmp_path / "target", vocab=len(save_tokenizer(tmp_path / "count")))
    for file in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        if (model / file).exists():
            (model / file).write_text((model / file).read_text().replace("<reserved_0>", "<tool>"))
    prepare(str(model), [str(save_chats(tmp_path / "chats.jsonl"))], tmp_path / "store", max_length=64, num_processes=1)
    config = {"target": {"model": str(model)}, "data": {"path": str(tmp_path / "store"), "max_length": 64}}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({**config, "run": {"dir": str(tmp_path / "run")}}))
    said = refused(capsys, tmp_path / "run.yaml", "drafter.num_taps=2")
    assert "no mask token, no embedding row without a token and no reserved token; set drafter.mask_token_id" in said
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("changed", "overrides", "said"),
    [
        (
            {"hidden_act": "gelu"},
            (),
            "layer 4 of the target is not of the drafter's form, it has another activation than SiLU",
        ),
        ({"attention_bias": True}, (), "layer 4 of the target has no self_attn.q_proj of the drafter's form"),
        ({}, ("drafter.num_layers=7",), "the target has 6 layers, fewer than drafter.num_layers 7; lower it"),
        ({"quantization_config": {"quant_method": "fp8"}}, (), "is quantized, its layers are no drafter's first"),
    ],
)
def test_a_target_that_can_not_give_first_weights(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    changed: dict[str, Any],
    overrides: tuple[str, ...],
    said: str,
) -> None:
    """Found by its configuration, before weights are read or a directory is made."""
    model = tmp_path / "target"
    shutil.copytree(folder / "target", model)
    (model / "config.json").write_text(json.dumps({**json.loads((model / "config.json").read_text()), **changed}))
    asked = (f"run.dir={tmp_path / 'run'}", f"target.model={model}", "drafter.init=target", *overrides)
    refusal = refused(capsys, folder / "run.yaml", *asked)
    assert refusal.startswith("drafter.init target: ")
    assert said in refusal
    assert refusal.endswith("use drafter.init=normal")
    assert not (tmp_path / "run").exists()


def test_a_target_whose_weights_can_not_be_read(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Found when they are read, in the run: input that can't be used, so exit code 2; and started again in place."""
    model, run = tmp_path / "target", tmp_path / "run"
    shutil.copytree(folder / "target", model)
    weights = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    assert train(folder / "run.yaml", f"run.dir={run}", f"target.model={model}") == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(f"draftmill: error: target '{model}' can't be loaded: ")
    assert last.endswith(f"the whole story is in {run / 'run.log'}")
    assert read_status(run).phase is Phase.CRASHED
    (model / "model.safetensors").write_bytes(weights)
    assert train(folder / "run.yaml", f"run.dir={run}", f"target.model={model}", "train.max_steps=2") == 0


def test_too_few_samples_to_hold_any_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sections = small_world(tmp_path, count=3)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(sections))
    said = refused(capsys, tmp_path / "run.yaml")
    assert said.startswith("the store has 3 samples, too few to hold any out of training")
    assert not (tmp_path / "run").exists()


def test_directories_that_a_run_can_not_have(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = folder / "run.yaml"
    thesis = tmp_path / "thesis"
    thesis.mkdir()
    (thesis / "thesis.txt").write_text("precious")
    assert "holds files that are no run's (thesis.txt, ...); choose an empty run.dir" in refused(
        capsys, config, f"run.dir={thesis}"
    )
    assert "is a file; a run needs a directory" in refused(capsys, config, f"run.dir={thesis / 'thesis.txt'}")
    assert [path.name for path in thesis.iterdir()] == ["thesis.txt"]
    assert "holds no run to resume" in refused(capsys, config, f"run.dir={tmp_path / 'none'}", "--resume")
    assert not (tmp_path / "none").exists()
    used = tmp_path / "used"
    used.mkdir()
    lock = Lock.take(used)
    assert f"{used} is in use by process {os.getpid()} on" in refused(capsys, config, f"run.dir={used}")
    lock.release()
    sections = yaml.safe_load(config.read_text())
    del sections["run"]
    (tmp_path / "nameless.yaml").write_text(yaml.safe_dump(sections))
    said = refused(capsys, tmp_path / "nameless.yaml", "--resume")
    assert said == "--resume goes on with the run in run.dir, which is not set; add run.dir=DIRECTORY"


# Good input


def test_trained_finished_and_not_resumable(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, config = tmp_path / "run", folder / "run.yaml"
    assert train(config, f"run.dir={run}", "train.max_steps=3", "train.lr=3e-4") == 0
    log = capsys.readouterr().err
    assert "samples loaded (Arrow-backed, lazy access)" in log
    assert "  Target 0 on cpu..." in log
    assert "end by train.max_steps 3, in epoch 1: " in log
    assert yaml.safe_load((run / "config.yaml").read_text())["train"]["lr"] == 3e-4
    (last,) = [line for line in map(json.loads, (run / "metrics.jsonl").open()) if line["step"] == 3]
    assert 0.0 <= last["padding_share"] < 0.5
    assert last["context_tokens_per_s"] > 0
    status = read_status(run)
    assert (status.phase, status.exit_code, status.progress["step"]) == (Phase.FINISHED, 0, 3)
    assert "holds a run already (last seen finished at step 3); go on with it by --resume" in refused(
        capsys, config, f"run.dir={run}", "train.max_steps=3"
    )
    assert "the run is finished at step 3; export it" in refused(
        capsys, config, f"run.dir={run}", "train.max_steps=3", "train.lr=3e-4", "--resume"
    )


@pytest.mark.parametrize(
    "overrides",
    [
        ("train.anchor_draws=3", "train.accumulate=4", "train.max_steps=5"),
        ("train.anchor_draws=64", "train.max_steps=2"),
        ("train.anchor_draws=2", "data.batching=packed", "data.token_budget=64", "train.max_steps=3"),
        ("train.anchor_draws=2", "target.cache_gib=1", "drafter.devices=[cpu, cpu]", "target.devices=[cpu, cpu]"),
    ],
)
def test_several_draws_with_everything(folder: Path, tmp_path: Path, overrides: tuple[str, ...]) -> None:
    run = tmp_path / "run"
    assert train(folder / "run.yaml", f"run.dir={run}", "data.heldout=6", "train.epochs=1", *overrides) == 0
    status = read_status(run)
    assert status.phase is Phase.FINISHED
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    assert [line["step"] for line in steps] == list(range(1, status.progress["steps"] + 1))
    draws = int(overrides[0].partition("=")[2])
    assert ["padding_share" in line for line in steps] == [step % draws == 0 for step in range(len(steps))]


@pytest.fixture(scope="module")
def endings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """How each scenario of endings.py ended."""
    done = subprocess.run(
        [sys.executable, str(ENDINGS), str(tmp_path_factory.mktemp("endings"))],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("ending", "code", "status", "phase"),
    [
        ("finished", 0, 0, "finished"),
        ("sigterm", 0, 0, "stopped"),
        ("sigint", 0, 0, "stopped"),
        ("crashed", 1, 5, "crashed"),
        ("memory", 1, 5, "crashed"),
        ("stalled", 4, 4, "stalled"),
        ("main thread", 4, 4, "stalled"),
    ],
)
def test_exit_codes_of_every_ending_and_a_last_good_checkpoint(
    endings: dict[str, Any], ending: str, code: int, status: int, phase: str
) -> None:
    ended = endings[ending]
    assert (ended["code"], ended["status"], ended["phase"]) == (code, status, phase)
    assert ended["checkpoints"]
    assert all(problem is None for _, problem in ended["checkpoints"])
    assert ended["seconds"] < 60
    assert (ended["stacks"] > 0) == (phase == "stalled")


def test_the_last_line_says_what_went_wrong_and_where_to_look(endings: dict[str, Any]) -> None:
    last = {name: ended["last"] for name, ended in endings.items()}
    assert last["crashed"].startswith(
        "draftmill: error: worker target-0 on cpu failed at step 7, batch 6 (epoch 1, index 6): "
        "ArithmeticError: made up; the whole story is in "
    )
    assert last["crashed"].endswith("run.log")
    assert last["memory"].startswith("draftmill: error: MemoryError; the whole story is in ")
    assert last["stalled"].startswith("draftmill: error: no worker has made progress for 1 s; the whole story is in ")


def test_detached_seen_and_stopped(folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    overrides = (f"run.dir={run}", "train.epochs=500")
    done = draftmill("train", str(folder / "run.yaml"), *overrides, "--detach", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"run directory  {run}" in done.stdout
    wait_until(lambda: (read_status(run).progress.get("step") or 0) >= 2, "two steps")
    assert f"process        {read_status(run).pid}" in done.stdout
    done = draftmill("stop", str(run), folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    stopped = read_status(run)
    assert (stopped.phase, stopped.presence) == (Phase.STOPPED, "gone")
    assert (run / "checkpoints" / f"step-{stopped.progress['step']}").is_dir()


def test_stopped_and_resumed(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, config = tmp_path / "run", folder / "run.yaml"

    def stop() -> None:
        wait_until((run / "state.json").exists, "the run")
        wait_until(lambda: (read_status(run).progress.get("step") or 0) >= 2, "two steps")
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=stop, daemon=True).start()
    assert train(config, f"run.dir={run}", "train.epochs=12") == 0
    stopped = read_status(run)
    assert stopped.phase is Phase.STOPPED
    said = refused(capsys, config, f"run.dir={run}", "train.epochs=12", "train.lr=1e-4", "--resume")
    assert "this is not the run of the checkpoint: train.lr was 0.01, is 0.0001" in said
    assert train(config, f"run.dir={run}", "train.epochs=12", "--resume") == 0
    finished = read_status(run)
    assert finished.phase is Phase.FINISHED
    assert finished.progress["step"] == finished.progress["steps"] > stopped.progress["step"]
    assert f"going on from step-{stopped.progress['step']}" in (run / "run.log").read_text()
