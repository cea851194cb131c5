"""The demo's command line and recipe; the whole demo is run by hand and by `make demo`."""

from __future__ import annotations

from pathlib import Path

import pytest

from draftmill.cli import main
from draftmill.demo.run import CHATS, HELDOUT, RECIPE, prompts_for, recipe


@pytest.mark.parametrize("device", ["cuda:77", "tpu", "cuda:x"])
def test_a_device_that_is_not_here_is_one_line(device: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["demo", "--cache", str(tmp_path / "cache"), "--device", device])
    assert ended.value.code == 2
    error = capsys.readouterr().err.strip()
    assert len(error.splitlines()) == 1
    assert device in error
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_the_recipe_is_a_configuration(device: str) -> None:
    config = recipe(Path("target"), Path("store"), Path("run"), device)
    kind = device.partition(":")[0]
    assert config.train.num_anchors == RECIPE[kind]["train"]["num_anchors"]
    assert config.drafter.devices == config.target.devices == [device]


def test_the_shipped_prompts_are_of_every_kind_and_not_in_the_chats() -> None:
    import gzip
    import json

    prompts = prompts_for("cpu")
    assert {prompt.category for prompt in prompts} == {"gsm_symbolic", "rectangles", "units", "records", "general"}
    with gzip.open(CHATS, "rt") as file:
        asked = {json.loads(line)["messages"][0]["content"] for line in file}
    held = [json.loads(line)["prompt"] for line in HELDOUT.read_text().splitlines()]
    assert len(held) == 60
    assert not asked & set(held)
