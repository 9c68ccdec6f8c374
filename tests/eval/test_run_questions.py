"""Question files under any column names; what is wrong with one is told by file, line and field."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from eval.run.questions import fingerprint, read

DATA = Path(__file__).parents[3] / "shared" / "data"


def write(path, *rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize(
    ("name", "file", "number", "first"),
    [
        ("spec_bench", "spec_bench/question.jsonl", 480, (81, "writing", 2)),
        ("humaneval", "humaneval/HumanEval.jsonl", 164, ("HumanEval/0", "HumanEval", 1)),
        ("gsm8k", "gsm8k/test.jsonl", 1319, (1, "test", 1)),
    ],
)
def test_the_named_sets_are_read_whole(name, file, number, first):
    if not DATA.is_dir():
        (pytest.fail if os.environ.get("CI") else pytest.skip)(f"no question sets at {DATA}")
    found = read(name, str(DATA / file))
    assert len(found) == number
    assert (found[0].question_id, found[0].category, len(found[0].turns)) == first
    assert read(name, str(DATA / file), limit=3) == found[:3]


def test_columns_are_mapped(tmp_path):
    path = write(tmp_path / "own.jsonl", {"text": "one", "kind": "a", "n": 5}, "", {"text": ["two", "more"], "n": "x"})
    found = read(path, columns={"turns": "text", "category": "kind", "question_id": "n"})
    assert found == [(5, "a", ("one",)), ("x", "own", ("two", "more"))]
    assert [q.question_id for q in read(path, columns={"turns": "text"})] == [1, 3]
    assert fingerprint(found) != fingerprint(found[:1])


def test_a_line_separator_inside_a_text_is_no_end_of_line(tmp_path):
    path = tmp_path / "own.jsonl"
    path.write_text('{"turns": ["a\u2028b"]}\n', "utf-8")
    assert read(str(path))[0].turns == ("a\u2028b",)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("{", "line 2: not JSON"),
        ([1], "line 2: a question must be a JSON object"),
        ({"text": "x"}, "line 2: field 'turns' must be"),
        ({"turns": []}, "line 2: field 'turns' must be"),
        ({"turns": ["x", ""]}, "line 2: field 'turns' must be"),
        ({"turns": "x", "question_id": 1.5}, "line 2: field 'question_id' must be"),
        ({"turns": "x", "question_id": True}, "line 2: field 'question_id' must be"),
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
