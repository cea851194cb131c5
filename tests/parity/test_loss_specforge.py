"""The step's loss and gradients against specforge 0.2.0's: same weights, features, masks and anchors, float32 on a CPU.

SpecForge pads its rows to one length; ours packs the real tokens of the same documents one after another.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import nn

from draftmill.drafter.attention import dense_attention
from draftmill.drafter.loss import LossRule
from draftmill.drafter.network import Drafter
from draftmill.drafter.shape import DrafterShape
from draftmill.records import Blocks
from draftmill.step.eager import AttentionChoice, EagerStep
from draftmill.step.state import StepShape, StepState
from draftmill.target.head import TargetHead

family = pytest.importorskip(
    "specforge.algorithms.common.dflash_family_model",
    reason="specforge 0.2.0 is not installed; `make test` installs it",
)

BLOCK, MASK, VOCABULARY = 8, 96, 97
ATTENTION: dict[str, AttentionChoice | None] = {
    "per_document": None,
    "dense": lambda state: lambda blocks: dense_attention(state.drafter_shape, blocks),
}
RULES = {
    "decay": LossRule(gamma=4.0),
    "d_pace": LossRule(gamma=4.0, alpha=0.5),
    "d_pace_0": LossRule(gamma=4.0, alpha=0.0),
}

RELATIVE = 2e-5
"""Allowed norm of a gradient's difference over its norm, float32: sums of some hundred terms in another order."""


@dataclass
class Document:
    """Tokens [S], features [S, L*H], loss mask [S] as booleans, and the anchors of its blocks."""

    tokens: torch.Tensor
    features: torch.Tensor
    supervised: torch.Tensor
    anchors: list[int]

    def slots(self, anchor: int) -> int:
        """Supervised slots of a block: the run of supervised tokens right after its anchor."""
        count = 0
        while count < BLOCK - 1 and anchor + count + 1 < len(self.tokens) and bool(self.supervised[anchor + count + 1]):
            count += 1
        return count


def small_shape(**changes: object) -> DrafterShape:
    values: dict[str, object] = dict(
        hidden_size=32,
        intermediate_size=48,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        rms_norm_eps=1e-6,
        vocab_size=VOCABULARY,
        block_size=BLOCK,
        mask_token_id=MASK,
        target_layer_ids=(1, 3, 5),
        num_target_layers=8,
        rope={"rope_type": "default", "rope_theta": 10000.0},
        max_position_embeddings=512,
    )
    return DrafterShape(**{**values, **changes})  # type: ignore[arg-type]


def document(length: int, turns: list[tuple[int, int]], anchors: list[int], feature_size: int) -> Document:
    """Random tokens and features; the turns [first, last) are supervised."""
    supervised = torch.zeros(length, dtype=torch.bool)
    for first, last in turns:
        supervised[first:last] = True
    return Document(torch.randint(0, MASK, (length,)), torch.randn(length, feature_size), supervised, anchors)


def documents(shape: DrafterShape) -> list[Document]:
    """Four documents of different length: prompts without loss, two turns a gap of a block apart, ends cut short."""
    size = shape.feature_size
    return [
        document(40, [(10, 40)], [10, 11, 13, 30, 35, 38], size),
        document(23, [(5, 19)], [5, 9, 16, 17], size),
        # the gap of 9 unsupervised tokens is longer than a block's 7 drafted ones: no block reaches the second turn
        document(61, [(7, 20), (29, 55)], [8, 14, 18, 29, 31, 33, 48, 53], size),
        document(12, [(3, 12)], [3, 10], size),
    ]


def new_drafter(shape: DrafterShape) -> Drafter:
    torch.manual_seed(5)
    drafter = Drafter(shape)
    for parameter in drafter.parameters():
        if parameter.dim() == 1:
            nn.init.uniform_(parameter, 0.5, 1.5)
        else:
            nn.init.normal_(parameter, std=0.1)
    return drafter


def new_head(shape: DrafterShape) -> TargetHead:
    generator = torch.Generator().manual_seed(6)
    matrices = torch.randn(2, shape.vocab_size, shape.hidden_size, generator=generator)
    return TargetHead(matrices[0], matrices[1] * 0.3)


def new_state(shape: DrafterShape, rule: LossRule, context_slots: int, anchor_slots: int) -> StepState:
    return StepState(
        new_drafter(shape),
        new_head(shape),
        rule,
        # 21 rows a chunk: several chunks, the last one not full; D-PACE rounds it to whole blocks
        StepShape(context_slots, anchor_slots, chunk_rows=21),
        torch.device("cpu"),
        torch.float32,
    )


def run_step(step: EagerStep, batch: list[Document]) -> None:
    """Pack the documents into the state's slots and add their gradient to it."""
    state = step.state
    blocks = Blocks.empty(state.shape.context_slots, state.shape.anchor_slots)
    features, place, used = [], 0, 0
    for item in batch:
        length = len(item.tokens)
        blocks.tokens_T[place : place + length] = item.tokens
        blocks.positions_T[place : place + length] = torch.arange(length)
        features.append(item.features)
        for anchor in item.anchors:
            blocks.anchors_A[used], blocks.starts_A[used] = place + anchor, place
            blocks.slots_A[used] = item.slots(anchor)
            used += 1
        place += length
    state.load(torch.cat(features), blocks)
    step.run(int(blocks.slots_A.sum()), used)


def ours(shape: DrafterShape, rule: LossRule, batch: list[Document], attention: str) -> StepState:
    """The state after one step on one batch, with slots to spare."""
    torch.set_num_threads(1)
    state = new_state(shape, rule, context_slots=160, anchor_slots=24)
    state.begin()
    run_step(EagerStep(state, ATTENTION[attention]), batch)
    return state


def theirs(
    shape: DrafterShape, rule: LossRule, batch: list[Document], chunk_blocks: int
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """SpecForge's loss numerator, loss, and the gradients of the numerator by parameter name."""
    model = specforge_model(shape, rule, chunk_blocks)
    rows, longest = len(batch), max(len(item.tokens) for item in batch)
    most = max(len(item.anchors) for item in batch)
    tokens = torch.zeros(rows, longest, dtype=torch.int64)
    features = torch.zeros(rows, longest, shape.feature_size)
    mask = torch.zeros(rows, longest)
    anchors = torch.zeros(rows, most, dtype=torch.int64)
    keep = torch.zeros(rows, most, dtype=torch.bool)
    for row, item in enumerate(batch):
        length, count = len(item.tokens), len(item.anchors)
        tokens[row, :length], features[row, :length] = item.tokens, item.features
        mask[row, :length] = item.supervised.float()
        anchors[row, :count], keep[row, :count] = torch.tensor(item.anchors), True
    model._sample_anchor_positions = lambda *_arguments, **_named: (anchors, keep)
    loss, _, metrics = model(tokens, features, mask)
    numerator = metrics["loss_terms"][0]
    numerator.backward()
    gradients = {name: parameter.grad for name, parameter in model.draft_model.named_parameters()}
    return numerator.detach(), loss.detach(), gradients


def specforge_model(shape: DrafterShape, rule: LossRule, chunk_blocks: int) -> nn.Module:
    """The peer's training model around a network that holds the same weights."""
    sliding = set(shape.sliding_layers)
    config = family.DFlashDraftModel.config_class(
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        rms_norm_eps=shape.rms_norm_eps,
        vocab_size=shape.vocab_size,
        rope_parameters=dict(shape.rope),
        max_position_embeddings=shape.max_position_embeddings,
        sliding_window=shape.sliding_window,
        use_sliding_window=bool(sliding),
        layer_types=["sliding_attention" if i in sliding else "full_attention" for i in range(shape.num_layers)],
    )
    config.num_target_layers = shape.num_target_layers
    config.block_size = shape.block_size
    config.dflash_config = {"mask_token_id": shape.mask_token_id, "target_layer_ids": list(shape.target_layer_ids)}
    config._attn_implementation = "sdpa"
    network = family.DFlashDraftModel(config).float()
    result = network.load_state_dict(new_drafter(shape).state_dict(), strict=False)
    assert not result.unexpected_keys
    assert not result.missing_keys
    head = new_head(shape)
    embedding = nn.Embedding.from_pretrained(head.embedding_VH, freeze=True)
    linear = nn.Linear(shape.hidden_size, shape.vocab_size, bias=False)
    linear.weight = nn.Parameter(head.head_VH, requires_grad=False)
    return family.OnlineDFlashModel(
        draft_model=network,
        target_lm_head=linear,
        target_embed_tokens=embedding,
        mask_token_id=shape.mask_token_id,
        block_size=shape.block_size,
        attention_backend="sdpa",
        loss_decay_gamma=rule.gamma,
        objective_chunk_blocks=chunk_blocks,
        loss_type="dflash" if rule.alpha is None else "dpace",
        dpace_alpha=0.5 if rule.alpha is None else rule.alpha,
    )


def gradients_differ_by(mine: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> dict[str, float]:
    """Norm of the difference over the norm, by name; both must have the same names and no zero gradient."""
    assert set(mine) == set(other)
    assert all(float(gradient.norm()) > 0 for gradient in other.values())
    return {name: float((mine[name] - gradient).norm() / gradient.norm()) for name, gradient in other.items()}


def assert_equal_gradients(mine: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    apart = gradients_differ_by(mine, other)
    worst = max(apart, key=lambda name: apart[name])
    assert apart[worst] < RELATIVE, f"{worst}: {apart[worst]:.1e}"


@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("sliding", [False, True])
def test_loss_and_gradients_equal_specforge(rule: str, attention: str, sliding: bool) -> None:
    shape = small_shape(**({"sliding_window": 9, "sliding_layers": (1,)} if sliding else {}))
    torch.manual_seed(7)
    batch = documents(shape)
    state = ours(shape, RULES[rule], batch, attention)
    numerator, loss, gradients = theirs(shape, RULES[rule], batch, chunk_blocks=3)
    assert float(state.totals[0]) == pytest.approx(float(numerator), rel=1e-5)
    if RULES[rule].alpha is None:
        assert float(state.totals[0] / state.totals[1]) == pytest.approx(float(loss), rel=1e-5)
    else:  # its D-PACE loss is divided by the number of rows, which depends on how documents are put into rows
        assert float(state.totals[0]) / len(batch) == pytest.approx(float(loss), rel=1e-5)
    assert_equal_gradients(state.flat.named(state.flat.gradient), gradients)


def test_a_block_does_not_re_enter_after_an_unsupervised_slot() -> None:
    """The one difference: SpecForge scores a block's later slots again where a next turn begins inside the block."""
    shape, rule = small_shape(), RULES["decay"]
    torch.manual_seed(8)
    # the anchor's block covers tokens 10..17, of which 13 and 14 belong to the user
    item = document(30, [(6, 13), (15, 30)], [10], shape.feature_size)
    assert item.slots(10) == 2
    state = ours(shape, rule, [item], "per_document")
    numerator, loss, _ = theirs(shape, rule, [item], chunk_blocks=0)
    weights = torch.exp(-torch.arange(BLOCK - 1) / rule.gamma)
    assert float(state.totals[1]) == pytest.approx(float(weights[:2].sum()), rel=1e-6)
    # slots 1, 2 and then 5, 6, 7 again
    assert float(numerator / loss) == pytest.approx(float(weights[[0, 1, 4, 5, 6]].sum()), rel=1e-6)
    # cut where ours ends, the peer agrees again
    item.supervised[15:] = False
    numerator, _, gradients = theirs(shape, rule, [item], chunk_blocks=0)
    assert float(state.totals[0]) == pytest.approx(float(numerator), rel=1e-5)
    assert_equal_gradients(state.flat.named(state.flat.gradient), gradients)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("cut", [1, 2, 3])
def test_gradients_do_not_depend_on_the_split(rule: str, cut: int) -> None:
    """One batch, or its documents in two batches added up: the same sums and the same gradient."""
    shape = small_shape()
    torch.manual_seed(9)
    batch = documents(shape)
    together = ours(shape, RULES[rule], batch, "per_document")
    apart = new_state(shape, RULES[rule], context_slots=160, anchor_slots=24)
    apart.begin()
    step = EagerStep(apart)
    run_step(step, batch[:cut])
    run_step(step, batch[cut:])
    torch.testing.assert_close(apart.totals, together.totals, rtol=1e-6, atol=0.0)
    assert apart.correct_K.tolist() == together.correct_K.tolist()
    assert apart.scored_K.tolist() == together.scored_K.tolist()
    assert_equal_gradients(apart.flat.named(apart.flat.gradient), together.flat.named(together.flat.gradient))


def test_gradients_do_not_depend_on_the_order_of_documents_or_on_spare_slots() -> None:
    shape, rule = small_shape(), RULES["decay"]
    torch.manual_seed(10)
    batch = documents(shape)
    reference = ours(shape, rule, batch, "dense")
    state = new_state(shape, rule, context_slots=136, anchor_slots=20)
    state.begin()
    run_step(EagerStep(state), batch[::-1])
    torch.testing.assert_close(state.totals, reference.totals, rtol=1e-6, atol=0.0)
    assert_equal_gradients(state.flat.named(state.flat.gradient), reference.flat.named(reference.flat.gradient))
