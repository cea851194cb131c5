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

# typer carries its own click from 0.20 on; the class of all command-line errors is reached through its public heir.
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]

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
        result: Any = app(arguments, prog_name="draftmill", standalone_mode=False)
    except InputError as error:
        _fail(str(error))
    except _UsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # its message is the help page
            sys.exit(0)
        message = (
            error.format_message() if isinstance(error, typer.BadParameter) else str(getattr(error, "message", error))
        )
        _fail(f"{message} (see draftmill --help)")
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
) -> None:
    """Write a drafter in a layout that serving engines read."""
    from draftmill.checkpoint.export import export as write

    exported = write(source, layout, output, dtype=dtype, target=target, check=check, force=force)
    for line in exported.lines:
        typer.echo(line)
    typer.echo(f"{exported.num_parameters:,} parameters in {dtype} written to {exported.folder}")
