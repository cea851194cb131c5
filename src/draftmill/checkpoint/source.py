"""Where a drafter comes from: a run, one of its checkpoints, a published folder of either layout, or the hub.

Owns the telling apart and the reading, into one record. Changes nothing on the disk.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

from draftmill.checkpoint import speculators, store, weights, zlab
from draftmill.checkpoint.durable import digest, read_json
from draftmill.checkpoint.store import Tensors
from draftmill.drafter.shape import DrafterShape
from draftmill.errors import InputError
from draftmill.names import looks_local

Which = Literal["ema", "raw"]
"""A checkpoint's moving average, or the weights that it is of."""

CONFIG_FILE, FACTS_FILE, EVALUATION_FILE = "config.json", "draftmill.json", "evaluation.json"

_TARGET_FACTS = ("hidden_size", "vocab_size", "num_target_layers", "embedding_scale", "logit_scale", "logit_softcap")
_SETTINGS = ("num_layers", "target_layer_ids", "mask_token_id", "sliding_window", "sliding_layers")
_FROM_RUN = ("block_size", "max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id")


@dataclass(frozen=True)
class Source:
    """A drafter as it was found.

    folder   where its files are
    layout   "draftmill" (a checkpoint), "zlab" or "speculators"
    tensors  by upstream name, on the CPU, in the dtype they are stored in; mapped from the files
    facts    what is known of its making: target, data_fingerprint, training_length, step, accept_length,
             accept_by_slot, config, evaluation, weights ("ema" or "raw" where there were both); each may be absent
    note     which checkpoint of a run was taken and why; empty where there was no choice
    """

    folder: Path
    layout: str
    shape: DrafterShape
    tensors: Tensors
    facts: dict[str, Any] = field(default_factory=dict)
    note: str = ""


def read_source(where: str | Path, *, num_target_layers: int | None = None, which: str | None = None) -> Source:
    """Read a drafter from a run directory, a checkpoint folder or a published folder.

    Of a run, the whole checkpoint with the greatest held-out acceptance length is taken, or the newest where none was
    evaluated. `num_target_layers` is for foreign folders in speculators layout, which do not say it. `which` of a
    checkpoint's weights, "ema" or "raw"; by default its moving average where it has one. Raises InputError.
    """
    if which is not None and which not in get_args(Which):
        raise InputError(f"unknown weights {which!r}; a checkpoint's are {' or '.join(get_args(Which))}")
    folder, note = Path(where), ""
    if not folder.is_dir():
        raise InputError(f"no run, checkpoint or drafter at {where}; give the path of a folder")
    if (folder / "checkpoints").is_dir() or (folder / "config.yaml").exists():
        folder, note = _choose(folder)
    if (folder / store.MANIFEST_FILE).exists():
        return _read_checkpoint(folder, note, which)
    if (folder / CONFIG_FILE).exists():
        if which is not None:
            raise InputError(f"{folder} is no checkpoint and has one set of weights; leave out the choice of {which}")
        return _read_published(folder, num_target_layers)
    raise InputError(
        f"{folder} is neither a run, nor a checkpoint (manifest.json), nor a drafter (config.json); give one of these"
    )


def read_published(where: str, revision: str | None = None, *, num_target_layers: int | None = None) -> Source:
    """Read a drafter from a folder as `read_source` does, or else from the hub. Raises InputError."""
    if Path(where).is_dir():
        return read_source(where, num_target_layers=num_target_layers)
    if looks_local(where) or "/" not in where:
        raise InputError(f"no drafter at {where}; give a folder, or a hub id such as z-lab/Qwen3-8B-DFlash-b16")
    return _read_published(_download(where, revision), num_target_layers)


def warm_start(
    where: str, wanted: DrafterShape, revision: str | None = None
) -> tuple[DrafterShape, Tensors, list[str]]:
    """The weights that a run begins with, from a folder or the hub, and the shape it then has.

    wanted  the shape by the run's target and settings. Target facts must agree. Settings must agree too, but for the
            block size, which may be trained anew. Heads, widths, norms and rotary embedding, which no setting names,
            are the checkpoint's.

    Returns the shape, the tensors as stored, and a line for the log for each way in which the shape is not `wanted`.
    Raises InputError that names what does not fit and which setting would make it.
    """
    source = read_published(where, revision, num_target_layers=wanted.num_target_layers)
    own = source.shape
    for name in _TARGET_FACTS:
        if getattr(own, name) != getattr(wanted, name):
            raise InputError(
                f"{where} is a drafter for another target: its {name} is {getattr(own, name)}, "
                f"this target's is {getattr(wanted, name)}; give one that was made for this target"
            )
    unlike = [name for name in _SETTINGS if getattr(own, name) != getattr(wanted, name)]
    if unlike:
        advice = ", ".join(f"drafter.{name}={_as_setting(getattr(own, name))}" for name in unlike)
        raise InputError(f"{where} does not fit the drafter's settings; to start from it, set {advice}")
    shape = replace(own, **{name: getattr(wanted, name) for name in _FROM_RUN})
    before, after = wanted.to_dict(), shape.to_dict()
    notes = [
        f"{name} is {after[name]} as in {where}, not {before[name]}" for name in after if after[name] != before[name]
    ]
    if own.block_size != wanted.block_size:
        notes.append(f"block_size is {wanted.block_size}; {where} was trained with {own.block_size}")
    return shape, source.tensors, notes


def _as_setting(value: Any) -> Any:
    return "null" if value is None else str(list(value)).replace(" ", "") if isinstance(value, tuple) else value


def _choose(run_dir: Path) -> tuple[Path, str]:
    entries = store.checkpoints(run_dir)
    if not entries:
        raise InputError(f"{run_dir} has no checkpoint yet; train until the first is written")
    newest, best = entries[-1], store.best(run_dir)
    if best is not None:
        return best.folder, f"step-{best.step}, of the greatest held-out acceptance length ({best.accept_length:.3f})"
    if newest.problem is not None:
        whole = next((entry for entry in reversed(entries) if entry.problem is None), None)
        advice = f"give {whole.folder} for the newest whole one" if whole else "no other one is whole"
        raise InputError(f"the newest checkpoint of {run_dir} can't be used: {newest.problem}; {advice}")
    return newest.folder, f"step-{newest.step}, the newest; none was evaluated"


def _read_checkpoint(folder: Path, note: str, which: str | None) -> Source:
    checkpoint = store.load(folder, optimizer=False)
    state = checkpoint.state
    config = state.get("config") or {}
    target = state.get("target") or {key: (config.get("target") or {}).get(key) for key in ("model", "revision")}
    facts = {
        "target": target,
        "data_fingerprint": state.get("data_fingerprint"),
        "training_length": (config.get("data") or {}).get("max_length"),
        "step": checkpoint.step,
        "config": config,
    }
    average = checkpoint.average()
    if which == "ema" and average is None:
        raise InputError(
            f"{folder} has no moving average: it was trained without train.ema_decay; take its raw weights"
        )
    if average is not None:
        facts["weights"] = which or "ema"
    if average is None or which != "raw":  # what was measured was measured with the average, where there is one
        facts["accept_length"], facts["accept_by_slot"] = state.get("accept_length"), state.get("accept_by_slot")
        facts["evaluation"] = read_json(folder / EVALUATION_FILE) if (folder / EVALUATION_FILE).exists() else None
    if "shape" not in state:
        raise InputError(f"{folder / store.STATE_FILE} does not say the drafter's shape; it is of no training run")
    shape = DrafterShape.from_dict(state["shape"])
    tensors, file = checkpoint.tensors(), store.DRAFTER_FILE
    if average is not None and which != "raw":
        tensors, file = average, store.AVERAGE_FILE
    weights.check_tensors(tensors, shape, str(folder / file))
    return Source(folder, "draftmill", shape, tensors, {k: v for k, v in facts.items() if v is not None}, note)


def _read_published(folder: Path, num_target_layers: int | None) -> Source:
    path = folder / CONFIG_FILE
    config = read_json(path)
    if not isinstance(config, dict):
        raise InputError(f"{path} must hold a mapping, got {type(config).__name__}")
    if "speculators_model_type" in config:
        layout, skip = "speculators", speculators.VERIFIER_TENSORS
        shape = speculators.from_config(config, str(path), num_target_layers)
        facts = {"target": {"model": config.get("speculators_config", {}).get("verifier", {}).get("name_or_path")}}
    else:
        layout, skip, facts = "zlab", frozenset[str](), {}
        shape = zlab.from_config(config, str(path))
    tensors = weights.read_weights(folder, skip)
    weights.check_tensors(tensors, shape, str(folder))
    if (folder / FACTS_FILE).exists():
        record = read_json(folder / FACTS_FILE)
        _check_digests(folder, record.get("files", {}))
        facts = record.get("facts", facts)
    return Source(folder, layout, shape, tensors, facts)


def _check_digests(folder: Path, files: dict[str, Any]) -> None:
    """Raise InputError unless an export's weights are the ones that were written; its config may be edited."""
    for name, written in files.items():
        if name.endswith(".safetensors") and digest(folder / name) != written["digest"]:
            raise InputError(
                f"{folder / name} is damaged: its content does not match the checksum in {FACTS_FILE}; export it "
                f"again, or delete {FACTS_FILE} if the weights were changed on purpose"
            )


def _download(model_id: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download

    wanted = [CONFIG_FILE, FACTS_FILE, weights.INDEX_FILE, "*.safetensors"]
    try:
        return Path(snapshot_download(model_id, revision=revision, allow_patterns=wanted))
    except Exception as error:  # the hub's client raises its transport's errors too
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise InputError(f"drafter {model_id!r} can't be fetched: {reason}; give a folder, or a hub id") from error
