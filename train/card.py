"""The model card, from the configuration, the corpus and the measurements of a run."""

from __future__ import annotations

import math
import platform
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from train.agreement import ExitQuality
from train.config import TrainConfig
from train.corpus import Corpus
from train.sections import ExitConfig


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
    writers = (_opening, _data, _recipe, _quality, _whole_model, _samples, _licence)
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


def _opening(facts: CardFacts) -> str:
    config, shape = facts.config, facts.shape
    base, lora = base_name(config), config.lora
    start = f"continued from `{base}`" if base else "trained from scratch"
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


def _chat_data(facts: CardFacts) -> str:
    text = facts.config.text
    lines = _bullets(
        f"""Source: {facts.origin}. A user's turn of at most {text.prompt_tokens} tokens is sampled at temperature
        1 after the beginning of the chat template; the answer of at most {text.max_new_tokens} tokens is written
        at the temperatures {", ".join(f"{each:g}" for each in text.temperatures)} in turn; seed {text.seed}.""",
        f"""Held out: {text.num_held_out} conversations ({facts.held_out_tokens:,} tokens); none of their prompts is
        trained on.""",
        f"""To train on: {facts.train_tokens:,} tokens an epoch, the loss on the answers alone. Conversations are packed
        into windows, an end-of-text token between them.""",
    )
    return f"## Data\n\n{lines}"


def _text_data(facts: CardFacts) -> str:
    data = facts.config.data
    kind = f"conversations in the field `{data.messages_field}`, the loss on the assistant's tokens alone"
    lines = _bullets(
        f"Source: `{facts.origin}`, {kind if data.messages_field else f'texts in the field `{data.text_field}`'}.",
        f"Held out: {data.held_out_percent} percent of the texts, those with the lowest SHA-256; "
        f"{facts.held_out_tokens:,} tokens of them were kept.",
        f"To train on: {facts.train_tokens:,} tokens an epoch." if facts.train_tokens else "To train on: a stream.",
        "Texts are packed into windows, an end-of-text token between them."
        + (f" Longer texts are cut after {data.max_length} tokens." if data.max_length else ""),
    )
    return f"## Data\n\n{lines}"


def _data(facts: CardFacts) -> str:
    corpus, config = facts.corpus, facts.config.corpus
    if facts.config.text.num_texts:
        return _chat_data(facts)
    if corpus is None:
        return _text_data(facts)
    source = _paragraph(
        f"""Source: {corpus.origin}, every `.py` file except paths with a part among {", ".join(config.skip)}, files
        that are not UTF-8 or contain a zero byte, and files above {config.max_chars:,} characters."""
    )
    rows = [
        (name, f"{len(files):,}", f"{sum(file.is_test for file in files):,}", f"{chars:,}", f"{tokens:,}")
        for name, files, tokens in (
            ("train", corpus.train, facts.train_tokens),
            ("held out", corpus.held_out, facts.held_out_tokens),
        )
        for chars in [sum(len(file.text) for file in files)]
    ]
    table = _table(("part", "files", "of these tests", "characters", "tokens"), rows)
    details = _bullets(
        f"""Held out are the files for which the first four bytes of the SHA-256 of the relative path, read as a
        big-endian number modulo 10,000, are below {config.held_out_percent * 100:.0f}. The tokenizer did not see them
        either.""",
        f"""Code that is no test is repeated {config.library_repeat} times, so an epoch has {facts.epoch_tokens:,}
        tokens.""",
        f"SHA-256 of all paths and texts: `{corpus.sha256}`",
    )
    return f"## Data\n\n{source}\n\n{table}\n\n{details}"


def _recipe(facts: CardFacts) -> str:
    exits, run = facts.config.exits, facts.config.run
    step_tokens = run.tokens_per_batch * run.gradient_accumulation_steps
    seen = facts.steps * step_tokens
    epochs = f"{seen / facts.epoch_tokens:.2f} epochs, " if facts.epoch_tokens else ""
    steps = _bullets(
        _exits(exits),
        _targets(exits),
        f"""Layer dropout per sequence, exponential over depth up to {exits.dropout_max}, without
        rescaling{", growing over the run" if exits.dropout_ramp else ""}.""",
        _optimizer(facts),
        f"""{facts.steps:,} steps of {step_tokens:,} tokens: {seen:,} tokens,
        {epochs}in windows of {_windows(run.windows)} tokens;
        {"bfloat16 autocast" if run.bf16 else "float32"}; seed {run.seed}.""",
    )
    made = _paragraph(
        f"""Made with Python {platform.python_version()}, torch {torch.__version__}, transformers
        {transformers.__version__}. {run.notes}"""
    )
    start = f"continued from `{base_name(facts.config)}`" if facts.config.model.base else "from scratch"
    return (
        f"## Recipe\n\nLayerSkip (arXiv 2404.16710), {start}.\n\n{steps}\n\n{made}\n\n"
        f"Rebuild with `{facts.command}`. The loss of every exit over the run is in `training.csv`."
    )


def _exits(exits: ExitConfig) -> str:
    which = {
        "rotational": f"one layer in {exits.period}, shifted by one each step, and always the last",
        "gradual": "the last layer, then one earlier layer after another, all of them from the middle of the run on",
        "all": "all layers",
    }[exits.curriculum]
    return f"""Losses at exits through the one final norm and head: {which}; weights {exits.weights}, those of early
        exits times {exits.scale}, normalised."""


def _targets(exits: ExitConfig) -> str:
    of_base = exits.teacher == "base"
    who, teacher = ("every exit", "the base model's") if of_base else ("an early exit", "the last layer's")
    return f"""The target of {who} is {exits.distill:.0%} {teacher} distribution (arXiv 1905.08094) and
        {1 - exits.distill:.0%} the text's next token."""


def _optimizer(facts: CardFacts) -> str:
    optim = facts.config.optim
    which = f"AdamW (learning rate {optim.adamw_lr})"
    if optim.kind == "muon":
        which = f"Muon for the layers' matrices (learning rate {optim.muon_lr}), AdamW for the rest ({optim.adamw_lr})"
    return f"""{which}, weight decay {optim.weight_decay}; {optim.warmup_steps} steps of warmup, linear decay to zero
        over the last {optim.decay_fraction:.0%} of the steps."""


def _windows(lengths: tuple[int, ...]) -> str:
    return " and ".join(f"{length} ({lengths.count(length)} of {len(lengths)})" for length in sorted(set(lengths)))


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


def _whole_model(facts: CardFacts) -> str:
    """Figures of the whole model: whether the training did it harm."""
    after, before = facts.quality, facts.before
    rows: list[tuple[str, str, str]] = []

    def add(name: str, value: Callable[[ExitQuality], str]) -> None:
        rows.append((name, "" if before is None else value(before), value(after)))

    if facts.config.text.num_texts:
        what = f"perplexity of the base model's held-out answers ({after.loss_tokens:,} tokens)"
        add(what, lambda found: f"{math.exp(found.loss[-1]):.3f}")
    if after.docstring_tokens:
        python = f"{platform.python_implementation()} {platform.python_version()}"
        what = f"perplexity of docstrings of the standard library, {python} ({after.docstring_tokens:,} tokens)"
        add(what, lambda found: f"{math.exp(found.docstring_loss[-1]):.3f}")
    if after.gsm8k_questions:
        what = f"GSM8K, zero-shot, greedy, right answers of {after.gsm8k_questions:,}"
        add(what, lambda found: f"{round(found.gsm8k * found.gsm8k_questions)} ({found.gsm8k:.1%})")
    return f"## Quality of the whole model\n\n{_table(('', 'before', 'after'), rows)}" if rows else ""


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
