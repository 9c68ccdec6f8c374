"""python -m train.prior: statistics beside a model's weights, and one sentence where there can be none."""

from __future__ import annotations

import json

import pytest
import yaml

from selfspec.calibrate.profile import STORED
from tests.models import build
from tests.target import load
from tests.tokenizers import byte_tokenizer
from train.prior import main


@pytest.fixture
def model(tmp_path, monkeypatch):
    monkeypatch.setenv("SELFSPEC_CACHE", str(tmp_path / "cache"))
    sizes = {"vocab_size": 257, "eos_token_id": 256, "pad_token_id": 256, "max_position_embeddings": 1024}
    build("llama", **sizes).save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def config(small_settings, tmp_path):
    texts, path = tmp_path / "texts", tmp_path / "train.yaml"
    texts.mkdir()
    for i in range(20):
        (texts / f"file_{i}.py").write_text("".join(f"def f{i}_{line}(x):\n    return x\n\n" for line in range(60)))
    small_settings["corpus"]["root"] = str(texts)
    path.write_text(yaml.safe_dump(small_settings))
    return path


def test_the_file_is_where_the_next_one_to_load_the_model_starts(model, config, capsys):
    given = [str(model), "--config", str(config), "--num-texts", "3", "--max-new-tokens", "8"]
    assert main(given) == 0
    assert capsys.readouterr().out.strip() == str(model / STORED)
    first = (model / STORED).read_text()
    assert load(model).prior == json.loads(first)["prior"]
    assert main(given) == 0 and (model / STORED).read_text() == first
    assert not list(model.glob("*.tmp"))


@pytest.mark.parametrize(
    "change, code, says",
    [
        ({"model": "no/such/folder"}, 2, "must be a folder"),
        ({"--num-texts": "0"}, 2, "--num-texts must be a whole number of at least 1, got 0"),
        ({"--max-new-tokens": "-1"}, 2, "--max-new-tokens must be a whole number of at least 1, got -1"),
        ({"--config": "no/such/file.yaml"}, None, "no/such/file.yaml"),
    ],
)
def test_what_is_of_no_use_is_told_in_one_line_and_nothing_is_written(model, config, capsys, change, code, says):
    options = {"--config": str(config), "--num-texts": "2", "--max-new-tokens": "4", **change}
    name = options.pop("model", str(model))
    found = main([name, *(part for pair in options.items() for part in pair)])
    assert found == code if code else found in (1, 2)
    told = capsys.readouterr().err.strip().splitlines()
    assert says in told[-1] and "Traceback" not in "".join(told)
    assert not (model / STORED).exists()
