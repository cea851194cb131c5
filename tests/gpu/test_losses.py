"""The losses that compare with the target, on CUDA: compiled and captured equal eager, the target's ways give one last
hidden state, whole runs equal the CPU's, and nothing is read back to the host.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from cuda_steps import ANCHORS, BLOCK, CONTEXT, SHAPE, on_own_stream
from draftmill.config import TrainConfig
from draftmill.drafter.loss import LossRule
from draftmill.drafter.network import Drafter
from draftmill.records import Blocks
from draftmill.step.choose import build_step
from draftmill.step.eager import EagerStep
from draftmill.step.state import StepShape, StepState
from draftmill.target import step_graphed
from draftmill.target.features import TapsReplica
from draftmill.target.head import TargetHead
from draftmill.target.model import OUTPUT, Target
from draftmill.target.output_check import check_output
from draftmill.target.step import largest_difference
from draftmill.train.optimizer import FlatAdamW
from draftmill.train.run import train
from packed_rows import bucketed_batch, documents_of, packed_batch, real_tokens
from target_kinds import KINDS, tiny_target
from tiny import config_of, metrics_of, small_world

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")]

HIDDEN, VOCABULARY = SHAPE.hidden_size, SHAPE.vocab_size
RULES = {
    "kl": LossRule(7.0, cross_entropy=0.0, kl=1.0),
    "total variation": LossRule(7.0, cross_entropy=0.0, total_variation=1.0),
    "mixed": LossRule(7.0, cross_entropy=0.1, kl=0.9, total_variation=0.5),
    "the target's labels": LossRule(7.0, target_labels=True),
    "kl under d-pace, the target's labels": LossRule(7.0, 0.5, 0.0, 1.0, target_labels=True),
}


def make_state(rule: LossRule, dtype: torch.dtype, softcap: float | None = None) -> StepState:
    matrix = torch.randn(VOCABULARY, HIDDEN, generator=torch.Generator().manual_seed(1)) * 0.1
    head = TargetHead(matrix, matrix, logit_softcap=softcap)
    # 240 rows a chunk: 16 blocks under D-PACE
    return StepState(
        Drafter(SHAPE, seed=0), head, rule, StepShape(CONTEXT, ANCHORS, 240), torch.device("cuda:0"), dtype
    )


def batch(seed: int, num_blocks: int) -> tuple[torch.Tensor, Blocks, int]:
    """What a target gives, and blocks over two documents; every call another mask."""
    generator = torch.Generator().manual_seed(seed)
    carried = torch.randn(CONTEXT, 3 * HIDDEN, generator=generator)
    blocks = Blocks.empty(CONTEXT, ANCHORS)
    blocks.tokens_T.copy_(torch.randint(VOCABULARY - 1, (CONTEXT,), generator=generator))
    cut = int(torch.randint(100, CONTEXT - 100, (1,), generator=generator))
    starts = torch.where(torch.arange(CONTEXT) < cut, 0, cut)
    blocks.positions_T.copy_(torch.arange(CONTEXT) - starts)
    anchors = torch.randperm(CONTEXT - BLOCK, generator=generator)[:num_blocks].sort().values
    ends = torch.where(anchors < cut, cut, CONTEXT)
    blocks.anchors_A[:num_blocks], blocks.starts_A[:num_blocks] = anchors.int(), starts[anchors].int()
    blocks.slots_A[:num_blocks] = (ends - 1 - anchors).clamp(max=BLOCK - 1).int()
    return carried, blocks, int(blocks.slots_A.sum())


def run(step: EagerStep, seed: int, num_blocks: int) -> None:
    carried, blocks, scored = batch(seed, num_blocks)
    step.state.load(carried.cuda(), blocks)
    step.state.begin()
    step.run(scored, num_blocks)


@pytest.mark.parametrize("choice", ["compiled", "graphed"])
@pytest.mark.parametrize("name", RULES)
def test_batch_after_batch_equals_the_eager_reference_in_float32(choice: str, name: str) -> None:
    def work() -> None:
        reference, state = make_state(RULES[name], torch.float32), make_state(RULES[name], torch.float32)
        step = build_step(choice, state, FlatAdamW(state.flat, TrainConfig())).step  # type: ignore[arg-type]
        assert not state.last_TH.any(), "building leaves nothing behind"
        eager = EagerStep(reference)
        for seed, num_blocks in ((1, ANCHORS), (2, ANCHORS - 7), (3, 5)):
            run(eager, seed, num_blocks)
            run(step, seed, num_blocks)
            assert torch.equal(state.scored_K, reference.scored_K)
            assert torch.equal(state.correct_AK, reference.correct_AK)
            torch.testing.assert_close(state.totals, reference.totals, rtol=1e-4, atol=1e-3)
            ours, expected = state.flat.gradient, reference.flat.gradient
            assert float((ours - expected).norm() / expected.norm()) < 1e-3

            carried, blocks, scored = batch(seed + 10, num_blocks)
            for each in (eager, step):
                each.state.load(carried.cuda(), blocks)
                each.evaluate(scored, num_blocks)
            assert torch.equal(state.correct_AK, reference.correct_AK)

    on_own_stream(work)


@pytest.mark.parametrize("choice", ["compiled", "graphed", "auto"])
@pytest.mark.parametrize("name", RULES)
def test_in_bfloat16_and_under_a_soft_cap(choice: str, name: str) -> None:
    """Against eager in the same type, and, so that both can't be wrong together, against float32."""

    def work() -> None:
        exact, reference, state = (
            make_state(RULES[name], dtype, softcap=3.0) for dtype in (torch.float32, torch.bfloat16, torch.bfloat16)
        )
        built = build_step(choice, state, FlatAdamW(state.flat, TrainConfig()))  # type: ignore[arg-type]
        print(built.report)
        for step in (EagerStep(exact), EagerStep(reference), built.step):
            run(step, 5, ANCHORS - 3)
        gradient, expected, close = (each.flat.gradient.float() for each in (state, reference, exact))
        assert float((gradient - expected).norm() / expected.norm()) < 4e-2
        if not RULES[name].target_labels:  # of which rounding changes some
            assert float((gradient - close).norm() / close.norm()) < 1e-1
        loss, their_loss = (float(each.totals[0] / each.totals[1]) for each in (state, reference))
        assert loss == pytest.approx(their_loss, rel=1e-2)

    on_own_stream(work)


@pytest.mark.parametrize("name", RULES)
def test_a_chunk_reads_nothing_back_to_the_host(name: str) -> None:
    from draftmill.drafter import loss_kernel

    def work() -> None:
        state = make_state(RULES[name], torch.bfloat16)
        steps = [EagerStep(state), EagerStep(state)]
        steps[1].row_work = loss_kernel.ROW_WORK
        carried, blocks, scored = batch(1, ANCHORS)
        state.load(carried.cuda(), blocks)
        with torch.no_grad():
            hidden = steps[0].trunk()
            for step in steps:  # the second time everything is loaded and built
                step.score(hidden, scored, ANCHORS, with_slope=True)
            torch.cuda.current_stream().synchronize()
            torch.cuda.set_sync_debug_mode("error")
            try:
                for step in steps:
                    step.score(hidden, scored, ANCHORS, with_slope=True)
            finally:
                torch.cuda.set_sync_debug_mode("default")

    on_own_stream(work)


TAPS = (1, 3, OUTPUT)
ROW = 64


def whole_decoder(kind: str, dtype: torch.dtype) -> Target:
    target = tiny_target(kind)
    with torch.no_grad():
        for parameter in target.model.parameters():
            if parameter.dim() > 1:  # weights so large amplify rounding from layer to layer
                parameter.mul_(0.6)
    target.model.to("cuda:0", dtype)
    check_output(target, target.head())
    target.cut_after(target.num_layers - 1)
    return target


@pytest.mark.parametrize("kind", KINDS)
def test_every_kinds_last_hidden_state_is_the_cpus(kind: str) -> None:
    batch = bucketed_batch(documents_of([11, 30, 17]), ROW)
    got = TapsReplica(whole_decoder(kind, torch.float32), TAPS).forward(batch)[2:]
    on_cpu = whole_decoder(kind, torch.float32)
    on_cpu.model.to("cpu")
    expected = TapsReplica(on_cpu, TAPS).forward(batch)[2:]
    ours, theirs = real_tokens(got, batch).cpu(), real_tokens(expected, batch)
    assert largest_difference([ours], [theirs]) < 1e-3  # convolutions may use TF32


@pytest.mark.parametrize("choice", ["eager", "compiled", "graphed", "auto"])
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("kind", ["qwen3", "gemma3"])
def test_every_way_of_running_the_target_gives_one_last_hidden_state(kind: str, choice: str, packed: bool) -> None:
    if choice == "graphed" and not packed:
        pytest.skip("rows of any shape are not captured")

    def work() -> None:
        replica = TapsReplica(whole_decoder(kind, torch.bfloat16), TAPS, choice, packed)  # type: ignore[arg-type]
        plain = TapsReplica(whole_decoder(kind, torch.bfloat16), TAPS, "eager", packed)
        for lengths in ([[11, 17, 30], [50], [64]], [[9, 50], [20, 30], [5]]):
            held = [documents_of(row) for row in lengths]
            batch = packed_batch(held, ROW) if packed else bucketed_batch([row[0] for row in held], ROW)
            with torch.no_grad():
                ours = real_tokens([tap.clone() for tap in replica.forward(batch)[2:]], batch)
                expected = real_tokens(plain.forward(batch)[2:], batch)
            assert largest_difference([ours], [expected]) < 0.05
        print(replica.report)

    on_own_stream(work)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    sections = small_world(tmp_path_factory.mktemp("world"), head_dim=16)  # flex attention takes no smaller heads
    sections["drafter"] |= {"block_size": 16}
    return sections


@pytest.mark.parametrize("step", ["eager", "graphed"])
@pytest.mark.parametrize("apart", [False, True], ids=["colocated", "apart"])
@pytest.mark.parametrize("batching", ["bucketed", "packed"])
def test_a_run_has_the_losses_of_the_cpu(
    world: dict[str, Any], tmp_path: Path, step: str, apart: bool, batching: str
) -> None:
    if apart and torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    loss = ("train.loss={cross_entropy: 0.1, kl: 0.9, total_variation: 0.5}", "train.labels=target")
    common = (*loss, "train.epochs=2", f"data.batching={batching}", "data.token_budget=128")
    devices = (f"drafter.devices=[cuda:{int(apart)}]", "target.devices=[cuda:0]", f"drafter.step={step}")
    train(config_of(world, f"run.dir={tmp_path / 'cpu'}", *common), console=False)
    train(config_of(world, f"run.dir={tmp_path / 'cuda'}", *common, *devices), console=False)
    expected, losses = (
        [line["loss"] for line in metrics_of(tmp_path / where) if "loss" in line] for where in ("cpu", "cuda")
    )
    assert losses == pytest.approx(expected, rel=2e-2)


@pytest.mark.parametrize("step", ["compiled", "graphed"])
@pytest.mark.parametrize("drafters", [1, 2])
def test_a_target_may_be_captured_anew_in_the_midst_of_a_run(
    world: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, drafters: int
) -> None:
    """A capture waits for the device, where drafters that sum over one another are at work."""
    if torch.cuda.device_count() < drafters:
        pytest.skip("needs two CUDA devices")
    captures: list[int] = []
    capture = step_graphed.GraphedForward._capture

    def counted(self: Any, tokens_BS: torch.Tensor, packing: Any) -> None:
        captures.append(len(packing.bounds))
        capture(self, tokens_BS, packing)

    monkeypatch.setattr(step_graphed, "LEAST_ROOM", 1)
    monkeypatch.setattr(step_graphed.GraphedForward, "_capture", counted)
    common = ("train.epochs=4", "data.batching=packed", "data.token_budget=128", "target.dtype=bfloat16")
    places = ", ".join(f"cuda:{index}" for index in range(drafters))
    devices = (f"drafter.devices=[{places}]", "target.devices=[cuda:0]", f"drafter.step={step}", "target.step=graphed")
    on_cpu = (f"drafter.devices=[{', '.join(['cpu'] * drafters)}]",)
    train(config_of(world, f"run.dir={tmp_path / 'cpu'}", *common, *on_cpu), console=False)
    train(config_of(world, f"run.dir={tmp_path / 'cuda'}", *common, *devices), console=False)
    assert max(captures) > captures[0]
    expected, losses = (
        [line["loss"] for line in metrics_of(tmp_path / where) if "loss" in line] for where in ("cpu", "cuda")
    )
    assert losses == pytest.approx(expected, rel=3e-2)
