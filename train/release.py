"""Measure a finished run and write the folder that ships."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from train.agreement import ExitQuality, greedy, measure_exits
from train.card import CardFacts, write_card
from train.config import TrainConfig
from train.corpus import read_corpus
from train.data import encode_files
from train.export import export_model, newest_checkpoint, read_history, write_curve
from train.run import weighted

SAMPLE_PROMPTS = (
    "class Stack:\n    def __init__(self):\n",
    "def read_lines(path):\n",
    "import os\nimport sys\n\ndef main():\n",
)


def release(config: TrainConfig, command: str) -> ExitQuality:
    """Export the newest checkpoint to `run.export` with its model card and training curve.

    Raises:
        ValueError: `run.export` is empty, or `run.output` holds no checkpoint.
    """
    if not config.run.export:
        raise ValueError("run.export must name a folder to export to, got ''")
    folder, checkpoint = Path(config.run.export), newest_checkpoint(config.run.output)
    model = export_model(checkpoint, folder)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    corpus = read_corpus(config.corpus)
    held_out = encode_files(tokenizer, corpus.held_out)
    quality = measure_exits(model, held_out, config.eval)
    facts = CardFacts(
        config=config,
        command=command,
        corpus=corpus,
        train_tokens=count(encode_files(tokenizer, corpus.train)),
        held_out_tokens=count(held_out),
        epoch_tokens=count(encode_files(tokenizer, weighted(corpus.train, config.corpus.library_repeat))) + 1,
        steps=int(checkpoint.name.rpartition("-")[2]),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        quality=quality,
        samples=tuple((prompt, continue_greedily(model, tokenizer, prompt, 72)) for prompt in SAMPLE_PROMPTS),
    )
    (folder / "README.md").write_text(write_card(facts), "utf-8")
    write_curve(read_history(checkpoint), folder / "training.csv")
    return quality


def count(documents: Sequence[np.ndarray]) -> int:
    """Return the number of tokens in all documents, their end-of-text tokens included."""
    return sum(len(document) for document in documents)


def continue_greedily(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, prompt: str, new_tokens: int) -> str:
    """Return the model's greedy continuation of a prompt as text."""
    tokens = tokenizer(prompt, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        text, _ = greedy(model, tokens, new_tokens)
    return str(tokenizer.decode(text[0, tokens.shape[1] :], skip_special_tokens=True))
