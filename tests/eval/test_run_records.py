"""The run folder: a kill at any moment neither loses nor doubles a question."""

from __future__ import annotations

import json

import pytest

from eval.questions import Question
from eval.run import lines, loop
from eval.run.lines import FullError, Lines, read_lines, replace_bytes, replace_text
from eval.run.loop import Scene, warm_up
from eval.run.names import file_name
from eval.run.records import SETTLE_SECONDS, FolderError, RunFolder, unique
from eval.run.turns import Failure, Turn

METHODS = ("plain", "fixed:2,3")
QUESTIONS = [Question(i, "kind", ("ab",)) for i in range(3)]


class Letters:
    """A tokenizer of letters."""

    def __call__(self, text, **options):
        return {"input_ids": [ord(letter) for letter in text]}

    def decode(self, tokens, **options):
        return "".join(map(chr, tokens))


class Repeats:
    """A method that repeats its prompt; it fails at one question, and remembers what it was asked."""

    def __init__(self, name, failing=None):
        self.name, self.failing, self.asked = name, failing, []

    def __call__(self, prompt):
        self.asked.append(prompt.question_id)
        if prompt.question_id == self.failing:
            raise Failure("timeout", "too slow", 1.0)
        return Turn(prompt.ids, 0.25, accept_lengths=[2], step_seconds=[0.25], rounds=[{"num_drafted": 1}])

    def close(self):
        pass


def go(path, failing=1):
    """One session; what it asked: (method, question) pairs."""
    folder = RunFolder(path, {"seed": 0}, METHODS, keep_rounds=True)
    methods = [Repeats("plain"), Repeats("fixed:2,3", failing)]
    try:
        loop.run(methods, QUESTIONS, Scene(Letters(), 16, 4, 0), folder, lambda name, outcome: None)
    finally:
        folder.close()
    return [(method.name, question) for method in methods for question in method.asked]


def rows(path):
    return {file.name: read_lines(file) for file in sorted(path.rglob("*.jsonl"))}


def identity(path):
    """Everything of a folder's rows that does not depend on the clock."""
    return {
        name: [{key: v for key, v in row.items() if key not in ("tstamp", "harness_seconds")} for row in of_file]
        for name, of_file in rows(path).items()
    }


@pytest.fixture
def quickly(monkeypatch):
    """Without the two calls that hundreds of sessions would wait for: neither decides what is in a file."""
    monkeypatch.setattr("eval.run.lines.os.fsync", lambda file: None)
    monkeypatch.setattr("eval.run.loop.gc.collect", lambda: None)


def test_what_is_answered_is_not_asked_again(tmp_path):
    assert go(tmp_path) == [(name, i) for name in METHODS for i in range(3)]
    before = identity(tmp_path)
    assert go(tmp_path) == [] and identity(tmp_path) == before
    assert [row["question_id"] for row in before["fixed-2,3.jsonl"]] == [0, 2]
    assert [(row["kind"], row["question_id"]) for row in before["errors.jsonl"]] == [("timeout", 1)]


@pytest.mark.parametrize("name", ["answers/plain.jsonl", "answers/fixed-2,3.jsonl", "errors.jsonl"])
def test_a_file_cut_anywhere_in_its_last_line_is_made_whole_again(name, tmp_path, quickly):
    go(tmp_path)
    wanted, file = identity(tmp_path), tmp_path / name
    whole = file.read_bytes()
    last = whole.rstrip(b"\n").rfind(b"\n") + 1
    lost = json.loads(whole[last:])
    lost = lost.get("method", lost.get("model_id")), lost["question_id"]
    for cut in (*range(last, len(whole), 11), len(whole) - 2, len(whole) - 1):
        file.write_bytes(whole[:cut])
        assert go(tmp_path) == [lost]
        assert {name: sorted(map(str, r)) for name, r in identity(tmp_path).items()} == {
            name: sorted(map(str, r)) for name, r in wanted.items()
        }
    file.write_bytes(whole)
    assert go(tmp_path) == []


def test_rounds_cut_anywhere_are_dropped_or_asked_again_with_their_answer(tmp_path, quickly):
    go(tmp_path)
    wanted = identity(tmp_path)
    rounds, answers = tmp_path / "rounds.jsonl", tmp_path / "answers" / "plain.jsonl"
    whole = rounds.read_bytes().splitlines(keepends=True)
    assert json.loads(whole[-2])["method"] == "plain" or json.loads(whole[-1])["method"] == "plain"
    kept = answers.read_bytes().splitlines(keepends=True)
    answers.write_bytes(b"".join(kept[:-1]))  # killed after the rounds were written, before the answer was
    assert go(tmp_path) == [("plain", 2)]
    found = identity(tmp_path)
    assert len(found["rounds.jsonl"]) == len(wanted["rounds.jsonl"]) == 5
    assert len({(row["method"], row["question_id"]) for row in found["rounds.jsonl"]}) == 5


def test_a_broken_line_in_the_middle_is_refused(tmp_path):
    go(tmp_path)
    file = tmp_path / "answers" / "plain.jsonl"
    file.write_bytes(b"{\n" + file.read_bytes())
    with pytest.raises(ValueError, match=r"plain.jsonl, line 1: not JSON"):
        go(tmp_path)
    file.write_bytes(b"[]\n")
    with pytest.raises(ValueError, match="not a JSON object"):
        go(tmp_path)


def test_answers_without_a_configuration_are_not_built_on(tmp_path):
    go(tmp_path)
    (tmp_path / "config.yaml").unlink()
    with pytest.raises(FolderError, match=r"no config.yaml"):
        go(tmp_path)


def test_a_folder_of_an_older_version_goes_on(tmp_path):
    go(tmp_path)
    file = tmp_path / "config.yaml"
    file.write_text("study_tokens: 5\nstudies: [grid]\n")  # it knows no seed, whose default is 0
    assert go(tmp_path) == []
    file.write_text("seed: 0\nwarmups: 2\nbeyond: 1\n")
    with pytest.raises(FolderError, match=r"\(warmups 2, now 1; beyond 1, now None\)"):
        go(tmp_path)


def test_a_start_that_came_to_nothing_may_be_followed_by_another(tmp_path):
    RunFolder(tmp_path, {"seed": 1}, METHODS).close()
    (tmp_path / "environment.json").write_text("{}")
    RunFolder(tmp_path, {"seed": 2}, METHODS).close()
    assert (tmp_path / "config.yaml").read_text() == "seed: 2\n" and not (tmp_path / "environment.json").exists()


def test_a_line_that_cannot_be_written_whole_is_taken_back(tmp_path, monkeypatch):
    lines = Lines(tmp_path / "rows.jsonl")
    lines.append({"text": "ü"})

    def full(file):
        raise OSError(28, "No space left on device")

    lines.settle()
    lines.append({"text": "lost"})
    monkeypatch.setattr("eval.run.lines.os.fsync", full)
    with pytest.raises(FullError, match="No space left on device"):
        lines.settle()
    lines.close()
    assert read_lines(tmp_path / "rows.jsonl") == [{"text": "ü"}]
    with pytest.raises(FullError, match=r"report.md"):
        replace_text(tmp_path / "report.md", "text")
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]


def test_the_disk_is_waited_for_at_times_and_at_the_end(tmp_path, monkeypatch):
    waits, now = [], [0.0]
    monkeypatch.setattr("eval.run.lines.os.fsync", waits.append)
    monkeypatch.setattr("eval.run.records.perf_counter", lambda: now[0])
    folder = RunFolder(tmp_path, {}, METHODS)
    waits.clear()  # the configuration's
    for question, (at, num_waits) in enumerate([(1.0, 0), (SETTLE_SECONDS, 0), (SETTLE_SECONDS + 1, 2), (4.0, 2)]):
        now[0] = at
        folder.add_answer("plain", {"question_id": question}, [[{"num_drafted": 1}]])
        assert len(waits) == num_waits  # of answers and rounds
        assert len(read_lines(tmp_path / "answers" / "plain.jsonl")) == question + 1
    folder.close()
    assert len(waits) == 4


def test_rounds_that_the_disk_does_not_take_take_their_answers_back_and_free_the_folder(tmp_path, monkeypatch):
    folder = RunFolder(tmp_path, {}, METHODS, keep_rounds=True)
    folder.add_answer("plain", {"question_id": 0})
    folder.settle()
    folder.add_answer("plain", {"question_id": 1}, [[{"num_drafted": 1}]])
    calls = []

    def once(file):
        calls.append(file)
        if len(calls) == 1:
            raise OSError(5, "Input/output error")

    monkeypatch.setattr("eval.run.lines.os.fsync", once)
    with pytest.raises(FullError, match=r"rounds.jsonl"):
        folder.close()
    assert rows(tmp_path) == {"plain.jsonl": [{"question_id": 0}], "rounds.jsonl": []}
    RunFolder(tmp_path, {}, METHODS).close()  # nobody else holds it


def test_a_folder_is_free_whatever_becomes_of_its_files(tmp_path, monkeypatch):
    folder = RunFolder(tmp_path, {}, METHODS)
    for name in METHODS:
        folder.add_answer(name, {"question_id": 0})
    closed = []

    def failing(lines):
        closed.append(lines.path.name)
        lines.file.close()
        raise FullError("cannot write")

    monkeypatch.setattr(Lines, "close", failing)
    with pytest.raises(FullError):
        folder.close()
    assert sorted(closed) == ["fixed-2,3.jsonl", "plain.jsonl"]
    RunFolder(tmp_path, {}, METHODS).close()


def test_of_two_answers_to_a_question_the_later_counts():
    assert unique([{"question_id": 1, "a": 1}, {"question_id": "1"}, {"question_id": 1, "a": 2}]) == {
        1: {"question_id": 1, "a": 2},
        "1": {"question_id": "1"},
    }


def test_the_order_of_methods_rotates_from_question_to_question(tmp_path):
    order = []
    folder = RunFolder(tmp_path, {}, METHODS)
    methods = [Repeats(name) for name in METHODS]
    loop.run(methods, QUESTIONS, Scene(Letters(), 16, 4, 0), folder, lambda name, outcome: order.append(name))
    folder.close()
    assert order == ["plain", "fixed:2,3", "fixed:2,3", "plain", "plain", "fixed:2,3"]


def test_a_warm_up_that_times_out_is_not_tried_again():
    class Odd(Repeats):
        def __call__(self, prompt):
            self.asked.append(prompt.question_id)
            raise RuntimeError("odd")

    slow, odd = Repeats("slow", failing=0), Odd("odd")
    warm_up([slow, odd], QUESTIONS[0], Scene(Letters(), 16, 4, 0), 3)
    assert len(slow.asked) == 1 and len(odd.asked) == 1


def test_a_second_turn_that_has_no_room_left_is_a_row(tmp_path):
    folder = RunFolder(tmp_path, {}, ["plain"])
    question = Question("q", "kind", ("abcdefgh", "ijklmno"))
    loop.run([Repeats("plain")], [question], Scene(Letters(), 16, 4, 0), folder, lambda name, outcome: None)
    folder.close()
    (row,) = read_lines(tmp_path / "errors.jsonl")
    assert (row["kind"], row["turn"], row["seconds"]) == ("too_long", 1, 0.25) and "turn 2" in row["sentence"]


def test_names_become_file_names():
    assert file_name("transformers:assistant:a/b c") == "transformers-assistant-a-b-c"
    assert file_name("gammatune+") != file_name("gammatune")


@pytest.mark.parametrize("name", ["fsync", "replace"])
def test_a_file_that_cannot_be_replaced_leaves_nothing_beside_it(name, tmp_path, monkeypatch):
    def failing(*paths):
        raise OSError("full")

    path = tmp_path / "new" / "picture.png"
    replace_bytes(path, b"\x89")
    with monkeypatch.context() as patch:
        patch.setattr(lines.os if name == "fsync" else lines.Path, name, failing)
        with pytest.raises(FullError, match="full"):
            replace_bytes(path, b"other")
        with pytest.raises(FullError, match="full"):
            replace_text(path, "other")
    assert path.read_bytes() == b"\x89" and list(path.parent.iterdir()) == [path]
