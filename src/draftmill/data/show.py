"""`prepare` as a person sees it: a progress bar on standard error, the report on standard output.

Owns the form on screen and nothing else.
"""

from __future__ import annotations

from typing import Any

import yaml
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.text import Text

from draftmill.data.prepare import prepare
from draftmill.data.report import PrepareReport
from draftmill.errors import InputError

_BAR = 40
_SHOWN_CHARACTERS = 1600


def prepare_and_show(
    target: str, inputs: list[str], output: str, *, template_arguments: list[str], **options: Any
) -> PrepareReport:
    """`prepare` with a progress bar, then its report; template arguments are NAME=VALUE texts. Raises InputError."""
    console = Console(soft_wrap=True)
    arguments = dict(map(_argument, template_arguments))
    columns = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn()
    screen = Console(stderr=True)
    with Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal) as bars:
        bar = bars.add_task("reading", total=None)

        def advance(done_bytes: int, total_bytes: int, rows: int, skipped: int) -> None:
            text = f"{rows:,} rows" + (f", {skipped:,} skipped" if skipped else "")
            bars.update(bar, completed=done_bytes, total=total_bytes or None, description=text)

        report = prepare(target, inputs, output, template_arguments=arguments, progress=advance, **options)
    show(report, console)
    return report


def _argument(text: str) -> tuple[str, Any]:
    name, sign, value = text.partition("=")
    if not sign or not name.strip().isidentifier():
        raise InputError(f"--template-arg {text!r} is not of the form NAME=VALUE, as in enable_thinking=false")
    try:
        return name.strip(), yaml.safe_load(value)
    except yaml.YAMLError:
        raise InputError(f"--template-arg {text!r}: the value is not YAML") from None


def show(report: PrepareReport, console: Console) -> None:
    """Print the report: counts, reasons, lengths, and a sample with what the target writes marked."""
    console.print(f"{'hit' if report.hit else 'miss'}: {report.verdict}", highlight=False)
    console.print(
        f"{report.kept:,} samples kept of {report.rows:,} rows; {report.num_tokens:,} tokens, "
        f"{100 * report.supervised_share:.1f}% of them written by the target",
        highlight=False,
    )
    if report.num_skipped:
        console.print(f"{report.num_skipped:,} rows skipped ({100 * report.bad_share:.1f}%):", highlight=False)
        for reason in sorted(report.skipped, key=lambda reason: -report.skipped[reason]):
            console.print(Text(f"  {report.skipped[reason]:>9,}  {reason}; as in {report.examples[reason]}"))
    if report.duplicates:
        console.print(Text(f"{report.duplicates:,} duplicate rows left out; as {report.duplicate_example}"))
    for note, count in report.notes.items():
        console.print(Text(f"{count:,} samples: {note}"))
    _show_histogram(report, console)
    _show_sample(report, console)
    console.print(Text(f"Store: {report.output}"))


def _show_histogram(report: PrepareReport, console: Console) -> None:
    if not report.histogram:
        return
    console.print("Lengths in tokens:", highlight=False)
    most = max(count for _, _, count in report.histogram)
    width = len(str(report.histogram[-1][1]))
    for first, last, count in report.histogram:
        bar = "█" * round(_BAR * count / most) or ("▏" if count else "")
        console.print(Text(f"  [{first:>{width}},{last:>{width}})  {count:>9,}  {bar}"))


def _show_sample(report: PrepareReport, console: Console) -> None:
    if not report.sample:
        return
    console.print("A sample; what the target writes, and learns from, stands in ⟦ ⟧:", highlight=False)
    text, left = Text(), _SHOWN_CHARACTERS
    for part, supervised in report.sample:
        shown = part if len(part) <= left else f"{part[: left // 2]} … {part[len(part) - left // 2 :]}"
        left = max(200, left - len(shown))
        text.append(f"⟦{shown}⟧" if supervised else shown, style="bold green" if supervised else "dim")
    console.print(text)
