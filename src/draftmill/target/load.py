"""Loading targets: any Hugging Face causal LM from a local folder or the hub, once a host, cut or whole.

Owns how a name becomes a `Target`, and how one that was read becomes a replica on each target device. Turns every way
in which loading fails for the user's input into one clear line.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
)

from draftmill.config import TargetConfig
from draftmill.errors import InputError
from draftmill.names import is_missing_folder
from draftmill.target.float8 import check_float8, quantize_layers
from draftmill.target.model import Target
from draftmill.target.spread import connect, parts_of, spread

DTYPES: dict[str, torch.dtype | str] = {
    "auto": "auto",
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}


def load_target(
    model: str,
    *,
    device: torch.device | str | Sequence[torch.device | str] = "cpu",
    dtype: str = "bfloat16",
    revision: str | None = None,
    trust_remote_code: bool = False,
    last_layer: int | None = None,
    with_tokenizer: bool = True,
) -> Target:
    """Load a target onto one device, or spread it over several.

    model: local folder or hub id. dtype: a key of DTYPES; a quantized checkpoint keeps its own. last_layer: cut after
    this 0-based layer; None keeps all.
    Raises InputError where the model is missing, is no causal LM, holds code that may not run, or is quantized in a way
    whose package is not installed.
    """
    names = [device] if isinstance(device, str | torch.device) else list(device)
    source = TargetSource(model, dtype, revision, trust_remote_code)
    first = source.read([torch.device(name) for name in names])
    target = source.place(first, [torch.device(name) for name in names], last_layer, move=True)
    if with_tokenizer:
        target.tokenizer = load_tokenizer(model, revision=revision, trust_remote_code=trust_remote_code)
    return target


@dataclass(frozen=True)
class TargetSource:
    """Where a target's weights come from, and in which type they are wanted."""

    model: str
    dtype: str = "bfloat16"
    revision: str | None = None
    trust_remote_code: bool = False
    quantize: str | None = None
    """float8: the layers are put into it on their devices."""

    @classmethod
    def of(cls, settings: TargetConfig) -> TargetSource:
        """The one that a run's configuration names."""
        return cls(
            settings.model, settings.dtype, settings.revision, settings.trust_remote_code, quantize=settings.quantize
        )

    def config(self) -> Any:
        """The target's Hugging Face configuration. Raises InputError."""
        return load_config(self.model, revision=self.revision, trust_remote_code=self.trust_remote_code)

    def read(self, devices: Sequence[torch.device]) -> Target:
        """Read the whole target: onto the host, or where it is quantized onto the devices that it is for.

        Raises InputError.
        """
        config = self.config()
        check_quantize(self.model, config, self.quantize, devices)
        if not is_quantized(config):
            return Target(self._load(config, dtype=DTYPES[self.dtype]))
        return self._read_quantized(config, devices)

    def place(
        self, first: Target, devices: Sequence[torch.device], last_layer: int | None = None, *, move: bool = False
    ) -> Target:
        """A replica on these devices, cut after `last_layer`, of the target that was read first.

        move: the first one itself may become the replica. A quantized target can't be copied: unless it may be moved it
        is read anew. Raises InputError.
        """
        if is_quantized(first.config) and not move:
            first = self._read_quantized(self.config(), devices)
        if last_layer is not None:
            first.cut_after(last_layer)
        if is_quantized(first.config):
            return first
        try:
            placed = self._copy(first, devices, move)
            if self.quantize is not None:
                quantize_layers(placed)
        except torch.OutOfMemoryError:
            raise self._too_large(devices) from None
        return placed

    @staticmethod
    def _copy(first: Target, devices: Sequence[torch.device], move: bool) -> Target:
        if len(devices) > 1:
            return spread(first, devices)
        if not move:
            return first.replica(devices[0])
        first.model.to(devices[0])
        return first

    def _read_quantized(self, config: Any, devices: Sequence[torch.device]) -> Target:
        if importlib.util.find_spec("accelerate") is None:
            raise InputError(
                f"target {self.model!r} is quantized, which transformers loads with the package accelerate; "
                "pip install accelerate"
            )
        if len(devices) == 1:
            return Target(self._load(config, devices, dtype="auto", device_map={"": devices[0]}))
        parts = parts_of(empty_target(self.model, config, self.trust_remote_code), devices)
        loaded = self._load(config, devices, dtype="auto", device_map=parts)
        from accelerate.hooks import remove_hook_from_module

        target = Target(remove_hook_from_module(loaded, recurse=True))
        connect(target, parts)
        return target

    def _load(self, config: Any, devices: Sequence[torch.device] = (), **options: Any) -> Any:
        """The model, every one of its weights read: transformers would draw missing ones at random."""
        try:
            model, found = _explained(
                self.model,
                lambda: _auto_class(config).from_pretrained(
                    self.model,
                    config=config,
                    revision=self.revision,
                    trust_remote_code=self.trust_remote_code,
                    output_loading_info=True,
                    ignore_mismatched_sizes=True,
                    use_safetensors=True,  # no pickle is read
                    **options,
                ),
            )
        except torch.OutOfMemoryError:
            raise self._too_large(devices) from None
        wrong = sorted({*found["missing_keys"], *(key for key, *_ in found["mismatched_keys"])})
        if wrong:
            shown = ", ".join(wrong[:3]) + (", ..." if len(wrong) > 3 else "")
            raise InputError(
                f"target {self.model!r} lacks {len(wrong)} of the weights that {type(model).__name__} needs, or has "
                f"them in another shape: {shown}; give a complete checkpoint"
            )
        return model

    def _too_large(self, devices: Sequence[torch.device]) -> InputError:
        return InputError(
            f"target {self.model!r} does not fit into the memory of {', '.join(str(device) for device in devices)}; "
            "spread it over several devices, as in target.devices: [[cuda:0, cuda:1]]"
        )


def is_quantized(config: Any) -> bool:
    """Whether a checkpoint of this configuration holds quantized weights."""
    texts = (config, config.get_text_config())
    return any(getattr(each, "quantization_config", None) for each in texts)


def check_quantize(model: str, config: Any, quantize: str | None, devices: Sequence[torch.device]) -> None:
    """Raise InputError where a target of this configuration can't be quantized so, or not for these devices."""
    if quantize is None:
        return
    if is_quantized(config):
        raise InputError(f"target {model!r} is quantized as it is; leave target.quantize: {quantize} out")
    check_float8(devices)


def empty_target(model: str, config: Any, trust_remote_code: bool = False) -> Target:
    """The target of this configuration without any weights: its parts and their sizes. Raises InputError."""

    def build() -> Any:
        return _auto_class(config).from_config(config, trust_remote_code=trust_remote_code)

    with torch.device("meta"):
        return Target(_explained(model, build))


def _auto_class(config: Any) -> Any:
    """The transformers class that loads a model of this configuration with its LM head."""
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return AutoModelForImageTextToText
    return AutoModelForCausalLM


def load_config(model: str, *, revision: str | None = None, trust_remote_code: bool = False) -> Any:
    """The target's Hugging Face configuration. Raises InputError."""
    if is_missing_folder(model):
        raise InputError(f"no folder at {model}; give a local folder with a Hugging Face model, or a hub id")
    return _explained(
        model, lambda: AutoConfig.from_pretrained(model, revision=revision, trust_remote_code=trust_remote_code)
    )


def load_tokenizer(model: str, *, revision: str | None = None, trust_remote_code: bool = False) -> Any:
    """The target's tokenizer. Raises InputError."""
    return _explained(
        model, lambda: AutoTokenizer.from_pretrained(model, revision=revision, trust_remote_code=trust_remote_code)
    )


def _explained(model: str, load: Any) -> Any:
    try:
        return load()
    except torch.OutOfMemoryError:
        raise
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise InputError(
            f"target {model!r} can't be loaded: {reason.rstrip('.')} (wanted: a local folder or hub id of a Hugging "
            "Face causal LM)"
        ) from error
