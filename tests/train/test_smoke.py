"""The one-minute recipe, its log, and its material."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from train.__main__ import main
from train.callbacks import HeldOut
from train.config import parse_config
from train.material import gather
from train.run import train

SMOKE = Path(__file__).parents[2] / "configs" / "train" / "smoke.yaml"


@pytest.mark.slow
def test_the_smoke_recipe_learns(tmp_path, capsys):
    assert main([str(SMOKE), "--output", str(tmp_path / "run"), "--export", str(tmp_path / "model")]) == 0
    quality = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert quality["loss"][-1] < 4.6 and quality["agreement"][0] > 0.3
    saved = json.loads((tmp_path / "model" / "generation_config.json").read_text())
    assert 1 <= saved["exit_layer"] <= 7


def test_held_out_agreement_is_in_the_log(small_settings):
    trainer = train(parse_config(small_settings))
    entries = [entry for entry in trainer.state.log_history if "held_out_agreement_1" in entry]
    assert [entry["step"] for entry in entries] == [2, 4]
    for entry in entries:
        assert entry["held_out_agreement_4"] == 1.0 and 0 <= entry["held_out_agreement_1"] <= 1
    steps = [entry["step"] for entry in trainer.state.log_history if "loss_exit_4" in entry]
    assert steps == [1, 2, 3, 4]  # measuring takes no line from the log
    assert any(isinstance(each, HeldOut) for each in trainer.callback_handler.callbacks)


def test_the_same_material_comes_again(small_settings):
    first, again = gather(parse_config(small_settings)), gather(parse_config(small_settings))
    assert all((a == b).all() for a, b in zip(first.train, again.train, strict=True))
