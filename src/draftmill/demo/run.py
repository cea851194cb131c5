"""`draftmill demo`: prepare, train, evaluate and export on a small real target, told so that a newcomer follows.

Owns the demo's recipe and its last table. Everything in between is done by the same code that the other commands run.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from draftmill.checkpoint import export, read_published, record_evaluation
from draftmill.config import Config, build_config
from draftmill.data.prepare import prepare
from draftmill.demo import smollm2
from draftmill.drafter.network import Drafter
from draftmill.evaluate.command import build_drafter, pick_device
from draftmill.evaluate.prompts import Prompt, read_prompts
from draftmill.evaluate.report import Row, Sweep, by_group, for_card, overall
from draftmill.evaluate.run import Evaluation, evaluate
from draftmill.pipeline.collective import Hosts
from draftmill.target.generate_sampling import Sampling
from draftmill.target.load import load_target
from draftmill.target.model import Target
from draftmill.train.run import train
from draftmill.train.setup import set_up

DATA = Path(__file__).parent / "data"
CHATS, HELDOUT = DATA / "chats.jsonl.gz", DATA / "heldout.jsonl"
MAX_LENGTH = 512
PROMPTS = {"cpu": 10, "cuda": 40}
"""Held-out prompts decoded at the end."""
NEW_TOKENS = {"cpu": 48, "cuda": 160}
"""Tokens of an answer at most."""
RECIPE: dict[str, dict[str, Any]] = {
    "cpu": {
        "data": {"token_budget": 512, "min_rows": 1, "max_rows": 16, "round_to": 8, "heldout": 32},
        "drafter": {"num_layers": 3, "num_taps": 3, "block_size": 4, "init": "target"},
        "train": {
            "epochs": 1,
            "num_anchors": 128,
            "anchor_draws": 2,
            "max_steps": 360,
            "lr": 2.0e-3,
            "evaluate_every": 110,
        },
    },
    "cuda": {
        "data": {"token_budget": 8192, "min_rows": 1, "max_rows": 64, "round_to": 16, "heldout": 64},
        "drafter": {"num_layers": 3, "num_taps": 3, "block_size": 8, "init": "target"},
        "train": {"epochs": 60, "num_anchors": 512, "lr": 1.0e-3, "evaluate_every": 200},
    },
}
"""What is trained, by kind of device; measured in docs/log.md."""


@dataclass(frozen=True)
class Outcome:
    """What the demo ends with; the fields of its JSON line. tau is the mean over responses, with whole blocks drafted.

    identical                 the fewest answers equal to plain decoding's, whatever the number of drafted tokens
    draft_tokens              the number of drafted tokens that was fastest; speculative_tokens_per_s is with these
    """

    tau_before: float
    tau_after: float
    identical: int
    prompts: int
    train_steps: int
    train_tokens_per_s: float
    seconds: float
    export: str
    tau_by_category: dict[str, float]
    accept_by_slot: list[float]
    plain_tokens_per_s: float
    draft_tokens: int
    speculative_tokens_per_s: float


def demo(cache: Path, output: Path | None, device: str, as_json: bool) -> None:
    """Run the demo on a device ("auto", "cpu" or "cuda:N"). Raises InputError."""
    started = time.monotonic()
    console = Console(highlight=False)
    picked = pick_device(device)
    device = "cpu" if picked.type == "cpu" else f"cuda:{picked.index or 0}"
    folder = output or cache / "demo" / time.strftime("%Y%m%d-%H%M%S")

    console.rule("[bold]1 of 4  Target and data")
    with console.status("getting SmolLM2-135M-Instruct") as status:
        model = smollm2.fetch(cache, lambda text: status.update(text))
    store = cache / "demo" / "data"
    prepared = prepare(str(model), [str(CHATS)], store, max_length=MAX_LENGTH)
    console.print(f"target: SmolLM2-135M-Instruct, 30 layers, in {model}")
    made = "from the cache" if prepared.hit else "tokenized"
    console.print(f"data:   {prepared.kept} chats of its own answers, {prepared.num_tokens:,} tokens, {made}")

    config = recipe(model, store, folder / "run", device)
    console.rule("[bold]2 of 4  Before training")
    target = load_target(str(model), device=device, dtype="float32")
    untrained = Drafter(set_up(config, Hosts()).shape).eval().to(device)
    before = measure(console, untrained, target, prompts_for(device)[:2], 24)
    console.print(f"an untrained drafter: {before.tau_response_mean:.2f} tokens a step; 1 is no help at all")

    console.rule("[bold]3 of 4  Training")
    steps, tokens_per_s = train_with_progress(console, config)

    console.rule("[bold]4 of 4  Evaluation and export")
    source = read_published(str(folder / "run"))
    drafter = build_drafter(source.shape, source.tensors, target)
    whole = drafter.shape.block_size - 1
    counts = sorted({drafter.shape.block_size // 2, whole})
    evaluation = decode(console, drafter, target, prompts_for(device), NEW_TOKENS[kind(device)], counts)
    sweep = Sweep.of(evaluation)
    by_count = {row.draft_tokens: row for row in sweep.rows}
    after, fastest = by_count[whole], by_count[sweep.best or whole]
    record_evaluation(source.folder, source.shape, source.layout, for_card(evaluation, {"target": "SmolLM2-135M"}))
    exported = export(folder / "run", "zlab", folder / "drafter", dtype="bfloat16")
    groups = {row.category: row.tau_response_mean for row in by_group(evaluation, whole)}
    outcome = Outcome(
        tau_before=known(before.tau_response_mean),
        tau_after=known(after.tau_response_mean),
        identical=min(row.identical or 0 for row in by_count.values()),
        prompts=after.answers,
        train_steps=steps,
        train_tokens_per_s=tokens_per_s,
        seconds=time.monotonic() - started,
        export=str(exported.folder),
        tau_by_category={name: tau for name, tau in groups.items() if tau is not None and name != "all"},
        accept_by_slot=after.accept_by_slot,
        plain_tokens_per_s=known(after.plain_tokens_per_s),
        draft_tokens=fastest.draft_tokens,
        speculative_tokens_per_s=known(fastest.speculative_tokens_per_s),
    )
    console.print(summary(outcome, device))
    console.print(closing(outcome, model))
    if as_json:
        print(json.dumps(asdict(outcome)), flush=True)


def recipe(model: Path, store: Path, run_dir: Path, device: str) -> Config:
    """The demo's run: what RECIPE says for the device's kind."""
    sections = {name: dict(values) for name, values in RECIPE[kind(device)].items()}
    sections["run"] = {"dir": str(run_dir)}
    sections["target"] = {"model": str(model), "devices": [device], "dtype": "bfloat16", **sections.pop("target", {})}
    sections["data"] |= {"path": str(store), "max_length": MAX_LENGTH}
    sections["drafter"] |= {"devices": [device]}
    return build_config(sections)


def prompts_for(device: str) -> list[Prompt]:
    """The held-out prompts that are decoded, the categories taking turns."""
    by_category: dict[str, list[Prompt]] = {}
    for prompt in read_prompts(HELDOUT):
        by_category.setdefault(prompt.category, []).append(prompt)
    turns = [prompt for row in zip_longest(*by_category.values()) for prompt in row if prompt is not None]
    return turns[: PROMPTS[kind(device)]]


def train_with_progress(console: Console, config: Config) -> tuple[int, float]:
    """Train under a progress bar. Returns steps taken and mean context tokens per second."""
    columns = (
        TextColumn("step"),
        MofNCompleteColumn(),
        BarColumn(),
        TextColumn("loss {task.fields[loss]}  held-out tokens a step {task.fields[tau]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    steps, num_tokens, started = 0, 0, time.monotonic()
    total = set_up(config, Hosts()).stream.total_steps
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("training", total=total, loss="-", tau="-")

        def observe(record: dict[str, Any]) -> None:
            nonlocal steps, num_tokens
            if "loss" in record:
                steps, num_tokens = record["step"], num_tokens + record["context_tokens"]
                progress.update(task, completed=steps, loss=f"{record['loss']:.2f}")
            if "accept_length" in record:
                progress.update(task, tau=f"{record['accept_length']:.2f}")

        train(config, console=False, observe=observe)
    if steps < total:
        console.print(f"stopped after step {steps}; what was trained is in {config.run.dir}")
        raise KeyboardInterrupt
    return steps, num_tokens / (time.monotonic() - started)


def measure(console: Console, drafter: Drafter, target: Target, prompts: list[Prompt], new_tokens: int) -> Row:
    """The figures of one evaluation with the whole block drafted."""
    return overall(decode(console, drafter, target, prompts, new_tokens, [drafter.shape.block_size - 1]))[0]


def decode(
    console: Console, drafter: Drafter, target: Target, prompts: list[Prompt], new_tokens: int, draft_tokens: list[int]
) -> Evaluation:
    """Plain and speculative greedy decoding of the prompts, in float32, under a progress bar."""
    with Progress(TextColumn("prompt"), MofNCompleteColumn(), BarColumn(), TimeElapsedColumn(), console=console) as bar:
        task = bar.add_task("decoding", total=len(prompts))
        return evaluate(
            drafter,
            target,
            prompts,
            sampling=Sampling(max_new_tokens=new_tokens),
            draft_tokens=draft_tokens,
            progress=lambda done, total, _trial: bar.update(task, completed=done, total=total),
        )


def summary(outcome: Outcome, device: str) -> Table:
    """The demo's result as a table a newcomer understands."""
    table = Table(title=f"A drafter for SmolLM2-135M-Instruct, trained on {device}", title_justify="left")
    table.add_column("what")
    table.add_column("value", justify="right")
    table.add_column("meaning")
    speedup = outcome.speculative_tokens_per_s / outcome.plain_tokens_per_s
    rows = [
        (
            "tau before training",
            f"{outcome.tau_before:.2f}",
            "tokens a step, untrained drafter",
        ),
        (
            "tau after training",
            f"[bold green]{outcome.tau_after:.2f}",
            "on held-out prompts; plain decoding is 1",
        ),
        *((f"  {name}", f"{tau:.2f}", "prompts of this kind") for name, tau in outcome.tau_by_category.items()),
        ("slots accepted", " ".join(f"{share:.0%}" for share in outcome.accept_by_slot), "1st, 2nd, ... drafted"),
        ("plain decoding", f"{outcome.plain_tokens_per_s:.1f} tok/s", "one token a step, float32"),
        (
            "speculative",
            f"{outcome.speculative_tokens_per_s:.1f} tok/s",
            f"{speedup:.2f} times as fast, {outcome.draft_tokens} drafted a step",
        ),
        (
            "output identical",
            f"{outcome.identical}/{outcome.prompts}",
            "answers equal to plain decoding's",
        ),
        ("training", f"{outcome.train_steps} steps", f"{outcome.train_tokens_per_s:,.0f} context tokens a second"),
        ("time", f"{outcome.seconds:.0f} s", "from start to here"),
    ]
    for row in rows:
        table.add_row(*row)
    return table


def closing(outcome: Outcome, model: Path) -> Panel:
    """Where the drafter lies, and how an engine would serve it."""
    serve = (
        f"python -m sglang.launch_server --model-path {model} \\\n"
        f"    --speculative-algorithm DFLASH --speculative-draft-model-path {outcome.export}"
    )
    return Panel(f"[bold]The drafter:[/] {outcome.export}\n[bold]To serve it:[/]\n{serve}", expand=False)


def kind(device: str) -> str:
    """cpu or cuda."""
    return device.partition(":")[0]


def known(value: float | None) -> float:
    """A figure that an evaluation of at least one answer always has."""
    assert value is not None
    return value
