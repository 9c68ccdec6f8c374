"""Measure a finished run and write its model folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedTokenizerFast

from train.agreement import ExitQuality
from train.card import CardFacts, write_card
from train.checkpoints import newest_checkpoint
from train.config import TrainConfig
from train.data import encode_files
from train.export import best_exit, export_model, read_history, store_exit, write_curve
from train.generate import continue_prompts
from train.material import Material, gather, load_tokenizer
from train.quality import base_quality, measure

SAMPLE_PROMPTS = (
    "class SplitModel:\n    def __init__(self):\n",
    "def read_lines(path):\n",
    "import os\nimport sys\n\ndef main():\n",
)


def release(config: TrainConfig, command: str) -> ExitQuality:
    """Export the newest checkpoint to `run.export` with its model card, training curve and best exit.

    Raises:
        ValueError: `run.export` is empty, or `run.output` holds no checkpoint.
    """
    if not config.run.export:
        raise ValueError("run.export must name a folder to export to, got ''")
    folder, checkpoint = Path(config.run.export), newest_checkpoint(config.run.output)
    tokenizer = load_tokenizer(checkpoint)
    material = gather(config, tokenizer)
    before = None
    try:
        before = base_quality(config, material)  # first, since the export folder may be that of the base model
    except ValueError as gone:
        print(f"the card has no figures of model.base: {gone}", flush=True)
    model = export_model(config, checkpoint, folder, tokenizer)
    if torch.cuda.is_available():
        model = model.cuda()
    quality = measure(model, material, config)
    chosen = best_exit(model, quality.agreement)
    exit_layer, num_speculative_tokens = (
        config.run.exit_layer or chosen[0],
        config.run.num_speculative_tokens or chosen[1],
    )
    store_exit(model, folder, exit_layer, num_speculative_tokens)
    prompts = SAMPLE_PROMPTS if material.corpus else ()
    facts = CardFacts(
        config=config,
        command=command,
        corpus=material.corpus,
        origin=material.origin,
        train_tokens=train_tokens(material),
        held_out_tokens=count(material.held_out),
        epoch_tokens=count(material.train) + 1,
        steps=int(checkpoint.name.rpartition("-")[2]),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        quality=quality,
        shape=model.config,
        before=before,
        exit_layer=exit_layer,
        num_speculative_tokens=num_speculative_tokens,
        samples=tuple((each, continue_greedily(model, tokenizer, each, 72)) for each in prompts),
    )
    write_curve(read_history(checkpoint), folder / "training.csv")
    (folder / "README.md").write_text(write_card(facts), "utf-8")
    for path in folder.iterdir():
        if path.is_file():
            path.chmod(0o644)
    return quality


def train_tokens(material: Material) -> int:
    """The number of tokens to train on, each text counted once."""
    if material.corpus is None:
        return count(material.train)
    return count(encode_files(material.tokenizer, material.corpus.train))


def count(documents: Sequence[np.ndarray]) -> int:
    """The number of tokens in all documents, end-of-text tokens included."""
    return sum(document.shape[-1] for document in documents)


def continue_greedily(model: nn.Module, tokenizer: PreTrainedTokenizerFast, prompt: str, new_tokens: int) -> str:
    """The model's greedy continuation of a prompt as text."""
    (text,) = continue_prompts(model, [tokenizer(prompt)["input_ids"]], new_tokens)
    return str(tokenizer.decode(text, skip_special_tokens=True))
