"""The whole chain as a user types it: prepare, train, status, evaluate, export; then the export in a peer's hands."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml

from draftmill.checkpoint import read_published
from draftmill.cli import main
from draftmill.evaluate.command import build_drafter
from draftmill.evaluate.decode import Decoder
from draftmill.target.generate_sampling import Sampling
from draftmill.target.load import load_target
from tiny import save_chats, save_target, small_world


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    return int(ended.value.code or 0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a few dozen steps, made by commands alone."""
    folder = tmp_path_factory.mktemp("chain")
    sections = small_world(folder / "unused")
    target = save_target(folder / "target", num_layers=6)
    chats = save_chats(folder / "chats.jsonl")
    store = ["--output", str(folder / "store"), "--max-length", "64", "--processes", "1"]
    assert run("prepare", "--target", str(target), "--input", str(chats), *store) == 0
    sections["target"]["model"], sections["data"]["path"] = str(target), str(folder / "store")
    sections["run"]["dir"] = str(folder / "run")
    (folder / "run.yaml").write_text(yaml.safe_dump(sections))
    assert run("train", str(folder / "run.yaml"), "train.epochs=8", "drafter.init=target") == 0
    return folder


def test_status_tells_the_end_of_the_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("status", str(folder / "run"), "--json") == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told["phase"] == "finished"


def test_evaluate_and_export_what_the_peers_own_loop_decodes_alike(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dflash = pytest.importorskip("dflash.model", reason="dflash 0.1.0 is not installed; `make test` installs it")
    prompts = folder / "prompts.jsonl"
    texts = ["w1 w2 w3", "w9 w8 w7 w6", "w30"]
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    options = [
        "--prompts",
        str(prompts),
        "--max-new-tokens",
        "20",
        "--dtype",
        "float32",
        "--draft-tokens",
        "3",
        "--json",
    ]
    assert run("evaluate", str(folder / "run"), *options) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told["overall"][0]["identical"] == told["overall"][0]["answers"] == len(texts)

    out = folder / "drafter"
    arguments = ["--layout", "zlab", "--output", str(out), "--dtype", "float32", "--check"]
    assert run("export", str(folder / "run"), *arguments) == 0
    config = json.loads((out / "config.json").read_text())
    assert config["architectures"] == ["DFlashDraftModel"]
    peer = dflash.DFlashDraftModel.from_pretrained(out, dtype=torch.float32, attn_implementation="sdpa").eval()
    target = load_target(str(folder / "target"), dtype="float32")
    source = read_published(str(folder / "run"))
    decoder = Decoder(target, build_drafter(source.shape, source.tensors, target))
    for text in texts:
        messages = [{"role": "user", "content": text}]
        ids = target.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        ours = decoder.generate(ids, num_drafts=3, sampling=Sampling(max_new_tokens=20), stop={2}, stream=0)
        plain = decoder.generate(ids, num_drafts=0, sampling=Sampling(max_new_tokens=20), stop={2}, stream=0)
        theirs = dflash.dflash_generate(peer, target.model, torch.tensor([ids]), 20, [2])
        assert ours.tokens == plain.tokens
        assert theirs[0, len(ids) :].tolist() == plain.tokens


def test_export_refuses_a_folder_that_holds_something_else(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = folder / "precious"
    other.mkdir()
    (other / "thesis.txt").write_text("do not lose me")
    assert run("export", str(folder / "run"), "--layout", "zlab", "--output", str(other)) == 2
    error = capsys.readouterr().err.strip()
    assert len(error.splitlines()) == 1
    assert "holds something else" in error
    assert (other / "thesis.txt").read_text() == "do not lose me"
