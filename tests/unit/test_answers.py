"""Answers: which turns are written anew, what survives on disk, and how servers that fail are dealt with."""

from __future__ import annotations

import errno
import io
import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest
import torch

from answers_doubles import FaultyServer, completion, echo, tiny_model, tiny_tokenizer
from draftmill.errors import InputError
from draftmill.target.answers_file import AnswerFile
from draftmill.target.answers_local import LocalTarget, answer_locally, user_turn_opening
from draftmill.target.answers_prompts import Dialogue, Refused, read_dialogues
from draftmill.target.answers_synthetic import words_of
from draftmill.target.generate import Sampling
from draftmill.target.server_client import ChatClient, Endpoint, RequestFailed

USER, SYSTEM = {"role": "user", "content": "Hi"}, {"role": "system", "content": "Be kind"}
OLD, MORE = {"role": "assistant", "content": "old"}, {"role": "user", "content": "More"}
CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": '{"a": 1}'}}]}
RESULT = {"role": "tool", "content": "2"}


def _write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _read(tmp_path: Path, row: Any, turns: Any = "all") -> Dialogue:
    (dialogue,) = read_dialogues([_write(tmp_path / "in.jsonl", row)], turns)
    assert isinstance(dialogue, Dialogue)
    return dialogue


def _fill(dialogue: Dialogue) -> list[tuple[list[str], str]]:
    """Answer every turn with its number; gives the contents before each."""
    seen = []
    while not dialogue.is_done:
        seen.append([message["content"] for message in dialogue.messages])
        dialogue.answer({"role": "assistant", "content": f"new {dialogue.num_answers}"}, ended=True)
    return seen


class TestDialogues:
    @pytest.mark.parametrize(
        "row",
        [
            {"prompt": "Hi"},
            {"prompt": [USER]},
            {"messages": [USER]},
            {"messages": [USER, OLD]},
            {"messages": [USER, {"role": "assistant", "content": ""}]},
            {"conversations": [{"from": "human", "value": "Hi"}]},
            {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "old"}]},
        ],
    )
    def test_forms_of_one_question(self, tmp_path: Path, row: Any) -> None:
        dialogue = _read(tmp_path, row)
        assert _fill(dialogue) == [["Hi"]]
        assert dialogue.row()["messages"] == [USER, {"role": "assistant", "content": "new 0"}]
        assert dialogue.row()["ended"] is True
        assert dialogue.key == _read(tmp_path, {"messages": [USER]}).key  # the same question, however it is stored

    def test_each_turn_follows_the_new_ones(self, tmp_path: Path) -> None:
        row = {"messages": [SYSTEM, USER, OLD, MORE], "id": 7}
        dialogue = _read(tmp_path, row)
        assert _fill(dialogue) == [["Be kind", "Hi"], ["Be kind", "Hi", "new 0", "More"]]
        assert [message["content"] for message in dialogue.row()["messages"]] == [
            "Be kind",
            "Hi",
            "new 0",
            "More",
            "new 1",
        ]
        assert dialogue.row()["id"] == 7
        assert _fill(_read(tmp_path, row, "last")) == [["Be kind", "Hi", "old", "More"]]

    def test_tool_calls_are_kept(self, tmp_path: Path) -> None:
        tools = [{"name": "add", "parameters": {}}]
        dialogue = _read(tmp_path, {"messages": [USER, CALL, RESULT, OLD], "tools": tools})
        assert _fill(dialogue) == [["Hi", "", "2"]]
        row = dialogue.row()
        assert row["messages"][1]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1}}
        assert row["tools"] == [{"type": "function", "function": tools[0]}]

    def test_equal_questions_have_keys_of_their_own(self, tmp_path: Path) -> None:
        path = _write(tmp_path / "in.jsonl", {"prompt": "a"}, {"prompt": "b"}, {"prompt": "a"})
        keys = [row.key for row in read_dialogues([path]) if isinstance(row, Dialogue)]
        assert len(set(keys)) == 3
        assert keys[2] == f"{keys[0]}-2"

    def test_rows_without_a_question_are_refused(self, tmp_path: Path) -> None:
        path = tmp_path / "in.jsonl"
        bad = [[], {"messages": []}, {"messages": [OLD, USER]}, {"text": "x"}, {"messages": [USER, CALL]}]
        path.write_text("{nope\n" + "".join(json.dumps(row) + "\n" for row in [*bad, {"prompt": "good"}]))
        rows = read_dialogues([path])
        assert [row.reason.split(":")[0] for row in rows if isinstance(row, Refused)] == [
            "not JSON",
            "the row is not an object",
            "messages is empty",
            "starts with the assistant",
            "no messages, no prompt with completion, no input_ids",
            "the last turn calls a tool and its result is missing",
        ]
        assert [row.where for row in rows][:2] == [f"{path}, line 1", f"{path}, line 2"]
        path.write_text("{nope\n")
        with pytest.raises(InputError, match=r"none of the 1 rows can be answered; .*line 1: not JSON"):
            read_dialogues([path])


class TestAnswerFile:
    @staticmethod
    def _open(path: Path, **settings: Any) -> AnswerFile:
        return AnswerFile(path, {"target": "t", **settings}, lambda row: row["prompt_key"])

    def test_continues_after_a_row_that_was_cut_off(self, tmp_path: Path) -> None:
        path = tmp_path / "new" / "out.jsonl"
        with self._open(path) as file:
            file.append({"prompt_key": "a", "text": "ä\n"})
            file.append({"prompt_key": "b"})
            file.fail("in, line 3", "c", "the answer is empty")
        assert len(file.failures_path.read_text().splitlines()) == 1
        path.write_bytes(path.read_bytes()[:-4])
        with self._open(path) as file:
            assert file.done == ["a"]
            assert not file.failures_path.exists()
            file.append({"prompt_key": "b"})
        assert [json.loads(line) for line in path.read_text().splitlines()] == [
            {"prompt_key": "a", "text": "ä\n"},
            {"prompt_key": "b"},
        ]

    def test_other_settings_and_other_files_are_refused_unharmed(self, tmp_path: Path) -> None:
        path = tmp_path / "out.jsonl"
        with self._open(path, seed=1) as file:
            file.append({"prompt_key": "a"})
        before = path.read_bytes()
        with pytest.raises(InputError, match="was made with seed 1, this call has 2"), self._open(path, seed=2):
            pass
        assert path.read_bytes() == before
        foreign = _write(tmp_path / "notes.jsonl", {"mine": 1})
        with pytest.raises(InputError, match="already holds something that was not made here"), self._open(foreign):
            pass
        assert foreign.read_text() == '{"mine": 1}\n'
        with pytest.raises(InputError, match="must be plain JSONL"), self._open(tmp_path / "out.jsonl.gz"):
            pass
        with pytest.raises(InputError, match="can't be written: Is a directory"), self._open(tmp_path):
            pass

    def test_one_process_at_a_time(self, tmp_path: Path) -> None:
        path = tmp_path / "out.jsonl"
        with (
            self._open(path) as first,
            pytest.raises(InputError, match="another process is writing"),
            self._open(path),
        ):
            pass
        with self._open(path):
            first.path.exists()

    def test_rows_of_another_process_that_came_in_between_stay(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = tmp_path / "out.jsonl"
        with self._open(path) as file:
            file.append({"prompt_key": "a"})
        monkeypatch.setattr(Path, "exists", lambda _: False)  # as it was before
        with pytest.raises(ValueError, match="made up"), self._open(path):
            raise ValueError("made up")
        with pytest.raises(InputError, match="was made with seed"), self._open(path, seed=2):
            pass
        monkeypatch.undo()
        assert path.read_text() == '{"prompt_key": "a"}\n'

    def test_full_disk_before_the_first_row_leaves_nothing(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def full(*_: Any, **__: Any) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(Path, "replace", full)
        with pytest.raises(InputError, match="can't be written: the disk is full"), self._open(tmp_path / "out.jsonl"):
            pass
        assert not list(tmp_path.iterdir())

    def test_full_disk_keeps_what_is_there(self) -> None:
        if not Path("/dev/full").exists():
            pytest.skip("there is no /dev/full on this system")
        file = self._open(Path("/dev/full"))
        file._file = io.FileIO("/dev/full", "w")
        with file, pytest.raises(InputError, match="the disk is full; its 0 rows are kept"):
            file.append({"prompt_key": "a"})


class TestLocal:
    def test_turns_follow_each_other_and_long_prompts_fail_alone(self) -> None:
        torch.set_num_threads(1)
        target = LocalTarget(tiny_model(), tiny_tokenizer(), batch_size=2)
        ahead = [[USER, None, MORE, None], [{"role": "user", "content": "x" * 300}, None], [USER, None]]
        dialogues = [Dialogue(str(number), "", list(turns)) for number, turns in enumerate(ahead)]
        done = dict((d.key, problem) for d, problem in answer_locally(target, dialogues, Sampling(10)))
        assert done["0"] is None
        assert done["2"] is None
        assert done["1"] == "the prompt is too long: 319 tokens, the target holds 256"
        first, alone = dialogues[0], dialogues[2]
        assert first.messages[1] == alone.messages[1]  # greedy: the same question, whatever else is in the batch
        assert [message["role"] for message in first.messages] == ["user", "assistant", "user", "assistant"]
        again = [Dialogue("0", "", [USER, first.messages[1], MORE, None])]
        list(answer_locally(target, again, Sampling(10)))
        assert again[0].messages == first.messages

    def test_opening_of_reasoning_that_the_template_writes_is_kept(self) -> None:
        tokenizer = tiny_tokenizer()
        tokenizer.chat_template = tokenizer.chat_template.replace(
            "assistant\n' }}{% endif", "assistant\n<think>\n' }}{% endif"
        )
        dialogue = Dialogue("0", "", [USER, None])
        list(answer_locally(LocalTarget(tiny_model(), tokenizer), [dialogue], Sampling(4)))
        assert dialogue.messages[1]["content"].startswith("<think>\n")

    def test_user_turn_opens_as_the_template_writes_it(self) -> None:
        tokenizer = tiny_tokenizer()
        target = LocalTarget(tiny_model(), tokenizer)
        opening, closing = user_turn_opening(target)
        assert tokenizer.decode(opening) == "<|im_start|>user\n"
        assert closing == {2}
        tokenizer.chat_template = "{{ messages[0].content | upper }}"
        with pytest.raises(InputError, match="does not show a user's turn as it is"):
            user_turn_opening(target)


def test_prompts_are_the_same_by_their_words() -> None:
    assert words_of(" What's 2+3,  then? ") == words_of("what s 2 3 THEN") == "what s 2 3 then"


class TestClient:
    @staticmethod
    def _client(*urls: str, **options: Any) -> ChatClient:
        settings = {"backoff_s": 0.01, "timeout_s": 5.0, **options}
        return ChatClient(urls, "m", {"max_tokens": 9, "temperature": 0.0}, **settings)

    def test_what_is_sent(self) -> None:
        with FaultyServer(echo).running() as server:
            client = self._client(server.url, api_key="secret")
            client.check()
            reply = client.ask(
                [USER, {**CALL, "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]}, RESULT]
            )
            client.ask([USER], tools=[{"type": "function"}], seed=5)
        assert (reply.content, reply.finish_reason, reply.num_tokens) == ("2", "stop", 1)
        first, second = server.bodies
        assert first["model"] == "m"
        assert first["max_tokens"] == 9
        assert first["messages"][0] == USER
        assert first["messages"][1]["tool_calls"] == [
            {"id": "call_0", "function": {"name": "f", "arguments": '{"a": 1}'}}
        ]
        assert "seed" not in first
        assert (second["seed"], second["tools"]) == (5, [{"type": "function"}])
        assert server.headers[0]["Authorization"] == "Bearer secret"

    def test_busy_failing_and_silent_servers_are_asked_again(self) -> None:
        def answer(number: int, body: dict[str, Any]) -> tuple[int, dict[str, str], Any]:
            return [
                (429, {"Retry-After": "0.3"}, {"error": {"message": "busy"}}),
                (500, {}, b"<html>oops</html>"),
                (200, {}, b"not json"),
                (200, {}, 30.0),  # no answer within the time-out
                (200, {"Connection": "close"}, completion("late")),
            ][number]

        with FaultyServer(answer).running() as server:
            assert self._client(server.url, timeout_s=0.5).ask([USER]).content == "late"
        assert len(server.bodies) == 5
        assert server.times_s[1] - server.times_s[0] >= 0.3  # Retry-After is obeyed

    def test_a_prompt_that_never_succeeds_fails_with_the_last_reason(self) -> None:
        with FaultyServer(lambda *_: (503, {}, {"detail": "loading"})).running() as server:
            with pytest.raises(RequestFailed, match=r"answered 503: loading \(3 tries\)") as failure:
                self._client(server.url, retries=2).ask([USER])
            assert not failure.value.unreachable
        assert len(server.bodies) == 3

    def test_what_is_not_worth_another_try(self) -> None:
        refusals: list[tuple[int, type[Exception], str]] = [
            (400, RequestFailed, r"refused \(400\): too long"),
            (422, RequestFailed, r"refused \(422\): too long"),
            (401, InputError, "check OPENAI_API_KEY"),
            (404, InputError, "serves --model m"),
            (302, InputError, "base URL of an OpenAI-compatible server"),
        ]
        for status, kind, text in refusals:
            with FaultyServer(
                lambda *_, status=status: (status, {}, {"error": {"message": "too long"}})
            ).running() as server:
                with pytest.raises(kind, match=text):
                    self._client(server.url).ask([USER])
                assert len(server.bodies) == 1
        with (
            FaultyServer(lambda *_: (200, {}, completion("  "))).running() as server,
            pytest.raises(RequestFailed, match="the answer is empty"),
        ):
            self._client(server.url).ask([USER])

    def test_another_endpoint_takes_over(self) -> None:
        broken = FaultyServer(lambda *_: (500, {}, {}))
        with broken.running(), FaultyServer(echo).running() as good:
            client = self._client(broken.url, good.url, backoff_s=20.0)
            assert [client.ask([USER]).content for _ in range(6)] == ["HI"] * 6
        assert (len(broken.bodies), len(good.bodies)) == (1, 6)  # left alone after its first failure

    def test_no_server(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            url = f"http://127.0.0.1:{free.getsockname()[1]}/v1"
        client = self._client(url, retries=1)
        with pytest.raises(InputError, match=f"no server answers at {url}"):
            client.check()
        with pytest.raises(RequestFailed, match=r"no connection to .* \(2 tries\)") as failure:
            client.ask([USER])
        assert failure.value.unreachable

    def test_a_kept_connection_that_was_closed_is_opened_anew(self) -> None:
        with FaultyServer(lambda *_: (200, {}, completion("yes"))).running() as server:
            endpoint = Endpoint(server.url)
            for _ in range(2):
                assert endpoint.request("GET", "/models", None, {}, 5.0)[0] == 200
                endpoint._local.connection.sock.shutdown(socket.SHUT_RDWR)
        assert endpoint.in_flight == 0

    @pytest.mark.parametrize(
        "url", ["localhost:8000", "ftp://x/v1", "http://", "http://x:99999999/", "http://x/v1?a=b"]
    )
    def test_endpoint_must_be_a_base_url(self, url: str) -> None:
        with pytest.raises(InputError, match="--endpoint must be a URL such as"):
            Endpoint(url)

    def test_endpoint_forms(self) -> None:
        paths = [Endpoint(f"http://x:1{path}")._path for path in ("", "/", "/v1/", "/api/v1", "/v1/chat/completions")]
        assert paths == ["/v1", "/v1", "/v1", "/api/v1", "/v1"]
        with pytest.raises(InputError, match="must not hold a password"):
            Endpoint("http://user:key@x/v1")
