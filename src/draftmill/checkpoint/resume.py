"""Which checkpoint a run goes on from, and whether it still is the same run.

Owns the list of settings that may change between a run's parts. Restores nothing: the training loop does.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from draftmill.checkpoint import store
from draftmill.checkpoint.store import Checkpoint
from draftmill.config import Config, build_config
from draftmill.drafter.shape import DrafterShape
from draftmill.errors import InputError

MAY_CHANGE = frozenset(
    {
        "run.dir",
        "target.devices",
        "target.step",
        "target.cache_gib",
        "target.trust_remote_code",
        "data.path",  # may have moved; what it holds is the fingerprint
        "data.read_ahead",
        "drafter.devices",
        "drafter.step",
        "drafter.checkpoint_activations",
        "train.accumulate",  # only together with the drafters: batches_per_step must stay
        "train.log_every_s",
        "train.evaluate_every",
        "train.decode_prompts",
        "train.decode_device",
        "checkpoint.every_steps",
        "checkpoint.every_minutes",
        "checkpoint.keep_last",
        "checkpoint.keep_best",
        "pipeline.slots",
        "pipeline.stall_s",
        "pipeline.costs",  # decides on devices alone
        "monitor.trackers",
        "monitor.project",
    }
)
"""Settings that change how fast, where or how visibly a run trains, but no number of it. A setting that is not here
may not change, so a new one is refused until somebody has thought about it."""

TARGET_SETTINGS = frozenset({"target.model", "target.revision"})
"""Settings that say which target it is. They may change, as for a folder that was moved, where the target's identity
is known on both sides and the same."""

SHAPE_SETTINGS = frozenset(
    {
        "drafter.num_layers",
        "drafter.num_taps",
        "drafter.target_layer_ids",
        "drafter.block_size",
        "drafter.mask_token_id",
        "drafter.sliding_window",
        "drafter.sliding_layers",
        "drafter.rotary",
    }
)
"""Settings that say nothing but the drafter's shape, which is compared itself: five taps by number or by name are the
same taps."""


def pick(run_dir: Path, *, skip_damaged: bool = False, log: Callable[[str], None] = print) -> Checkpoint:
    """Verify and open the newest checkpoint of a run. Changes nothing on the disk.

    With `skip_damaged` a damaged one is logged and the newest whole one before it taken. Raises InputError where there
    is no checkpoint, or the newest is damaged: the message says how, and names the newest whole one before it.
    """
    entries = store.checkpoints(run_dir)
    damage = ""
    for entry in reversed(entries):
        try:
            checkpoint = store.load(entry.folder)
        except InputError as error:
            if skip_damaged:
                log(f"checkpoint step-{entry.step} is passed over: {error}")
            damage = damage or f"the newest checkpoint can't be used: {error}"
            continue
        if damage and not skip_damaged:
            raise InputError(
                f"{damage}; step-{entry.step} before it is whole: move the damaged folder away to resume from that"
            )
        return checkpoint
    if not entries:
        raise InputError(f"{run_dir} has no checkpoint to resume from; train without resuming")
    raise InputError(f"{damage}; no other checkpoint of {run_dir} is whole")


def finished_message(checkpoint: Checkpoint) -> str | None:
    """What to tell the user who resumes a run that is finished; None for one that is not."""
    if not checkpoint.state.get("finished"):
        return None
    return f"the run is finished at step {checkpoint.step}; export it, or start a new run from this checkpoint"


def check_same_run(
    saved: dict[str, Any],
    config: Config,
    shape: DrafterShape,
    *,
    data_fingerprint: str,
    batches_per_step: int,
    target_identity: str | None = None,
) -> list[str]:
    """Compare a checkpoint's state with the run about to go on from it.

    saved             the state, with `config`, `shape`, `data_fingerprint`, `batches_per_step` and, where known,
                      `target_identity`
    target_identity   any text that tells one target's weights from another's, a commit or a digest
    batches_per_step  drafters x accumulate, over all processes: how many batches make an optimizer step

    Returns what changed and may, as lines for the log. Raises InputError that names every change which would make it
    another run.
    """
    old_config = build_config(saved["config"], source="the checkpoint's configuration")
    same_target = target_identity is not None and saved.get("target_identity") == target_identity
    may_change = MAY_CHANGE | TARGET_SETTINGS if same_target else MAY_CHANGE
    refused: list[str] = []
    allowed: list[str] = []
    for name, (old, new) in _differences(_flat(old_config), _flat(config)).items():
        if name not in SHAPE_SETTINGS:
            (allowed if name in may_change else refused).append(f"{name} was {old}, is {new}")
    for name, (old, new) in _differences(saved["shape"], shape.to_dict()).items():
        refused.append(f"the drafter's {name} was {old}, is {new}")
    if saved["data_fingerprint"] != data_fingerprint:
        refused.append(f"the data's fingerprint was {saved['data_fingerprint']}, is {data_fingerprint}")
    if saved["batches_per_step"] != batches_per_step:
        refused.append(
            f"drafters x train.accumulate was {saved['batches_per_step']}, is {batches_per_step} "
            "(set train.accumulate so that it stays)"
        )
    if target_identity is not None and saved.get("target_identity") not in (None, target_identity):
        refused.append(f"the target's weights were {saved['target_identity']}, are {target_identity}")
    if refused:
        raise InputError(
            f"this is not the run of the checkpoint: {'; '.join(refused)}. Put it back as it was, or start a new run "
            "with drafter.from_checkpoint"
        )
    return allowed


def _flat(config: Config) -> dict[str, Any]:
    sections = config.model_dump(mode="json")
    return {f"{section}.{name}": value for section, named in sections.items() for name, value in named.items()}


def _differences(old: dict[str, Any], new: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    names = dict.fromkeys([*old, *new])
    return {name: (old.get(name), new.get(name)) for name in names if old.get(name) != new.get(name)}
