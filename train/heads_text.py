"""The texts that exit heads are trained on: a model's continuations of prompts, its own unless `data.path` is named."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from selfspec.control.plan import Plain
from selfspec.core import SamplingParams
from selfspec.decoding.defaults import GenerationDefaults
from selfspec.decoding.engine import LLMEngine, page_size_of
from selfspec.loading.target import Target
from train.configuration import check
from train.heads_config import HeadsRun
from train.samples import Sample, UserTurn, Writer, count_positions, split
from train.sections import DataConfig, TextConfig
from train.texts import content_of, read_records, split_held_out
from train.written import Task, Written


def gather_texts(target: Target, config: HeadsRun, written: Written) -> tuple[list[Sample], list[Sample]]:
    """Texts to train on and held-out texts, from different records or different sampled prompts.

    Args:
        written: what the model wrote before, which is not written again; outputs are added.

    Raises:
        ValueError: prompts cannot be read, the model has no tokenizer for them, or its chat template does not have a
            user's text in one place.
    """
    text, limit = config.text, target.split.context_limit
    room = limit - text.max_new_tokens
    fits = room > text.prompt_tokens
    check(fits, "text.max_new_tokens", f"short enough for the model's {limit} positions", text.max_new_tokens)
    turn, writer = UserTurn.of(target.tokenizer), Writer(text, written, partial(_write, target))
    given = _read(target, config.data, text, turn) if config.data.path else None
    openings = _openings(target, text) if turn is None else [turn.opening] * (text.num_held_out + text.num_texts)

    def prompts(numbers: range) -> list[list[int]]:
        batch = slice(numbers.start, numbers.stop)
        own = writer.prompts(openings[batch], numbers, turn) if given is None else given[batch]
        return [prompt if len(prompt) <= room else [] for prompt in own]

    samples = writer.samples(prompts)
    train, held_out = split(samples, text.num_held_out)
    if not count_positions(held_out):
        raise ValueError(
            "text gives nothing to hold out: the held-out texts are empty; "
            "raise text.num_held_out, text.prompt_tokens or text.max_new_tokens"
        )
    return train, held_out


def _read(target: Target, data: DataConfig, config: TextConfig, turn: UserTurn | None) -> list[list[int]]:
    """Prompts from the texts of section `data`, the held-out ones first."""
    contents, tokenizer = [content_of(record, data) for record in read_records(data)], target.tokenizer
    if tokenizer is None:
        raise ValueError("data.path needs a tokenizer, and the model has none; add one to its folder")
    train, held_out = split_held_out(contents, data.held_out_percent)
    counts = ((held_out, config.num_held_out), (train, config.num_texts))
    texts = [part[i % len(part)] for part, count in counts for i in range(count)]
    cut = [tokenizer(text, add_special_tokens=turn is None, verbose=False)["input_ids"] for text in texts]
    return [(list if turn is None else turn.prompt)(tokens[: config.prompt_tokens]) for tokens in cut]


def _openings(target: Target, config: TextConfig) -> list[list[int]]:
    """The first token of each text of a model without a chat template: its own, or a random one."""
    numbers, begin = random.Random(config.seed), getattr(target.split.config, "bos_token_id", None)
    count, size = config.num_held_out + config.num_texts, target.split.vocab_size
    return [[numbers.randrange(size) if begin is None else int(begin)] for _ in range(count)]


def _write(target: Target, tasks: Sequence[Task], ends: Sequence[int]) -> Iterator[tuple[Task, list[int]]]:
    """Write a batch by the engine; heads learn the model's own distribution, as no generation config changes it."""
    split = target.refresh()
    longest = min(max(len(task.prompt) + task.count for task in tasks), split.context_limit)
    pages = {"max_num_cached_tokens": len(tasks) * (longest + -longest % page_size_of(split))}
    defaults = GenerationDefaults(split.model, target.tokenizer)
    engine = LLMEngine(split, Plain(), defaults, max_num_seqs=len(tasks), final_only=True, **pages)
    shared: dict[str, Any] = {"stop_token_ids": list(ends), "generation_config": False}
    for at, (prompt, count, temperature, seed) in enumerate(tasks):
        params = SamplingParams(max_tokens=count, temperature=temperature, seed=seed, **shared)
        engine.add_request(str(at), list(prompt), params)
    while engine.has_unfinished_requests():
        yield from [(tasks[int(done.request_id)], done.outputs[0].token_ids) for done in engine.step()]
    engine.close()
