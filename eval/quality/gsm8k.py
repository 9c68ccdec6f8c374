"""GSM8K: grade-school mathematics, scored by exact match of the final number (Cobbe et al. 2021, arXiv 2110.14168)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import NamedTuple

from eval.quality.lines import read_lines

STOPS = ("\nQuestion:", "\n\n\n")  # a base model goes on with a question of its own
# A minus right after a digit or a bracket is a subtraction's.
_NUMBER = re.compile(r"((?<![\d)])-\$?)?(\d{1,3}(?:,\d{3})+(?!\d)|\d+)(\.\d+)?")


class Question(NamedTuple):
    """One question and its worked answer, which ends in `#### ` and the number."""

    question: str
    answer: str

    @property
    def prompt(self) -> str:
        """The question as raw text to be continued; no worked examples before it (zero shots)."""
        return f"Question: {self.question}\nAnswer:"


def read(path: str | Path, limit: int = 0) -> list[Question]:
    """The questions of a JSONL file with `question` and `answer`, the first `limit` of them unless that is 0.

    Raises:
        ValueError: the file cannot be read or is empty, or a line lacks a field or its answer the number.
    """
    questions = []
    for number, fields in read_lines(path, Question._fields, limit):
        try:
            reference(fields["answer"])
        except ValueError as problem:
            raise ValueError(f"{path}, line {number}: {problem}") from problem
        questions.append(Question(**fields))
    return questions


def last_number(text: str) -> Decimal | None:
    """The last number in a text, with its sign, without thousands separators; None where there is none.

    The harness calls this "flexible extract". It favours nobody: what comes after the answer counts, for every method.
    """
    found = _NUMBER.findall(text)
    if not found:
        return None
    sign, whole, fraction = found[-1]
    return Decimal(f"{sign[:1]}{whole.replace(',', '')}{fraction}")


def reference(answer: str) -> Decimal:
    """The number after `####` in a reference answer.

    Raises:
        ValueError: there is none.
    """
    _, mark, tail = answer.rpartition("####")
    number = last_number(tail) if mark else None
    if number is None:
        raise ValueError(f"'answer' must end in '#### ' and a number, got {answer[-40:]!r}")
    return number


def score(outputs: Sequence[str], references: Sequence[str]) -> float:
    """Share of outputs, 0 to 1, whose last number equals the reference answer's as a number (18 = 18.00).

    Raises:
        ValueError: not as many outputs as references, none at all, or a reference without its number.
    """
    if len(outputs) != len(references) or not outputs:
        raise ValueError(f"give one output per reference, got {len(outputs)} outputs and {len(references)} references")
    pairs = zip(outputs, references, strict=True)
    return sum(last_number(output) == reference(answer) for output, answer in pairs) / len(outputs)
