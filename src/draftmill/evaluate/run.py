"""An evaluation: every prompt decoded plainly and with the drafter, in one process, one after the other.

Owns the order of the trials, the rendering of conversations and what is measured. Never prints, never writes a file.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from draftmill.drafter.network import Drafter
from draftmill.errors import InputError
from draftmill.evaluate.decode import Decoder, Graphs, Response
from draftmill.evaluate.prompts import Prompt
from draftmill.target.generate import stop_tokens
from draftmill.target.generate_sampling import Sampling
from draftmill.target.model import Target

Thinking = Literal["auto", "on", "off"]
_WARM_UP_TOKENS = 8
_SOME_ANSWER = "Yes."
"""What stands for the target's answer while nothing is decoded yet."""


@dataclass(frozen=True)
class Trial:
    """One answer: a turn of a prompt, decoded plainly and with each number of drafted tokens.

    thinking  whether the chat template was asked for thinking; None where it has no such switch
    """

    suite: str
    category: str
    name: str
    turn: int
    thinking: bool | None
    num_prompt_tokens: int
    plain: Response
    drafted: dict[int, Response]


@dataclass(frozen=True)
class Evaluation:
    """What an evaluation saw.

    draft_tokens  the numbers of drafted tokens tried, ascending
    graphed       whether steps ran as CUDA graphs; why_eager says why not, where they might have
    left_out      follow-up turns that no longer fitted into the target's positions
    missing       answers that were not decoded, for the evaluation was ended before them
    why_ended     why it was, where a chat template refused a follow-up turn after the target's answer
    """

    trials: list[Trial]
    draft_tokens: tuple[int, ...]
    sampling: Sampling
    block_size: int
    graphed: bool
    why_eager: str | None
    left_out: int
    missing: int = 0
    why_ended: str | None = None


def default_draft_tokens(block_size: int) -> tuple[int, ...]:
    """The sweep tried by default: powers of two below the whole block, and the whole block."""
    largest = block_size - 1
    return (*(1 << power for power in range(largest.bit_length()) if 1 << power < largest), largest)


def evaluate(
    drafter: Drafter,
    target: Target,
    prompts: Sequence[Prompt],
    *,
    sampling: Sampling,
    draft_tokens: Sequence[int] | None = None,
    thinking: Thinking = "auto",
    graphs: Graphs = "auto",
    progress: Callable[[int, int, Trial], None] | None = None,
    ended: Callable[[], bool] = lambda: False,
) -> Evaluation:
    """Decode every prompt plainly and speculatively, interleaved, and time both.

    drafter, target on one device in one type; sampling also gives the longest answer and the seed. draft_tokens: the
    numbers of drafted tokens to try, by default a sweep. thinking: which modes of a template with `enable_thinking`,
    "auto" is both. progress: called after each trial with its number, how many there will be, and the trial. ended:
    asked before each trial whether to leave the rest.
    Raises InputError for no prompts, a prompt too long or that the chat template refuses, follow-up turns without a
    template, a drafter of another target, or counts out of its range. A template that refuses a follow-up turn only
    after an answer that the target gave ends the evaluation there, with what was decoded.
    """
    if not prompts:
        raise InputError("there is no prompt to evaluate on; give --suite or --prompts with at least one")
    decoder = Decoder(target, drafter, graphs=graphs)
    counts = checked_counts(draft_tokens, decoder.max_drafts)
    modes = _modes(target.tokenizer, thinking)
    encoded = {
        (index, mode): _encode(target.tokenizer, prompt, list(prompt.messages), mode)
        for index, prompt in enumerate(prompts)
        for mode in _modes_of(prompt, modes)
    }
    for (index, mode), ids in encoded.items():
        _check_room(decoder, prompts[index], ids)
        _check_follow_ups(target.tokenizer, prompts[index], mode)
    stop = stop_tokens(target.model, target.tokenizer)
    _warm_up(decoder, next(iter(encoded.values())), counts, sampling)

    total = sum((1 + len(prompts[index].follow_ups)) for index, _ in encoded)
    trials: list[Trial] = []
    left_out, why_ended = 0, None
    try:
        for (index, mode), ids in encoded.items():
            prompt, done = prompts[index], 0
            for trial in _conversation(decoder, prompt, mode, ids, counts, sampling, stop, len(trials), ended):
                trials.append(trial)
                done += 1
                if progress is not None:
                    progress(len(trials), total - left_out, trial)
            left_out += 1 + len(prompt.follow_ups) - done
    except _Ended as end:
        why_ended = end.reason
    graphed = decoder.graphs != "off" and decoder.why_eager is None
    missing = total - left_out - len(trials)
    return Evaluation(
        trials,
        counts,
        sampling,
        drafter.shape.block_size,
        graphed,
        decoder.why_eager,
        left_out,
        missing,
        why_ended,
    )


class _Ended(Exception):
    """No further answer is wanted, or for this reason none can be asked for."""

    def __init__(self, reason: str | None = None) -> None:
        super().__init__(reason)
        self.reason = reason


def _conversation(
    decoder: Decoder,
    prompt: Prompt,
    thinking: bool | None,
    ids: list[int],
    counts: tuple[int, ...],
    sampling: Sampling,
    stop: Collection[int],
    first_stream: int,
    ended: Callable[[], bool],
) -> Iterator[Trial]:
    """The turns of one prompt, each after the target's own answer to the one before, as long as they fit.

    Raises _Ended where another turn would follow and none is wanted any more, or the chat template refuses it.
    """
    tokenizer = decoder.target.tokenizer
    messages = list(prompt.messages)
    for turn in range(1 + len(prompt.follow_ups)):
        if ended():
            raise _Ended
        plain, drafted = _trial(decoder, ids, counts, sampling, stop, first_stream + turn)
        yield Trial(prompt.suite, prompt.category, prompt.name, turn + 1, thinking, len(ids), plain, drafted)
        if turn == len(prompt.follow_ups):
            return
        answer = tokenizer.decode(plain.tokens, skip_special_tokens=True)
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": prompt.follow_ups[turn]}]
        try:
            ids = _encode(tokenizer, prompt, messages, thinking)
        except InputError as error:
            raise _Ended(f"{error} (its follow-up {turn + 1}, after the target's answer)") from None
        if not decoder.fits(len(ids)):
            return


def _trial(
    decoder: Decoder, ids: list[int], counts: tuple[int, ...], sampling: Sampling, stop: Collection[int], stream: int
) -> tuple[Response, dict[int, Response]]:
    """All ways of decoding one prompt; which one comes first moves on from prompt to prompt, so none is favoured."""
    order = [0, *counts]
    first = stream % len(order)
    found: dict[int, Response] = {}
    for count in order[first:] + order[:first]:
        decoder.prepare(len(ids), count, sampling)
        found[count] = decoder.generate(ids, num_drafts=count, sampling=sampling, stop=stop, stream=stream)
    plain = found.pop(0)
    return plain, dict(sorted(found.items()))


def _warm_up(decoder: Decoder, ids: list[int], counts: tuple[int, ...], sampling: Sampling) -> None:
    """Run every kind of step once, untimed: kernels are loaded, and how steps run is settled for all of them."""
    brief = replace(sampling, max_new_tokens=min(sampling.max_new_tokens, _WARM_UP_TOKENS))
    for count in (0, *counts):
        decoder.prepare(len(ids), count, sampling)
    for count in (0, *counts):
        decoder.generate(ids, num_drafts=count, sampling=brief)


def checked_counts(draft_tokens: Sequence[int] | None, largest: int) -> tuple[int, ...]:
    """The numbers of drafted tokens to compare, ascending, at most `largest`; a sweep for None. Raises InputError."""
    counts = tuple(sorted(set(draft_tokens))) if draft_tokens is not None else default_draft_tokens(largest + 1)
    if not counts or counts[0] < 1 or counts[-1] > largest:
        raise InputError(
            f"this drafter drafts 1 to {largest} tokens a step, got {', '.join(map(str, counts)) or 'none'}"
        )
    return counts


def _modes(tokenizer: Any, thinking: Thinking) -> list[bool | None]:
    has_switch = "enable_thinking" in str(getattr(tokenizer, "chat_template", None) or "")
    if thinking == "auto":
        return [True, False] if has_switch else [None]
    if not has_switch:
        raise InputError("the target's chat template has no enable_thinking; leave --thinking out")
    return [thinking == "on"]


def _modes_of(prompt: Prompt, modes: list[bool | None]) -> list[bool | None]:
    return [None] if prompt.token_ids else modes


def _encode(tokenizer: Any, prompt: Prompt, messages: list[dict[str, str]], thinking: bool | None) -> list[int]:
    """Token ids of a conversation up to the opening of the answer; a lone text as it is where there is no template."""
    import jinja2

    if prompt.token_ids:
        return list(prompt.token_ids)
    if not getattr(tokenizer, "chat_template", None):
        if len(messages) == 1:
            return list(tokenizer(messages[0]["content"]).input_ids)
        raise InputError(f"prompt {prompt.name!r} is a chat, and the target's tokenizer has no chat template")
    options = {} if thinking is None else {"enable_thinking": thinking}
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **options)
    except (jinja2.TemplateError, TypeError, KeyError, ValueError) as error:
        raise InputError(f"the target's chat template refuses prompt {prompt.name!r}: {error}") from None
    return list(tokenizer(text, add_special_tokens=False).input_ids)


def _check_follow_ups(tokenizer: Any, prompt: Prompt, thinking: bool | None) -> None:
    """Raise InputError where the follow-up turns can't be asked whatever the target answers."""
    if not prompt.follow_ups:
        return
    if not getattr(tokenizer, "chat_template", None):
        raise InputError(
            f"prompt {prompt.name!r} of {prompt.suite} has follow-up turns, and the target's tokenizer has no chat "
            "template; give prompts of one turn"
        )
    messages = list(prompt.messages)
    for text in prompt.follow_ups:
        messages += [{"role": "assistant", "content": _SOME_ANSWER}, {"role": "user", "content": text}]
        _encode(tokenizer, prompt, messages, thinking)


def _check_room(decoder: Decoder, prompt: Prompt, ids: list[int]) -> None:
    try:
        decoder.room(len(ids), 1)
    except InputError as error:
        raise InputError(f"prompt {prompt.name!r} of {prompt.suite}: {error}") from None
