"""Batched generation: equal to decoding each prompt alone, and sampling as it is defined."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    MistralConfig,
    Qwen3NextConfig,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from answers_doubles import tiny_config, tiny_model, tiny_tokenizer
from draftmill.errors import InputError
from draftmill.target import generate_slots
from draftmill.target.generate import Completion, Sampling, encode, generate_batched, stop_tokens
from draftmill.target.generate_sampling import choose_tokens, uniforms
from draftmill.target.generate_slots import unfit


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


class _OnlyConfig:
    """As much of a model as is looked at before any row is kept."""

    training = False
    generation_config = None

    def __init__(self, config: Any) -> None:
        self.config = config

    def get_input_embeddings(self) -> Any:
        return torch.nn.Embedding(1, 1)


def _prompts(count: int = 14) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(1, 60, (count,), generator=generator).tolist()
    return [torch.randint(3, 99, (length,), generator=generator).tolist() for length in lengths]


def _alone(model: Any, prompt: list[int], max_new_tokens: int) -> tuple[list[int], bool]:
    """Hugging Face's own greedy decoding of one prompt, by forwards without a cache."""
    written: list[int] = []
    for _ in range(max_new_tokens):
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + written]), use_cache=False).logits
        token = int(logits[0, -1].argmax())
        if token == 2:
            return written, True
        written.append(token)
    return written, False


def _by_index(completions: Any) -> list[Completion]:
    return sorted(completions, key=lambda completion: completion.index)


@pytest.mark.parametrize("kept", ["joined", "slots"])
@pytest.mark.parametrize("batch_size", [1, 3, 5, None])
def test_greedy_equals_each_prompt_alone(batch_size: int | None, kept: Any) -> None:
    model, prompts = tiny_model(), _prompts()
    got = _by_index(generate_batched(model, tiny_tokenizer(), prompts, Sampling(40), batch_size=batch_size, kept=kept))
    expected = [_alone(model, prompt, 40) for prompt in prompts]
    assert [(c.token_ids, c.ended) for c in got] == expected
    assert {ended for _, ended in expected} == {True, False}  # rows leave early and late
    assert [c.prompt_ids for c in got] == prompts


@pytest.mark.smollm2
def test_the_real_target_writes_what_transformers_writes(smollm2_folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2_folder)
    model = AutoModelForCausalLM.from_pretrained(smollm2_folder, dtype=torch.float32).eval()
    questions = ["What is 2+3?", "Tell me about cats that live in a house and eat only fish on Fridays.", "Hi"]
    prompts = [[{"role": "user", "content": question}] for question in questions]
    got = _by_index(generate_batched(model, tokenizer, prompts, Sampling(20)))
    for completion in got:
        ids = torch.tensor([completion.prompt_ids])
        written = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False)
        written = written[0, ids.shape[1] :].tolist()
        assert completion.token_ids == (written[:-1] if written[-1] == 2 else written)
        assert completion.ended == (written[-1] == 2)
    assert tokenizer.decode(got[0].token_ids) == "2 + 3 = 5"


@pytest.mark.parametrize("kept", ["joined", "slots"])
def test_windowed_cache_equals_each_prompt_alone(kept: Any) -> None:
    """A cache that keeps only a window takes new rows when it is empty, slots keep all; results stay the same."""
    small = tiny_config().to_dict()
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    config = MistralConfig(
        **{name: small[name] for name in names}, num_key_value_heads=2, sliding_window=8, eos_token_id=2
    )
    model, prompts = tiny_model(config), _prompts(8)
    got = _by_index(generate_batched(model, tiny_tokenizer(), prompts, Sampling(20), batch_size=3, kept=kept))
    assert [(c.token_ids, c.ended) for c in got] == [_alone(model, prompt, 20) for prompt in prompts]


@pytest.mark.parametrize(("temperature", "top_k"), [(0.0, 0), (1.0, 0), (1.2, 7)])
def test_slots_write_what_joined_rows_write(temperature: float, top_k: int) -> None:
    """Prompts of one token, equal prompts, more prompts than slots, answers that end at once or at their limit."""
    model = tiny_model()
    prompts = [[5], *_prompts(9), [7, 9], [5]]
    sampling = Sampling(19, temperature=temperature, top_k=top_k, seed=3)
    counts: list[int] = []

    def run(kept: Any, batch_size: int) -> list[Completion]:
        options: dict[str, Any] = {"batch_size": batch_size, "kept": kept, "progress": counts.append}
        return _by_index(generate_batched(model, tiny_tokenizer(), prompts, sampling, **options))

    expected = run("joined", 4)
    counts.clear()
    got = run("slots", 4)
    assert got == expected
    assert sum(counts) == sum(len(c.token_ids) + c.ended for c in got)
    assert run("slots", 64) == expected
    assert {c.ended for c in got} == {True, False}


def test_a_target_that_slots_do_not_fit_is_refused_or_decoded_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Qwen3NextConfig(
        vocab_size=99, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, eos_token_id=2, num_experts=2, num_experts_per_tok=1, moe_intermediate_size=16,
        shared_expert_intermediate_size=16, linear_num_key_heads=2, linear_num_value_heads=4,
        linear_key_head_dim=8, linear_value_head_dim=8,
    )  # fmt: skip
    why = unfit(SimpleNamespace(config=config))
    assert why is not None
    assert why.startswith("it caches in ")
    fill = generate_slots._SlotLayer.fill
    monkeypatch.setattr(
        generate_slots._SlotLayer, "fill", lambda self, at, keys, values: fill(self, at, 0 * keys, values)
    )
    with pytest.raises(RuntimeError, match="logits from slots differ from the model's own"):
        list(generate_batched(tiny_model(), tiny_tokenizer(), [[5, 6]], Sampling(2), kept="slots"))
    with pytest.raises(RuntimeError, match="can't be decoded in slots: it caches in "):
        list(generate_batched(_OnlyConfig(config), tiny_tokenizer(), [[5, 6]], Sampling(2), kept="slots"))


def test_sampling_does_not_depend_on_the_batch() -> None:
    model, prompts = tiny_model(), _prompts(9)
    sampling = Sampling(16, temperature=1.0, top_p=0.9, seed=5)

    def run(batch_size: int, seed: int = 5) -> list[list[int]]:
        chosen = Sampling(16, temperature=1.0, top_p=0.9, seed=seed)
        return [
            c.token_ids
            for c in _by_index(generate_batched(model, tiny_tokenizer(), prompts, chosen, batch_size=batch_size))
        ]

    assert run(1) == run(4) == run(9)
    assert run(4) != run(4, seed=6)
    streams = [7, 7, 8]
    same = _by_index(generate_batched(model, tiny_tokenizer(), [prompts[0]] * 3, sampling, streams=streams))
    assert same[0].token_ids == same[1].token_ids != same[2].token_ids


def test_progress_counts_every_token() -> None:
    counts: list[int] = []
    got = list(
        generate_batched(tiny_model(), tiny_tokenizer(), _prompts(7), Sampling(9), batch_size=2, progress=counts.append)
    )
    assert sum(counts) == sum(len(c.token_ids) + c.ended for c in got)


@pytest.mark.parametrize(
    ("top_k", "top_p", "temperature"), [(0, 1.0, 1.0), (5, 1.0, 0.7), (0, 0.8, 1.3), (12, 0.6, 1.0)]
)
def test_drawn_shares_are_the_probabilities(top_k: int, top_p: float, temperature: float) -> None:
    """Over evenly spread numbers every token is drawn in proportion to Hugging Face's own filtered distribution."""
    logits_V = torch.randn(40, generator=torch.Generator().manual_seed(0)) * 2
    expected = (logits_V / temperature).unsqueeze(0)
    if top_k:
        expected = TopKLogitsWarper(top_k)(None, expected)
    if top_p < 1.0:
        expected = TopPLogitsWarper(top_p)(None, expected)
    count = 20_000
    numbers = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    tokens = choose_tokens(logits_V.expand(count, -1), Sampling(1, temperature, top_p, top_k), numbers)
    drawn = torch.bincount(tokens, minlength=40) / count
    torch.testing.assert_close(drawn, expected.softmax(-1)[0], atol=2 / count, rtol=0)


def test_random_numbers_belong_to_seed_and_stream() -> None:
    assert (uniforms(1, 2, 5) == uniforms(1, 2, 9)[:5]).all()
    assert (uniforms(1, 2, 5) != uniforms(1, 3, 5)).all()
    assert (uniforms(1, 2, 5) != uniforms(2, 2, 5)).all()


def test_answer_stops_where_positions_end() -> None:
    model = tiny_model()
    prompt = [5, 60, 9, 33, 71] * 52
    (got,) = generate_batched(model, tiny_tokenizer(), [prompt[:250]], Sampling(40))
    assert (got.token_ids, got.ended) == _alone(model, prompt[:250], 6)
    assert len(got.token_ids) == 6
    with pytest.raises(InputError, match=r"prompt 0 has 256 tokens, the target holds 256; shorten it"):
        list(generate_batched(model, tiny_tokenizer(), [prompt[:256]], Sampling(40)))


def test_messages_go_through_the_template() -> None:
    tokenizer = tiny_tokenizer()
    ids = encode(tokenizer, [{"role": "user", "content": "Hi"}])
    assert tokenizer.decode(ids) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    with pytest.raises(InputError, match="chat template refuses these messages: no such role"):
        encode(tokenizer, [{"role": "forbidden", "content": "Hi"}])
    tokenizer.chat_template = None
    with pytest.raises(InputError, match="no chat template"):
        encode(tokenizer, [{"role": "user", "content": "Hi"}])


def test_every_end_token_counts() -> None:
    model = tiny_model()
    model.generation_config.eos_token_id = [5, 6]
    assert stop_tokens(model, tiny_tokenizer()) == {2, 5, 6}
    model.generation_config.eos_token_id = None
    assert stop_tokens(model, tiny_tokenizer()) == {2}


def test_misuse_is_refused() -> None:
    model = tiny_model()
    with pytest.raises(InputError, match="prompt 1 is empty"):
        list(generate_batched(model, tiny_tokenizer(), [[5], []]))
    with pytest.raises(RuntimeError, match="eval mode"):
        list(generate_batched(model.train(), tiny_tokenizer(), [[5]]))
    for changes, text in (
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1, got 0"),
        ({"temperature": -1.0}, "temperature must be from 0"),
        ({"temperature": float("nan")}, "temperature must be from 0"),
        ({"top_p": 0.0}, "top_p must be above 0"),
        ({"top_k": -1}, "top_k must be 0"),
        ({"seed": -1}, "seed must be from 0"),
    ):
        with pytest.raises(InputError, match=text):
            Sampling(**changes)
