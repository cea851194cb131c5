"""The recipes that bench/quality.py compares: a base, and what each of the others sets otherwise.

A recipe's settings are the configuration's own dotted names. One whose settings this version does not have is reported
as unavailable, and left out. SpecForge's recipe is in quality_specforge.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from draftmill.config import Config, build_config
from draftmill.errors import InputError
from quality_settings import Settings

BASE: dict[str, Any] = {
    "data.batching": "packed",
    "data.token_budget": 4096,
    "data.min_rows": 1,
    "data.heldout": 0,
    "drafter.num_layers": 5,
    "drafter.num_taps": 5,
    "drafter.block_size": 16,
    "drafter.init": "target",
    "train.num_anchors": 512,
    "train.lr": 2e-3,
}
"""The default recipe as far as it is not the configuration's own defaults. The rate: docs/log.md."""


@dataclass(frozen=True)
class Recipe:
    """One way of training. share: of the run's seconds, so that a recipe with 0.5 has half the time.

    main     trained where no recipe is named
    peer     rows of a SpecForge batch; None for our own trainer
    """

    name: str
    changes: dict[str, Any] = field(default_factory=dict)
    share: float = 1.0
    main: bool = False
    peer: int | None = None


RECIPES = (
    Recipe("default", main=True),
    Recipe("default-half-time", share=0.5, main=True),
    # batch_size 1 is its configuration's default; its published examples use 1 to 4 rows a GPU, on up to 8 GPUs
    Recipe("specforge", peer=4, main=True),
    Recipe("specforge-1-row", peer=1),
    Recipe("specforge-16-rows", peer=16),
    Recipe("init-normal", {"drafter.init": "normal"}),
    Recipe("lr-6e-4", {"train.lr": 6e-4}),
    Recipe("lr-1e-3", {"train.lr": 1e-3}),
    Recipe("lr-1.5e-3", {"train.lr": 1.5e-3}),
    Recipe("lr-4e-3", {"train.lr": 4e-3}),
    Recipe("warm-up-12", {"train.warmup_share": 0.12}),
    Recipe("warm-up-12-lr-4e-3", {"train.warmup_share": 0.12, "train.lr": 4e-3}),
    Recipe("normal-lr-6e-4", {"drafter.init": "normal", "train.lr": 6e-4}),
    Recipe("draws-2", {"train.anchor_draws": 2}),
    Recipe("draws-4", {"train.anchor_draws": 4}),
    Recipe("anchors-256", {"train.num_anchors": 256}),
    Recipe("anchors-1024", {"train.num_anchors": 1024}),
    Recipe("small-steps", {"train.num_anchors": 256, "data.token_budget": 2048}),
    Recipe("large-steps", {"train.num_anchors": 1024, "data.token_budget": 8192}),
    Recipe("small-steps-draws-4", {"train.num_anchors": 128, "train.anchor_draws": 4}),
    # tau here is of whole blocks, so it shows what these cost and not what they are for (docs/quality.md)
    Recipe("short-blocks-25", {"train.short_blocks": 0.25}),
    Recipe("short-blocks-50", {"train.short_blocks": 0.5}),
    Recipe("short-blocks-100", {"train.short_blocks": 1.0}),
    Recipe("gamma-4", {"train.gamma": 4.0}),
    Recipe("gamma-12", {"train.gamma": 12.0}),
    Recipe("d-pace", {"train.loss": "d_pace"}),
    Recipe("kl", {"train.loss": "kl"}),
    Recipe("total-variation", {"train.loss": "total_variation"}),
    Recipe("ce-kl", {"train.loss": {"cross_entropy": 0.5, "kl": 0.5}}),
    Recipe("kl-tv", {"train.loss": {"kl": 0.1, "total_variation": 0.9}}),
    Recipe("labels-target", {"train.labels": "target"}),
    Recipe("muon", {"train.optimizer": "muon"}),
    Recipe("ema", {"train.ema_decay": 0.999}),
    Recipe("stable-decay", {"train.schedule": "warmup-stable-decay"}),
    Recipe("beta2-0.999", {"train.betas": (0.9, 0.999)}),
    Recipe("block-8", {"drafter.block_size": 8}),
    Recipe("layers-3", {"drafter.num_layers": 3}),
    Recipe("layers-8", {"drafter.num_layers": 8}),
    Recipe("taps-3", {"drafter.num_taps": 3}),
    Recipe("taps-8", {"drafter.num_taps": 8}),
    Recipe("target-float8", {"target.quantize": "float8"}),
    Recipe("float8-head", {"drafter.float8": "head"}),
    Recipe("float8", {"drafter.float8": "all"}),
    Recipe("float8-both", {"drafter.float8": "all", "target.quantize": "float8"}),
    Recipe("sliding", {"drafter.sliding_window": 256, "drafter.sliding_layers": [0, 1, 2, 3]}),
    Recipe("bucketed", {"data.batching": "bucketed"}),
)
BY_NAME = {recipe.name: recipe for recipe in RECIPES}
TINY_CHANGES: dict[str, Any] = {
    "data.batching": "bucketed",
    "data.token_budget": 640,
    "data.round_to": 8,
    "drafter.num_layers": 2,
    "drafter.num_taps": 2,
    "drafter.block_size": 4,
    "train.num_anchors": 32,
}
"""For --tiny, in every recipe."""


def chosen(names: list[str] | None) -> list[Recipe]:
    """The recipes of these names, all of them for "all", the main ones for None. Raises InputError."""
    if names is None:
        return [recipe for recipe in RECIPES if recipe.main]
    if unknown := [name for name in names if name not in BY_NAME and name != "all"]:
        raise InputError(f"no recipe {', '.join(unknown)}; known: {', '.join(BY_NAME)}")
    return list(RECIPES) if "all" in names else [BY_NAME[name] for name in names]


def config_for(
    recipe: Recipe,
    settings: Settings,
    place: tuple[str, str, str],
    seed: int,
    overrides: list[str] | None = None,
    *,
    tiny: bool,
) -> Config:
    """The configuration of a run. place: target, store and device; overrides win over the recipe.

    Raises InputError for settings that this version does not have.
    """
    target, store, device = place
    sections: dict[str, dict[str, Any]] = {
        "run": {"dir": "unused", "seed": seed},
        "target": {"model": target, "devices": [device], "dtype": "float32" if device == "cpu" else "bfloat16"},
        "data": {"path": store, "max_length": settings.max_length, "read_ahead": 8},
        "drafter": {"devices": [device]},
        "train": {"epochs": 1},
        "monitor": {"trackers": []},
    }
    for name, value in {**BASE, **recipe.changes, **(TINY_CHANGES if tiny else {})}.items():
        section, _, key = name.partition(".")
        sections[section][key] = value
    if device != "cpu":  # named, so that no other way is built and timed before each recipe
        sections["drafter"]["step"] = "graphed"
        sections["target"]["step"] = "graphed" if sections["data"]["batching"] == "packed" else "auto"
    if tiny and "drafter.sliding_layers" in recipe.changes:
        sections["drafter"]["sliding_layers"] = [0]
    return build_config(sections, overrides, source=f"recipe {recipe.name}")
