"""What a run is made of, worked out and checked before anything is loaded or written.

Everything the user may have got wrong in the configuration, the data or the target's configuration is found here.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from draftmill.checkpoint.resume import MAY_CHANGE, TARGET_SETTINGS
from draftmill.checkpoint.source import warm_start
from draftmill.config import Config
from draftmill.data.encode import hash_tokenizer
from draftmill.data.plan import BatchPlan, split_heldout
from draftmill.data.store import Store
from draftmill.drafter.float8 import check_float8
from draftmill.drafter.initial import check_layers
from draftmill.drafter.loss import LossRule
from draftmill.drafter.mask import TILE
from draftmill.drafter.shape import DrafterShape, shape_for
from draftmill.errors import InputError
from draftmill.pipeline.collective import Hosts
from draftmill.pipeline.placement import Placement, ask_for_queues, has_bfloat16, place
from draftmill.pipeline.stream import Stream
from draftmill.step.choose import check_step
from draftmill.step.state import CHUNK_ROWS, CHUNK_ROWS_CUDA, StepShape
from draftmill.target.load import check_quantize, empty_target, is_quantized, load_config, load_tokenizer
from draftmill.target.mask_token import resolve_mask_token
from draftmill.target.model import OUTPUT
from draftmill.target.step import check_choice
from draftmill.train.decoding import check_decoding


@dataclass(frozen=True)
class Setup:
    """A run's parts before anything is loaded."""

    config: Config
    hosts: Hosts
    placement: Placement
    store: Store
    plan: BatchPlan
    heldout_plan: BatchPlan | None
    target_config: Any
    shape: DrafterShape
    step_shape: StepShape
    rule: LossRule
    dtype: torch.dtype
    stream: Stream
    warm_weights: dict[str, torch.Tensor] | None
    notes: tuple[str, ...]

    @property
    def first_drafter(self) -> int:
        """Number of this host's first drafter among all drafters; every host has as many."""
        return self.hosts.rank * len(self.placement.drafters)

    @property
    def taps(self) -> tuple[int, ...]:
        """What the target gives of each token: its tapped layers, and its last hidden state where the loss needs it."""
        return (*self.shape.target_layer_ids, *((OUTPUT,) if self.rule.needs_target else ()))

    @property
    def last_layer(self) -> int:
        """The last of the target's layers that is run."""
        return self.shape.num_target_layers - 1 if self.rule.needs_target else self.shape.target_layer_ids[-1]

    @property
    def carried_size(self) -> int:
        """Numbers of a token that go from a target to a drafter."""
        return len(self.taps) * self.shape.hidden_size


def set_up(config: Config, hosts: Hosts) -> Setup:
    """Check everything a run needs. Raises InputError; writes and loads nothing."""
    ask_for_queues()
    placement = place(config.target.devices, config.drafter.devices)
    if hosts.here > 1 and placement.uses_cuda:
        raise InputError(
            f"torchrun started {hosts.here} processes on this host, which would share its GPUs; one process drives all "
            "of them: use --nproc-per-node 1"
        )
    for group in placement.targets:
        check_choice(config.target.step, config.data.batching == "packed", group)
    check_step(config.drafter.step, placement.drafters)
    if config.target.revision is not None and Path(config.target.model).is_dir():
        raise InputError(
            f"target.revision {config.target.revision} is of the hub, and target.model {config.target.model} is a "
            "folder; leave it out, or give the hub id"
        )
    if hosts.rank == 0:
        check_decoding(
            config.train, [*placement.drafters, *(device for group in placement.targets for device in group)]
        )
    store = Store.open(config.data.path, max_length=config.data.max_length)
    target_config = load_config(
        config.target.model, revision=config.target.revision, trust_remote_code=config.target.trust_remote_code
    )
    check_quantize(
        config.target.model,
        target_config,
        config.target.quantize,
        [device for group in placement.targets for device in group],
    )
    shape = _shape(config, store, target_config)
    warm_weights: dict[str, torch.Tensor] | None = None
    notes: list[str] = []
    if config.drafter.from_checkpoint is not None:
        shape, warm_weights, notes = warm_start(config.drafter.from_checkpoint, shape)
    elif config.drafter.init == "target":
        _check_first_weights(config, target_config, shape)
    dtype = _compute_type(config, placement)
    check_float8(config.drafter.float8, shape, dtype, placement.drafters)
    plan, heldout_plan = _plans(config, store)
    step_shape = _step_shape(config, shape, plan, heldout_plan, placement)
    stream = Stream(
        num_drafters=len(placement.drafters) * hosts.count,
        accumulate=config.train.accumulate,
        draws=config.train.anchor_draws,
        num_batches=plan.total(config.train.epochs),
        num_heldout=heldout_plan.num_batches(0) if heldout_plan is not None else 0,
        evaluate_every=config.train.evaluate_every,
        max_steps=config.train.max_steps,
        locate=plan.locate,
    )
    notes += _unmeasured(config, stream)
    return Setup(
        config=config,
        hosts=hosts,
        placement=placement,
        store=store,
        plan=plan,
        heldout_plan=heldout_plan,
        target_config=target_config,
        shape=shape,
        step_shape=step_shape,
        rule=LossRule.of(config.train, shape.block_size),
        dtype=dtype,
        stream=stream,
        warm_weights=warm_weights,
        notes=tuple(notes),
    )


def _unmeasured(config: Config, stream: Stream) -> list[str]:
    """A line for the log where checkpoints by steps fall between evaluations, so that none of them can be the best."""
    every = config.checkpoint.every_steps
    steps = range(every, stream.total_steps, every)
    missing = sum(not stream.evaluates_after(step - 1) for step in steps) if stream.num_heldout else 0
    if not missing:
        return []
    draws = f" and of train.anchor_draws {stream.draws}" if stream.draws > 1 else ""
    return [
        f"{missing} of {len(steps)} checkpoints by steps before the end will have no held-out acceptance length, and "
        f"none is kept as best without: make checkpoint.every_steps {every} a multiple of train.evaluate_every "
        f"{stream.evaluate_every}{draws}"
    ]


def facts_to_share(setup: Setup) -> dict[str, Any]:
    """What must be the same on every host: whatever the numbers, and the order of the work, depend on."""
    sections = setup.config.model_dump(mode="json")
    settings = {f"{section}.{name}": value for section, named in sections.items() for name, value in named.items()}
    free = {*MAY_CHANGE, *TARGET_SETTINGS} - {"train.accumulate", "train.evaluate_every"}  # local paths may differ
    return {
        "the number of drafters": len(setup.placement.drafters),
        "the data's fingerprint": setup.store.fingerprint,
        "the drafter's shape": setup.shape.to_dict(),
        "the compute type": str(setup.dtype).removeprefix("torch."),
        **{name: value for name, value in settings.items() if name not in free},
    }


def _shape(config: Config, store: Store, target_config: Any) -> DrafterShape:
    tokenizer = load_tokenizer(
        config.target.model, revision=config.target.revision, trust_remote_code=config.target.trust_remote_code
    )
    rows = target_config.get_text_config().vocab_size
    if hash_tokenizer(tokenizer) != store.meta["tokenizer_hash"]:
        raise InputError(
            f"{config.data.path} was made with the tokenizer of {store.meta['tokenizer_name']}, which gives other ids "
            f"than that of target.model {config.target.model}; run draftmill prepare --target {config.target.model}"
        )
    used = {int(token) for token in store.token_counts.nonzero()[0]}
    if used and max(used) >= rows:
        raise InputError(
            f"{config.data.path} holds token id {max(used)}, but the target {config.target.model} has {rows} "
            "embeddings; prepare the data with this target"
        )
    mask_token_id = resolve_mask_token(tokenizer, rows, config.drafter.mask_token_id, used)
    return shape_for(target_config, config.drafter, mask_token_id)


def _check_first_weights(config: Config, target_config: Any, shape: DrafterShape) -> None:
    """Raise InputError where the target can't give a drafter's first weights, seen without reading its own."""
    model = config.target.model
    if is_quantized(target_config):
        raise InputError(
            f"drafter.init target: target {model!r} is quantized, its layers are no drafter's first weights; use "
            "drafter.init=normal"
        )
    check_layers(empty_target(model, target_config, config.target.trust_remote_code).layers, shape)


def _plans(config: Config, store: Store) -> tuple[BatchPlan, BatchPlan | None]:
    data = config.data
    train_ids, heldout_ids = split_heldout(store.num_samples, data.heldout, config.run.seed)

    def plan(sample_ids: Any, edges: list[int] | None) -> BatchPlan:
        return BatchPlan(
            store.lengths,
            max_length=data.max_length,
            token_budget=data.token_budget,
            min_rows=data.min_rows,
            max_rows=data.max_rows,
            num_buckets=data.num_buckets,
            bucket_edges=edges,
            round_to=data.round_to,
            seed=config.run.seed,
            batching=data.batching,
            sample_ids=sample_ids,
        )

    training = plan(train_ids, data.bucket_edges)
    return training, plan(heldout_ids, training.edges) if len(heldout_ids) else None


def _step_shape(
    config: Config, shape: DrafterShape, plan: BatchPlan, heldout_plan: BatchPlan | None, placement: Placement
) -> StepShape:
    context = max(plan.context_slots, heldout_plan.context_slots if heldout_plan is not None else 0)
    anchors = min(config.train.num_anchors, context)  # an anchor is a token: more slots would stay empty for ever
    if placement.drafters[0].type != "cuda":
        return StepShape(context, anchors, CHUNK_ROWS, config.train.short_blocks > 0.0)
    # flex attention works in tiles: whole ones in context slots and in block tokens
    context = -(-context // TILE) * TILE
    while anchors * shape.block_size % TILE:
        anchors += 1
    return StepShape(context, anchors, CHUNK_ROWS_CUDA, config.train.short_blocks > 0.0)


def _compute_type(config: Config, placement: Placement) -> torch.dtype:
    if config.drafter.dtype != "auto":
        return {"bfloat16": torch.bfloat16, "float32": torch.float32}[config.drafter.dtype]
    return torch.bfloat16 if all(has_bfloat16(device) for device in placement.drafters) else torch.float32
