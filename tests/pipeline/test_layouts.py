"""The same global batch gives the same training, however many targets and drafters share it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from draftmill.checkpoint import latest, load
from draftmill.pipeline import workers
from draftmill.target.features import TapsReplica
from draftmill.train.run import train
from tiny import config_of, metrics_of, small_world

STEPS = 10


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return small_world(tmp_path_factory.mktemp("world"))


def run(world: dict[str, Any], folder: Path, targets: int, drafters: int, accumulate: int, *more: str):
    config = config_of(
        world,
        f"run.dir={folder}",
        f"target.devices=[{', '.join(['cpu'] * targets)}]",
        f"drafter.devices=[{', '.join(['cpu'] * drafters)}]",
        f"train.accumulate={accumulate}",
        "train.epochs=8",
        f"train.max_steps={STEPS}",
        *more,
    )
    train(config, console=False)
    entry = latest(folder)
    assert entry is not None
    losses = [line["loss"] for line in metrics_of(folder) if "loss" in line]
    return losses, load(entry.folder).tensors()


@pytest.fixture(scope="module")
def reference(world: dict[str, Any], tmp_path_factory: pytest.TempPathFactory):
    """One target, one drafter, six batches a step."""
    return run(world, tmp_path_factory.mktemp("reference"), 1, 1, 6)


COMPARING = ("train.loss={cross_entropy: 0.1, kl: 0.9, total_variation: 0.5}", "train.labels=target")
"""A loss for which the target's last hidden state goes along with its features."""


@pytest.fixture(scope="module")
def comparing(world: dict[str, Any], tmp_path_factory: pytest.TempPathFactory):
    """The same under a loss that compares with the target."""
    return run(world, tmp_path_factory.mktemp("comparing"), 1, 1, 6, *COMPARING)


@pytest.mark.parametrize(("targets", "drafters"), [(1, 1), (2, 1), (1, 2), (2, 3)])
def test_weights_after_ten_steps_do_not_depend_on_the_layout(
    world: dict[str, Any], reference, tmp_path: Path, targets: int, drafters: int
) -> None:
    assert_same_training(
        run(world, tmp_path / "run", targets, drafters, 6 // drafters), reference, to_a_bit=drafters == 1
    )


def test_nor_on_how_many_devices_a_target_is_spread_over(world: dict[str, Any], reference, tmp_path: Path) -> None:
    found = run(world, tmp_path / "run", 1, 1, 6, "target.devices=[[cpu, cpu]]")
    assert_same_training(found, reference, to_a_bit=True)


@pytest.mark.parametrize(("targets", "drafters"), [(2, 1), (1, 3)])
def test_nor_do_they_under_a_loss_that_compares_with_the_target(
    world: dict[str, Any], reference, comparing, tmp_path: Path, targets: int, drafters: int
) -> None:
    assert comparing[0] != reference[0]
    found = run(world, tmp_path / "run", targets, drafters, 6 // drafters, *COMPARING)
    assert_same_training(found, comparing, to_a_bit=drafters == 1)


def assert_same_training(found, reference, to_a_bit: bool) -> None:
    losses, weights = found
    assert len(losses) == STEPS
    for ours, expected in zip(losses, reference[0], strict=True):
        # sums in another order, in float32
        assert ours == pytest.approx(expected, rel=2e-5)
    for name, expected in reference[1].items():
        torch.testing.assert_close(
            weights[name], expected, rtol=1e-3, atol=2e-4, msg=lambda text, name=name: f"{name}: {text}"
        )
    if to_a_bit:
        assert losses == reference[0], "the number of targets changes nothing, not a bit"
        assert all(torch.equal(weights[name], expected) for name, expected in reference[1].items())


def test_loss_falls_and_acceptance_is_reported(world: dict[str, Any], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    train(config_of(world, f"run.dir={folder}", "train.epochs=12", "train.evaluate_every=1000"), console=False)
    lines = metrics_of(folder)
    losses = [line["loss"] for line in lines if "loss" in line]
    evaluations = [line for line in lines if "accept_length" in line]
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])
    assert len(evaluations) == 1
    assert evaluations[0]["step"] == len(losses)
    assert 1.0 <= evaluations[0]["accept_length"] <= 4.0
    first = lines[0]
    for key in (
        "step",
        "epoch",
        "loss",
        "lr",
        "grad_norm",
        "context_tokens",
        "context_tokens_per_s",
        "accuracy_by_slot",
    ):
        assert key in first
    for key in ("target_wait_s", "drafter_wait_s", "peak_bytes", "compilations"):
        assert key in first
    assert 0.0 < first["useful_tflops"] < 10.0
    assert "share_of_peak" not in first, "a CPU's peak is not known"


def test_every_sample_trains_once_an_epoch_and_draws_share_one_forward(world: dict[str, Any], tmp_path: Path) -> None:
    plain, draws = tmp_path / "plain", tmp_path / "draws"
    train(config_of(world, f"run.dir={plain}", "train.epochs=1"), console=False)
    train(config_of(world, f"run.dir={draws}", "train.epochs=1", "train.anchor_draws=3"), console=False)
    one = [line for line in metrics_of(plain) if "loss" in line]
    three = [line for line in metrics_of(draws) if "loss" in line]
    assert len(three) == 3 * len(one)
    assert sum(line["context_tokens"] for line in three) == 3 * sum(line["context_tokens"] for line in one)


@pytest.mark.parametrize("compares", [False, True])
def test_the_feature_cache_changes_nothing(
    world: dict[str, Any], reference, comparing, tmp_path: Path, compares: bool
) -> None:
    """The target's last hidden state is kept with the features."""
    more, expected = (COMPARING, comparing) if compares else ((), reference)
    losses, weights = run(world, tmp_path / "run", 1, 1, 6, "target.cache_gib=1", *more)
    assert losses == pytest.approx(expected[0], rel=1e-4)
    for name, tensor in expected[1].items():
        torch.testing.assert_close(weights[name], tensor, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize(
    ("overrides", "layers", "width"),
    [((), 4, 2), (("train.loss=kl",), 6, 3), (("train.labels=target",), 6, 3), (("train.loss=d_pace",), 4, 2)],
)
def test_the_target_runs_to_its_end_only_for_a_loss_that_looks_at_its_predictions(
    world: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    overrides: tuple[str, ...],
    layers: int,
    width: int,
) -> None:
    """Six layers, taps of 1 and 3, a hidden size of 32."""
    seen: set[tuple[int, ...]] = set()
    pack = workers.pack

    def recorded(taps: list[torch.Tensor], source_T: torch.Tensor, features_TF: torch.Tensor) -> None:
        seen.add((len(taps), features_TF.shape[1]))
        pack(taps, source_T, features_TF)

    replicas: list[TapsReplica] = []
    forward = TapsReplica.forward

    def known(self: TapsReplica, batch: Any) -> list[torch.Tensor]:
        replicas.append(self)
        return forward(self, batch)

    monkeypatch.setattr(workers, "pack", recorded)
    monkeypatch.setattr(TapsReplica, "forward", known)
    run(world, tmp_path / "run", 1, 1, 6, *overrides)
    assert seen == {(width, width * 32)}
    assert {len(replica.target.layers) for replica in replicas} == {layers}
