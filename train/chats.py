"""Conversations of one turn that `model.base` writes itself, in batches."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast

from selfspec.errors import UnsupportedModelError
from selfspec.learning.workload import write
from selfspec.learning.written import Sample, Written
from selfspec.llm import LLM
from selfspec.loading.target import Target
from train.config import TrainConfig
from train.samples import UserTurn, Write, Writer, split

FILE = "chats.jsonl"  # in run.output


def write_chats(config: TrainConfig, tokenizer: PreTrainedTokenizerFast, seconds: float = 0.0) -> None:
    """Write the conversations that are missing in `run.output`.

    Args:
        seconds: no batch is begun after this time, except the first; 0: no limit.

    Raises:
        ValueError: the model cannot be loaded, or its tokenizer has no suitable chat template.
    """

    @cache
    def target() -> Target:
        dtype = "bfloat16" if torch.cuda.is_available() else "float32"
        try:
            return LLM(config.model.base, dtype=dtype, exit_heads="none").target
        except (OSError, UnsupportedModelError) as error:
            raise ValueError(f"model.base {config.model.base!r} cannot be loaded: {error}") from error

    _chats(config, tokenizer, lambda tasks, ends: write(target(), tasks, ends), seconds)


def read_chats(config: TrainConfig, tokenizer: PreTrainedTokenizerFast) -> tuple[list[Sample], list[Sample]]:
    """Read the conversations that were written: those to train on, and those of other prompts that are held out.

    Raises:
        ValueError: there are too few.
    """
    train, held_out = split(_chats(config, tokenizer, lambda tasks, ends: ()), config.text.num_held_out)
    if not (train and held_out):
        raise ValueError(
            f"text gave {len(train)} conversations to train on and {len(held_out)} to hold out; raise text.num_texts"
        )
    return train, held_out


def _chats(
    config: TrainConfig, tokenizer: PreTrainedTokenizerFast, write: Write, seconds: float = 0.0
) -> list[Sample | None]:
    turn = UserTurn.of(tokenizer)
    if turn is None:
        raise ValueError("text needs a tokenizer with a chat template; use an instruct model.base")
    writer = Writer(config.text, Written(Path(config.run.output) / FILE, config.model.base), write)
    opening = turn.opening
    return writer.samples(lambda numbers: writer.prompts([opening] * len(numbers), numbers, turn), seconds)
