"""The embedded model: small enough to ship, loadable by anyone, and made by the configuration beside it."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from train.config import load_config

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "selfspec" / "demo" / "model"


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(FOLDER)


def test_the_folder_is_small_and_has_a_card():
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) <= 17_000_000
    card = (FOLDER / "README.md").read_text("utf-8")
    assert "license: apache-2.0" in card and "python -m train configs/train/demo_continued.yaml" in card


def test_the_shape_and_the_steps_are_the_configuration_s():
    asked, shape = load_config(ROOT / "configs" / "train" / "demo.yaml"), AutoConfig.from_pretrained(FOLDER)
    last = load_config(ROOT / "configs" / "train" / "demo_continued.yaml")
    assert last.model.base == asked.run.export
    for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_key_value_heads"):
        assert getattr(shape, name) == getattr(asked.model, name)
    with (FOLDER / "training.csv").open() as file:
        assert int(list(csv.DictReader(file))[-1]["step"]) == last.run.max_steps


@given(text=st.text())
def test_the_tokenizer_gives_any_text_back(tokenizer, text):
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_the_model_continues_code_without_any_extra_setting(tokenizer):
    model = AutoModelForCausalLM.from_pretrained(FOLDER)
    tokens = tokenizer("class SplitModel:\n    def __init__(self):\n", return_tensors="pt")
    text = model.generate(**tokens, max_new_tokens=8, do_sample=False)
    assert tokenizer.decode(text[0]).startswith("class SplitModel:\n    def __init__(self):\n        self.")
