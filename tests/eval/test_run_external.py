"""External commands: valid and invalid answers."""

from __future__ import annotations

import json
import shlex
import sys

import pytest

from eval.answers import Failure, Prompt
from eval.external import SPARE, External

# Answers every question with the next of its arguments, a text of one line or more.
ENGINE = """
import sys
for answer in sys.argv[1:]:
    sys.stdin.readline()
    sys.stdout.write(answer + chr(10))
    sys.stdout.flush()
sys.stdin.readline()
"""
# Says hello first, and then answers every question with its number, after a moment.
SLOW = """
import json, sys, time
print(sys.argv[1], flush=True)
for line in sys.stdin:
    time.sleep(0.2)
    print(json.dumps({"tokens": [json.loads(line)["question_id"]]}), flush=True)
"""
MOST = 4


def letters(text, **options):
    return {"input_ids": [ord(letter) for letter in text]}


def prompt(number):
    return Prompt(number, 0, "ab", [1, 2], MOST, 0)


@pytest.fixture
def ask(tmp_path):
    """Ask an engine that writes these lines; returns the tokens or the error's sentence per question."""
    opened = []

    def asked(*answers, questions=None, script=ENGINE):
        (tmp_path / "engine.py").write_text(script)
        told = [each if isinstance(each, str) else json.dumps(each) for each in answers]
        engine = External(
            "external:e",
            shlex.join([sys.executable, str(tmp_path / "engine.py"), *told]),
            letters,
            tmp_path / "log",
            limit=60.0,
        )
        opened.append(engine)
        found = []
        for number in range(questions or len(answers)):
            try:
                found.append(engine(prompt(number)).tokens)
            except Failure as failure:
                found.append(failure.sentence)
        return found

    yield asked
    for engine in opened:
        engine.close()


@pytest.mark.parametrize("lengths", [[4], [1, 3], [1, 6], [4, 1], [1, 1, 1, 1]])
def test_the_last_step_may_have_made_more_tokens_than_are_kept(lengths, ask):
    assert ask({"tokens": [1, 2, 3, 4], "accept_lengths": lengths}) == [[1, 2, 3, 4]]


@pytest.mark.parametrize("lengths", [[], [3], [1, 2], [5, 1], [4, 1, 1]])
def test_steps_that_do_not_add_up_to_the_tokens_are_refused(lengths, ask):
    (sentence,) = ask({"tokens": [1, 2, 3, 4], "accept_lengths": lengths})
    assert f"accept_lengths add up to {sum(lengths)}, but it has 4 tokens" in sentence


def test_an_empty_answer_has_no_step_or_one(ask):
    assert ask(*({"tokens": [], "accept_lengths": lengths} for lengths in ([], [1]))) == [[], []]


def test_more_than_max_new_tokens_are_refused(ask):
    assert "5 tokens, but max_new_tokens is 4" in ask({"tokens": [1] * (MOST + 1)})[0]
    found = ask({"text": "x" * (MOST + SPARE)}, {"text": "x" * (MOST + SPARE + 1)})
    assert len(found[0]) == MOST + SPARE and "13 tokens, but max_new_tokens is 4" in found[1]


def test_steps_of_a_text_are_not_compared_with_its_tokens(ask):
    assert ask({"text": "abc", "accept_lengths": [2]}) == [[97, 98, 99]]


def test_a_second_line_is_not_read_as_the_next_answer(ask):
    double = json.dumps({"tokens": [1]}) + "\n" + json.dumps({"tokens": [2]})
    found = ask(double, questions=4)  # with a new start after every refusal
    assert [2] not in found
    assert sum("that no question asked for" in each for each in found if isinstance(each, str)) >= 2


@pytest.mark.parametrize(
    ("about", "words"),
    [
        ({"question_id": 9}, "its question_id is 9, that of the question 0"),
        ({"turn": 1}, "its turn is 1, that of the question 0"),
    ],
)
def test_an_answer_to_another_question_is_refused(about, words, ask):
    own = {"tokens": [1], "question_id": 0, "turn": 0}
    (found,) = ask({**own, **about})
    assert words in found and ask(own) == [[1]]


@pytest.mark.parametrize("banner", ["loading the model", "[1]", "[" * 10**5, '{"tokens": [9], "seconds": 1e9}'])
def test_an_answer_after_a_banner_is_not_read_as_the_next_answer(banner, ask):
    for found in ask(banner, questions=3, script=SLOW):
        assert isinstance(found, str) and ("no valid answer" in found or "it reports" in found)


def test_only_an_invalid_answer_ends_the_command(ask):
    assert ask({"error": "no\nluck"}, {"tokens": [2]}) == ["no luck", [2]]
    assert "that of the question 1" in ask({"tokens": [1]}, {"error": "late", "question_id": 0})[1]
    again = ask({"tokens": [1, 1, 1, 1, 1]}, {"tokens": [2]})
    assert "5 tokens" in again[0] and "5 tokens" in again[1]


def test_an_impossible_time_is_refused(ask):
    assert "no valid answer" in ask('{"tokens": [1], "seconds": 1' + "0" * 400 + "}")[0]
