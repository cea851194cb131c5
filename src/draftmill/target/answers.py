"""`regenerate`: the target's own answers to given prompts, from a local model or from OpenAI-compatible servers.

Owns which prompts are still to be answered and what becomes of each: a row of the output, or a line of its failures.
Never reads the environment.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from draftmill.data.chats import Message
from draftmill.errors import InputError
from draftmill.target.answers_file import AnswerFile
from draftmill.target.answers_progress import AnswerProgress
from draftmill.target.answers_prompts import Dialogue, Refused, Turns, read_dialogues, stream_of
from draftmill.target.generate_sampling import Sampling
from draftmill.target.server_client import ChatClient, RequestFailed

_LOCAL_CHUNK = 1024  # dialogues that are sorted by length together
_MOST_UNREACHED = 32  # this many failures in a row that reached no server end the run

Answered = tuple[Dialogue, str | None]
"""A dialogue that is done, or why it could not be answered."""
Answerer = Callable[[list[Dialogue], AnswerProgress], Iterator[Answered]]


@dataclass(frozen=True, slots=True)
class Request:
    """What is to be answered, by which target, how, and where it goes."""

    target: str
    inputs: Sequence[str | os.PathLike[str]]
    output: str | os.PathLike[str]
    sampling: Sampling
    turns: Turns = "all"


@dataclass(frozen=True, slots=True)
class Summary:
    """What a run did. num_before: answered by earlier runs; num_cut: answers that met the limit on their length."""

    output: Path
    failures_path: Path
    num_before: int
    num_answered: int
    num_cut: int
    failures: Counter[str]
    seconds: float

    def lines(self) -> list[str]:
        """The summary for people."""
        lines = [f"{self.num_answered} answered in {self.seconds:.1f} s -> {self.output}"]
        if self.num_before:
            lines.append(f"{self.num_before} were there before")
        if self.num_cut:
            lines.append(f'{self.num_cut} met --max-new-tokens (their rows say "ended": false)')
        if self.failures:
            lines.append(f"{self.failures.total()} got no answer, listed in {self.failures_path}; run again to retry")
            lines += [f"  {count} x {reason}" for reason, count in self.failures.most_common()]
        return lines


def regenerate_locally(
    request: Request,
    *,
    device: str | None = None,
    dtype: str = "bfloat16",
    batch_size: int | None = None,
    trust_remote_code: bool = False,
) -> Summary:
    """Answer the prompts with a model on this machine; it is loaded only if something is left to answer.

    Raises:
        InputError: the input, the output or the target can't be used. What was written stays.
    """
    from draftmill.target.answers_local import answer_locally, load_local

    def make() -> Answerer:
        target = load_local(
            request.target, device=device, dtype=dtype, batch_size=batch_size, trust_remote_code=trust_remote_code
        )

        def answer(dialogues: list[Dialogue], progress: AnswerProgress) -> Iterator[Answered]:
            for start in range(0, len(dialogues), _LOCAL_CHUNK):
                chunk = dialogues[start : start + _LOCAL_CHUNK]
                yield from answer_locally(target, chunk, request.sampling, progress.tokens)

        return answer

    return _regenerate(request, {"target": request.target, "dtype": dtype}, make)


def regenerate_from_servers(
    request: Request,
    endpoints: Sequence[str],
    *,
    model: str | None = None,
    api_key: str | None = None,
    concurrency: int = 64,
    timeout_s: float = 600.0,
    retries: int = 6,
) -> Summary:
    """Answer the prompts through OpenAI-compatible servers that serve the target as `model` (by default its name).

    Raises:
        InputError: the input or the output can't be used, no server answers, or a server refuses everybody.
    """
    wanted = [
        (concurrency >= 1, "--concurrency", concurrency, "at least 1"),
        (timeout_s > 0, "--timeout-s", timeout_s, "above 0"),
        (retries >= 0, "--retries", retries, "0 or more"),
    ]
    for holds, name, got, text in wanted:
        if not holds:
            raise InputError(f"{name} must be {text}, got {got}")
    served = model or request.target
    sampling = request.sampling
    parameters: dict[str, float] = {"max_tokens": sampling.max_new_tokens, "temperature": sampling.temperature}
    if sampling.temperature > 0:
        parameters |= {"top_p": sampling.top_p} | ({"top_k": sampling.top_k} if sampling.top_k else {})
    client = ChatClient(endpoints, served, parameters, api_key=api_key, timeout_s=timeout_s, retries=retries)

    def make() -> Answerer:
        client.check()

        def answer(dialogues: list[Dialogue], progress: AnswerProgress) -> Iterator[Answered]:
            return _answer_from_servers(dialogues, client, sampling, concurrency, progress.tokens)

        return answer

    return _regenerate(request, {"target": request.target, "model": served}, make)


def _regenerate(request: Request, settings: dict[str, str], make: Callable[[], Answerer]) -> Summary:
    start_s = time.monotonic()
    rows = read_dialogues(request.inputs, request.turns)
    settings = {"command": "regenerate", **settings, "turns": request.turns, **asdict(request.sampling)}
    with AnswerFile(request.output, settings, lambda row: row["prompt_key"]) as file:
        done = set(file.done)
        dialogues = []
        for row in rows:
            if isinstance(row, Refused):
                file.fail(row.where, None, row.reason)
            elif row.key not in done:
                dialogues.append(row)
        num_before = len(rows) - len(dialogues) - file.failures.total()
        num_cut = 0
        if dialogues:
            answer = make()
            with AnswerProgress("answering", len(dialogues)) as progress:
                for dialogue, problem in answer(dialogues, progress):
                    if problem is None:
                        file.append(dialogue.row())
                        num_cut += not dialogue.ended
                    else:
                        file.fail(dialogue.where, dialogue.key, problem)
                    progress.rows()
        seconds = time.monotonic() - start_s
        return Summary(file.path, file.failures_path, num_before, file.num_added, num_cut, file.failures, seconds)


def _answer_from_servers(
    dialogues: Sequence[Dialogue],
    client: ChatClient,
    sampling: Sampling,
    concurrency: int,
    count_tokens: Callable[[int], None],
) -> Iterator[Answered]:
    """Ask from many threads. Each takes a dialogue from `inbox` and puts it, done, or what it failed with, in `outbox`.

    An error that is not about one prompt is raised here, in the caller's thread. Threads are daemons: one that waits
    for a slow server does not keep the process alive.
    """
    inbox: queue.SimpleQueue[Dialogue | None] = queue.SimpleQueue()
    outbox: queue.SimpleQueue[tuple[Dialogue, int, BaseException | None]] = queue.SimpleQueue()
    num_threads = min(concurrency, len(dialogues))

    def work() -> None:
        while (dialogue := inbox.get()) is not None:
            num_tokens, problem = 0, None
            try:
                num_tokens = _ask(dialogue, client, sampling)
            except BaseException as error:  # handed to the caller's thread, which raises it
                problem = error
            outbox.put((dialogue, num_tokens, problem))

    for dialogue in dialogues:
        inbox.put(dialogue)
    for number in range(num_threads):
        inbox.put(None)
        threading.Thread(target=work, name=f"ask-{number}", daemon=True).start()
    num_unreached = 0
    try:
        for _ in dialogues:
            dialogue, num_tokens, problem = outbox.get()
            count_tokens(num_tokens)
            if problem is not None and not isinstance(problem, RequestFailed):
                raise problem
            num_unreached = num_unreached + 1 if problem is not None and problem.unreachable else 0
            yield dialogue, None if problem is None else str(problem)
            if num_unreached >= _MOST_UNREACHED:
                raise InputError(f"no server answers any more: {problem}; what was answered is kept, run again later")
    finally:
        client.stop()
        with suppress(queue.Empty):
            while True:
                inbox.get_nowait()
        for _ in range(num_threads):
            inbox.put(None)


def _ask(dialogue: Dialogue, client: ChatClient, sampling: Sampling) -> int:
    """Answer every turn of a dialogue; gives the tokens written. Raises as ChatClient.ask does."""
    num_tokens = 0
    while not dialogue.is_done:
        seed = None
        if sampling.temperature > 0:
            seed = (sampling.seed + stream_of(dialogue.key, dialogue.num_answers)) % 2**31
        reply = client.ask(dialogue.messages, tools=dialogue.tools, seed=seed)
        message: Message = {"role": "assistant", "content": reply.content}
        if reply.reasoning is not None:
            message["reasoning_content"] = reply.reasoning
        if reply.tool_calls is not None:
            message["tool_calls"] = reply.tool_calls
        dialogue.answer(message, ended=reply.finish_reason in ("stop", "tool_calls"))
        num_tokens += reply.num_tokens
    return num_tokens
