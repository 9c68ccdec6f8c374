"""What a run is made of."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from eval.config import FOLDER, Common, check, check_common, check_least, known, option, read_config
from eval.methods import PLAIN_KINDS, parse_method
from eval.metrics import METRICS
from eval.questions import COLUMNS, NAMED_SETS

RUN = FOLDER / "run.yaml"
AUTO = "auto"
STUDIES = ("acceptance", "grid", "batch", "policies")
SIZES = ("study_questions", "study_tokens")
LEFT_OUT = ("output", "studies", *SIZES)  # a finished run may be given more


@dataclass(frozen=True, slots=True)
class RunConfig(Common):
    """One run. Every key's meaning is also the help of its flag."""

    model: str = option(
        "demo", "What to open: 'demo' (the embedded model), 'smollm2', a folder, a GGUF file, a hub id."
    )
    questions: str = option(
        "prompts.jsonl",
        "Question file (JSON lines); a parquet, CSV or JSON file or folder, or hf:OWNER/NAME[:CONFIG:SPLIT]; or the "
        f"name of a set: {', '.join(NAMED_SETS)}.",
        is_file=True,
    )
    questions_path: str = option(
        "", "Where a named set's file lies; named sets are not part of the repository.", is_file=True
    )
    columns: dict[str, str] = option({}, f"What the file calls {', '.join(COLUMNS)}, where it has other names.")
    per_category: int = option(0, "How many questions of each category to use, the first ones; 0 uses all.")
    max_new_tokens: int = option(128, "Most tokens per turn; fewer where the context has no room for them.")
    ignore_eos: bool = option(False, "Write max_new_tokens whatever the model says; else stop at its end of text.")
    temperature: float = option(0.0, "How tokens are picked: 0 is greedy, else they are sampled.")
    seed: int = option(0, "Seed of the first question's sampled output (the next has the next) and of the intervals.")
    methods: tuple[str, ...] = option(("transformers", "plain", "adaptive"), "Methods to compare.")
    externals: dict[str, str] = option({}, "Command line of every external:NAME among the methods, by its name.")
    baseline: str = option(AUTO, "What speedups are over: a method, or 'auto', the fastest plain decoding in the run.")
    metrics: tuple[str, ...] = option((), "Columns of the report's first table; none given: the usual ones.")
    warmups: int = option(1, "How often every method answers the first question untimed.")
    cost_repeats: int = option(
        0,
        "How often every piece of a round is timed, for policies that weigh costs, within ten seconds; 0: the table in "
        "the user's cache, which is measured when it is missing.",
    )
    time_limit: float = option(300.0, "Seconds a method may take for a turn; beyond, it is an error row.")
    check: bool = option(True, "Compare outputs with plain decoding's token by token.")
    keep_rounds: bool = option(False, "Write every round of our own methods to rounds.jsonl.")
    resamples: int = option(2000, "Bootstrap resamples of the questions behind every interval.")
    studies: tuple[str, ...] = option(
        (), f"What to measure once the questions are answered: {', '.join(STUDIES)}. A later session may add some."
    )
    study_questions: int = option(
        6,
        "How many questions a study uses, evenly from all categories; their first turns. With another number a later "
        "session measures its studies anew.",
    )
    study_tokens: int = option(40, "Tokens per question that a study decodes; policies by replay read max_new_tokens.")
    output: str = option("", "Run folder; empty: runs/ and the configuration's name.")

    def __post_init__(self) -> None:
        check_common(self)
        check_least(self, 1, "max_new_tokens", "resamples", *SIZES)
        check_least(self, 0, "per_category", "warmups", "cost_repeats", "seed", "temperature")
        check(self.time_limit > 0 and isfinite(self.time_limit), "time_limit", "above 0", self.time_limit)
        for what, names, allowed in (
            ("columns", self.columns, COLUMNS),
            ("metric", self.metrics, METRICS),
            ("study", self.studies, STUDIES),
        ):
            for name in names:
                known(what, name, allowed)
        for key in ("studies", "methods"):
            names = getattr(self, key)
            check(len(set(names)) == len(names), key, "different names", list(names))
        self._check_methods()

    def _check_methods(self) -> None:
        names = self.methods
        check(bool(names), "methods", "at least one name", list(names))
        for name, command in self.externals.items():
            check(_is_command(command), f"externals: {name}", "a command line, its quotes closed", command)
        methods = [parse_method(name) for name in names]
        for method in methods:
            if method.kind == "external":
                known(f"externals has no command line for {method.name!r}; name", method.option, self.externals)
        if self.check and "plain" not in names:
            raise ValueError("check compares with plain decoding: add plain to methods, or set check: false")
        if self.baseline != AUTO:
            known("baseline", self.baseline, names)
        elif not any(method.kind in PLAIN_KINDS for method in methods):
            raise ValueError(
                "baseline: auto needs plain or transformers among the methods; add one, or name a baseline"
            )


def _is_command(text: str) -> bool:
    try:
        return bool(shlex.split(text))
    except ValueError:
        return False


def read_run_config(path: str | Path, given: Mapping[str, Any] | None = None) -> RunConfig:
    """The configuration of a file, see `eval.config.read_config`; without an output it has its own folder in runs/."""
    config = read_config(RunConfig, path, given)
    return dataclasses.replace(config, output=config.output or str(Path("runs") / Path(path).stem))


def as_record(config: RunConfig) -> dict[str, Any]:
    """The keys that decide what a run's figures are, as plain values: all but where they are written, and studies."""
    return _decisive(dataclasses.asdict(config))


def completed(record: Mapping[str, Any]) -> dict[str, Any]:
    """The record of a run of any version: keys that it lacks have their defaults."""
    defaults = {field.name: getattr(RunConfig(), field.name) for field in dataclasses.fields(RunConfig)}
    return _decisive({**defaults, **record})


def _decisive(values: Mapping[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in values.items() if name not in LEFT_OUT}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in kept.items()}
