"""The card and the loss table of exit heads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import yaml

from selfspec import __version__
from selfspec.files import write_whole
from selfspec.model.exit_heads import FILE
from train.configuration import as_plain
from train.heads_config import HeadsRun
from train.heads_loss import Agreement

CARD, CURVE = "exit_heads.md", "exit_heads.csv"


@dataclass(frozen=True, slots=True)
class Facts:
    """The facts of a finished run."""

    config: HeadsRun
    command: str
    weights: str
    seconds: float
    steps: int
    inner_size: int
    draft_vocab: int | None
    parameters: int
    num_layers: int
    device: str
    trained_on: int
    measured_on: int
    agreement: Mapping[int, tuple[Agreement, Agreement]]
    curve: Sequence[Sequence[float]]


def table(agreement: Mapping[int, tuple[Agreement, Agreement]]) -> list[str]:
    """The lines of a Markdown table: agreement of every exit with the whole model, before and after training."""
    lines = [
        "| exit | same token, before | after | sum min(p, q), before | after |",
        "| ---: | ---: | ---: | ---: | ---: |",
    ]
    for layer, (before, after) in agreement.items():
        cells = (before.top1, after.top1, before.accepted, after.accepted)
        lines.append(f"| {layer} | " + " | ".join(f"{cell:.3f}" for cell in cells) + " |")
    return lines


def card(facts: Facts) -> str:
    """The card as Markdown."""
    wanted = facts.config.heads
    over = "the whole vocabulary" if facts.draft_vocab is None else f"the {facts.draft_vocab:,} most frequent tokens"
    settings = yaml.safe_dump(as_plain(facts.config), sort_keys=False).strip()
    lines = [
        f"# Exit heads for {wanted.model}",
        "",
        f"`{FILE}` holds small blocks for early exits of a model with {facts.num_layers} layers (weights",
        f"`{facts.weights}`): x + down(silu(gate(norm(x))) * up(norm(x))) of inner width {facts.inner_size:,} between",
        f"an exit's hidden states and the model's own norm and head, {facts.parameters:,} parameters in all. They",
        "change drafts only. The model does not change, and verification does not use them.",
        "",
        "## Agreement of the exits with the whole model",
        "",
        f"On {facts.measured_on:,} held-out tokens that the model wrote itself, drafts over {over}.",
        "The first pair is the share of equal greedy picks, the second the acceptance rate of drafts sampled at",
        "temperature 1.",
        "",
        *table(facts.agreement),
        "",
        "## How they were made",
        "",
        f"- Command: `{facts.command}`" if facts.command else "- Command: none, called from Python",
        f"- {facts.steps:,} steps on {facts.trained_on:,} tokens, {facts.seconds:.0f} seconds in all, text included",
        f"- {facts.device}; selfspec {__version__}, torch {torch.__version__}",
        f"- Loss of every exit by step: `{CURVE}`",
        "",
        "```yaml",
        settings,
        "```",
    ]
    return "\n".join(lines) + "\n"


def write_card(folder: Path, facts: Facts) -> None:
    """Write `exit_heads.md` and `exit_heads.csv`.

    Raises:
        OSError: they cannot be written.
    """
    header = ",".join(["step", "learning_rate", *(f"loss_exit_{layer}" for layer in facts.agreement)])
    rows = [f"{int(step)}," + ",".join(f"{value:.6g}" for value in values) for step, *values in facts.curve]
    write_whole(folder / CURVE, lambda file: file.write(("\n".join([header, *rows]) + "\n").encode()))
    write_whole(folder / CARD, lambda file: file.write(card(facts).encode()))
