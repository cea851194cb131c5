"""A run's status as text. Owns the words and the columns of `status`; judges nothing.

Plain text with a little colour on a terminal, so that it answers at once, reads well over ssh and can be grepped.
"""

from __future__ import annotations

import time
from typing import Any

from draftmill.monitor.phases import LOADING, WORKING, Phase
from draftmill.monitor.status import RunStatus, waits

_COLOURS = {"green": "32", "yellow": "33", "red": "31", "dim": "2", "bold": "1", "cyan": "36"}


class Paint:
    """Colours text, or leaves it alone."""

    def __init__(self, colour: bool) -> None:
        self._colour = colour

    def __call__(self, text: str, *styles: str) -> str:
        """The text in these styles."""
        if not self._colour or not styles or not text:
            return text
        return f"\033[{';'.join(_COLOURS[style] for style in styles)}m{text}\033[0m"


def phase_style(phase: Phase) -> str:
    """Green works, yellow loads, red needs someone."""
    if phase in WORKING or phase is Phase.FINISHED:
        return "green"
    return "yellow" if phase in LOADING or phase is Phase.STOPPED else "red"


def render_status(status: RunStatus, *, colour: bool = False) -> str:
    """One run, in full."""
    paint = Paint(colour)
    blocks = [_head(status, paint), _progress(status), _workers(status, paint), _gpus(status, paint)]
    blocks += [_warnings(status, paint), _trouble(status, paint)]
    return "\n".join(line for block in blocks for line in block)


def render_list(statuses: list[RunStatus], *, colour: bool = False) -> str:
    """Several runs, one line each."""
    paint = Paint(colour)
    rows = [["run", "phase", "since", "step", "Ktok/s", "loss", "acceptance", "process"]]
    for status in statuses:
        progress = status.progress
        rows.append(
            [
                status.run,
                str(status.phase),
                _ago(status),
                _of(progress.get("step"), progress.get("steps")),
                number(progress.get("context_tokens_per_s"), "{:.1f}", 1e-3),
                number(progress.get("loss"), "{:.3f}"),
                number(progress.get("accept_length"), "{:.2f}"),
                f"{status.pid} on {status.host}" if status.presence != "gone" else "",
            ]
        )
    lines = columns(rows, right={3, 4, 5, 6})
    styled = [paint(lines[0], "dim")]
    for status, line in zip(statuses, lines[1:], strict=True):
        word = str(status.phase)
        at = line.index(word, len(status.run))
        styled.append(line[:at] + paint(word, phase_style(status.phase)) + line[at + len(word) :])
    return "\n".join(styled)


def columns(rows: list[list[str]], right: set[int] | frozenset[int] = frozenset(), indent: str = "") -> list[str]:
    """Rows of cells as lines of aligned columns; those named are aligned right, empty ones left out."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
            if width
        ]
        lines.append((indent + "  ".join(cells)).rstrip())
    return lines


def worker_state(worker: dict[str, Any]) -> str:
    """What a worker's lane shows: working, or for whom it waits."""
    if not waits(worker):
        return "working"
    doing = str(worker.get("doing", ""))
    for side in ("target", "drafter"):
        if side in doing:
            return f"waiting for {side}"
    return "waiting"


def figures(progress: dict[str, Any]) -> list[str]:
    """Speed, loss and acceptance, as far as they are known."""
    now, mean = progress.get("context_tokens_per_s"), progress.get("mean_context_tokens_per_s")
    parts = [
        number(now, "{:.1f} Ktok/s", 1e-3) + number(mean, " (mean {:.1f})", 1e-3),
        number(progress.get("loss"), "loss {:.4f}"),
        number(progress.get("accept_length"), "held-out acceptance length {:.2f}")
        + number(progress.get("accept_step"), " (step {:,})"),
    ]
    return [part for part in parts if part]


def epoch(progress: dict[str, Any]) -> str:
    """The epoch under way, and of how many: counted from 1, as people do. In the files epochs count from 0."""
    value = progress.get("epoch")
    if not isinstance(value, int | float):
        return ""
    return f"epoch {int(value) + 1}" + number(progress.get("epochs"), " / {:g}")


def duration(seconds: float | None) -> str:
    """A length of time as people say it: 0.4 s, 12 s, 3 min 20 s, 2 h 05 min, 4 d 3 h."""
    if seconds is None:
        return "?"
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 60:
        return f"{seconds:.0f} s"
    if seconds < 3600:
        return f"{seconds // 60:.0f} min {seconds % 60:02.0f} s" if seconds < 600 else f"{seconds / 60:.0f} min"
    if seconds < 86400:
        return f"{seconds // 3600:.0f} h {seconds % 3600 // 60:02.0f} min"
    return f"{seconds // 86400:.0f} d {seconds % 86400 // 3600:.0f} h"


def size(num_bytes: float | None) -> str:
    """Bytes in GiB."""
    return "?" if num_bytes is None else f"{num_bytes / 2**30:.1f} GiB"


def number(value: Any, form: str, scale: float | None = None) -> str:
    """A number in a form; "" where there is none."""
    if not isinstance(value, int | float):
        return ""
    return form.format(value if scale is None else value * scale)


def _of(value: Any, total: Any) -> str:
    return number(value, "{:,}") + number(total, " / {:,}") if value is not None else ""


def _ago(status: RunStatus) -> str:
    return duration(status.since_s)


def _head(status: RunStatus, paint: Paint) -> list[str]:
    phase = paint(str(status.phase), phase_style(status.phase), "bold")
    detail = f" {status.detail}" if status.detail and status.phase is status.reported_phase is not Phase.CRASHED else ""
    ended = status.phase is status.reported_phase and str(status.phase) in ("finished", "stopped", "crashed")
    since = f"{duration(status.since_s)} ago" if ended else f"for {duration(status.since_s)}"
    if status.phase is not status.reported_phase:
        since = f"last said: {status.reported_phase}{f' {status.detail}' if status.detail else ''}"
    seen = {"running": "alive", "paused": "paused", "gone": "gone", "unseen": "not visible from here"}
    process = f"process {status.pid} on {status.host}: {seen[status.presence]}"
    lines = [f"{paint(status.run, 'bold')}  {phase}{detail}  {since}  ({process})"]
    if status.reason:
        lines.append(f"  {paint(status.reason, phase_style(status.phase))}")
    if status.stop != "no" and status.presence == "running":
        lines.append("  asked to stop " + ("at once" if status.stop == "now" else "after its step"))
    if status.started_time is not None:
        began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(status.started_time))
        moved = "" if ended else f", last progress {duration(status.since_progress_s)} {_before(status)}"
        lines.append(f"  started {began}, ran {duration(status.running_s)}{moved}")
    if status.seconds_in:
        spent = [f"{phase} {duration(seconds)}" for phase, seconds in status.seconds_in.items()]
        lines.append(f"  before this phase: {', '.join(spent)}")
    return lines


def _before(status: RunStatus) -> str:
    return "before its last word" if status.presence == "gone" else "ago"


def _progress(status: RunStatus) -> list[str]:
    progress = status.progress
    if progress.get("step") is None:
        return []
    step, steps = progress["step"], progress.get("steps")
    share = f" ({100 * step / steps:.1f} %)" if steps else ""
    parts = [f"step {_of(step, steps)}{share}"]
    parts.append(epoch(progress))
    if status.eta_s is not None:
        parts.append(f"{duration(status.eta_s)} to go")
    lines = ["  " + "   ".join(part for part in parts if part)]
    lines.append("  " + "   ".join(figures(progress)))
    return [line for line in lines if line.strip()]


def _workers(status: RunStatus, paint: Paint) -> list[str]:
    if not status.workers:
        return []
    rows = [
        [
            "worker",
            "device",
            "doing",
            "step",
            "busy",
            "waited",
            "last beat" if status.presence in ("running", "paused") else "",
        ]
    ]
    for name, worker in status.workers.items():
        share = worker.get("busy_share")
        rows.append(
            [
                name,
                str(worker.get("device", "")),
                str(worker.get("doing", "")),
                number(worker.get("step"), "{:,}"),
                "" if share is None else f"{100 * share:.0f} %",
                duration(worker.get("wait_s")),
                f"{duration(worker.get('since_beat_s'))} ago" if status.presence in ("running", "paused") else "",
            ]
        )
    head, *lines = columns(rows, right={3, 4, 5, 6}, indent="  ")
    late = 0.5 * (status.stall_s or 600.0)
    painted = [paint(head, "dim")]
    for line, worker in zip(lines, status.workers.values(), strict=True):
        hangs = (worker.get("since_progress_s") or 0.0) > late and not waits(worker)
        painted.append(paint(line, "red") if hangs else line)
    return painted


def _gpus(status: RunStatus, paint: Paint) -> list[str]:
    gpus = status.gpus
    if gpus is None:
        return []
    if gpus.get("note"):
        return [paint(f"  GPUs: {gpus['note']}", "dim")]
    rows = [["GPU", "", "device", "this run", "others", "used", "of", "utilization"]]
    for gpu in gpus.get("devices", []):
        used, own = gpu.get("used_bytes"), gpu.get("own_bytes")
        others = None if used is None or own is None else max(0, used - own)
        rows.append(
            [
                str(gpu.get("index")),
                str(gpu.get("name", "")),
                str(gpu.get("device", "")),
                size(own),
                size(others),
                size(used),
                size(gpu.get("total_bytes")),
                number(gpu.get("utilization"), "{} %"),
            ]
        )
    head, *lines = columns(rows, right={3, 4, 5, 6, 7}, indent="  ")
    holders = []
    for gpu in gpus.get("devices", []):
        for other in gpu.get("others", []):
            held = size(other.get("used_bytes"))
            holders.append(f"  GPU {gpu.get('index')}: {held} held by process {other['pid']}  {other.get('name')}")
    return [paint(head, "dim"), *lines, *(paint(line, "yellow") for line in holders)]


def _warnings(status: RunStatus, paint: Paint) -> list[str]:
    lines = []
    for warning in status.warnings[-5:]:
        when = time.strftime("%H:%M:%S", time.localtime(warning.get("time", 0)))
        lines.append(f"  {paint('warning', 'yellow')} {when}  {warning.get('text', '')}")
    return lines


def _trouble(status: RunStatus, paint: Paint) -> list[str]:
    if not status.last_lines:
        return []
    lines = [paint("  last lines of the log:", "dim")] + [f"    {line}".rstrip() for line in status.last_lines]
    advice = []
    if status.phase is Phase.STALLED and status.presence == "running" and status.hears_signals:
        advice = [f"  stacks of every thread: kill -USR1 {status.pid}, then see the log"]
    return [*lines, f"  whole log: {status.log}", *advice]
