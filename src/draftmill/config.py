"""The whole run's configuration: typed, checked, from YAML plus dotted overrides.

Owns every name a user can set and its bounds. Imports no torch, so that `status` and `--help` start at once.
Never looks at the hub or a device, nor at the environment but for the home folder that `~` stands for: whether a model
or a device exists is found out by its room.
"""

from __future__ import annotations

import os
import re
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    FiniteFloat,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from draftmill.errors import InputError
from draftmill.names import expanded

StepChoice = Literal["eager", "compiled", "graphed", "auto"]
Devices = list[str | list[str]] | Literal["auto"]
Float8Choice = Literal["head", "all"]
Place = Annotated[str, AfterValidator(expanded)]
"""A path, or for models and drafters a hub id."""
LossTerm = Literal["cross_entropy", "kl", "total_variation"]


DEVICE_NAME = re.compile(r"cpu|cuda:(0|[1-9][0-9]{0,2})")
"""A device's name."""


def cuda_index(name: str) -> int | None:
    """The number in a CUDA device's name, 0 for plain "cuda"; None for the CPU. torch would keep 8 bits of it."""
    return None if name == "cpu" else int(name.partition(":")[2] or 0)


def _checked_devices(value: Any) -> Any:
    """Whether each name can be a device's anywhere; which devices this host has, the placement finds out."""
    if value == "auto":
        return value
    if not isinstance(value, list):
        raise ValueError(f"must be auto or a list, as in [cpu] or [cuda:0, cuda:1], got {value!r}")
    if not value:
        raise ValueError("name at least one device, or auto")
    for device in value:
        names = device if isinstance(device, list) else [device]
        if not names:
            raise ValueError(f"an inner list names the devices of one replica, got an empty one in {value}")
        for name in names:
            if not (isinstance(name, str) and DEVICE_NAME.fullmatch(name)):
                raise ValueError(f"a device is cpu or cuda:N with a plain number, as in cuda:0, got {name!r}")
            if name != "cpu" and names.count(name) > 1:
                raise ValueError(f"a group takes a GPU once, got {name} more than once in {names}")
    return value


def _takes_numbers(annotation: Any) -> bool:
    """Whether a field of this type holds numbers: alone, in a list or a tuple, or as one of several kinds."""
    if get_origin(annotation) is dict:
        return False
    return annotation in (int, float) or any(map(_takes_numbers, get_args(annotation)))


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, validate_default=True)

    @field_validator("*", mode="before")
    @classmethod
    def _no_switch_for_a_number(cls, value: Any, field: ValidationInfo) -> Any:
        """Python, and so pydantic, takes true for 1."""
        inside = value if isinstance(value, list | tuple) else [value]
        if any(isinstance(each, bool) for each in inside):
            annotation = cls.model_fields[str(field.field_name)].annotation
            if _takes_numbers(annotation):
                raise ValueError(f"must be a number, got {str(value).lower()}")
        return value


class RunConfig(_Section):
    dir: Place | None = None
    """Run directory; by default runs/ plus the target's name and the time."""
    seed: int = Field(0, ge=0, lt=2**31)
    """Seeds the weights, the order of the data and the anchors."""


class TargetConfig(_Section):
    model: Place
    """Local folder or hub id of any Hugging Face causal LM."""
    revision: str | None = None
    """Hub revision of the model; null takes the default branch."""
    devices: Devices = "auto"
    """One frozen replica a device; an inner list spreads one replica over several devices."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "bfloat16"
    """Weights and activations of the target; auto keeps what the checkpoint says."""
    quantize: Literal["float8"] | None = None
    """float8: the layers' products in it, by the package torchao, on GPUs that can; null leaves the weights alone."""
    step: StepChoice = "auto"
    """How the target's forward runs."""
    trust_remote_code: bool = False
    """Whether code shipped inside the target's repository may run."""
    cache_gib: FiniteFloat = Field(0.0, ge=0.0)
    """Host memory, in GiB, for keeping features, so that later epochs need not run the target on them again.
    For small data on small machines; 0 keeps none."""

    @field_validator("devices", mode="before")
    @classmethod
    def _devices(cls, value: Any) -> Any:
        return _checked_devices(value)


class DataConfig(_Section):
    path: Place
    """Arrow store made by `draftmill prepare`."""
    max_length: int = Field(8192, ge=8)
    """Longest sample, in tokens; longer ones are cut."""
    token_budget: int = Field(32768, ge=8)
    """Context tokens of one batch, padding included."""
    min_rows: int = Field(4, ge=1)
    """Fewest samples of a full batch, even where the budget would allow fewer."""
    max_rows: int = Field(64, ge=1)
    """Most samples of a batch."""
    num_buckets: int = Field(6, ge=1, le=256)
    """Length buckets chosen from the histogram where bucket_edges is null."""
    bucket_edges: list[int] | None = None
    """Ascending upper edges, exclusive but for the last; null chooses them."""
    batching: Literal["bucketed", "packed"] = "bucketed"
    """bucketed: right-padded rows of like length; packed: documents packed into rows of max_length."""
    round_to: int = Field(64, ge=1)
    """Row lengths are rounded up to a multiple of this many tokens."""
    heldout: int = Field(64, ge=0)
    """Samples kept out of training for the acceptance length while training."""
    read_ahead: int = Field(4, ge=1, le=64)
    """Batches read ahead of the targets, on the host."""

    @model_validator(mode="after")
    def _rows(self) -> DataConfig:
        if self.max_rows < self.min_rows:
            raise ValueError(f"max_rows must be at least min_rows = {self.min_rows}, got {self.max_rows}")
        edges = self.bucket_edges
        if edges is not None and (not edges or edges[0] < 1 or any(b <= a for a, b in pairwise(edges))):
            raise ValueError(f"bucket_edges must be positive and ascending, got {edges}")
        return self


class DrafterConfig(_Section):
    devices: Devices = "auto"
    """One drafter replica a device."""
    num_layers: int = Field(5, ge=1, le=64)
    """Layers of the drafter."""
    num_taps: int = Field(5, ge=1, le=64)
    """Target layers whose outputs are its features; spread over the target's depth."""
    target_layer_ids: list[int] | None = None
    """The tapped layers themselves, 0-based, in place of num_taps."""
    block_size: int = Field(16, ge=2, le=256)
    """Tokens of a block: the given one and the drafted ones."""
    mask_token_id: int | None = None
    """Id whose embedding stands for a token to be drafted; null looks for one that the data never uses."""
    sliding_window: int | None = Field(None, ge=1)
    """Window, in tokens, of the sliding layers."""
    sliding_layers: list[int] = []
    """Drafter layers that see only the window and are causal inside a block."""
    rotary: Literal["target", "full"] = "target"
    """How much of a head turns with the position. target: as much as in the target, so a quarter for Qwen3.5, which
    vLLM reads from the exported config; full: all of it, as SGLang and the published drafters of such targets do."""
    init: Literal["normal", "target"] = "normal"
    """normal: N(0, 0.02) and norms of 1; target: layers start from the target's own last layers."""
    from_checkpoint: Place | None = None
    """Warm start: a folder or hub id in z-lab layout whose weights the run begins with."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Compute type; masters are float32 always. auto: bfloat16 on CUDA and on CPUs that have it."""
    float8: Float8Choice | None = None
    """Products in float8 while training, on GPUs that can. head: the loss's with the target's LM head; all: the
    drafter's own matrices' too. Weights and moments keep their types, and so do drafts in an evaluation."""
    step: StepChoice = "auto"
    """How the step runs; auto tries them in the worker and keeps the fastest that equals eager."""
    checkpoint_activations: bool = False
    """Recompute each layer in the backward pass, for memory."""

    @field_validator("devices", mode="before")
    @classmethod
    def _devices(cls, value: Any) -> Any:
        value = _checked_devices(value)
        if value != "auto" and any(isinstance(device, list) for device in value):
            raise ValueError(f"a drafter lives on one device, got a group in {value}")
        return value

    @model_validator(mode="after")
    def _sliding(self) -> DrafterConfig:
        if bool(self.sliding_layers) != (self.sliding_window is not None):
            raise ValueError("sliding_window and sliding_layers go together; set both or neither")
        if any(layer < 0 or layer >= self.num_layers for layer in self.sliding_layers):
            raise ValueError(f"sliding_layers must lie in 0..{self.num_layers - 1}, got {self.sliding_layers}")
        return self


class TrainConfig(_Section):
    epochs: int = Field(6, ge=1)
    """Passes over the data; the anchors are drawn afresh in each."""
    max_steps: int | None = Field(None, ge=1)
    """Optimizer steps at most; null runs all epochs."""
    num_anchors: int = Field(2048, ge=1)
    """Anchor slots (blocks) of one drafter batch; as many as its tokens at most."""
    anchor_draws: int = Field(1, ge=1, le=64)
    """Drafter batches made from one target forward, each with its own anchors."""
    short_blocks: float = Field(0.0, ge=0.0, le=1.0)
    """Share of training blocks that end earlier, after a number of slots drawn evenly: for a drafter that is asked for
    fewer tokens than its block has. Held-out evaluations use whole blocks."""
    lr: float = Field(6.0e-4, gt=0.0, lt=1.0)
    """Peak learning rate."""
    warmup_share: float = Field(0.04, ge=0.0, le=1.0)
    """Share of all steps in which the rate rises linearly."""
    schedule: Literal["cosine", "constant", "warmup-stable-decay"] = "cosine"
    """What the rate does after the warm-up."""
    decay_share: float = Field(0.2, gt=0.0, le=1.0)
    """Share of all steps, the last ones, in which warmup-stable-decay falls linearly."""
    min_lr_share: float = Field(0.0, ge=0.0, le=1.0)
    """Rate at the end, as a share of the peak."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """What updates the matrices; vectors are AdamW's under both."""
    muon_lr: float = Field(1.0e-3, gt=0.0, lt=1.0)
    """Peak learning rate of the matrices under muon; it follows the same schedule."""
    muon_momentum: float = Field(0.95, ge=0.0, lt=1.0)
    """Muon's decay rate."""
    muon_nesterov: bool = True
    """Whether Muon looks ahead by its momentum."""
    muon_ns_steps: int = Field(5, ge=1, lt=100)
    """Newton-Schulz iterations."""
    muon_ns_coefficients: tuple[FiniteFloat, FiniteFloat, FiniteFloat] = (3.4445, -4.7750, 2.0315)
    """Their polynomial's coefficients."""
    muon_adjust_lr_fn: Literal["original", "match_rms_adamw"] = "original"
    """How the rate depends on a matrix's shape; with match_rms_adamw AdamW's rates serve."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's decay rates."""
    eps: FiniteFloat = Field(1e-8, gt=0.0)
    """AdamW's epsilon."""
    weight_decay: FiniteFloat = Field(0.0, ge=0.0)
    """Decoupled weight decay, on matrices only."""
    clip: float = Field(1.0, gt=0.0)
    """Largest norm of the gradient."""
    ema_decay: float | None = Field(None, gt=0.0, lt=1.0)
    """Decay rate of the weights' moving average, which evaluations and exports then use; null keeps none."""
    gamma: float | None = Field(None, gt=0.0)
    """Decay length of the loss over a block's slots; null: 7, 5 or 4 for blocks of 16, 10 or 8, else by size."""
    loss: LossTerm | dict[LossTerm, float] = "cross_entropy"
    """What a slot costs. cross_entropy: to its label; kl, total_variation: how far the drafter's distribution is from
    the target's; several of them with weights, as in {cross_entropy: 0.1, kl: 0.9}. d_pace stands for cross_entropy
    with slot_weights d_pace. All but cross_entropy to the data's labels run the target to its end."""
    slot_weights: Literal["decay", "d_pace"] = "decay"
    """decay weighs slot k by exp(-(k-1)/gamma), d_pace by the drafter's own confidence."""
    d_pace_alpha: float = Field(0.5, ge=0.0, le=1.0)
    """Smoothing of D-PACE's confidence."""
    labels: Literal["data", "target"] = "data"
    """The token that a slot should say: the data's, or the target's likeliest at that place. Accuracy and held-out
    acceptance compare with the same one."""
    accumulate: int = Field(1, ge=1)
    """Batches a drafter adds up before an update."""
    log_every_s: float = Field(10.0, gt=0.0)
    """Seconds between step lines in the log."""
    evaluate_every: int = Field(500, ge=1)
    """Steps between held-out evaluations."""
    decode_prompts: int = Field(0, ge=0)
    """Held-out prompts that a process beside the run decodes with each checkpoint, plainly and speculatively, greedily;
    0: none. It loads the whole target."""
    decode_device: str = "cpu"
    """Where that process computes: cpu, with the target in float32, or a GPU that the run does not use."""

    @model_validator(mode="before")
    @classmethod
    def _d_pace(cls, raw: Any) -> Any:
        if not isinstance(raw, dict) or raw.get("loss") != "d_pace":
            return raw
        if (weights := raw.get("slot_weights", "d_pace")) != "d_pace":
            raise ValueError(f"loss d_pace weighs slots by d_pace, got slot_weights {weights!r}; set one of the two")
        return {**raw, "loss": "cross_entropy", "slot_weights": "d_pace"}

    @field_validator("loss", mode="before")
    @classmethod
    def _loss(cls, value: Any) -> Any:
        terms = get_args(LossTerm)
        known = ", ".join(terms)
        if not isinstance(value, dict):
            if value not in terms:
                raise ValueError(f"must be {known}, d_pace, or a mapping of the first three to weights, got {value!r}")
            return value
        if not value or any(name not in terms for name in value):
            raise ValueError(f"a mixed loss maps some of {known} to weights, got {value}")
        if not all(type(part) in (int, float) and 0.0 < part < float("inf") for part in value.values()):
            raise ValueError(
                f"a mixed loss's weights must be positive numbers, got {value}; leave out what counts nothing"
            )
        return {name: float(value[name]) for name in terms if name in value}

    @property
    def loss_terms(self) -> dict[LossTerm, float]:
        """The loss as weights of its terms."""
        return self.loss if isinstance(self.loss, dict) else {self.loss: 1.0}

    @field_validator("decode_device")
    @classmethod
    def _decode_device(cls, value: str) -> str:
        _checked_devices([value])
        return value

    @field_validator("betas")
    @classmethod
    def _betas(cls, value: tuple[float, float]) -> tuple[float, float]:
        if not all(0.0 <= beta < 1.0 for beta in value):
            raise ValueError(f"both betas must lie in [0, 1), got {value}")
        return value

    @model_validator(mode="after")
    def _without_effect(self) -> TrainConfig:
        needs = {name: ("optimizer", "muon") for name in type(self).model_fields if name.startswith("muon_")}
        needs["decay_share"] = ("schedule", "warmup-stable-decay")
        for name, (choice, wanted) in needs.items():
            chosen = getattr(self, choice)
            if chosen != wanted and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(
                    f"{name} is of no effect with {choice} {chosen}, got {getattr(self, name)}; set train.{choice} to "
                    f"{wanted}, or leave {name} out"
                )
        if self.schedule == "warmup-stable-decay" and self.warmup_share + self.decay_share > 1.0:
            raise ValueError(
                f"warmup_share and decay_share must be 1 at most together, got {self.warmup_share} and "
                f"{self.decay_share}"
            )
        return self


class CheckpointConfig(_Section):
    every_steps: int = Field(1000, ge=1)
    """Optimizer steps between checkpoints."""
    every_minutes: float = Field(30.0, gt=0.0)
    """Minutes between checkpoints, whichever comes first."""
    keep_last: int = Field(2, ge=1)
    """Newest checkpoints kept."""
    keep_best: int = Field(1, ge=0)
    """Checkpoints kept for their held-out acceptance length."""


class PipelineConfig(_Section):
    slots: int = Field(2, ge=1, le=16)
    """Feature batches that may lie between targets and one drafter."""
    stall_s: float = Field(600.0, gt=0.0)
    """Seconds without progress of a worker after which the run ends as stalled."""
    costs: Place | None = None
    """File of costs that `draftmill plan --json` printed, from which devices that are auto are chosen; null measures
    them when the run starts."""


class MonitorConfig(_Section):
    trackers: list[Literal["tensorboard", "wandb", "trackio", "mlflow"]] = ["tensorboard"]
    """Where metrics go besides metrics.jsonl, which is always written."""
    project: str = "draftmill"
    """Project name given to the trackers that have one."""


class Config(_Section):
    """A run. Sections and fields are the YAML file's; unknown ones are refused."""

    run: RunConfig = RunConfig()
    target: TargetConfig
    data: DataConfig
    drafter: DrafterConfig = DrafterConfig()
    train: TrainConfig = TrainConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    pipeline: PipelineConfig = PipelineConfig()
    monitor: MonitorConfig = MonitorConfig()

    @model_validator(mode="after")
    def _prompts(self) -> Config:
        if self.train.decode_prompts and not self.data.heldout:
            raise ValueError(
                f"train.decode_prompts {self.train.decode_prompts} are held-out samples' openings, and data.heldout is "
                "0; hold some out, or decode none"
            )
        return self

    def to_yaml(self) -> str:
        """The configuration as YAML that `load_config` reads back to an equal one."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)


def gamma_for(block_size: int) -> float:
    """The decay length for a block size: 7 / 5 / 4 for 16 / 10 / 8 (dflash.md), in proportion elsewhere."""
    return {16: 7.0, 10: 5.0, 8: 4.0}.get(block_size, max(1.0, 7.0 * block_size / 16.0))


class _Loader(yaml.SafeLoader):
    """YAML as the standard has it: a key stands once in a mapping. PyYAML lets the last one win in silence."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        seen = set()
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in seen:
                    raise yaml.MarkedYAMLError(problem=f"{key.value} stands there twice", problem_mark=key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def load_config(path: str | os.PathLike[str], overrides: list[str] | None = None) -> Config:
    """Read a YAML file and dotted overrides (`train.lr=3e-4`) into a checked configuration.

    Raises:
        InputError: the file is missing or no YAML mapping, a key is unknown, a value is of the wrong type or range.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InputError(f"no configuration file at {path}; give the path of a YAML file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} can't be read: {error}; give the path of a YAML file") from None
    try:
        raw = yaml.load(text, Loader=_Loader)  # a safe one
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark is not None else ""
        raise InputError(f"{path}{where} is not YAML: {getattr(error, 'problem', error)}") from None
    if not isinstance(raw, dict):
        raise InputError(f"{path} must hold a mapping of sections (run, target, data, ...), got {type(raw).__name__}")
    return build_config(raw, overrides, source=str(path))


def build_config(raw: dict[str, Any], overrides: list[str] | None = None, source: str = "the configuration") -> Config:
    """Check a mapping of sections, with dotted overrides applied on a copy of it. Raises InputError.

    A section with nothing in it, which YAML gives as null, is as good as one left out.
    """
    merged = {key: dict(value or {}) if isinstance(value, dict | None) else value for key, value in raw.items()}
    for override in overrides or []:
        key, sign, text = override.partition("=")
        parts = key.strip().split(".")
        if not sign or len(parts) != 2 or not all(parts):
            raise InputError(f"override {override!r} is not of the form section.name=value, as in train.lr=3e-4")
        section = merged.setdefault(parts[0], {})
        if not isinstance(section, dict):
            raise InputError(f"override {override!r}: {parts[0]} is not a section in {source}")
        try:
            section[parts[1]] = _scalar(text)
        except yaml.YAMLError:
            raise InputError(f"override {override!r}: the value is not YAML") from None
    try:
        return Config.model_validate(merged)
    except ValidationError as error:
        raise InputError(f"{source}: {_explain(error)}") from None


def _scalar(text: str) -> Any:
    value = yaml.safe_load(text)
    if isinstance(value, str):  # YAML 1.1 reads 3e-4 as text
        try:
            return float(value) if any(c.isdigit() for c in value) else value
        except ValueError:
            return value
    return value


def _explain(error: ValidationError) -> str:
    parts = []
    for item in error.errors():
        place = ".".join(
            str(part) for part in item["loc"] if not str(part).startswith(("list[", "literal[", "constrained"))
        )
        if item["type"] == "extra_forbidden":
            parts.append(f"unknown key {place}{_suggest(item['loc'])}")
        elif item["type"] == "missing":
            parts.append(f"{place} is missing")
        elif item["type"] == "model_type":
            parts.append(
                f"{place} must be a section of settings, as in {place}: {{name: value}}, got {item['input']!r}"
            )
        else:
            got = item.get("input")
            shown = "" if isinstance(got, dict) else f", got {got!r}"
            message = item["msg"].removeprefix("Value error, ")
            where = f"{place}: " if place else ""  # what several sections together say has no place
            parts.append(f"{where}{message}" + ("" if "got" in message else shown))
    return "; ".join(dict.fromkeys(parts))


def _suggest(location: tuple[int | str, ...]) -> str:
    import difflib

    names: list[str]
    if len(location) == 1:
        names = list(Config.model_fields)
    else:
        section = Config.model_fields.get(str(location[0]))
        annotation = section.annotation if section is not None else None
        names = list(getattr(annotation, "model_fields", {}))
    close = difflib.get_close_matches(str(location[-1]), names, n=1)
    return f" (did you mean {close[0]}?)" if close else f" (known: {', '.join(names)})"
