"""The configuration of a run that trains exit heads: sections `heads`, `data`, `text` and `training`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from train.config_file import build
from train.sections import DataConfig, TextConfig, check, check_least, check_positive

MAY_DIFFER = ("heads.output", "text.batch_size", "training.save_steps", "training.log_steps", "training.lr")
"""Keys that may differ when a run is resumed; after a loss of NaN, for example, with a lower lr."""


@dataclass(frozen=True, slots=True)
class HeadsConfig:
    """Which model gets exit heads, after which of its layers, of which inner width, and where the file goes."""

    model: str = "demo"
    device: str = ""
    dtype: str = ""
    exits: tuple[int, ...] = ()
    inner_size: int = 0
    output: str = ""

    def __post_init__(self) -> None:
        check(bool(self.model), "heads.model", "demo, smollm2, a folder, a .gguf file or a hub id", self.model)
        check(min(self.exits, default=1) >= 1, "heads.exits", "a list of layer counts from 1", list(self.exits))
        check_least("heads", self, 0, "inner_size")


@dataclass(frozen=True, slots=True)
class TrainingConfig:
    """How long, how fast, and towards which loss the heads are trained."""

    steps: int = 2000
    tokens_per_batch: int = 512
    lr: float = 1e-3
    weight_decay: float = 0.01
    warmup_steps: int = 50
    max_grad_norm: float = 1.0
    kl_share: float = 0.3
    top_k: int = 64
    max_cached_tokens: int = 200_000
    save_steps: int = 200
    log_steps: int = 50
    seed: int = 0

    def __post_init__(self) -> None:
        names = "steps", "tokens_per_batch", "top_k", "max_cached_tokens", "save_steps", "log_steps"
        check_least("training", self, 1, *names)
        check_least("training", self, 0, "weight_decay", "warmup_steps", "seed")
        check_positive("training", self, "lr", "max_grad_norm")
        check(0 <= self.kl_share <= 1, "training.kl_share", "between 0 and 1", self.kl_share)
        fits, least = self.max_cached_tokens >= self.tokens_per_batch, f"at least {self.tokens_per_batch}"
        check(fits, "training.max_cached_tokens", f"{least}, training.tokens_per_batch", self.max_cached_tokens)


@dataclass(frozen=True, slots=True)
class HeadsRun:
    """One run that trains exit heads."""

    heads: HeadsConfig = field(default_factory=HeadsConfig)
    data: DataConfig = field(default_factory=DataConfig)
    text: TextConfig = field(default_factory=lambda: TextConfig(num_texts=512))
    training: TrainingConfig = field(default_factory=TrainingConfig)

    def __post_init__(self) -> None:
        check_least("text", self.text, 1, "num_texts")

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


def parse_heads(content: Any) -> HeadsRun:
    """Turn nested mappings into a HeadsRun.

    Raises:
        ValueError: a key is unknown, of the wrong type or out of range.
    """
    return build(HeadsRun, content)
