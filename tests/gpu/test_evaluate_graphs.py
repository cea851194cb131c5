"""Decoding steps captured as CUDA graphs give what launched ones give."""

from __future__ import annotations

import pytest
import torch

from draftmill.evaluate.decode import Decoder
from draftmill.target.generate_sampling import Sampling
from draftmill.target.model import Target
from evaluate_doubles import KnowingDrafter, random_drafter, reference_greedy, tiny_target

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

PROMPT = [3, 9, 27, 40, 11]


def on_gpu(family: str) -> Target:
    target = tiny_target(family)
    return Target(target.model.to("cuda"))


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "gemma3_text"])
def test_captured_steps_decode_the_target_s_own_output(family: str) -> None:
    target = on_gpu(family)
    expected = reference_greedy(target, PROMPT, 25)
    wrong_at = {6, 7, 9, 12, 16, 21}
    known = {5 + index: (token + 1) % 64 if 5 + index in wrong_at else token for index, token in enumerate(expected)}
    decoder = Decoder(target, KnowingDrafter(target, 6, known).to("cuda"), graphs="on")
    for prompt_round in range(2):  # a session's graphs serve one prompt after another
        for num_drafts in (0, 1, 2, 5):
            response = decoder.generate(PROMPT, num_drafts=num_drafts, sampling=Sampling(max_new_tokens=25))
            assert response.tokens == expected, (prompt_round, num_drafts)
            assert {step.accepted for step in response.steps} >= set(range(num_drafts + 1))
    assert decoder.why_eager is None


@pytest.mark.parametrize(
    "sampling", [Sampling(max_new_tokens=30), Sampling(max_new_tokens=30, temperature=1.0, top_k=20, top_p=0.9)]
)
def test_captured_and_launched_steps_agree_with_a_real_drafter(sampling: Sampling) -> None:
    target = on_gpu("llama")
    drafter = random_drafter(target, 5, sliding_window=4, sliding_layers=[1]).to("cuda")
    answers = [
        Decoder(target, drafter, graphs=graphs).generate(PROMPT, num_drafts=4, sampling=sampling)
        for graphs in ("on", "off")
    ]
    assert answers[0].tokens == answers[1].tokens
    assert answers[0].steps == answers[1].steps


def test_recurrent_targets_are_launched_and_say_so() -> None:
    target = on_gpu("qwen3_next")
    expected = reference_greedy(target, PROMPT, 20)
    decoder = Decoder(target, random_drafter(target).to("cuda"))
    assert decoder.generate(PROMPT, num_drafts=3, sampling=Sampling(max_new_tokens=20)).tokens == expected
    assert decoder.why_eager is not None
    assert "recurrent" in decoder.why_eager
