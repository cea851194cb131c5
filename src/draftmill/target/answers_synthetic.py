"""`synthesize`: prompts and answers sampled from the target itself, so that no data is needed.

Owns which sampled prompts are kept: each once, none that is in an evaluation set. The target is made to write a
user's turn by giving it the chat template up to where a user would write; then it answers.
"""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from draftmill.errors import InputError
from draftmill.target.answers_file import AnswerFile
from draftmill.target.answers_local import LocalTarget, answer_locally, load_local, text_of, user_turn_opening
from draftmill.target.answers_progress import AnswerProgress
from draftmill.target.answers_prompts import Dialogue, read_rows
from draftmill.target.generate import Completion, Sampling, generate_batched

_ROUND = 256  # prompts sampled before they are answered; a kill loses at most one round
_PROMPT_TOKENS = 512
_POOREST_SHARE = 0.02  # below this share of new prompts in _TRIED tries the target has no more to say
_TRIED = 1024


@dataclass(frozen=True, slots=True)
class Synthesis:
    """What a run did. rejected: sampled prompts that were not kept, by reason."""

    output: Path
    num_before: int
    num_added: int
    num_cut: int
    rejected: Counter[str]
    seconds: float

    def lines(self) -> list[str]:
        """The summary for people."""
        lines = [f"{self.num_added} chats in {self.seconds:.1f} s -> {self.output}"]
        if self.num_before:
            lines.append(f"{self.num_before} were there before")
        if self.num_cut:
            lines.append(f'{self.num_cut} answers met --max-new-tokens (their rows say "ended": false)')
        lines += [f"  {count} prompts left out: {reason}" for reason, count in self.rejected.most_common()]
        return lines


def synthesize(
    target_name: str,
    num: int,
    output: str | os.PathLike[str],
    sampling: Sampling,
    *,
    answer_temperature: float | None = None,
    exclude: Sequence[str | os.PathLike[str]] = (),
    device: str | None = None,
    dtype: str = "bfloat16",
    batch_size: int | None = None,
    trust_remote_code: bool = False,
) -> Synthesis:
    """Sample chats until the output holds `num`; what is there already counts, and the sampling goes on after it.

    Prompts are compared by their words, without case and punctuation. Both turns are drawn by `sampling`, but a
    prompt has at most 512 tokens, and answers have a temperature of their own where `answer_temperature` says so.

    Raises:
        InputError: an option, the output or a file of evaluation prompts can't be used, or the target repeats itself
            so much that `num` prompts are not to be had.
    """
    if num < 1:
        raise InputError(f"--num must be at least 1, got {num}")
    if sampling.temperature == 0.0:
        raise InputError("--temperature 0 would give one prompt over and over; give a temperature above 0")
    start_s = time.monotonic()
    excluded = {prompt for path in exclude for prompt in _prompts_of(Path(path))}
    answers = replace(sampling, temperature=sampling.temperature if answer_temperature is None else answer_temperature)
    settings = {"command": "synthesize", "target": target_name, "dtype": dtype, **asdict(sampling)}
    settings["answer_temperature"] = answers.temperature
    rejected: Counter[str] = Counter()
    num_cut = 0
    with AnswerFile(output, settings, _remembered) as file:
        num_before = len(file.done)
        seen = {prompt for prompt, _ in file.done}
        next_stream = 1 + max((stream for _, stream in file.done), default=-1)
        if num_before < num:
            target = load_local(
                target_name, device=device, dtype=dtype, batch_size=batch_size, trust_remote_code=trust_remote_code
            )
            with AnswerProgress("synthesizing", num) as progress:
                progress.rows(num_before)
                prompts = _new_prompts(
                    target,
                    sampling,
                    next_stream,
                    min(_ROUND, max(num - num_before, 16)),
                    seen,
                    excluded,
                    rejected,
                    progress,
                )
                while (missing := num - num_before - file.num_added) > 0:
                    batch = list(islice(prompts, min(missing, _ROUND)))
                    for dialogue in _answered(target, batch, answers, rejected, progress):
                        file.append(dialogue.row())
                        num_cut += not dialogue.ended
                        progress.rows()
        seconds = time.monotonic() - start_s
        return Synthesis(file.path, num_before, file.num_added, num_cut, rejected, seconds)


def _remembered(row: dict[str, Any]) -> tuple[str, int]:
    """Of a row written before: its prompt's words, and the number of the stream it was sampled from."""
    return words_of(row["messages"][0]["content"]), int(row["prompt_key"].removeprefix("sample-"))


def words_of(text: str) -> str:
    """What two prompts have in common that count as the same: the words, without case and punctuation."""
    return " ".join(re.findall(r"\w+", text.lower()))


def _new_prompts(
    target: LocalTarget,
    sampling: Sampling,
    stream: int,
    num_round: int,
    seen: set[str],
    excluded: set[str],
    rejected: Counter[str],
    progress: AnswerProgress,
) -> Iterator[Dialogue]:
    """Prompts not seen before, in the order of their streams. Raises InputError when they run dry."""
    opening, closing = user_turn_opening(target)
    special = [str(token) for token in target.tokenizer.all_special_tokens]
    short = replace(sampling, max_new_tokens=min(_PROMPT_TOKENS, sampling.max_new_tokens))
    num_tried = num_kept = 0
    while True:
        streams = range(stream, stream + num_round)
        stream += num_round
        completions = sorted(
            generate_batched(
                target.model,
                target.tokenizer,
                [opening] * num_round,
                short,
                batch_size=target.batch_size,
                streams=streams,
                extra_stop=closing,
                progress=progress.tokens,
            ),
            key=lambda completion: completion.index,
        )
        kept = []
        for number, completion in zip(streams, completions, strict=True):
            text = text_of(target, completion.token_ids).strip()
            words = words_of(text)
            reason = _fault(completion, text, words, special, seen, excluded)
            if reason is not None:
                rejected[reason] += 1
                continue
            seen.add(words)
            kept.append(Dialogue(f"sample-{number}", "", [{"role": "user", "content": text}, None]))
        num_tried, num_kept = num_tried + num_round, num_kept + len(kept)
        if num_tried >= _TRIED:
            if num_kept < _POOREST_SHARE * num_tried:
                raise InputError(
                    f"only {num_kept} of the latest {num_tried} sampled prompts were new and usable; raise"
                    " --temperature or lower --num"
                )
            num_tried = num_kept = 0
        yield from kept


def _fault(
    completion: Completion, text: str, words: str, special: list[str], seen: set[str], excluded: set[str]
) -> str | None:
    """Why a sampled prompt is not kept; None where it is."""
    faults = [
        (not completion.ended, "did not come to an end"),
        (not words, "no words"),
        (any(token in text for token in special), "holds a special token"),
        (words in excluded, "in an evaluation set"),
        (words in seen, "said before"),
    ]
    return next((fault for holds, fault in faults if holds), None)


def _answered(
    target: LocalTarget,
    dialogues: list[Dialogue],
    sampling: Sampling,
    rejected: Counter[str],
    progress: AnswerProgress,
) -> list[Dialogue]:
    """The dialogues with their answers, in the order of their streams, so that a run that goes on loses none."""
    done = []
    for dialogue, problem in answer_locally(target, dialogues, sampling, progress.tokens):
        if problem is None:
            done.append(dialogue)
        else:
            rejected[problem.split(":")[0]] += 1
    return sorted(done, key=lambda dialogue: int(dialogue.key.removeprefix("sample-")))


def _prompts_of(path: Path) -> Iterator[str]:
    """The words of every user turn in a file of evaluation prompts: JSONL rows, or one prompt a line in .txt."""
    if path.suffix == ".txt":
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"{path} can't be read: {error}; give prompts as JSONL or .txt") from None
        yield from (words_of(line) for line in lines if line.strip())
        return
    for where, row in read_rows([path], "--exclude"):
        texts = list(_texts(row))
        if not texts:
            raise InputError(f"{where} holds no prompt: {str(row)[:80]}; wanted prompt, turns or messages")
        yield from map(words_of, texts)


def _texts(row: Any) -> Iterator[str]:
    if not isinstance(row, dict):
        return
    if isinstance(row.get("prompt"), str):
        yield row["prompt"]
    for turn in row.get("turns") or []:
        if isinstance(turn, str):
            yield turn
    for message in row.get("messages") or row.get("conversations") or []:
        if isinstance(message, dict) and message.get("role", message.get("from")) in ("user", "human"):
            text = message.get("content", message.get("value"))
            if isinstance(text, str):
                yield text
