"""GSM8K and HumanEval: what counts as right, what a line must hold, and the command that compares policies."""

from __future__ import annotations

import itertools
import json
from decimal import Decimal
from math import comb

import pytest

from eval.quality import decode, gsm8k, humaneval
from eval.quality.__main__ import main
from eval.quality.sandbox import Limits, Verdict
from tests.eval.models import save_model

PROBLEM = {
    "task_id": "own/1",
    "prompt": 'def double(x):\n    """Twice x."""\n',
    "entry_point": "double",
    "test": "def check(candidate):\n    assert candidate(2) == 4\n    assert candidate(-1) == -2\n",
}
QUESTION = {"question": "Two and two?", "answer": "2 + 2 = 4\n#### 4"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(save_model(tmp_path_factory.mktemp("model")))


@pytest.fixture
def write(tmp_path):
    def to_file(*lines):
        path = tmp_path / "questions.jsonl"
        path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
        return str(path)

    return to_file


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("The answer is 42.", "42"),
        ("#### 1,234,567", "1234567"),
        ("$18.50 in all", "18.50"),
        ("it is -3", "-3"),
        ("loss of -$1,000.25!", "-1000.25"),
        ("16-3", "3"),
        ("(7)-3", "3"),
        ("1,2345", "2345"),
        ("first 3, then 4, 5", "5"),
        ("none at all", None),
        ("", None),
    ],
)
def test_the_last_number_of_a_text(text, number):
    assert gsm8k.last_number(text) == (None if number is None else Decimal(number))


def test_exact_match_compares_numbers_not_texts():
    references = ["so\n#### 18", "#### 1,000", "#### 5"]
    assert gsm8k.score(["18.00", "it is 1000", "it is 6"], references) == pytest.approx(2 / 3)
    assert gsm8k.score(["no number"], ["#### 0"]) == 0
    for outputs, given in ((["1"], []), ([], [])):
        with pytest.raises(ValueError, match="one output per reference"):
            gsm8k.score(outputs, given)


@pytest.mark.parametrize(("samples", "correct"), [(1, 0), (1, 1), (5, 0), (5, 2), (7, 6), (7, 7)])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample(samples, correct):
    right = [True] * correct + [False] * (samples - correct)
    for k in range(1, samples + 1):
        counted = sum(any(some) for some in itertools.combinations(right, k)) / comb(samples, k)
        assert humaneval.pass_at_k(samples, correct, k) == pytest.approx(counted)


def test_pass_at_k_of_impossible_counts():
    for counts in ((3, 4, 1), (3, 1, 4), (3, 1, 0), (0, 0, 1)):
        with pytest.raises(ValueError, match="pass@k needs"):
            humaneval.pass_at_k(*counts)
    with pytest.raises(ValueError, match="at least one problem"):
        humaneval.score([])
    assert humaneval.score([[Verdict(True, "")], [Verdict(False, "")]]) == 0.5


@pytest.mark.parametrize(
    ("completion", "passed"),
    [
        ("    return 2 * x\n", True),
        ("    return x * x\n", False),
        ("    pass\n\nimport sys\nsys.exit(0)\n", False),
        ("    return 0\n\ndef check(candidate):\n    pass\n", False),  # the test defines its own after it
        ("    return 2 *\n", False),
    ],
)
def test_a_completion_is_right_when_the_tests_run_to_their_end(completion, passed):
    problem = humaneval.Problem(**PROBLEM)
    assert humaneval.check(problem, completion, Limits(seconds=60)).passed is passed


@pytest.mark.parametrize(
    ("task", "line", "message"),
    [
        ("gsm8k", "{", "line 2: not JSON"),
        ("gsm8k", "[1]", "line 2: must be a JSON object with question, answer"),
        ("gsm8k", {"question": "Why?"}, "line 2: field 'answer' must be a non-empty text, got None"),
        ("gsm8k", {"question": " ", "answer": "#### 1"}, "line 2: field 'question'"),
        ("gsm8k", {"question": "Why?", "answer": "42"}, "line 2: 'answer' must end in '#### ' and a number"),
        ("gsm8k", {"question": "Why?", "answer": "#### so"}, "line 2: 'answer' must end in"),
        ("humaneval", {**PROBLEM, "test": 3}, "line 2: field 'test' must be a non-empty text, got 3"),
        ("humaneval", {**PROBLEM, "entry_point": "a b"}, "line 2: 'entry_point' must be a name"),
    ],
)
def test_a_wrong_line_is_named_in_one_sentence(task, line, message, write, capsys):
    first = QUESTION if task == "gsm8k" else PROBLEM
    assert main([task, "--questions", write(first, line)]) == 2
    told = capsys.readouterr().err
    assert message in told
    assert told.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--questions", "nowhere.jsonl"], "cannot read the questions 'nowhere.jsonl'"),
        (["--questions", "EMPTY"], "is empty"),
        (["--questions", "FILE", "--max-new-tokens", "0"], "--max-new-tokens must be at least 1, got 0"),
        (["--questions", "FILE", "--num-questions", "-1"], "--num-questions must be at least 0, got -1"),
        (["--questions", "FILE", "--policy", "fastest"], "--policy must be one of adaptive, plain, "),
        (["--questions", "FILE", "--policy", "fixed:2"], "needs two whole numbers, got 'fixed:2'"),
        (["--questions", "FILE", "--max-new-tokens", "500"], "no question fits the model's context of 128 tokens"),
    ],
)
def test_other_bad_input_is_one_sentence_too(options, message, folder, write, tmp_path, capsys):
    (tmp_path / "empty.jsonl").write_text("\n")
    names = {"FILE": write(QUESTION), "EMPTY": str(tmp_path / "empty.jsonl")}
    assert main(["gsm8k", "--model", folder, *(names.get(word, word) for word in options)]) == 2
    told = capsys.readouterr().err.splitlines()
    assert message in told[-1]
    assert "Traceback" not in "".join(told)


def test_the_command_scores_every_policy_and_finds_them_equal(folder, write, capsys):
    questions = write(QUESTION, "", {**QUESTION, "question": "x" * 200}, {**QUESTION, "question": "And three?"})
    options = ["--model", folder, "--questions", questions, "--max-new-tokens", "24"]
    assert main(["gsm8k", *options, "--policy", "adaptive", "fixed:2,3"]) == 0
    *table, last = capsys.readouterr().out.splitlines()
    record = json.loads(last)
    assert [row["policy"] for row in record["policies"]] == ["plain", "adaptive", "fixed:2,3"]
    assert [row["differing"] for row in record["policies"]] == [0, 0, 0]
    assert len({row["score"] for row in record["policies"]}) == 1
    assert (record["questions"], record["too_long"]) == (2, 1)
    assert any("1 questions left out" in line for line in table)


def test_outputs_that_differ_are_counted_and_end_with_code_1(folder, write, capsys, monkeypatch):
    honest = decode.decode

    def wrong(target, prompts, chosen, *others):
        outputs = honest(target, prompts, chosen, *others)
        if chosen.name == "fixed:1,2":
            outputs[1].tokens[-1] ^= 1
        return outputs

    monkeypatch.setattr(decode, "decode", wrong)
    options = ["--model", folder, "--questions", write(*[QUESTION] * 3), "--max-new-tokens", "8"]
    assert main(["gsm8k", *options, "--policy", "plain", "fixed:1,2"]) == 1
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["policies"]
    assert [(row["differing"], row["differing_questions"]) for row in rows] == [(0, []), (1, [2])]


def test_code_is_run_only_on_request(folder, write, capsys, monkeypatch):
    ran = []
    monkeypatch.setattr(humaneval.sandbox, "run", lambda text, limits: ran.append(text) or Verdict(True, ""))
    options = ["humaneval", "--model", folder, "--questions", write(PROBLEM), "--max-new-tokens", "8"]
    assert main(options) == 0
    printed = capsys.readouterr().out
    assert not ran
    assert "not run" in printed
    assert json.loads(printed.splitlines()[-1])["policies"][0]["score"] is None
    assert main([*options, "--run-code"]) == 0
    assert len(ran) == 1  # both policies wrote the same
    printed = capsys.readouterr().out
    assert [row["score"] for row in json.loads(printed.splitlines()[-1])["policies"]] == [1, 1]
    assert "no namespaces" in printed
    assert main([*options, "--run-code", "--seconds", "0"]) == 2
