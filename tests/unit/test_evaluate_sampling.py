"""Rejection sampling: what is kept is distributed as the target's own output.

Chi-square tests at the level 0.001 with fixed seeds: a right rule passes, and wrong ones are shown to fail.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from draftmill.evaluate.decode import Decoder
from draftmill.evaluate.sampling import draw, judge_greedy, judge_sampled, num_uniforms, probabilities
from draftmill.evaluate.session import Session
from draftmill.target.generate_sampling import Sampling, choose_tokens, uniforms
from evaluate_doubles import random_drafter, tiny_target

LEVEL = 0.001


def chance(observed: torch.Tensor, expected: torch.Tensor) -> float:
    """The chance of a chi-square statistic at least this large, cells expected to hold fewer than 5 merged into one."""
    observed, expected = observed.double().flatten(), expected.double().flatten()
    large = expected >= 5
    observed = torch.cat([observed[large], observed[~large].sum()[None]])
    expected = torch.cat([expected[large], expected[~large].sum()[None]])
    if expected[-1] == 0:
        assert observed[-1] == 0
        observed, expected = observed[:-1], expected[:-1]
    statistic = ((observed - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((len(expected) - 1) / 2.0).double(), statistic / 2))


def test_probabilities_by_hand() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log() * 2.0  # at temperature 2 the plain distribution
    assert probabilities(logits, Sampling(temperature=2.0)).tolist() == pytest.approx([0.5, 0.3, 0.15, 0.05])
    cut = probabilities(logits, Sampling(temperature=2.0, top_k=3)).tolist()
    assert cut == pytest.approx([0.5 / 0.95, 0.3 / 0.95, 0.15 / 0.95, 0.0])
    cut = probabilities(logits, Sampling(temperature=2.0, top_p=0.79)).tolist()
    assert cut == pytest.approx([0.625, 0.375, 0.0, 0.0])
    cut = probabilities(logits, Sampling(temperature=2.0, top_p=0.81)).tolist()
    assert cut == pytest.approx([0.5 / 0.95, 0.3 / 0.95, 0.15 / 0.95, 0.0])
    assert probabilities(logits, Sampling(temperature=2.0, top_p=1e-6)).tolist() == [1.0, 0.0, 0.0, 0.0]
    # top-k first, then top-p of what is left: 0.3 / 0.8 of the mass is enough beside the first
    cut = probabilities(logits, Sampling(temperature=2.0, top_k=2, top_p=0.6)).tolist()
    assert cut == [1.0, 0.0, 0.0, 0.0]


def test_draw_inverts_the_cumulative_sum() -> None:
    weights = torch.tensor([0.0, 1.0, 0.0, 3.0, 0.0])
    numbers = torch.tensor([0.0, 0.2499, 0.25, 0.9999999999999999], dtype=torch.float64)
    assert draw(weights.expand(4, -1), numbers).tolist() == [1, 1, 3, 3]


def test_plain_sampling_draws_what_batched_generation_draws() -> None:
    logits = torch.randn(200, 50, generator=torch.Generator().manual_seed(0)) * 2
    numbers = torch.from_numpy(uniforms(5, 1, 200))
    sampling = Sampling(temperature=0.7)
    assert torch.equal(draw(probabilities(logits, sampling), numbers), choose_tokens(logits, sampling, numbers))


def test_judge_greedy_by_hand() -> None:
    logits = torch.eye(6)[[2, 4, 1, 0]]  # the target wants 2, 4, 1, then 0
    for drafts, kept, token in [([2, 4, 1], 3, 0), ([2, 4, 5], 2, 1), ([2, 3, 1], 1, 4), ([0, 4, 1], 0, 2)]:
        accepted, following = judge_greedy(torch.tensor(drafts), logits)
        assert (accepted.tolist(), following.tolist()) == ([kept], [token])
    accepted, following = judge_greedy(torch.zeros(0, dtype=torch.int64), logits[:1])
    assert (accepted.tolist(), following.tolist()) == ([0], [2])


def test_number_of_uniforms() -> None:
    assert num_uniforms(Sampling(), 7) == 0
    assert num_uniforms(Sampling(temperature=1.0), 7) == 15
    assert num_uniforms(Sampling(temperature=1.0), 0) == 1


def test_equal_distributions_keep_every_draft() -> None:
    chances = torch.rand(4, 9, generator=torch.Generator().manual_seed(0)).softmax(-1)
    for seed in range(50):
        numbers = torch.from_numpy(uniforms(seed, 0, 7))
        drafts = draw(chances[:3], numbers[:3])
        accepted, token = judge_sampled(drafts, chances[:3], chances, numbers[3:])
        assert accepted.item() == 3
        assert 0 <= token.item() < 9


@pytest.mark.parametrize("rule", ["rejection", "keeps everything", "redraws from the target"])
def test_the_rule_gives_the_target_s_distribution_and_wrong_rules_do_not(rule: str) -> None:
    """One drafted token and the one after it, 4,000 times: the joint distribution of the two."""
    generator = torch.Generator().manual_seed(3)
    drafted = torch.randn(5, generator=generator).softmax(-1)[None]
    first = torch.randn(5, generator=generator).softmax(-1)
    second = torch.randn(5, 5, generator=generator).softmax(-1)  # after each first token
    trials = 4_000
    numbers = torch.from_numpy(uniforms(11, 0, 4 * trials)).view(trials, 4)
    counts = torch.zeros(5, 5)
    for row in numbers:
        draft = draw(drafted, row[:1])
        wanted = torch.stack([first, second[int(draft)]])
        accepted, token = judge_sampled(draft, drafted, wanted, row[1:3])
        if rule == "keeps everything":
            accepted, token = torch.ones(1), draw(wanted[1:], row[2:3])
        elif rule == "redraws from the target" and not accepted:
            token = draw(wanted[:1], row[2:3])
        pair = (int(draft), int(token)) if accepted else (int(token), int(draw(second[token], row[3:])))
        counts[pair] += 1
    found = chance(counts, trials * first[:, None] * second)
    assert (found > LEVEL) == (rule == "rejection"), found


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(max_new_tokens=3, temperature=1.0, seed=1),
        Sampling(max_new_tokens=3, temperature=0.6, top_p=0.9, top_k=2, seed=2),
    ],
)
def test_sampled_output_has_the_target_s_distribution(sampling: Sampling) -> None:
    """Whole decodes on a vocabulary of 3: the joint distribution of three tokens, against the exact one."""
    torch.set_num_threads(1)
    target = tiny_target("llama", vocab_size=3, num_hidden_layers=2, seed=4, pad_token_id=None, eos_token_id=None)
    drafter = random_drafter(target, 3, layer_ids=(0,), mask_token_id=0, num_layers=1, seed=5)
    decoder = Decoder(target, drafter)
    prompt, trials = [1, 2], 300
    counts = torch.zeros(3, 3, 3)
    kept = set()
    for stream in range(trials):
        response = decoder.generate(prompt, num_drafts=2, sampling=sampling, stream=stream)
        counts[tuple(response.tokens)] += 1
        kept |= {step.accepted for step in response.steps}
    assert kept == {0, 1, 2}

    texts = torch.tensor([[*prompt, *text] for text in itertools.product(range(3), repeat=3)])
    with torch.inference_mode():
        chances = probabilities(target.model(input_ids=texts, use_cache=False).logits[:, 1:4], sampling)
    exact = chances.gather(-1, texts[:, 2:, None])[..., 0].prod(-1)
    assert exact.sum().item() == pytest.approx(1.0, abs=1e-5)
    assert chance(counts, trials * exact) > LEVEL


def test_drafts_verdicts_and_the_token_after_them_are_decided_by_numbers_of_their_own() -> None:
    """Were a draft's number its verdict's too, what is kept would lean towards the drafter."""
    torch.set_num_threads(1)
    target, most = tiny_target("llama"), 1.0 - 1e-9
    sampling = Sampling(temperature=1.0)

    def step(drafts: float, verdicts: float, after: float) -> tuple[int, int, list[int]]:
        session.set_uniforms(torch.tensor([0.5], dtype=torch.float64))
        session.prefill([5, 6])
        session.take_prompt(2, taps)
        session.set_uniforms(torch.tensor([drafts] * 3 + [verdicts] * 3 + [after], dtype=torch.float64))
        accepted, token, *drafted = session.step(3, taps).tolist()
        return accepted, token, drafted

    with torch.inference_mode():
        session = Session(target, random_drafter(target), 64, sampling)
        with session.taps(3) as taps:
            refused, drafted = [], []
            for drafts in (0.0, 0.3, 0.6, most):
                kept, first, same = step(drafts, 0.0, 0.0)
                assert (kept, first) == (3, 0)  # whatever is drafted: the target gives every token some chance
                assert step(drafts, 0.0, most) == (3, 63, same)
                accepted, _, again = step(drafts, most, 0.0)
                assert again == same
                refused.append(accepted)
                drafted.append(same)
    assert min(refused) == 0
    assert (drafted[0], drafted[-1]) == ([0] * 3, [63] * 3)
    assert drafted[1] != drafted[2]


def test_every_step_of_a_response_gets_fresh_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    given: list[torch.Tensor] = []
    inner = Session.set_uniforms

    def note(session: Session, numbers: torch.Tensor) -> None:
        given.append(numbers)
        inner(session, numbers)

    monkeypatch.setattr(Session, "set_uniforms", note)
    target = tiny_target("llama")
    sampling = Sampling(max_new_tokens=12, temperature=1.0, seed=7)
    response = Decoder(target, random_drafter(target)).generate([5, 6], num_drafts=3, sampling=sampling, stream=4)
    assert [len(numbers) for numbers in given] == [1] + [7] * len(response.steps)
    used = torch.cat(given)
    assert torch.equal(used, torch.from_numpy(uniforms(7, 4, len(used))))


def test_a_seed_and_stream_name_one_response() -> None:
    torch.set_num_threads(1)
    target = tiny_target("llama")
    decoder = Decoder(target, random_drafter(target))
    sampling = Sampling(max_new_tokens=12, temperature=1.0, seed=7)

    def tokens(stream: int, num_drafts: int = 3) -> list[int]:
        return decoder.generate([5, 6], num_drafts=num_drafts, sampling=sampling, stream=stream).tokens

    assert tokens(0) == tokens(0)
    assert tokens(0, 0) == tokens(0, 0)
    assert tokens(0) != tokens(1)
