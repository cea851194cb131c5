"""Which share of a run's time do held-out evaluations take at the default interval?

Qwen3-8B's shape with random weights (layers up to the last tap), random tokens whose lengths resemble a real run's, no
network: as many samples held out as `data.heldout` says by default. The pipeline of a run, one target and one drafter
on two devices (one where there is one), takes the same training batches without evaluations and with one after every
few steps (--every), both in turn (--rounds). Of each the fastest round counts: a difference is looked for that is small
beside what else a machine may do meanwhile, and that only adds. What the second takes longer is the evaluations' time:
the drafter's own, and what targets do for them in place of training batches. Steps before the clock starts: half of
--every. Steps follow the measured ones, so that nobody is idle at their end.

    share  an evaluation's seconds over those of the steps between two of them, at `train.evaluate_every` by default. To
           be below 0.02.

    PYTHONPATH=src python bench/heldout.py
    PYTHONPATH=src python bench/heldout.py --small             (Qwen3-0.6B's shape, shorter samples)
    PYTHONPATH=src python bench/heldout.py --tiny              (on a CPU: that the script works)

The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
from pathlib import Path
from typing import Any

import torch

from draftmill.config import DataConfig, TrainConfig
from draftmill.pipeline.collective import Hosts
from draftmill.pipeline.placement import ask_for_queues
from draftmill.train.assemble import num_slots
from draftmill.train.setup import set_up
from pipeline_rig import Measured, Rig, say
from pipeline_world import SIZES, config_of, random_loaded, write_world
from provenance import commit

BAR = 0.02
INTERVAL: int = TrainConfig.model_fields["evaluate_every"].default
HELDOUT: int = DataConfig.model_fields["heldout"].default


def measured(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Both races in turn, and what follows from them."""
    write_world(folder, options.size, options.samples)
    devices = options.devices
    config = config_of(folder, options.size, devices[:1], devices[-1:], data={"heldout": options.heldout})
    setup = set_up(config, Hosts())
    assert setup.heldout_plan is not None
    rig = Rig(setup, random_loaded(setup, options.size))
    steps = {"target": rig.build_targets("auto"), "drafter": rig.build_drafters(options.drafter_step)}
    count = options.every * options.evaluations
    took: dict[str, list[Measured]] = {"without": [], "with": []}
    for number in range(options.rounds + 1):
        for name, every in (("without", None), ("with", options.every)):
            rig.evaluate_every = every
            race = rig.race(count, max(1, options.every // 2), after=num_slots(setup) + 1)
            say(f"{name:8} {race.seconds:.2f} s for {race.batches} steps")
            if number:  # in the first round kernels are loaded and shapes compiled for
                took[name].append(race)
    plain, longer = (min(took[name], key=lambda race: race.seconds) for name in ("without", "with"))
    step_s = plain.seconds / count
    evaluation_s = (longer.seconds - plain.seconds) / longer.evaluations
    return {
        "share": evaluation_s / (INTERVAL * step_s),
        "share_bar": BAR,
        "interval_steps": INTERVAL,
        "evaluation_s": evaluation_s,
        "step_s": step_s,
        "seconds_by_round": {name: [round(race.seconds, 3) for race in races] for name, races in took.items()},
        "evaluation_in_steps": evaluation_s / step_s,
        "evaluations_by_round": {name: [race.evaluations for race in races] for name, races in took.items()},
        "heldout_samples": setup.heldout_plan.num_samples,
        "heldout_batches": setup.stream.num_heldout,
        "tokens_per_step": plain.tokens / count,
        "steps_built": steps,
    }


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--tiny", action="store_true", help="a tiny shape in float32, for trying the script on a CPU")
    parser.add_argument("--small", action="store_true", help="Qwen3-0.6B's shape and samples a quarter as long")
    parser.add_argument("--devices", nargs="+", help="first one for the target, last one for the drafter")
    parser.add_argument("--heldout", type=int, default=HELDOUT, help="samples held out")
    parser.add_argument("--every", type=int, default=16, help="steps between two evaluations of the measured race")
    parser.add_argument("--evaluations", type=int, default=2, help="measured in a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--samples", type=int, help="of the store")
    parser.add_argument("--folder", help="where the store is written; the temporary folder by default")
    options = parser.parse_args()
    options.size = SIZES["tiny" if options.tiny else "small" if options.small else "full"]
    count = torch.cuda.device_count()
    options.devices = options.devices or ([f"cuda:{index}" for index in range(min(2, count))] or ["cpu"])
    options.cuda = options.devices[0].startswith("cuda")
    options.drafter_step = "graphed" if options.cuda else "eager"
    options.samples = options.samples or (2000 if options.tiny else 20000)
    return options


def main() -> None:
    ask_for_queues()
    options = parsed()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    with tempfile.TemporaryDirectory(prefix="draftmill-heldout-", dir=options.folder) as folder:
        result = {
            "bench": "heldout",
            "device": torch.cuda.get_device_name(0) if options.cuda else platform.machine(),
            "devices": options.devices,
            "size": options.size.name,
            "every": options.every,
            "rounds": options.rounds,
            **measured(options, Path(folder)),
            "commit": commit(),
            "torch": torch.__version__,
        }
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
