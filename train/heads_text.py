"""The texts that exit heads are trained on: a model's continuations of prompts, its own unless `data.path` is named.

A chat model's own prompts are user turns that it samples after the beginning of one in its chat template.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import NamedTuple

from selfspec.target import Target
from train.heads_config import HeadsRun, TextConfig
from train.heads_files import Task, Written
from train.sections import DataConfig, check
from train.texts import content_of, read_records, split_held_out

MARK = "USER-TURN"  # stands for the user's text in the chat template
REPORT_SECONDS = 10  # between lines about the texts written so far


class Text(NamedTuple):
    """A text to train on; its first `num_prompt` tokens are the prompt, the model wrote the others."""

    tokens: list[int]
    num_prompt: int

    @property
    def positions(self) -> range:
        """The positions whose next token the model wrote."""
        return range(self.num_prompt - 1, len(self.tokens) - 1)


def count_positions(texts: Sequence[Text]) -> int:
    return sum(len(text.positions) for text in texts)


def gather_texts(target: Target, config: HeadsRun, written: Written) -> tuple[list[Text], list[Text]]:
    """Texts to train on and held-out texts, from different records or different sampled prompts.

    Args:
        written: what the model wrote before, which is not written again; outputs are added.

    Raises:
        ValueError: prompts cannot be read, the model has no tokenizer for them, or its chat template does not show a
            user's text.
    """
    wanted, limit = config.text, target.stack.context_limit
    room = limit - wanted.max_new_tokens
    fits = room > wanted.prompt_tokens
    check(fits, "text.max_new_tokens", f"short enough for the model's {limit} positions", wanted.max_new_tokens)
    records = _read(target, config.data) if config.data.path else (None, None)
    parts = []
    for part, (own, count) in enumerate(zip(records, (wanted.num_texts, wanted.num_held_out), strict=True)):
        if own is not None:
            tokens = [_encode(target, own[i % len(own)])[: wanted.prompt_tokens] for i in range(count)]
        else:
            tokens = _sampled(target, count, wanted, part, written)
        prompts = _prompts(target, tokens)
        parts.append(_texts(target, [each for each in prompts if 0 < len(each) <= room], wanted, part, written))
    train = list({tuple(text.tokens): text for text in parts[0]}.values())  # a prompt may have been drawn twice
    known = {tuple(text.tokens) for text in train}
    held_out = [text for text in parts[1] if tuple(text.tokens) not in known]
    if not count_positions(held_out):
        raise ValueError(
            "text gives nothing to hold out: the held-out texts are empty or those trained on; "
            "raise text.num_held_out, text.prompt_tokens or text.max_new_tokens"
        )
    return train, held_out


def _seed(config: TextConfig, part: int, index: int, of_prompt: bool = False) -> int:
    """Seeds that do not depend on the number of texts, so that more texts can be added to those of a stopped run."""
    return 4 * (config.seed * 1_000_003 + index) + 2 * of_prompt + part


def _texts(target: Target, prompts: list[list[int]], config: TextConfig, part: int, written: Written) -> list[Text]:
    """Every prompt with its continuation, at the temperatures in turn."""
    warm, count = config.temperatures, config.max_new_tokens
    tasks = [
        Task(tuple(prompt), count, float(warm[i % len(warm)]), _seed(config, part, i))
        for i, prompt in enumerate(prompts)
    ]
    _write(target, tasks, config, written, ("texts", "held-out texts")[part])
    outputs = [written.get(task) or [] for task in tasks]
    return [Text(prompt + output, len(prompt)) for prompt, output in zip(prompts, outputs, strict=True)]


def _read(target: Target, data: DataConfig) -> tuple[list[str], list[str]]:
    """The texts of section `data` to train with, and held-out ones."""
    texts = [content_of(record, data) for record in read_records(data)]
    if target.tokenizer is None:
        raise ValueError("data.path needs a tokenizer, and the model has none; add one to its folder")
    return split_held_out(texts, data.held_out_percent)


def _sampled(target: Target, count: int, config: TextConfig, part: int, written: Written) -> list[list[int]]:
    """Beginnings of prompts that the model samples at temperature 1: user turns of a chat model, or texts."""
    numbers, around = random.Random(_seed(config, part, 0)), _around_user(target)
    vocabulary, begin = target.stack.vocab_size, getattr(target.stack.config, "bos_token_id", None)
    starts = [[numbers.randrange(vocabulary) if begin is None else int(begin)] for _ in range(count)]
    starts = starts if around is None else [_encode(target, around[0])] * count
    limit = config.prompt_tokens
    tasks = [Task(tuple(own), limit, 1.0, _seed(config, part, i, True)) for i, own in enumerate(starts)]
    _write(target, tasks, config, written, ("prompts", "held-out prompts")[part])
    turns = [[token for token in written.get(task) or [] if token not in target.eos_token_ids] for task in tasks]
    return turns if around is not None else [start + turn for start, turn in zip(starts, turns, strict=True)]


def _prompts(target: Target, texts: list[list[int]]) -> list[list[int]]:
    """Prompts of texts, as user turns in the chat template if there is one. Empty turns are left out."""
    around = _around_user(target)
    if around is None:
        return texts
    turns = [target.tokenizer.decode(text, skip_special_tokens=True).strip() for text in texts]
    return [_encode(target, turn.join(around)) for turn in turns if turn]


def _around_user(target: Target) -> list[str] | None:
    """What a chat template writes before and after a user's text; None without a template."""
    if not getattr(target.tokenizer, "chat_template", None):
        return None
    messages = [{"role": "user", "content": MARK}]
    around = target.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True).split(MARK)
    if len(around) != 2:
        raise ValueError("the model's chat template does not show a user's text once, so it cannot be asked anything")
    return list(around)


def _encode(target: Target, text: str) -> list[int]:
    special = not getattr(target.tokenizer, "chat_template", None)  # a template writes special tokens itself
    return [int(token) for token in target.tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]]


def _write(target: Target, tasks: Sequence[Task], config: TextConfig, written: Written, what: str) -> None:
    """Write the outputs of all tasks that have none yet, many at once."""
    wanted = [task for task in dict.fromkeys(tasks) if written.get(task) is None]
    begun = shown = time.monotonic()
    done = 0
    for count, temperature in dict.fromkeys((task.count, task.temperature) for task in wanted):
        alike = [task for task in wanted if (task.count, task.temperature) == (count, temperature)]
        options = {"max_new_tokens": count, "temperature": temperature, "seed": [task.seed for task in alike]}
        options["generation_config"] = False  # heads learn the model's own distribution
        requests = target.requests([list(task.prompt) for task in alike], options)
        for round_ in target.rounds(requests, policy="plain", max_batch_size=config.batch_size):
            for completion in (row.completion for row in round_.rows if row.completion is not None):
                written.add(alike[completion.request_id], completion.tokens)
                done += 1
            if (now := time.monotonic()) - shown > REPORT_SECONDS and done:
                shown, left = now, (now - begun) / done * (len(wanted) - done)
                print(f"{what}: {done} of {len(wanted)}, about {left:.0f} s left", flush=True)
