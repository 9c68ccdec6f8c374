"""Questions: files and data sets of any column names, and how a question's turns become prompts.

A question file has one JSON object per line, in the shape that Spec-Bench and MT-Bench share.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

COLUMNS = ("question_id", "category", "turns")
NAMED_SETS: dict[str, dict[str, str]] = {  # by name: what their files call the columns
    "spec_bench": {},
    "humaneval": {"question_id": "task_id", "turns": "prompt"},
    "gsm8k": {"turns": "question"},
}
HUB = "hf:"  # marks a data set of the Hugging Face hub: hf:OWNER/NAME, or hf:OWNER/NAME:CONFIG:SPLIT
FORMATS = {".parquet": "parquet", ".csv": "csv", ".json": "json"}


class Question(NamedTuple):
    """One question: what is said in every turn."""

    question_id: int | str
    category: str
    turns: tuple[str, ...]


def is_named(questions: str) -> bool:
    """Whether this names a set or a data set of the hub, rather than a file."""
    return questions in NAMED_SETS or questions.startswith(HUB)


def read_questions(
    questions: str | Path,
    limit: int = 0,
    *,
    path: str = "",
    columns: Mapping[str, str] | None = None,
    per_category: int = 0,
) -> list[Question]:
    """The first `limit` questions, or all where that is 0.

    Args:
        per_category: of them the first so many of each category; 0: all.
        questions: a file of JSON lines; a parquet, CSV or JSON file, or a folder of them; a data set of the hub
            (`hf:OWNER/NAME`, or `hf:OWNER/NAME:CONFIG:SPLIT`); or the name of a set.
        path: the named set's file.
        columns: what the file calls a question's id, category and turns (a list of texts, or one text); a file without
            ids has line or row numbers, one without categories has its own name.

    Raises:
        ValueError: it cannot be read or holds no question, a line or row is not one (file, line, field), or two have
            the same id.
    """
    source = str(questions)
    if source in NAMED_SETS and not path:
        raise ValueError(f"the set {source!r} is not part of the repository; name its file with questions_path")
    file = path if source in NAMED_SETS else source
    names = {column: column for column in COLUMNS} | NAMED_SETS.get(source, {}) | dict(columns or {})
    is_data_set = _is_data_set(file)
    rows, word = (_rows(file, limit), "row") if is_data_set else (_lines(file), "line")
    stem = Path(file.removeprefix(HUB).partition(":")[0] if is_data_set else file).stem
    found: dict[int | str, int] = {}
    made = []
    for number, content in rows:
        question = _question(f"{file}, {word} {number}", number, content, names, stem)
        if question.question_id in found:
            earlier = f"{word} {found[question.question_id]}"
            raise ValueError(f"{file}, {word} {number}: id {question.question_id!r} is that of {earlier} already")
        found[question.question_id] = number
        made.append(question)
    if not made:
        raise ValueError(f"the question file {file!r} is empty; give at least one question")
    asked, counts = list[Question](), Counter[str]()
    for question in made[: limit or None]:
        counts[question.category] += 1
        if not per_category or counts[question.category] <= per_category:
            asked.append(question)
    return asked


def _lines(file: str) -> Iterator[tuple[int, Any]]:
    """Line numbers and what they hold."""
    try:
        lines = Path(file).read_text("utf-8-sig").split("\n")  # some editors begin a file with a mark
    except (OSError, UnicodeDecodeError) as problem:
        raise ValueError(f"cannot read the questions {file!r}: {problem}") from problem
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            yield number, json.loads(line)
        except ValueError as problem:
            raise ValueError(f"{file}, line {number}: not JSON ({problem})") from problem


def _is_data_set(file: str) -> bool:
    """Whether the `datasets` package reads it; JSON files of many lines, whatever their name, are read here."""
    path = Path(file)
    if file.startswith(HUB) or path.is_dir():
        return True
    if path.suffix == ".json" and path.is_file():
        with path.open("rb") as opened:
            return opened.read(64).lstrip()[:1] == b"["
    return path.suffix in FORMATS and path.suffix != ".json"


def _rows(source: str, limit: int) -> Iterator[tuple[int, dict[str, Any]]]:
    """Row numbers and rows of a data set; an empty cell is left out."""
    try:
        import datasets  # heavy, and needed for nothing else
    except ImportError as problem:
        raise ValueError(f"to read {source!r} takes the package datasets: pip install datasets") from problem
    try:
        rows = list(islice(_opened(datasets, source, limit), limit or None))
    except Exception as problem:  # what it raises is in no common class
        raise ValueError(f"cannot read the questions {source!r}: {str(problem) or type(problem).__name__}") from problem
    for number, row in enumerate(rows, 1):
        yield number, {name: value for name, value in row.items() if value is not None}


def _opened(datasets: Any, source: str, limit: int) -> Any:
    if not source.startswith(HUB):
        path = Path(source).resolve()  # a relative name may be that of something else to load_dataset
        if path.is_file():
            return datasets.load_dataset(FORMATS[path.suffix], data_files=str(path), split="train", streaming=True)
        return _split(datasets.load_dataset(str(path), streaming=True), "name one of its files")
    parts = source.removeprefix(HUB).split(":")
    if len(parts) not in (1, 3) or not parts[0]:
        raise ValueError("a data set of the hub is written hf:OWNER/NAME or hf:OWNER/NAME:CONFIG:SPLIT")
    name, config, split = parts if len(parts) == 3 else (parts[0], "", "")
    is_part = limit > 0 and not datasets.config.HF_HUB_OFFLINE  # what is on disk already can only be had whole
    found = datasets.load_dataset(name, config or None, split=split or None, streaming=is_part)
    return found if split else _split(found, "name one as hf:OWNER/NAME:CONFIG:SPLIT")


def _split(found: Mapping[str, Any], hint: str) -> Any:
    """The only part of a data set, or the one called test."""
    name = "test" if "test" in found else next(iter(found))
    if len(found) > 1 and name != "test":
        raise ValueError(f"it has the splits {', '.join(found)}; {hint}")
    return found[name]


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


def encode(questions: Sequence[Question], tokenizer: Any) -> list[list[int]]:
    """Token ids of every question's first turn, as raw text to be continued."""
    if tokenizer is None:
        raise ValueError("the model has no tokenizer, and questions are text; put one beside the model")
    return [[int(i) for i in tokenizer(question.turns[0])["input_ids"]] for question in questions]
