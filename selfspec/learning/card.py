"""The card of exit heads: what they are, what they gain, and how they were made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from selfspec.files import write_whole
from selfspec.model.exit_heads import FILE, ExitHeads
from selfspec.version import __version__

CARD = "exit_heads.md"
PLAIN, WITHOUT, WITH = "plain", "adaptive", "adaptive with the heads"


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """What `LLM.tune` found, measured on prompts that were held out."""

    heads: ExitHeads
    """The trained heads, one for each exit that was chosen."""
    agreement: Mapping[int, tuple[float, float]]
    """By exit that was tried: the share of greedy picks that are the model's, before and after its training."""
    by_position: Sequence[float] = ()
    """The share of right tokens at each place of a draft, where all before it were right."""
    speeds: Mapping[str, float] = field(default_factory=dict)
    """Tokens per second of `plain`, `adaptive` and `adaptive with the heads`, one prompt at a time; empty: the run was
    stopped before it measured."""
    gains: bool = False
    """Whether the heads are faster than `adaptive` without them."""
    reason: str = ""
    """Why nothing is gained, in a sentence."""
    num_answers: int
    num_tokens: int
    """Answers and their tokens that the heads learned from."""
    num_held_out: int
    """Prompts that were measured with."""
    num_different: int = 0
    """Measured answers that were not those of plain decoding: near-ties of half precision; else 0."""
    draft_vocab: int | None
    """Size of the draft vocabulary; None: all."""
    steps: int
    seconds: float
    """Seconds of the whole run, those before a stop included."""
    folder: Path | None = None
    """Where the heads were written; None: they were not."""

    @property
    def exits(self) -> tuple[int, ...]:
        """The exit layers that have heads."""
        return self.heads.layers


def table(tuned: Tuned) -> list[str]:
    """The lines of a Markdown table of speeds; empty if nothing was measured."""
    if not tuned.speeds:
        return []
    plain = tuned.speeds[PLAIN]
    lines = ["| | tokens/s | over plain |", "| --- | ---: | ---: |"]
    return lines + [f"| {name} | {speed:.1f} | {speed / plain:.2f} |" for name, speed in tuned.speeds.items()]


def card(tuned: Tuned, model: str, num_layers: int, device: str) -> str:
    """The card as Markdown."""
    heads, over = tuned.heads, "the whole vocabulary"
    if tuned.draft_vocab is not None:
        over = f"the {tuned.draft_vocab:,} most frequent tokens of the answers"
    lines = [
        f"# Exit heads for {model}",
        "",
        f"`{FILE}` holds small blocks for early exits of a model with {num_layers} layers (weights",
        f"`{heads.weights}`): x + down(silu(gate(z)) * up(z)) of inner width {heads.inner_size:,} between an exit's",
        "hidden states x and the model's own norm and head, where z is [norm(x), norm(the model's final state one",
        "token before)]. They change drafts only. The model does not change, and verification does not use them.",
        "",
        f"## Measured on {tuned.num_held_out} held-out prompts",
        "",
        *(table(tuned) or ["The run was stopped before it measured speeds."]),
        "",
        f"Drafts over {over}. Share of greedy picks that are the model's:",
        "",
        "| exit | without a head | with |",
        "| ---: | ---: | ---: |",
        *[f"| {layer} | {before:.3f} | {after:.3f} |" for layer, (before, after) in tuned.agreement.items()],
        "",
        f"Exit {', '.join(map(str, tuned.exits))} was kept: the others were trained for a short trial.",
    ]
    if tuned.by_position:
        places = ", ".join(f"{share:.3f}" for share in tuned.by_position)
        lines.append(f"By place in a draft, all tokens before it being right: {places}.")
    if tuned.speeds and not tuned.gains:
        lines.append(f"Nothing is gained: {tuned.reason}.")
    lines += [
        "",
        "## How they were made",
        "",
        f"- `selfspec tune`: {tuned.num_answers:,} answers by the model itself with {tuned.num_tokens:,} tokens,",
        f"  {tuned.steps:,} steps of training, {tuned.seconds:.0f} seconds in all",
        f"- {device}; selfspec {__version__}, torch {torch.__version__}",
    ]
    return "\n".join(lines) + "\n"


def write_card(folder: Path, text: str) -> None:
    """Write `exit_heads.md`.

    Raises:
        OSError: it cannot be written.
    """
    write_whole(folder / CARD, lambda file: file.write(text.encode()))
