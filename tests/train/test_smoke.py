"""The one-minute recipe, its throughput command, and the way to the hub."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from train.__main__ import main
from train.callbacks import HeldOut
from train.config import parse_config
from train.material import gather
from train.run import train

SMOKE = Path(__file__).parents[2] / "configs" / "train" / "smoke.yaml"


@pytest.fixture
def config_file(small_settings, tmp_path):
    small_settings["run"]["export"] = str(tmp_path / "model")
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(small_settings))
    return str(path)


def test_the_smoke_recipe_takes_its_first_steps(small_corpus, tmp_path):
    content = yaml.safe_load(SMOKE.read_text("utf-8"))
    content["corpus"] |= {"root": str(small_corpus), "held_out_percent": 20.0}
    content["model"]["vocab_size"] = 320
    content["run"] |= {"max_steps": 2, "output": str(tmp_path / "run"), "export": str(tmp_path / "model")}
    content["eval"] |= {"num_prompts": 2, "num_windows": 2, "new_tokens": 8}
    path = tmp_path / "smoke.yaml"
    path.write_text(yaml.safe_dump(content))
    assert main([str(path)]) == 0
    assert (tmp_path / "model" / "model.safetensors").is_file()


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
