"""`draftmill evaluate`: find the drafter, its target and the prompts; evaluate; show, record.

Owns how a command line becomes an evaluation. Never measures and never defines a figure.
"""

from __future__ import annotations

import json
import os
import signal
import threading
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from rich.console import Console

from draftmill.checkpoint.card import CARD_FILE, record_evaluation
from draftmill.checkpoint.source import FACTS_FILE, Source, read_published
from draftmill.config import DEVICE_NAME, cuda_index
from draftmill.drafter.network import Drafter
from draftmill.drafter.rope import Rotary
from draftmill.drafter.shape import DrafterShape
from draftmill.errors import InputError
from draftmill.evaluate import report
from draftmill.evaluate.checks import check_pair
from draftmill.evaluate.progress import DecodingProgress
from draftmill.evaluate.prompts import Prompt, heldout_prompts, read_prompts
from draftmill.evaluate.run import Evaluation, checked_counts, evaluate
from draftmill.evaluate.suites import load_suite
from draftmill.target.generate_sampling import Sampling
from draftmill.target.load import DTYPES, load_config, load_target
from draftmill.target.model import Target


@dataclass(frozen=True)
class Request:
    """What the user asked for; each field is the option of that name."""

    source: str
    target: str | None = None
    suites: tuple[str, ...] = ()
    prompts: str | None = None
    limit: int | None = None
    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    draft_tokens: str | None = None
    thinking: str = "auto"
    dtype: str = "auto"
    device: str = "auto"
    graphs: str = "auto"
    batch_size: int = 1
    seed: int = 0
    trust_remote_code: bool = False
    record: bool = True
    plot: str | None = None
    as_json: bool = False


def run(request: Request) -> int:
    """Evaluate, print the report on standard output, and keep it with the drafter; returns the exit code.

    Ended early by a signal it reports what it has, and returns 128 and the signal's number. Raises InputError, after
    the same report where a chat template refused a turn in the middle.
    """
    console = Console(highlight=False)
    sampling = Sampling(request.max_new_tokens, request.temperature, request.top_p, request.top_k, seed=request.seed)
    draft_tokens = parse_counts(request.draft_tokens)
    if request.limit is not None and request.limit < 1:
        raise InputError(f"--limit must be at least 1, got {request.limit}")
    if request.batch_size != 1:
        raise InputError(f"--batch-size must be 1, got {request.batch_size}: decoding is one sequence at a time")
    if request.plot is not None:
        report.check_plot(request.plot)
    thinking = _choice("--thinking", request.thinking, ("auto", "on", "off"))
    graphs = _choice("--graphs", request.graphs, ("auto", "on", "off"))
    device = pick_device(request.device)
    dtype = pick_dtype(request.dtype, device)
    source = read_published(request.source)
    draft_tokens = list(checked_counts(draft_tokens, source.shape.block_size - 1))  # before gigabytes are read
    prompts = collect_prompts(request, source)
    console.print(f"drafter: {source.folder}" + (f" ({source.note})" if source.note else ""))
    target = _load_target(request, source, device, dtype)
    drafter = build_drafter(source.shape, source.tensors, target)
    console.print(
        f"target: {_target_name(request, source)}, {drafter.fc.weight.dtype} on {device}".replace("torch.", "")
    )
    console.print(f"prompts: {len(prompts)}, answers of at most {sampling.max_new_tokens} tokens")
    found, ended_by = _with_progress(console, drafter, target, prompts, sampling, draft_tokens, thinking, graphs)
    about = {
        "drafter": str(source.folder),
        "step": source.facts.get("step"),
        "target": _target_name(request, source),
        "dtype": str(drafter.fc.weight.dtype).removeprefix("torch."),
        "device": _device_name(device),
        "prompts": len(prompts),
        **_versions(),
    }
    console.print(report.tables(found))
    if request.record and found.missing:
        console.print("not recorded: it was ended before its time")
    elif request.record:
        console.print(keep(source, report.for_card(found, about)))
    try:
        if request.plot is not None:
            report.plot(found, request.plot)
            console.print(f"plot: {request.plot}")
    finally:  # whatever becomes of the plot
        if request.as_json:
            print(json.dumps(report.to_json(found, about)))
    if found.why_ended is not None:
        raise InputError(found.why_ended)
    return 128 + ended_by if found.missing else 0


def build_drafter(shape: DrafterShape, tensors: dict[str, torch.Tensor], target: Target) -> Drafter:
    """The network with these weights, on the target's device and in the type of its embedding."""
    embedding = target.model.get_input_embeddings().weight
    with torch.device("meta"):  # no initial weights are drawn only to be replaced
        drafter = Drafter(shape)
    moved = {name: tensor.to(embedding.device, embedding.dtype) for name, tensor in tensors.items()}
    drafter.load_state_dict(moved, assign=True)
    drafter.rotary = Rotary(shape).to(embedding.device)  # angles stay in float32 whatever the weights are
    return drafter.eval().requires_grad_(False)


def collect_prompts(request: Request, source: Source) -> list[Prompt]:
    """The prompts asked for: a file, suites, or else the samples that the drafter's run held out. Raises InputError."""
    if request.prompts is not None and request.suites:
        raise InputError("give --suite or --prompts, not both")
    if request.prompts is not None:
        prompts = read_prompts(request.prompts)
        return prompts if request.limit is None else prompts[: request.limit]
    if request.suites:
        return [
            prompt for name in request.suites for prompt in load_suite(name, limit=request.limit, seed=request.seed)
        ]
    config = source.facts.get("config") or {}
    data = config.get("data") or {}
    if not data.get("path") or not data.get("heldout"):
        raise InputError(f"{request.source} names no held-out samples to evaluate on; give --suite or --prompts")
    return heldout_prompts(data["path"], data["heldout"], (config.get("run") or {}).get("seed", 0), request.limit)


def parse_counts(text: str | None) -> list[int] | None:
    """Numbers of drafted tokens from "1,2,4"; None for None. Raises InputError."""
    if text is None:
        return None
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise InputError(f"--draft-tokens must be numbers such as 1,2,4,8, got {text!r}") from None


def pick_device(name: str) -> torch.device:
    """The device of that name; "auto" is a GPU where there is one. Raises InputError."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name != "cuda" and not DEVICE_NAME.fullmatch(name):
        raise InputError(f"--device must be auto, cpu, cuda or cuda:N, got {name!r}")
    index = cuda_index(name)
    if index is not None and index >= torch.cuda.device_count():
        raise InputError(f"--device {name}: this machine has {torch.cuda.device_count()} CUDA devices")
    return torch.device(name)


def pick_dtype(name: str, device: torch.device) -> str:
    """A type that targets load in. "auto": float32 on a CPU, where outputs are then exactly equal, and what the
    target's checkpoint says on a GPU, as it will be served. Raises InputError."""
    if name not in DTYPES:
        raise InputError(f"--dtype must be one of {', '.join(DTYPES)}, got {name!r}")
    return "float32" if name == "auto" and device.type == "cpu" else name


def keep(source: Source, evaluation: dict[str, Any]) -> str:
    """Keep an evaluation with its drafter where there is a place for it; a line for the user."""
    if source.layout != "draftmill" and not (source.folder / FACTS_FILE).exists():
        return f"not recorded: {source.folder} was not written by draftmill"
    try:
        record_evaluation(source.folder, source.shape, source.layout, evaluation)
    except (OSError, InputError) as error:
        return f"not recorded with {source.folder}: {error}"
    if source.layout != "draftmill":
        return f"recorded in {source.folder / CARD_FILE}"
    return f"recorded with {source.folder}; export puts it in the model card"


def _load_target(request: Request, source: Source, device: torch.device, dtype: str) -> Target:
    """The whole target; its configuration is asked first whether the drafter is for it, before gigabytes are read."""
    name = _target_name(request, source)
    config = (source.facts.get("config") or {}).get("target") or {}
    own = request.target is None
    revision = (source.facts.get("target") or {}).get("revision") if own else None
    trust = request.trust_remote_code or bool(own and config.get("trust_remote_code"))
    check_pair(load_config(name, revision=revision, trust_remote_code=trust), source.shape)
    return load_target(name, device=device, dtype=dtype, revision=revision, trust_remote_code=trust)


def _target_name(request: Request, source: Source) -> str:
    name = request.target or (source.facts.get("target") or {}).get("model")
    if not name:
        raise InputError(f"{request.source} does not name its target; give --target with a folder or hub id")
    return str(name)


def _with_progress(
    console: Console,
    drafter: Drafter,
    target: Target,
    prompts: list[Prompt],
    sampling: Sampling,
    draft_tokens: list[int] | None,
    thinking: Any,
    graphs: Any,
) -> tuple[Evaluation, int]:
    """What was found, and the number of the signal that ended it early, or 0."""
    with DecodingProgress() as shown, _Ending() as ending:
        found = evaluate(
            drafter,
            target,
            prompts,
            sampling=sampling,
            draft_tokens=draft_tokens,
            thinking=thinking,
            graphs=graphs,
            progress=shown.trial,
            ended=lambda: ending.number != 0,
        )
    return found, ending.number


class _Ending:
    """Ctrl-C and SIGTERM: the first time the answer under way is the last one, the second time all ends at once."""

    def __init__(self) -> None:
        self.number = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> _Ending:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._ask) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.number:
            raise KeyboardInterrupt
        self.number = number
        told = b"ending after this answer; once more to end at once, without a report\n"
        os.write(2, told)  # to standard error; a print may be under way


def _choice(option: str, value: str, allowed: tuple[str, ...]) -> Any:
    if value not in allowed:
        raise InputError(f"{option} must be one of {', '.join(allowed)}, got {value!r}")
    return value


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"cpu, {threads} thread{'s' if threads > 1 else ''}"


def _versions() -> dict[str, str]:
    import transformers

    return {"torch": torch.__version__, "transformers": transformers.__version__}
