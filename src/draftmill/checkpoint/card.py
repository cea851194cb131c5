"""The model card of an exported drafter: what it is for, how it was made, how well it drafts, how to serve it.

Owns the text of README.md and the record of evaluations beside a drafter. Measures nothing.

Serving options: sgl-project/sglang docs, "Speculative Decoding"; docs.vllm.ai, "Speculative Decoding" and speculators'
"Serve in vLLM"; the cards of z-lab's own drafters.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

from draftmill.checkpoint.durable import read_json, replace_json
from draftmill.checkpoint.source import EVALUATION_FILE, FACTS_FILE
from draftmill.drafter.shape import DrafterShape

CARD_FILE = "README.md"

_RECIPE = {
    "train": (
        "epochs",
        "max_steps",
        "lr",
        "schedule",
        "warmup_share",
        "decay_share",
        "optimizer",
        "betas",
        "weight_decay",
        "clip",
        "ema_decay",
        "loss",
        "slot_weights",
        "d_pace_alpha",
        "labels",
        "gamma",
        "num_anchors",
        "anchor_draws",
        "short_blocks",
        "accumulate",
    ),
    "data": ("max_length", "token_budget", "batching"),
    "drafter": ("init", "from_checkpoint"),
    "run": ("seed",),
}

_MUON = ("muon_lr", "muon_momentum", "muon_nesterov", "muon_ns_steps", "muon_adjust_lr_fn")
"""Settings of train that are of no effect, and not shown, with another optimizer."""
_ONLY_WITH = {"decay_share": ("schedule", "warmup-stable-decay"), "d_pace_alpha": ("slot_weights", "d_pace")}
"""Settings of train that are of no effect, and not shown, unless another one is so."""

_ONLY_ABOVE_0 = ("short_blocks",)
"""Settings of train that are not shown at 0."""

_GREEDY = ("temperature", "max_new_tokens")
"""Settings of greedy decoding that are of effect."""

WEIGHTS = {"ema": "the moving average", "raw": "those of the last step, not the moving average"}
"""Which of a checkpoint's weights, for a reader."""


def card(shape: DrafterShape, facts: dict[str, Any], layout: str, name: str) -> str:
    """README.md of a drafter exported in a layout as a folder called `name`; facts as in `source.Source`."""
    target = (facts.get("target") or {}).get("model")
    parts = [
        _front_matter(target),
        f"# {name}\n",
        f"A DFlash drafter (block diffusion, [arXiv 2602.06036](https://arxiv.org/abs/2602.06036)) for "
        f"{_code(target)}. It proposes up to {shape.block_size - 1} tokens at once, which the target verifies; "
        "the target's output stays what it is.\n",
        _made_of(shape, facts, layout),
        _acceptance(facts),
        _serving(shape, facts, layout, target or "TARGET", name),
        _recipe(facts),
    ]
    return "\n".join(part for part in parts if part)


def notes(shape: DrafterShape, layout: str) -> list[str]:
    """What a user must know of where this drafter can be served; one sentence each."""
    found = []
    if shape.rope.get("partial_rotary_factor", 1.0) != 1.0:
        found.append(
            f"Only the first {shape.rope['partial_rotary_factor']:g} of each head is rotated "
            "(`partial_rotary_factor`). vLLM does so; SGLang's DFlash model and the `dflash` package 0.1.0 rotate the "
            "whole head and would draft badly."
        )
    if shape.sliding_layers and len(shape.sliding_layers) < shape.num_layers:
        found.append(
            "Some layers slide and some do not: vLLM serves such a mix with its V2 model runner only "
            "(`VLLM_USE_V2_MODEL_RUNNER=1`)."
        )
    if shape.embedding_scale != 1.0:
        found.append(
            f"The target scales its embeddings by {shape.embedding_scale:g}: the engine must apply "
            "`dflash_config.input_embedding_scale`."
        )
    if shape.logit_scale != 1.0 or shape.logit_softcap is not None:
        found.append(
            "The target scales or bounds its logits. Greedy drafts do not depend on it; sampled ones are best where "
            "the engine applies `output_multiplier` and `final_logit_softcapping`."
        )
    if layout == "speculators":
        found.append("SGLang does not read this layout; `draftmill export --layout zlab` writes the one it reads.")
    return found


def serving_commands(layout: str, target: str, drafter: str, draft_tokens: int) -> dict[str, str]:
    """Shell commands that serve a target with this drafter, by engine. `draft_tokens`: drafted ones of a block."""
    speculative = json.dumps({"method": "dflash", "model": drafter, "num_speculative_tokens": draft_tokens})
    commands = {"vLLM": f"vllm serve {shlex.quote(target)} \\\n  --speculative-config {shlex.quote(speculative)}"}
    if layout == "zlab":
        commands["SGLang"] = (
            f"python -m sglang.launch_server \\\n  --model-path {shlex.quote(target)} \\\n"
            f"  --speculative-algorithm DFLASH \\\n  --speculative-draft-model-path {shlex.quote(drafter)} \\\n"
            f"  --speculative-num-draft-tokens {draft_tokens + 1}"
        )
    return dict(sorted(commands.items()))


def record_evaluation(folder: Path, shape: DrafterShape, layout: str, evaluation: dict[str, Any]) -> None:
    """Keep an evaluation with a drafter: in evaluation.json of a checkpoint, or in the card of an exported folder.

    evaluation  {"rows": [{column: value}, ...], "best_draft_tokens": n or None}; the columns are the caller's words,
                as "suite", "accept_length (mean over responses)", "speed-up", and the first names the prompts. A row
                may hold "answers", their number; besides there may be "draft_tokens", the numbers compared, "worth_it",
                whether the best was faster than plain decoding, and "about": target, device, dtype, sampling.
    Rows of earlier evaluations are kept under "earlier", a list of evaluations, newest first, unless this one has a row
    that measures the same.
    Raises OSError.
    """
    if layout == "draftmill":
        path = folder / EVALUATION_FILE
        replace_json(path, _with_earlier(evaluation, read_json(path) if path.exists() else None))
        return
    path = folder / FACTS_FILE
    record = read_json(path)
    record["facts"]["evaluation"] = _with_earlier(evaluation, record["facts"].get("evaluation"))
    replace_json(path, record)
    (folder / CARD_FILE).write_text(card(shape, record["facts"], layout, record["name"]), encoding="utf-8")


def _with_earlier(newest: dict[str, Any], before: dict[str, Any] | None) -> dict[str, Any]:
    """The newest evaluation with those of a record that it leaves something of: rows, or the best count."""
    replaced = {_measures(newest, row) for row in newest.get("rows") or []}
    compared = _compares(newest)
    kept = []
    for one in _evaluations(before):
        rows = [row for row in one.get("rows") or [] if _measures(one, row) not in replaced]
        if rows or (_compares(one) and not compared):
            kept.append({**{key: value for key, value in one.items() if key != "earlier"}, "rows": rows})
        compared = compared or _compares(one)
    return {**newest, "earlier": kept} if kept else newest


def _evaluations(record: dict[str, Any] | None) -> list[dict[str, Any]]:
    """All evaluations of a record, newest first."""
    return [record, *(record.get("earlier") or [])] if record else []


def _compares(evaluation: dict[str, Any]) -> bool:
    """Whether an evaluation found the best of several numbers of drafted tokens, as one that names none did."""
    counts = evaluation.get("draft_tokens")
    return evaluation.get("best_draft_tokens") is not None and (counts is None or len(counts) > 1)


def _measures(evaluation: dict[str, Any], row: dict[str, Any]) -> tuple[str, ...]:
    """What a row is a measurement of: its prompts, by name and number of answers, the target and what it computed on,
    and the sampling as far as it is of effect."""
    about = evaluation.get("about") or {}
    sampling = about.get("sampling") or {}
    of_effect = ("temperature", "top_p", "top_k", "max_new_tokens") if sampling.get("temperature") else _GREEDY
    label = next(iter(row.values()), None)
    where = (about.get("target"), about.get("dtype"), about.get("device"))
    return tuple(map(str, (label, row.get("answers"), *where, *(sampling.get(key) for key in of_effect))))


def _front_matter(target: str | None) -> str:
    lines = ["---", "library_name: transformers", "pipeline_tag: text-generation"]
    if target and target.count("/") == 1 and not target.startswith((".", "/", "~")):
        lines.append(f"base_model: {target}")
    tags = ["dflash", "speculative-decoding", "block-diffusion", "draft-model", "draftmill"]
    return "\n".join([*lines, "tags:", *(f"- {tag}" for tag in tags), "---\n"])


def _made_of(shape: DrafterShape, facts: dict[str, Any], layout: str) -> str:
    target = facts.get("target") or {}
    rows = {
        "target": _code(target.get("model")),
        "target revision": _code(target.get("revision")),
        "data fingerprint": _code(facts.get("data_fingerprint")),
        "training step": facts.get("step"),
        **({"weights": WEIGHTS[facts["weights"]]} if "weights" in facts else {}),
        "training length (tokens)": facts.get("training_length"),
        "position limit (the target's)": shape.max_position_embeddings,
        "layers": shape.num_layers,
        "block size": shape.block_size,
        "mask token id": shape.mask_token_id,
        "tapped target layers (0-based)": ", ".join(map(str, shape.target_layer_ids)),
        "sliding layers": ", ".join(map(str, shape.sliding_layers)) or "none",
        "layout": layout,
    }
    return "\n".join(["| | |", "|---|---|", *(f"| {key} | {_shown(value)} |" for key, value in rows.items())]) + "\n"


def _acceptance(facts: dict[str, Any]) -> str:
    lines = ["## Acceptance\n"]
    if facts.get("accept_length") is not None:
        lines.append(
            f"Held-out, teacher-forced, while training: acceptance length {facts['accept_length']:.3f} tokens a block "
            "(the target's own token counted).\n"
        )
    if by_slot := facts.get("accept_by_slot"):
        lines += [
            "| slot | " + " | ".join(str(slot) for slot in range(1, len(by_slot) + 1)) + " |",
            "|---" * (len(by_slot) + 1) + "|",
            "| accepted | " + " | ".join(f"{share:.3f}" for share in by_slot) + " |\n",
        ]
    measured: dict[str, list[dict[str, Any]]] = {}  # evaluations that were made alike share a table
    for one in _evaluations(facts.get("evaluation")):
        measured.setdefault(_measured(one, (facts.get("target") or {}).get("model")), []).extend(one.get("rows") or [])
    for how, rows in measured.items():
        if not rows:
            continue
        columns = list(dict.fromkeys(column for row in rows for column in row))
        lines += [
            f"Real speculative decoding{how}:\n",
            f"| {' | '.join(columns)} |",
            "|---" * len(columns) + "|",
        ]
        lines += [f"| {' | '.join(_shown(row.get(column)) for column in columns)} |" for row in rows]
        lines.append("")
    return "\n".join(lines) if len(lines) > 1 else "## Acceptance\n\nNot measured yet: `draftmill evaluate` does.\n"


def _measured(evaluation: dict[str, Any], target: str | None) -> str:
    """How an evaluation decoded and on what, as far as its record says; the target where it is another."""
    about = evaluation.get("about") or {}
    sampling = about.get("sampling") or {}
    words = [str(about[key]) for key in ("device", "dtype") if about.get(key)]
    if about.get("target") not in (None, target):
        words.insert(0, f"target {_code(about['target'])}")
    if temperature := sampling.get("temperature"):
        words.append(f"temperature {temperature:g}, top-p {sampling['top_p']:g}, top-k {sampling['top_k'] or 'all'}")
    elif sampling:
        words.append("greedy")
    if sampling:
        words.append(f"answers of at most {sampling['max_new_tokens']} tokens")
    return f" ({'; '.join(words)})" if words else ""


def _serving(shape: DrafterShape, facts: dict[str, Any], layout: str, target: str, name: str) -> str:
    evaluations = _evaluations(facts.get("evaluation"))
    compared = next((one for one in evaluations if _compares(one)), None)
    best = compared["best_draft_tokens"] if compared is not None else None
    deciding = compared or next(iter(evaluations), {})
    lines = ["## Serving\n"]
    if deciding.get("worth_it") is False:
        closest = f"; {best} came closest" if best is not None else ""
        lines.append(
            f"No number of drafted tokens that was tried was faster than plain decoding when measured{closest}.\n"
        )
    elif best is not None:
        lines.append(f"{best} drafted tokens were the fastest when measured.\n")
    for engine, command in serving_commands(layout, target, name, best or shape.block_size - 1).items():
        lines.append(f"{engine}:\n\n```bash\n{command}\n```\n")
    if layout == "speculators":
        lines.append(f"vLLM also finds the target by itself: `vllm serve {shlex.quote(name)}`.\n")
    return "\n".join(lines + [f"- {note}" for note in notes(shape, layout)]) + "\n"


def _recipe(facts: dict[str, Any]) -> str:
    config = facts.get("config") or {}
    train = config.get("train") or {}
    idle = {key for key, (other, wanted) in _ONLY_WITH.items() if train.get(other) != wanted}
    idle |= {key for key in _ONLY_ABOVE_0 if not train.get(key)}
    keys_of_train = _RECIPE["train"] + (_MUON if train.get("optimizer") == "muon" else ())
    shown = {**_RECIPE, "train": tuple(key for key in keys_of_train if key not in idle)}
    found = {
        f"{section}.{key}": config[section][key]
        for section, keys in shown.items()
        for key in keys
        if (config.get(section) or {}).get(key) is not None
    }
    if not found:
        return ""
    return "\n".join(["## Recipe\n", "```yaml", *(f"{key}: {value}" for key, value in found.items()), "```\n"])


def _code(value: Any) -> str | None:
    return f"`{value}`" if value else None


def _shown(value: Any) -> str:
    return "unknown" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value)
