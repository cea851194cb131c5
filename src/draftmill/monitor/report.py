"""One HTML page with the plots of one or several runs. Owns what is shown; page/ holds how it looks and draws.

The page stands alone: data, style and script are inside it, so it can be mailed, kept beside a checkpoint and opened
without a network.
"""

from __future__ import annotations

import html
import json
import os
import time
from contextlib import suppress
from dataclasses import dataclass
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from draftmill.errors import InputError
from draftmill.monitor.layout import CONFIG_FILE, require_run
from draftmill.monitor.metrics import Metrics, read_metrics
from draftmill.monitor.phases import LOADING, WORKING, Phase
from draftmill.monitor.show import duration, number
from draftmill.monitor.status import RunStatus, read_status

_MAX_POINTS = 800
"""Points of one line; where a run has more steps, a point is the mean of several, inside a band of their range."""
_MAX_PROFILES = 40
_GIB = 2**30

# Key of metrics.jsonl, then what the page calls it and how it scales it. A chart without data is left out.
_CHARTS: list[dict[str, Any]] = [
    {"key": "loss", "title": "Loss", "digits": 4, "log": True, "note": "training, mean over supervised slots"},
    {
        "key": "accept_length",
        "title": "Acceptance length",
        "unit": "tokens a step",
        "digits": 2,
        "evaluations": True,
        "points": True,
        "note": "held out, teacher-forced: accepted tokens + 1",
    },
    {
        "key": "accept_by_slot",
        "title": "Acceptance by slot",
        "unit": "share",
        "digits": 3,
        "slots": True,
        "zero": True,
        "top": 1,
        "note": "held out",
    },
    {
        "key": "accuracy_by_slot",
        "title": "Accuracy by slot",
        "unit": "share",
        "digits": 3,
        "slots": True,
        "zero": True,
        "top": 1,
        "note": "training batches",
    },
    {"key": "context_tokens_per_s", "title": "Speed", "unit": "Ktok/s", "scale": 1e-3, "digits": 1, "zero": True,
     "note": "context tokens, without padding"},
    {"key": "supervised_tokens_per_s", "title": "Supervised tokens", "unit": "Ktok/s", "scale": 1e-3, "digits": 1,
     "zero": True},
    {"key": "useful_tflops", "title": "Useful work", "unit": "TFLOP/s", "digits": 0, "zero": True},
    {"key": "share_of_peak", "title": "Share of the device's peak", "unit": "%", "scale": 100, "digits": 1,
     "zero": True},
    {"key": "target_wait_s", "title": "Drafters wait for targets", "unit": "s a step", "digits": 3, "zero": True},
    {"key": "drafter_wait_s", "title": "Targets wait for drafters", "unit": "s a step", "digits": 3, "zero": True},
    {"key": "queue_depth", "title": "Feature batches ready", "digits": 2, "zero": True},
    {"key": "peak_bytes", "title": "Peak GPU memory", "unit": "GiB", "scale": 1 / _GIB, "digits": 1, "zero": True},
    {"key": "padding_share", "title": "Padding", "unit": "%", "scale": 100, "digits": 2, "zero": True,
     "note": "share of the targets' tokens"},
    {"key": "grad_norm", "title": "Gradient norm", "digits": 3, "log": True, "zero": True, "note": "before clipping"},
    {"key": "lr", "title": "Learning rate", "zero": True},
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Run:
    name: str
    status: RunStatus
    metrics: Metrics
    config: dict[str, Any]


def report_command(runs: list[str], output: str) -> int:
    """Write the page and say where; exit code 0.

    Raises:
        InputError: a run is missing, or the page can't be written.
    """
    page = build_report([require_run(run) for run in runs])
    path = Path(output)
    new = path.with_name(f".{path.name}.new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        new.write_text(page, encoding="utf-8")
        os.replace(new, path)
    except OSError as error:
        with suppress(OSError):
            new.unlink()
        raise InputError(f"{path} can't be written: {error.strerror}; choose another --output") from None
    print(f"{path}: {len(page.encode()) / 1e3:,.0f} kB, {len(runs)} run{'s' if len(runs) > 1 else ''}")
    return 0


def build_report(directories: list[Path]) -> str:
    """The whole page for these runs' directories."""
    runs = [_load(directory) for directory in dict.fromkeys(directories)]
    charts = [chart for chart in _CHARTS if any(_has(run.metrics, chart) for run in runs)]
    data = {
        "charts": [{key: value for key, value in chart.items() if key != "scale"} for chart in charts],
        "runs": [_run_data(run, charts) for run in runs],
    }
    # "</" inside a script element would end it, whatever it stands in.
    embedded = json.dumps(data, separators=(",", ":")).replace("</", "<\\/")
    page = resources.files("draftmill.monitor") / "page"
    style = (page / "report.css").read_text(encoding="utf-8")
    script = (page / "report.js").read_text(encoding="utf-8")
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Draftmill: {html.escape(title)}</title>
<style>
{style}</style>
</head>
<body>
<main>
<h1>{html.escape(title)}</h1>
<p>Draftmill, written {time.strftime("%Y-%m-%d %H:%M")}</p>
<div class="card scroll">{_summary(runs)}</div>
<div class="card bar">
<div class="runs" id="runs"></div>
<label>over <select id="axis"><option value="step">steps</option><option value="hours">hours</option>
<option value="tokens">context tokens</option></select></label>
<label>smoothing <input type="range" id="smooth" min="0" max="99" value="50"></label>
<label>evaluation <input type="range" id="evaluation" min="0" max="100" value="100"></label>
<label><input type="checkbox" id="log"> log scale</label>
</div>
<noscript><p>The plots need JavaScript; the table above does not.</p></noscript>
<div class="charts" id="charts"></div>
{_configuration(runs)}
</main>
<script type="application/json" id="data">{embedded}</script>
<script>
{script}</script>
</body>
</html>
"""


def _load(directory: Path) -> _Run:
    try:
        config = yaml.safe_load((directory / CONFIG_FILE).read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError):
        config = {}
    metrics = read_metrics(directory)
    return _Run(directory.resolve().name, read_status(directory), metrics, config if isinstance(config, dict) else {})


def _has(metrics: Metrics, chart: dict[str, Any]) -> bool:
    key = chart["key"]
    if chart.get("slots"):
        return any(isinstance(record.get(key), list) for record in [*metrics.steps, *metrics.evaluations])
    values = _values(metrics, chart)[1]
    return any(values) if key == "peak_bytes" else bool(values)  # a run without a GPU writes 0 there


def _values(metrics: Metrics, chart: dict[str, Any]) -> tuple[list[int], list[float]]:
    return metrics.series(chart["key"], evaluations=bool(chart.get("evaluations")))


def _run_data(run: _Run, charts: list[dict[str, Any]]) -> dict[str, Any]:
    axes = _axes(run.metrics)
    series: dict[str, Any] = {}
    slots: dict[str, Any] = {}
    for chart in charts:
        key = chart["key"]
        if chart.get("slots"):
            slots[key] = _profiles(run.metrics, key)
            continue
        steps, values = _values(run.metrics, chart)
        if values:
            series[key] = _binned(steps, [value * chart.get("scale", 1) for value in values], axes)
    return {"name": run.name, "series": series, "slots": slots}


def _axes(metrics: Metrics) -> dict[int, tuple[float, float]]:
    """Hours run and millions of context tokens seen, by step."""
    axes: dict[int, tuple[float, float]] = {}
    tokens = hours = 0.0
    for record in metrics.steps:
        tokens += (record.get("context_tokens") or 0) / 1e6
        hours = (record.get("elapsed_s") or hours * 3600) / 3600
        axes[record["step"]] = (hours, tokens)
    return axes


def _binned(steps: list[int], values: list[float], axes: dict[int, tuple[float, float]]) -> dict[str, list[float]]:
    """At most _MAX_POINTS means of equal stretches, with the range of each where it is one of several values."""
    count = len(values)
    num_points = min(count, _MAX_POINTS)
    edges = [count * i // num_points for i in range(num_points + 1)]
    last = (0.0, 0.0)
    line: dict[str, list[float]] = {"step": [], "hours": [], "tokens": [], "y": [], "low": [], "high": []}
    for first, end in pairwise(edges):
        step = steps[end - 1]
        last = axes.get(step, last)
        line["step"].append(step)
        line["hours"].append(_rounded(last[0]))
        line["tokens"].append(_rounded(last[1]))
        line["y"].append(_rounded(sum(values[first:end]) / (end - first)))
        if count > num_points:
            line["low"].append(_rounded(min(values[first:end])))
            line["high"].append(_rounded(max(values[first:end])))
    return line


def _profiles(metrics: Metrics, key: str) -> list[dict[str, Any]]:
    """Values by slot at up to _MAX_PROFILES moments; those of training batches are means of a stretch of steps."""
    evaluations = [record for record in metrics.evaluations if isinstance(record.get(key), list)]
    records = evaluations or [record for record in metrics.steps if isinstance(record.get(key), list)]
    num_points = min(len(records), _MAX_PROFILES)
    profiles = []
    edges = [len(records) * i // num_points for i in range(num_points + 1)] if num_points else []
    for first, end in pairwise(edges):
        stretch = records[end - 1 : end] if evaluations else records[first:end]
        columns = zip(*(record[key] for record in stretch), strict=False)
        profile = [_mean([value for value in column if isinstance(value, int | float)]) for column in columns]
        profiles.append({"step": records[end - 1]["step"], "y": profile})
    return profiles


def _mean(values: list[float]) -> float | None:
    return _rounded(sum(values) / len(values)) if values else None


def _rounded(value: float) -> float:
    return float(f"{value:.5g}") if abs(value) < 1e5 else round(value, 2)


def _summary(runs: list[_Run]) -> str:
    head = ["run", "state", "steps", "ran", "tokens", "loss", "best acceptance", "Ktok/s", "peak GiB", "padding",
            "drafters wait"]  # fmt: skip
    rows = []
    for index, run in enumerate(runs):
        metrics, status = run.metrics, run.status
        accepted = list(zip(*metrics.series("accept_length", evaluations=True), strict=True))
        best = max(accepted, key=lambda pair: pair[1]) if accepted else None
        losses = metrics.series("loss")[1]
        recent = losses[-max(1, len(losses) // 20) :]
        tokens = metrics.series("context_tokens")[1]
        elapsed_s = metrics.steps[-1].get("elapsed_s") if metrics.steps else None
        cells = [
            f'<i class="dot" style="background:var(--run-{index % 8})"></i>{html.escape(run.name)}',
            f'<span class="{_tone(status.phase)}">{html.escape(str(status.phase))}</span>',
            number(metrics.steps[-1]["step"] if metrics.steps else None, "{:,}"),
            duration(elapsed_s if elapsed_s is not None else status.running_s),
            _tokens(sum(tokens)) if tokens else "",
            number(sum(recent) / len(recent) if recent else None, "{:.4f}"),
            number(best and best[1], "{:.2f}") + number(best and best[0], " (step {:,})"),
            number(_mean_speed(metrics), "{:.1f}", 1e-3),
            number(max(metrics.series("peak_bytes")[1], default=0) or None, "{:.1f}", 1 / _GIB),
            number(_mean_of(metrics, "padding_share"), "{:.2f} %", 100),
            number(_mean_of(metrics, "target_wait_s"), "{:.3f} s a step"),
        ]
        rows.append("<tr>" + "".join(f"<td>{cell or '–'}</td>" for cell in cells) + "</tr>")
    heads = "".join(f"<th>{name}</th>" for name in head)
    return f"<table><thead><tr>{heads}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _tokens(count: float) -> str:
    return f"{count / 1e6:,.1f} M" if count >= 1e6 else f"{count / 1e3:,.1f} K"


def _tone(phase: Phase) -> str:
    if phase in WORKING or phase is Phase.FINISHED:
        return "good"
    return "wait" if phase in LOADING or phase is Phase.STOPPED else "bad"


def _mean_of(metrics: Metrics, key: str) -> float | None:
    values = metrics.series(key)[1]
    return sum(values) / len(values) if values else None


def _mean_speed(metrics: Metrics) -> float | None:
    """Tokens a second over all steps, each step weighed by its time."""
    tokens = seconds = 0.0
    for record in metrics.steps:
        count, rate = record.get("context_tokens"), record.get("context_tokens_per_s")
        if count and rate:
            tokens += count
            seconds += count / rate
    return tokens / seconds if seconds else None


def _configuration(runs: list[_Run]) -> str:
    """Settings that differ between the runs in sight, all of them folded away."""
    flat = [_flat(run.config) for run in runs]
    keys = list(dict.fromkeys(key for config in flat for key in config))
    if not keys:
        return ""
    different = [key for key in keys if len({json.dumps(config.get(key)) for config in flat}) > 1]
    parts = []
    if len(runs) > 1:
        body = _config_table(runs, flat, different) if different else "<p>none</p>"
        parts.append(f"<h2>Settings that differ</h2>{body}")
    parts.append(f"<details><summary>All settings</summary>{_config_table(runs, flat, keys)}</details>")
    return "\n".join(parts)


def _config_table(runs: list[_Run], flat: list[dict[str, Any]], keys: list[str]) -> str:
    head = "".join(f"<th>{html.escape(run.name)}</th>" for run in runs)
    rows = "".join(
        f"<tr><td>{html.escape(key)}</td>"
        + "".join(f"<td>{html.escape(str(config.get(key, '')))}</td>" for config in flat)
        + "</tr>"
        for key in keys
    )
    return (
        '<div class="card scroll"><table class="config">'
        f"<thead><tr><th></th>{head}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _flat(config: dict[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for section, values in config.items():
        if isinstance(values, dict):
            flat.update({f"{section}.{key}": value for key, value in values.items()})
        else:
            flat[str(section)] = values
    return flat
