"""Read questions from files with any column names, and make prompts from their turns.

A question file has one JSON object per line, in the format of Spec-Bench and MT-Bench.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

COLUMNS = ("question_id", "category", "turns")
NAMED_SETS: dict[str, dict[str, str]] = {  # by name: our column names -> those of the file
    "spec_bench": {},
    "humaneval": {"question_id": "task_id", "turns": "prompt"},
    "gsm8k": {"turns": "question"},
}


class Question(NamedTuple):
    """One question; `turns` are the user's texts."""

    question_id: int | str
    category: str
    turns: tuple[str, ...]


def is_file(questions: str) -> bool:
    """Whether this is the name of a file, not of a set."""
    return bool(questions) and questions not in NAMED_SETS


def read_questions(
    questions: str | Path,
    limit: int = 0,
    *,
    path: str = "",
    columns: Mapping[str, str] | None = None,
    per_category: int = 0,
) -> list[Question]:
    """Read the first `limit` questions (0: all).

    Args:
        questions: a file of JSON lines, or the name of a set.
        path: the named set's file.
        columns: the file's names of a question's id, category and turns (a list of texts, or one text). Missing ids
            are line numbers, a missing category is the file's name.
        per_category: keep only so many of each category, the first ones; 0: all.

    Raises:
        ValueError: the file cannot be read or has no question, a line is invalid, or two have the same id.
    """
    source = str(questions)
    if source in NAMED_SETS and not path:
        raise ValueError(f"the set {source!r} is not part of the repository; name its file with questions_path")
    file = path if source in NAMED_SETS else source
    names = {column: column for column in COLUMNS} | NAMED_SETS.get(source, {}) | dict(columns or {})
    found: dict[int | str, int] = {}
    made = []
    for number, content in _lines(file):
        question = _question(f"{file}, line {number}", number, content, names, Path(file).stem)
        if question.question_id in found:
            earlier = f"line {found[question.question_id]}"
            raise ValueError(f"{file}, line {number}: id {question.question_id!r} is that of {earlier} already")
        found[question.question_id] = number
        made.append(question)
    if not made:
        raise ValueError(f"the question file {file!r} is empty; give at least one question")
    kept, counts = list[Question](), Counter[str]()
    for question in made[: limit or None]:
        counts[question.category] += 1
        if not per_category or counts[question.category] <= per_category:
            kept.append(question)
    return kept


def _lines(file: str) -> Iterator[tuple[int, Any]]:
    """Line numbers and their JSON values."""
    try:
        lines = Path(file).read_text("utf-8-sig").split("\n")  # without a byte order mark
    except (OSError, UnicodeDecodeError) as problem:
        raise ValueError(f"cannot read the questions {file!r}: {problem}") from problem
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            yield number, json.loads(line)
        except ValueError as problem:
            raise ValueError(f"{file}, line {number}: not JSON ({problem})") from problem


def _question(where: str, number: int, content: Any, names: Mapping[str, str], stem: str) -> Question:
    if not isinstance(content, dict):
        raise ValueError(f"{where}: a question must be a JSON object, got {content!r}")
    turns, own = content.get(names["turns"]), content.get(names["question_id"], number)
    turns = [turns] if isinstance(turns, str) else turns
    there = "" if names["turns"] in content else f"; map it with columns, of the fields {', '.join(content)}"
    if not (isinstance(turns, list) and turns and all(isinstance(turn, str) and turn for turn in turns)):
        raise ValueError(f"{where}: field {names['turns']!r} must be a text or a list of texts, got {turns!r}{there}")
    if isinstance(own, bool) or not isinstance(own, int | str):
        raise ValueError(f"{where}: field {names['question_id']!r} must be a number or a text, got {own!r}")
    category = content.get(names["category"], stem)
    if not isinstance(category, str):
        raise ValueError(f"{where}: field {names['category']!r} must be a text, got {category!r}")
    return Question(own, category, tuple(turns))


def fingerprint(questions: Sequence[Question]) -> str:
    """SHA-256 of the questions, so that a run is not resumed with other questions."""
    return hashlib.sha256(json.dumps(questions).encode()).hexdigest()


def prompt_text(tokenizer: Any, turns: Sequence[str], answers: Sequence[str]) -> str:
    """The text of the next turn's prompt, after `answers` to the earlier turns.

    It is made by the tokenizer's chat template. Without one, turns are raw text, with a blank line after an answer.
    """
    if getattr(tokenizer, "chat_template", None):
        messages = []
        for turn, answer in zip(turns, (*answers, None), strict=False):
            messages.append({"role": "user", "content": turn})
            if answer is not None:
                messages.append({"role": "assistant", "content": answer})
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    earlier = [f"{turn}{answer}\n\n" for turn, answer in zip(turns, answers, strict=False)]
    return "".join(earlier) + turns[len(answers)]


@lru_cache(maxsize=32)
def encoded(tokenizer: Any, text: str, special: bool = True) -> tuple[int, ...]:
    """Token ids of a text; cached, since all methods have the same prompts."""
    return tuple(int(i) for i in tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"])


def prompt_ids(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a prompt; a chat template includes its own special tokens."""
    return list(encoded(tokenizer, text, not getattr(tokenizer, "chat_template", None)))


def encode(questions: Sequence[Question], tokenizer: Any) -> list[list[int]]:
    """Token ids of every question's first turn, as raw text."""
    if tokenizer is None:
        raise ValueError("the model has no tokenizer, and questions are text; put one into the model's folder")
    return [[int(i) for i in tokenizer(question.turns[0])["input_ids"]] for question in questions]
