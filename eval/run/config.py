"""What a run is made of: one frozen dataclass, filled from a YAML file and the command line."""

from __future__ import annotations

import dataclasses
import difflib
import shlex
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from eval.config import FOLDER
from eval.keys import check_key, convert, knob, read_mapping
from eval.run.metrics import METRICS
from eval.run.names import PLAIN_KINDS, parse_method
from eval.run.questions import COLUMNS, HUB, PRESETS
from eval.run.studies import NAMES

RUN = FOLDER / "run.yaml"
AUTO = "auto"
TABLE = (
    "tokens_per_second",
    "speedup",
    "paired_ratio",
    "mean_accepted_tokens",
    "draft_acceptance_rate",
    "time_to_first_token_p50",
    "per_token_latency_p50",
    "per_token_latency_p95",
)
STUDY_SIZES = {"study_questions": 6, "study_tokens": 40}  # with their defaults
LEFT_OUT = ("output", "studies", *STUDY_SIZES)


def _names(meaning: str) -> Any:
    return dataclasses.field(default_factory=dict, metadata={"help": meaning})


@dataclass(frozen=True, slots=True)
class RunConfig:
    """One run. Every key's meaning is also the help of its command-line option."""

    model: str = knob("demo", "What selfspec.load opens: 'demo' (the embedded model), a folder or a hub id.")
    device: str = knob("", "Where the model runs; empty lets selfspec.load choose.")
    dtype: str = knob("float32", "Number format of the weights; equality with plain decoding is promised in float32.")
    threads: int = knob(0, "CPU threads of torch; 0 keeps torch's own default.")
    questions: str = knob(
        "prompts.jsonl",
        "Question file (JSON lines); a parquet, CSV or JSON file or folder, or hf:OWNER/NAME[:CONFIG:SPLIT]; or the "
        f"name of a set: {', '.join(PRESETS)}.",
    )
    questions_path: str = knob("", "Where a named set's file lies; named sets are not part of the repository.")
    columns: Mapping[str, str] = _names(f"What the file calls {', '.join(COLUMNS)}, where it has other names.")
    num_questions: int = knob(0, "How many questions to use, from the first on; 0 uses all.")
    max_new_tokens: int = knob(128, "Most tokens per turn; fewer where the context has no room for them.")
    ignore_eos: bool = knob(False, "Write max_new_tokens whatever the model says; else stop at its end of text.")
    temperature: float = knob(0.0, "How tokens are picked: 0 is greedy, else they are sampled.")
    seed: int = knob(0, "Seed of the first question's sampled output (the next has the next) and of the intervals.")
    methods: tuple[str, ...] = knob((), "Methods to compare; none given: transformers, plain and adaptive.")
    externals: Mapping[str, str] = _names("Command line of every external:NAME among the methods, by its name.")
    baseline: str = knob(AUTO, "What speedups are over: a method, or 'auto', the fastest plain decoding in the run.")
    metrics: tuple[str, ...] = knob((), "Columns of the report's first table; none given: the usual ones.")
    warmups: int = knob(1, "How often every method answers the first question untimed.")
    cost_repeats: int = knob(
        15,
        "How often every piece of a round is timed, for policies that weigh costs; 0: the table in the user's cache.",
    )
    time_limit: float = knob(300.0, "Seconds a method may take for a turn; beyond, it is an error row.")
    check: bool = knob(True, "Compare outputs with plain decoding's token by token.")
    keep_rounds: bool = knob(False, "Write every round of our own methods to rounds.jsonl.")
    resamples: int = knob(2000, "Bootstrap resamples of the questions behind every interval.")
    studies: tuple[str, ...] = knob(
        (), f"What to measure once the questions are answered: {', '.join(NAMES)}; a later session may add some."
    )
    study_questions: int = knob(
        STUDY_SIZES["study_questions"],
        "How many questions a study uses, evenly from all categories; their first turns. With another number a later "
        "session measures its studies anew.",
    )
    study_tokens: int = knob(
        STUDY_SIZES["study_tokens"],
        "Tokens per question that a study decodes live, half of them in batches; others read max_new_tokens. With "
        "another number a later session measures its studies anew.",
    )
    output: str = knob("", "Run folder; empty: runs/ and the configuration's name.")

    def __post_init__(self) -> None:
        for name, least in (
            ("max_new_tokens", 1),
            ("resamples", 1),
            ("warmups", 0),
            ("threads", 0),
            ("cost_repeats", 0),
            ("study_questions", 1),
            ("study_tokens", 1),
            ("seed", 0),
        ):
            check_key(getattr(self, name) >= least, name, f"at least {least}", getattr(self, name))
        check_key(self.num_questions >= 0, "num_questions", "at least 0", self.num_questions)
        check_key(self.temperature >= 0 and isfinite(self.temperature), "temperature", "at least 0", self.temperature)
        check_key(self.time_limit > 0 and isfinite(self.time_limit), "time_limit", "above 0", self.time_limit)
        for column in self.columns:
            known("columns", column, COLUMNS)
        for metric in self.metrics:
            known("metric", metric, METRICS)
        for study in self.studies:
            known("study", study, NAMES)
        check_key(len(set(self.studies)) == len(self.studies), "studies", "different names", list(self.studies))
        self._check_methods()

    def _check_methods(self) -> None:
        names = self.methods
        for name, command in self.externals.items():
            check_key(_is_command(command), f"externals: {name}", "a command line, its quotes closed", command)
        check_key(bool(names) and len(set(names)) == len(names), "methods", "different names", list(names))
        kinds = {name: parse_method(name) for name in names}
        for name, method in kinds.items():
            if method.kind == "external":
                known(f"externals has no command line for {name!r}; name", method.options[0], self.externals)
        if self.check and "plain" not in names:
            raise ValueError("check compares with plain decoding: add plain to methods, or set check: false")
        if self.baseline != AUTO:
            known("baseline", self.baseline, names)
        elif not any(method.kind in PLAIN_KINDS for method in kinds.values()):
            raise ValueError(
                "baseline: auto needs plain or transformers among the methods; add one, or name a baseline"
            )


def _is_command(text: str) -> bool:
    try:
        return bool(shlex.split(text))
    except ValueError:
        return False


def known(what: str, name: str, names: Iterable[str]) -> None:
    """Refuse a name that is not among `names`, with the closest of them."""
    names = list(names)
    if name not in names:
        close = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(names) or 'none'}"
        raise ValueError(f"{what} {name!r} is unknown; {hint}")


def load_run_config(path: str | Path, **given: Any) -> RunConfig:
    """Read a YAML file; values that are given and not None replace the file's.

    Files that the configuration names are relative to it; those that are given are relative to where one is.

    Raises:
        ValueError: the file is missing or is no YAML mapping, or a key, method or metric is unknown, of the wrong type
            or out of range.
    """
    values = {"methods": ("transformers", "plain", "adaptive"), **_read(path)}
    questions = values.get("questions", "prompts.jsonl")
    if questions not in PRESETS and not questions.startswith(HUB):
        values["questions"] = str(Path(path).parent / questions)
    if values.get("questions_path"):
        values["questions_path"] = str(Path(path).parent / values["questions_path"])
    values.setdefault("output", "")
    values.update({key: value for key, value in given.items() if value is not None})
    values["output"] = values["output"] or str(Path("runs") / Path(path).stem)
    return RunConfig(**values)


def _read(path: str | Path) -> dict[str, Any]:
    content = read_mapping(path)
    kinds = typing.get_type_hints(RunConfig)
    for key in content:
        known("configuration key", str(key), kinds)
    return {
        key: _mapping(key, v) if "Mapping" in str(kinds[key]) else convert(key, v, kinds[key])
        for key, v in content.items()
    }


def _mapping(key: str, value: Any) -> dict[str, str]:
    fits = isinstance(value, dict) and all(isinstance(text, str) for pair in value.items() for text in pair)
    check_key(fits, key, "a mapping of names to texts", value)
    return dict(value)


def as_record(config: RunConfig) -> dict[str, Any]:
    """The keys that decide what a run's figures are, as plain values.

    Where they are written is none of them, nor which studies are made and of what size: a finished run may be given
    more.
    """
    return _decisive(dataclasses.asdict(config))


def completed(record: Mapping[str, Any]) -> dict[str, Any]:
    """The record of a run of any version: keys that it lacks have their defaults, LEFT_OUT is gone."""
    defaults = {
        key.name: key.default if key.default_factory is dataclasses.MISSING else key.default_factory()
        for key in dataclasses.fields(RunConfig)
    }
    return _decisive({**defaults, **record})


def _decisive(values: Mapping[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in values.items() if name not in LEFT_OUT}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in kept.items()}
