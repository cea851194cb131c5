"""What a worker gets from its target: packed rows, splitting when memory runs out, and the choice of the step."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from draftmill.errors import InputError
from draftmill.target.attention import document_bounds, reference_attention
from draftmill.target.features import TapsReplica
from draftmill.target.model import Target
from draftmill.target.spread import spread
from draftmill.target.step import EagerForward, build_forward, first_line
from draftmill.target.step_compiled import CompiledForward
from packed_rows import bucketed_batch, documents_of, packed_batch, real_tokens
from target_kinds import KINDS, random_tokens, tiny_target

torch.set_num_threads(1)

TAPS = (1, 3, 6)
ROW = 40
PACKED_LENGTHS = [[11, 17, 5], [1, 23], [40]]
LEAKING = {"qwen3-next", "qwen3.5"}


def cut(kind: str) -> Target:
    target = tiny_target(kind)
    target.cut_after(TAPS[-1])
    return target


def rows() -> list[list[torch.Tensor]]:
    documents = iter(documents_of([length for row in PACKED_LENGTHS for length in row]))
    return [[next(documents) for _ in row] for row in PACKED_LENGTHS]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in LEAKING])
def test_packed_documents_have_the_features_of_documents_alone(kind: str) -> None:
    """Sliding windows too: documents are longer than the window of 6, and begin anywhere in a row."""
    packed = packed_batch(rows(), ROW)
    replica = TapsReplica(cut(kind), TAPS, packed=True)
    assert replica.by_document
    got = real_tokens(replica.forward(packed), packed)
    apart = bucketed_batch([document for row in rows() for document in row], ROW)
    expected = real_tokens(TapsReplica(cut(kind), TAPS).forward(apart), apart)
    assert expected.std() > 0.1
    torch.testing.assert_close(got, expected, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("kind", ["llama", "gemma3", "cohere2"])
def test_both_ways_of_attending_in_packed_rows_agree(kind: str) -> None:
    """Attention by document and transformers' own masks, whose making is its own."""
    packed = packed_batch(rows(), ROW)
    by_document = TapsReplica(cut(kind), TAPS, packed=True)
    by_masks = TapsReplica(cut(kind), TAPS, packed=True)
    for config in (by_masks.target.config, by_masks.target.decoder.config):
        config._attn_implementation_internal = "eager"
    by_masks.by_document = False
    ours, theirs = (real_tokens(replica.forward(packed), packed) for replica in (by_document, by_masks))
    torch.testing.assert_close(ours, theirs, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("kind", ["qwen3", "gpt-oss", "qwen3-moe", "gpt2"])
def test_another_document_in_the_row_leaves_no_trace(kind: str) -> None:
    replica = TapsReplica(cut(kind), TAPS, packed=True)
    first, second, third = documents_of([11, 17, 5])
    changed = torch.flip(second, (0,))
    one, other = (packed_batch([[first, middle, third]], ROW) for middle in (second, changed))
    before, after = (real_tokens(replica.forward(batch), batch).clone() for batch in (one, other))
    assert torch.equal(before[:11], after[:11])
    assert torch.equal(before[28:], after[28:])
    assert not torch.allclose(before[11:28], after[11:28], atol=0.1)


@pytest.mark.parametrize("kind", sorted(LEAKING))
def test_recurrent_layers_cant_be_packed(kind: str) -> None:
    with pytest.raises(InputError, match=r"ForCausalLM has layers of kind linear_attention, .*data.batching=bucketed"):
        TapsReplica(cut(kind), TAPS, packed=True)


def test_a_leak_that_no_configuration_tells_of_is_found() -> None:
    """A mixing layer of its own making: nothing says so but its features."""
    target = cut("llama")

    class Mixing(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.cumsum(dim=1) / 4

    target.layers[2].mlp = Mixing()
    TapsReplica(target, TAPS)
    with pytest.raises(InputError, match="in LlamaForCausalLM documents of one row see one another"):
        TapsReplica(target, TAPS, packed=True)


def test_masks_that_do_not_part_documents_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """In transformers 5.24 gpt-oss makes its masks without looking at positions."""
    monkeypatch.setattr("draftmill.target.attention_check._attends_by_document", lambda *_: False)
    TapsReplica(cut("llama"), TAPS, packed=True)
    with pytest.raises(InputError, match="in GptOssForCausalLM documents of one row see one another"):
        TapsReplica(cut("gpt-oss"), TAPS, packed=True)


def test_a_sliding_layer_that_hands_on_no_window_falls_back_to_masks(caplog: pytest.LogCaptureFixture) -> None:
    target = cut("qwen3-sliding")
    target.layers[1].self_attn.sliding_window = None
    with caplog.at_level(logging.WARNING, logger="draftmill"):
        replica = TapsReplica(target, TAPS, packed=True)
    assert not replica.by_document
    assert "does not take attention by document" in caplog.text
    packed = packed_batch(rows(), ROW)
    apart = bucketed_batch([document for row in rows() for document in row], ROW)
    expected = real_tokens(TapsReplica(cut("qwen3-sliding"), TAPS).forward(apart), apart)
    torch.testing.assert_close(real_tokens(replica.forward(packed), packed), expected, rtol=2e-4, atol=2e-4)


def test_rows_of_the_other_kind_are_an_error() -> None:
    batch = bucketed_batch(documents_of([5, 7]), 8)
    with pytest.raises(RuntimeError, match="expected packed rows"):
        TapsReplica(cut("llama"), TAPS, packed=True).forward(batch)
    with pytest.raises(RuntimeError, match="expected bucketed rows"):
        TapsReplica(cut("llama"), TAPS).forward(packed_batch(rows(), ROW))


def test_bounds_of_documents() -> None:
    documents = torch.tensor([[0, 0, 1, -1], [0, 0, 0, 0], [0, -1, -1, -1]], dtype=torch.int32)
    assert document_bounds(documents).tolist() == [0, 2, 3, 4, 8, 9, 12]


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("extra", ["plain", "softcap", "sinks"])
def test_attention_by_document_against_a_plain_loop(window: int | None, extra: str) -> None:
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(13, heads, 8, generator=generator) for heads in (4, 2, 2))
    softcap = 1.5 if extra == "softcap" else None
    sinks = torch.randn(4, generator=generator) if extra == "sinks" else None
    bounds = [0, 5, 5, 12, 13]
    got = reference_attention(q, k, v, bounds, 0.3, window, softcap, sinks)
    for token in range(13):
        first = max(bound for bound in bounds[:-1] if bound <= token)
        seen = [key for key in range(first, token + 1) if window is None or token - key < window]
        for head in range(4):
            scores = torch.stack([q[token, head] @ k[key, head // 2] * 0.3 for key in seen])
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            weights = scores.exp()
            total = weights.sum() + (0 if sinks is None else sinks[head].exp())
            expected = sum(w * v[key, head // 2] for w, key in zip(weights, seen, strict=True)) / total
            torch.testing.assert_close(got[token, head], expected, rtol=1e-4, atol=1e-5)


class Failing:
    """A decoder that runs out of memory above some number of rows."""

    def __init__(self, target: Target, most_rows: int) -> None:
        self.shapes: list[tuple[int, ...]] = []
        target.decoder.register_forward_pre_hook(self.check, with_kwargs=True)
        self.most_rows = most_rows

    def check(self, _module: Any, _arguments: Any, options: Any) -> None:
        self.shapes.append(tuple(options["input_ids"].shape))
        if self.shapes[-1][0] > self.most_rows:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB")


@pytest.mark.parametrize("packed", [False, True])
def test_out_of_memory_splits_the_batch_once(packed: bool, caplog: pytest.LogCaptureFixture) -> None:
    batch = packed_batch(rows(), ROW) if packed else bucketed_batch(documents_of([9, 4, 12, 7, 3]), 12)
    expected = real_tokens(TapsReplica(cut("qwen3"), TAPS, packed=packed).forward(batch), batch)
    target = cut("qwen3")
    replica = TapsReplica(target, TAPS, packed=packed)
    failing = Failing(target, most_rows=3 if not packed else 2)
    with caplog.at_level(logging.WARNING, logger="draftmill"):
        got = real_tokens(replica.forward(batch), batch)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    rows_run = [shape[0] for shape in failing.shapes]
    assert rows_run == ([3, 1, 2] if packed else [5, 2, 3])
    assert "target on cpu ran out of memory on batch 3" in caplog.text
    assert "it is run in two halves" in caplog.text


def test_out_of_memory_of_a_half_gives_up_and_says_what_to_lower() -> None:
    target = cut("qwen3")
    replica = TapsReplica(target, TAPS)
    failing = Failing(target, most_rows=1)
    batch = bucketed_batch(documents_of([9, 4, 12, 7, 3]), 12)
    with pytest.raises(RuntimeError, match=r"too little memory for 5 rows of 12 tokens; lower data.token_budget"):
        replica.forward(batch)
    assert [shape[0] for shape in failing.shapes] == [5, 2]
    failing.most_rows = 0
    with pytest.raises(RuntimeError, match="too little memory for 1 rows"):
        replica.forward(bucketed_batch(documents_of([9]), 12))


def test_a_group_gathers_features_on_its_last_device() -> None:
    batch = packed_batch(rows(), ROW)
    expected = real_tokens(TapsReplica(cut("qwen3"), TAPS, packed=True).forward(batch), batch)
    group = spread(cut("qwen3"), [torch.device("cpu"), torch.device("cpu")])
    got = real_tokens(TapsReplica(group, TAPS, "auto", packed=True).forward(batch), batch)
    assert torch.equal(got, expected)


def test_the_choice_on_a_cpu(caplog: pytest.LogCaptureFixture) -> None:
    batch = bucketed_batch(documents_of([9, 4]), 12)
    with caplog.at_level(logging.INFO, logger="draftmill"):
        TapsReplica(cut("llama"), TAPS, "auto").forward(batch)
    assert caplog.messages == ["target forward on cpu: eager (auto: the choice on a CPU)"]
    with pytest.raises(InputError, match=r"graphed needs data\.batching=packed"):
        TapsReplica(cut("llama"), TAPS, "graphed").forward(batch)
    with pytest.raises(InputError, match="graphed needs a CUDA device, got cpu"):
        TapsReplica(cut("llama"), TAPS, "graphed", packed=True).forward(packed_batch(rows(), ROW))
    with pytest.raises(InputError, match="compiled reads packed rows on CUDA only"):
        TapsReplica(cut("llama"), TAPS, "compiled", packed=True).forward(packed_batch(rows(), ROW))
    group = spread(cut("llama"), [torch.device("cpu"), torch.device("meta")])
    with pytest.raises(InputError, match="compiled needs the target on one device"):
        build_forward("compiled", group, TAPS, batch.tokens_BS, None)


def test_the_first_line_of_an_error() -> None:
    assert first_line(RuntimeError("a\nb")) == "a"
    assert first_line(RuntimeError("")) == "RuntimeError"


def compilations() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.fixture
def _dynamo() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.config.error_on_recompile = False
    torch._dynamo.reset()


@pytest.mark.usefixtures("_dynamo")
@pytest.mark.parametrize(("kind", "kinds_of_layers"), [("llama", 1), ("qwen3-sliding", 2), ("gemma3", 2)])
def test_one_compilation_serves_all_layers_of_a_kind_and_all_shapes(kind: str, kinds_of_layers: int) -> None:
    """With the compiler's front alone: what it takes for fixed is the same for every backend."""
    target, before = cut(kind), compilations()
    plain, compiled = EagerForward(target, TAPS), CompiledForward(target, TAPS, backend="eager")
    compiled.apply()
    assert compilations() - before == 2 * kinds_of_layers  # one row, and several
    for shape in ((4, 24), (1, 24), (2, 56), (7, 8), (1, 136), (3, 136), (32, 32), (16, 16), (97, 7), (4, 4), (8, 5)):
        tokens = random_tokens(*shape)
        got = [feature.clone() for feature in compiled.run(tokens, None)]
        compiled.undo()
        for ours, expected in zip(got, plain.run(tokens, None), strict=True):
            torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)
        compiled.apply()
    # rows no longer than the sliding window need no mask, which is another form of the sliding layers' inputs
    assert compilations() - before == 2 * kinds_of_layers + (kinds_of_layers - 1)
    compiled.undo()
    assert all("forward" not in vars(layer) for layer in target.layers)
