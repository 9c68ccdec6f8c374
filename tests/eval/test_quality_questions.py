"""The question file of our own: code that the embedded model can go on with, in six categories."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from eval.config import FOLDER
from eval.questions import encode, read_questions
from selfspec import load


@pytest.fixture(scope="module")
def demo():
    return load("demo")


def test_six_categories_of_eight_different_questions():
    questions = read_questions(FOLDER / "questions.jsonl")
    assert [question.question_id for question in questions] == list(range(1, 49))
    assert list(Counter(question.category for question in questions).values()) == [8] * 6
    assert len({question.turns for question in questions}) == 48
    lines = (FOLDER / "questions.jsonl").read_text("utf-8").splitlines()
    assert {tuple(json.loads(line)) for line in lines} == {("question_id", "category", "turns")}


def test_every_question_has_a_usual_length_and_is_gone_on_with(demo):
    prompts = encode(read_questions(FOLDER / "questions.jsonl"), demo.tokenizer)
    assert all(20 <= len(prompt) <= 200 for prompt in prompts)
    outputs = demo.generate(prompts, policy="plain", max_new_tokens=8)
    assert [output.request_id for output in outputs if len(output.tokens) < 8] == []
