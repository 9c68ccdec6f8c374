"""Question files with any column names; errors name the file, line and field."""

from __future__ import annotations

import csv
import gc
import json
import sys
from collections import Counter
from pathlib import Path

import pytest

from eval.config import FOLDER, RunConfig, config_of
from eval.questions import fingerprint, prompt_text
from eval.questions import read_questions as read
from tests.slow import slow


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


ROWS = [
    {"n": 5, "text": "one", "kind": "a", "extra": 0.5},
    {"n": 6, "text": "two, with a comma", "kind": "b", "extra": 1.5},
    {"n": 7, "text": "three", "kind": None, "extra": 2.5},
]
COLUMNS = {"question_id": "n", "turns": "text", "category": "kind"}


def table(path, rows=ROWS):
    """Write the rows to a file; its suffix gives the format."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pytest.importorskip("datasets").Dataset.from_list(rows).to_parquet(path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    return str(path)


@pytest.fixture
def offline(monkeypatch, tmp_path):
    """No access to the hub or the user's cache."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    return datasets


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # a CSV file that is not read to its end
@pytest.mark.parametrize(("suffix", "is_folder"), [(".csv", False), (".json", True), slow(".parquet", True)])
def test_a_data_set_is_read_as_a_file_is(suffix, is_folder, offline, tmp_path):
    path = table(tmp_path / "own" / f"test{suffix}")
    source, stem = (str(tmp_path / "own"), "own") if is_folder else (path, "test")
    expected = [(5, "a", ("one",)), (6, "b", ("two, with a comma",)), (7, stem, ("three",))]
    assert read(source, columns=COLUMNS) == expected
    assert read(source, columns=COLUMNS, limit=2) == expected[:2]
    assert [q.question_id for q in read(source, columns={"turns": "text"})] == [1, 2, 3]
    assert read("gsm8k", path=path, columns=COLUMNS) == read(path, columns=COLUMNS)
    gc.collect()  # what is left open is closed, and warned of, here


def test_turns_may_be_lists_and_lines_of_json_need_no_package(offline, tmp_path, monkeypatch):
    rows = [{"turns": ["a", "b"]}, {"turns": ["c", "d"]}]
    expected = [(1, "own", ("a", "b")), (2, "own", ("c", "d"))]
    assert read(table(tmp_path / "own.parquet", rows)) == expected
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert read(write(tmp_path / "own.json", *rows)) == expected
    with pytest.raises(ValueError, match="pip install datasets"):
        read(str(tmp_path / "own.parquet"))


def test_of_several_splits_test_is_read_and_others_must_be_named(offline, tmp_path):
    for split in ("train", "test"):
        table(tmp_path / "both" / f"{split}.csv", [{"turns": split}])
        table(tmp_path / "other" / f"{split.replace('test', 'validation')}.csv", [{"turns": split}])
    assert read(str(tmp_path / "both"))[0].turns == ("test",)
    with pytest.raises(ValueError, match="it has the splits train, validation; name one of its files"):
        read(str(tmp_path / "other"))


def test_arguments_of_load_dataset(offline, monkeypatch):
    asked = []

    def load(name, config, split, streaming):
        asked.append((name, config, split, streaming))
        return ROWS if split else {"train": [], "test": ROWS}

    monkeypatch.setattr(offline, "load_dataset", load)
    assert read("hf:owner/set", columns=COLUMNS)[:2] == read("hf:owner/set:main:test", columns=COLUMNS)[:2]
    assert read("hf:owner/set", columns=COLUMNS)[2].category == "set"
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", False)
    read("hf:owner/set::train", columns=COLUMNS, limit=2)
    assert asked[:2] == [("owner/set", None, None, False), ("owner/set", "main", "test", False)]
    assert asked[-1] == ("owner/set", None, "train", True)
    for wrong in ("hf:", "hf:owner/set:main", "hf:a:b:c:d"):
        with pytest.raises(ValueError, match="is written hf:OWNER/NAME"):
            read(wrong)


@pytest.mark.parametrize("source", ["hf:owner/set", "none.parquet", "broken.parquet", "empty"])
def test_loading_errors_are_reported(source, offline, tmp_path):
    (tmp_path / "broken.parquet").write_bytes(b"no parquet")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="cannot read the questions"):
        read(source if source.startswith("hf:") else str(tmp_path / source))


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
