"""Two "hosts" of one run on this machine: two processes with the environment that torchrun sets, over loopback.

python tests/two_hosts.py FOLDER

Forked from a process that has done nothing but import. Prints one JSON line on how each scenario ended;
tests/pipeline/test_torchrun.py says what is right.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from draftmill.checkpoint import checkpoints, load
from draftmill.cli import main as command_line
from draftmill.errors import InputError
from draftmill.monitor.metrics import read_metrics
from draftmill.monitor.status import NoRun, read_status
from draftmill.train import replica
from draftmill.train import run as run_module
from forking import code_of, forked
from tiny import config_of, small_world

SETTINGS = ("train.epochs=6", "checkpoint.every_steps=1000", "train.evaluate_every=4")


class Hosts:
    """Starts the same command on two hosts."""

    def __init__(self, folder: Path, sections: dict[str, Any]) -> None:
        self.folder, self.sections = folder, sections

    def start(
        self,
        name: str,
        *overrides: str,
        second: tuple[str, ...] | None = None,
        elastic: bool = False,
        before: Callable[[int], None] = lambda rank: None,
    ) -> list[int]:
        """Pids of both. second: the second host's own overrides. before: called in each process first."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        pids = []
        for rank in (0, 1):
            chosen = overrides if second is None or rank == 0 else second
            config = config_of(self.sections, f"run.dir={self.folder / name}", *SETTINGS, *chosen)
            path = self.folder / f"{name}-{rank}.yaml"
            path.write_text(config.to_yaml())

            def work(path: Path = path, rank: int = rank) -> None:
                before(rank)
                command_line(["train", str(path)])

            environment = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            if elastic:
                environment["TORCHELASTIC_RUN_ID"] = "made-up"
            pids.append(forked(work, self.log(name, rank), **environment))
        return pids

    def log(self, name: str, rank: int) -> Path:
        return self.folder / f"{name}-{rank}.out"

    def step(self, name: str) -> int:
        try:
            return int(read_status(self.folder / name).progress.get("step") or 0)
        except NoRun:
            return 0

    def told(self, name: str) -> list[str]:
        """The last line that each host printed."""
        outs = [self.log(name, rank).read_text().strip().splitlines() for rank in (0, 1)]
        return [lines[-1] if lines else "" for lines in outs]


def ends(pids: list[int]) -> list[int]:
    return [code_of(pid) for pid in pids]


def steps_of(folder: Path) -> list[tuple[int, float]]:
    return [(record["step"], record["loss"]) for record in read_metrics(folder).steps]


def furthest(ours: Path, expected: Path) -> float:
    """Greatest difference between two runs' last weights, as a share of the tolerance of float32 sums in another order
    (1e-3 relative, 2e-4 absolute)."""
    mine, theirs = (load(checkpoints(folder)[-1].folder).tensors() for folder in (ours, expected))
    return max(
        float(((mine[name] - other).abs() / (2e-4 + 1e-3 * other.abs())).max()) for name, other in theirs.items()
    )


def alike(hosts: Hosts) -> dict[str, Any]:
    """Two hosts with two drafters each against one with four, and how each wrote its directory."""
    pids = hosts.start("alike", "drafter.devices=[cpu, cpu]")
    run = hosts.folder / "alike"
    codes = ends(pids)
    return {
        "codes": codes,
        "told": hosts.told("alike"),
        "phases": [str(read_status(path).phase) for path in (run, run / "host-1")],
        "furthest": furthest(run, hosts.folder / "one"),
        "losses": [steps_of(run), steps_of(run / "host-1"), steps_of(hosts.folder / "one")],
        "workers": [sorted(read_status(path).workers) for path in (run, run / "host-1")],
        "accept": [
            [r["accept_length"] for r in read_metrics(path).evaluations] for path in (run, hosts.folder / "one")
        ],
        "entries": sorted(path.name for path in (run / "host-1").iterdir()),
    }


def stopped(hosts: Hosts) -> dict[str, Any]:
    """The second host hears SIGTERM in the middle; then both are started again, as after a restart."""
    pids = hosts.start("stopped", "drafter.devices=[cpu, cpu]")
    while hosts.step("stopped") < 3:
        time.sleep(0.005)
    os.kill(pids[1], signal.SIGTERM)
    codes = ends(pids)
    run = hosts.folder / "stopped"
    cut = [checkpoints(run)[-1].step, *(steps_of(path)[-1][0] for path in (run, run / "host-1"))]
    phases = [str(read_status(path).phase) for path in (run, run / "host-1")]
    again = ends(hosts.start("stopped", "drafter.devices=[cpu, cpu]", elastic=True))
    once_more = ends(hosts.start("stopped", "drafter.devices=[cpu, cpu]", elastic=True))
    return {
        "codes": [codes, again, once_more],
        "cut": cut,
        "phases": phases,
        "furthest": furthest(run, hosts.folder / "one"),
        "losses": [steps_of(run), steps_of(hosts.folder / "one")],
        "told": hosts.told("stopped"),
    }


def unlike(hosts: Hosts) -> dict[str, Any]:
    """The second host has fewer drafters and another learning rate."""
    pids = hosts.start(
        "unlike", "drafter.devices=[cpu, cpu]", second=("drafter.devices=[cpu]", "train.accumulate=2", "train.lr=1e-4")
    )
    return {"codes": ends(pids), "told": hosts.told("unlike"), "written": (hosts.folder / "unlike").exists()}


def refused(hosts: Hosts) -> dict[str, Any]:
    """The run directory holds something else."""
    folder = hosts.folder / "refused"
    folder.mkdir()
    (folder / "thesis.txt").write_text("precious")
    codes = ends(hosts.start("refused"))
    return {"codes": codes, "told": hosts.told("refused"), "entries": sorted(path.name for path in folder.iterdir())}


def failing(hosts: Hosts) -> dict[str, Any]:
    """A drafter of the second host raises at its third step."""

    def break_second(rank: int) -> None:
        original, calls = replica.Replica.update, []

        def update(self: replica.Replica, step: int) -> None:
            calls.append(step)
            if rank == 1 and step == 2:
                raise ArithmeticError("made up")
            original(self, step)

        replica.Replica.update = update  # type: ignore[method-assign]

    began = time.monotonic()
    codes = ends(hosts.start("failing", "drafter.devices=[cpu, cpu]", before=break_second))
    run = hosts.folder / "failing"
    return {
        "codes": codes,
        "told": hosts.told("failing"),
        "reasons": [read_status(path).reason for path in (run, run / "host-1")],
        "seconds": time.monotonic() - began,
    }


def unloadable(hosts: Hosts) -> dict[str, Any]:
    """The second host's target can't be loaded; the first waits for it meanwhile."""

    def break_second(rank: int) -> None:
        def load_targets(*_: Any) -> Any:
            raise InputError("made up: its weights are damaged")

        if rank == 1:
            run_module.load_targets = load_targets

    began = time.monotonic()
    codes = ends(hosts.start("unloadable", before=break_second))
    return {"codes": codes, "told": hosts.told("unloadable"), "seconds": time.monotonic() - began}


def main(folder: Path) -> dict[str, Any]:
    """Every scenario."""

    def begin() -> None:
        sections = small_world(folder, count=32)
        (folder / "world.json").write_text(json.dumps(sections))
        devices = "drafter.devices=[cpu, cpu, cpu, cpu]"
        path = folder / "one.yaml"
        path.write_text(config_of(sections, f"run.dir={folder / 'one'}", *SETTINGS, devices).to_yaml())
        command_line(["train", str(path)])

    torch.set_num_threads(1)
    if code := code_of(forked(begin, folder / "one.out")):
        raise SystemExit(f"the run on one host ended with code {code}: {(folder / 'one.out').read_text()[-2000:]}")
    hosts = Hosts(folder, json.loads((folder / "world.json").read_text()))
    return {scenario.__name__: scenario(hosts) for scenario in (alike, stopped, unlike, refused, failing, unloadable)}


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
