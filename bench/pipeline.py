"""What does a whole run lose to waiting, against its slower side alone, against a peer's step, and to one interpreter?

Qwen3-8B's shape with random weights (layers up to the last tap), random tokens whose lengths resemble a real run's, no
network. Everything runs in the run's own threads, channels and loader (pipeline_rig.py); the batches are the same for
everybody; the first ones (--warm-up) are not counted, and rounds of everybody are interleaved (--rounds, the median
counts).

    share  one target and one drafter on two devices (one where there is one), against the target alone and the drafter
           alone: Ktok/s over the slower side's. To be at least 0.95.
    spread the same with a target and a drafter on each of the devices, which wastes less where one side is much slower
           than the other; in turns, as a run does it, and both at once.
    mixed  a target on each of the devices, and the only drafter on the last one, where the target has what the drafter
           leaves: nothing is summed. In turns and at once likewise.
    peer   the same pipeline with a peer's step in place of ours, and a plain loop of a Hugging Face forward and the
           peer's step on each of the devices: Ktok/s of our one and one, and of the best of that, `spread` and `mixed`,
           over theirs. To be at least 1.4 with SpecForge's step, 1.2 with speculators' (--peers).
    gil    five targets and three drafters in threads on two devices against one and one, on a small model with small
           batches, where Python is what everybody waits for: eager, with captured drafters, and with both captured.
           Packed rows; drafters sum nothing, for NCCL takes one rank a device. To be at least 0.90 where captured.

    PYTHONPATH=src python bench/pipeline.py
    PYTHONPATH=src python bench/pipeline.py --small             (Qwen3-0.6B's shape, shorter samples)
    PYTHONPATH=src python bench/pipeline.py --float8            (drafter, and the target where torchao is there)
    PYTHONPATH=src python bench/pipeline.py --tiny              (on a CPU: that the script works, not how fast it is)

A part that fails is in the result with its error. The last line is JSON; --out gets it after every part.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import shutil
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from draftmill.pipeline.collective import Hosts
from draftmill.pipeline.placement import ask_for_queues
from draftmill.step.bench import GIB
from draftmill.target.features import TapsReplica
from draftmill.target.step import first_line
from draftmill.train.loading import Loaded
from draftmill.train.setup import Setup, set_up
from pipeline_rig import Measured, Rig, Seat, free_memory, peaks, say
from pipeline_world import LAUNCH_BOUND, SIZES, Size, config_of, random_loaded, wait_for_all, write_world
from provenance import commit

PARTS = ("share", "spread", "mixed", "peer", "gil")
LONGER = 2
"""Times the batches where both sides share a device: who is ahead of whom there changes slowly."""
MIXED_SLOTS = 8
"""A target that shares its device keeps the batches behind its own waiting, and they have to lie somewhere."""
GIL_TARGETS, GIL_DRAFTERS = 5, 3
GIL_MODES = {"eager": ("eager", "eager"), "captured drafters": ("eager", "graphed"), "captured": ("graphed", "graphed")}
"""Steps of target and drafter."""


def prepared(options: argparse.Namespace, size: Size, targets: list[str], drafters: list[str], **changed: Any) -> Setup:
    """A world on disk for this size, and the setup over it."""
    folder = Path(tempfile.mkdtemp(prefix="draftmill-pipeline-", dir=options.folder))
    options.folders.append(folder)
    write_world(folder, size, options.samples)
    return set_up(config_of(folder, size, targets, drafters, **changed, **options.float8), Hosts())


def one_and_one(options: argparse.Namespace, kept: dict[str, Any]) -> Rig:
    """One target and one drafter's place, the target built; made for the first part that needs it."""
    if "rig" not in kept:
        setup = prepared(options, options.size, [options.devices[0]], [options.devices[-1]])
        kept["rig"] = Rig(setup, random_loaded(setup, options.size))
        (kept["target"],) = kept["rig"].build_targets(options.target_step)
        say(f"target  {kept['rig'].targets[0].build_s:.1f} s: {kept['target']}")
    rig: Rig = kept["rig"]
    return rig


def build_drafter(options: argparse.Namespace, rig: Rig) -> str:
    (drafter,) = rig.build_drafters(options.drafter_step)
    say(f"drafter {rig.drafters[0].build_s:.1f} s: {drafter}")
    return drafter


def share(options: argparse.Namespace, kept: dict[str, Any]) -> dict[str, Any]:
    """One and one against each side alone."""
    rig = one_and_one(options, kept)
    drafter = build_drafter(options, rig)
    everybody: dict[str, Callable[[], Measured]] = {
        "target": lambda: rig.target_alone(options.batches, options.warm_up, rig.targets[0], rig.drafters[0]),
        "drafter": lambda: rig.drafter_alone(options.batches, options.warm_up, rig.drafters[0]),
        "both": lambda: rig.race(options.batches, options.warm_up),
    }
    rounds = interleaved(everybody, options.rounds)
    rates = {name: median_rate(each) for name, each in rounds.items()}
    slower = min(("target", "drafter"), key=lambda name: rates[name])
    kept["ours"] = rates["both"]
    return {
        "ktok_s": rates,
        "slower_side": slower,
        "share": rates["both"] / rates[slower],
        "share_bar": 0.95,
        "tokens_per_batch": rounds["both"][0].tokens / rounds["both"][0].batches,
        "both": rounds["both"][-1].to_dict(),
        "rounds": {name: [round(one.rate, 3) for one in each] for name, each in rounds.items()},
        "build_s": {"target": rig.targets[0].build_s, "drafter": rig.drafters[0].build_s},
        "target_step": kept["target"],
        "drafter_step": drafter,
        "peak_gib": peaks([rig.targets[0].device, rig.drafters[0].device]),
    }


def peer(options: argparse.Namespace, kept: dict[str, Any]) -> dict[str, Any]:
    """The same with each peer's step, and the plain loop with it."""
    rig = one_and_one(options, kept)
    if "ours" not in kept:
        build_drafter(options, rig)
        kept["ours"] = median_rate([rig.race(options.batches, options.warm_up) for _ in range(options.rounds)])
        say(f"ours {kept['ours']:.2f} Ktok/s")
    best = max(kept["ours"], kept.get("spread", 0.0), kept.get("mixed", 0.0))
    result: dict[str, Any] = {"ours_ktok_s": kept["ours"], "ours_best_ktok_s": best}
    for name in options.peers:
        try:
            result[name] = against(options, rig, kept["ours"], name)
            result[name]["best_over_plain_loop"] = best / result[name]["plain_loop_ktok_s"]
        except Exception as error:  # one peer's failure is its result
            result[name] = {"error": f"{type(error).__name__}: {first_line(error)[:300]}"}
            traceback.print_exc()
        rig.forget_drafters()
    return result


def spread(options: argparse.Namespace, kept: dict[str, Any]) -> dict[str, Any]:
    """A target and a drafter on each of the devices, beside the target that other parts use."""
    return on_all(options, kept, "spread", options.devices)


def mixed(options: argparse.Namespace, kept: dict[str, Any]) -> dict[str, Any]:
    """A target on each of the devices, a drafter on the last, beside the target that other parts use."""
    return on_all(options, kept, "mixed", options.devices[-1:], pipeline={"slots": MIXED_SLOTS})


def on_all(
    options: argparse.Namespace, kept: dict[str, Any], name: str, drafters: list[str], **changed: Any
) -> dict[str, Any]:
    if "rig" in kept:
        kept["rig"].forget_drafters()
    try:
        result = targets_on_all(options, name, drafters, **changed)
    finally:
        free_memory([torch.device(name) for name in options.devices])
    kept[name] = result["ktok_s"]
    return result


def targets_on_all(options: argparse.Namespace, name: str, drafters: list[str], **changed: Any) -> dict[str, Any]:
    devices = list(options.devices)
    setup = prepared(options, options.size, devices, list(drafters), **changed)
    rig = Rig(setup, random_loaded(setup, options.size))
    built = {"target": rig.build_targets(options.target_step), "drafter": rig.build_drafters(options.drafter_step)}

    ahead = len(drafters) * setup.config.pipeline.slots  # what may lie between both sides

    def race(in_turns: bool) -> Measured:
        rig.in_turns = in_turns
        return rig.race(LONGER * options.batches, LONGER * max(options.warm_up, ahead), after=ahead)

    # As a run does it, and as it did before.
    ways = {name: lambda: race(True), f"{name}, at once": lambda: race(False)}
    rounds = interleaved(ways, options.rounds)
    return {
        "ktok_s": median_rate(rounds[name]),
        "rounds": {way: [round(one.rate, 3) for one in each] for way, each in rounds.items()},
        "last": {way: each[-1].to_dict() for way, each in rounds.items()},
        "built": built,
        "peak_gib": peaks([torch.device(name) for name in devices]),
    }


def against(options: argparse.Namespace, rig: Rig, ours: float, name: str) -> dict[str, Any]:
    """One peer."""
    from pipeline_peers import BARS, PeerReplica, plain_loop

    batches, warm_up = options.peer_batches, options.warm_up
    rig.forget_drafters()
    seat, device = rig.drafters[0], rig.drafters[0].device
    rig.in_threads([seat], lambda it: setattr(it, "replica", PeerReplica(rig.setup, device, name)))
    rig.race(batches, warm_up)  # the same ones: a shape is compiled for when it first comes
    seat.replica.compiling = False
    piped = rig.race(batches, warm_up)
    say(f"pipeline with {name}'s step: {piped.rate:.2f} Ktok/s")
    rig.forget_drafters()
    replica = rig.targets[0].replica
    if replica._forward is not None:
        replica._forward.undo()
    try:
        targets = [replica.target.replica(each) for each in dict.fromkeys(options.devices)]
        wait_for_all()
        plain = plain_loop(rig, targets, rig.first_batches(warm_up + batches)[warm_up:], name)
    finally:
        if replica._forward is not None:
            replica._forward.apply()
    say(f"plain loop of {name} on {len(targets)} devices: {plain.rate:.2f} Ktok/s")
    return {
        "in_pipeline_ktok_s": piped.rate,
        "ratio_in_pipeline": ours / piped.rate,
        "plain_loop_ktok_s": plain.rate,
        "ratio_plain_loop": ours / plain.rate,
        "ratio_bar": BARS[name],
        "in_pipeline": piped.to_dict(),
        "peak_gib": peaks([rig.targets[0].device, device]),
    }


def gil(options: argparse.Namespace, kept: dict[str, Any]) -> dict[str, Any]:
    """Five and three threads on two devices against one and one."""
    kept.clear()
    free_memory([torch.device(name) for name in options.devices])
    size, first, last = options.gil_size, options.devices[0], options.devices[-1]
    setup = prepared(options, size, [first], [last], data={"batching": "packed"})
    rig = Rig(setup, random_loaded(setup, size))
    one = rig.targets[0].replica
    crew = Rig(setup, Loaded([one], rig.loaded.head, None))
    crew.in_turns = False  # on one device it is threads that are compared
    crew.targets = [Seat(rig.targets[0].device, again(one)) for _ in range(GIL_TARGETS)]
    crew.drafters = [Seat(rig.drafters[0].device) for _ in range(GIL_DRAFTERS)]
    cuda = setup.placement.uses_cuda
    modes = {name: steps for name, steps in GIL_MODES.items() if cuda or "graphed" not in steps}
    result: dict[str, Any] = {"size": size.name, "ratio_bar": 0.9}
    # Longer than it takes to use up what lies in the slots when the drafters begin.
    batches, warm_up = options.gil_batches, max(options.warm_up, options.gil_batches // 4)
    built = ""
    for name, (target_step, drafter_step) in modes.items():
        crew.build_targets(target_step)
        if drafter_step != built:
            crew.build_drafters(drafter_step)
            built = drafter_step
        lone_target, lone_drafter = crew.targets[:1], crew.drafters[:1]
        rounds = interleaved(
            {
                "1+1": lambda t=lone_target, d=lone_drafter: crew.race(batches, warm_up, t, d),
                "5+3": lambda: crew.race(batches, warm_up, summed=False),
            },
            options.rounds,
        )
        rates = {layout: median_rate(each) for layout, each in rounds.items()}
        result[name] = {
            "ktok_s": rates,
            "ratio": rates["5+3"] / rates["1+1"],
            "workers": {layout: each[-1].to_dict()["workers"] for layout, each in rounds.items()},
            "batches_per_s": {layout: each[-1].batches / each[-1].seconds for layout, each in rounds.items()},
        }
        say(f"gil, {name}: 5+3 over 1+1 {result[name]['ratio']:.3f}")
    return result


def again(replica: TapsReplica) -> TapsReplica:
    """Another replica of the same target on the same device; the weights are shared."""
    target = replica.target.replica(replica.target.device)
    return TapsReplica(target, replica.layer_ids, "eager", replica.packed, replica)


def interleaved(everybody: dict[str, Callable[[], Measured]], rounds: int) -> dict[str, list[Measured]]:
    """Each in turn, as often as there are rounds."""
    found: dict[str, list[Measured]] = {name: [] for name in everybody}
    for _ in range(rounds):
        for name, run in everybody.items():
            found[name].append(run())
            last = found[name][-1]
            say(
                f"{name:8} {last.rate:9.2f} Ktok/s in {last.seconds:.2f} s, "
                f"{last.memory_requests} requests for memory, ready {last.ready[0]} before and {last.ready[1]} after"
            )
    return found


def median_rate(measured: list[Measured]) -> float:
    return statistics.median(one.rate for one in measured)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--tiny", action="store_true", help="a tiny shape in float32, for trying the script on a CPU")
    parser.add_argument("--small", action="store_true", help="Qwen3-0.6B's shape and samples a quarter as long")
    parser.add_argument("--devices", nargs="+", help="first one for the target, last one for the drafter")
    parser.add_argument("--target-step", choices=("eager", "compiled", "auto"), default="auto")
    parser.add_argument("--drafter-step", choices=("eager", "compiled", "graphed", "auto"), default=None)
    parser.add_argument("--float8", action="store_true", help="drafters in it, and targets where torchao is installed")
    parser.add_argument("--batches", type=int, help="measured in a round")
    parser.add_argument("--peer-batches", type=int, help="measured with the peer")
    parser.add_argument("--gil-batches", type=int, help="measured in a round of part gil")
    parser.add_argument("--warm-up", type=int, default=4, help="batches before the clock runs")
    parser.add_argument("--peers", nargs="+", choices=("specforge", "speculators"), default=["specforge"])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--samples", type=int, help="of the store")
    parser.add_argument("--folder", help="where the store is written; the temporary folder by default")
    parser.add_argument("--out", help="file for the result, besides the last line")
    options = parser.parse_args()
    name = "tiny" if options.tiny else "small" if options.small else "full"
    options.size, options.gil_size, options.folders = SIZES[name], LAUNCH_BOUND[name], []
    count = torch.cuda.device_count()
    options.devices = options.devices or ([f"cuda:{index}" for index in range(min(2, count))] or ["cpu"])
    cuda = options.devices[0].startswith("cuda")
    options.drafter_step = options.drafter_step or ("graphed" if cuda else "eager")
    options.batches = options.batches or (8 if options.tiny else 10)
    options.peer_batches = options.peer_batches or (4 if options.tiny else 6)
    options.gil_batches = options.gil_batches or (12 if options.tiny else 120)
    options.float8 = float8_settings() if options.float8 else {}
    options.samples = options.samples or (2000 if options.tiny else 20000)
    return options


def float8_settings() -> dict[str, dict[str, Any]]:
    """Settings by section."""
    drafter: dict[str, dict[str, Any]] = {"drafter": {"float8": "all"}}
    return drafter if importlib.util.find_spec("torchao") is None else {**drafter, "target": {"quantize": "float8"}}


def environment(options: argparse.Namespace) -> dict[str, Any]:
    cuda = options.devices[0].startswith("cuda")
    return {
        "device": torch.cuda.get_device_name(0) if cuda else platform.machine(),
        "devices": options.devices,
        "size": options.size.name,
        "token_budget": options.size.token_budget,
        "num_anchors": options.size.num_anchors,
        "batches": options.batches,
        "rounds": options.rounds,
        "commit": commit(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


RUN = {"share": share, "spread": spread, "mixed": mixed, "peer": peer, "gil": gil}


def main() -> None:
    ask_for_queues()
    options = parsed()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    started = time.perf_counter()
    results: dict[str, Any] = {"bench": "pipeline", **environment(options), "float8": options.float8}
    if options.devices[0].startswith("cuda"):
        free = {name: torch.cuda.mem_get_info(name)[0] / GIB for name in dict.fromkeys(options.devices)}
        say(f"free: {', '.join(f'{name} {gib:.1f} GiB' for name, gib in free.items())}")
    kept: dict[str, Any] = {}
    try:
        for part in options.parts:
            began = time.perf_counter()
            try:
                results[part] = RUN[part](options, kept)
            except Exception as error:  # one part's failure is its result, and not the others' end
                results[part] = {"error": f"{type(error).__name__}: {first_line(error)[:300]}"}
                traceback.print_exc()
            results[part]["part_s"] = round(time.perf_counter() - began, 1)
            say(f"{part}: {json.dumps(results[part])}")
            results["total_s"] = round(time.perf_counter() - started, 1)
            if options.out:
                Path(options.out).write_text(json.dumps(results) + "\n", encoding="utf-8")
    finally:
        for folder in options.folders:
            shutil.rmtree(folder, ignore_errors=True)
    print(json.dumps(results), flush=True)


if __name__ == "__main__":
    main()
