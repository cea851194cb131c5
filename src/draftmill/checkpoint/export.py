"""Export: a drafter out of a run into a folder that serving engines read. Whole or not at all.

Owns what may be overwritten, the order of the checks, and draftmill.json, which keeps what the layouts have no place
for: target revision, data fingerprint, recipe, training length.
"""

from __future__ import annotations

import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from draftmill.checkpoint import card, speculators, weights, zlab
from draftmill.checkpoint.check import check_config, check_export
from draftmill.checkpoint.durable import clear_write_errors, digest, read_json, replace_folder, sync_folder, write_json
from draftmill.checkpoint.source import CONFIG_FILE, FACTS_FILE, Source, read_source
from draftmill.errors import InputError
from draftmill.names import is_missing_folder

Layout = Literal["zlab", "speculators"]
EXPORT_DTYPES = ("bfloat16", "float32")
MAX_FILE_BYTES = 5 * 10**9
"""Where a file of weights is split; the hub's usual size."""

FORMAT = "draftmill export"


@dataclass(frozen=True)
class Exported:
    """What an export did: files by name, parameters, and lines for the user: choice of checkpoint, notes, checks."""

    folder: Path
    files: list[str]
    num_parameters: int
    lines: list[str]


def export(
    where: str | Path,
    layout: str,
    output: str | Path,
    *,
    dtype: str = "bfloat16",
    target: str | None = None,
    check: bool = False,
    force: bool = False,
    which: str | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> Exported:
    """Write a drafter's weights, config and model card to `output` in a layout that engines read.

    where   a run (its best checkpoint is taken, see `source.read_source`), a checkpoint, or a published folder
    target  names the target where the source does not say it
    check   compare with every installed reader before the folder appears (`check.check_export`)
    force   replace an earlier export at `output`; a folder with anything else in it is never touched
    which   of a checkpoint's weights, "ema" or "raw"; by default its moving average where it has one

    Raises InputError: what can't be read, written or served, and why. Nothing is left behind or harmed then.
    """
    if layout not in get_args(Layout):
        raise InputError(f"unknown layout {layout!r}; the layouts are {', '.join(get_args(Layout))}")
    if dtype not in EXPORT_DTYPES:
        raise InputError(f"unknown dtype {dtype!r}; an export is in {' or '.join(EXPORT_DTYPES)}")
    output = Path(output).resolve()
    _check_output(output, force)
    source = read_source(where, which=which)
    _check_finite(source)
    facts = dict(source.facts)
    if target is not None:
        _check_target(target)
        facts["target"] = {"model": target}
    config = _config(source, facts, layout, dtype)
    check_config(config, str(output / CONFIG_FILE))

    temporary = output.with_name(f".writing-{output.name}-{secrets.token_hex(4)}")
    with clear_write_errors(f"export {output}", "free space or choose another --output"):
        try:
            temporary.mkdir(parents=True)
            files = _write(temporary, output.name, source, facts, layout, dtype, config, max_file_bytes)
            lines = check_export(temporary, layout, source.shape, source.tensors) if check else []
            replace_folder(temporary, output)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
    chosen = [f"exported {source.note}"] if source.note else []
    if source.facts.get("weights") is not None and source.layout == "draftmill":
        chosen.append(f"weights: {card.WEIGHTS[source.facts['weights']]}")
    num_parameters = sum(tensor.numel() for tensor in source.tensors.values())
    return Exported(output, files, num_parameters, chosen + lines + card.notes(source.shape, layout))


def _check_target(target: str) -> None:
    """Refuse a path where nothing is: engines would look there for the target that the export names."""
    if is_missing_folder(target):
        raise InputError(f"no folder at {target}; give the target's folder or hub id as --target")


def _config(source: Source, facts: dict[str, Any], layout: str, dtype: str) -> dict[str, Any]:
    if layout == "zlab":
        return zlab.to_config(source.shape, dtype)
    named = facts.get("target") or {}
    if not named.get("model"):
        raise InputError(f"{source.folder} does not say its target, which this layout names; give --target")
    return speculators.to_config(source.shape, dtype, named["model"], named.get("architectures") or [])


def _write(
    folder: Path,
    name: str,
    source: Source,
    facts: dict[str, Any],
    layout: str,
    dtype: str,
    config: dict[str, Any],
    max_file_bytes: int,
) -> list[str]:
    write_json(folder / CONFIG_FILE, config)
    files = weights.write_weights(folder, source.tensors, weights.DTYPES[dtype], max_file_bytes)
    (folder / card.CARD_FILE).write_text(card.card(source.shape, facts, layout, name), encoding="utf-8")
    files = sorted([*files, CONFIG_FILE])
    record = {
        "format": FORMAT,
        "version": 1,
        "name": name,
        "layout": layout,
        "dtype": dtype,
        "files": {file: {"bytes": (folder / file).stat().st_size, "digest": digest(folder / file)} for file in files},
        "facts": facts,
    }
    write_json(folder / FACTS_FILE, record)
    sync_folder(folder)
    return sorted([*files, card.CARD_FILE, FACTS_FILE])


def _check_output(output: Path, force: bool) -> None:
    if not output.exists():
        return
    if not output.is_dir():
        raise InputError(f"{output} is a file; give a new or empty folder as --output")
    found = {path.name for path in output.iterdir()}
    if not found:
        return
    record = read_json(output / FACTS_FILE) if FACTS_FILE in found else None
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise InputError(f"{output} holds something else ({sorted(found)[0]}); give a new or empty folder as --output")
    if others := sorted(found - {*record.get("files", {}), card.CARD_FILE, FACTS_FILE}):
        raise InputError(f"{output} holds more than an export ({others[0]}); give a new or empty folder as --output")
    if not force:
        raise InputError(f"{output} holds an earlier export; give --force to replace it, or another --output")


def _check_finite(source: Source) -> None:
    for name, tensor in source.tensors.items():
        if not torch.isfinite(tensor).all():
            raise InputError(f"{source.folder}: {name} holds NaN or infinity; such a drafter can't be served")
