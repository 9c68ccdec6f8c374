"""The configuration of a training run: a section for each of the dataclasses in `train.sections`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from train.configuration import build, check, read_yaml
from train.sections import (
    CorpusConfig,
    DataConfig,
    EvalConfig,
    ExitConfig,
    LoraConfig,
    ModelConfig,
    OptimConfig,
    RunConfig,
    TextConfig,
)

_RUN_KEYS = "output export card notes exit_layer num_speculative_tokens max_steps max_minutes save_steps log_steps"
MAY_DIFFER = ("eval", *(f"run.{key}" for key in _RUN_KEYS.split()))
"""What may differ when a run is resumed; another max_steps changes the schedule of the remaining steps only."""


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """One training run."""

    corpus: CorpusConfig = field(default_factory=CorpusConfig)
    data: DataConfig = field(default_factory=DataConfig)
    text: TextConfig = field(default_factory=TextConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    exits: ExitConfig = field(default_factory=ExitConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    run: RunConfig = field(default_factory=RunConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)

    def __post_init__(self) -> None:
        if self.lora.rank:
            check(bool(self.model.base), "model.base", "the model that lora adapts", self.model.base)
            check(self.optim.kind == "adamw", "optim.kind", "adamw where lora.rank is above 0", self.optim.kind)
        if self.exits.teacher == "base":
            check(self.lora.rank > 0, "exits.teacher", "last where lora.rank is 0", "base")
        if self.data.messages_field or self.text.num_texts:
            needed = "a model with a tokenizer where data holds conversations"
            check(bool(self.model.base), "model.base", needed, self.model.base)
        if not self.model.base:
            shape = self.model
            self.check_fits(shape.num_hidden_layers, shape.max_position_embeddings, "model.num_hidden_layers")

    def check_fits(self, num_layers: int, positions: int, source: str = "the layers of model.base") -> None:
        """Check the keys whose range depends on the model: exits, adapters, lengths.

        Raises:
            ValueError: a key is out of the model's range.
        """
        longest, period = max(self.run.windows), self.exits.period
        check(longest <= positions, "run.windows", f"at most model.max_position_embeddings = {positions}", longest)
        check(period <= num_layers, "exits.period", f"at most {source} = {num_layers}", period)
        check(self.run.exit_layer < num_layers, "run.exit_layer", f"below {source} = {num_layers}", self.run.exit_layer)
        length = self.text.prompt_tokens + self.text.max_new_tokens if self.text.num_texts else 0
        check(length < positions, "text.max_new_tokens", f"short enough for {positions} positions", length)
        lengths = {"window": self.eval.window, "prompt_tokens": self.eval.prompt_tokens + self.eval.new_tokens}
        for name, tokens in lengths.items():
            check(1 < tokens <= positions, f"eval.{name}", f"short enough for {positions} positions", tokens)


def load_config(path: str | Path) -> TrainConfig:
    """Read a YAML file; see `parse_config`."""
    return parse_config(read_yaml(path))


def parse_config(content: Any) -> TrainConfig:
    """Turn nested mappings into a TrainConfig.

    Raises:
        ValueError: a key is unknown, of the wrong type, out of range, or contradicts another.
    """
    config = build(TrainConfig, content)
    sources = {"data.path": config.data.path, "the section corpus": content.get("corpus")}
    given = [name for name, value in {**sources, "text.num_texts": config.text.num_texts}.items() if value]
    if len(given) > 1:
        raise ValueError(f"{' and '.join(given)} exclude each other; remove one of them")
    if content.get("data") and not config.data.path:
        raise ValueError("data.path must name a file or a data set, got ''; for Python files remove the section data")
    shape = set(content.get("model") or ()) - {"base", "dtype"}
    if config.model.base and shape:
        raise ValueError(f"model.{min(shape)} is fixed by model.base; remove it")
    return config
