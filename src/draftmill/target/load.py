"""Loading targets: any Hugging Face causal LM from a local folder or the hub, once a host, cut or whole.

Owns how a name becomes a `Target`. Turns every way in which loading fails for the user's input into one clear line.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from draftmill.errors import InputError
from draftmill.target.model import Target

DTYPES: dict[str, torch.dtype | str] = {
    "auto": "auto",
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}


def load_target(
    model: str,
    *,
    device: torch.device | str = "cpu",
    dtype: str = "bfloat16",
    revision: str | None = None,
    trust_remote_code: bool = False,
    last_layer: int | None = None,
    with_tokenizer: bool = True,
) -> Target:
    """Load a target onto one device.

    model: local folder or hub id. dtype: a key of DTYPES. last_layer: cut after this 0-based layer; None keeps all.
    Raises InputError where the model is missing, is no causal LM, or holds code that may not run.
    """
    options: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
    config = load_config(model, **options)
    loaded = _explained(
        model, lambda: AutoModelForCausalLM.from_pretrained(model, config=config, dtype=DTYPES[dtype], **options)
    )
    tokenizer = load_tokenizer(model, **options) if with_tokenizer else None
    target = Target(loaded, tokenizer)
    if last_layer is not None:
        target.cut_after(last_layer)
    target.model.to(device)
    return target


def load_config(model: str, *, revision: str | None = None, trust_remote_code: bool = False) -> Any:
    """The target's Hugging Face configuration. Raises InputError."""
    if looks_local(model) and not Path(model).is_dir():
        raise InputError(f"no folder at {model}; give a local folder with a Hugging Face model, or a hub id")
    return _explained(
        model, lambda: AutoConfig.from_pretrained(model, revision=revision, trust_remote_code=trust_remote_code)
    )


def load_tokenizer(model: str, *, revision: str | None = None, trust_remote_code: bool = False) -> Any:
    """The target's tokenizer. Raises InputError."""
    return _explained(
        model, lambda: AutoTokenizer.from_pretrained(model, revision=revision, trust_remote_code=trust_remote_code)
    )


def looks_local(model: str) -> bool:
    """Whether a name can only be a path: hub ids have at most one slash and start with neither a dot nor a slash."""
    return model.startswith((".", "/", "~")) or model.count("/") > 1 or Path(model).exists()


def _explained(model: str, load: Any) -> Any:
    try:
        return load()
    except (OSError, ValueError, KeyError, ImportError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise InputError(
            f"target {model!r} can't be loaded: {reason} (wanted: a local folder or hub id of a Hugging Face causal LM)"
        ) from error
