"""Prompts from files: cut at random places, or whole records."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from train.corpus import read_corpus
from train.heads_config import TextConfig
from train.sections import CorpusConfig
from train.texts import json_lines

PIECE = 4000  # characters per record where there is a single file
TEXT_FILES = (".jsonl", ".md", ".py", ".rst", ".txt")  # files read from a folder
BOUND = 200  # characters before a prompt's start that are searched for the beginning of a line
TRIES = 100  # attempts per prompt


def cut(tokenizer: Any, records: list[str], count: int, config: TextConfig, room: int, seed: int) -> list[list[int]]:
    """Prompts from random positions of random records, or, with `prompt_tokens` 0, whole records in turn.

    Raises:
        ValueError: there is no tokenizer, or too little text.
    """
    if tokenizer is None:
        raise ValueError("text.prompts needs a tokenizer, and the model has none; add one to its folder")

    def encode(text: str) -> list[int]:
        return [int(token) for token in tokenizer(text, verbose=False)["input_ids"]]

    numbers, wanted = random.Random(seed), config.prompt_tokens
    numbers.shuffle(records)
    if not wanted:
        whole = [encode(record)[-room:] for record in records[:count]]
        whole = [prompt for prompt in whole if prompt]
        return [whole[i % len(whole)] for i in range(count)] if whole else _too_short(config)
    prompts: list[list[int]] = []
    weights = [len(record) for record in records]
    for tried in range(TRIES * count):
        if tried == TRIES and not prompts:
            break  # probably no record is long enough
        record = numbers.choices(records, weights)[0]
        at = numbers.randrange(max(1, len(record) - 4 * wanted))
        at = record.rfind("\n", max(0, at - BOUND), at) + 1 or at
        prompt = encode(record[at : at + 16 * wanted])[:wanted]
        if len(prompt) == wanted:
            prompts.append(prompt)
        if len(prompts) == count:
            return prompts
    return _too_short(config)


def _too_short(config: TextConfig) -> list[list[int]]:
    raise ValueError(
        f"text.prompts {list(config.prompts)} hold too little text for prompts of "
        f"{config.prompt_tokens or 1} tokens; give more text or lower text.prompt_tokens"
    )


def read(config: TextConfig) -> tuple[list[str], list[str]]:
    """Read records to train on and held-out records.

    "stdlib" stands for the Python files of the running interpreter, split like the embedded model's corpus.

    Raises:
        ValueError: files cannot be read, or hold too little to hold some out.
    """
    records: list[str] = []
    train: list[str] = []
    held_out: list[str] = []
    for name in config.prompts:
        if name == "stdlib":
            corpus = read_corpus(CorpusConfig(held_out_percent=config.held_out_percent))
            train += [file.text for file in corpus.train]
            held_out += [file.text for file in corpus.held_out]
        else:
            records += _records(Path(name).expanduser(), config.field)
    if len(records) == 1:
        records = [records[0][at : at + PIECE] for at in range(0, len(records[0]), PIECE)]
    if len(records) == 1:
        records = [records[0][: len(records[0]) // 2], records[0][len(records[0]) // 2 :]]
    records = [record for record in records if record.strip()]
    random.Random(0).shuffle(records)  # the same split in every run
    count = min(max(1, round(len(records) * config.held_out_percent / 100)), len(records))
    train, held_out = train + records[count:], held_out + records[:count]
    if not train or not held_out:
        raise ValueError(f"text.prompts {list(config.prompts)} are empty or too short to hold some out; add texts")
    return train, held_out


def _records(path: Path, field: str) -> list[str]:
    """The texts of a `.jsonl` file's lines, the whole text of any other file, or those of all files of a folder."""
    if path.is_dir():
        files = sorted(each for each in path.rglob("*") if each.suffix in TEXT_FILES and each.is_file())
        return [record for file in files for record in _records(file, field)]
    try:
        if path.suffix != ".jsonl":
            return [path.read_text("utf-8")]
        return [_text_of(record, number, path, field) for number, record in enumerate(json_lines(path), start=1)]
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"text.prompts must be files of UTF-8 text, folders or stdlib, got {path}: {error}") from None


def _text_of(record: dict[str, Any], number: int, path: Path, field: str) -> str:
    """The text in a field of a record; of a list, such as the turns of a conversation, the first text."""
    value = record.get(field)
    if isinstance(value, list) and value:
        value = value[0]
    if not isinstance(value, str):
        raise ValueError(
            f"text.field must name a field with a text, got {field!r} in record {number} of {path}; its fields: "
            f"{', '.join(record)}"
        )
    return value
