"""What a benchmark run is made of: one frozen dataclass, filled from a YAML file and the command line."""

from __future__ import annotations

import dataclasses
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).parents[1] / "configs" / "eval"
DEFAULT, QUICK = FOLDER / "bench.yaml", FOLDER / "quick.yaml"


def _key(default: Any, meaning: str) -> Any:
    return dataclasses.field(default=default, metadata={"help": meaning})


@dataclass(frozen=True, slots=True)
class BenchConfig:
    """One benchmark run. Every key's meaning is also the help of its command-line option."""

    model: str = _key("demo", "What selfspec.load opens: 'demo' (the embedded model), a folder or a hub id.")
    device: str = _key("", "Where the model runs; empty lets selfspec.load choose.")
    dtype: str = _key("float32", "Number format of the weights; equality with plain decoding is promised in float32.")
    threads: int = _key(0, "CPU threads of torch; 0 keeps torch's own default.")
    questions: str = _key(
        "prompts.jsonl", "Question file, JSON lines with 'turns'; relative to the configuration file."
    )
    num_questions: int = _key(0, "How many questions to use, from the first on; 0 uses all.")
    max_new_tokens: int = _key(64, "Tokens every method writes per prompt; ends of text are ignored.")
    repeats: int = _key(5, "How often every finalist decodes every prompt.")
    warmup_tokens: int = _key(16, "Tokens that every method writes untimed before each stage.")
    exit_layers: tuple[int, ...] = _key((), "Exit layers E to try; none given: every eighth of the layers up to half.")
    draft_lengths: tuple[int, ...] = _key((2, 3, 4, 6, 8), "Draft lengths D to try with every exit layer.")
    early_exit_draft_lengths: tuple[int, ...] = _key(
        (0, 4), "num_assistant_tokens to try for transformers' early exit at every exit layer; 0 is its default."
    )
    lookup_lengths: tuple[int, ...] = _key((4, 10), "prompt_lookup_num_tokens to try for transformers' prompt lookup.")
    coarse_questions: int = _key(4, "Prompts of the coarse pass, which tries the whole grid once.")
    finalists: int = _key(2, "Fixed settings that go on from the coarse pass to the full comparison.")
    batch_size: int = _key(8, "Prompts decoded together in the batch comparison.")
    batch_repeats: int = _key(3, "Repeats of the batch comparison.")
    load_repeats: int = _key(3, "Fresh processes in which loading to the first token is timed; 0 leaves it out.")

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "warmup_tokens", "repeats", "coarse_questions", "finalists", "batch_repeats"):
            _check(getattr(self, name) >= 1, name, "at least 1", getattr(self, name))
        for name in ("threads", "num_questions", "load_repeats"):
            _check(getattr(self, name) >= 0, name, "at least 0", getattr(self, name))
        _check(self.batch_size >= 2, "batch_size", "at least 2", self.batch_size)
        for name, least in (
            ("exit_layers", 1),
            ("draft_lengths", 1),
            ("early_exit_draft_lengths", 0),
            ("lookup_lengths", 1),
        ):
            given = getattr(self, name)
            _check(all(n >= least for n in given), name, f"numbers of at least {least}", list(given))
        for name in ("draft_lengths", "early_exit_draft_lengths", "lookup_lengths"):
            _check(bool(getattr(self, name)), name, "at least one number", [])

    def exits_of(self, num_layers: int) -> tuple[int, ...]:
        """The exit layers to try on a model of `num_layers`."""
        if not self.exit_layers:
            return tuple(sorted({max(1, num_layers * eighths // 8) for eighths in range(1, 5)}))
        fits = all(layer < num_layers for layer in self.exit_layers)
        _check(fits, "exit_layers", f"in 1..{num_layers - 1} for this model", list(self.exit_layers))
        return self.exit_layers


def load_config(path: str | Path, **given: Any) -> BenchConfig:
    """Read a YAML file; values that are given and not None replace the file's.

    Raises:
        ValueError: the file is missing or is no YAML mapping, or a key is unknown, of the wrong type or out of range.
    """
    try:
        content = yaml.safe_load(Path(path).read_text("utf-8")) or {}
    except (OSError, yaml.YAMLError) as problem:
        text = " ".join(str(problem).split())
        raise ValueError(f"cannot read the configuration {str(path)!r}: {text}") from problem
    if not isinstance(content, dict):
        raise ValueError(f"the configuration {str(path)!r} must be a mapping of keys to values, got {content!r}")
    kinds = typing.get_type_hints(BenchConfig)
    for key in content:
        if key not in kinds:
            raise ValueError(f"the configuration has no key {key!r}; known keys: {', '.join(kinds)}")
    values = {key: _convert(key, value, kinds[key]) for key, value in content.items()}
    values["questions"] = str(Path(path).parent / values.get("questions", BenchConfig().questions))
    return BenchConfig(**{**values, **{key: value for key, value in given.items() if value is not None}})


def _check(ok: bool, key: str, allowed: str, got: object) -> None:
    if not ok:
        raise ValueError(f"{key} must be {allowed}, got {got!r}")


def _convert(key: str, value: Any, kind: Any) -> Any:
    if typing.get_origin(kind) is tuple:
        _check(isinstance(value, list), key, "a list", value)
        return tuple(_convert(key, each, int) for each in value)
    _check(type(value) is kind, key, f"of type {kind.__name__}", value)
    return value
