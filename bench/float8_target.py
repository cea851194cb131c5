"""What does a drafter lose that is trained on the features of a target in float8, and serves the target as it is?

The demo's recipe on SmolLM2-135M, once on its features and once on those with every product of its decoder layers
rounded as `target.quantize: float8` rounds it (e4m3; weights by output row, activations by token), for several seeds.
The rounding is imitated, so that it runs on a CPU: numbers are rounded and multiplied in bfloat16. Then both drafters
decode the held-out prompts of the demo greedily with the target as it is, in float32.

    python bench/float8_target.py --cache .cache        about 12 minutes a seed on two CPU cores

Needs what `draftmill demo` needs. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from draftmill.checkpoint import read_published
from draftmill.data.prepare import prepare
from draftmill.demo import run as demo
from draftmill.demo import smollm2
from draftmill.evaluate.command import build_drafter
from draftmill.monitor.run import RunDirectory
from draftmill.target.load import load_target
from draftmill.target.model import Target
from draftmill.train import run as training
from draftmill.train.loading import Loaded, load_targets
from draftmill.train.setup import Setup
from provenance import commit

LARGEST = torch.finfo(torch.float8_e4m3fn).max


def rounded(tensor: torch.Tensor) -> torch.Tensor:
    """To float8 and back, with a scale for each row of the last dimension."""
    scale = tensor.abs().amax(-1, keepdim=True).float().clamp_min(1e-12) / LARGEST
    return ((tensor.float() / scale).to(torch.float8_e4m3fn).float() * scale).to(tensor.dtype)


def round_products(target: Target) -> None:
    """Let the target's decoder layers multiply rounded numbers."""
    for module in target.layers.modules():
        if isinstance(module, torch.nn.Linear):
            module.weight.data = rounded(module.weight.data)
            module.register_forward_pre_hook(lambda _module, inputs: (rounded(inputs[0]), *inputs[1:]))


def load_rounded(setup: Setup, run: RunDirectory) -> Loaded:
    """The targets of a run, rounded once they are loaded, as a run does: the drafter's first weights are not."""
    loaded = load_targets(setup, run)
    for replica in loaded.targets:
        round_products(replica.target)
    return loaded


def trained(options: argparse.Namespace, model: Path, store: Path, seed: int, float8: bool) -> dict[str, Any]:
    """One drafter: its run's last held-out figure, and tau of decoding with it."""
    if float8:
        training.load_targets = load_rounded
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(dir=options.cache) as folder:
        config = demo.recipe(model, store, Path(folder) / "run", "cpu")
        train = {"max_steps": options.steps} if options.steps else {}
        config = config.model_copy(
            update={
                "run": config.run.model_copy(update={"seed": seed}),
                "train": config.train.model_copy(update=train),
            }
        )
        try:
            demo.train_with_progress(Console(quiet=True), config)
        finally:
            training.load_targets = load_targets
        lines = [json.loads(line) for line in (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()]
        source = read_published(str(Path(folder) / "run"))
    target = load_target(str(model), device="cpu", dtype="float32")
    drafter = build_drafter(source.shape, source.tensors, target)
    prompts = demo.read_prompts(demo.HELDOUT)[:: options.stride]
    found = demo.measure(Console(quiet=True), drafter, target, prompts, demo.NEW_TOKENS["cpu"])
    result = {
        "seed": seed,
        "float8": float8,
        "heldout_accept_length": [line["accept_length"] for line in lines if "accept_length" in line][-1],
        "loss": statistics.fmean([line["loss"] for line in lines if "loss" in line][-20:]),
        "tau": found.tau_response_mean,
        "tau_pooled": found.tau_pooled,
        "answers": found.answers,
        "seconds": round(time.perf_counter() - started, 1),
    }
    print(json.dumps(result), flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, default=Path(".cache"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--steps", type=int, help="of a run; the demo's by default")
    parser.add_argument("--stride", type=int, default=1, help="every so-manieth held-out prompt is decoded")
    options = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    model = smollm2.fetch(options.cache, lambda _text: None)
    store = options.cache / "demo" / "data"
    prepare(str(model), [str(demo.CHATS)], store, max_length=demo.MAX_LENGTH)
    runs = [trained(options, model, store, seed, float8) for seed in options.seeds for float8 in (False, True)]
    means = {
        name: {
            figure: statistics.fmean(run[figure] for run in runs if run["float8"] == float8)
            for figure in ("tau", "tau_pooled", "heldout_accept_length", "loss")
        }
        for name, float8 in (("as it is", False), ("float8", True))
    }
    result = {"bench": "float8_target", "commit": commit(), "torch": torch.__version__, "means": means, "runs": runs}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
