"""A wrong configuration gives one sentence that says what to write instead."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from train.__main__ import main
from train.config import TrainConfig, load_config, parse_config

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
        ([1], r"the configuration must be a mapping, got \[1\]"),
        (
            {"optimizer": {}},
            r"the configuration has no key 'optimizer'; did you mean 'optim'\? known keys: corpus, data, text,",
        ),
        ({"run": {"step": 3}}, r"run has no key 'step'; did you mean 'max_steps'"),
        ({"run": {"max_steps": "many"}}, r"run\.max_steps must be of type int, got 'many'"),
        ({"run": {"max_steps": True}}, r"run\.max_steps must be of type int, got True"),
        ({"run": {"max_steps": None}}, r"run\.max_steps must be of type int, got None"),
        ({"run": {"windows": [8, "long"]}}, r"run\.windows must be a list of int, got \[8, 'long'\]"),
        ({"run": 3}, r"run must be a mapping, got 3"),
        ({"optimizer": None}, r"the configuration has no key 'optimizer'"),
        ({"run": {"max_steps": 0}}, r"run\.max_steps must be at least 1, got 0"),
        ({"run": {"windows": 512}}, r"run\.windows must be a list of int, got 512"),
        ({"run": {"windows": [300]}}, r"run\.tokens_per_batch must be a multiple of 300, got 4096"),
        ({"run": {"windows": [4096]}}, r"run\.windows must be at most model\.max_position_embeddings = 2048, got 4096"),
        (
            {"exits": {"weights": "steep"}},
            r"exits\.weights must be one of uniform, cumulative, got",
        ),
        ({"exits": {"period": 17}}, r"exits\.period must be at most model\.num_hidden_layers = 16, got 17"),
        ({"exits": {"dropout_max": 1}}, r"exits\.dropout_max must be at least 0 and below 1, got 1\.0"),
        ({"model": {"num_attention_heads": 5}}, r"model\.hidden_size must be a multiple of 10, got 192"),
        ({"exits": {"curriculum": "fast"}}, r"exits\.curriculum must be one of rotational, gradual, all, got 'fast'"),
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
        ({"run": {"max_minutes": "soon"}}, r"run\.max_minutes must be of type float, got 'soon'"),
        ({"run": {"bf16": 1}}, r"run\.bf16 must be of type bool, got 1"),
        ({"eval": {"gsm8k": "nowhere.jsonl"}}, r"eval\.gsm8k must be a \.jsonl file, got 'nowhere\.jsonl'"),
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
    assert out == "" and err == f"train: {path}: run.max_steps must be at least 1, got -1\n"
    assert main([str(tmp_path / "none.yaml")]) == 2
    assert "cannot read the configuration" in capsys.readouterr().err


def test_overrides_of_the_command_line_win_over_the_file(tmp_path, capsys):
    path = tmp_path / "some.yaml"
    path.write_text("run:\n  max_steps: 5\n  windows: [16]\ndata:\nexits:\n")
    config = load_config(
        path, ["run.max_steps=7", "run.windows=[32,64]", "optim.adamw_lr=2e-4", "run.output=a b", "run.notes=5"]
    )
    assert config.run.max_steps == 7 and config.run.windows == (32, 64) and config.run.output == "a b"
    assert config.optim.adamw_lr == 2e-4 and config.run.notes == "5"
    assert main([str(path), "--resume", "run.windows=long"]) == 2
    assert "run.windows must be a list of int, got 'long'" in capsys.readouterr().err
    assert main([str(path), "max_steps=7"]) == 2
    assert "an override must be of the form section.key=value, got 'max_steps=7'" in capsys.readouterr().err
    assert main([str(path), "run.windows=[3"]) == 2
    assert "run.windows=[3" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("path", "option"), [("exit_heads.yaml", ["--notes", "x"]), ("exit_heads.yaml", ["--export-only"])]
)
def test_an_option_of_the_other_kind_of_run_is_refused(path, option, capsys):
    assert main([str(Path("configs/train") / path), *option]) == 2
    assert f"{option[0]} is no option for configurations with a section heads" in capsys.readouterr().err
    assert main(["configs/train/smoke.yaml", "--model", "x"]) == 2
    assert "--model is no option for configurations without a section heads" in capsys.readouterr().err
