"""GSM8K (arXiv 2110.14168): grade-school word problems, asked without examples and answered greedily.

It compares a model before and after training. Figures for other purposes: `python -m eval quality`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn
from transformers import PreTrainedTokenizerFast

from train.generate import continue_prompts
from train.sections import EvalConfig
from train.texts import json_lines

INSTRUCTION = 'Solve the problem step by step. End with "The answer is" and the number.'
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


class Problem(NamedTuple):
    """A question and its answer, a number."""

    question: str
    answer: float


def read_problems(path: str | Path, limit: int = 0) -> list[Problem]:
    """Read a `.jsonl` file with `question` and `answer`, whose number stands after ####; the first `limit`, or all.

    Raises:
        ValueError: a record has other fields, or no number.
    """
    problems = []
    for number, record in enumerate(json_lines(Path(path)), start=1):
        question, (_, marked, solution) = record.get("question"), str(record.get("answer")).rpartition("####")
        answer = last_number(solution) if marked else None
        if not isinstance(question, str) or answer is None:
            raise ValueError(
                f"eval.gsm8k needs a question and an answer with #### NUMBER, got record {number}: {record}"
            )
        problems.append(Problem(question, answer))
        if len(problems) == limit:
            break
    return problems


def last_number(text: str) -> float | None:
    """The last number in a text, with or without commas; None where there is none."""
    found = NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None


def accuracy(
    model: nn.Module, tokenizer: PreTrainedTokenizerFast, problems: Sequence[Problem], config: EvalConfig
) -> float:
    """Return the share of problems for which the last number of the model's answer is the right one."""
    right = 0
    for start in range(0, len(problems), config.batch_size):
        some = problems[start : start + config.batch_size]
        answers = continue_prompts(model, [_prompt(tokenizer, each.question) for each in some], config.gsm8k_tokens)
        texts = [str(tokenizer.decode(answer, skip_special_tokens=True)) for answer in answers]
        right += sum(last_number(text) == each.answer for text, each in zip(texts, some, strict=True))
    return right / max(1, len(problems))


def _prompt(tokenizer: Any, question: str) -> list[int]:
    messages = [{"role": "user", "content": f"{question}\n\n{INSTRUCTION}"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])
