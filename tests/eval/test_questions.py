"""Question files with any column names; errors name the file, line and field."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from eval.config import FOLDER, RunConfig, config_of
from eval.questions import fingerprint, prompt_text
from eval.questions import read_questions as read


def write(path, *rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def test_columns_are_mapped(tmp_path):
    path = write(tmp_path / "own.jsonl", {"text": "one", "kind": "a", "n": 5}, "", {"text": ["two", "more"], "n": "x"})
    found = read(path, columns={"turns": "text", "category": "kind", "question_id": "n"})
    assert found == [(5, "a", ("one",)), ("x", "own", ("two", "more"))]
    assert [q.question_id for q in read(path, columns={"turns": "text"})] == [1, 3]
    assert fingerprint(found) != fingerprint(found[:1])


def test_the_first_questions_of_each_category(tmp_path):
    rows = [{"turns": [str(i)], "category": "aab"[i % 3]} for i in range(9)]
    path = write(tmp_path / "own.jsonl", *rows)
    assert [q.question_id for q in read(path, per_category=2)] == [1, 2, 3, 6]
    assert [q.question_id for q in read(path, 3, per_category=1)] == [1, 3]


def test_byte_order_marks_and_carriage_returns_are_ignored(tmp_path):
    path = tmp_path / "own.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"turns": ["a"]}\r\n{"turns": ["b"]}\r\n')
    assert [q.turns for q in read(str(path))] == [("a",), ("b",)]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("{", "line 2: not JSON"),
        ({"text": "x"}, "line 2: field 'turns' must be"),
        ({"turns": ["x", ""]}, "line 2: field 'turns' must be"),
        ({"turns": "x", "question_id": 1.5}, "line 2: field 'question_id' must be"),
        ({"turns": "x", "category": 3}, "line 2: field 'category' must be"),
        ({"turns": "x", "question_id": 7}, "line 2: id 7 is that of line 1 already"),
    ],
)
def test_a_malformed_line_is_named(row, words, tmp_path):
    path = write(tmp_path / "bad.jsonl", {"turns": ["x"], "question_id": 7}, row)
    with pytest.raises(ValueError, match=r"bad\.jsonl") as caught:
        read(path)
    assert words in str(caught.value)


def test_a_file_without_questions_and_no_file(tmp_path):
    with pytest.raises(ValueError, match="is empty"):
        read(write(tmp_path / "empty.jsonl"))
    with pytest.raises(ValueError, match="cannot read"):
        read(str(tmp_path / "none.jsonl"))
    (tmp_path / "bytes.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="cannot read"):
        read(str(tmp_path / "bytes.jsonl"))
    with pytest.raises(ValueError, match="questions_path"):
        read("gsm8k")


def test_a_chat_template_formats_every_turn():
    class Chat:
        chat_template = "there is one"

        def apply_chat_template(self, messages, **options):
            assert options == {"tokenize": False, "add_generation_prompt": True}
            return "|".join(f"{m['role']}:{m['content']}" for m in messages)

    assert prompt_text(Chat(), ["one", "two"][:1], []) == "user:one"
    assert prompt_text(Chat(), ["one", "two"], ["yes"]) == "user:one|assistant:yes|user:two"
    assert prompt_text(object(), ["one", "two"], ["yes"]) == "oneyes\n\ntwo"


def test_six_categories_of_eight_different_questions():
    questions = read(FOLDER / "questions.jsonl")
    assert [question.question_id for question in questions] == list(range(1, 49))
    assert list(Counter(question.category for question in questions).values()) == [8] * 6
    assert len({question.turns for question in questions}) == 48
    lines = (FOLDER / "questions.jsonl").read_text("utf-8").splitlines()
    assert {tuple(json.loads(line)) for line in lines} == {("question_id", "category", "turns")}


@pytest.mark.parametrize("name", ["run", "quick", "speedup"])
def test_the_questions_of_a_configuration_lie_beside_it(name):
    assert Path(config_of(RunConfig, FOLDER / f"{name}.yaml").questions).is_file()
