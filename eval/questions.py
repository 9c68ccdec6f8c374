"""Question files: one JSON object per line, in the shape that Spec-Bench and MT-Bench share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple


class Question(NamedTuple):
    """One question; what follows the first turn needs a conversation, which a benchmark may leave out."""

    question_id: int | str
    category: str
    turns: tuple[str, ...]


def read_questions(path: str | Path, limit: int = 0) -> list[Question]:
    """The questions of a file, the first `limit` of them unless that is 0.

    Raises:
        ValueError: the file cannot be read, holds no question, or a line is not one.
    """
    try:
        lines = Path(path).read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as problem:
        raise ValueError(f"cannot read the questions {str(path)!r}: {problem}") from problem
    questions = [_question(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not questions:
        raise ValueError(f"the question file {str(path)!r} is empty; give one JSON object per line")
    return questions[: limit or None]


def _question(path: str | Path, number: int, line: str) -> Question:
    try:
        content: Any = json.loads(line)
        turns = tuple(content["turns"])
        named = content.get("question_id", number), content.get("category", "")
    except (ValueError, KeyError, TypeError, AttributeError) as problem:
        raise ValueError(f"{path}, line {number}: a question needs a list 'turns' of texts ({problem})") from problem
    if not turns or not all(isinstance(turn, str) and turn for turn in turns):
        raise ValueError(f"{path}, line {number}: 'turns' must be non-empty texts, got {list(turns)!r}")
    return Question(*named, turns)


def encode(questions: list[Question], tokenizer: Any) -> list[list[int]]:
    """Token ids of every question's first turn, as raw text to be continued."""
    if tokenizer is None:
        raise ValueError("the model has no tokenizer, and questions are text; put one beside the model")
    return [[int(i) for i in tokenizer(question.turns[0])["input_ids"]] for question in questions]
