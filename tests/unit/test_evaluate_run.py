"""An evaluation as a whole, and the figures it gives."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from draftmill.errors import InputError
from draftmill.evaluate import report
from draftmill.evaluate.acceptance import StepRecord
from draftmill.evaluate.decode import Response
from draftmill.evaluate.prompts import Prompt, from_turns
from draftmill.evaluate.run import Evaluation, Trial, default_draft_tokens, evaluate
from draftmill.target.generate_sampling import Sampling
from draftmill.target.model import Target
from evaluate_doubles import (
    PLAIN_TEMPLATE,
    THINKING_TEMPLATE,
    KnowingDrafter,
    random_drafter,
    reference_greedy,
    tiny_target,
    tiny_tokenizer,
)

GREEDY = Sampling(max_new_tokens=12)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def target_with(template: str | None = PLAIN_TEMPLATE, **changes: Any) -> Target:
    target = tiny_target("llama", **changes)
    target.tokenizer = tiny_tokenizer(template)
    return target


def prompt(text: str, *follow_ups: str, category: str = "c") -> Prompt:
    return from_turns(text, "s", category, [text, *follow_ups])


def test_default_sweeps() -> None:
    assert default_draft_tokens(16) == (1, 2, 4, 8, 15)
    assert default_draft_tokens(8) == (1, 2, 4, 7)
    assert default_draft_tokens(10) == (1, 2, 4, 8, 9)
    assert default_draft_tokens(3) == (1, 2)
    assert default_draft_tokens(2) == (1,)


def test_every_prompt_is_decoded_plainly_and_with_each_count() -> None:
    target = target_with()
    prompts = [prompt("w3 w9", category="x"), prompt("w7 w7 w7", category="y")]
    seen = []
    found = evaluate(
        random_drafter(target),
        target,
        prompts,
        sampling=GREEDY,
        progress=lambda done, total, trial: seen.append((done, total, trial.name)),
    )
    assert seen == [(1, 2, "w3 w9"), (2, 2, "w7 w7 w7")]
    assert found.draft_tokens == (1, 2, 3)
    for trial, ids in zip(found.trials, ([60, 3, 9, 61], [60, 7, 7, 7, 61]), strict=True):
        answer = reference_greedy(target, ids, 12)
        answer = answer[: answer.index(63) + 1] if 63 in answer else answer  # <end>
        assert trial.num_prompt_tokens == len(ids)
        assert trial.thinking is None
        assert [trial.plain.tokens, *(one.tokens for one in trial.drafted.values())] == [answer] * 4
    assert not found.graphed
    assert found.why_eager is None
    assert [row.identical for row in report.overall(found)] == [2, 2, 2]
    assert [row.category for row in report.by_group(found, 3)] == ["all", "x", "y"]


def test_an_evaluation_that_is_ended_counts_what_is_missing() -> None:
    """Inside a conversation too; turns that would not have fitted are not asked about any more."""
    target = target_with()
    prompts = [prompt("w3", "w4"), prompt("w5", "w6", "w7")]
    for after, missing in ((1, 4), (2, 3), (3, 2), (5, 0), (9, 0)):
        done: list[int] = []
        found = evaluate(
            random_drafter(target),
            target,
            prompts,
            sampling=GREEDY,
            draft_tokens=[1],
            progress=lambda number, *_, done=done: done.append(number),
            ended=lambda done=done, after=after: len(done) >= after,
        )
        assert (len(found.trials), found.missing, found.left_out) == (5 - missing, missing, 0)


def test_a_follow_up_that_would_not_have_fitted_is_not_missing() -> None:
    target = target_with(max_position_embeddings=16)
    asked = iter([False, True])
    found = evaluate(
        random_drafter(target),
        target,
        [prompt("w3", "w5", "w6")],
        sampling=GREEDY,
        draft_tokens=[2],
        ended=lambda: next(asked),
    )
    assert (len(found.trials), found.missing, found.left_out) == (1, 0, 2)


def test_a_second_turn_is_asked_after_the_target_s_own_answer() -> None:
    target = target_with()
    found = evaluate(random_drafter(target), target, [prompt("w3", "w5")], sampling=GREEDY, draft_tokens=[2])
    first, second = found.trials
    answer = target.tokenizer.decode(first.plain.tokens, skip_special_tokens=True)
    ids = target.tokenizer(f"user w3 assistant {answer} user w5 assistant", add_special_tokens=False).input_ids
    assert (first.turn, second.turn) == (1, 2)
    assert second.num_prompt_tokens == len(ids)
    expected = reference_greedy(target, ids, len(second.plain.tokens))
    assert second.plain.tokens == second.drafted[2].tokens == expected


def test_a_follow_up_that_no_longer_fits_is_left_out_and_counted() -> None:
    target = target_with(max_position_embeddings=16)
    found = evaluate(random_drafter(target), target, [prompt("w3", "w5", "w6")], sampling=GREEDY, draft_tokens=[2])
    assert [trial.turn for trial in found.trials] == [1]
    assert found.left_out == 2


def test_thinking_on_and_off_are_rows_of_their_own() -> None:
    target = target_with(THINKING_TEMPLATE)
    drafter = random_drafter(target)
    found = evaluate(drafter, target, [prompt("w3")], sampling=GREEDY, draft_tokens=[2])
    assert [(trial.thinking, trial.num_prompt_tokens) for trial in found.trials] == [(True, 3), (False, 4)]
    assert [row.thinking for row in report.by_group(found, 2)] == [True, False]
    found = evaluate(drafter, target, [prompt("w3")], sampling=GREEDY, draft_tokens=[2], thinking="off")
    assert [trial.thinking for trial in found.trials] == [False]
    with pytest.raises(InputError, match="has no enable_thinking"):
        evaluate(random_drafter(target), target_with(), [prompt("w3")], sampling=GREEDY, thinking="on")


def test_token_ids_are_taken_as_they_are() -> None:
    target = target_with(THINKING_TEMPLATE)
    heldout = Prompt("4", "heldout", "all", (), (), (5, 6, 7))
    found = evaluate(random_drafter(target), target, [heldout], sampling=GREEDY, draft_tokens=[1])
    assert [(trial.thinking, trial.num_prompt_tokens) for trial in found.trials] == [(None, 3)]


def test_without_a_template_a_text_is_taken_as_it_is_and_a_chat_is_refused() -> None:
    target = target_with(None)
    found = evaluate(random_drafter(target), target, [prompt("w3 w4")], sampling=GREEDY, draft_tokens=[1])
    assert found.trials[0].num_prompt_tokens == 2
    chat = Prompt("x", "s", "c", ({"role": "system", "content": "w1"}, {"role": "user", "content": "w2"}))
    with pytest.raises(InputError, match="prompt 'x' is a chat, and the target's tokenizer has no chat template"):
        evaluate(random_drafter(target), target, [chat], sampling=GREEDY)


def _refusing(condition: str) -> str:
    """A template that refuses a message `m`, where the condition holds."""
    refused = "{{ raise_exception('not this') }}"
    return f"{{% for m in messages %}}{{% if {condition} %}}{refused}{{% endif %}}{{% endfor %}}{PLAIN_TEMPLATE}"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "prompt 'w5' of s has follow-up turns, and the target's tokenizer has no chat template; give prompts"),
        (_refusing("m.role == 'assistant'"), "the target's chat template refuses prompt 'w5': not this"),
        (_refusing("m.content == 'w7'"), "the target's chat template refuses prompt 'w5': not this"),
    ],
)
def test_follow_ups_that_can_t_be_asked_are_refused_before_anything_is_decoded(
    template: str | None, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = target_with(template)
    monkeypatch.setattr("draftmill.evaluate.decode.Decoder.generate", lambda *_, **__: pytest.fail("decoded"))
    with pytest.raises(InputError, match=re.escape(message)):
        evaluate(random_drafter(target), target, [prompt("w3"), prompt("w5", "w6", "w7")], sampling=GREEDY)


def test_a_template_that_refuses_after_an_answer_ends_with_what_is_there() -> None:
    target = target_with(_refusing("m.role == 'assistant' and m.content != 'Yes.'"))
    found = evaluate(random_drafter(target), target, [prompt("w3"), prompt("w5", "w6"), prompt("w7")], sampling=GREEDY)
    assert [trial.name for trial in found.trials] == ["w3", "w5"]
    assert (found.missing, found.left_out) == (2, 0)
    why = "the target's chat template refuses prompt 'w5': not this (its follow-up 1, after the target's answer)"
    assert found.why_ended == why
    assert report.to_json(found, {})["why_ended"] == why
    console = Console(width=200, record=True)
    console.print(report.tables(found))
    text = console.export_text()
    assert "ended before its time: 2 more answers were not decoded" in text
    assert f"ended because {why}" in text


def test_bad_input() -> None:
    target = target_with(max_position_embeddings=40)
    drafter = random_drafter(target)
    with pytest.raises(InputError, match="no prompt"):
        evaluate(drafter, target, [], sampling=GREEDY)
    with pytest.raises(InputError, match=r"prompt 'w1 .* of s: a prompt of 62 tokens is too long: the target holds 40"):
        evaluate(drafter, target, [prompt("w3"), prompt("w1 " * 60)], sampling=GREEDY)
    for counts in ([0], [4], [2, 9], []):
        with pytest.raises(InputError, match="drafts 1 to 3 tokens a step"):
            evaluate(drafter, target, [prompt("w3")], sampling=GREEDY, draft_tokens=counts)


def test_always_right_and_never_right() -> None:
    target = target_with()
    answer = reference_greedy(target, [60, 3, 61], 13)
    assert 63 not in answer  # <end>
    known = {3 + index: token for index, token in enumerate(answer)}
    sampling = Sampling(max_new_tokens=13)
    found = evaluate(KnowingDrafter(target, 4, known), target, [prompt("w3")], sampling=sampling, draft_tokens=[3])
    [row] = report.overall(found)
    assert (row.tau_response_mean, row.tau_pooled) == (4.0, 4.0)
    assert row.accept_by_slot == [1.0, 1.0, 1.0]
    assert row.histogram == [0, 0, 0, 3]
    wrong = {place: (token + 1) % 64 for place, token in known.items()}
    found = evaluate(KnowingDrafter(target, 4, wrong), target, [prompt("w3")], sampling=sampling, draft_tokens=[3])
    [row] = report.overall(found)
    assert (row.tau_response_mean, row.tau_pooled) == (1.0, 1.0)
    assert row.accept_by_slot == [0.0, 0.0, 0.0]
    assert row.histogram == [12, 0, 0, 0]


def response(tokens: list[int], steps: list[StepRecord], decode_s: float) -> Response:
    return Response(tokens, steps, 0.5, decode_s)


def made_up(sampling: Sampling = GREEDY) -> Evaluation:
    one = StepRecord(1, 0, 0)
    trials = [
        Trial(
            "s",
            "a",
            "p1",
            1,
            None,
            9,
            response([1, 2, 3, 4, 5], [one] * 4, 4.0),
            {3: response([1, 2, 3, 4, 5], [StepRecord(3, 2, 3), StepRecord(1, 1, 1)], 1.0)},
        ),
        Trial(
            "s",
            "b",
            "p2",
            1,
            None,
            9,
            response([1, 2, 3], [one] * 2, 2.0),
            {3: response([1, 2, 9], [StepRecord(1, 0, 3), StepRecord(1, 0, 3)], 2.0)},
        ),
    ]
    return Evaluation(trials, (3,), sampling, 4, False, "the target can't be captured", 1)


def test_figures_by_hand() -> None:
    [row] = report.overall(made_up())
    assert (row.answers, row.tokens) == (2, 8)
    assert row.tau_response_mean == pytest.approx((2.0 + 1.0) / 2)
    assert row.tau_pooled == pytest.approx(6 / 4)
    assert row.accept_given_previous == pytest.approx([2 / 4, 1.0, 0.0])
    assert row.accept_by_slot == pytest.approx([0.5, 0.5, 0.0])
    assert row.histogram == [2, 1, 1, 0]
    assert row.plain_tokens_per_s == pytest.approx(6 / 6)
    assert row.speculative_tokens_per_s == pytest.approx(6 / 3)
    assert row.speedup == pytest.approx(2.0)
    assert (row.speedup_least, row.speedup_median, row.speedup_most) == pytest.approx((1.0, 2.5, 4.0))
    assert row.speedup_low == pytest.approx(1.0)  # both draws may fall on either answer
    assert row.speedup_high == pytest.approx(4.0)
    assert row.identical == 1
    assert report.overall(made_up(Sampling(temperature=1.0)))[0].identical is None


def test_an_answer_of_one_token_measures_nothing_and_breaks_nothing() -> None:
    trial = Trial("s", "a", "p", 1, None, 3, response([7], [], 0.0), {3: response([7], [], 0.0)})
    found = Evaluation([trial], (3,), GREEDY, 4, False, None, 0)
    [row] = report.overall(found)
    assert (row.tau_response_mean, row.tau_pooled, row.speedup, row.speedup_low) == (None, None, None, None)
    assert row.identical == 1
    assert report.Sweep.of(found).best is None
    assert report.Sweep.of(found).worth_it is None
    Console(width=80).print(report.tables(found))
    assert report.for_card(found, {})["best_draft_tokens"] is None


def test_the_best_count_has_the_most_tokens_a_second() -> None:
    found = made_up()
    for trial in found.trials:
        slow = trial.drafted[3]
        trial.drafted[1] = response(slow.tokens, [StepRecord(step.tokens, 0, 1) for step in slow.steps], 0.1)
    found = Evaluation(found.trials, (1, 3), GREEDY, 4, True, None, 0)
    assert report.Sweep.of(found).best == 1


def slowed(factor: float, *counts: int) -> Evaluation:
    """The made-up evaluation with drafts that take `factor` of its time, at each of these counts alike."""
    found = made_up()
    for trial in found.trials:
        one = trial.drafted.pop(3)
        for count in counts:
            trial.drafted[count] = response(one.tokens, one.steps, one.decode_s * (factor + count / 1000))
    return Evaluation(found.trials, counts, GREEDY, 9, True, None, 0)


@pytest.mark.parametrize(
    ("found", "worth", "said"),
    [
        (slowed(1.0, 3, 4), True, "best number of drafted tokens here: 3"),
        (slowed(2.0, 3, 4), False, "than plain decoding here; closest: 3 drafted, speed-up 1.00"),
        (slowed(4.0, 3, 4), False, "than plain decoding here; closest: 3 drafted, speed-up 0.50"),
        (slowed(4.0, 3), False, "no number of drafted tokens was faster than plain decoding here: 3 drafted, speed-up"),
    ],
)
def test_a_drafter_that_gains_nothing_is_said_to(found: Evaluation, worth: bool, said: str) -> None:
    assert report.Sweep.of(found).best == 3
    assert report.Sweep.of(found).worth_it is worth
    assert report.to_json(found, {})["worth_it"] is worth
    assert report.for_card(found, {})["worth_it"] is worth
    console = Console(width=120, record=True)
    console.print(report.tables(found))
    text = console.export_text()
    assert said in text
    assert ("(best)" in text) is worth
    assert ("best number" in text) is worth


def test_report_json_and_card_say_the_same() -> None:
    found = made_up()
    whole = json.loads(json.dumps(report.to_json(found, {"drafter": "d", "target": "t"})))
    assert whole["drafter"] == "d"
    assert whole["best_draft_tokens"] == 3
    assert whole["why_eager"] == "the target can't be captured"
    assert whole["overall"][0]["tau_pooled"] == 1.5
    assert [(row["suite"], row["category"]) for row in whole["groups"]] == [("s", "all"), ("s", "a"), ("s", "b")]
    card = report.for_card(found, {"target": "t"})
    assert card["rows"][0]["tau (response mean)"] == 1.5
    assert card["rows"][0]["prompts"] == "s"
    assert card["rows"][1]["prompts"] == "s / a"

    console = Console(width=80, record=True)
    console.print(report.tables(found))
    text = console.export_text()
    for expected in (
        "3 drafted (best)",
        "output identical to plain decoding: 1/2",
        "1.00-4.00",
        "left out",
        "captured",
    ):
        assert expected in text


def test_json_has_the_groups_at_every_count() -> None:
    found = slowed(1.0, 3, 4)
    whole = json.loads(json.dumps(report.to_json(found, {})))
    assert [(row["draft_tokens"], row["category"]) for row in whole["groups"]] == [
        (count, category) for count in (3, 4) for category in ("all", "a", "b")
    ]
    assert [row["speedup"] for row in whole["groups"] if row["category"] == "a"] == pytest.approx(
        [4 / 1.003, 4 / 1.004]
    )
    assert [row["drafted"] for row in report.for_card(found, {})["rows"]] == [3, 3, 3]
    console = Console(width=120, record=True)
    console.print(report.tables(found))
    text = console.export_text()
    assert text.count("s / a") == 1
    assert "With 3 drafted" in text
    assert "With 4 drafted" not in text


def test_plot(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    report.plot(made_up(), tmp_path / "p.png")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match="a plot needs matplotlib"):
        report.plot(made_up(), tmp_path / "q.png")


def test_where_a_plot_can_be_written_is_known_before_it_is_made(tmp_path: Path) -> None:
    """The question leaves no file, and a file that is there as it was."""
    pytest.importorskip("matplotlib")
    report.check_plot(tmp_path / "p.png")
    (tmp_path / "q.png").write_text("mine")
    report.check_plot(tmp_path / "q.png")
    (tmp_path / "link.png").symlink_to(tmp_path / "r.png")
    report.check_plot(tmp_path / "link.png")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.png", "q.png"]
    assert (tmp_path / "q.png").read_text() == "mine"
    for path, message in (
        ("", "--plot is empty"),
        (tmp_path, "is a folder"),
        (tmp_path / "nowhere/p.png", "there is no folder"),
        (tmp_path / "q.png/p.png", "there is no folder"),
        (tmp_path / ("p" * 300), "can't be written: File name too long"),
        ("/proc/x.png", "can't be written: "),
    ):
        with pytest.raises(InputError, match=message):
            report.check_plot(path)
