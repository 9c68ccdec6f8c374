"""Conversations that a model writes itself: a user's turn sampled at temperature 1, and its own answer.

They are written in batches, a file each, so that a run that was stopped goes on with the next batch.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedTokenizerFast

from selfspec.files import write_whole
from train.config import TrainConfig
from train.config_file import plain
from train.generate import continue_prompts, end_tokens
from train.models import load_base
from train.recipe import IGNORED

FOLDER = "chats"  # in run.output
PLACE = "\N{OBJECT REPLACEMENT CHARACTER}"  # stands for the user's text in the chat template


class Chat(NamedTuple):
    """A conversation of one turn; its first `num_prompt` tokens are the prompt, the others are the answer."""

    tokens: list[int]
    num_prompt: int

    @property
    def prompt(self) -> list[int]:
        return self.tokens[: self.num_prompt]

    def document(self, end: int) -> np.ndarray:
        """Tokens and labels, int64 `[2, T]`; only the answer has labels, and an end token is added if it was cut."""
        ended = self.tokens[-1] == end
        both = np.asarray([self.tokens if ended else [*self.tokens, end]] * 2, dtype=np.int64)
        both[1, : self.num_prompt] = IGNORED
        if not ended:
            both[1, -1] = IGNORED
        return both


class UserTurn(NamedTuple):
    """The tokens of the chat template before and after the user's text, and those that end this text."""

    before: list[int]
    after: list[int]
    ends: list[int]


def user_turn(tokenizer: PreTrainedTokenizerFast, ends: list[int]) -> UserTurn:
    """Take the chat template apart around the text of a first user turn.

    Args:
        ends: the model's end-of-text tokens.

    Raises:
        ValueError: there is no chat template, or it does not hold the user's text once.
    """
    if not tokenizer.chat_template:
        raise ValueError("chats needs a tokenizer with a chat template; use an instruct model.base")
    messages = [{"role": "user", "content": PLACE}]
    parts = str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)).split(PLACE)
    if len(parts) != 2:
        raise ValueError(f"chats needs a chat template with the user's text in one place, got {len(parts) - 1} places")
    before, after = (list(tokenizer(part, add_special_tokens=False)["input_ids"]) for part in parts)
    closing = [token for token in after[:1] if token in tokenizer.added_tokens_decoder]
    return UserTurn(before, after, list(dict.fromkeys(closing + ends)))


def write_chats(config: TrainConfig, tokenizer: PreTrainedTokenizerFast, seconds: float = 0.0) -> None:
    """Write the batches of `chats` that are missing in `run.output`, by `model.base`.

    Args:
        seconds: no batch is begun after this time, except the first; 0: no limit.

    Raises:
        ValueError: the model cannot be loaded, or its tokenizer has no suitable chat template.
    """
    chats, begun = config.chats, time.monotonic()
    missing = [file for number in range(chats.num_batches) if not (file := _file(config, number)).is_file()]
    if not missing:
        return
    model = load_base(config).eval()
    model = model.to("cuda", torch.bfloat16) if torch.cuda.is_available() else model
    turn = user_turn(tokenizer, end_tokens(model))
    missing[0].parent.mkdir(parents=True, exist_ok=True)
    for done, file in enumerate(missing):
        spent = time.monotonic() - begun
        if done and seconds and spent > seconds:
            print(f"chats: {seconds:.0f} s are over, so {len(missing) - done} batches are left out", flush=True)
            return
        written = write_batch(model, turn, config, int(file.stem))
        lines = "".join(json.dumps(each._asdict()) + "\n" for each in written)
        write_whole(file, lambda stream, lines=lines: stream.write(lines.encode()))  # type: ignore[misc]
        left = (time.monotonic() - begun) / (done + 1) * (len(missing) - done - 1)
        print(f"chats: batch {done + 1} of {len(missing)}, about {left:.0f} s left", flush=True)


def write_batch(model: nn.Module, turn: UserTurn, config: TrainConfig, number: int) -> list[Chat]:
    """Write one batch of chats; it depends on `chats` and its number only. Empty turns and answers are left out."""
    chats, device = config.chats, next(model.parameters()).device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(chats.seed * 1_000_003 + number)
        openings = [turn.before] * chats.batch_size
        said = continue_prompts(model, openings, chats.max_prompt_tokens, [1.0] * chats.batch_size, turn.ends)
        texts = [[token for token in text if token not in turn.ends] for text in said]
        prompts = [turn.before + text + turn.after for text in texts if text]
        if not prompts:
            return []
        warm = [chats.temperatures[place % len(chats.temperatures)] for place in range(len(prompts))]
        answers = continue_prompts(model, prompts, chats.max_answer_tokens, warm)
    return [Chat(prompt + answer, len(prompt)) for prompt, answer in zip(prompts, answers, strict=True) if answer]


def read_chats(config: TrainConfig) -> tuple[list[Chat], list[Chat]]:
    """Read the chats that were written: those to train on, and the first `num_held_out` different ones.

    A chat whose prompt is held out is not trained on.

    Raises:
        ValueError: there are too few.
    """
    held_out: dict[tuple[int, ...], Chat] = {}
    train: list[Chat] = []
    for chat in _read(config):
        prompt = tuple(chat.prompt)
        if len(held_out) < config.chats.num_held_out:
            held_out.setdefault(prompt, chat)
        elif prompt not in held_out:
            train.append(chat)
    if not train:
        raise ValueError(
            f"chats gave {len(held_out)} different conversations, of which chats.num_held_out = "
            f"{config.chats.num_held_out} are held out and none is left to train on; raise chats.num_chats"
        )
    return train, list(held_out.values())


def _read(config: TrainConfig) -> Iterator[Chat]:
    for number in range(config.chats.num_batches):
        file = _file(config, number)
        if file.is_file():
            yield from (Chat(**json.loads(line)) for line in file.read_text("utf-8").splitlines())


def _file(config: TrainConfig, number: int) -> Path:
    """The file of a batch; its folder is another one for other settings, except for more chats."""
    about: dict[str, Any] = plain(config)["chats"] | {"base": config.model.base}
    del about["num_chats"], about["num_held_out"]
    key = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:8]
    return Path(config.run.output) / f"{FOLDER}-{key}" / f"{number:05}.jsonl"
