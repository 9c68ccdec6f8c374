"""The texts that exit heads are trained on: prompts from files, or sampled ones, continued by the model."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from selfspec.decoding.request import Completion
from selfspec.target import Target
from train.corpus import read_corpus
from train.heads_config import TextConfig
from train.sections import CorpusConfig, check
from train.texts import json_lines

PIECE = 4000  # characters per record where there is a single file
TEXT_FILES = (".jsonl", ".md", ".py", ".rst", ".txt")  # files read from a folder
BOUND = 200  # characters before a prompt's start that are searched for the beginning of a line
TRIES = 100  # attempts per prompt


class Text(NamedTuple):
    """A text to train on; its first `num_prompt` tokens are the prompt, the model wrote the others."""

    tokens: list[int]
    num_prompt: int

    def trained_positions(self, config: TextConfig, prompts: bool) -> range:
        """Positions whose next token is predicted, without the last one; `prompts`: including those of the prompt."""
        first = 0 if prompts or not config.max_new_tokens else self.num_prompt - 1
        return range(first, len(self.tokens) - 1)


def gather_texts(target: Target, config: TextConfig) -> tuple[list[Text], list[Text]]:
    """Make texts to train on and held-out texts, from different records or different sampled prompts.

    Raises:
        ValueError: prompts cannot be read, are too short, or the model has no tokenizer.
    """
    limit = target.stack.context_limit
    room = limit - config.max_new_tokens
    fits = room > config.prompt_tokens
    check(fits, "text.max_new_tokens", f"short enough for the model's {limit} positions", config.max_new_tokens)
    wanted = {"train": config.num_texts, "held out": config.num_held_out}
    if config.prompts:
        parts = dict(zip(wanted, _read(config), strict=True))
        prompts = {part: _cut(target, parts[part], wanted[part], config, room, part) for part in wanted}
    else:
        prompts = {part: _openings(target, wanted[part], config, part) for part in wanted}
    made = {part: _write(target, prompts[part], config, part) for part in wanted}
    # A prompt that was drawn twice has the same greedy text.
    train = list({tuple(text.tokens): text for text in made["train"]}.values())
    known = {tuple(text.tokens) for text in train}
    held_out = [text for text in made["held out"] if tuple(text.tokens) not in known]
    if not any(text.trained_positions(config, False) for text in held_out):
        raise ValueError(
            "text gives nothing to hold out: the held-out texts are empty or those trained on; "
            "raise text.num_held_out, text.prompt_tokens or text.max_new_tokens"
        )
    return train, held_out


def _seed(config: TextConfig, part: str, index: int) -> int:
    return 2 * (config.seed * 1_000_003 + index) + (part != "train")


def _write(target: Target, prompts: list[list[int]], config: TextConfig, part: str) -> list[Text]:
    """Continue every prompt by the model, with the temperatures in turn."""
    if not config.max_new_tokens:
        return [Text(prompt, len(prompt)) for prompt in prompts]
    texts: list[Text | None] = [None] * len(prompts)
    begun = shown = time.monotonic()
    done = 0
    for turn, temperature in enumerate(config.temperatures):
        mine = range(turn, len(prompts), len(config.temperatures))
        own, seeds = [prompts[i] for i in mine], [_seed(config, part, i) for i in mine]
        for completion in _continued(target, own, config, config.max_new_tokens, temperature, seeds):
            index = mine[completion.request_id]
            texts[index] = Text(prompts[index] + completion.tokens, len(prompts[index]))
            done += 1
            if time.monotonic() - shown > 10:
                shown = time.monotonic()
                left = (shown - begun) / done * (len(prompts) - done)
                print(f"text ({part}): {done} of {len(prompts)}, about {left:.0f} s left", flush=True)
    return [text for text in texts if text is not None]


def _continued(
    target: Target, prompts: list[list[int]], config: TextConfig, count: int, temperature: float, seeds: list[int]
) -> Iterator[Completion]:
    """Every prompt continued by `count` tokens, in the order in which they end; `request_id` is the prompt's index."""
    options = {"max_new_tokens": count, "temperature": temperature, "seed": seeds}
    options["generation_config"] = False  # heads learn the model's own distribution
    requests = target.requests(prompts, options)
    for round_ in target.rounds(requests, policy="plain", max_batch_size=config.batch_size):
        yield from (row.completion for row in round_.rows if row.completion is not None)


def _openings(target: Target, count: int, config: TextConfig, part: str) -> list[list[int]]:
    """Sampled prompts: the beginning-of-text token, and a few tokens sampled after it."""
    numbers = random.Random(_seed(config, part, 0))
    vocabulary, begin = target.stack.vocab_size, getattr(target.stack.config, "bos_token_id", None)
    starts = [[numbers.randrange(vocabulary) if begin is None else int(begin)] for _ in range(count)]
    if not config.prompt_tokens:
        return starts
    seeds, ends = [_seed(config, part, count + i) for i in range(count)], target.eos_token_ids
    for done in _continued(target, starts, config, config.prompt_tokens, 1.0, seeds):
        starts[done.request_id] = starts[done.request_id] + [token for token in done.tokens if token not in ends]
    return starts


def _cut(target: Target, records: list[str], count: int, config: TextConfig, room: int, part: str) -> list[list[int]]:
    """Prompts from random positions of random records, or, with `prompt_tokens` 0, whole records in turn."""
    if target.tokenizer is None:
        raise ValueError("text.prompts needs a tokenizer, and the model has none; add one to its folder")

    def encode(text: str) -> list[int]:
        return [int(token) for token in target.tokenizer(text, verbose=False)["input_ids"]]

    numbers, wanted = random.Random(_seed(config, part, 0)), config.prompt_tokens
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


def _read(config: TextConfig) -> tuple[list[str], list[str]]:
    """Read records to train on and held-out records.

    "stdlib" stands for the Python files of the running interpreter, split like the embedded model's corpus.
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


def count_positions(texts: Sequence[Text], config: TextConfig, prompts: bool) -> int:
    """The number of trained positions of all texts."""
    return sum(len(text.trained_positions(config, prompts)) for text in texts)
