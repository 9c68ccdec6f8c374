"""What a training run is made of: one YAML file with a section for each of the dataclasses in `train.sections`."""

from __future__ import annotations

import dataclasses
import difflib
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from train.sections import (
    CorpusConfig,
    DataConfig,
    EvalConfig,
    ExitConfig,
    LoraConfig,
    ModelConfig,
    OptimConfig,
    RunConfig,
    check,
)

WITHOUT_EFFECT_ON_STEPS = frozenset(
    ["output", "export", "notes", "exit_layer", "num_draft_tokens", "max_steps", "save_steps", "log_steps", "report_to"]
)
"""Keys of `run` that may differ when a run goes on; with another max_steps only the schedule changes."""


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """One training run."""

    corpus: CorpusConfig = field(default_factory=CorpusConfig)
    data: DataConfig = field(default_factory=DataConfig)
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
        if self.data.streaming or self.data.messages_field:
            needed = "a model with a tokenizer where data is streamed or holds conversations"
            check(bool(self.model.base), "model.base", needed, self.model.base)
        if not self.model.base:
            shape = self.model
            self.check_fits(shape.num_hidden_layers, shape.max_position_embeddings, "model.num_hidden_layers")

    def check_fits(self, num_layers: int, positions: int, source: str = "the layers of model.base") -> None:
        """Check everything that depends on the model: exits, adapters, lengths.

        Raises:
            ValueError: a key is out of the model's range.
        """
        longest, period = max(self.run.windows), self.exits.period
        check(longest <= positions, "run.windows", f"at most model.max_position_embeddings = {positions}", longest)
        check(period <= num_layers, "exits.period", f"at most {source} = {num_layers}", period)
        check(self.run.exit_layer < num_layers, "run.exit_layer", f"below {source} = {num_layers}", self.run.exit_layer)
        highest = max(self.lora.layers_to_transform, default=0)
        check(highest < num_layers, "lora.layers_to_transform", f"below {source} = {num_layers}", highest)
        lengths = {"window": self.eval.window, "prompt_tokens": self.eval.prompt_tokens + self.eval.new_tokens}
        for name, tokens in lengths.items():
            check(1 < tokens <= positions, f"eval.{name}", f"short enough for {positions} positions", tokens)


def load_config(path: str | Path) -> TrainConfig:
    """Read a YAML file into a TrainConfig.

    Raises:
        ValueError: the file is missing or is no YAML mapping, or a key is unknown, of the wrong type or out of range.
    """
    return parse_config(read_yaml(path))


def read_yaml(path: str | Path) -> Any:
    """What a YAML file holds, an empty mapping where that is nothing; ValueError where it cannot be read."""
    try:
        return yaml.safe_load(Path(path).read_text("utf-8")) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"cannot read the configuration {str(path)!r}: {error}") from error


def parse_config(content: Any) -> TrainConfig:
    """Turn nested mappings into a TrainConfig, section by section.

    Raises:
        ValueError: a key is unknown, of the wrong type, out of range, or contradicts another.
    """
    sections = {each.name: each.default_factory for each in dataclasses.fields(TrainConfig)}
    check_keys(content, sections, "the configuration")
    given = {name: values or {} for name, values in content.items()}
    config = TrainConfig(**{name: section_of(sections[name], name, values) for name, values in given.items()})
    if config.data.path and given.get("corpus"):
        raise ValueError("data.path and the section corpus exclude each other; remove one of them")
    if given.get("data") and not config.data.path:
        raise ValueError("data.path must name a file or a data set, got ''; for Python files remove the section data")
    shape = set(given.get("model", ())) - {"base", "dtype"}
    if config.model.base and shape:
        raise ValueError(f"model.{min(shape)} is fixed by model.base; remove it")
    return config


def different_keys(saved: Any, config: TrainConfig) -> list[str]:
    """Name the keys, as `section.key`, that would make a resumed run another run than the saved one.

    Keys that the saved mapping does not know are compared with their default.
    """
    now, saved = dataclasses.asdict(config), saved if isinstance(saved, dict) else {}
    different = []
    for section, values in now.items():
        before = {**dataclasses.asdict(getattr(TrainConfig(), section)), **saved.get(section, {})}
        for key, value in values.items():
            ignored = section == "eval" or (section == "run" and key in WITHOUT_EFFECT_ON_STEPS)
            if not ignored and _plain(before[key]) != _plain(value):
                different.append(f"{section}.{key}")
    return different


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def section_of(kind: Any, name: str, values: Any) -> Any:
    types = typing.get_type_hints(kind)
    check_keys(values, types, name)
    return kind(**{key: _convert(f"{name}.{key}", value, types[key]) for key, value in values.items()})


def check_keys(values: Any, known: typing.Iterable[str], where: str) -> None:
    if not isinstance(values, dict):
        raise ValueError(f"{where} must be a mapping, got {values!r}")
    names = list(known)
    for key in values:
        if key not in names:
            close = difflib.get_close_matches(str(key), names, n=1)
            hint = f"did you mean {close[0]!r}? " if close else ""
            raise ValueError(f"{where} has no key {key!r}; {hint}known keys: {', '.join(names)}")


def _convert(key: str, value: Any, kind: Any) -> Any:
    if typing.get_origin(kind) is tuple:
        check(isinstance(value, list), key, "a list", value)
        inner = typing.get_args(kind)[0]
        return tuple(_convert(key, each, inner) for each in value)
    if kind is float and type(value) is int:
        return float(value)
    check(type(value) is kind, key, f"of type {kind.__name__}", value)
    return value
