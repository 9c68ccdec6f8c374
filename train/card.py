"""The model card, from the configuration, the corpus and the measurements of a run."""

from __future__ import annotations

import platform
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml

from train.agreement import ExitQuality
from train.config import TrainConfig
from train.configuration import as_plain
from train.corpus import Corpus


@dataclass(frozen=True, slots=True)
class CardFacts:
    """The facts of a finished run."""

    config: TrainConfig
    command: str
    corpus: Corpus | None
    origin: str
    train_tokens: int
    held_out_tokens: int
    epoch_tokens: int
    steps: int
    parameters: int
    quality: ExitQuality
    exit_layer: int
    num_speculative_tokens: int
    samples: tuple[tuple[str, str], ...]
    shape: Any  # the model's config of transformers
    before: ExitQuality | None = None  # of model.base


def write_card(facts: CardFacts) -> str:
    """Return the model card as Markdown."""
    writers = (_opening, _data, _recipe, _quality, _samples, _licence)
    parts = [write(facts) for write in writers]
    return "\n\n".join(part.strip() for part in parts if part) + "\n"


def _paragraph(text: str, bullet: str = "") -> str:
    """Wrap text to the card's line length; the later lines of a bullet are indented."""
    return textwrap.fill(
        " ".join(text.split()),
        width=118,
        initial_indent=bullet,
        subsequent_indent=" " * len(bullet),
        break_long_words=False,
        break_on_hyphens=False,
    )


def _bullets(*items: str) -> str:
    return "\n".join(_paragraph(item, "- ") for item in items)


def _table(header: tuple[str, ...], rows: Iterable[tuple[object, ...]]) -> str:
    lines = [header, ("---",) * len(header), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def base_name(config: TrainConfig) -> str:
    """The base model as a card names it: a hub id, or the name of its folder; empty without one."""
    path = Path(config.model.base)
    return path.resolve().name if config.model.base and (path.is_absolute() or path.is_dir()) else config.model.base


def _start(config: TrainConfig) -> str:
    return f"continued from `{base_name(config)}`" if config.model.base else "trained from scratch"


def _opening(facts: CardFacts) -> str:
    config, shape = facts.config, facts.shape
    base, lora = base_name(config), config.lora
    start = _start(config)
    if lora.rank:
        start += f" by LoRA of rank {lora.rank}, {'merged into the weights' if lora.merge else 'as a PEFT adapter'}"
    what = _paragraph(
        f"""A causal language model with {facts.parameters:,} parameters ({shape.num_hidden_layers} layers, width
        {shape.hidden_size}, vocabulary {shape.vocab_size:,}), {start}, so that its early layers can already guess the
        next token. `generation_config.json` names what self-speculative decoding starts from: exit layer
        {facts.exit_layer} and draft length {facts.num_speculative_tokens}. Decoding is lossless with regard to this
        model, which differs from the one before this training."""
    )
    if config.run.card:
        return f"{Path(config.run.card).read_text('utf-8').strip()}\n\n{what}"
    tags = "---\nlibrary_name: {}\npipeline_tag: text-generation\ntags: [early-exit, layerskip, {}]\n{}---\n".format(
        "peft" if lora.rank and not lora.merge else "transformers",
        "self-speculative-decoding",
        f"base_model: {base}\n" if base else "",
    )
    return f"{tags}# A model that can leave early\n\n{what}"


def _data(facts: CardFacts) -> str:
    config, corpus = facts.config, facts.corpus
    held_out = f"{config.data.held_out_percent} percent of the texts, those with the lowest SHA-256"
    if config.text.num_texts:
        source = "conversations that it wrote itself, the loss on the answers alone"
        held_out = "conversations about other prompts"
    elif corpus is not None:
        source = f"{corpus.origin}, {len(corpus.train):,} files (SHA-256 of all paths and texts: `{corpus.sha256}`)"
        held_out = f"{len(corpus.held_out):,} files, by a hash of their paths; the tokenizer did not see them either"
    else:
        chats = f"conversations in the field `{config.data.messages_field}`, the loss on the assistant's tokens alone"
        texts = f"texts in the field `{config.data.text_field}`"
        source = f"`{facts.origin}`, {chats if config.data.messages_field else texts}"
    lines = _bullets(
        f"To train on: {source}; {facts.train_tokens:,} tokens, {facts.epoch_tokens:,} an epoch.",
        f"Held out: {held_out}; {facts.held_out_tokens:,} tokens.",
    )
    return f"## Data\n\n{lines}"


def _recipe(facts: CardFacts) -> str:
    run = facts.config.run
    step_tokens = run.tokens_per_batch * run.gradient_accumulation_steps
    text = _paragraph(
        f"""LayerSkip (arXiv 2404.16710), {_start(facts.config)}: losses at exits through the one final norm and head,
        and layers dropped at random. {facts.steps:,} steps of {step_tokens:,} tokens. Made with Python
        {platform.python_version()}, torch {torch.__version__}, transformers {transformers.__version__}. {run.notes}
        Rebuild with `{facts.command}`; the loss of every exit over the run is in `training.csv`. The configuration:"""
    )
    settings = as_plain(facts.config) | {"model": as_plain(facts.config)["model"] | {"base": base_name(facts.config)}}
    return f"## Recipe\n\n{text}\n\n```yaml\n{yaml.safe_dump(settings, sort_keys=False)}```"


def _quality(facts: CardFacts) -> str:
    quality, measured = facts.quality, facts.config.eval
    text = _paragraph(
        f"""Loss is nats per token on {quality.loss_tokens:,} held-out tokens. Agreement is how often the exit's most
        likely token is the whole model's, over {quality.agreement_tokens:,} tokens of the model's own greedy
        {_continued(facts)} ({measured.new_tokens} new tokens at most). Both with the shipped weights, computed in
        float32."""
    )
    head, columns = ["exit layer", "loss", "agreement"], [quality.loss, quality.agreement]
    if facts.before is not None:
        text += f"\n\nBefore: of `{base_name(facts.config)}`, on the same texts, along its own continuations."
        head, columns = (
            [*head, "loss before", "agreement before"],
            [*columns, facts.before.loss, facts.before.agreement],
        )
    rows = [
        (number, *(f"{value:.3f}" for value in values)) for number, values in enumerate(zip(*columns, strict=True), 1)
    ]
    return f"## Quality of every exit\n\n{text}\n\n{_table(tuple(head), rows)}"


def _continued(facts: CardFacts) -> str:
    measured = facts.config.eval
    if facts.config.text.num_texts:
        return "answers to held-out prompts"
    what = "code" if facts.corpus else "text"
    return f"continuations of {measured.prompt_tokens} tokens of held-out {what}"


def _samples(facts: CardFacts) -> str:
    if not facts.samples:
        return ""
    blocks = "\n\n".join(f"```python\n{prompt}{text}\n```" for prompt, text in facts.samples)
    return f"## Samples\n\nGreedy, cut at a fixed length; the first lines are the prompt.\n\n{blocks}"


def _licence(facts: CardFacts) -> str:
    base = base_name(facts.config)
    if facts.config.run.card or not facts.config.model.base:
        return ""
    return f"## Licence\n\nThe licence of `{base}` holds for these weights too."
