"""`draftmill bench step` and the step benchmark's script as a user types them, bad input included."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from draftmill.cli import main

torch.set_num_threads(1)

ROOT = Path(__file__).parents[2]
CONFIG = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
    "max_position_embeddings": 1024,
    "rope_theta": 1000000.0,
}
SMALL = {"num-layers": 2, "num-taps": 3, "block-size": 8, "anchors": 12, "context": 96, "documents": 2, "repeats": 2}
OPTIONS = [part for name, value in SMALL.items() for part in (f"--{name}", str(value))]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    return path


def bench(*arguments: str) -> int:
    """Exit code of `draftmill bench step` with these arguments."""
    with pytest.raises(SystemExit) as leaving:
        main(["bench", "step", *arguments])
    code = leaving.value.code
    assert isinstance(code, int)
    return code


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line with which a command was refused."""
    assert bench(*arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("draftmill: error: ")
    assert printed.err.count("\n") == 1
    return printed.err


@pytest.mark.parametrize("named", ["file", "folder"])
def test_figures_of_a_shape(config: Path, named: str, capsys: pytest.CaptureFixture[str]) -> None:
    source = config if named == "file" else config.parent
    assert bench("--model-config", str(source), *OPTIONS, "--device", "cpu", "--json") == 0
    *lines, last = capsys.readouterr().out.splitlines()
    got = json.loads(last)
    # per layer: keys and values, queries, output, and the MLP; 96 context tokens, 12 blocks of 8. The first layer
    # projects 12 given tokens and one mask token, the last one's output and MLP see 12 x 7 of the blocks' tokens
    keys_values, queries, rest = 2 * 64 * 32, 64 * 64, 64 * 64 + 3 * 64 * 96
    context = 96 * (4 * 3 * 64 * 64 + 6 * 2 * keys_values)
    blocks = 6 * (13 * (keys_values + queries) + 96 * (keys_values + queries + rest) + 84 * rest)
    head = 4 * (12 * 7) * 64 * 512
    # attention depends on the anchors: at least the block itself, at most all that stands before it too
    least, most = (12 * 2 * (96 * seen) * 64 for seen in (8 + 1, 8 + 40))
    useful = got["useful_tflop"] * 1e12
    assert context + blocks + head + least <= useful <= context + blocks + head + most
    assert got["median_ms"] >= got["min_ms"] > 0
    assert got["useful_tflops"] == pytest.approx(got["useful_tflop"] / got["median_ms"] * 1e3)
    assert got["ceiling_share"] == pytest.approx(got["useful_tflops"] / got["ceiling_tflops"])
    assert got["peak_gib"] > 0.05
    assert (got["dtype"], got["step"]) == ("float32", "eager (auto: the choice on a CPU)")
    assert (got["num_layers"], got["num_taps"], got["block_size"], got["anchors"]) == (2, 3, 8, 12)
    assert lines[0].startswith("drafter  hidden 64, MLP 96, 4/2 heads of 16, vocabulary 512; 2 layers, blocks of 8")
    assert lines[0].endswith("taps of 8 layers at 1, 3, 5")
    assert lines[1].startswith("batch    2 x 48 context tokens, 12 anchors; float32 on cpu")
    assert [line.split()[0] for line in lines[2:]] == ["step", "time", "useful", "memory"]


def test_the_same_seed_gives_the_same_work(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures = []
    for _ in range(2):
        assert bench("--model-config", str(config), *OPTIONS, "--device", "cpu", "--step", "eager", "--json") == 0
        figures.append(json.loads(capsys.readouterr().out.splitlines()[-1]))
    assert figures[0]["useful_tflop"] == figures[1]["useful_tflop"]
    assert figures[0]["step"] == "eager (as configured)"


def test_bfloat16_on_a_cpu(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("--model-config", str(config), *OPTIONS, "--device", "cpu", "--dtype", "bfloat16", "--json") == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["dtype"] == "bfloat16"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--step", "fast"], "--step must be eager, compiled, graphed or auto, got 'fast'"),
        (["--step", "graphed", "--device", "cpu"], "--step graphed needs a CUDA device, got cpu"),
        (["--dtype", "float16"], "--dtype must be auto, bfloat16 or float32, got 'float16'"),
        (["--float8", "some"], "--float8 must be head or all, got 'some'"),
        (
            ["--float8", "all", "--device", "cpu"],
            "float8 needs NVIDIA GPUs of compute capability 8.9 or higher, got cpu",
        ),
        (["--device", "gpu"], "--device must be auto, cpu or cuda:N, got 'gpu'"),
        (["--device", "cuda:99"], "--device cuda:99 is not on this host, which has "),
        (["--context", "0"], "--context must be at least 1, got 0"),
        (["--context", "97"], "--context must be a multiple of --documents 2, got 97"),
        (["--anchors", "81"], "2 x 48 context tokens have room for 80 whole blocks of 8 on different anchors, got 81"),
        (["--context", "16"], "2 x 8 context tokens have room for 0 whole blocks of 8"),
        (["--repeats", "0"], "--repeats must be at least 1, got 0"),
        (["--block-size", "1"], "--block-size must lie in 2..256, got 1"),
        (["--num-layers", "0"], "--num-layers must lie in 1..64, got 0"),
        (["--num-layers", "100"], "--num-layers must lie in 1..64, got 100"),
        (["--anchors", "0"], "--anchors must be at least 1, got 0"),
        (["--num-taps", "6"], "too few for 6 taps"),
        (["--anchors", "many"], "--anchors"),
    ],
)
def test_wrong_options(config: Path, options: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert said in refused(capsys, "--model-config", str(config), *OPTIONS, *options)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is no JSON file"),
        ("[1, 2]", "has no model_type"),
        ('{"hidden_size": 64}', "has no model_type"),
        ('{"model_type": "no-such-model"}', "is no configuration that can be used"),
        ('{"model_type": "vit"}', "gives no vocab_size"),
        (json.dumps({**CONFIG, "rope_scaling": {"rope_type": "longrope"}}), "longrope"),
    ],
)
def test_wrong_configs(config: Path, text: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    config.write_text(text)
    assert said in refused(capsys, "--model-config", str(config), *OPTIONS)


def test_a_missing_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, "--model-config", "nothing.json", *OPTIONS)
    assert "no file at nothing.json; give a Hugging Face config.json" in said
    assert "no folder at" in refused(capsys, "--model-config", str(tmp_path / "nothing"), *OPTIONS)
    assert refused(capsys, *OPTIONS).endswith("'--model-config' (see draftmill --help)\n")


def test_the_benchmark_script_runs_on_a_cpu(tmp_path: Path) -> None:
    """Ours alone, tiny: what could not run is in the result with its reason."""
    out = tmp_path / "result.json"
    command = ["bench/step.py", "--tiny", "--device", "cpu", "--repeats", "1", "--out", str(out)]
    done = subprocess.run(
        [sys.executable, *command, "--sizes", "4x2048", "small", "--contenders", "eager", "graphed", "graphed-float8"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    got = json.loads(done.stdout.splitlines()[-1])
    assert got == json.loads(out.read_text())
    assert (got["dtype"], got["tiny"], list(got["sizes"])) == ("float32", True, ["4x2048", "small"])
    contenders = got["sizes"]["4x2048"]["contenders"]
    assert contenders["graphed"] == {"error": "ValueError: a CUDA graph needs a CUDA device, got cpu"}
    assert contenders["graphed-float8"]["error"].startswith("InputError: drafter.float8: float8 needs NVIDIA GPUs")
    assert contenders["eager"]["runs"] == 2
    assert contenders["eager"]["loss_drift"] == 0
    assert contenders["eager"]["loss"] == pytest.approx(6.25, abs=0.1)  # ln 512, and a little more
    assert got["sizes"]["small"]["contenders"]["eager"]["useful_tflops"] > 0
