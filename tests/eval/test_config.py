"""Configurations and question files: what is shipped is read, what is wrong is named."""

from __future__ import annotations

import dataclasses

import pytest
import yaml

from eval.config import DEFAULT, QUICK, BenchConfig, load_config
from eval.questions import read_questions


def test_the_default_file_holds_every_key_with_a_sentence_and_the_dataclass_defaults():
    text = DEFAULT.read_text()
    keys = [key.name for key in dataclasses.fields(BenchConfig)]
    assert list(yaml.safe_load(text)) == keys
    lines = text.splitlines()
    assert all(lines[i - 1].startswith("# ") for i, line in enumerate(lines) if line and not line.startswith("#"))
    shipped = load_config(DEFAULT)
    assert dataclasses.replace(shipped, questions=BenchConfig().questions) == BenchConfig()


@pytest.mark.parametrize("path", [DEFAULT, QUICK])
def test_the_shipped_questions_are_twelve_different_ones_of_many_lengths(path):
    questions = read_questions(load_config(path).questions)
    assert len(questions) == 12
    assert len({question.turns for question in questions}) == 12
    assert len({len(question.turns[0]) for question in questions}) > 8


def test_values_that_are_given_replace_the_files():
    assert load_config(QUICK, repeats=9, device=None).repeats == 9


def test_exit_layers_default_to_eighths_and_must_lie_inside_the_model():
    assert BenchConfig().exits_of(16) == (2, 4, 6, 8)
    assert BenchConfig().exits_of(4) == (1, 2)
    with pytest.raises(ValueError, match=r"exit_layers must be in 1\.\.3 for this model, got \[1, 4\]"):
        BenchConfig(exit_layers=(1, 4)).exits_of(4)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("repeats: 0", "repeats must be at least 1, got 0"),
        ("repeats: many", "repeats must be of type int, got 'many'"),
        ("repeat: 3", "no key 'repeat'; known keys: model"),
        ("draft_lengths: 4", "draft_lengths must be a list, got 4"),
        ("draft_lengths: []", "draft_lengths must be at least one number"),
        ("exit_layers: [0]", "exit_layers must be numbers of at least 1"),
        ("batch_size: 1", "batch_size must be at least 2"),
        ("- 1", "must be a mapping"),
        ("a: [", "cannot read the configuration"),
    ],
)
def test_a_wrong_configuration_is_refused_by_name(tmp_path, text, message):
    path = tmp_path / "bench.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message.replace("[", r"\[")) as caught:
        load_config(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("{}", "line 1: a question needs a list 'turns'"),
        ('{"turns": ["a"]}\nno', "line 2: a question needs"),
        ('{"turns": [""]}', "must be non-empty texts"),
    ],
)
def test_a_wrong_question_file_is_refused_with_its_line(tmp_path, text, message):
    path = tmp_path / "questions.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_questions(path)
