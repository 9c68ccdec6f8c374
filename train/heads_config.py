"""What a run for exit heads is made of: sections `heads`, `text` and `training`; each key is told in configs/train."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from train.config import check_keys, read_yaml, section_of
from train.sections import check

WITHOUT_EFFECT = ("heads.output", "training.save_steps", "training.log_steps", "training.lr")
"""Keys that may differ when a run goes on: a run that stopped at a loss of NaN may go on with a lower lr."""


@dataclass(frozen=True, slots=True)
class HeadsConfig:
    """Which model gets exit heads, after which of its layers, of which inner width, and where the file goes."""

    model: str = "demo"
    device: str = ""
    dtype: str = ""
    exits: tuple[int, ...] = ()
    rank: int = 64
    output: str = ""

    def __post_init__(self) -> None:
        check(bool(self.model), "heads.model", "demo, a folder or a hub id", self.model)
        check(min(self.exits, default=1) >= 1, "heads.exits", "a list of layer counts from 1", list(self.exits))
        check(self.rank >= 1, "heads.rank", "at least 1", self.rank)


@dataclass(frozen=True, slots=True)
class TextConfig:
    """What the heads learn from: text that the model writes itself, after prompts or from its beginning of text."""

    prompts: tuple[str, ...] = ()
    field: str = "text"
    prompt_tokens: int = 16
    learn_prompts: bool = True
    num_texts: int = 512
    num_held_out: int = 64
    held_out_percent: float = 3.0
    max_new_tokens: int = 128
    temperatures: tuple[float, ...] = (0.0, 1.0)
    batch_size: int = 32
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("num_texts", "num_held_out", "batch_size"):
            check(getattr(self, name) >= 1, f"text.{name}", "at least 1", getattr(self, name))
        for name in ("prompt_tokens", "max_new_tokens", "seed"):
            check(getattr(self, name) >= 0, f"text.{name}", "at least 0", getattr(self, name))
        percent, warm = self.held_out_percent, self.temperatures
        check(0 < percent < 100, "text.held_out_percent", "between 0 and 100", percent)
        check(bool(warm) and min(warm) >= 0, "text.temperatures", "a list of temperatures from 0", list(warm))
        own = not self.prompts
        check(not own or self.max_new_tokens > 0, "text.max_new_tokens", "above 0 without text.prompts", 0)
        # A greedy text has no choice but its beginning: without an opening of its own all would be the same.
        varied = not own or self.prompt_tokens > 0 or min(warm) > 0
        check(varied, "text.prompt_tokens", "above 0 where greedy texts have no text.prompts", self.prompt_tokens)
        given = self.max_new_tokens > 0 or self.learn_prompts
        check(given, "text.learn_prompts", "true where text.max_new_tokens is 0", self.learn_prompts)


@dataclass(frozen=True, slots=True)
class TrainingConfig:
    """How long, how fast, and towards which loss the heads are trained."""

    steps: int = 2000
    epochs: float = 0.0
    tokens_per_batch: int = 1024
    lr: float = 3e-3
    weight_decay: float = 0.01
    warmup_steps: int = 50
    max_grad_norm: float = 1.0
    top_k: int = 64
    acceptance: float = 0.0
    kl_warmup: float = 0.5
    ema: float = 0.0
    max_cached_tokens: int = 200_000
    save_steps: int = 500
    log_steps: int = 50
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "tokens_per_batch", "max_cached_tokens", "save_steps", "log_steps"):
            check(getattr(self, name) >= 1, f"training.{name}", "at least 1", getattr(self, name))
        for name in ("epochs", "weight_decay", "warmup_steps", "top_k", "seed"):
            check(getattr(self, name) >= 0, f"training.{name}", "at least 0", getattr(self, name))
        for name in ("lr", "max_grad_norm"):
            check(getattr(self, name) > 0, f"training.{name}", "positive", getattr(self, name))
        for name in ("acceptance", "kl_warmup"):
            check(0 <= getattr(self, name) <= 1, f"training.{name}", "between 0 and 1", getattr(self, name))
        check(0 <= self.ema < 1, "training.ema", "at least 0 and below 1", self.ema)
        fits, least = self.max_cached_tokens >= self.tokens_per_batch, f"at least {self.tokens_per_batch}"
        check(fits, "training.max_cached_tokens", f"{least}, training.tokens_per_batch", self.max_cached_tokens)


@dataclass(frozen=True, slots=True)
class HeadsRun:
    """One run that trains exit heads."""

    heads: HeadsConfig = field(default_factory=HeadsConfig)
    text: TextConfig = field(default_factory=TextConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)

    def exits_of(self, num_layers: int) -> tuple[int, ...]:
        """The exits of a model, rising; unless named, about 1/8, 1/4, 3/8 and 1/2 of its layers.

        Raises:
            ValueError: an exit is not below the number of layers.
        """
        if num_layers < 2:
            raise ValueError(f"heads.model must have at least 2 layers to leave one early, got {num_layers}")
        named = self.heads.exits or tuple(max(1, num_layers * eighths // 8) for eighths in (1, 2, 3, 4))
        exits = tuple(sorted(set(named)))
        check(exits[-1] < num_layers, "heads.exits", f"from 1 to {num_layers - 1}, the model's last but one", exits[-1])
        return exits

    def different_keys(self, saved: Any) -> list[str]:
        """Name the keys, as `section.key`, that would make a resumed run another run than the saved one."""
        now, saved = dataclasses.asdict(self), saved if isinstance(saved, dict) else {}
        different = []
        for section, values in now.items():
            before = saved.get(section, {})
            for key, value in values.items():
                plain = list(value) if isinstance(value, tuple) else value
                was = list(before[key]) if isinstance(before.get(key), tuple) else before.get(key)
                if f"{section}.{key}" not in WITHOUT_EFFECT and plain != was:
                    different.append(f"{section}.{key}")
        return different


def trains_heads(path: str | Path) -> bool:
    """Whether a YAML file has a top-level section `heads`, so that it is a run for exit heads; never raises."""
    try:
        content = read_yaml(path)
    except ValueError:
        return False
    return isinstance(content, dict) and "heads" in content


def load_heads_config(path: str | Path) -> HeadsRun:
    """Read a YAML file into a HeadsRun.

    Raises:
        ValueError: the file is missing or is no YAML mapping, or a key is unknown, of the wrong type or out of range.
    """
    return parse_heads(read_yaml(path))


def parse_heads(content: Any) -> HeadsRun:
    """Turn nested mappings into a HeadsRun; errors as for `load_heads_config`."""
    sections = {each.name: each.default_factory for each in dataclasses.fields(HeadsRun)}
    check_keys(content, sections, "the configuration")
    return HeadsRun(**{name: section_of(sections[name], name, values or {}) for name, values in content.items()})
