"""The picture that `watch` draws: one run as a screen of panels. Owns the arrangement; reads nothing itself."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

from rich import box
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from draftmill.monitor.charts import bar, line_chart
from draftmill.monitor.metrics import Metrics
from draftmill.monitor.phases import Phase
from draftmill.monitor.show import duration, epoch, figures, number, phase_style, size, worker_state
from draftmill.monitor.status import RunStatus

Lanes = dict[str, deque[str]]
"""What each worker was doing at the last looks, oldest first: states of `show.worker_state`."""

_MUCH = 2**30
"""Bytes of others on a GPU that are worth a colour; the driver itself takes about half of that."""
_MIN_CHART, _MAX_CHART = 2, 6
"""Heights of a chart, in lines."""
_STATE_STYLES = {
    "working": "green",
    "waiting for target": "yellow",
    "waiting for drafter": "blue",
    "waiting": "bright_black",
}
_STATE_MARKS = {"working": "#", "waiting for target": "t", "waiting for drafter": "d", "waiting": "."}


def build_view(
    status: RunStatus, metrics: Metrics, lanes: Lanes, console: Console, *, live: bool = False
) -> RenderableType:
    """The whole picture, fitted to the console's width; charts are left out where it is too low to hold them."""
    width, ascii_only = console.width, console.options.ascii_only or console.legacy_windows
    foot = _foot(status, live)
    num_gpus = len((status.gpus or {}).get("devices", []))
    chart_height, all_gpus = _MAX_CHART, True
    if live:
        room = console.height - len(foot) - 7 - (len(status.workers) + 4 if status.workers else 0)
        all_gpus = num_gpus > 0 and room - (num_gpus + 3) >= _MIN_CHART + 2
        chart_height = min(_MAX_CHART, room - (num_gpus + 3 if all_gpus else 1) - 2)
    parts: list[RenderableType] = [_head(status, width, ascii_only)]
    if chart_height >= _MIN_CHART and (metrics.steps or metrics.evaluations):
        parts.append(_charts(metrics, width, chart_height, ascii_only))
    if status.workers:
        parts.append(_workers(status, lanes, width, ascii_only))
    parts.append(_gpus(status, width, ascii_only) if all_gpus else _gpu_line(status))
    return Group(*parts, *foot)


def _head(status: RunStatus, width: int, ascii_only: bool) -> RenderableType:
    style = phase_style(status.phase)
    first = Text.assemble((str(status.phase), f"bold {style}"))
    if status.phase is status.reported_phase and status.detail and status.phase is not Phase.CRASHED:
        first.append(f" {status.detail}", style)
    if status.phase is not status.reported_phase:
        first.append(f" in {status.reported_phase}", style)
    first.append(f"  {duration(status.since_s)}", "bright_black")
    first.append(f"    process {status.pid} on {status.host}", "bright_black")
    first.append(f"    ran {duration(status.running_s)}", "bright_black")
    lines: list[RenderableType] = [first]
    if status.reason:
        lines.append(Text(status.reason, style))
    if status.stop != "no" and status.presence == "running":
        lines.append(Text("asked to stop " + ("at once" if status.stop == "now" else "after its step"), "yellow"))
    progress = status.progress
    step, steps = progress.get("step"), progress.get("steps")
    if step is not None:
        line = Text()
        if steps:
            line.append(bar(step / steps, max(8, min(40, width - 68)), ascii_only=ascii_only), f"{style} on grey23")
            line.append(f"  {100 * step / steps:.1f} %  ", "bold")
        line.append(f"step {number(step, '{:,}')}" + number(steps, " / {:,}"))
        if said := epoch(progress):
            line.append(f"   {said}")
        if status.eta_s is not None:
            line.append(f"   {duration(status.eta_s)} to go")
        lines += [line, Text("   ".join(figures(progress)))]
    return Panel(Group(*lines), title=Text(status.run, "bold"), title_align="left", box=_box(ascii_only), style="")


def _charts(metrics: Metrics, width: int, height: int, ascii_only: bool) -> RenderableType:
    accept_from = metrics.series("accept_length", evaluations=True)[1]
    speeds = [value / 1000 for value in metrics.series("context_tokens_per_s")[1]]
    panels = [
        ("loss", metrics.series("loss")[1], "{:.3f}", "magenta"),
        ("acceptance length", accept_from, "{:.2f}", "green"),
        ("Ktok/s", speeds, "{:.1f}", "cyan"),
    ]
    count = 3 if width >= 90 else 2 if width >= 60 else 1
    shown = [panel for panel in panels if panel[1]][:count]
    grid = Table.grid(expand=True)
    for _ in shown:
        grid.add_column(ratio=1)
    inner = max(10, width // max(1, len(shown)) - 4)
    grid.add_row(*(_chart(*panel, inner, height, ascii_only) for panel in shown))
    return grid


def _chart(
    title: str, values: Sequence[float], form: str, style: str, width: int, height: int, ascii_only: bool
) -> RenderableType:
    label = max(len(form.format(max(values))), len(form.format(min(values))))
    lines = line_chart(values, width - label - 1, height, ascii_only=ascii_only)
    text = Text()
    for row, line in enumerate(lines):
        mark = form.format(max(values)) if row == 0 else form.format(min(values)) if row == height - 1 else ""
        text.append(mark.rjust(label) + " ", "bright_black")
        text.append(line + ("\n" if row < height - 1 else ""), style)
    heading = Text.assemble((title, "bold"), "  ", (form.format(values[-1]), style))
    return Panel(text, title=heading, title_align="left", box=_box(ascii_only), border_style="bright_black")


def _workers(status: RunStatus, lanes: Lanes, width: int, ascii_only: bool) -> RenderableType:
    table = _table("worker", "device", "doing", "step", "busy", "last beat", "lane")
    for at in (3, 4, 5):
        table.columns[at].justify = "right"
    room = max(8, min(60, width - 80))
    alive = status.presence in ("running", "paused")
    for name, worker in status.workers.items():
        share = worker.get("busy_share")
        state = worker_state(worker)
        table.add_row(
            name,
            str(worker.get("device", "")),
            Text(str(worker.get("doing", "")), _STATE_STYLES[state]),
            number(worker.get("step"), "{:,}"),
            "" if share is None else f"{100 * share:.0f} %",
            duration(worker.get("since_beat_s")) if alive else "",
            _lane(lanes.get(name) or [state], room, ascii_only),
        )
    legend = Text("   ").join(
        Text.assemble(("■ " if not ascii_only else f"{_STATE_MARKS[state]} ", style), (state, "bright_black"))
        for state, style in _STATE_STYLES.items()
    )
    return Panel(Group(table, legend), box=_box(ascii_only), border_style="bright_black")


def _lane(states: Sequence[str], width: int, ascii_only: bool) -> Text:
    text = Text()
    for state in list(states)[-width:]:
        text.append(_STATE_MARKS[state] if ascii_only else "■", _STATE_STYLES[state])
    return text


def _gpus(status: RunStatus, width: int, ascii_only: bool) -> RenderableType:
    gpus = status.gpus or {"note": "not read yet"}
    if gpus.get("note"):
        return Text(f" GPUs: {gpus['note']}", "bright_black")
    wide = width >= 110
    table = _table("GPU", *(["", "device"] if wide else []), "memory", "this run", "others", "utilization")
    room = max(8, min(30, width - (94 if wide else 70)))
    for gpu in gpus.get("devices", []):
        used, total, own = gpu.get("used_bytes") or 0, gpu.get("total_bytes") or 1, gpu.get("own_bytes")
        busy = gpu.get("utilization")
        memory = Text.assemble(
            (bar(used / total, room, ascii_only=ascii_only), "cyan on grey23"), f" {size(used)} of {size(total)}"
        )
        load = Text("")
        if busy is not None:
            load = Text.assemble((bar(busy / 100, 8, ascii_only=ascii_only), "green on grey23"), f" {busy:3d} %")
        others = None if own is None else max(0, used - own)
        names = [str(gpu.get("name", "")), str(gpu.get("device", ""))] if wide else []
        held = Text(size(others), "yellow" if others and others > _MUCH else "")
        table.add_row(str(gpu.get("index")), *names, memory, size(own), held, load)
    return Panel(table, box=_box(ascii_only), border_style="bright_black")


def _gpu_line(status: RunStatus) -> RenderableType:
    """All GPUs in one line, for a screen too low for a line each."""
    devices = (status.gpus or {}).get("devices", [])
    if not devices:
        return Text(f" GPUs: {(status.gpus or {}).get('note') or 'not read yet'}", "bright_black")
    used = [gpu.get("used_bytes") or 0 for gpu in devices]
    loads = [gpu["utilization"] for gpu in devices if gpu.get("utilization") is not None]
    text = f" {len(devices)} GPUs: {size(min(used))} to {size(max(used))} used"
    return Text(text + (f", {min(loads)} to {max(loads)} % busy" if loads else ""))


def _foot(status: RunStatus, live: bool) -> list[RenderableType]:
    lines: list[RenderableType] = []
    for warning in status.warnings[-3:]:
        when = time.strftime("%H:%M:%S", time.localtime(warning.get("time", 0)))
        lines.append(Text.assemble((f" {when} ", "bright_black"), (str(warning.get("text", "")), "yellow")))
    if status.error:
        last = str(status.error.get("traceback", "")).strip().splitlines()[-6:]
        lines += [Text(f" {line}", "red") for line in last]
        lines.append(Text(f" whole log: {status.log}", "bright_black"))
    if live:
        lines.append(Text(" q leaves; the run goes on", "bright_black"))
    return lines


def _table(*names: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bright_black", expand=False)
    for name in names:
        table.add_column(name, no_wrap=True)
    return table


def _box(ascii_only: bool) -> box.Box:
    return box.ASCII if ascii_only else box.ROUNDED
