"""The command line: parse, build, run. One function a command, heavy imports inside it, no logic.

A wrong option, path, file or value ends with one line on standard error and exit code 2.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any

import typer

from draftmill import __version__
from draftmill.errors import InputError
from draftmill.names import expanded_argument

# typer carries its own click from 0.20 on; the class of all command-line errors is reached through its public heir.
_UsageError: Any = typer.BadParameter.__mro__[1]

app = typer.Typer(
    name="draftmill",
    help="Train DFlash drafters for speculative decoding, measure them on the real target, and export them to serve.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(show: bool) -> None:
    if show:
        typer.echo(f"draftmill {__version__}")
        raise typer.Exit()


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    pass


def main(arguments: list[str] | None = None) -> None:
    """Run the command line on `arguments` (by default the process's own) and leave with its exit code."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # its threads and forked workers do not mix
    try:
        given = [expanded_argument(each) for each in (sys.argv[1:] if arguments is None else arguments)]
        result: Any = app(given, prog_name="draftmill", standalone_mode=False)
    except InputError as error:
        _fail(str(error))
    except _UsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # its message is the help page
            sys.exit(0)
        _fail(f"{error.format_message().rstrip('.')} (see draftmill --help)")
    except typer.Abort:
        sys.exit(130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    sys.exit(result if isinstance(result, int) else 0)


def _fail(message: str) -> None:
    print(f"draftmill: error: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(2)


@app.command()
def export(
    source: Annotated[
        str, typer.Argument(metavar="RUN|CHECKPOINT", help="Run, checkpoint or published drafter folder.")
    ],
    layout: Annotated[str, typer.Option(help="zlab (SGLang, vLLM, z-lab) or speculators (vLLM).")],
    output: Annotated[str, typer.Option(help="New or empty folder for weights, config and model card.")],
    dtype: Annotated[str, typer.Option(help="Type of the stored weights: bfloat16 or float32.")] = "bfloat16",
    target: Annotated[str | None, typer.Option(help="The target, where the source does not name it.")] = None,
    check: Annotated[bool, typer.Option("--check", help="Compare with every installed reader first.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace an earlier export.")] = False,
    weights: Annotated[
        str | None, typer.Option(help="ema or raw; by default the moving average, where the run kept one.")
    ] = None,
) -> None:
    """Write a drafter in a layout that serving engines read."""
    from draftmill.checkpoint.export import export as write

    exported = write(source, layout, output, dtype=dtype, target=target, check=check, force=force, which=weights)
    for line in exported.lines:
        typer.echo(line)
    typer.echo(f"{exported.num_parameters:,} parameters in {dtype} written to {exported.folder}")


@app.command()
def evaluate(
    source: Annotated[
        str, typer.Argument(metavar="RUN|CHECKPOINT|DRAFTER", help="Run, checkpoint, exported folder or hub id.")
    ],
    target: Annotated[str | None, typer.Option(help="The target, if not the one the source names.")] = None,
    suite: Annotated[
        list[str] | None,
        typer.Option(help="mt_bench, humaneval, gsm_symbolic, gsm8k, math500 or mbpp; may be given several times."),
    ] = None,
    prompts: Annotated[
        str | None, typer.Option(help="JSONL (prompt, turns or messages) or .txt, in place of a suite.")
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Prompts of each suite, or of the file.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens of an answer at most.")] = 256,
    temperature: Annotated[float, typer.Option(help="0 is greedy; above, exact rejection sampling.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Share of the mass that may be drawn.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Tokens that may be drawn; 0 is all.")] = 0,
    draft_tokens: Annotated[
        str | None, typer.Option(help="Drafted tokens a step to compare, as in 1,2,4,8; a sweep by default.")
    ] = None,
    thinking: Annotated[str, typer.Option(help="auto (both, where the chat template has it), on or off.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32 (exactly equal outputs), bfloat16 or float16.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda:N.")] = "auto",
    graphs: Annotated[str, typer.Option(help="CUDA graphs for the decoding steps: auto, on or off.")] = "auto",
    batch_size: Annotated[int, typer.Option(help="Sequences decoded at a time; 1 is the only value.")] = 1,
    seed: Annotated[int, typer.Option(help="Seeds sampling and generated prompts.")] = 0,
    trust_remote_code: Annotated[bool, typer.Option("--trust-remote-code", help="Let the target's code run.")] = False,
    record: Annotated[bool, typer.Option(help="Keep the result with the drafter, for its model card.")] = True,
    plot: Annotated[str | None, typer.Option(help="PNG to write; needs matplotlib.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the whole result as JSON on the last line.")] = False,
) -> int:
    """Measure acceptance length and speed-up on the real target: plain and speculative decoding, side by side."""
    from draftmill.evaluate.command import Request, run

    return run(
        Request(
            source=source,
            target=target,
            suites=tuple(suite or ()),
            prompts=prompts,
            limit=limit,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            draft_tokens=draft_tokens,
            thinking=thinking,
            dtype=dtype,
            device=device,
            graphs=graphs,
            batch_size=batch_size,
            seed=seed,
            trust_remote_code=trust_remote_code,
            record=record,
            plot=plot,
            as_json=json,
        )
    )


@app.command()
def status(
    run: Annotated[
        str | None, typer.Argument(metavar="[RUN]", help="A run's directory or name; all under runs/ by default.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print everything as one line of JSON.")] = False,
) -> int:
    """Tell what a run is doing. Exit code: 0 training or ended as wanted, 3 loading, 4 stalled, 5 crashed, 6 no run."""
    from draftmill.monitor.commands import status_command

    return status_command(run, as_json=json)


@app.command()
def watch(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run's directory, or its name under runs/.")],
) -> int:
    """Follow a run in the terminal; q leaves, and the run goes on."""
    from draftmill.monitor.watch import watch_command

    return watch_command(run)


@app.command()
def stop(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run's directory, or its name under runs/.")],
    now: Annotated[bool, typer.Option("--now", help="At once: neither finish the step nor save.")] = False,
    timeout: Annotated[
        float, typer.Option(min=0.0, help="Seconds to finish the step and save, before it is ended firmly.")
    ] = 180.0,
) -> int:
    """Stop a run: it finishes its step, saves and ends. Exit code: 0 once it is gone, 1 where it won't go."""
    from draftmill.monitor.commands import stop_command

    return stop_command(run, now=now, timeout_s=timeout)


@app.command()
def ps() -> int:
    """List the processes of runs on this machine, above all those left over that still hold GPU memory."""
    from draftmill.monitor.commands import ps_command

    return ps_command()


@app.command()
def report(
    runs: Annotated[list[str], typer.Argument(metavar="RUN...", help="Runs' directories, or names under runs/.")],
    output: Annotated[str, typer.Option(help="The page to write.")] = "report.html",
) -> int:
    """Write one HTML page with the plots of one or several runs; it needs no network and no server."""
    from draftmill.monitor.report import report_command

    return report_command(runs, output)


@app.command()
def prepare(
    target: Annotated[str, typer.Option(help="Folder or hub id of the target; its tokenizer alone is loaded.")],
    input: Annotated[
        list[str],
        typer.Option(help="JSONL, JSON array (.gz, .zst) or Parquet file, glob, or dataset id; may be repeated."),
    ],
    output: Annotated[str, typer.Option(help="New or empty folder, or an earlier store.")],
    max_length: Annotated[int, typer.Option(help="Tokens at which samples are cut.")] = 8192,
    loss_on: Annotated[str, typer.Option(help="Learn from all of the target's turns, or the last-turn.")] = "all",
    max_bad_share: Annotated[float, typer.Option(help="Refuse where more of the rows can't be used.")] = 0.1,
    processes: Annotated[int | None, typer.Option(help="Processes; by default by the input's size.")] = None,
    chat_template: Annotated[str | None, typer.Option(help="Jinja file in place of the target's template.")] = None,
    template_arg: Annotated[
        list[str] | None, typer.Option(help="Argument of the template, as in enable_thinking=false; may be repeated.")
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Hub revision of the target.")] = None,
    trust_remote_code: Annotated[bool, typer.Option(help="Let the target's own code run.")] = False,
    keep_duplicates: Annotated[bool, typer.Option(help="Keep rows equal to an earlier one.")] = False,
) -> None:
    """Turn chats into tokens and loss masks: a store that training reads."""
    from draftmill.data.show import prepare_and_show

    prepare_and_show(
        target,
        input,
        output,
        max_length=max_length,
        loss_on=loss_on,
        max_bad_share=max_bad_share,
        num_processes=processes,
        chat_template=chat_template,
        template_arguments=template_arg or [],
        revision=revision,
        trust_remote_code=trust_remote_code,
        keep_duplicates=keep_duplicates,
    )


@app.command()
def regenerate(
    target: Annotated[str, typer.Option(help="Folder or hub id of the target; with --endpoint, the name it serves.")],
    input: Annotated[
        list[str],
        typer.Option(
            help="Prompts, or chats to answer anew: a file of any format that prepare reads; may be repeated."
        ),
    ],
    output: Annotated[str, typer.Option(help="JSONL to write, or to continue.")],
    turns: Annotated[str, typer.Option(help="Write all of the assistant's turns anew, or the last.")] = "all",
    endpoint: Annotated[
        list[str] | None,
        typer.Option(
            help="Base URL of an OpenAI-compatible server, as in http://localhost:8000/v1; may be repeated. A key is"
            " taken from OPENAI_API_KEY."
        ),
    ] = None,
    model: Annotated[str | None, typer.Option(help="Name by which the servers know the target.")] = None,
    concurrency: Annotated[
        int | None, typer.Option(help="Requests in flight, all servers together; 64 if not given.")
    ] = None,
    timeout_s: Annotated[
        float | None, typer.Option(help="Seconds to wait for one answer of a server; 600 if not given.")
    ] = None,
    retries: Annotated[int | None, typer.Option(help="Further tries of a request that failed; 6 if not given.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens.")] = 1024,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Share of the likeliest mass to draw from.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Number of likeliest tokens to draw from; 0 for all.")] = 0,
    seed: Annotated[int, typer.Option(help="Seeds the drawing.")] = 0,
    batch_size: Annotated[int | None, typer.Option(help="Rows decoded together; by default by the memory.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda:N; by default the first GPU, or the CPU.")] = None,
    dtype: Annotated[str | None, typer.Option(help="Type of a local target; bfloat16 if not given.")] = None,
    trust_remote_code: Annotated[bool, typer.Option(help="Let the target's own code run.")] = False,
) -> int:
    """The target's own answers to given prompts, from a local model or a server; run again, it continues.

    Rows are written as they finish, and keep the input's other columns. Exit code 1 where some prompts got no answer:
    they are listed beside the output.
    """
    from draftmill.target.answers_commands import regenerate_command
    from draftmill.target.generate_sampling import Sampling

    return regenerate_command(
        target,
        input,
        output,
        Sampling(max_new_tokens, temperature, top_p, top_k, seed),
        turns=turns,
        endpoints=endpoint or [],
        model=model,
        api_key=os.environ.get("OPENAI_API_KEY"),
        concurrency=concurrency,
        timeout_s=timeout_s,
        retries=retries,
        device=device,
        dtype=dtype,
        batch_size=batch_size,
        trust_remote_code=trust_remote_code,
    )


@app.command()
def synthesize(
    target: Annotated[str, typer.Option(help="Folder or hub id of the target.")],
    num: Annotated[int, typer.Option(help="Chats that the output is to hold.")],
    output: Annotated[str, typer.Option(help="JSONL to write, or to continue.")],
    exclude: Annotated[
        list[str] | None, typer.Option(help="File of evaluation prompts that must not be sampled; may be repeated.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens.")] = 1024,
    temperature: Annotated[float, typer.Option(help="Of the prompts, above 0, and of the answers.")] = 1.0,
    answer_temperature: Annotated[
        float | None, typer.Option(help="Of the answers, where it differs; 0 is greedy.")
    ] = None,
    top_p: Annotated[float, typer.Option(help="Share of the likeliest mass to draw from.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Number of likeliest tokens to draw from; 0 for all.")] = 0,
    seed: Annotated[int, typer.Option(help="Seeds the drawing.")] = 0,
    batch_size: Annotated[int | None, typer.Option(help="Rows decoded together; by default by the memory.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda:N; by default the first GPU, or the CPU.")] = None,
    dtype: Annotated[str, typer.Option(help="Type of the target.")] = "bfloat16",
    trust_remote_code: Annotated[bool, typer.Option(help="Let the target's own code run.")] = False,
) -> None:
    """Chats sampled from the target itself, prompts and answers: no data is needed. Run again, it continues."""
    from draftmill.target.answers_commands import synthesize_command
    from draftmill.target.generate_sampling import Sampling

    synthesize_command(
        target,
        num,
        output,
        Sampling(max_new_tokens, temperature, top_p, top_k, seed),
        answer_temperature=answer_temperature,
        exclude=exclude or [],
        device=device,
        dtype=dtype,
        batch_size=batch_size,
        trust_remote_code=trust_remote_code,
    )


@app.command()
def train(
    config: Annotated[str, typer.Argument(metavar="RUN.YAML", help="The run's configuration.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings, as in train.lr=3e-4.")
    ] = None,
    detach: Annotated[
        bool, typer.Option("--detach", help="Go on in the background; print run directory, pid and log.")
    ] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the run directory's newest checkpoint.")] = False,
) -> int:
    """Train a drafter as a YAML file says."""
    from draftmill.config import load_config
    from draftmill.train.command import run

    return run(load_config(config, overrides), [config, *(overrides or [])], detach=detach, resume=resume)


@app.command()
def demo(
    cache: Annotated[str, typer.Option(help="Where the target and the tokenized data are kept.")] = ".cache",
    output: Annotated[
        str | None, typer.Option(help="Folder of the run and the drafter; by default in the cache.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda:N.")] = "auto",
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON on the last line.")] = False,
) -> None:
    """All of it on a small real target: prepare, train, evaluate, export. About four minutes on two CPU cores."""
    from pathlib import Path

    from draftmill.demo.run import demo as run

    run(Path(cache), None if output is None else Path(output), device, json)


bench = typer.Typer(help="Measure parts of a run on this machine.", no_args_is_help=True)
app.add_typer(bench, name="bench")


@bench.command("step")
def bench_step(
    model_config: Annotated[str, typer.Option(help="The target's config.json, its folder or its hub id; no weights.")],
    num_layers: Annotated[int, typer.Option(help="Layers of the drafter.")] = 5,
    num_taps: Annotated[int, typer.Option(help="Tapped layers of the target.")] = 5,
    block_size: Annotated[int, typer.Option(help="Tokens of a block.")] = 16,
    anchors: Annotated[int, typer.Option(help="Blocks of the batch.")] = 512,
    context: Annotated[int, typer.Option(help="Context tokens of the batch.")] = 3072,
    documents: Annotated[int, typer.Option(help="Documents of equal length that the context is made of.")] = 1,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda:N.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto (bfloat16 on CUDA, else float32), bfloat16 or float32.")] = "auto",
    float8: Annotated[
        str | None, typer.Option(help="Products in float8: head (the loss's) or all (the drafter's too).")
    ] = None,
    step: Annotated[str, typer.Option(help="eager, compiled, graphed or auto.")] = "auto",
    repeats: Annotated[int, typer.Option(help="Steps timed.")] = 10,
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON on the last line.")] = False,
) -> None:
    """Time one optimizer step of a drafter for a target's shape: useful TFLOP/s, share of the ceiling, peak memory."""
    from draftmill.config import TrainConfig
    from draftmill.step.bench import Request
    from draftmill.step.bench import bench_step as run
    from draftmill.train.optimizer import FlatAdamW

    request = Request(
        model_config=model_config,
        num_layers=num_layers,
        num_taps=num_taps,
        block_size=block_size,
        anchors=anchors,
        context=context,
        documents=documents,
        device=device,
        dtype=dtype,
        float8=float8,
        step=step,
        repeats=repeats,
        as_json=json,
    )
    run(request, lambda flat: FlatAdamW(flat, TrainConfig()))


@app.command()
def plan(
    config: Annotated[str, typer.Argument(metavar="RUN.YAML", help="The run's configuration.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings, as in data.token_budget=16384.")
    ] = None,
    costs: Annotated[
        str | None, typer.Option(metavar="FILE", help="Costs measured before, as --json prints them.")
    ] = None,
    num_devices: Annotated[
        int | None, typer.Option(help="Devices to plan for; by default those of the configuration.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print everything as one line of JSON.")] = False,
) -> None:
    """Measure a target and a drafter, and predict the speed of every split of the devices, best first."""
    from draftmill.config import load_config
    from draftmill.train.planning import plan as run

    run(load_config(config, overrides), costs, num_devices, json)
