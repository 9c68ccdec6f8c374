"""What a training run is made of: frozen dataclasses filled from one YAML file."""

from __future__ import annotations

import dataclasses
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml


def _check(ok: bool, key: str, allowed: str, got: object) -> None:
    if not ok:
        raise ValueError(f"{key} must be {allowed}, got {got!r}")


@dataclass(frozen=True, slots=True)
class CorpusConfig:
    """Which text to learn from, and which of it to keep for evaluation."""

    root: str = ""
    skip: tuple[str, ...] = ("site-packages",)
    max_chars: int = 250_000
    held_out_percent: float = 2.0
    library_repeat: int = 1

    def __post_init__(self) -> None:
        _check(self.max_chars > 0, "corpus.max_chars", "positive", self.max_chars)
        _check(0 < self.held_out_percent < 100, "corpus.held_out_percent", "between 0 and 100", self.held_out_percent)
        _check(self.library_repeat >= 1, "corpus.library_repeat", "at least 1", self.library_repeat)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of the model, in the words of transformers' LlamaConfig."""

    vocab_size: int = 4096
    hidden_size: int = 192
    intermediate_size: int = 512
    num_hidden_layers: int = 16
    num_attention_heads: int = 6
    num_key_value_heads: int = 2
    max_position_embeddings: int = 2048
    rope_theta: float = 10_000.0

    def __post_init__(self) -> None:
        for each in dataclasses.fields(self):
            _check(getattr(self, each.name) > 0, f"model.{each.name}", "positive", getattr(self, each.name))
        _check(self.vocab_size >= 257, "model.vocab_size", "at least 257 (all bytes and one special)", self.vocab_size)
        _check(self.num_hidden_layers >= 2, "model.num_hidden_layers", "at least 2", self.num_hidden_layers)
        heads = self.num_attention_heads
        _check(self.hidden_size % (2 * heads) == 0, "model.hidden_size", f"a multiple of {2 * heads}", self.hidden_size)
        kv_heads = self.num_key_value_heads
        _check(heads % kv_heads == 0, "model.num_key_value_heads", f"a divisor of {heads}", kv_heads)


@dataclass(frozen=True, slots=True)
class ExitConfig:
    """LayerSkip (arXiv 2404.16710): losses at early layers, and layers dropped at random."""

    period: int = 8
    scale: float = 0.5
    weights: str = "uniform"
    distill: float = 0.0
    dropout_max: float = 0.1
    dropout_ramp: bool = False

    def __post_init__(self) -> None:
        _check(self.period >= 1, "exits.period", "at least 1", self.period)
        _check(self.scale >= 0, "exits.scale", "at least 0", self.scale)
        allowed = ("uniform", "linear", "cumulative")
        _check(self.weights in allowed, "exits.weights", f"one of {', '.join(allowed)}", self.weights)
        _check(0 <= self.distill <= 1, "exits.distill", "between 0 and 1", self.distill)
        _check(0 <= self.dropout_max < 1, "exits.dropout_max", "at least 0 and below 1", self.dropout_max)


@dataclass(frozen=True, slots=True)
class OptimConfig:
    """Muon for the layers' matrices, AdamW for the rest; warmup, plateau, decay."""

    muon_lr: float = 4e-3
    adamw_lr: float = 3e-3
    weight_decay: float = 0.05
    warmup_steps: int = 100
    decay_fraction: float = 0.3
    max_grad_norm: float = 1.0

    def __post_init__(self) -> None:
        for name in ("muon_lr", "adamw_lr", "max_grad_norm"):
            _check(getattr(self, name) > 0, f"optim.{name}", "positive", getattr(self, name))
        _check(self.weight_decay >= 0, "optim.weight_decay", "at least 0", self.weight_decay)
        _check(self.warmup_steps >= 0, "optim.warmup_steps", "at least 0", self.warmup_steps)
        _check(0 < self.decay_fraction <= 1, "optim.decay_fraction", "above 0 and at most 1", self.decay_fraction)


@dataclass(frozen=True, slots=True)
class RunConfig:
    """How long to train, on how much at once, and where to put the results."""

    output: str = "runs/demo"
    export: str = ""
    notes: str = ""
    seed: int = 0
    max_steps: int = 2000
    windows: tuple[int, ...] = (512,)
    tokens_per_batch: int = 4096
    gradient_accumulation_steps: int = 2
    save_steps: int = 100
    log_steps: int = 10
    compile: bool = True
    bf16: bool = True

    def __post_init__(self) -> None:
        for name in ("max_steps", "tokens_per_batch", "gradient_accumulation_steps", "save_steps", "log_steps"):
            _check(getattr(self, name) >= 1, f"run.{name}", "at least 1", getattr(self, name))
        _check(min(self.windows, default=0) > 1, "run.windows", "a list of lengths above 1", self.windows)
        tokens = self.tokens_per_batch
        for length in self.windows:
            _check(tokens % length == 0, "run.tokens_per_batch", f"a multiple of {length}", tokens)


@dataclass(frozen=True, slots=True)
class EvalConfig:
    """What is measured on held-out files, while training and for the model card."""

    every_steps: int = 500
    window: int = 512
    num_windows: int = 64
    prompt_tokens: int = 256
    num_prompts: int = 96
    new_tokens: int = 64

    def __post_init__(self) -> None:
        for each in dataclasses.fields(self):
            _check(getattr(self, each.name) >= 1, f"eval.{each.name}", "at least 1", getattr(self, each.name))


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """One training run."""

    corpus: CorpusConfig = field(default_factory=CorpusConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    exits: ExitConfig = field(default_factory=ExitConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    run: RunConfig = field(default_factory=RunConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)

    def __post_init__(self) -> None:
        longest, limit = max(self.run.windows), self.model.max_position_embeddings
        _check(longest <= limit, "run.windows", f"at most model.max_position_embeddings = {limit}", longest)
        layers, period = self.model.num_hidden_layers, self.exits.period
        _check(period <= layers, "exits.period", f"at most model.num_hidden_layers = {layers}", period)
        lengths = {"window": self.eval.window, "prompt_tokens": self.eval.prompt_tokens + self.eval.new_tokens}
        for name, tokens in lengths.items():
            _check(1 < tokens <= limit, f"eval.{name}", f"short enough for {limit} positions", tokens)


def load_config(path: str | Path) -> TrainConfig:
    """Read a YAML file into a TrainConfig.

    Raises:
        ValueError: the file is missing or is no YAML mapping, or a key is unknown, of the wrong type or out of range.
    """
    try:
        content = yaml.safe_load(Path(path).read_text("utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ValueError(f"cannot read the configuration {str(path)!r}: {error}") from error
    return parse_config(content or {})


def parse_config(content: Any) -> TrainConfig:
    """Turn nested mappings into a TrainConfig, section by section."""
    sections = {each.name: each.default_factory for each in dataclasses.fields(TrainConfig)}
    _check_keys(content, sections, "the configuration")
    return TrainConfig(**{name: _section(sections[name], name, values or {}) for name, values in content.items()})


def _section(kind: Any, name: str, values: Any) -> Any:
    types = typing.get_type_hints(kind)
    _check_keys(values, types, name)
    return kind(**{key: _convert(f"{name}.{key}", value, types[key]) for key, value in values.items()})


def _check_keys(values: Any, known: typing.Iterable[str], where: str) -> None:
    if not isinstance(values, dict):
        raise ValueError(f"{where} must be a mapping, got {values!r}")
    for key in values:
        if key not in known:
            raise ValueError(f"{where} has no key {key!r}; known keys: {', '.join(known)}")


def _convert(key: str, value: Any, kind: Any) -> Any:
    if typing.get_origin(kind) is tuple:
        _check(isinstance(value, list), key, "a list", value)
        inner = typing.get_args(kind)[0]
        return tuple(_convert(key, each, inner) for each in value)
    if kind is float and type(value) is int:
        return float(value)
    _check(type(value) is kind, key, f"of type {kind.__name__}", value)
    return value
