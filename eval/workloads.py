"""Workloads of `python -m eval tune`: prompts of one kind, made from data sets and from the standard library.

gsm8k       the questions of GSM8K (gsm8k/test.jsonl)
functions   the prompts of HumanEval (humaneval/HumanEval.jsonl) and function heads of the standard library, continued
extraction  passages of Spec-Bench's retrieval questions (spec_bench/question.jsonl) with several instructions each
"""

from __future__ import annotations

import ast
import json
import random
import sysconfig
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

LEAST_HEAD, MOST_HEAD = 80, 800  # characters of a function's head
MOST_HEADS = 800  # of the standard library
LEAST_PASSAGE = 200  # characters
HELD_OUT = 30  # prompts of a workload that is split by text; one for each of so many texts
INSTRUCTIONS = (
    "List all names of people, places and organisations in this text, one per line.",
    "List every number and date in this text, and what it stands for.",
    "Write the facts of this text as a JSON list of objects with the keys subject, relation and object.",
    "Quote the sentence of this text that says most about its subject, then name the subject.",
)


class Workload(NamedTuple):
    """Prompts as `LLM.tune` takes them."""

    prompts: list[Any]
    held_out: list[Any] | None  # None: `tune` holds prompts out, since no two are about the same text


def make(name: str, data: Path) -> Workload:
    """A workload by its name, always the same for the same data and Python version.

    Raises:
        ValueError: a file of the data is missing or damaged.
    """
    try:
        return MAKERS[name](data)
    except (OSError, ValueError, KeyError, TypeError) as problem:
        raise ValueError(f"the workload {name} cannot be made from {data}: {problem}") from problem


def _lines(file: Path) -> list[Any]:
    return [json.loads(line) for line in file.read_text("utf-8").splitlines() if line.strip()]


def _gsm8k(data: Path) -> Workload:
    return Workload([one["question"] for one in _lines(data / "gsm8k" / "test.jsonl")], None)


def _functions(data: Path) -> Workload:
    texts = [one["prompt"] for one in _lines(data / "humaneval" / "HumanEval.jsonl")]
    heads = sorted(set(_heads(Path(sysconfig.get_paths()["stdlib"]))))
    random.Random(0).shuffle(heads)
    return Workload([{"prompt": text} for text in texts + heads[:MOST_HEADS]], None)


def _heads(folder: Path) -> Iterator[str]:
    """The heads of the functions in a folder's files: from `def` to the end of the docstring."""
    for file in sorted(folder.glob("*.py")):
        try:
            text = file.read_text("utf-8")
            nodes = list(ast.walk(ast.parse(text)))
        except (SyntaxError, UnicodeDecodeError):
            continue
        lines = text.splitlines(keepends=True)
        for node in nodes:
            if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) and node.body[0].end_lineno:
                head = textwrap.dedent("".join(lines[node.lineno - 1 : node.body[0].end_lineno]))
                if LEAST_HEAD <= len(head) <= MOST_HEAD:
                    yield head


def _extraction(data: Path) -> Workload:
    """Split by text: no passage of a held-out question is among the others."""
    found = [one["turns"][0].split("\n")[:-1] for one in _lines(data / "spec_bench" / "question.jsonl") if _is_rag(one)]
    random.Random(0).shuffle(found)
    groups = [[text for text in passages if len(text) >= LEAST_PASSAGE] for passages in found]
    groups = [group for group in groups if group]
    held_out = [_asked(group[0], at) for at, group in enumerate(groups[:HELD_OUT])]
    known = {text for group in groups[:HELD_OUT] for text in group}
    texts = dict.fromkeys(text for group in groups[HELD_OUT:] for text in group if text not in known)
    return Workload([_asked(text, at) for at in range(len(INSTRUCTIONS)) for text in texts], held_out)


def _is_rag(line: Any) -> bool:
    return bool(line["category"] == "rag")


def _asked(text: str, at: int) -> str:
    return f"{text}\n\n{INSTRUCTIONS[at % len(INSTRUCTIONS)]}"


MAKERS: dict[str, Callable[[Path], Workload]] = {"gsm8k": _gsm8k, "functions": _functions, "extraction": _extraction}
