"""Learning rates by step, and settings that have no effect or do not fit."""

from __future__ import annotations

from typing import Any

import pytest

from draftmill.config import TrainConfig, build_config
from draftmill.errors import InputError
from draftmill.train.schedule import learning_rate


def rates(total: int, **settings: Any) -> list[float]:
    config = TrainConfig(lr=0.1, **settings)
    return [learning_rate(step, total, config) for step in range(total)]


def test_cosine() -> None:
    found = rates(10, warmup_share=0.2)
    assert found[:3] == pytest.approx([0.05, 0.1, 0.1]), "linear to the peak, which the next step keeps"
    assert found[6] == pytest.approx(0.05), "half way down"
    assert found[9] == pytest.approx(0.1 * 0.0380602337)
    assert found == sorted(found[:2]) + sorted(found[2:], reverse=True)
    assert rates(10, warmup_share=0.2, min_lr_share=0.5)[6] == pytest.approx(0.075)


def test_constant() -> None:
    assert rates(5, schedule="constant", warmup_share=0.4) == pytest.approx([0.05, 0.1, 0.1, 0.1, 0.1])


def test_warmup_stable_decay() -> None:
    found = rates(10, schedule="warmup-stable-decay", warmup_share=0.2, decay_share=0.4)
    assert found == pytest.approx([0.05, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.075, 0.05, 0.025])
    low = rates(10, schedule="warmup-stable-decay", warmup_share=0.0, decay_share=0.5, min_lr_share=0.1)
    assert low == pytest.approx([0.1] * 6 + [0.082, 0.064, 0.046, 0.028])
    assert rates(3, schedule="warmup-stable-decay", warmup_share=0.0) == pytest.approx([0.1] * 3), "too short to decay"
    assert rates(20, schedule="warmup-stable-decay", warmup_share=0.0)[15:] == pytest.approx(
        [0.1, 0.1, 0.075, 0.05, 0.025]
    ), "a fifth where nothing is said"


def test_only_warming_up() -> None:
    assert rates(4, warmup_share=1.0) == pytest.approx([0.025, 0.05, 0.075, 0.1])


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["train.decay_share=0.3"], "train: decay_share is of no effect with schedule cosine, got 0.3; set train.sch"),
        (["train.muon_lr=0.02"], "train: muon_lr is of no effect with optimizer adamw, got 0.02; set train.optimizer"),
        (
            ["train.schedule=warmup-stable-decay", "train.decay_share=0.9", "train.warmup_share=0.2"],
            "train: warmup_share and decay_share must be 1 at most together, got 0.2 and 0.9",
        ),
        (["train.optimizer=sgd"], "train.optimizer: Input should be 'adamw' or 'muon', got 'sgd'"),
        (["train.optimizer=muon", "train.muon_momentum=1.0"], "train.muon_momentum: Input should be less than 1"),
    ],
)
def test_settings_that_do_not_fit_are_one_line(overrides: list[str], said: str) -> None:
    with pytest.raises(InputError) as caught:
        build_config({"target": {"model": "m"}, "data": {"path": "d"}}, overrides)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
