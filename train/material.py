"""The data of a run: tokenizer, documents to train on, held-out documents."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerFast

from selfspec.loading import hub
from train.chats import read_chats
from train.config import TrainConfig
from train.corpus import Corpus, SourceFile, read_corpus
from train.data import Windows, encode_files, pack
from train.samples import document
from train.texts import content_of, encode, read_records, split_held_out
from train.tokenizer import train_tokenizer


@dataclass(frozen=True, slots=True)
class Material:
    """The data of a run; documents are tokens `[T]`, or tokens and labels `[2, T]`, int64."""

    tokenizer: PreTrainedTokenizerFast
    train: tuple[np.ndarray, ...]
    held_out: tuple[np.ndarray, ...]
    origin: str
    corpus: Corpus | None = None
    prompts: tuple[list[int], ...] = ()  # those of held-out chats


def repeat_library(files: tuple[SourceFile, ...], library_repeat: int) -> list[SourceFile]:
    """Repeat files that are not tests `library_repeat` times, to balance the corpus."""
    return [file for file in files for _ in range(1 if file.is_test else library_repeat)]


def make_tokenizer(config: TrainConfig, corpus: Corpus) -> PreTrainedTokenizerFast:
    """Train the tokenizer on the files to train on."""
    texts = [file.text for file in repeat_library(corpus.train, config.corpus.library_repeat)]
    return train_tokenizer(texts, config.model.vocab_size, config.model.max_position_embeddings)


def load_tokenizer(name: str | Path) -> PreTrainedTokenizerFast:
    """Load the tokenizer of a base model or of a checkpoint.

    Raises:
        ValueError: there is none, or it has no end-of-text token.
    """
    try:
        tokenizer: Any = hub.open_tokenizer(name)
    except Exception as error:  # the hub and every tokenizer family have errors of their own
        raise ValueError(f"model.base {str(name)!r} has no tokenizer that can be loaded ({error})") from error
    if tokenizer is None:
        raise ValueError(f"model.base {str(name)!r} has no tokenizer; add one to its folder")
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"the tokenizer of model.base {str(name)!r} must have an end-of-text token to put between texts"
        )
    return tokenizer


def gather(config: TrainConfig, tokenizer: PreTrainedTokenizerFast | None = None) -> Material:
    """Read the data of a run; the tokenizer is loaded or trained unless given.

    Raises:
        ValueError: the data cannot be read, or there is nothing to train on or to hold out. Chats must have been
            written.
    """
    if config.model.base and tokenizer is None:
        tokenizer = load_tokenizer(config.model.base)
    if config.text.num_texts and tokenizer:
        return _chats(config, tokenizer)
    if config.data.path:
        return _texts(config, tokenizer)
    corpus = read_corpus(config.corpus)
    tokenizer = tokenizer or make_tokenizer(config, corpus)
    train = encode_files(tokenizer, repeat_library(corpus.train, config.corpus.library_repeat))
    return Material(tokenizer, tuple(train), tuple(encode_files(tokenizer, corpus.held_out)), corpus.origin, corpus)


def _chats(config: TrainConfig, tokenizer: PreTrainedTokenizerFast) -> Material:
    train, held_out = read_chats(config, tokenizer)
    end = int(tokenizer.eos_token_id)
    documents, kept = (tuple(document(chat, end) for chat in chats) for chats in (train, held_out))
    origin = "the base model's own conversations"
    prompts = tuple(chat.prompt for chat in held_out)
    return Material(tokenizer, documents, (pack(kept, config.run.seed),), origin, prompts=prompts)


def _texts(config: TrainConfig, tokenizer: PreTrainedTokenizerFast | None) -> Material:
    data = config.data
    train, held_out = split_held_out(list(_contents(config)), data.held_out_percent)
    shape = config.model
    tokenizer = tokenizer or train_tokenizer(train, shape.vocab_size, shape.max_position_embeddings)
    encoded = tuple(encode(tokenizer, content, data.max_length) for content in train)
    kept = [encode(tokenizer, content, data.max_length) for content in held_out]
    # Texts may be shorter than a window of evaluation, so held-out texts are concatenated.
    return Material(tokenizer, encoded, (pack(kept, config.run.seed),), data.path)


def _contents(config: TrainConfig) -> Iterator[Any]:
    """Yield texts, or lists of messages, without empty ones."""
    for record in read_records(config.data):
        content = content_of(record, config.data)
        if content.strip() if isinstance(content, str) else content:
            yield content


def make_windows(config: TrainConfig, material: Material) -> Dataset[Tensor]:
    """Make the batches of the whole run."""
    run = config.run
    stream = pack(material.train, run.seed)
    print(f"data: {material.origin}, {len(material.train)} documents, {stream.shape[-1]:,} tokens an epoch", flush=True)
    num_batches = run.max_steps * run.gradient_accumulation_steps
    return Windows(stream, run.windows, run.tokens_per_batch, num_batches, run.gradient_accumulation_steps, run.seed)
