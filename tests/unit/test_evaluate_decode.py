"""Decoding: speculative output is plain output, whatever is drafted; what is counted is what happened."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig

from draftmill.errors import InputError
from draftmill.evaluate.acceptance import StepRecord
from draftmill.evaluate.caches import FixedDrafterCache, TargetCache
from draftmill.evaluate.checks import check_cached_forward
from draftmill.evaluate.decode import Decoder
from draftmill.evaluate.session import Session
from draftmill.target.generate_sampling import Sampling
from evaluate_doubles import FAMILIES, KnowingDrafter, random_drafter, reference_greedy, tiny_target

PROMPT = [3, 9, 27, 40, 11]
GREEDY = Sampling(max_new_tokens=25)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def by_position(prompt: list[int], tokens: list[int]) -> dict[int, int]:
    return {len(prompt) + index: token for index, token in enumerate(tokens)}


@pytest.mark.parametrize("family", FAMILIES)
def test_speculative_output_is_the_target_s_own(family: str) -> None:
    target = tiny_target(family)
    expected = reference_greedy(target, PROMPT, 25)
    assert len(set(expected)) > 4  # a text on which wrong caches show
    decoder = Decoder(target, random_drafter(target, block_size=6))
    assert decoder.generate(PROMPT, num_drafts=0, sampling=GREEDY).tokens == expected
    assert decoder.generate(PROMPT, num_drafts=5, sampling=GREEDY).tokens == expected

    # Wrong at places ever further apart: runs of every length, every way to set the caches back.
    wrong_at = {6, 7, 9, 12, 16, 21}
    known = by_position(PROMPT, expected)
    known = {place: (token + 1) % 64 if place in wrong_at else token for place, token in known.items()}
    decoder = Decoder(target, KnowingDrafter(target, 6, known))
    for num_drafts in (1, 2, 5):
        response = decoder.generate(PROMPT, num_drafts=num_drafts, sampling=GREEDY)
        assert response.tokens == expected
        assert 1 + sum(step.tokens for step in response.steps) == 25
        assert {step.accepted for step in response.steps} >= set(range(num_drafts + 1))


def test_always_right_gives_the_block_size_and_never_right_gives_one() -> None:
    target = tiny_target()
    expected = reference_greedy(target, PROMPT, 31)
    known = by_position(PROMPT, expected)
    sampling = Sampling(max_new_tokens=1 + 5 * 6)
    right = Decoder(target, KnowingDrafter(target, 6, known))
    response = right.generate(PROMPT, num_drafts=5, sampling=sampling)
    assert response.tokens == expected
    assert response.steps == [StepRecord(6, 5, 5)] * 5

    response = right.generate(PROMPT, num_drafts=2, sampling=sampling)
    assert response.tokens == expected
    assert response.steps == [StepRecord(3, 2, 2)] * 10

    wrong = {place: (token + 1) % 64 for place, token in known.items()}
    response = Decoder(target, KnowingDrafter(target, 6, wrong)).generate(PROMPT, num_drafts=5, sampling=sampling)
    assert response.tokens == expected
    assert response.steps == [StepRecord(1, 0, 5)] * 30


def test_plain_decoding_counts_one_token_a_step() -> None:
    target = tiny_target()
    response = Decoder(target).generate(PROMPT, num_drafts=0, sampling=GREEDY)
    assert response.steps == [StepRecord(1, 0, 0)] * 24
    assert response.num_decoded == 24
    assert response.prefill_s > 0
    assert response.decode_s > 0
    with pytest.raises(InputError, match="drafts 1 to 0 tokens a step, got 2"):
        Decoder(target).generate(PROMPT, num_drafts=2, sampling=GREEDY)


def test_the_drafter_s_work_on_the_prompt_is_time_of_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock of the target's forwards and the drafter's own: left out, it would flatter the speed-up."""
    clock = SimpleNamespace(now_s=0.0)
    monkeypatch.setattr("draftmill.evaluate.decode.time", SimpleNamespace(perf_counter=lambda: clock.now_s))
    target = tiny_target()
    drafter = random_drafter(target, block_size=6)
    decoder = Decoder(target, drafter)
    extend = drafter.extend

    def forward_began(_module: Any, _arguments: Any, options: dict[str, Any]) -> None:
        clock.now_s += 10.0 if options["input_ids"].shape[1] == len(PROMPT) else 1.0

    def extended(cache: Any, features_NF: torch.Tensor, positions_N: torch.Tensor) -> None:
        clock.now_s += 1000.0 if positions_N.shape[0] == len(PROMPT) else 100.0
        extend(cache, features_NF, positions_N)

    target.model.register_forward_pre_hook(forward_began, with_kwargs=True)
    monkeypatch.setattr(drafter, "extend", extended)
    drafted = decoder.generate(PROMPT, num_drafts=5, sampling=GREEDY)
    assert (drafted.prefill_s, drafted.decode_s) == (10.0, 1000.0 + 101.0 * len(drafted.steps))
    plain = decoder.generate(PROMPT, num_drafts=0, sampling=GREEDY)
    assert (plain.prefill_s, plain.decode_s) == (10.0, 24.0)


def test_a_stop_token_inside_a_block_ends_the_response_there() -> None:
    target = tiny_target()
    expected = reference_greedy(target, PROMPT, 25)
    decoder = Decoder(target, KnowingDrafter(target, 6, by_position(PROMPT, expected)))
    stop = next(token for index, token in enumerate(expected) if index == expected.index(token) and index >= 3)
    end = expected.index(stop)
    plain = decoder.generate(PROMPT, num_drafts=0, sampling=GREEDY, stop={stop})
    response = decoder.generate(PROMPT, num_drafts=5, sampling=GREEDY, stop={stop})
    assert plain.tokens == response.tokens == expected[: end + 1]
    assert plain.ended
    assert response.ended
    # The drafts after the stop have no verdict: they are neither accepted nor refused.
    inside = end - 6 * ((end - 1) // 6)
    assert response.steps[-1] == StepRecord(inside, min(inside, 5), inside if inside < 6 else 5)

    first = decoder.generate(PROMPT, num_drafts=5, sampling=GREEDY, stop={expected[0]})
    assert (first.tokens, first.steps, first.ended) == (expected[:1], [], True)


def test_the_limit_cuts_a_block() -> None:
    target = tiny_target()
    expected = reference_greedy(target, PROMPT, 9)
    decoder = Decoder(target, KnowingDrafter(target, 6, by_position(PROMPT, expected)))
    response = decoder.generate(PROMPT, num_drafts=5, sampling=Sampling(max_new_tokens=9))
    assert response.tokens == expected
    assert not response.ended
    assert response.steps == [StepRecord(6, 5, 5), StepRecord(2, 2, 2)]


def test_a_session_serves_one_prompt_after_another() -> None:
    target = tiny_target("mistral")
    decoder = Decoder(target, random_drafter(target))
    prompts = [[1, 2, 3] * 20, PROMPT, [60, 2], [1, 2, 3] * 20]
    for prompt in prompts:
        response = decoder.generate(prompt, num_drafts=3, sampling=GREEDY)
        assert response.tokens == reference_greedy(target, prompt, 25)


def test_positions_far_beyond_and_up_to_the_target_s_last() -> None:
    target = tiny_target(max_position_embeddings=330)
    prompt = [(5 * index + 1) % 64 for index in range(300)]
    expected = reference_greedy(target, prompt, 30)
    decoder = Decoder(target, KnowingDrafter(target, 6, by_position(prompt, expected)))
    response = decoder.generate(prompt, num_drafts=5, sampling=Sampling(max_new_tokens=100))
    assert response.tokens == expected  # 330 positions, and not one more
    with pytest.raises(InputError, match="a prompt of 330 tokens is too long: the target holds 330"):
        decoder.generate([1] * 330, num_drafts=0, sampling=GREEDY)
    with pytest.raises(InputError, match="empty"):
        decoder.generate([], num_drafts=0, sampling=GREEDY)


def test_learned_positions_end_where_the_table_ends() -> None:
    target = tiny_target("gpt2", max_position_embeddings=40)
    expected = reference_greedy(target, PROMPT, 35)
    decoder = Decoder(target)
    assert decoder.generate(PROMPT, num_drafts=0, sampling=Sampling(max_new_tokens=99)).tokens == expected


def test_a_drafter_of_another_target_is_refused() -> None:
    target = tiny_target()
    other = tiny_target(hidden_size=48, vocab_size=80)
    message = "hidden size is 48, the target's is 32; its vocabulary is 80, the target's is 64"
    with pytest.raises(InputError, match=message):
        Decoder(target, random_drafter(other))
    with pytest.raises(InputError, match="number of target layers is 5, the target's is 4"):
        Decoder(target, random_drafter(tiny_target(num_hidden_layers=5)))


def test_a_target_that_can_t_go_on_from_a_cache_is_refused() -> None:
    target = tiny_target()
    forward = target.model.forward

    def forgetful(input_ids: torch.Tensor, position_ids: torch.Tensor | None = None, cache=None, use_cache=True):
        return forward(input_ids=input_ids, position_ids=position_ids, use_cache=False)

    target.model.forward = forgetful
    with pytest.raises(InputError, match="Qwen3ForCausalLM gives other logits from a cache than at once"):
        check_cached_forward(target)


@pytest.mark.parametrize(
    ("family", "changes", "named"),
    [
        ("mamba", {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}, "'mamba' has no attention layer"),
        ("falcon_h1", {"hidden_size": 32, "num_hidden_layers": 2}, "'falcon_h1' caches in LinearAttentionAndStatic"),
    ],
)
def test_caches_that_can_t_be_set_back_are_refused_by_name(family: str, changes: dict, named: str) -> None:
    with pytest.raises(InputError, match=named):
        TargetCache(AutoConfig.for_model(family, **changes), 64, torch.zeros((), dtype=torch.int64))


def test_fixed_slots_draft_what_a_growing_cache_drafts() -> None:
    target = tiny_target()
    drafter = random_drafter(target, block_size=5, sliding_window=4, sliding_layers=[1])
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(20, drafter.shape.feature_size, generator=generator)
    block = torch.randn(5, 32, generator=generator)
    length = torch.zeros((), dtype=torch.int64)
    with torch.inference_mode():
        growing = drafter.new_cache(64, "cpu", torch.float32)
        fixed = FixedDrafterCache(drafter.shape, 64, "cpu", torch.float32, length)
        for start, written, kept in [(0, 9, 9), (9, 5, 2), (11, 5, 5), (16, 4, 1)]:
            places = torch.arange(start, start + written)
            drafter.extend(growing, features[places], places)
            growing.crop(start + kept)
            drafter.extend(fixed, features[places], places)
            length.add_(kept)
            positions = torch.arange(start + kept, start + kept + 5)
            expected = drafter.draft(growing, block, positions)
            assert (drafter.draft(fixed, block, positions) - expected).abs().max() < 1e-5 * expected.abs().max()


def test_graphs_are_for_cuda_only() -> None:
    with pytest.raises(InputError, match="graphs can be captured on CUDA only"):
        Decoder(tiny_target(), graphs="on")


class NothingReadBack(TorchDispatchMode):
    """Fails where a tensor's value would be read by the host: what a captured graph can't hold."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        assert name not in ("_local_scalar_dense", "item", "is_nonzero", "nonzero"), "a value was read by the host"
        return function(*args, **(kwargs or {}))


def test_reading_back_is_noticed() -> None:
    value = torch.zeros((), dtype=torch.int64)
    for read in (lambda: value.item(), lambda: bool(value == 0), lambda: PROMPT[value], lambda: value[None].nonzero()):
        with torch.inference_mode(), pytest.raises(AssertionError, match="read by the host"), NothingReadBack():
            read()


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "gemma3_text", "gpt_neox"])
@pytest.mark.parametrize("sampling", [GREEDY, Sampling(max_new_tokens=25, temperature=0.8, top_p=0.9, top_k=9)])
def test_a_step_reads_nothing_back_and_keeps_its_shapes(
    family: str, sampling: Sampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So it can be captured; on a CPU, with transformers told that a stream is being captured."""
    target = tiny_target(family)
    with torch.inference_mode():
        session = Session(target, random_drafter(target), 64, sampling)
        with session.taps(3) as taps:
            session.prefill(PROMPT)
            session.take_prompt(5, taps)
            monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
            for num_drafts in (0, 3):
                with NothingReadBack():
                    result = session.step_eagerly(num_drafts, taps if num_drafts else None)
                assert result.shape == (num_drafts + 2,)
                assert result.dtype == torch.int64
    assert 5 + 2 <= int(session.length) <= 5 + 1 + 4
