"""`draftmill export` as a user types it, bad input included."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from draftmill.checkpoint.store import save
from draftmill.cli import main
from draftmill.drafter import Drafter, DrafterShape

torch.set_num_threads(1)

SHAPE = DrafterShape(
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    rms_norm_eps=1e-6,
    vocab_size=97,
    block_size=8,
    mask_token_id=96,
    target_layer_ids=(1, 3, 5),
    num_target_layers=8,
    rope={"rope_type": "default", "rope_theta": 10000.0},
    max_position_embeddings=512,
)


def write_checkpoint(run: Path, step: int, **changes) -> Path:
    torch.manual_seed(step)
    named = {name: parameter.detach() for name, parameter in Drafter(SHAPE).named_parameters()}
    config = {
        "target": {"model": "org/Target-8B"},
        "data": {"max_length": 256, "token_budget": 4096},
        "train": {"lr": 3e-4, "epochs": 2, "schedule": "cosine"},
        "run": {"seed": 7},
    }
    state = {
        "shape": SHAPE.to_dict(),
        "config": config,
        "target": {"model": "org/Target-8B", "revision": "0123abc", "architectures": ["Qwen3ForCausalLM"]},
        "data_fingerprint": "feedbeef",
        "accept_length": 2.0 + step / 100,
        "accept_by_slot": [0.9, 0.75, 0.5],
    }
    named.update(changes.pop("tensors", {}))
    average = {name: 0.5 * tensor for name, tensor in named.items()} if changes.pop("average", False) else None
    return save(run, step, named, {}, {**state, **changes}, average)


@pytest.fixture
def run_dir(tmp_path) -> Path:
    for step in (10, 20):
        write_checkpoint(tmp_path / "run", step)
    return tmp_path / "run"


def typed(*arguments) -> int:
    with pytest.raises(SystemExit) as left:
        main(["export", *map(str, arguments)])
    return left.value.code or 0


def refused(capsys, *arguments) -> str:
    assert typed(*arguments) == 2
    said = capsys.readouterr().err
    assert said.startswith("draftmill: error: ")
    assert said.count("\n") == 1
    return said


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_of_a_run_with_a_moving_average_either_weights_are_exported(tmp_path, capsys):
    folder = write_checkpoint(tmp_path / "run", 10, average=True)
    trained = load_file(folder / "drafter.safetensors")
    measured = "acceptance length 2.100 tokens a block"
    for typed_choice, factor, said in (
        ((), 0.5, "weights: the moving average\n"),
        (("--weights", "ema"), 0.5, "weights: the moving average\n"),
        (("--weights", "raw"), 1.0, "weights: those of the last step, not the moving average\n"),
    ):
        output = tmp_path / f"out-{len(list(tmp_path.iterdir()))}"
        assert typed(folder, "--layout", "zlab", "--output", output, "--dtype", "float32", *typed_choice) == 0
        assert said in capsys.readouterr().out
        stored = load_file(output / "model.safetensors")
        assert all(torch.equal(stored[name], factor * tensor) for name, tensor in trained.items())
        card = (output / "README.md").read_text()
        assert said.replace("weights: ", "| weights | ").strip() in card
        # What was measured was measured with the average.
        assert (measured in card) == (factor == 0.5)
    assert "is no checkpoint and has one set of weights" in refused(
        capsys, output, "--layout", "zlab", "--output", tmp_path / "again", "--weights", "raw"
    )
    without = write_checkpoint(tmp_path / "other", 10)
    assert "has no moving average: it was trained without train.ema_decay" in refused(
        capsys, without, "--layout", "zlab", "--output", tmp_path / "again", "--weights", "ema"
    )
    assert "unknown weights 'best'" in refused(
        capsys, without, "--layout", "zlab", "--output", tmp_path / "again", "--weights", "best"
    )
    assert not (tmp_path / "again").exists()


def test_a_run_s_best_checkpoint_is_exported_with_its_card(run_dir, tmp_path, capsys):
    assert typed(run_dir, "--layout", "zlab", "--output", tmp_path / "Target-8B-DFlash", "--check") == 0
    out = capsys.readouterr().out
    assert "exported step-20, of the greatest held-out acceptance length (2.200)" in out
    assert "checked: 25 tensors equal the trained ones" in out
    assert "24,832 parameters in bfloat16 written to" in out
    folder = tmp_path / "Target-8B-DFlash"
    assert sorted(content(folder)) == ["README.md", "config.json", "draftmill.json", "model.safetensors"]
    torch.manual_seed(20)
    trained = dict(Drafter(SHAPE).named_parameters())
    stored = load_file(folder / "model.safetensors")
    assert all(torch.equal(stored[name], trained[name].bfloat16()) for name in trained)
    config = json.loads((folder / "config.json").read_text())
    assert config["max_position_embeddings"] == 512
    assert config["dtype"] == "bfloat16"
    facts = json.loads((folder / "draftmill.json").read_text())["facts"]
    assert facts["training_length"] == 256
    card = (folder / "README.md").read_text()
    for said in (
        "base_model: org/Target-8B",
        "| target revision | `0123abc` |",
        "| data fingerprint | `feedbeef` |",
        "| training length (tokens) | 256 |",
        "| position limit (the target's) | 512 |",
        "acceptance length 2.200 tokens a block",
        "| accepted | 0.900 | 0.750 | 0.500 |",
        "train.lr: 0.0003",
        "--speculative-algorithm DFLASH",
        "--speculative-draft-model-path Target-8B-DFlash",
        "--speculative-num-draft-tokens 8",
        'vllm serve org/Target-8B \\\n  --speculative-config \'{"method": "dflash", "model": "Target-8B-DFlash", '
        '"num_speculative_tokens": 7}\'',
    ):
        assert said in card, said


def test_the_card_s_recipe_has_no_setting_that_was_of_no_effect():
    from draftmill.checkpoint.card import card

    train = {"schedule": "cosine", "decay_share": 0.2, "slot_weights": "decay", "d_pace_alpha": 0.5, "muon_lr": 1e-3}
    other = {"schedule": "warmup-stable-decay", "slot_weights": "d_pace", "optimizer": "muon"}
    idle = ("train.decay_share: 0.2", "train.d_pace_alpha: 0.5", "train.muon_lr: 0.001")
    text = card(SHAPE, {"config": {"train": train}}, "zlab", "name")
    assert "train.schedule: cosine" in text
    assert not any(line in text for line in idle)
    text = card(SHAPE, {"config": {"train": {**train, **other}}}, "zlab", "name")
    assert all(line in text for line in idle)


def test_a_checkpoint_is_exported_in_the_speculators_layout(run_dir, tmp_path, capsys):
    out = tmp_path / "out"
    assert typed(run_dir / "checkpoints" / "step-10", "--layout", "speculators", "--output", out) == 0
    said = capsys.readouterr().out
    assert "greatest" not in said
    assert "SGLang does not read this layout" in said
    config = json.loads((out / "config.json").read_text())
    assert config["aux_hidden_state_layer_ids"] == [2, 4, 6]
    assert config["speculators_config"]["verifier"]["name_or_path"] == "org/Target-8B"
    card = (out / "README.md").read_text()
    assert "sglang" not in card
    assert "`vllm serve out`" in card


def test_an_earlier_export_is_replaced_only_by_force(run_dir, tmp_path, capsys):
    out = tmp_path / "out"
    first = ("--layout", "zlab", "--output", out)
    assert typed(run_dir, *first) == 0
    before = content(out)
    assert "holds an earlier export; give --force to replace it" in refused(
        capsys, run_dir, *first, "--dtype", "float32"
    )
    assert content(out) == before
    assert typed(run_dir, *first, "--dtype", "float32", "--force") == 0
    assert load_file(out / "model.safetensors")["fc.weight"].dtype == torch.float32
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "run"]


def test_a_folder_that_holds_something_else_is_never_touched(run_dir, tmp_path, capsys):
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.txt").write_text("mine")
    said = refused(capsys, run_dir, "--layout", "zlab", "--output", out, "--force")
    assert "holds something else (thesis.txt); give a new or empty folder as --output" in said
    (out / "thesis.txt").unlink()
    assert typed(run_dir, "--layout", "zlab", "--output", out) == 0
    (out / "notes.txt").write_text("mine")
    before = content(out)
    said = refused(capsys, run_dir, "--layout", "zlab", "--output", out, "--force")
    assert "holds more than an export (notes.txt)" in said
    assert content(out) == before
    assert "is a file; give a new or empty folder" in refused(
        capsys, run_dir, "--layout", "zlab", "--output", out / "notes.txt"
    )
    before = content(run_dir)
    assert "holds something else" in refused(capsys, run_dir, "--layout", "zlab", "--output", run_dir, "--force")
    assert content(run_dir) == before


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--layout", "gguf"), "unknown layout 'gguf'; the layouts are zlab, speculators"),
        (("--layout", "zlab", "--dtype", "int4"), "unknown dtype 'int4'; an export is in bfloat16 or float32"),
        ((), "Missing option '--layout'"),
        (("--layout", "zlab", "--shards", "3"), "No such option: --shards"),
        (("--layout", "zlab", "--dtyp", "float32"), "No such option: --dtyp (Possible options: --dtype)"),
        (("--layout", "zlab", "--target", "/no/such"), "no folder at /no/such; give the target's folder or hub id"),
    ],
)
def test_wrong_options_are_one_line(run_dir, tmp_path, capsys, options, said):
    assert said in refused(capsys, run_dir, "--output", tmp_path / "out", *options)
    assert not (tmp_path / "out").exists()


def test_a_source_that_is_none_is_one_line(tmp_path, capsys):
    options = ("--layout", "zlab", "--output", tmp_path / "out")
    assert "no run, checkpoint or drafter at" in refused(capsys, tmp_path / "nowhere", *options)
    run = tmp_path / "run"
    run.mkdir()
    assert "is neither a run, nor a checkpoint" in refused(capsys, run, *options)
    (run / "config.yaml").write_text("run: {}")
    assert "has no checkpoint yet; train until the first is written" in refused(capsys, run, *options)
    (run / "checkpoints").mkdir()
    assert "has no checkpoint yet" in refused(capsys, run, *options)
    assert not (tmp_path / "out").exists()


def test_damaged_weights_are_named_and_nothing_is_written(run_dir, tmp_path, capsys):
    path = run_dir / "checkpoints" / "step-20" / "drafter.safetensors"
    damaged = bytearray(path.read_bytes())
    damaged[-5] ^= 1
    path.write_bytes(damaged)
    said = refused(capsys, run_dir / "checkpoints" / "step-20", "--layout", "zlab", "--output", tmp_path / "out")
    assert "step-20/drafter.safetensors is damaged" in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"shape": {**SHAPE.to_dict(), "mask_token_id": 97}}, "mask token id 97 lies outside the target's embedding"),
        ({"shape": {**SHAPE.to_dict(), "target_layer_ids": [1, 3, 8]}}, "tapped layer ids must lie in"),
        ({"shape": {**SHAPE.to_dict(), "hidden_size": 64}}, "by the configuration it is"),
        ({"tensors": {"norm.weight": torch.full((32,), torch.nan)}}, "norm.weight holds NaN or infinity"),
        ({"tensors": {"lm_head.weight": torch.zeros(97, 32)}}, "has lm_head.weight, which a DFlash drafter does not"),
    ],
)
def test_weights_that_could_not_be_served_are_refused(tmp_path, capsys, change, said):
    folder = write_checkpoint(tmp_path / "run", 1, **change)
    assert said in refused(capsys, folder, "--layout", "zlab", "--output", tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


def test_an_export_without_a_known_target_asks_for_it(run_dir, tmp_path, capsys):
    assert typed(run_dir, "--layout", "zlab", "--output", tmp_path / "a") == 0
    (tmp_path / "a" / "draftmill.json").unlink()  # as others publish
    options = ("--layout", "speculators", "--output", tmp_path / "b")
    assert "does not say its target, which this layout names; give --target" in refused(
        capsys, tmp_path / "a", *options
    )
    assert typed(tmp_path / "a", *options, "--target", "org/Other") == 0
    config = json.loads((tmp_path / "b" / "config.json").read_text())
    assert config["speculators_config"]["verifier"]["name_or_path"] == "org/Other"


def test_a_full_disk_is_one_line_and_leaves_nothing(run_dir, tmp_path, capsys, monkeypatch):
    def full(path, tensors):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr("draftmill.checkpoint.weights.write_tensors", full)
    said = refused(capsys, run_dir, "--layout", "zlab", "--output", tmp_path / "out")
    assert "was not written: No space left on device" in said
    assert "model.safetensors" in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


def test_evaluations_recorded_later_are_in_the_card(run_dir, tmp_path):
    from draftmill.checkpoint import record_evaluation

    rows = [
        {"suite": "mt-bench", "acceptance length": 3.5},
        {"suite": "code", "acceptance length": 4.25, "speed-up": 2.0},
    ]
    evaluation = {"rows": rows, "best_draft_tokens": 5}
    record_evaluation(run_dir / "checkpoints" / "step-20", SHAPE, "draftmill", evaluation)
    assert typed(run_dir, "--layout", "zlab", "--output", tmp_path / "a") == 0
    (run_dir / "checkpoints" / "step-20" / "evaluation.json").unlink()
    assert typed(run_dir, "--layout", "zlab", "--output", tmp_path / "b") == 0
    assert "mt-bench" not in (tmp_path / "b" / "README.md").read_text()
    record_evaluation(tmp_path / "b", SHAPE, "zlab", evaluation)
    for name in ("a", "b"):
        card = (tmp_path / name / "README.md").read_text()
        assert "| suite | acceptance length | speed-up |" in card
        assert "| mt-bench | 3.500 | unknown |" in card
        assert "| code | 4.250 | 2.000 |" in card
        assert "5 drafted tokens were the fastest" in card
        assert '"num_speculative_tokens": 5' in card
        assert "--speculative-num-draft-tokens 6" in card
    about = {"target": "org/Target-8B-FP8", "device": "a GPU"}
    record_evaluation(tmp_path / "b", SHAPE, "zlab", {**evaluation, "draft_tokens": [5], "about": about})
    assert "decoding (target `org/Target-8B-FP8`; a GPU):" in (tmp_path / "b" / "README.md").read_text()


def measured(*labels: str, tau: float = 2.0, counts: tuple[int, ...] = (3, 5), best: int = 5, **about) -> dict:
    sampling = {"max_new_tokens": 64, "temperature": 0.0, "top_p": 1.0, "top_k": 0, "seed": 0}
    about = {"target": "org/Target-8B", "device": "a GPU", **about}
    about["sampling"] = {**sampling, **about.get("sampling", {})}
    rows = [{"prompts": label, "drafted": best, "tau": tau} for label in labels]
    return {"rows": rows, "draft_tokens": list(counts), "best_draft_tokens": best, "about": about}


def test_a_count_that_was_compared_with_none_is_not_served(run_dir, tmp_path):
    from draftmill.checkpoint import record_evaluation

    assert typed(run_dir, "--layout", "zlab", "--output", tmp_path / "a") == 0
    record_evaluation(tmp_path / "a", SHAPE, "zlab", measured("s", counts=(3,), best=3))
    card = (tmp_path / "a" / "README.md").read_text()
    assert "| s | 3 | 2.000 |" in card
    assert "fastest" not in card
    assert '"num_speculative_tokens": 7' in card
    assert "--speculative-num-draft-tokens 8" in card


def test_the_card_of_a_drafter_that_gained_nothing_says_so(run_dir, tmp_path):
    from draftmill.checkpoint import record_evaluation

    def recorded(**facts) -> str:
        record_evaluation(tmp_path / "a", SHAPE, "zlab", facts)
        return (tmp_path / "a" / "README.md").read_text()

    assert typed(run_dir, "--layout", "zlab", "--output", tmp_path / "a") == 0
    nothing = "No number of drafted tokens that was tried was faster than plain decoding when measured"
    card = recorded(**measured("s", counts=(3,), best=3), worth_it=False)
    assert f"{nothing}.\n" in card
    assert '"num_speculative_tokens": 7' in card
    card = recorded(**measured("s"), worth_it=False)
    assert f"{nothing}; 5 came closest.\n" in card
    assert '"num_speculative_tokens": 5' in card
    assert "fastest" not in card
    card = recorded(**measured("s"), worth_it=True)
    assert nothing not in card
    assert "5 drafted tokens were the fastest when measured" in card


@pytest.mark.parametrize("layout", ["draftmill", "zlab"])
def test_an_evaluation_keeps_what_others_measured_before_it(run_dir, tmp_path, layout):
    """Rows of other prompts, targets and sampling; those of the same are replaced."""
    from draftmill.checkpoint import record_evaluation

    checkpoint, out = run_dir / "checkpoints" / "step-20", tmp_path / "out"
    if layout == "zlab":
        assert typed(run_dir, "--layout", "zlab", "--output", out) == 0

    def recorded(evaluation: dict) -> str:
        record_evaluation(checkpoint if layout == "draftmill" else out, SHAPE, layout, evaluation)
        if layout == "draftmill":
            assert typed(run_dir, "--layout", "zlab", "--output", out, "--force") == 0
        return (out / "README.md").read_text()

    def lines(card: str) -> list[str]:
        return [line for line in card.splitlines() if line.startswith(("| mt", "| code", "Real"))]

    greedy = "Real speculative decoding (a GPU; greedy; answers of at most 64 tokens):"
    recorded(measured("mt, thinking", "code", best=5))
    card = recorded(measured("mt", tau=3.0, counts=(2, 4), best=4))
    assert lines(card) == [greedy, "| mt | 4 | 3.000 |", "| mt, thinking | 5 | 2.000 |", "| code | 5 | 2.000 |"]
    assert "4 drafted tokens were the fastest" in card
    # One count alone: its row replaces the other, with what was found of several counts still served.
    card = recorded(measured("mt", tau=3.5, counts=(6,), best=6, sampling={"seed": 1}))
    assert lines(card) == [greedy, "| mt | 6 | 3.500 |", "| mt, thinking | 5 | 2.000 |", "| code | 5 | 2.000 |"]
    assert '"num_speculative_tokens": 4' in card
    drawn = {"temperature": 0.5}
    card = recorded(measured("code", tau=1.5, counts=(1,), best=1, sampling=drawn))
    assert lines(card)[:2] == [
        "Real speculative decoding (a GPU; temperature 0.5, top-p 1, top-k all; answers of at most 64 tokens):",
        "| code | 1 | 1.500 |",
    ]
    assert lines(card)[2:] == [greedy, "| mt | 6 | 3.500 |", "| mt, thinking | 5 | 2.000 |", "| code | 5 | 2.000 |"]
    card = recorded(measured("code", tau=1.7, counts=(1,), best=1, target="org/Other", sampling=drawn))
    assert "| code | 1 | 1.500 |" in card
    assert "| code | 1 | 1.700 |" in card
    card = recorded(measured("mt", "mt, thinking", "code", tau=4.0, counts=(2, 7), best=7))
    assert lines(card)[:4] == [greedy, "| mt | 7 | 4.000 |", "| mt, thinking | 7 | 4.000 |", "| code | 7 | 4.000 |"]
    assert "2.000 |" not in card
    assert '"num_speculative_tokens": 7' in card
