"""The target on CUDA: flash attention by document, fused, compiled and captured forwards, threads, several devices."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from draftmill.target.attention import DOCUMENTS, Packing, packing_of
from draftmill.target.features import TapsReplica
from draftmill.target.float8 import quantize_layers
from draftmill.target.model import Target
from draftmill.target.spread import spread
from draftmill.target.step import EagerForward, build_forward, largest_difference
from draftmill.target.step_compiled import CompiledForward
from draftmill.target.step_fused import FusedForward
from draftmill.target.step_graphed import GraphedForward
from packed_rows import bucketed_batch, documents_of, packed_batch, real_tokens
from target_kinds import KINDS, random_tokens, tiny_target

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")]

TAPS = (1, 3, 6)
ROW = 64
LEAKING = {"qwen3-next", "qwen3.5"}


def cut(kind: str, dtype: torch.dtype = torch.bfloat16, device: str = "cuda:0") -> Target:
    target = tiny_target(kind)
    target.cut_after(TAPS[-1])
    with torch.no_grad():
        for parameter in target.model.parameters():
            if parameter.dim() > 1:  # weights so large amplify rounding from layer to layer
                parameter.mul_(0.6)
    target.model.to(device, dtype)
    return target


def rows(*lengths: list[int], seed: int = 0) -> list[list[torch.Tensor]]:
    flat = [length for row in lengths for length in row]
    documents = iter(documents_of(flat) if seed == 0 else [random_tokens(n, seed=seed + i) for i, n in enumerate(flat)])
    return [[next(documents) for _ in row] for row in lengths]


def packed_rows(seed: int = 0) -> list[list[torch.Tensor]]:
    return rows([11, 17, 30], [1, 50], [64], seed=seed)


def packing(batch) -> Packing:
    found = packing_of(batch.positions_BS, batch.documents_BS, torch.device("cuda:0"))
    assert found is not None
    return found


def median_difference(ours: torch.Tensor, expected: torch.Tensor) -> float:
    return largest_difference([ours.cpu()], [expected.cpu()])


def rounding(kind: str, batch, expected: torch.Tensor) -> float:
    """By how much two ways of computing the same in bfloat16 may differ: gpt-oss's features are 7 % from float32's."""
    exact = real_tokens(TapsReplica(cut(kind, torch.float32), TAPS).forward(batch), batch)
    return max(0.05, 3.0 * median_difference(expected, exact))


def in_thread(work):
    """What `work` returns in a worker's circumstances: a thread and a stream of its own."""
    found, errors = [], []

    def run() -> None:
        try:
            torch.cuda.set_device(0)
            with torch.cuda.stream(torch.cuda.Stream()), torch.no_grad():
                found.append(work())
                torch.cuda.current_stream().synchronize()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return found[0]


@pytest.mark.parametrize("kind", KINDS)
def test_features_are_those_of_the_cpu(kind: str) -> None:
    batch = bucketed_batch(documents_of([11, 30, 17]), ROW)
    expected = real_tokens(TapsReplica(cut(kind, torch.float32, "cpu"), TAPS).forward(batch), batch)
    exact = real_tokens(TapsReplica(cut(kind, torch.float32), TAPS).forward(batch), batch)
    assert median_difference(exact, expected) < 1e-3  # convolutions may use TF32
    rounded = real_tokens(TapsReplica(cut(kind), TAPS).forward(batch), batch)
    assert median_difference(rounded, expected) < 0.3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["flash", "loop"])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in LEAKING])
def test_packed_documents_have_the_features_of_documents_alone(kind: str, dtype: torch.dtype) -> None:
    packed = packed_batch(packed_rows(), ROW)
    apart = bucketed_batch([document for row in packed_rows() for document in row], ROW)
    replica = TapsReplica(cut(kind, dtype), TAPS, packed=True)
    assert replica.by_document
    got = real_tokens(replica.forward(packed), packed)
    expected = real_tokens(TapsReplica(cut(kind, dtype), TAPS).forward(apart), apart)
    # another kernel in bfloat16; where documents leak into one another the difference is about one
    assert median_difference(got, expected) < (1e-4 if dtype is torch.float32 else rounding(kind, apart, expected))


@pytest.mark.parametrize("kind", ["qwen3", "gpt-oss", "mistral"])
def test_another_document_in_the_row_leaves_no_trace(kind: str) -> None:
    replica = TapsReplica(cut(kind), TAPS, packed=True)
    first, second, third = documents_of([11, 30, 17])
    one, other = (packed_batch([[first, middle, third]], ROW) for middle in (second, torch.flip(second, (0,))))
    before, after = (real_tokens(replica.forward(batch), batch).clone() for batch in (one, other))
    assert torch.equal(before[:11], after[:11])
    assert torch.equal(before[41:], after[41:])
    assert not torch.allclose(before[11:41], after[11:41], atol=0.1)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "qwen3-sliding", "gemma3"])
def test_fused_kernels_give_the_plain_features_and_come_out_again(kind: str) -> None:
    pytest.importorskip("liger_kernel.transformers", reason="liger-kernel is not installed")
    target, tokens = cut(kind), random_tokens(4, 48).cuda()
    plain = EagerForward(target, TAPS)
    expected = [feature.clone() for feature in plain.run(tokens, None)]
    fused = FusedForward(target, TAPS)
    fused.apply()
    assert largest_difference(fused.run(tokens, None), expected) < 0.05
    fused.undo()
    assert all(torch.equal(a, b) for a, b in zip(plain.run(tokens, None), expected, strict=True))


@pytest.mark.parametrize("kind", ["llama", "qwen3-sliding", "qwen3-moe"])
def test_compiled_layers_serve_batches_of_any_shape(kind: str) -> None:
    """A second compilation of anything would raise."""

    def work() -> None:
        target = cut(kind)
        plain, compiled = EagerForward(target, TAPS), CompiledForward(target, TAPS)
        for shape in ((4, 24), (1, 24), (2, 56), (7, 8), (1, 136), (32, 32), (5, 200), (97, 8), (3, 5)):
            tokens = random_tokens(*shape).cuda()
            compiled.apply()
            got = [feature.clone() for feature in compiled.run(tokens, None)]
            compiled.undo()
            assert largest_difference(got, plain.run(tokens, None)) < 0.05

    in_thread(work)


@pytest.mark.parametrize("inner", [EagerForward, CompiledForward])
def test_a_captured_forward_follows_its_inputs(inner: type[EagerForward]) -> None:
    """Other documents of other lengths and another number of them, in the one shape; also more than it has room for."""

    def work() -> None:
        replica = TapsReplica(cut("qwen3"), TAPS, packed=True)
        target = replica.target
        assert target.decoder.config._attn_implementation == DOCUMENTS
        plain = EagerForward(target, TAPS, by_document=True)
        way = inner(target, TAPS, True, ROW) if inner is CompiledForward else inner(target, TAPS, True)
        graphed = GraphedForward(way)
        way.apply()
        graph = None
        for seed, lengths in enumerate(([[11, 17, 30], [1, 50], [64]], [[64]] * 3, [[5] * 12] * 3, [[1] * 60] * 3)):
            batch = packed_batch(rows(*lengths, seed=10 * seed), ROW)
            tokens = batch.tokens_BS.cuda()
            got = graphed.run(tokens, packing(batch))
            assert (graphed._graph is graph) == (seed in (1, 2))  # 183 runs of tokens need another graph than 64
            graph = graphed._graph
            ours = real_tokens([tap.clone() for tap in got], batch)
            way.undo()
            theirs = real_tokens(plain.run(tokens, packing(batch)), batch)
            way.apply()
            assert median_difference(ours, theirs) < 0.05
        small = packed_batch(packed_rows()[:2], ROW)
        with pytest.raises(RuntimeError, match=r"expects rows of shape \(3, 64\), got \(2, 64\)"):
            graphed.run(small.tokens_BS.cuda(), packing(small))
        with pytest.raises(RuntimeError, match="expects packed rows"):
            graphed.run(tokens, None)

    in_thread(work)


@pytest.mark.parametrize("choice", ["eager", "compiled", "graphed", "auto"])
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_every_choice_gives_the_plain_features(choice: str, packed: bool) -> None:
    if choice == "graphed" and not packed:
        pytest.skip("rows of any shape are not captured")

    def work() -> str:
        replica = TapsReplica(cut("qwen3"), TAPS, choice, packed)
        plain = TapsReplica(cut("qwen3"), TAPS, "eager", packed)
        plain._forward = EagerForward(plain.target, TAPS, plain.by_document)
        for seed in range(4):
            held = packed_rows(seed=seed * 10)
            batch = packed_batch(held, ROW) if packed else bucketed_batch([row[0] for row in held], ROW)
            ours = real_tokens([tap.clone() for tap in replica.forward(batch)], batch)
            assert median_difference(ours, real_tokens(plain.forward(batch), batch)) < 0.05
        assert replica._forward is not None
        return replica._forward.name

    name = in_thread(work)
    if choice in ("compiled", "graphed"):
        assert name == choice


def test_the_report_names_what_was_measured_and_rejected() -> None:
    def work() -> str:
        replica = TapsReplica(cut("qwen3"), TAPS, packed=True)
        batch = packed_batch(packed_rows(), ROW)
        built = build_forward("auto", replica.target, TAPS, batch.tokens_BS.cuda(), packing(batch), True)
        return built.report

    report = in_thread(work)
    assert " (auto; 3x64: plain " in report
    for name in ("fused", "compiled", "graphed"):
        assert f"{name} " in report


def test_what_cannot_be_captured_says_why_and_leaves_the_device_usable() -> None:
    batch = packed_batch(packed_rows(), ROW)
    with pytest.raises(RuntimeError, match=r"captured for bfloat16 and float16 heads .*, got float32 heads of 16; use"):
        in_thread(lambda: TapsReplica(cut("qwen3", torch.float32), TAPS, "graphed", packed=True).forward(batch))
    report = in_thread(lambda: _reported(TapsReplica(cut("qwen3", torch.float32), TAPS, "auto", packed=True), batch))
    assert "graphed rejected: RuntimeError: attention by document is captured for bfloat16" in report


def _reported(replica: TapsReplica, batch) -> str:
    replica.forward(batch)
    return replica.report


def test_several_workers_compile_and_capture_while_others_work() -> None:
    """Cases B30, B31 and B34 on the target's side."""
    errors: list[BaseException] = []
    found: dict[int, torch.Tensor] = {}
    done = threading.Event()
    batch = packed_batch(packed_rows(), ROW)
    targets = [cut("qwen3") for _ in range(4)]  # not in the threads, which would draw from one another's numbers

    def worker(index: int) -> None:
        try:
            torch.cuda.set_device(0)
            with torch.cuda.stream(torch.cuda.Stream()), torch.no_grad():
                how = "graphed" if index % 2 else "compiled"
                replica = TapsReplica(targets[index], TAPS, how, packed=True)
                for _ in range(20):
                    taps = replica.forward(batch)
                found[index] = real_tokens([tap.clone() for tap in taps], batch)
                torch.cuda.current_stream().synchronize()
        except BaseException as error:
            errors.append(error)

    def busy() -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                matrix = torch.randn(512, 512, device="cuda")
                while not done.is_set():
                    host = torch.empty(2**20, pin_memory=True)
                    (matrix @ matrix).sum().item()
                    host.cuda(non_blocking=True)
                    torch.cuda.current_stream().synchronize()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=worker, args=(index,)) for index in range(4)]
    other = threading.Thread(target=busy)
    for thread in (other, *threads):
        thread.start()
    for thread in threads:
        thread.join()
    done.set()
    other.join()
    assert not errors, errors
    for features in found.values():
        assert median_difference(features, found[0]) < 0.05


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices here")
@pytest.mark.parametrize("kind", ["llama", "gemma3", "gpt-oss", "qwen3.5"])
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_a_target_over_two_devices(kind: str, packed: bool) -> None:
    if packed and kind in LEAKING:
        pytest.skip("its layers can't be packed")
    whole = cut(kind, device="cpu")
    devices = [torch.device("cuda:0"), torch.device("cuda:1")]
    group = spread(whole, devices)
    assert {p.device for p in group.model.parameters()} == set(devices)
    held = packed_rows()
    batch = packed_batch(held, ROW) if packed else bucketed_batch([row[0] for row in held], ROW)
    taps = TapsReplica(group, TAPS, "auto", packed).forward(batch)
    assert {tap.device for tap in taps} == {devices[-1]}
    expected = real_tokens(TapsReplica(cut(kind), TAPS, "eager", packed).forward(batch), batch)
    alone = bucketed_batch([document for row in held for document in row], ROW) if packed else batch
    assert median_difference(real_tokens(taps, batch), expected) < rounding(kind, alone, expected)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices here")
def test_the_first_device_goes_on_while_the_second_works() -> None:
    """The second device is held up for long in the first batch; the first one has done its part of the second batch."""
    group = spread(tiny_target("llama"), [torch.device("cuda:0"), torch.device("cuda:1")])
    first_half_done = torch.cuda.Event()
    second_half_done = torch.cuda.Event()

    def hold_up(*_: object) -> None:
        with torch.cuda.device(1):
            torch.cuda._sleep(4_000_000_000)

    def first_half(*_: object) -> None:
        first_half_done.record(torch.cuda.current_stream(0))

    forward, tokens = EagerForward(group, TAPS), random_tokens(2, 16).cuda()
    forward.run(tokens, None)
    held = group.layers[-1].register_forward_pre_hook(hold_up)
    forward.run(tokens, None)
    held.remove()
    second_half_done.record(torch.cuda.current_stream(1))
    group.layers[2].register_forward_hook(first_half)
    forward.run(tokens, None)
    first_half_done.synchronize()
    assert not second_half_done.query()


@pytest.mark.parametrize("how", ["eager", "compiled"])
def test_float8_layers_are_near_bfloat16(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every linear layer of the decoder layers is replaced, embedding and head stay; what differs is the rounding."""
    pytest.importorskip("torchao", reason="torchao is not installed")
    tokens = random_tokens(4, 64).cuda()
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "bench"))
    from float8_target import round_products

    plain, rounded, imitated = cut("qwen3"), cut("qwen3"), cut("qwen3")
    round_products(imitated)
    before = {name for name, module in rounded.layers.named_modules() if isinstance(module, torch.nn.Linear)}
    assert quantize_layers(rounded) == len(before) > 0
    assert rounded.dtype is torch.bfloat16
    found = []
    for target in (plain, rounded, imitated):
        if how == "eager":
            found.append(EagerForward(target, TAPS).run(tokens, None))
            continue
        forward = CompiledForward(target, TAPS)
        forward.apply()
        found.append(forward.run(tokens, None))
        forward.undo()
    for without, ours, expected in zip(*found, strict=True):
        rounding = (expected.float() - without.float()).norm()
        assert rounding < 0.25 * without.float().norm()
        # two roundings that know nothing of one another would lie 1.4 times as far apart as each from what is rounded
        assert (ours.float() - expected.float()).norm() < rounding
