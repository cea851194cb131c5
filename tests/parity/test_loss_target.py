"""The losses that compare with the target: values and gradients against autograd on full logits, against torch's own
and the peers' losses, and the whole step against a plain triple loop.
"""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from draftmill.config import TrainConfig
from draftmill.drafter.loss import LossRule, block_tokens, d_pace_weights, score_rows, target_places
from draftmill.drafter.network import Drafter
from draftmill.drafter.shape import DrafterShape
from draftmill.records import Blocks
from draftmill.step.choose import build_step
from draftmill.step.eager import EagerStep
from draftmill.step.state import StepShape, StepState
from draftmill.target.head import TargetHead
from draftmill.train.optimizer import FlatAdamW
from loss_chunks import whole_chunk

VOCABULARY, HIDDEN, BLOCK, MASK = 48, 16, 5, 47
SLOTS = BLOCK - 1
RULES = {
    "cross entropy": LossRule(3.0),
    "cross entropy x 2": LossRule(3.0, cross_entropy=2.0),
    "kl": LossRule(3.0, cross_entropy=0.0, kl=1.0),
    "total variation": LossRule(3.0, cross_entropy=0.0, total_variation=1.0),
    "kl and total variation": LossRule(3.0, cross_entropy=0.0, kl=0.5, total_variation=2.0),
    "all three": LossRule(3.0, cross_entropy=0.2, kl=0.7, total_variation=1.5),
    "all three, the target's labels": LossRule(3.0, None, 0.2, 0.7, 1.5, target_labels=True),
    "the target's labels": LossRule(3.0, target_labels=True),
    "kl under d-pace": LossRule(3.0, 0.5, 0.0, 1.0),
    "all three under d-pace, the target's labels": LossRule(3.0, 0.3, 0.2, 0.7, 1.5, target_labels=True),
}
HEADS = {"plain": (1.0, None), "scaled": (0.25, None), "softcap": (1.0, 3.0), "both": (0.5, 2.0)}


def head_of(kind: str, dtype: torch.dtype = torch.float64) -> TargetHead:
    matrix = torch.randn(VOCABULARY, HIDDEN, generator=torch.Generator().manual_seed(0)).to(dtype)
    scale, softcap = HEADS[kind]
    return TargetHead(matrix, matrix, logit_scale=scale, logit_softcap=softcap)


def costs_of(logits: torch.Tensor, target_logits: torch.Tensor, labels: torch.Tensor, rule: LossRule) -> torch.Tensor:
    """Costs [R] as they are written in a book, from whole logits."""
    p, q = torch.softmax(target_logits, -1), torch.softmax(logits, -1)
    kl = (p * (p.log() - q.log())).sum(-1)
    variation = (q - p).abs().sum(-1) / 2
    return rule.cross_entropy * -q[range(len(q)), labels].log() + rule.kl * kl + rule.total_variation * variation


@pytest.mark.parametrize("head_kind", HEADS)
@pytest.mark.parametrize("name", RULES)
def test_a_chunk_against_autograd_on_full_logits(name: str, head_kind: str) -> None:
    rule, head = RULES[name], head_of(head_kind)
    generator = torch.Generator().manual_seed(1)
    rows = 6 * SLOTS
    hidden = torch.randn(rows, HIDDEN, generator=generator, dtype=torch.float64).requires_grad_()
    target_hidden = torch.randn(rows, HIDDEN, generator=generator, dtype=torch.float64)
    labels = torch.randint(VOCABULARY, (rows,), generator=generator)
    supervised = torch.arange(SLOTS) < torch.tensor([4, 1, 3, 4, 2, 0])[:, None]
    weights = supervised.flatten().double()
    if rule.alpha is None:
        weights *= torch.rand(rows, generator=generator, dtype=torch.float64)

    logits, target_logits = head.logits(hidden), head.logits(target_hidden)
    right = target_logits.argmax(-1) if rule.target_labels else labels
    expected = costs_of(logits, target_logits, right, rule)
    if rule.alpha is not None:
        surprise = F.cross_entropy(logits.detach(), right, reduction="none")
        weights = d_pace_weights(surprise.view(-1, SLOTS), supervised, rule.alpha).flatten()
    (slope,) = torch.autograd.grad((weights * expected).sum(), hidden)

    given = supervised.flatten().double() if rule.alpha is not None else weights
    detached = hidden.detach()
    with torch.no_grad():
        costs, final, correct, got = whole_chunk(detached, target_hidden, head, labels, given, rule, SLOTS)
        without = whole_chunk(detached, target_hidden, head, labels, given, rule, SLOTS, with_slope=False)
    torch.testing.assert_close(costs, expected.detach().float(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(final.double(), weights.double(), rtol=1e-5, atol=1e-6)
    # D-PACE's weights are float32
    torch.testing.assert_close(got, slope, rtol=1e-9 if rule.alpha is None else 1e-5, atol=1e-12)
    assert torch.equal(correct, logits.argmax(-1) == right)
    for ours, again in zip(without[:3], (costs, final, correct), strict=True):
        assert torch.equal(ours, again)
    assert float(slope.norm()) > 0.1


def test_kl_is_torchs_and_is_nothing_for_a_drafter_that_equals_its_target() -> None:
    head, rule = head_of("plain", torch.float32), RULES["kl"]
    hidden, target_hidden = torch.randn(2, 9, HIDDEN, generator=torch.Generator().manual_seed(2))
    labels, weights = torch.zeros(9, dtype=torch.int64), torch.ones(9)
    with torch.no_grad():
        costs, *_ = whole_chunk(hidden, target_hidden, head, labels, weights, rule, SLOTS)
        log_q, log_p = (torch.log_softmax(head.logits(each), -1) for each in (hidden, target_hidden))
        expected = F.kl_div(log_q, log_p, log_target=True, reduction="none").sum(-1)
        torch.testing.assert_close(costs, expected, rtol=1e-5, atol=1e-5)
        costs, _, _, slope = whole_chunk(target_hidden, target_hidden, head, labels, weights, rule, SLOTS)
        assert costs.abs().max() < 1e-5
        assert slope.abs().max() < 1e-5
        variation, *_ = whole_chunk(
            target_hidden, target_hidden, head, labels, weights, RULES["total variation"], SLOTS
        )
        assert variation.abs().max() < 1e-5


def test_far_logits_give_finite_costs_and_slopes() -> None:
    """Distributions without overlap, their logits hundreds apart: probabilities of exactly 0 in float32."""
    head = head_of("plain", torch.float32)
    hidden = 40.0 * head.head_VH[:6]
    target_hidden = 40.0 * head.head_VH[6:12]
    labels, weights = torch.arange(6), torch.ones(6)
    for rule in RULES.values():
        if rule.alpha is None:
            with torch.no_grad():
                costs, _, _, slope = whole_chunk(hidden, target_hidden, head, labels, weights, rule, SLOTS)
            assert torch.isfinite(costs).all()
            assert torch.isfinite(slope).all()
    with torch.no_grad():
        costs, *_ = whole_chunk(hidden, target_hidden, head, labels, weights, RULES["total variation"], SLOTS)
        torch.testing.assert_close(costs, torch.ones(6), rtol=0.0, atol=1e-5)
        costs, *_ = whole_chunk(hidden, target_hidden, head, labels, weights, RULES["kl"], SLOTS)
    assert costs.min() > 50.0


@pytest.mark.parametrize(("name", "allowed"), [("kl", 3e-2), ("total variation", 1e-1), ("all three", 5e-2)])
def test_half_precision_stays_near_float32(name: str, allowed: float) -> None:
    """bfloat16 on a CPU, where logits are not widened; what differs is mostly their own rounding."""
    generator, rule = torch.Generator().manual_seed(3), RULES[name]
    rounded = head_of("plain", torch.bfloat16)
    exact = TargetHead(rounded.embedding_VH.float(), rounded.head_VH.float())
    hidden, target_hidden = torch.randn(2, 64, HIDDEN, generator=generator).bfloat16()
    labels, weights = torch.randint(VOCABULARY, (64,), generator=generator), torch.ones(64)
    with torch.no_grad():
        costs, _, _, slope = whole_chunk(hidden, target_hidden, rounded, labels, weights, rule, SLOTS)
        expected, _, _, expected_slope = whole_chunk(
            hidden.float(), target_hidden.float(), exact, labels, weights, rule, SLOTS
        )
    assert float(costs.mean()) == pytest.approx(float(expected.mean()), rel=1e-2)
    assert float((slope.float() - expected_slope).norm() / expected_slope.norm()) < allowed


@pytest.mark.parametrize("sharp", ["target", "drafter"])
def test_total_variation_keeps_its_slope_in_half_precision(sharp: str) -> None:
    """One distribution flat and one sharp, as at a run's start: small differences of masses near 0 and near 1.

    The same logits in both types, so that nothing but the loss's own arithmetic differs.
    """
    generator = torch.Generator().manual_seed(3)
    flat = (0.1 * torch.randn(16, 4096, generator=generator)).bfloat16()
    peaked = (0.1 * torch.randn(16, 4096, generator=generator)).bfloat16()
    peaked[:, 7] = 14.0
    logits, target_logits = (flat, peaked) if sharp == "target" else (peaked, flat)
    labels, rule = torch.zeros(16, dtype=torch.int64), RULES["total variation"]
    with torch.no_grad():
        slope = score_rows(logits.clone(), target_logits.clone(), labels, rule, None, True)[3].float()
        expected = score_rows(logits.float(), target_logits.float(), labels, rule, None, True)[3]
    for part in (slice(7, 8), slice(8, None)):
        assert float((slope[:, part] - expected[:, part]).norm() / expected[:, part].norm()) < 4e-2


def test_the_place_that_predicts_a_slots_token() -> None:
    blocks = Blocks.empty(20, 4)
    blocks.anchors_A.copy_(torch.tensor([0, 3, 17, 0]))
    blocks.slots_A.copy_(torch.tensor([4, 4, 2, 0]))
    rows = torch.tensor([0 * BLOCK + 1, 0 * BLOCK + 4, 1 * BLOCK + 1, 1 * BLOCK + 3, 2 * BLOCK + 2, 0])
    # slot k of anchor a says the token at a + k, which the target predicts at a + k - 1; row 0 is a filler
    assert target_places(blocks, rows, BLOCK).tolist() == [0, 3, 3, 5, 18, 0]
    assert target_places(blocks, torch.tensor([2 * BLOCK + 4]), BLOCK).tolist() == [19], "unsupervised, and inside"


SHAPE = DrafterShape(
    hidden_size=HIDDEN,
    intermediate_size=24,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    rms_norm_eps=1e-6,
    vocab_size=VOCABULARY,
    block_size=BLOCK,
    mask_token_id=MASK,
    target_layer_ids=(1, 2),
    num_target_layers=5,
    rope={"rope_type": "default", "rope_theta": 1e4},
    max_position_embeddings=64,
)
LENGTHS, ANCHORS, SUPERVISED = (13, 9), [1, 4, 5, 10, 13, 17, 19], [4, 4, 4, 2, 4, 4, 2]


def state_of(rule: LossRule, chunk_rows: int = 6) -> StepState:
    """Two documents and seven blocks in slots of which some stay empty, several chunks, the last one not full."""
    state = StepState(
        Drafter(SHAPE, seed=3),
        head_of("both", torch.float32),
        rule,
        StepShape(26, 9, chunk_rows),
        torch.device("cpu"),
        torch.float32,
    )
    state.last_TH.fill_(9.0)  # left by an earlier batch
    generator = torch.Generator().manual_seed(4)
    blocks = Blocks.empty(26, 9)
    place = 0
    for length in LENGTHS:
        blocks.tokens_T[place : place + length] = torch.randint(MASK, (length,), generator=generator)
        blocks.positions_T[place : place + length] = torch.arange(length)
        place += length
    used = len(ANCHORS)
    blocks.anchors_A[:used] = torch.tensor(ANCHORS)
    blocks.starts_A[:used] = torch.tensor([0 if anchor < LENGTHS[0] else LENGTHS[0] for anchor in ANCHORS])
    blocks.slots_A[:used] = torch.tensor(SUPERVISED)
    carried = torch.randn(sum(LENGTHS), 3 * HIDDEN, generator=generator)
    state.load(carried if rule.needs_target else carried[:, : 2 * HIDDEN], blocks)
    state.begin()
    return state


def hidden_of(state: StepState) -> torch.Tensor:
    """The drafter's hidden states [A, K, H], with their graph."""
    ids, positions = block_tokens(state.blocks, BLOCK, MASK)
    attention = EagerStep(state).attention(state.blocks)
    given = state.features_TF, state.blocks.positions_T, state.head.embed(ids), positions
    return state.drafter(*given, attention).view(-1, BLOCK, HIDDEN)


def by_hand(state: StepState, last_TH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """Numerator, with its graph, denominator, and right slots: block by block, slot by slot, token by token."""
    rule, blocks, head = state.rule, state.blocks, state.head
    hidden = hidden_of(state)
    numerator, denominator, right = torch.zeros(()), torch.zeros(()), [0] * BLOCK
    for block, (anchor, slots) in enumerate(zip(ANCHORS, SUPERVISED, strict=True)):
        costs, confidences = [], []
        for slot in range(1, slots + 1):
            logits = head.logits(hidden[block, slot])
            q = torch.softmax(logits, 0)
            label = int(blocks.tokens_T[anchor + slot])
            cost = torch.zeros(())
            if rule.needs_target:
                target_logits = head.logits(last_TH[anchor + slot - 1])
                p = torch.softmax(target_logits, 0)
                if rule.target_labels:
                    label = max(range(VOCABULARY), key=lambda token: float(target_logits[token].detach()))
                for token in range(VOCABULARY):
                    cost = cost + rule.kl * p[token] * (p[token] / q[token]).log()
                    cost = cost + rule.total_variation * (p[token] - q[token]).abs() / 2
            costs.append(cost - rule.cross_entropy * q[label].log())
            confidences.append(float(q[label].detach()))
            right[slot] += int(max(range(VOCABULARY), key=lambda token: float(logits[token].detach())) == label)
        for slot in range(1, slots + 1):
            weight = math.exp(-(slot - 1) / rule.gamma)
            if rule.alpha is not None:
                smooth = [(1 - rule.alpha) * q + rule.alpha for q in confidences]
                weight = sum(math.prod(smooth[:last]) for last in range(slot, slots + 1))
            numerator = numerator + weight * costs[slot - 1]
            denominator = denominator + weight
    return numerator, denominator, right


@pytest.mark.parametrize("name", RULES)
def test_a_step_against_a_triple_loop(name: str) -> None:
    rule = RULES[name]
    state, plain = state_of(rule), state_of(rule)
    EagerStep(state).run(sum(SUPERVISED), len(ANCHORS))
    numerator, denominator, right = by_hand(plain, plain.last_TH)
    numerator.backward()
    assert float(state.totals[0]) == pytest.approx(float(numerator.detach()), rel=1e-5)
    assert float(state.totals[1]) == pytest.approx(float(denominator), rel=1e-5)
    assert state.correct_K.tolist() == right
    assert state.scored_K.tolist() == [0, 7, 7, 5, 5]
    ours, expected = state.flat.gradient, plain.flat.gradient
    assert float((ours - expected).norm() / expected.norm()) < 2e-5
    assert float(expected.norm()) > 0.01

    again = state_of(rule)
    EagerStep(again).evaluate(sum(SUPERVISED), len(ANCHORS))
    assert torch.equal(again.correct_AK, state.correct_AK)
    torch.testing.assert_close(again.totals, state.totals)
    assert not again.flat.gradient.any()


def test_only_the_places_that_predict_supervised_tokens_matter() -> None:
    """Another hidden state anywhere else changes nothing, not a bit; at each of these places it does."""
    rule = RULES["kl"]
    used = {
        anchor + slot - 1 for anchor, slots in zip(ANCHORS, SUPERVISED, strict=True) for slot in range(1, slots + 1)
    }
    totals = {}
    for place in [None, *range(26)]:
        state = state_of(rule)
        if place is not None:
            state.last_TH[place] += 0.5
        EagerStep(state).run(sum(SUPERVISED), len(ANCHORS))
        totals[place] = float(state.totals[0])
    assert {place for place in range(26) if totals[place] != totals[None]} == used
    assert 0 < len(used) < 22


def test_rows_without_weight_are_not_worked_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many chunks as supervised slots need, and the target's logits for none but theirs."""
    sizes: list[int] = []
    logits = TargetHead.logits

    def counted(self: TargetHead, hidden: torch.Tensor) -> torch.Tensor:
        sizes.append(len(hidden))
        return logits(self, hidden)

    monkeypatch.setattr(TargetHead, "logits", counted)
    state = state_of(RULES["kl"])
    EagerStep(state).run(sum(SUPERVISED), len(ANCHORS))
    assert sizes == [6] * 2 * -(-sum(SUPERVISED) // 6)
    sizes.clear()
    EagerStep(state_of(RULES["cross entropy"])).run(sum(SUPERVISED), len(ANCHORS))
    assert sizes == [6] * -(-sum(SUPERVISED) // 6)


def test_the_last_hidden_state_has_no_buffer_unless_it_is_needed() -> None:
    assert state_of(RULES["cross entropy"]).last_TH.shape == (0, HIDDEN)
    assert state_of(RULES["the target's labels"]).last_TH.shape == (26, HIDDEN)
    with pytest.raises(RuntimeError, match="expected 48 numbers a token, got 32"):
        state_of(RULES["kl"]).load(torch.zeros(4, 2 * HIDDEN), Blocks.empty(26, 9))
    with pytest.raises(RuntimeError, match="expected 32 numbers a token, got 48"):
        state_of(RULES["cross entropy"]).load(torch.zeros(4, 3 * HIDDEN), Blocks.empty(26, 9))


@pytest.mark.parametrize("name", ["kl", "all three, the target's labels", "kl under d-pace"])
def test_the_compiled_step_equals_eager(name: str) -> None:
    rule = RULES[name]
    reference, state = state_of(rule), state_of(rule)
    carried = torch.cat([reference.features_TF, reference.last_TH], dim=1)
    built = build_step("compiled", state, FlatAdamW(state.flat, TrainConfig()))
    state.load(carried, reference.blocks)
    state.begin()
    EagerStep(reference).run(sum(SUPERVISED), len(ANCHORS))
    built.step.run(sum(SUPERVISED), len(ANCHORS))
    torch.testing.assert_close(state.totals, reference.totals, rtol=1e-5, atol=1e-5)
    assert torch.equal(state.correct_AK, reference.correct_AK)
    torch.testing.assert_close(state.flat.gradient, reference.flat.gradient, rtol=1e-4, atol=1e-5)


def peer_inputs() -> tuple[torch.Tensor, torch.Tensor, TargetHead]:
    generator = torch.Generator().manual_seed(7)
    hidden, target_hidden = torch.randn(2, 12, HIDDEN, generator=generator)
    return hidden, target_hidden, head_of("plain", torch.float32)


@pytest.mark.parametrize(
    ("name", "theirs"),
    [("kl", "kl_div_loss"), ("total variation", "tv_loss"), ("the target's labels", "ce_loss")],
)
def test_speculators_own_losses(name: str, theirs: str) -> None:
    eager = pytest.importorskip(
        "speculators.losses.eager", reason="speculators 0.9.0 is not installed", exc_type=ImportError
    )
    hidden, target_hidden, head = peer_inputs()
    given = hidden.clone().requires_grad_()
    expected = getattr(eager, theirs)(head.logits(given)[None], head.logits(target_hidden)[None])[0]
    expected.sum().backward()
    labels, weights = torch.zeros(12, dtype=torch.int64), torch.ones(12)
    with torch.no_grad():
        costs, _, _, slope = whole_chunk(hidden, target_hidden, head, labels, weights, RULES[name], SLOTS)
    torch.testing.assert_close(costs, expected.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(slope, given.grad, rtol=1e-4, atol=1e-5)


def test_specforges_acceptance_rate_is_one_less_total_variation() -> None:
    lk_loss = pytest.importorskip("specforge.core.lk_loss", reason="specforge 0.2.0 is not installed")
    hidden, target_hidden, head = peer_inputs()
    probabilities = torch.softmax(head.logits(target_hidden), -1)
    rate, _ = lk_loss.compute_acceptance_rate(
        logits=head.logits(hidden), target_probs=probabilities, position_mask=torch.ones(12, 1)
    )
    labels, weights = torch.zeros(12, dtype=torch.int64), torch.ones(12)
    with torch.no_grad():
        costs, *_ = whole_chunk(hidden, target_hidden, head, labels, weights, RULES["total variation"], SLOTS)
    assert 0.01 < float(rate) < 0.9
    assert float(1.0 - costs.mean()) == pytest.approx(float(rate), rel=1e-5)


def test_specforges_distance_and_its_choice_of_place() -> None:
    """Its DSpark objective compares the same places: twice our total variation is its L1 distance."""
    family = pytest.importorskip(
        "specforge.algorithms.common.dflash_family_model", reason="specforge 0.2.0 is not installed"
    )
    rule = RULES["total variation"]
    state = state_of(rule)
    blocks, head, used = state.blocks, state.head, len(ANCHORS)
    slots = torch.arange(1, BLOCK)
    places = blocks.anchors_A[:used].long()[:, None] + slots
    supervised = slots <= blocks.slots_A[:used, None]
    peer = SimpleNamespace(
        lm_head=head.logits,
        draft_model=SimpleNamespace(
            apply_logits_head=lambda logits, **_: logits, predict_confidence=lambda *_, **__: None
        ),
        dspark_l1_loss_alpha=1.0,
        dspark_confidence_head_alpha=0.0,
    )
    model = family.OnlineDSparkModel
    safe = torch.where(supervised, places, 0)[None]
    aligned = model._aligned_target_hidden(peer, state.last_TH[None], safe)
    weights = (torch.exp(-(slots - 1) / rule.gamma) * supervised)[None]
    terms = model._dspark_objective_chunk_terms(
        peer,
        hidden_of(state)[None, :used, 1:],
        blocks.tokens_T[safe],
        blocks.tokens_T[safe],
        weights,
        supervised[None],
        aligned,
    )
    EagerStep(state).run(sum(SUPERVISED), used)
    assert float(state.totals[0]) == pytest.approx(float(terms[1].detach()) / 2, rel=1e-5)
