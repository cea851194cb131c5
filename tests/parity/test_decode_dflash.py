"""Decoding against dflash 0.1.0's own loop: the same weights and prompts give the same tokens and the same tau."""

from __future__ import annotations

import copy
import time
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import pytest
import torch

from draftmill.checkpoint import zlab
from draftmill.drafter.network import Drafter
from draftmill.evaluate.acceptance import StepRecord, tau_pooled, tau_response_mean
from draftmill.evaluate.decode import Decoder
from draftmill.target.generate_sampling import Sampling
from draftmill.target.model import Target
from evaluate_doubles import overfit, random_drafter, reference_greedy, tiny_target

dflash = pytest.importorskip("dflash.model", reason="dflash 0.1.0 is not installed; `make test` installs it")

PROMPT = [3, 9, 27, 40, 11]
LENGTH = 48
BLOCK = 6


@dataclass
class Trained:
    target: Target
    answer: list[int]
    halfway: Drafter
    knowing: Drafter


@pytest.fixture(scope="module", params=["llama", "qwen3", "tied llama", "sliding drafter"])
def trained(request: pytest.FixtureRequest) -> Trained:
    """A target, its answer to PROMPT, and a drafter that has learned some of it, then nearly all."""
    torch.set_num_threads(1)
    kind = request.param
    if kind == "tied llama":
        target = tiny_target("llama", tie_word_embeddings=True, seed=3)
    else:
        target = tiny_target("qwen3" if kind == "qwen3" else "llama", seed=2)
    answer = reference_greedy(target, PROMPT, LENGTH + BLOCK)
    sliding = {"sliding_window": 9, "sliding_layers": [1]} if kind == "sliding drafter" else {}
    drafter = random_drafter(target, BLOCK, **sliding)
    overfit(drafter, target, PROMPT + answer, first=len(PROMPT), steps=25)
    halfway = copy.deepcopy(drafter)
    overfit(drafter, target, PROMPT + answer, first=len(PROMPT), steps=75)
    return Trained(target, answer, halfway, drafter)


def upstream(drafter: Drafter) -> torch.nn.Module:
    """The peer's model, configured by our export's config and holding this drafter's weights."""
    raw = zlab.to_config(drafter.shape, "float32")
    config = dflash.Qwen3Config(**{key: value for key, value in raw.items() if key not in ("architectures", "dtype")})
    config._attn_implementation = "sdpa"
    model = dflash.DFlashDraftModel(config).float().eval()
    missing, unexpected = model.load_state_dict(drafter.state_dict(), strict=False)
    assert not unexpected
    assert all("rotary" in name for name in missing)
    return model


def same_acceptance(
    target: Target, drafter: Drafter, prompt: list[int], answer: list[int], num_drafts: int
) -> list[StepRecord]:
    """Our steps on a prompt, after both loops gave the answer up to a stop token in as many tokens a step."""
    # A stop token ends the answer, so that no step is cut by the limit: the peer shortens its last blocks there.
    stop = next(token for token in answer[30:] if answer.index(token) >= 30)
    expected = answer[: answer.index(stop) + 1]
    response = Decoder(target, drafter).generate(
        prompt, num_drafts=num_drafts, sampling=Sampling(max_new_tokens=LENGTH), stop={stop}
    )
    theirs = dflash.dflash_generate(
        upstream(drafter),
        target.model,
        torch.tensor([prompt]),
        max_new_tokens=LENGTH + BLOCK,
        stop_token_ids=[stop],
        block_size=num_drafts + 1,
        return_stats=True,
    )
    assert response.tokens == expected == theirs.output_ids[0, len(prompt) :].tolist()
    assert [step.tokens for step in response.steps] == theirs.acceptance_lengths
    assert tau_response_mean([response.steps]) == tau_pooled([response.steps]) == fmean(theirs.acceptance_lengths)
    return response.steps


@pytest.fixture(autouse=True)
def _their_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """The peer's statistics need a GPU only for the clock."""
    monkeypatch.setattr(dflash, "_cuda_time", time.perf_counter)


@pytest.mark.parametrize("num_drafts", [1, 3, BLOCK - 1])
@pytest.mark.parametrize("stage", ["halfway", "knowing"])
def test_same_tokens_and_same_tau(trained: Trained, stage: str, num_drafts: int) -> None:
    steps = same_acceptance(trained.target, getattr(trained, stage), PROMPT, trained.answer, num_drafts)
    tau = fmean(step.tokens for step in steps)
    if num_drafts > 1:
        assert 1.1 < tau < num_drafts if stage == "halfway" else tau > num_drafts


@pytest.mark.parametrize("sliding", [{}, {"sliding_window": 9, "sliding_layers": [1]}], ids=["full", "sliding"])
def test_same_tau_on_a_prompt_of_hundreds_of_tokens(sliding: dict[str, Any]) -> None:
    """The tokens do not depend on the drafts: a position that is wrong far out shows in tau alone."""
    torch.set_num_threads(1)
    target = tiny_target("llama", seed=2)
    prompt = [(7 * index * index + 3) % 61 for index in range(300)]
    answer = reference_greedy(target, prompt, LENGTH + BLOCK)
    drafter = random_drafter(target, BLOCK, **sliding)
    overfit(drafter, target, prompt + answer, first=len(prompt), steps=45)
    steps = same_acceptance(target, drafter, prompt, answer, BLOCK - 1)
    assert len({step.accepted for step in steps}) >= 3


def test_a_drafter_that_knows_the_text_drafts_nearly_whole_blocks(trained: Trained) -> None:
    response = Decoder(trained.target, trained.knowing).generate(
        PROMPT, num_drafts=BLOCK - 1, sampling=Sampling(max_new_tokens=LENGTH)
    )
    assert response.tokens == trained.answer[:LENGTH]
    assert fmean(step.tokens for step in response.steps) > 0.8 * BLOCK
