"""Thinking and not thinking, one language and another: figures and records of their own (case B19)."""

from __future__ import annotations

import json

import pytest
from rich.console import Console

from draftmill.evaluate import report
from draftmill.evaluate.acceptance import StepRecord
from draftmill.evaluate.decode import Response
from draftmill.evaluate.run import Evaluation, Trial
from draftmill.target.generate_sampling import Sampling

KEPT = {(True, "en"): 9, (True, "zh"): 6, (False, "en"): 3, (False, "zh"): 1}
"""Drafted tokens kept in every step, by thinking and language."""
DRAFTED = 15


@pytest.fixture
def found() -> Evaluation:
    """Two answers of each mode and language, two steps each."""
    trials = []
    for (thinking, language), kept in KEPT.items():
        plain = Response([1] * (2 * kept + 3), [StepRecord(1, 0, 0)] * (2 * kept + 2), 0.1, 1.0)
        drafted = Response(plain.tokens, [StepRecord(kept + 1, kept, DRAFTED)] * 2, 0.1, 0.5)
        trials += [Trial("mine", language, str(n), 1, thinking, 9, plain, {DRAFTED: drafted}) for n in range(2)]
    return Evaluation(trials, (DRAFTED,), Sampling(), 16, False, None, 0)


def test_each_mode_and_language_has_its_own_acceptance_length(found: Evaluation) -> None:
    whole = json.loads(json.dumps(report.to_json(found, {})))
    taus = {(row["thinking"], row["category"]): row["tau_response_mean"] for row in whole["groups"]}
    assert taus == {
        (True, "all"): 8.5,
        (True, "en"): 10.0,
        (True, "zh"): 7.0,
        (False, "all"): 3.0,
        (False, "en"): 4.0,
        (False, "zh"): 2.0,
    }
    (overall,) = whole["overall"]
    assert overall["tau_response_mean"] == pytest.approx((8.5 + 3.0) / 2)


def test_the_card_and_the_table_tell_them_apart(found: Evaluation) -> None:
    names = [
        "mine, thinking",
        "mine / en, thinking",
        "mine / zh, thinking",
        "mine, no thinking",
        "mine / en, no thinking",
        "mine / zh, no thinking",
    ]
    card = {row["prompts"]: row["tau (response mean)"] for row in report.for_card(found, {})["rows"]}
    assert list(card) == names
    assert (card["mine, thinking"], card["mine / zh, no thinking"]) == (8.5, 2.0)
    console = Console(width=120, record=True)
    console.print(report.tables(found))
    lines = console.export_text().splitlines()
    for name in names:
        (line,) = [line for line in lines if line.strip().startswith(f"{name} ")]
        assert line.removeprefix(f" {name}").split()[:2] == ["4" if "/" not in name else "2", f"{card[name]:.3f}"]
