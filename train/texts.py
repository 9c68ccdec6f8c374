"""Texts and conversations from a file or a data set, and their labels."""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerFast

from train.recipe import IGNORED
from train.sections import DataConfig

Record = dict[str, Any]


def read_records(config: DataConfig) -> Iterator[Record]:
    """Yield the records of `data.path` in order.

    `.jsonl` files (a mapping per line) and `.txt` files (texts separated by blank lines) are read here; `.parquet`
    files, folders and ids of data sets by the package `datasets`.

    Raises:
        ValueError: there is no such file or data set, it cannot be read, or `datasets` is not installed.
    """
    path = Path(config.path)
    if path.suffix in (".jsonl", ".txt", ".parquet") and not path.is_file():
        raise ValueError(f"data.path must be a file or the id of a data set, got {config.path!r}, which does not exist")
    try:
        if path.suffix == ".jsonl":
            yield from json_lines(path)
        elif path.suffix == ".txt":
            yield from _paragraphs(path, config.text_field)
        else:
            yield from _datasets(config)
    except UnicodeDecodeError as error:
        raise ValueError(f"data.path must be a file in UTF-8, got {config.path!r}: {error}") from error


def json_lines(path: Path) -> Iterator[Record]:
    """Yield the mapping on each line of a file; ValueError where a line holds anything else."""
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"line {number} of {path} must be JSON, got {line.strip()[:40]!r}: {error}") from error
            if not isinstance(record, dict):
                raise ValueError(f"line {number} of {path} must be a JSON mapping, got {line.strip()[:40]!r}")
            yield record


def _paragraphs(path: Path, field: str) -> Iterator[Record]:
    lines: list[str] = []
    with path.open(encoding="utf-8") as file:
        for line in file:
            if line.strip():
                lines.append(line)
            elif lines:
                yield {field: "".join(lines)}
                lines = []
    if lines:
        yield {field: "".join(lines)}


def _datasets(config: DataConfig) -> Iterator[Record]:
    try:
        import datasets
    except ImportError as error:
        raise ValueError(f"data.path {config.path!r} needs the package datasets; pip install datasets") from error
    try:
        if config.path.endswith(".parquet"):
            found = datasets.load_dataset("parquet", data_files=config.path, split="train")
        else:
            found = datasets.load_dataset(config.path, config.name or None, split=config.split)
        yield from found
    except Exception as error:  # the hub, the network and every file format have errors of their own
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(
            f"data.path must be a file or the id of a data set, and {config.path!r} cannot be read ({reason}); "
            "check data.path, data.name and data.split"
        ) from error


def content_of(record: Record, config: DataConfig) -> Any:
    """Return a record's text, or its list of messages.

    Raises:
        ValueError: the field is missing or holds something else.
    """
    key, field = (
        ("data.messages_field", config.messages_field)
        if config.messages_field
        else ("data.text_field", config.text_field)
    )
    if field not in record:
        close = difflib.get_close_matches(field, list(record), n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise ValueError(f"{key} must be a field of the data, got {field!r}; {hint}fields: {', '.join(record)}")
    value = record[field]
    kind, what = (list, "a list of messages") if config.messages_field else (str, "a text")
    if not isinstance(value, kind):
        raise ValueError(f"{key} must be a field that holds {what}, got {str(value)[:40]!r} in field {field!r}")
    return value


def rank_of(content: Any) -> int:
    """A number in 0..2^32 - 1 that depends on the content only; contents with the lowest ones are held out."""
    data = content if isinstance(content, str) else json.dumps(content, sort_keys=True, ensure_ascii=False)
    return int.from_bytes(hashlib.sha256(data.encode("utf-8", "surrogatepass")).digest()[:4], "big")


def split_held_out(contents: Sequence[Any], percent: float) -> tuple[list[Any], list[Any]]:
    """Split contents into those to train on and held-out ones; equal contents are in the same part.

    Raises:
        ValueError: a part would be empty.
    """
    ranks = [rank_of(content) for content in contents]
    count = max(1, round(len(contents) * percent / 100))
    highest = sorted(ranks)[min(count, len(ranks)) - 1] if ranks else 0
    train = [content for content, rank in zip(contents, ranks, strict=True) if rank > highest]
    held_out = [content for content, rank in zip(contents, ranks, strict=True) if rank <= highest]
    if not train or not held_out:
        raise ValueError(
            f"data.path needs at least two different texts, one to train on and one to hold out, got {len(contents)} "
            "in all; add some"
        )
    return train, held_out


def encode(tokenizer: PreTrainedTokenizerFast, content: Any, max_length: int = 0) -> np.ndarray:
    """Encode a text or a conversation, with an end-of-text token: tokens and labels, int64 `[2, T]`.

    Labels are the tokens, or -100 where a token does not count: the first token, the end of a cut text, and in a
    conversation all tokens outside of the assistant's messages. Contents are cut after `max_length` tokens; 0: never.
    """
    if isinstance(content, str):
        tokens = tokenizer(content, verbose=False)["input_ids"]
        counts = [True] * len(tokens)
    else:
        tokens, counts = encode_chat(tokenizer, content)
    keep = max_length - 1 if max_length else len(tokens)
    ends_here = isinstance(content, str) and len(tokens) <= keep  # false for a cut text
    tokens, counts = tokens[:keep], counts[:keep]
    if not tokens or tokens[-1] != tokenizer.eos_token_id:
        tokens, counts = [*tokens, tokenizer.eos_token_id], [*counts, ends_here]
    both = np.asarray([tokens, tokens], dtype=np.int64)
    both[1, ~np.asarray(counts)] = IGNORED
    both[1, 0] = IGNORED
    return both


def encode_chat(tokenizer: PreTrainedTokenizerFast, messages: list[dict[str, str]]) -> tuple[list[int], list[bool]]:
    """Encode a conversation by the chat template; return its tokens, and which of them are the assistant's.

    An assistant's message begins after the template's generation prompt and includes the end of the turn.

    Raises:
        ValueError: there is no template, it raises for these messages, or it changes earlier turns.
    """
    if not tokenizer.chat_template:
        raise ValueError("data.messages_field needs a tokenizer with a chat template; use an instruct model.base")

    def written(count: int, prompt: bool = False) -> str:
        some = messages[:count]
        return str(tokenizer.apply_chat_template(some, tokenize=False, add_generation_prompt=prompt)) if some else ""

    spans: list[tuple[int, int]] = []
    try:
        whole = written(len(messages))
        for index, message in enumerate(messages):
            if message["role"] == "assistant":
                before, after = written(index, prompt=True), written(index + 1)
                if not (whole.startswith(before) and whole.startswith(after)):
                    raise ValueError("it changes earlier turns")
                spans.append((len(before), len(after)))
    except Exception as error:  # templates raise errors of Jinja and of their own
        raise ValueError(f"the chat template cannot render the messages {str(messages)[:60]!r}: {error}") from error
    encoded = tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    counts = [any(start <= first < last <= stop for start, stop in spans) for first, last in encoded["offset_mapping"]]
    return list(encoded["input_ids"]), counts
