"""The configuration of a run that trains exit heads: sections `heads`, `data`, `text` and `training`."""

from __future__ import annotations

from dataclasses import dataclass, field

from train.configuration import check, check_least, check_positive, option
from train.sections import DataConfig, TextConfig

MAY_DIFFER = ("heads.output", "text.batch_size", "training.save_steps", "training.log_steps", "training.lr")
"""Keys that may differ when a run is resumed; after a loss of NaN, for example, with a lower lr."""


@dataclass(frozen=True, slots=True)
class HeadsConfig:
    """Which model gets exit heads, after which of its layers, of which inner width, and where the file goes."""

    model: str = option("demo", "Model to train heads for: demo, smollm2, a folder, a .gguf file, or a hub id.")
    device: str = option("", "Where the model runs; empty means cuda if there is one, else cpu.")
    dtype: str = option(
        "", "Its dtype; empty means float32 on the CPU, the checkpoint's own elsewhere. The heads train in float32."
    )
    exits: tuple[int, ...] = option(
        (), "Layers after which there is a head; empty means about 1/8, 1/4, 3/8 and 1/2 of them."
    )
    inner_size: int = option(0, "Inner width of a head; 0 means that of the model's own MLPs.")
    output: str = option("", "Heads, card, texts and checkpoint go here; empty means the model's folder.")

    def __post_init__(self) -> None:
        check(bool(self.model), "model", "demo, smollm2, a folder, a .gguf file or a hub id", self.model)
        check(min(self.exits, default=1) >= 1, "exits", "a list of layer counts from 1", list(self.exits))
        check_least(self, 0, "inner_size")


@dataclass(frozen=True, slots=True)
class TrainingConfig:
    """How long, how fast, and towards which loss the heads are trained."""

    steps: int = option(2000, "Steps of the whole run.")
    tokens_per_batch: int = option(512, "Tokens of a step.")
    lr: float = option(1e-3, "Highest learning rate of AdamW.")
    weight_decay: float = option(0.01, "Decoupled weight decay.")
    warmup_steps: int = option(50, "Steps over which the learning rate rises; afterwards it falls by a cosine.")
    max_grad_norm: float = option(1.0, "Gradients are clipped to this norm.")
    kl_share: float = option(0.3, "Share of the steps, the first ones, with the loss KL; the others learn acceptance.")
    top_k: int = option(64, "Most probable tokens of the model to learn from, all others being one bucket.")
    max_cached_tokens: int = option(
        200_000, "Tokens whose hidden states are held in memory; more are read again, part by part."
    )
    save_steps: int = option(200, "Steps between checkpoints.")
    log_steps: int = option(50, "Steps between lines of the log.")
    seed: int = option(0, "Seed of first weights and of the order of tokens.")

    def __post_init__(self) -> None:
        names = "steps", "tokens_per_batch", "top_k", "max_cached_tokens", "save_steps", "log_steps"
        check_least(self, 1, *names)
        check_least(self, 0, "weight_decay", "warmup_steps", "seed")
        check_positive(self, "lr", "max_grad_norm")
        check(0 <= self.kl_share <= 1, "kl_share", "between 0 and 1", self.kl_share)
        fits, least = self.max_cached_tokens >= self.tokens_per_batch, f"at least {self.tokens_per_batch}"
        check(fits, "max_cached_tokens", f"{least}, training.tokens_per_batch", self.max_cached_tokens)


@dataclass(frozen=True, slots=True)
class HeadsRun:
    """One run that trains exit heads."""

    heads: HeadsConfig = field(default_factory=HeadsConfig)
    data: DataConfig = field(default_factory=DataConfig)
    text: TextConfig = field(default_factory=lambda: TextConfig(num_texts=512))
    training: TrainingConfig = field(default_factory=TrainingConfig)

    def __post_init__(self) -> None:
        check(self.text.num_texts > 0, "text.num_texts", "at least 1", self.text.num_texts)

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
