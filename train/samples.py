"""Texts that a model writes itself after prompts, its own or others.

A chat model's own prompts are user turns that it samples at temperature 1 after the beginning of one in its chat
template. `Write` is who writes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from selfspec.learning.written import Sample, Task, Written
from train.recipe import IGNORED
from train.sections import TextConfig

PLACE = "\N{OBJECT REPLACEMENT CHARACTER}"  # stands for the user's text in the chat template
REPORT_SECONDS = 10  # between lines about the texts written so far
Write = Callable[[Sequence[Task], Sequence[int]], Iterable[tuple[Task, list[int]]]]
"""Tasks of one batch, and tokens that end their outputs besides the model's own; returns the outputs by task."""


def document(sample: Sample, end: int) -> np.ndarray:
    """Tokens and labels, int64 `[2, T]`; only the answer has labels, and an end token is added if it was cut."""
    ended = sample.tokens[-1] == end
    both = np.asarray([sample.tokens if ended else [*sample.tokens, end]] * 2, dtype=np.int64)
    both[1, : sample.num_prompt] = IGNORED
    if not ended:
        both[1, -1] = IGNORED
    return both


@dataclass(frozen=True)
class UserTurn:
    """A chat template around the text of a first user turn."""

    tokenizer: Any
    before: str
    after: str

    @classmethod
    def of(cls, tokenizer: Any) -> UserTurn | None:
        """Take a tokenizer's chat template apart; None: it has none, or there is no tokenizer.

        Raises:
            ValueError: the template does not hold the user's text once.
        """
        if not getattr(tokenizer, "chat_template", None):
            return None
        messages = [{"role": "user", "content": PLACE}]
        parts = str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)).split(PLACE)
        if len(parts) != 2:
            raise ValueError(f"the chat template must have the user's text in one place, got {len(parts) - 1} places")
        return cls(tokenizer, *parts)

    @property
    def opening(self) -> list[int]:
        """The tokens before the user's text."""
        return self._encode(self.before)

    @property
    def ends(self) -> list[int]:
        """The token that closes the turn, if it is a token of its own."""
        return [token for token in self._encode(self.after)[:1] if token in self.tokenizer.added_tokens_decoder]

    def prompt(self, text: Sequence[int]) -> list[int]:
        """The tokens of a prompt whose user's text has these tokens; [] for an empty text."""
        own = [token for token in text if token not in self.ends]
        said = str(self.tokenizer.decode(own, skip_special_tokens=True)).strip()
        return self._encode(self.before + said + self.after) if said else []

    def _encode(self, text: str) -> list[int]:
        return [int(token) for token in self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]]


@dataclass(frozen=True)
class Writer:
    """Prompts and samples by their numbers. What has a number does not depend on how many there are.

    Args:
        written: what was written before, which is not written again; outputs are added.
    """

    config: TextConfig
    written: Written
    write: Write

    def prompts(self, openings: Sequence[list[int]], numbers: range, turn: UserTurn | None) -> list[list[int]]:
        """Continue the beginnings of prompts at temperature 1; [] for a prompt that is empty, or not written.

        Args:
            turn: whose text is sampled after its opening; None: prompts are the openings with their continuations.
        """
        count = self.config.prompt_tokens
        tasks = [Task(tuple(own), count, 1.0, self._seed(i) + 1) for own, i in zip(openings, numbers, strict=True)]
        texts = self._outputs(tasks, [] if turn is None else turn.ends)
        if turn is None:
            return [opening + text if text else [] for opening, text in zip(openings, texts, strict=True)]
        return [turn.prompt(text) for text in texts]

    def samples(self, prompts: Callable[[range], Sequence[list[int]]], seconds: float = 0.0) -> list[Sample | None]:
        """Answer prompts at the temperatures in turn; None where prompt or answer are empty, or not written.

        Args:
            prompts: gives the prompts with these numbers, batch after batch.
            seconds: no batch is begun after this time, except the first; 0: no limit.
        """
        config, begun, found = self.config, time.monotonic(), list[Sample | None]()
        count, warm, shown = config.num_held_out + config.num_texts, config.temperatures, begun
        while (first := len(found)) < count:
            if first and seconds and time.monotonic() - begun > seconds:
                print(f"text: {seconds:.0f} s are over, so {count - first} of {count} are left out", flush=True)
                break
            numbers = range(first, min(first + config.batch_size, count))
            own = prompts(numbers)
            tasks = [
                Task(tuple(prompt), config.max_new_tokens, float(warm[i % len(warm)]), self._seed(i))
                for prompt, i in zip(own, numbers, strict=True)
            ]
            outputs = zip(own, self._outputs(tasks), strict=True)
            found += [Sample(prompt + output, len(prompt)) if output else None for prompt, output in outputs]
            if (now := time.monotonic()) - shown > REPORT_SECONDS:
                shown, left = now, (now - begun) / len(found) * (count - len(found))
                print(f"text: {len(found)} of {count}, about {left:.0f} s left", flush=True)
        return found

    def _outputs(self, tasks: Sequence[Task], ends: Sequence[int] = ()) -> list[list[int]]:
        missing = self.written.missing([task for task in tasks if task.prompt])
        if missing:
            for task, tokens in self.write(missing, ends):
                self.written.add(task, tokens)
        return [self.written.get(task) for task in tasks]

    def _seed(self, number: int) -> int:
        return 2 * (self.config.seed * 1_000_003 + number)


def split(samples: Sequence[Sample | None], num_held_out: int) -> tuple[list[Sample], list[Sample]]:
    """Different samples to train on, and held-out ones, from the first `num_held_out`; they share no prompt."""
    held_out, train = (
        list({tuple(sample.tokens): sample for sample in part if sample is not None}.values())
        for part in (samples[:num_held_out], samples[num_held_out:])
    )
    known = {tuple(sample.prompt) for sample in held_out}
    return [sample for sample in train if tuple(sample.prompt) not in known], held_out
