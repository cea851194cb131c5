"""The report stage: what the runs came to, as JSON, as a table in Markdown, and as a plot of tau against GPU seconds.

Owns the figures' definitions: a recipe's tau on a suite is the mean over its seeds of tau (response mean, or pooled)
over the suite's answers; its spread is the standard deviation over seeds. "all" is the mean over suites.
"""

from __future__ import annotations

import importlib.util
import json
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from quality_recipes import BY_NAME, RECIPES
from quality_settings import Paths, Settings
from quality_train import read_lines

PEER, OURS = "specforge", "default"


def report(settings: Settings, paths: Paths, target: str, *, tiny: bool) -> dict[str, Any]:
    """Write report.json, report.md and report.png; returns what fits on a line."""
    lines = read_lines(paths.runs_file)
    runs = [line for line in lines if "points" in line]
    really = {(line["run"], line["weights"]): line for line in read_lines(paths.evaluations_file)}
    data = _facts(paths)
    recipes = {
        name: _recipe([run for run in runs if run["recipe"] == name], really)
        for name in sorted({run["recipe"] for run in runs}, key=list(BY_NAME).index)
    }
    result = {
        "bench": "quality",
        "tiny": tiny,
        "target": Path(target).name,
        "seconds": settings.seconds,
        "prompts": settings.prompts,
        "max_new_tokens": settings.max_new_tokens,
        "devices": sorted({run["device"] for run in runs}),
        "commits": sorted({str(run["commit"]) for run in runs}),
        "versions": runs[0]["versions"] if runs else {},
        "data": data,
        "overrides": sorted({setting for run in runs for setting in run["overrides"]}),
        "recipes": recipes,
        "unavailable": {line["recipe"]: line["unavailable"] for line in lines if "unavailable" in line},
        "claims": _claims(recipes),
        "walk_against_decoding": _agreement(really.values()),
    }
    (paths.work / "report.json").write_text(json.dumps(result, indent=1), encoding="utf-8")
    (paths.work / "report.md").write_text(_markdown(result), encoding="utf-8")
    result["plot"] = plot(result, paths.work / "report.png")
    print(_markdown(result))
    return _short(result)


def _short(result: dict[str, Any]) -> dict[str, Any]:
    """The report without curves and seeds: what fits on a line."""
    kept = ("bench", "tiny", "target", "seconds", "overrides", "devices", "commits", "claims", "walk_against_decoding",
            "plot")  # fmt: skip
    recipes = {
        name: {
            "seeds": len(found["seeds"]),
            "steps": round(found["steps"]["mean"]),
            "gpu_seconds": round(found["gpu_seconds"]["mean"], 1),
            "tau": {
                suite: [round(one["mean"], 4), None if one["std"] is None else round(one["std"], 4)]
                for suite, one in found["tau"].items()
            },
        }
        for name, found in result["recipes"].items()
    }
    return {**{name: result[name] for name in kept}, "recipes": recipes, "unavailable": list(result["unavailable"])}


def _facts(paths: Paths) -> dict[str, Any]:
    from quality_file import read_file

    return read_file(paths.data_file).facts if paths.data_file.exists() else {}


def _recipe(runs: list[dict[str, Any]], really: dict[tuple[str, str], dict[str, Any]]) -> dict[str, Any]:
    """One recipe's figures over its seeds."""
    finals = [run["points"][-1]["tau"] for run in runs]
    decoded = [really[key]["tau"] for run in runs if (key := (f"{run['recipe']}-{run['seed']}", "final")) in really]
    halves = [really[key]["tau"] for run in runs if (key := (f"{run['recipe']}-{run['seed']}", "half")) in really]
    curve = []
    for places in zip(*(run["points"] for run in runs), strict=False):
        seconds = statistics.fmean(place["seconds"] for place in places)
        curve.append({"seconds": seconds, "tau": _over_seeds([place["tau"] for place in places], "mean")})
    return {
        "seeds": [run["seed"] for run in runs],
        "seconds": runs[0]["seconds"],
        "gpu_seconds": _spread(run["gpu_seconds"] for run in runs),
        "build_s": [run["build_s"] for run in runs],
        "steps": _spread(run["steps"] for run in runs),
        "context_tokens": _spread(run["context_tokens"] for run in runs),
        "loss": [run["loss"] for run in runs],
        "tau": _over_seeds(finals, "mean"),
        "tau_pooled": _over_seeds(finals, "pooled"),
        "decoded_tau": _over_seeds(decoded, "mean"),
        "decoded_tau_pooled": _over_seeds(decoded, "pooled"),
        "decoded_tau_at_half": _over_seeds(halves, "mean"),
        "curve": curve,
        "changes": runs[0]["changes"],
        "notes": runs[0]["notes"],
    }


def _over_seeds(taus: list[dict[str, dict[str, float]]], which: str) -> dict[str, Any]:
    """By suite, and for all suites together: mean, standard deviation and the seeds' own values."""
    if not taus:
        return {}
    found = {suite: _spread(tau[suite][which] for tau in taus) for suite in taus[0]}
    found["all"] = _spread(statistics.fmean(one[which] for one in tau.values()) for tau in taus)
    return found


def _spread(values: Iterable[float]) -> dict[str, Any]:
    listed = list(values)
    spread = statistics.stdev(listed) if len(listed) > 1 else None
    return {"mean": statistics.fmean(listed), "std": spread, "values": listed}


def _claims(recipes: dict[str, Any]) -> dict[str, Any]:
    """What the issue asks: is the default above the peer everywhere, and when does it reach the peer's last tau?"""
    peers = {name: found for name, found in recipes.items() if name.startswith(PEER)}
    ours = recipes.get(OURS)
    if not peers or ours is None:
        return {}
    best = max(peers, key=lambda name: peers[name]["tau"]["all"]["mean"])
    bar = peers[best]["tau"]["all"]["mean"]
    reached = next((point["seconds"] for point in ours["curve"] if point["tau"]["all"]["mean"] >= bar), None)
    half = recipes.get(f"{OURS}-half-time", {}).get("tau", {}).get("all")
    suites = {
        suite: {
            "ours": tau["mean"],
            "peer": (theirs := peers[best]["tau"][suite]["mean"]),
            "above": tau["mean"] > theirs,
        }
        for suite, tau in ours["tau"].items()
    }
    return {
        "peer": best,
        "suites": suites,
        "above_on_every_suite": all(one["above"] for one in suites.values()),
        "peers_last_tau": bar,
        "reached_in_run_after_s": reached,
        "own_run_of_half_time": None if half is None else {"tau": half["mean"], "above": half["mean"] >= bar},
    }


def _agreement(really: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """How far tau walked through plain answers is from tau of real decoding of the same prompts with the same weights,
    over weights and suites; and how many really decoded answers are the plain ones."""
    lines = list(really)
    apart = [
        (line["tau"][suite]["mean"] - walked["mean"]) / walked["mean"]
        for line in lines
        for suite, walked in line["walked_tau"].items()
    ]
    if not apart:
        return {}
    return {
        "pairs": len(apart),
        "mean_relative_difference": statistics.fmean(apart),
        "largest": max(map(abs, apart)),
        "answers": sum(line["answers"] for line in lines),
        "identical": sum(line["identical"] for line in lines),
    }


def _markdown(result: dict[str, Any]) -> str:
    """The table people read: the recipes by tau over all suites."""
    ranked = sorted(result["recipes"].items(), key=lambda item: -item[1]["tau"]["all"]["mean"])
    suites = list(ranked[0][1]["tau"]) if ranked else []
    head = ["recipe", "differs in", "seeds", "s", "steps", *(f"tau {suite}" for suite in suites), "decoded, all"]
    rows = ["| " + " | ".join(head) + " |", "|" + "---|" * 2 + "---:|" * (len(head) - 2)]
    for name, found in ranked:
        changes = ", ".join(f"{key.partition('.')[2]} {value}" for key, value in found["changes"].items())
        cells = [name, changes, str(len(found["seeds"])), f"{found['gpu_seconds']['mean']:.0f}"]
        cells += [f"{found['steps']['mean']:.0f}", *(_cell(found["tau"][suite]) for suite in suites)]
        cells.append(_cell(found["decoded_tau"]["all"]) if found["decoded_tau"] else "-")
        rows.append("| " + " | ".join(cells) + " |")
    facts = f"{', '.join(result['devices'])}; commit {', '.join(result['commits'])}; {result['versions']}"
    lines = [f"Target {result['target']}; {facts}", "", *rows, "", f"claims: {json.dumps(result['claims'])}"]
    if result["overrides"]:
        lines.append(f"set in our recipes besides: {', '.join(result['overrides'])}")
    lines += [f"unavailable: {name}: {why}" for name, why in result["unavailable"].items()]
    return "\n".join(lines) + "\n"


def _cell(spread: dict[str, Any]) -> str:
    return f"{spread['mean']:.3f}" + (f" ± {spread['std']:.3f}" if spread["std"] is not None else "")


def plot(result: dict[str, Any], path: Path) -> str | None:
    """tau over all suites against GPU seconds, a line a recipe; None where matplotlib is missing or nothing ran."""
    if importlib.util.find_spec("matplotlib") is None or not result["recipes"]:
        return None
    from matplotlib.figure import Figure

    suites = [suite for suite in next(iter(result["recipes"].values()))["tau"] if suite != "all"]
    figure = Figure(figsize=(12, 7), layout="constrained")
    wide = figure.subplot_mosaic([["all"] * len(suites), suites], height_ratios=[2, 1])
    main = [recipe.name for recipe in RECIPES if recipe.main]
    for name, found in result["recipes"].items():
        loud = name in main or name.startswith(PEER)
        for suite, axes in wide.items():
            seconds = [point["seconds"] for point in found["curve"]]
            means = [point["tau"][suite]["mean"] for point in found["curve"]]
            spreads = [point["tau"][suite]["std"] or 0.0 for point in found["curve"]]
            style = {"linewidth": 2.0 if loud else 0.8, "alpha": 1.0 if loud else 0.6, "marker": "o", "markersize": 3}
            if name.startswith(PEER):
                style["linestyle"] = "--"
            axes.errorbar(seconds, means, yerr=spreads, label=name, **style)
    for suite, axes in wide.items():
        axes.set(xlabel="GPU seconds", title=f"tau, {suite}" if suite != "all" else "tau, mean over suites")
    wide["all"].legend(fontsize="x-small", ncols=2)
    figure.savefig(path, dpi=120, format="png")
    return path.name
