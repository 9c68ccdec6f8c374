"""Configurations: keys of a file, then flags; an error is one sentence that names the key."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field

import pytest

from train.configuration import (
    add_flags,
    as_plain,
    build,
    check,
    check_least,
    differences,
    flags_given,
    option,
    read_config,
)


def is_file(text):
    return bool(text) and not text.startswith("hf:")


@dataclass(frozen=True, slots=True)
class Part:
    name: str
    file: str = option("", "A file.", is_file)


@dataclass(frozen=True, slots=True)
class Section:
    steps: int = option(2, "Steps.")
    rate: float = option(0.5, "Rate.")

    def __post_init__(self):
        check_least(self, 1, "steps")


@dataclass(frozen=True, slots=True)
class Whole:
    count: int = option(1, "A count.")
    lengths: tuple[int, ...] = option((128, 512), "Tokens, 5 % of them.")
    commands: dict[str, str] = option({}, "Commands.")
    check: bool = option(True, "Whether to check.")
    file: str = option("own.jsonl", "A file.", is_file)
    parts: list[Part] = option([], "Parts.")
    section: Section = field(default_factory=lambda: Section(steps=7))

    def __post_init__(self):
        check(self.count > 0, "count", "above 0", self.count)


@pytest.fixture
def write(tmp_path):
    def written(text):
        (tmp_path / "own.yaml").write_text(text)
        return tmp_path / "own.yaml"

    return written


def parser():
    made = argparse.ArgumentParser()
    add_flags(made, Whole, short=["section.steps"])
    return made


def given(*arguments):
    return flags_given(parser().parse_args(arguments))


def test_flags_win_over_keys_and_keys_over_defaults(write, tmp_path):
    path = write("count: 3\nlengths: [1]\nsection: {rate: 2e-4}\nparts: [{name: a, file: b}, {name: c, file: 'hf:d'}]")
    flags = ["--lengths", "7", "8", "--no-check", "--commands", "x=y=z", "--section.steps", "5"]
    made = read_config(Whole, path, given(*flags))
    assert (made.count, made.lengths, made.check) == (3, (7, 8), False)
    assert made.commands == {"x": "y=z"} and given() == {}
    assert made.section == Section(5, 2e-4) == read_config(Whole, path, given("--steps", "5")).section
    assert made.file == str(tmp_path / "own.jsonl")  # beside the file that could have named it
    assert [(part.name, part.file) for part in made.parts] == [("a", str(tmp_path / "b")), ("c", "hf:d")]
    assert read_config(Whole, path, given("--file", "here.jsonl")).file == "here.jsonl"


def test_the_help_has_the_texts_and_defaults_of_the_fields():
    text = " ".join(parser().format_help().split())
    assert "Tokens, 5 % of them. Default: 128 512." in text and "--check, --no-check" in text
    assert "--section.steps STEPS, --steps STEPS Steps. Default: 7." in text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("coun: 3", "configuration key 'coun' is unknown; did you mean 'count'?"),
        ("section: {step: 3}", "section: key 'step' is unknown; did you mean 'steps'?"),
        ("count: [1]", "count must be a whole number, got [1]"),
        ("count: true", "count must be a whole number, got True"),
        ("count: 0", "count must be above 0, got 0"),
        ("section: {steps: 0}", "section.steps must be at least 1, got 0"),
        ("section: {steps: many}", "section.steps must be a whole number, got 'many'"),
        ("section: {rate: soon}", "section.rate must be a number, got 'soon'"),
        ("section: 3", "section must be a mapping, got 3"),
        ("lengths: a", "lengths must be a list, got 'a'"),
        ("lengths: [1, a]", "lengths must be a whole number, got 'a'"),
        ("commands: 3", "commands must be a mapping of names to texts, got 3"),
        ("commands: [a]", "commands must be NAME=TEXT, got 'a'"),
        ("check: perhaps", "check must be true or false, got 'perhaps'"),
        ("parts: [{file: a}]", "parts[0].name is missing; give it a value"),
        ("parts: [{name: a, of: b}]", "parts[0]: key 'of' is unknown; known: name, file"),
        ("file: null", "file must be a text, got None"),
        ("- a", "must be a mapping of keys to values"),
        ("a: [", "cannot read the configuration"),
    ],
)
def test_an_invalid_file_is_refused_with_the_key(text, words, write):
    with pytest.raises(ValueError) as caught:
        read_config(Whole, write(text))
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ValueError, match="cannot read the configuration"):
        read_config(Whole, tmp_path / "none.yaml")


def test_differences_are_named_by_key_and_missing_keys_have_their_defaults():
    now = build(Whole, {"count": 2, "lengths": [3], "section": {"steps": 4}})
    assert build(Whole, as_plain(now)) == now and differences(as_plain(now), now) == {}
    changed = {"lengths": [3], "section": {"steps": 5, "rate": 0.5}}
    assert differences(changed, now) == {"count": (1, 2), "section.steps": (5, 4)}
    assert differences(changed, now, ignored=["count", "section"]) == {}
