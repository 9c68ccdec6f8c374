"""The texts that exit heads are trained on: a model's continuations of prompts, its own unless files are named.

A chat model's own prompts are user turns that it samples after the beginning of one in its chat template.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import NamedTuple

from selfspec.target import Target
from train import heads_prompts
from train.heads_config import TextConfig
from train.heads_files import Task, Written
from train.sections import check

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


def gather_texts(target: Target, config: TextConfig, written: Written) -> tuple[list[Text], list[Text]]:
    """Texts to train on and held-out texts, from different records or different sampled prompts.

    Args:
        written: what the model wrote before, which is not written again; outputs are added.

    Raises:
        ValueError: prompts cannot be read or are too short, the model has no tokenizer for them, or its chat template
            does not show a user's text.
    """
    limit = target.stack.context_limit
    room = limit - config.max_new_tokens
    fits = room > config.prompt_tokens
    check(fits, "text.max_new_tokens", f"short enough for the model's {limit} positions", config.max_new_tokens)
    records = heads_prompts.read(config) if config.prompts else ([], [])
    parts = []
    for part, (own, count) in enumerate(zip(records, (config.num_texts, config.num_held_out), strict=True)):
        seed = _seed(config, part, 0)
        if config.prompts:
            prompts = heads_prompts.cut(target.tokenizer, own, count, config, room, seed)
        elif getattr(target.tokenizer, "chat_template", None):
            prompts = _user_turns(target, count, config, part, written)
        else:
            prompts = _openings(target, count, config, part, written)
        prompts = [prompt for prompt in prompts if len(prompt) <= room]
        parts.append(_texts(target, prompts, config, part, written))
    train = list({tuple(text.tokens): text for text in parts[0]}.values())  # a prompt may have been drawn twice
    known = {tuple(text.tokens) for text in train}
    held_out = [text for text in parts[1] if tuple(text.tokens) not in known]
    if not count_positions(held_out):
        raise ValueError(
            "text gives nothing to hold out: the held-out texts are empty or those trained on; "
            "raise text.num_held_out, text.prompt_tokens or text.max_new_tokens"
        )
    return train, held_out


def _seed(config: TextConfig, part: int, index: int) -> int:
    return 2 * (config.seed * 1_000_003 + index) + part


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


def _sampled(
    target: Target, begin: list[list[int]], config: TextConfig, part: int, written: Written
) -> list[list[int]]:
    """Up to `prompt_tokens` tokens at temperature 1 after each beginning, without end-of-text tokens."""
    first = config.num_texts + config.num_held_out  # seeds of texts come before it
    tasks = [Task(tuple(own), config.prompt_tokens, 1.0, _seed(config, part, first + i)) for i, own in enumerate(begin)]
    _write(target, tasks, config, written, ("prompts", "held-out prompts")[part])
    return [[token for token in written.get(task) or [] if token not in target.eos_token_ids] for task in tasks]


def _user_turns(target: Target, count: int, config: TextConfig, part: int, written: Written) -> list[list[int]]:
    """Prompts of a chat model: user turns of its own, in its chat template. Empty turns are left out."""
    tokenizer = target.tokenizer
    messages = [{"role": "user", "content": MARK}]
    around = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True).split(MARK)
    if len(around) != 2:
        raise ValueError("the model's chat template does not show a user's text once; name files in text.prompts")

    def encode(text: str) -> list[int]:
        return [int(token) for token in tokenizer(text, add_special_tokens=False)["input_ids"]]

    turns = _sampled(target, [encode(around[0])] * count, config, part, written)
    texts = [tokenizer.decode(turn, skip_special_tokens=True).strip() for turn in turns]
    return [encode(text.join(around)) for text in texts if text]


def _openings(target: Target, count: int, config: TextConfig, part: int, written: Written) -> list[list[int]]:
    """Prompts of a model without a chat template: the beginning-of-text token, and a few tokens sampled after it."""
    numbers = random.Random(_seed(config, part, 0))
    vocabulary, begin = target.stack.vocab_size, getattr(target.stack.config, "bos_token_id", None)
    starts = [[numbers.randrange(vocabulary) if begin is None else int(begin)] for _ in range(count)]
    if not config.prompt_tokens:
        return starts
    turns = _sampled(target, starts, config, part, written)
    return [start + turn for start, turn in zip(starts, turns, strict=True)]


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
