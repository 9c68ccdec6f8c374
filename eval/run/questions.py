"""Question files of any column names, and how a question's turns become prompts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from eval.questions import Question

COLUMNS = ("question_id", "category", "turns")
PRESETS: dict[str, dict[str, str]] = {
    "spec_bench": {},
    "humaneval": {"question_id": "task_id", "turns": "prompt"},
    "gsm8k": {"turns": "question"},
}


def read(questions: str, path: str = "", columns: Mapping[str, str] | None = None, limit: int = 0) -> list[Question]:
    """The questions of a file, the first `limit` of them unless that is 0.

    Args:
        questions: a file, or the name of a set.
        path: the named set's file.
        columns: what the file calls a question's id, category and turns (a list of texts, or one text); a file without
            ids has line numbers, one without categories has its own name.

    Raises:
        ValueError: the file cannot be read or holds no question, a line is not one (file, line, field), or two have the
            same id.
    """
    if questions in PRESETS and not path:
        raise ValueError(f"the set {questions!r} is not part of the repository; name its file with questions_path")
    file = path if questions in PRESETS else questions
    names = {column: column for column in COLUMNS} | PRESETS.get(questions, {}) | dict(columns or {})
    try:
        lines = Path(file).read_text("utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as problem:
        raise ValueError(f"cannot read the questions {file!r}: {problem}") from problem
    found: dict[int | str, int] = {}
    made = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        question = _question(f"{file}, line {number}", number, line, names, Path(file).stem)
        if question.question_id in found:
            earlier = found[question.question_id]
            raise ValueError(f"{file}, line {number}: id {question.question_id!r} is that of line {earlier} already")
        found[question.question_id] = number
        made.append(question)
    if not made:
        raise ValueError(f"the question file {file!r} is empty; give one JSON object per line")
    return made[: limit or None]


def _question(where: str, number: int, line: str, names: Mapping[str, str], stem: str) -> Question:
    try:
        content: Any = json.loads(line)
    except ValueError as problem:
        raise ValueError(f"{where}: not JSON ({problem})") from problem
    if not isinstance(content, dict):
        raise ValueError(f"{where}: a question must be a JSON object, got {content!r}")
    turns, own = content.get(names["turns"]), content.get(names["question_id"], number)
    turns = [turns] if isinstance(turns, str) else turns
    if not (isinstance(turns, list) and turns and all(isinstance(turn, str) and turn for turn in turns)):
        raise ValueError(f"{where}: field {names['turns']!r} must be a text or a list of texts, got {turns!r}")
    if isinstance(own, bool) or not isinstance(own, int | str):
        raise ValueError(f"{where}: field {names['question_id']!r} must be a number or a text, got {own!r}")
    category = content.get(names["category"], stem)
    if not isinstance(category, str):
        raise ValueError(f"{where}: field {names['category']!r} must be a text, got {category!r}")
    return Question(own, category, tuple(turns))


def fingerprint(questions: Sequence[Question]) -> str:
    """SHA-256 of what is asked, so that a run cannot go on with other questions under the same name."""
    return hashlib.sha256(json.dumps(questions).encode()).hexdigest()


def prompt_text(tokenizer: Any, turns: Sequence[str], answers: Sequence[str]) -> str:
    """The text to continue after `answers` to the first turns.

    By the tokenizer's chat template where it has one; else the turns as they are, with a blank line between an answer
    and the next turn, so that a single turn is raw text to be continued.
    """
    if getattr(tokenizer, "chat_template", None):
        messages = []
        for turn, answer in zip(turns, (*answers, None), strict=False):
            messages.append({"role": "user", "content": turn})
            if answer is not None:
                messages.append({"role": "assistant", "content": answer})
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    told = [f"{turn}{answer}\n\n" for turn, answer in zip(turns, answers, strict=False)]
    return "".join(told) + turns[len(answers)]


@lru_cache(maxsize=32)
def encoded(tokenizer: Any, text: str, special: bool = True) -> tuple[int, ...]:
    """Token ids of a text, kept for the methods that are asked, or answer, the same."""
    return tuple(int(i) for i in tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"])


def prompt_ids(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a prompt; a chat template writes its own special tokens."""
    return list(encoded(tokenizer, text, not getattr(tokenizer, "chat_template", None)))
