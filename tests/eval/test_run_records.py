"""The run folder: after a kill or a full disk no question is lost or duplicated."""

from __future__ import annotations

import json
import resource

import pytest
import yaml

from eval.answers import Failure, Turn
from eval.asking import Shared, ask_all, warm_up
from eval.methods import file_name
from eval.questions import Question
from eval.records import FullError, RunFolder, append_line, read_lines, write_file

METHODS = ("plain", "fixed:2,3")
QUESTIONS = [Question(i, "kind", ("ab",)) for i in range(3)]


class Letters:
    """A tokenizer with a token per letter."""

    def __call__(self, text, **options):
        return {"input_ids": [ord(letter) for letter in text]}

    def decode(self, tokens, **options):
        return "".join(map(chr, tokens))


class Repeats:
    """A method that repeats its prompt, fails at one question, and records its calls."""

    def __init__(self, name, failing=None, order=None):
        self.name, self.failing, self.asked = name, failing, [] if order is None else order

    def __call__(self, prompt):
        self.asked.append((self.name, prompt.question_id))
        if prompt.question_id == self.failing:
            raise Failure("timeout", "too slow", 1.0)
        return Turn(prompt.ids, 0.25, accept_lengths=[2], step_seconds=[0.25])

    def forget(self):
        pass

    def close(self):
        pass


def go(path, failing=1, questions=QUESTIONS, context=16):
    """Run one session; returns its (method, question) pairs in order."""
    folder, asked = RunFolder(path, {"seed": 0}, METHODS), []
    methods = [Repeats("plain", order=asked), Repeats("fixed:2,3", failing, asked)]
    try:
        ask_all(methods, questions, Shared(Letters(), context, 4, 0), folder, lambda name, row: None)
    finally:
        folder.close()
    return asked


def identity(path):
    """A folder's rows without times; of duplicates the last."""
    found = {}
    for file in sorted(path.rglob("*.jsonl")):
        rows = {json.dumps([row.get("method"), row["question_id"]]): row for row in read_lines(file)}
        own = [{k: v for k, v in row.items() if k not in ("tstamp", "harness_seconds")} for row in rows.values()]
        found[file.name] = sorted(own, key=str)
    return found


def test_methods_rotate_and_answered_questions_are_not_asked_again(tmp_path):
    first, second = METHODS
    assert go(tmp_path) == [(first, 0), (second, 0), (second, 1), (first, 1), (first, 2), (second, 2)]
    before = identity(tmp_path)
    assert go(tmp_path) == [] and identity(tmp_path) == before
    assert [row["question_id"] for row in before["fixed-2,3.jsonl"]] == [0, 2]
    assert [(row["kind"], row["question_id"]) for row in before["errors.jsonl"]] == [("timeout", 1)]


@pytest.mark.parametrize("name", ["answers/plain.jsonl", "errors.jsonl"])
def test_a_file_with_an_incomplete_last_line_is_repaired(name, tmp_path):
    go(tmp_path)
    wanted, file = identity(tmp_path), tmp_path / name
    whole = file.read_bytes()
    last = whole.rstrip(b"\n").rfind(b"\n") + 1
    lost = json.loads(whole[last:])
    for cut in (last, (last + len(whole)) // 2):
        file.write_bytes(whole[:cut])
        assert go(tmp_path) == [(lost.get("method", lost.get("model_id")), lost["question_id"])]
        assert identity(tmp_path) == wanted


def test_a_line_that_does_not_fit_on_the_disk_is_removed(tmp_path):
    path, limit = tmp_path / "rows.jsonl", resource.getrlimit(resource.RLIMIT_FSIZE)
    append_line(path, {"a": "x" * 50})
    before = path.read_bytes()
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 30, limit[1]))
    try:
        with pytest.raises(FullError, match="run the same command again to resume"):
            append_line(path, {"a": "y" * 50})
        with pytest.raises(FullError):
            write_file(path, "z" * 500)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]
    append_line(path, {"a": 1})
    assert read_lines(path) == [{"a": "x" * 50}, {"a": 1}]


def test_a_broken_line_in_the_middle_is_refused(tmp_path):
    go(tmp_path)
    file = tmp_path / "answers" / "plain.jsonl"
    for line, words in ((b"{broken\n", "line 1: not JSON"), (b"[3]\n", "line 1: not a JSON object")):
        file.write_bytes(line + file.read_bytes())
        with pytest.raises(ValueError, match=words):
            go(tmp_path)


def test_a_folder_of_an_older_version_can_be_resumed(tmp_path):
    """Missing keys have their defaults; keys that are no longer recorded are ignored."""
    go(tmp_path)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"seed": 0, "studies": ["grid"], "study_tokens": 9}))
    assert go(tmp_path) == []
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"seed": 1}))
    with pytest.raises(ValueError, match="seed 1, now 0"):
        go(tmp_path)


def test_a_folder_without_rows_may_be_used_with_another_configuration(tmp_path):
    RunFolder(tmp_path, {"seed": 9}, METHODS).close()
    (tmp_path / "environment.json").write_text("{}")
    go(tmp_path)
    assert yaml.safe_load((tmp_path / "config.yaml").read_text()) == {"seed": 0}
    assert not (tmp_path / "environment.json").exists()


def test_a_warm_up_that_times_out_is_not_tried_again():
    slow, fine = Repeats("plain", 0), Repeats("fixed:2,3")
    warm_up([slow, fine], QUESTIONS[0], Shared(Letters(), 16, 4, 0), 3)
    assert (len(slow.asked), len(fine.asked)) == (1, 3)


def test_names_become_file_names():
    assert file_name("fixed:4,4") == "fixed-4,4" and file_name("llama.cpp:a/b c") == "llama.cpp-a-b-c"
