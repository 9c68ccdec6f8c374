"""A wrong configuration gives one sentence that says what to write instead."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from train.__main__ import main, read_arguments
from train.config import TrainConfig, load_config, parse_config
from train.heads import HeadsRun

CONFIGS = sorted((Path(__file__).parents[2] / "configs" / "train").glob("*.yaml"))
RECIPES = [
    path for path in CONFIGS if not path.name.startswith("exit_heads")
]  # heads have a configuration of their own


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_shipped_configurations_load(path):
    assert isinstance(load_config(path), TrainConfig)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_key_has_a_sentence(path):
    lines = path.read_text("utf-8").splitlines()
    keys = [line for line in lines if re.match(r"  \w+:", line)]
    assert len(keys) == sum(len(section) for section in yaml.safe_load(path.read_text("utf-8")).values())
    for line in keys:
        sentence = line.partition("  # ")[2]
        assert re.fullmatch(r"[A-Z-].{8,}\.", sentence), line


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"optimizer": {}}, r"configuration key 'optimizer' is unknown; did you mean 'optim'\?"),
        ({"run": {"max_steps": "many"}}, r"run\.max_steps must be a whole number, got 'many'"),
        ({"run": {"max_steps": 0}}, r"run\.max_steps must be at least 1, got 0"),
        ({"run": {"windows": [300]}}, r"run\.tokens_per_batch must be a multiple of 300, got 4096"),
        ({"run": {"windows": [4096]}}, r"run\.windows must be at most model\.max_position_embeddings = 2048, got 4096"),
        ({"exits": {"period": 17}}, r"exits\.period must be at most model\.num_hidden_layers = 16, got 17"),
        ({"exits": {"dropout_max": 1}}, r"exits\.dropout_max must be at least 0 and below 1, got 1\.0"),
        ({"model": {"num_attention_heads": 5}}, r"model\.hidden_size must be a multiple of 10, got 192"),
        ({"run": {"windows": [1]}}, r"run\.windows must be a list of lengths of at least 2 tokens, got \(1,\)"),
        ({"run": {"exit_layer": 16}}, r"run\.exit_layer must be below model\.num_hidden_layers = 16, got 16"),
        ({"run": {"compile": True, "gradient_checkpointing": True}}, r"run\.compile must be false where"),
        ({"lora": {"rank": 8}}, r"model\.base must be the model that lora adapts, got ''"),
        ({"model": {"base": "x"}, "lora": {"rank": 8}}, r"optim\.kind must be adamw where lora\.rank is above 0"),
        ({"model": {"base": "x", "hidden_size": 96}}, r"model\.hidden_size is fixed by model\.base; remove it"),
        (
            {"data": {"path": "a.jsonl", "messages_field": "m"}},
            r"model\.base must be a model with a tokenizer where data",
        ),
        ({"data": {"split": "x"}}, r"data\.path must name a file or a data set, got ''"),
        ({"data": {"path": "a.txt"}, "corpus": {"root": "b"}}, r"data\.path and the section corpus exclude each other"),
        (
            {"model": {"base": "x"}, "text": {"num_texts": 99}, "data": {"path": "a.txt"}},
            r"data\.path and text\.num_texts exclude each other; remove one of them",
        ),
        ({"text": {"num_texts": 99}}, r"model\.base must be a model with a tokenizer where data"),
        ({"text": {"num_texts": -1}}, r"text\.num_texts must be at least 0, got -1"),
        (
            {"text": {"temperatures": [-1]}},
            r"text\.temperatures must be a list of temperatures from 0, got \[-1\.0\]",
        ),
        ({"exits": {"teacher": "base"}}, r"exits\.teacher must be last where lora\.rank is 0, got 'base'"),
        ({"exits": {"teacher": "me"}}, r"exits\.teacher must be one of last, base, got 'me'"),
        ({"run": {"max_minutes": -1}}, r"run\.max_minutes must be at least 0, got -1\.0"),
        ({"data": {"path": "a.txt", "max_length": 1}}, r"data\.max_length must be 0 or at least 2, got 1"),
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


def test_flags_win_over_the_file(tmp_path, capsys):
    path = tmp_path / "some.yaml"
    path.write_text("run:\n  max_steps: 5\n  windows: [16]\ndata:\nexits:\n")
    flags = ["--run.max-steps", "7", "--run.windows", "32", "64", "--optim.adamw-lr", "2e-4", "--output", "a b"]
    config, options = read_arguments([str(path), *flags, "--no-run.bf16", "--resume"])
    assert config.run.max_steps == 7 and config.run.windows == (32, 64) and config.run.output == "a b"
    assert config.optim.adamw_lr == 2e-4 and config.run.bf16 is False and options.resume
    assert main([str(path), "--resume", "--run.windows", "long"]) == 2
    assert "run.windows must be a whole number, got 'long'" in capsys.readouterr().err


def test_a_configuration_with_heads_has_their_flags(capsys):
    file = "configs/train/exit_heads.yaml"
    config, _ = read_arguments([file, "--model", "smollm2", "--heads.minutes", "3"])
    assert isinstance(config, HeadsRun) and (config.heads.model, config.heads.minutes) == ("smollm2", 3)
    for other in ([file, "--export-only"], [file, "--notes", "x"], ["configs/train/smoke.yaml", "--heads.model", "x"]):
        with pytest.raises(SystemExit):
            main(other)
    assert "unrecognized arguments: --heads.model x" in capsys.readouterr().err
