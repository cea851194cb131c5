"""What an evaluation says: rows of figures, the table people read, the JSON that programs read, a plot.

Owns the figures' definitions and their presentation. Measures nothing.

Figures of a row, over its answers (an answer is one turn of one prompt):
    tau, response mean   tokens a step, averaged over an answer's steps, then over answers
    tau, pooled          tokens a step over all steps together
    accept by slot       chance that a drafted token is kept, jointly with those before it (acceptance.py)
    histogram            steps by the number of drafted tokens kept
    tokens/s             tokens of all steps by their time; the prompt's first token belongs to the prefill
    speed-up             time per token of plain decoding by that of speculative decoding, and the interval that holds
                         95 % of its values when answers are drawn anew with replacement
    identical            answers that equal plain decoding token for token; greedy only
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.box import SIMPLE
from rich.console import Group
from rich.table import Table
from rich.text import Text

from draftmill.errors import InputError
from draftmill.evaluate.acceptance import (
    accept_by_slot,
    accept_given_previous,
    histogram,
    step_counts,
    tau_pooled,
    tau_response_mean,
)
from draftmill.evaluate.decode import Response
from draftmill.evaluate.run import Evaluation, Trial

_RESAMPLES = 2000
_INTERVAL = (2.5, 97.5)


@dataclass(frozen=True)
class Row:
    """The figures of a set of answers at one number of drafted tokens; None where there is nothing to measure."""

    suite: str
    category: str
    thinking: bool | None
    draft_tokens: int
    answers: int
    tokens: int
    tau_response_mean: float | None
    tau_pooled: float | None
    accept_by_slot: list[float]
    accept_given_previous: list[float]
    histogram: list[int]
    plain_tokens_per_s: float | None
    speculative_tokens_per_s: float | None
    speedup: float | None
    speedup_low: float | None
    speedup_high: float | None
    speedup_least: float | None
    speedup_median: float | None
    speedup_most: float | None
    identical: int | None


def row(trials: Sequence[Trial], num_drafts: int, greedy: bool, label: tuple[str, str, bool | None]) -> Row:
    """The figures of these answers. `label`: suite, category and thinking, as the row is named."""
    plain = [trial.plain for trial in trials]
    drafted = [trial.drafted[num_drafts] for trial in trials]
    steps = [response.steps for response in drafted]
    every = [step for response in drafted for step in response.steps]
    counts = step_counts(every, num_drafts)
    single = [
        value for pair in zip(plain, drafted, strict=True) if (value := _speedup([pair[0]], [pair[1]])) is not None
    ]
    low, high = _interval(plain, drafted)
    same = sum(first.tokens == second.tokens for first, second in zip(plain, drafted, strict=True))
    return Row(
        *label,
        draft_tokens=num_drafts,
        answers=len(trials),
        tokens=sum(len(response.tokens) for response in drafted),
        tau_response_mean=tau_response_mean(steps),
        tau_pooled=tau_pooled(steps),
        accept_by_slot=accept_by_slot(counts).tolist(),
        accept_given_previous=accept_given_previous(counts).tolist(),
        histogram=histogram(every, num_drafts),
        plain_tokens_per_s=_rate(plain),
        speculative_tokens_per_s=_rate(drafted),
        speedup=_speedup(plain, drafted),
        speedup_low=low,
        speedup_high=high,
        speedup_least=min(single, default=None),
        speedup_median=float(np.median(single)) if single else None,
        speedup_most=max(single, default=None),
        identical=same if greedy else None,
    )


def overall(evaluation: Evaluation) -> list[Row]:
    """One row for each number of drafted tokens, over all answers."""
    greedy = evaluation.sampling.temperature == 0.0
    return [row(evaluation.trials, count, greedy, ("all", "all", None)) for count in evaluation.draft_tokens]


def by_group(evaluation: Evaluation, num_drafts: int) -> list[Row]:
    """Rows by suite and thinking, each followed by its categories where it has several."""
    greedy = evaluation.sampling.temperature == 0.0
    rows = []
    for suite, thinking in dict.fromkeys((trial.suite, trial.thinking) for trial in evaluation.trials):
        group = [trial for trial in evaluation.trials if (trial.suite, trial.thinking) == (suite, thinking)]
        rows.append(row(group, num_drafts, greedy, (suite, "all", thinking)))
        categories = list(dict.fromkeys(trial.category for trial in group))
        if len(categories) > 1:
            for category in categories:
                chosen = [trial for trial in group if trial.category == category]
                rows.append(row(chosen, num_drafts, greedy, (suite, category, thinking)))
    return rows


@dataclass(frozen=True)
class Sweep:
    """The rows over all answers, one for each number of drafted tokens, and what they say of the numbers."""

    rows: list[Row]

    @classmethod
    def of(cls, evaluation: Evaluation) -> Sweep:
        """Works the rows out; each has a bootstrap."""
        return cls(overall(evaluation))

    @property
    def best(self) -> int | None:
        """The number of drafted tokens with the most tokens/s; None where no step was taken."""
        rates = {found.draft_tokens: found.speculative_tokens_per_s for found in self.rows}
        measured = {count: rate for count, rate in rates.items() if rate is not None}
        return max(measured, key=lambda count: measured[count]) if measured else None

    @property
    def shown(self) -> Row:
        """The best number's row, the last one where there is none."""
        return next((found for found in self.rows if found.draft_tokens == self.best), self.rows[-1])

    @property
    def worth_it(self) -> bool | None:
        """Whether the best number was faster than plain decoding; None where no step was taken."""
        speedup = None if self.best is None else self.shown.speedup
        return None if speedup is None else speedup > 1.0


def to_json(evaluation: Evaluation, about: dict[str, Any]) -> dict[str, Any]:
    """Everything, JSON-able: rows over all answers and rows by group, for each number of drafted tokens.

    about  what was evaluated and where
    """
    sweep = Sweep.of(evaluation)
    return {
        **about,
        "block_size": evaluation.block_size,
        "draft_tokens": list(evaluation.draft_tokens),
        "best_draft_tokens": sweep.best,
        "worth_it": sweep.worth_it,
        "sampling": asdict(evaluation.sampling),
        "graphed": evaluation.graphed,
        "why_eager": evaluation.why_eager,
        "answers": len(evaluation.trials),
        "answers_missing": evaluation.missing,
        "why_ended": evaluation.why_ended,
        "follow_ups_left_out": evaluation.left_out,
        "overall": [asdict(found) for found in sweep.rows],
        "groups": [asdict(found) for count in evaluation.draft_tokens for found in by_group(evaluation, count)],
    }


def for_card(evaluation: Evaluation, about: dict[str, Any]) -> dict[str, Any]:
    """The record kept with a checkpoint or export, in the words that its model card shows."""
    sweep = Sweep.of(evaluation)
    rows = []
    for found in by_group(evaluation, sweep.shown.draft_tokens):
        rows.append(
            {
                "prompts": _label(found),
                "answers": found.answers,
                "drafted": found.draft_tokens,
                "tau (response mean)": found.tau_response_mean,
                "tau (pooled)": found.tau_pooled,
                "tokens/s plain": found.plain_tokens_per_s,
                "tokens/s drafted": found.speculative_tokens_per_s,
                "speed-up": found.speedup,
            }
        )
    return {
        "rows": rows,
        "draft_tokens": list(evaluation.draft_tokens),
        "best_draft_tokens": sweep.best,
        "worth_it": sweep.worth_it,
        "about": {**about, "sampling": asdict(evaluation.sampling)},
    }


def tables(evaluation: Evaluation) -> Group:
    """The report on a terminal."""
    sweep = Sweep.of(evaluation)
    shown = sweep.shown
    groups = by_group(evaluation, shown.draft_tokens)
    marked = sweep.best if sweep.worth_it else None
    counts = [f"{each.draft_tokens} drafted{' (best)' if each.draft_tokens == marked else ''}" for each in sweep.rows]
    parts: list[Any] = [
        _figures("All answers", counts, sweep.rows),
        _figures(f"With {shown.draft_tokens} drafted", [_label(found) for found in groups], groups),
        _slots(shown),
        Text("tau: tokens a step. mean: over an answer's steps, then over answers. pooled: over all steps together."),
    ]
    if shown.identical is not None:
        parts.append(Text(f"output identical to plain decoding: {shown.identical}/{shown.answers}"))
    if sweep.worth_it is False:
        speed = f"{shown.draft_tokens} drafted, speed-up {_number(shown.speedup, 2)}"
        closest = f"; closest: {speed}" if len(sweep.rows) > 1 else f": {speed}"
        parts.append(Text(f"no number of drafted tokens was faster than plain decoding here{closest}"))
    elif sweep.best is not None and len(sweep.rows) > 1:
        parts.append(Text(f"best number of drafted tokens here: {sweep.best}"))
    if evaluation.missing:
        parts.append(Text(f"ended before its time: {evaluation.missing} more answers were not decoded"))
    if evaluation.why_ended is not None:
        parts.append(Text(f"ended because {evaluation.why_ended}"))
    if evaluation.left_out:
        parts.append(Text(f"follow-up turns left out, too long for the target: {evaluation.left_out}"))
    if evaluation.why_eager is not None:
        parts.append(Text(f"steps were launched, not replayed as CUDA graphs: {evaluation.why_eager}"))
    return Group(*parts)


def check_plot(path: str | Path) -> None:
    """Raise InputError unless a plot can be made and written there; asked before an evaluation, not after it.

    Tried by opening the file: permissions alone do not tell for every user and file system. Leaves what is there as it
    was, and no file where there was none.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise InputError("a plot needs matplotlib; pip install matplotlib, or leave --plot out")
    if not str(path):
        raise InputError("--plot is empty; give a file to write, such as plot.png")
    if not os.path.isdir(Path(path).absolute().parent):
        raise InputError(f"--plot {path}: there is no folder {Path(path).absolute().parent}; give a file in one")
    place = os.path.realpath(path)  # of a link that leads nowhere yet, what it leads to
    if os.path.isdir(place):
        raise InputError(f"--plot {path} is a folder; give a file, such as {Path(path) / 'plot.png'}")
    try:
        before = os.path.exists(place)
        with open(place, "ab"):
            pass
        if not before:
            os.unlink(place)
    except OSError as error:
        raise _no_plot(path, error) from None


def plot(evaluation: Evaluation, path: str | Path) -> None:
    """A PNG: speed-up and tau by drafted tokens, acceptance by slot, steps by tokens kept.

    Raises InputError as `check_plot` does, and where the file can't be written to its end.
    """
    check_plot(path)
    from matplotlib.figure import Figure

    sweep = Sweep.of(evaluation)
    shown = sweep.shown
    figure = Figure(figsize=(12, 3.6), layout="constrained")
    speed, slots, kept = figure.subplots(1, 3)
    measured = [found for found in sweep.rows if found.speedup is not None]
    counts = [found.draft_tokens for found in measured]
    speed.plot(counts, [found.speedup for found in measured], "o-", label="speed-up")
    speed.plot(counts, [found.tau_response_mean for found in measured], "s--", label="tau, response mean")
    speed.set(xlabel="drafted tokens", ylim=(0, None), xticks=counts, title="by drafted tokens")
    speed.legend()
    places = range(1, shown.draft_tokens + 1)
    slots.plot(places, shown.accept_by_slot, "o-", label="jointly")
    slots.plot(places, shown.accept_given_previous, "s--", label="given those before")
    slots.set(xlabel="slot", ylim=(0, 1.02), xticks=places, title=f"acceptance, {shown.draft_tokens} drafted")
    slots.legend()
    kept.bar(range(shown.draft_tokens + 1), shown.histogram)
    kept.set(xlabel="drafted tokens kept", xticks=range(shown.draft_tokens + 1), title="steps")
    try:
        figure.savefig(path, dpi=120, format="png")
    except OSError as error:
        raise _no_plot(path, error) from None


def _no_plot(path: str | Path, error: OSError) -> InputError:
    return InputError(f"--plot {path} can't be written: {error.strerror or error}; give a file that can be")


def _figures(title: str, names: Sequence[str], rows: Sequence[Row]) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE, padding=0)
    table.add_column()
    for heading in ("answers", "tau, mean", "tau, pooled", "plain tok/s", "drafted tok/s", "speed-up", "95%", "same"):
        table.add_column(heading.replace(" ", "\n", 1), justify="right", no_wrap=True)
    for name, found in zip(names, rows, strict=True):
        table.add_row(
            name,
            str(found.answers),
            _number(found.tau_response_mean, 3),
            _number(found.tau_pooled, 3),
            _number(found.plain_tokens_per_s, 1),
            _number(found.speculative_tokens_per_s, 1),
            _number(found.speedup, 2),
            "-" if found.speedup_low is None else f"{found.speedup_low:.2f}-{found.speedup_high:.2f}",
            "-" if found.identical is None else f"{found.identical}/{found.answers}",
        )
    return table


def _slots(found: Row) -> Table:
    table = Table(title=f"By slot, {found.draft_tokens} drafted", title_justify="left", box=SIMPLE, padding=0)
    table.add_column("slot", justify="right")
    for heading in ("accepted", "given those before", "steps keeping n"):
        table.add_column(heading, justify="right")
    table.add_column()
    total = max(1, sum(found.histogram))
    for slot, count in enumerate(found.histogram):
        shares = [(found.accept_by_slot[slot - 1], found.accept_given_previous[slot - 1])] if slot else []
        jointly, given = [f"{100 * share:.1f} %" for pair in shares for share in pair] or ["", ""]
        table.add_row(str(slot), jointly, given, f"{100 * count / total:.1f} %", "#" * round(20 * count / total))
    return table


def _label(found: Row) -> str:
    words = [found.suite, *([] if found.category == "all" else [found.category])]
    mode = {None: "", True: ", thinking", False: ", no thinking"}[found.thinking]
    return " / ".join(words) + mode


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _rate(responses: Sequence[Response]) -> float | None:
    tokens, seconds = sum(one.num_decoded for one in responses), sum(one.decode_s for one in responses)
    return tokens / seconds if tokens and seconds > 0 else None


def _speedup(plain: Sequence[Response], drafted: Sequence[Response]) -> float | None:
    slow, fast = _rate(plain), _rate(drafted)
    return fast / slow if slow and fast else None


def _interval(plain: Sequence[Response], drafted: Sequence[Response]) -> tuple[float | None, float | None]:
    """Percentile bootstrap over answers, seeded; None for fewer than two answers with steps."""
    pairs = [pair for pair in zip(plain, drafted, strict=True) if pair[0].num_decoded and pair[1].num_decoded]
    if len(pairs) < 2:
        return None, None
    facts = np.array([(p.num_decoded, p.decode_s, d.num_decoded, d.decode_s) for p, d in pairs], dtype=np.float64)
    chosen = np.random.default_rng(0).integers(0, len(pairs), size=(_RESAMPLES, len(pairs)))
    sums = facts[chosen].sum(axis=1)
    ratios = (sums[:, 2] / sums[:, 3]) / (sums[:, 0] / sums[:, 1])
    low, high = np.percentile(ratios, _INTERVAL)
    return float(low), float(high)
