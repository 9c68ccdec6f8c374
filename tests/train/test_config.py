"""A wrong configuration gives one sentence that says what to write instead."""

from __future__ import annotations

from pathlib import Path

import pytest

from train.__main__ import main
from train.config import TrainConfig, load_config, parse_config

CONFIGS = Path(__file__).parents[2] / "configs" / "train"


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_configurations_load(path):
    assert isinstance(load_config(path), TrainConfig)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([1], r"the configuration must be a mapping, got \[1\]"),
        (
            {"optimizer": {}},
            r"the configuration has no key 'optimizer'; known keys: corpus, model, exits, optim, run, eval",
        ),
        ({"run": {"step": 3}}, r"run has no key 'step'; known keys: output"),
        ({"run": {"max_steps": "many"}}, r"run\.max_steps must be of type int, got 'many'"),
        ({"run": {"max_steps": True}}, r"run\.max_steps must be of type int, got True"),
        ({"run": {"max_steps": 0}}, r"run\.max_steps must be at least 1, got 0"),
        ({"run": {"windows": 512}}, r"run\.windows must be a list, got 512"),
        ({"run": {"windows": [300]}}, r"run\.tokens_per_batch must be a multiple of 300, got 4096"),
        ({"run": {"windows": [4096]}}, r"run\.windows must be at most model\.max_position_embeddings = 2048, got 4096"),
        ({"exits": {"weights": "steep"}}, r"exits\.weights must be one of uniform, linear, cumulative, got 'steep'"),
        ({"exits": {"period": 17}}, r"exits\.period must be at most model\.num_hidden_layers = 16, got 17"),
        ({"exits": {"dropout_max": 1}}, r"exits\.dropout_max must be at least 0 and below 1, got 1\.0"),
        ({"model": {"num_attention_heads": 5}}, r"model\.hidden_size must be a multiple of 10, got 192"),
        ({"corpus": {"held_out_percent": 0}}, r"corpus\.held_out_percent must be between 0 and 100, got 0\.0"),
    ],
)
def test_a_bad_key_is_named(content, message):
    with pytest.raises(ValueError, match=message):
        parse_config(content)


def test_the_command_says_one_sentence(tmp_path, capsys):
    path = tmp_path / "bad.yaml"
    path.write_text("run:\n  max_steps: -1\n")
    assert main([str(path)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err == "train: run.max_steps must be at least 1, got -1\n"
    assert main([str(tmp_path / "none.yaml")]) == 2
    assert "cannot read the configuration" in capsys.readouterr().err
