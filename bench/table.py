"""What bench/step.py and bench/target.py print and write alike: a result's head, its file, a size's table."""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers

from provenance import commit, version

WIDTH = 11
RATES: dict[str, Callable[[dict[str, Any]], str]] = {
    "TFLOP/s": lambda row: f"{row['useful_tflops']:.4g}",
    "ceiling": lambda row: f"{100 * row['ceiling_share']:.1f}%",
    "GiB": lambda row: f"{row['peak_gib'] or 0.0:.1f}",
}
"""Columns of every table."""


def head(bench: str, options: argparse.Namespace, packages: Sequence[str]) -> dict[str, Any]:
    """What a result begins with. options: `device`, `dtype` and `tiny`; packages: whose versions matter as well."""
    cuda = options.device.type == "cuda"
    found: dict[str, str | None] = {"torch": torch.__version__, "transformers": transformers.__version__}
    return {
        "bench": bench,
        "device": torch.cuda.get_device_name(options.device) if cuda else platform.machine(),
        "dtype": str(options.dtype).removeprefix("torch."),
        "tiny": options.tiny,
        "commit": commit(),
        "versions": found | {package: version(package) for package in packages},
    }


def show(rows: dict[str, dict[str, Any]], ceiling: float, columns: dict[str, Callable[[dict[str, Any]], str]]) -> None:
    """Print a table: a line a contender, or the error that it ended with. Adds each one's `ceiling_share`."""
    first = max(map(len, rows), default=0) + 1
    print(" " * first + "".join(f"{title:>{WIDTH}}" for title in columns))
    for name, row in rows.items():
        if "median_ms" not in row:
            print(f"{name:{first}}{row['error']}")
            continue
        row["ceiling_share"] = round(row["useful_tflops"] / ceiling, 4)
        cells = "".join(f"{cell(row):>{WIDTH}}" for cell in columns.values())
        print(f"{name:{first}}{cells}".rstrip(), flush=True)


def write(results: dict[str, Any], path: str | None) -> None:
    """The results so far, where a file is asked for."""
    if path:
        with open(path, "w", encoding="utf-8") as file:
            file.write(json.dumps(results) + "\n")
