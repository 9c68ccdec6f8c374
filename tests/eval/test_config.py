"""Configurations: keys of a file, then flags; an error is one sentence that names the key."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import pytest

from eval.config import Common, add_flags, check_common, check_least, flags_given, option, read_config


@dataclass(frozen=True, slots=True)
class Part:
    name: str
    file: str = option("", "A file.", is_file=True)


@dataclass(frozen=True, slots=True)
class Whole(Common):
    lengths: tuple[int, ...] = option((128, 512), "Tokens, 5 % of them.")
    commands: dict[str, str] = option({}, "Commands.")
    check: bool = option(True, "Whether to check.")
    file: str = option("own.jsonl", "A file.", is_file=True)
    parts: list[Part] = option([], "Parts.")

    def __post_init__(self):
        check_common(self)
        check_least(self, 1, "num_questions")


@pytest.fixture
def write(tmp_path):
    def written(text):
        (tmp_path / "own.yaml").write_text(text)
        return tmp_path / "own.yaml"

    return written


def given(*arguments):
    parser = argparse.ArgumentParser()
    add_flags(parser, Whole)
    return flags_given(parser.parse_args(arguments), Whole)


def test_flags_win_over_keys_and_keys_over_defaults(write, tmp_path):
    path = write("num_questions: 3\nlengths: [1]\ncheck: true\nparts: [{name: a, file: b}, {name: c, file: 'hf:d/e'}]")
    made = read_config(Whole, path, given("--lengths", "7", "8", "--no-check", "--commands", "x=y=z", "--threads", "2"))
    assert (made.num_questions, made.lengths, made.check, made.threads) == (3, (7, 8), False, 2)
    assert made.commands == {"x": "y=z"} and made.dtype == "float32" and given() == {}
    assert made.file == str(tmp_path / "own.jsonl")  # beside the file that could have named it
    assert [(part.name, part.file) for part in made.parts] == [("a", str(tmp_path / "b")), ("c", "hf:d/e")]
    assert read_config(Whole, path, given("--file", "here.jsonl")).file == "here.jsonl"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("num_question: 3", "configuration key 'num_question' is unknown; did you mean 'num_questions'?"),
        ("num_questions: [1]", "num_questions must be int, got [1]"),
        ("num_questions: 0", "num_questions must be at least 1, got 0"),
        ("threads: -1", "threads must be at least 0, got -1"),
        ("lengths: a", "lengths must be a list of int, got 'a'"),
        ("lengths: [a]", "lengths must be a list of int, got ['a']"),
        ("commands: [a]", "commands must be a mapping of names to texts"),
        ("check: perhaps", "check must be bool, got 'perhaps'"),
        ("parts: [{file: a}]", "parts[0].name is missing; give it a value"),
        ("parts: [{name: a, of: b}]", "parts must be a list of mappings of name, file"),
        ("device: null", "device must be str, got None"),
        ("- a", "must be a mapping of keys to values"),
        ("a: [", "cannot read the configuration"),
    ],
)
def test_an_invalid_file_is_refused_with_the_key(text, words, write):
    with pytest.raises(ValueError) as caught:
        read_config(Whole, write(text))
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_a_missing_file_and_a_wrong_pair_are_refused(tmp_path):
    with pytest.raises(ValueError, match="cannot read the configuration"):
        read_config(Whole, tmp_path / "none.yaml")
    with pytest.raises(ValueError, match=r"--commands takes NAME=TEXT, got 'x'"):
        given("--commands", "x")
