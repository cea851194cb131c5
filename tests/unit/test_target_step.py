"""The choice of the target's step by measurement: what is kept, what is rejected, and how the target is left."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from draftmill.target import step as steps
from draftmill.target import step_compiled, step_fused, step_graphed
from draftmill.target.step import EagerForward, compared, largest_difference, rounding_of
from target_kinds import random_tokens, tiny_target

torch.set_num_threads(1)

TAPS = (1, 3, 6)
TOKENS = random_tokens(2, 8)
APPLIED: list[str] = []


def way(name: str, sleep_s: float | dict[str, float] = 0.0, off: float = 0.0, error: Exception | None = None) -> type:
    """A forward that is slow, wrong or broken as told, and notes when the target is changed.

    sleep_s: of a graph by what it is made of, or the same for all.
    """

    class Way:
        def __init__(self, *parts: Any) -> None:
            self.sleep_s = sleep_s[parts[0].name] if isinstance(sleep_s, dict) else sleep_s
            if name == "graphed":
                assert ([parts[0].name] if parts[0].name != "plain" else []) == APPLIED, "of what is applied"
                return
            self.plain = EagerForward(*parts[:2])

        def apply(self) -> None:
            if name != "graphed":
                APPLIED.append(name)

        def undo(self) -> None:
            if name in APPLIED:
                APPLIED.remove(name)

        def run(self, tokens: torch.Tensor, packing: Any) -> list[torch.Tensor]:
            if error is not None:
                raise error
            time.sleep(self.sleep_s)
            return [feature + off * feature.roll(1, 0) for feature in PLAIN]

    Way.name = name  # type: ignore[attr-defined]
    return Way


TARGET = tiny_target("llama")
PLAIN = [feature.clone() for feature in EagerForward(TARGET, TAPS).run(TOKENS, None)]


def choose(monkeypatch: pytest.MonkeyPatch, choice: str, packed: bool = False, **ways: type) -> steps.Built:
    """Choose among the given ways and a plain one that takes a hundredth of a second."""
    APPLIED.clear()
    for name, module in (("fused", step_fused), ("compiled", step_compiled), ("graphed", step_graphed)):
        given = ways.get(name, way(name, error=RuntimeError(f"no {name} here\nand more")))
        monkeypatch.setattr(module, f"{name.capitalize()}Forward", given)
    plain = EagerForward(TARGET, TAPS)
    monkeypatch.setattr(plain, "run", way("plain", 0.01)(TARGET, TAPS).run)
    return steps._choose(choice, plain, TOKENS, object() if packed else None)  # type: ignore[arg-type]


def test_auto_keeps_the_fastest_that_agrees(monkeypatch: pytest.MonkeyPatch) -> None:
    built = choose(monkeypatch, "auto", fused=way("fused", 0.005), compiled=way("compiled", 0.0))
    assert built.forward.name == "compiled"
    assert APPLIED == ["compiled"]
    assert built.report.startswith("compiled (auto; 2x8: plain ")
    assert "fused differs by 0.0e+00" in built.report
    built = choose(monkeypatch, "auto", fused=way("fused", 0.0), compiled=way("compiled", 0.02))
    assert (built.forward.name, APPLIED) == ("fused", ["fused"])


def test_auto_rejects_what_is_wrong_or_broken_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    built = choose(monkeypatch, "auto", fused=way("fused", 0.0, off=0.5))
    assert (built.forward.name, APPLIED) == ("plain", [])
    assert "fused rejected: RuntimeError: features differ from the plain model's by " in built.report
    assert "compiled rejected: RuntimeError: no compiled here" in built.report
    assert "and more" not in built.report
    wrong = choose(monkeypatch, "auto", compiled=way("compiled", 0.0, off=float("nan")))
    assert wrong.forward.name == "plain"
    assert "features differ from the plain model's by nan" in wrong.report


def test_the_best_graph_is_taken_and_stays_on_what_it_is_made_of(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = way("graphed", {"plain": 0.003, "compiled": 0.0})
    built = choose(monkeypatch, "auto", packed=True, compiled=way("compiled", 0.004), graphed=graphs)
    assert (built.forward.name, APPLIED, built.ways) == ("graphed", ["compiled"], ("compiled", "graphed"))
    assert built.report.startswith("graphed compiled (auto; 2x8: plain ")
    built = choose(monkeypatch, "auto", packed=True, compiled=way("compiled", 0.0), graphed=way("graphed", 0.01))
    assert (built.forward.name, APPLIED) == ("compiled", ["compiled"])
    built = choose(monkeypatch, "auto", compiled=way("compiled", 0.004), graphed=way("graphed", 0.0))
    assert built.forward.name == "compiled"  # rows of any shape are not captured


def test_a_way_that_is_slow_to_launch_may_give_the_best_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless it is slow by its kernels: then no graph of it is made."""
    slow, graphs = way("fused", 0.02), way("graphed", {"plain": 0.003, "fused": 0.0})
    for choice in ("auto", "graphed"):
        built = choose(monkeypatch, choice, packed=True, fused=slow, graphed=graphs)
        assert (built.forward.name, APPLIED, built.ways) == ("graphed", ["fused"], ("fused", "graphed"))
    monkeypatch.setattr(steps, "LAUNCH_BOUND", 2.0)
    built = choose(monkeypatch, "auto", packed=True, fused=slow, graphed=graphs)
    assert (built.ways, APPLIED) == (("plain", "graphed"), [])
    assert "graphed fused" not in built.report


def test_a_graph_that_fails_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    class Picky(way("graphed", 0.0)):  # type: ignore[misc]
        def __init__(self, inner: Any) -> None:
            super().__init__(inner)
            if inner.name == "plain":
                raise RuntimeError("no graph of plain")

    built = choose(monkeypatch, "graphed", packed=True, fused=way("fused", 0.02), graphed=Picky)
    assert built.ways == ("fused", "graphed")
    assert "graphed rejected: RuntimeError: no graph of plain" in built.report
    with pytest.raises(RuntimeError, match="no graph of plain"):
        choose(monkeypatch, "graphed", packed=True, graphed=Picky)


def test_eager_takes_fused_kernels_only_where_they_are_right_and_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    built = choose(monkeypatch, "eager", fused=way("fused", 0.0), compiled=way("compiled", 0.0))
    assert (built.forward.name, APPLIED) == ("fused", ["fused"])
    assert built.report.startswith("fused (as configured: eager; 2x8: plain ")
    assert choose(monkeypatch, "eager", fused=way("fused", 0.03)).forward.name == "plain"
    assert choose(monkeypatch, "eager").forward.name == "plain"


def test_what_was_asked_for_is_kept_even_if_slow_and_raised_if_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    built = choose(monkeypatch, "compiled", fused=way("fused", 0.0), compiled=way("compiled", 0.03))
    assert (built.forward.name, APPLIED) == ("compiled", ["compiled"])
    graphs = way("graphed", {"plain": 0.06, "fused": 0.03})
    built = choose(monkeypatch, "graphed", packed=True, fused=way("fused", 0.0), graphed=graphs)
    assert (built.forward.name, APPLIED) == ("graphed", ["fused"])
    with pytest.raises(RuntimeError, match="no compiled here"):
        choose(monkeypatch, "compiled")
    assert APPLIED == []
    with pytest.raises(RuntimeError, match="features differ"):
        choose(monkeypatch, "compiled", compiled=way("compiled", 0.0, off=1.0))
    assert APPLIED == []


def test_other_replicas_take_what_the_first_one_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tried once each, compared with plain, and not with what the first one rejected."""
    monkeypatch.setattr(steps, "check_choice", lambda *_: None)
    decision, ran = steps.Decision(), []

    def counted(name: str, sleep_s: float = 0.0, off: float = 0.0) -> type:
        made = way(name, sleep_s, off)
        run = made.run  # type: ignore[attr-defined]
        monkeypatch.setattr(made, "run", lambda self, *inputs: (ran.append(name), run(self, *inputs))[1], raising=False)
        return made

    def replica(**ways: type) -> steps.Built:
        APPLIED.clear()
        ran.clear()
        for name, module in (("fused", step_fused), ("compiled", step_compiled), ("graphed", step_graphed)):
            given = ways.get(name, way(name, error=RuntimeError(f"no {name} here")))
            monkeypatch.setattr(module, f"{name.capitalize()}Forward", given)
        return steps.build_forward("compiled", TARGET, TAPS, TOKENS, None, False, decision)

    first = replica(compiled=counted("compiled"))
    assert (first.forward.name, first.ways, len(ran)) == ("compiled", ("compiled",), 4)
    second = replica(compiled=counted("compiled"))
    assert (second.forward.name, second.ways, APPLIED, len(ran)) == ("compiled", ("compiled",), ["compiled"], 2)
    assert second.report.startswith("compiled (as the first replica's; 2x8: plain ")
    with pytest.raises(RuntimeError, match="features differ"):  # it is tried anew, and told
        replica(compiled=counted("compiled", off=1.0))
    assert APPLIED == []


@pytest.mark.parametrize("ways", [("plain",), ("fused",), ("plain", "graphed"), ("compiled", "graphed")])
def test_a_decision_of_any_kind_is_built_again(monkeypatch: pytest.MonkeyPatch, ways: tuple[str, ...]) -> None:
    APPLIED.clear()
    for name, module in (("fused", step_fused), ("compiled", step_compiled), ("graphed", step_graphed)):
        monkeypatch.setattr(module, f"{name.capitalize()}Forward", way(name))
    plain = EagerForward(TARGET, TAPS)
    monkeypatch.setattr(plain, "run", way("plain")(TARGET, TAPS).run)
    built = steps._as_decided(ways, plain, TOKENS, object())  # type: ignore[arg-type]
    assert built is not None
    assert (built.forward.name, built.ways) == (ways[-1], ways)
    assert [name for name in ways if name not in ("plain", "graphed")] == APPLIED


def test_padding_without_features_counts_as_equal() -> None:
    """Half the tokens or more may be padding whose features are all zero."""
    features = torch.zeros(6, 8)
    features[:2] = 1.0
    assert largest_difference([features.clone()], [features]) == 0.0
    wrong = features.clone()
    wrong[2:] = 1e-3
    assert largest_difference([wrong], [features]) == float("inf")


def test_what_may_differ_grows_with_what_rounding_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A difference beyond the fixed share is allowed where one more rounding a layer makes a good part of it."""
    target = tiny_target("llama")
    target.model.to(torch.bfloat16)
    plain = EagerForward(target, (1, 2))
    tokens = torch.arange(2 * 24).view(2, 24) % 90 + 1
    features = compared(plain.run(tokens, None))
    rounding = rounding_of(plain, tokens, None, features)
    assert 1e-4 < rounding < 5e-2
    assert not any(layer._forward_hooks for layer in target.layers)
    assert largest_difference(compared(plain.run(tokens, None)), features) == 0.0
    assert steps._Trial(plain, tokens, None, timed_runs=1).tolerance == 5e-2
    monkeypatch.setitem(steps.TOLERANCE, torch.bfloat16, rounding / 10)
    trial = steps._Trial(plain, tokens, None, timed_runs=1)
    assert trial.tolerance == pytest.approx(steps.ROUNDINGS * rounding)


def test_a_wrong_way_is_measured_against_the_plain_models_rounding_and_not_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It changes the target while it is applied, and what it does must not count as rounding."""

    class Louder(EagerForward):
        def apply(self) -> None:
            def louder(_module: Any, _inputs: Any, output: Any) -> Any:
                return (output[0] * 1.5, *output[1:]) if isinstance(output, tuple) else output * 1.5

            self.hooks = [layer.register_forward_hook(louder, prepend=True) for layer in self.target.layers]

        def undo(self) -> None:
            for hook in self.hooks:
                hook.remove()

    target = tiny_target("llama")
    target.model.to(torch.bfloat16)
    monkeypatch.setattr(step_fused, "FusedForward", Louder)
    trial = steps._Trial(EagerForward(target, (1, 2)), TOKENS, None, timed_runs=1)
    trial.consider("fused")
    assert trial.best.name == "plain"
    assert trial.notes[0].startswith("fused rejected: RuntimeError: features differ from the plain model's by ")
