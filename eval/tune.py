"""What `selfspec tune` gains: `python -m eval tune`.

Exit heads are tuned for every model and workload, with all of the threads. Then the held-out prompts are decoded in
turns, with every number of threads and temperature: plainly, by `adaptive` without the heads, and by `adaptive` with
them. Ratios are geometric means over prompts of the seconds per token, with 95 % intervals; prompts are read anew in
all three ways, and that time counts. A run that was stopped goes on with the same command.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import torch

from eval import measurement
from eval.config import config_of, parser_of
from eval.figures import table
from eval.guard import Found
from eval.models import open_llm
from eval.records import append_line, read_lines, write_file
from eval.session import Resumable
from eval.workloads import MAKERS, Workload, make
from selfspec.calibrate import profile
from selfspec.cli.failure import Failure
from selfspec.cli.tune import read_workload
from selfspec.learning.card import PLAIN, WITH, WITHOUT
from selfspec.learning.speeds import Measured, measure_speeds
from selfspec.learning.workload import split_prompts
from train.configuration import check, check_known, check_least, flags_given, option

COLUMNS = ("model", "workload", "threads", "T", "prompts", PLAIN, WITHOUT, WITH, "with over without", "differ")
TUNED_COLUMNS = (
    "model",
    "workload",
    "prompts",
    "held out",
    "answers",
    "tokens",
    "exit",
    "before",
    "after",
    "by place",
    "seconds",
)


@dataclass(frozen=True, slots=True)
class TuneConfig:
    """The configuration of `python -m eval tune`."""

    models: tuple[str, ...] = option(("smollm2",), "Names of models, folders or GGUF files.")
    workloads: tuple[str, ...] = option(
        tuple(MAKERS), f"{', '.join(MAKERS)}, or NAME=FILE of prompts as `selfspec tune` reads them."
    )
    threads: tuple[int, ...] = option((1, 2), "Numbers of threads; heads are tuned with the most.")
    temperatures: tuple[float, ...] = option((0.0, 0.7), "Temperatures.")
    minutes: float = option(10.0, "Minutes of tuning for each model and workload.")
    tokens: int = option(128, "Most tokens of an answer.")
    seconds: float = option(240.0, "Seconds after which a cell begins no further prompt.")
    seed: int = option(0, "Of the order of prompts and of first weights.")
    data: str = option("data", "Folder of gsm8k/test.jsonl, humaneval/HumanEval.jsonl and spec_bench/question.jsonl.")
    output: str = option("", "Run folder; empty: runs/ and the configuration's name.")

    def __post_init__(self) -> None:
        check_least(self, 1, "tokens")
        for name in ("minutes", "seconds"):
            check(getattr(self, name) > 0, name, "above 0", getattr(self, name))
        check(bool(self.threads) and min(self.threads) >= 1, "threads", "numbers of at least 1", list(self.threads))
        check(bool(self.temperatures), "temperatures", "at least one number", [])
        check(min(self.temperatures) >= 0, "temperatures", "numbers of at least 0", list(self.temperatures))
        for name in self.workloads:
            if "=" not in name:
                check_known("workload", name, MAKERS)


class Cell(NamedTuple):
    """What is decoded, and how."""

    model: str
    workload: str
    threads: int
    temperature: float


class Session(Resumable[TuneConfig]):
    """Speeds with and without heads, and what tuning made."""

    may_change = ("output", "models", "workloads", "threads", "temperatures", "data", "seconds")

    def __init__(self, config: TuneConfig) -> None:
        super().__init__(config, config.output)
        self.tuned = read_lines(self.folder / "tuned.jsonl", repair=True)

    def run(self) -> None:
        """Tune and measure what is missing, one model and workload after another."""
        config, known = self.config, {Cell(*[line[name] for name in Cell._fields]) for line in self.lines}
        for model, spec in product(config.models, config.workloads):
            name = spec.partition("=")[0]
            cells = [Cell(model, name, *how) for how in product(config.threads, config.temperatures)]
            missing = [cell for cell in cells if cell not in known]
            if not missing:
                continue
            workload = workload_of(spec, Path(config.data))
            heads = self.folder / "heads" / f"{Path(model).stem}-{name}"
            if not any((line["model"], line["workload"]) == (model, name) for line in self.tuned):
                self._tune(model, name, workload, heads)
            self._measure(missing, workload, heads)

    def _tune(self, model: str, name: str, workload: Workload, heads: Path) -> None:
        config = self.config
        torch.set_num_threads(max(config.threads))
        llm = open_llm(model)
        tasks, held = split_prompts(llm, workload.prompts, config.tokens, config.seed, workload.held_out)
        self.say(f"{model}, {name}: {len(tasks)} prompts, {len(held)} held out, {config.minutes} minutes of tuning")
        tuned = llm.tune(
            workload.prompts,
            heads,
            held_out=workload.held_out,
            minutes=config.minutes,
            max_tokens=config.tokens,
            keep=True,
            seed=config.seed,
            report=self.say,
        )
        before, after = tuned.agreement[tuned.exits[0]]
        line = {"model": model, "workload": name, "prompts": len(tasks), "held_out": len(held)}
        line |= {"answers": tuned.num_answers, "tokens": tuned.num_tokens, "exits": list(tuned.exits)}
        line |= {"before": round(before, 4), "after": round(after, 4), "seconds": round(tuned.seconds, 1)}
        line |= {"by_place": [round(share, 4) for share in tuned.by_position], "steps": tuned.steps}
        append_line(self.folder / "tuned.jsonl", line)
        self.tuned.append(line)

    def _measure(self, cells: Sequence[Cell], workload: Workload, heads: Path) -> None:
        config = self.config
        llm = open_llm(cells[0].model, exit_heads=heads)
        _, held = split_prompts(llm, workload.prompts, config.tokens, config.seed, workload.held_out)
        split = llm.target.split
        prior = profile.stored_prior(heads / profile.STORED, split)
        for cell in cells:
            torch.set_num_threads(cell.threads)
            self.say(" ".join(map(str, cell)))
            tasks = [task._replace(temperature=cell.temperature, seed=at) for at, task in enumerate(held)]
            begun = perf_counter()
            assert split.exit_heads is not None
            found = measure_speeds(
                llm,
                split.exit_heads,
                prior,
                tasks,
                lambda: perf_counter() - begun < config.seconds,  # noqa: B023
            )
            self._keep(cell, found)

    def _keep(self, cell: Cell, found: Measured) -> None:
        line: dict[str, Any] = {**cell._asdict(), "num_different": found.num_different, "tokens": found.tokens}
        line["seconds"] = {name: [round(one, 5) for one in each] for name, each in found.seconds.items()}
        self.keep(line)

    def finish(self) -> str:
        """Write the tables, and return them."""
        machine, config = measurement.machine(), self.config
        about = (
            f"{machine['cpu']}, {machine['cpu_cores']} cores, torch {machine['torch']}, selfspec at "
            f"{machine['commit']}: {config.minutes} minutes of tuning, at most {config.tokens} tokens per answer. "
            "plain: tokens/s; the others: over plain, with 95 % intervals over held-out prompts."
        )
        made = [
            [
                str(line["model"]),
                str(line["workload"]),
                *(f"{line[name]:,}" for name in ("prompts", "held_out", "answers", "tokens")),
                ", ".join(map(str, line["exits"])),
                *(f"{line[name]:.3f}" for name in ("before", "after")),
                ", ".join(f"{share:.2f}" for share in line["by_place"]),
                f"{line['seconds']:.0f}",
            ]
            for line in self.tuned
        ]
        text = f"{about}\n\n{table(TUNED_COLUMNS, made)}\n\n{table(COLUMNS, [*map(row_of, self.lines)])}\n"
        write_file(self.folder / "tune.md", text)
        return text


def workload_of(spec: str, data: Path) -> Workload:
    """A workload by its name, or NAME=FILE.

    Raises:
        ValueError: a file is missing or damaged.
    """
    name, _, file = spec.partition("=")
    if not file:
        return make(name, data)
    try:
        return Workload(read_workload(Path(file)), None)
    except Failure as problem:
        raise ValueError(str(problem)) from problem


def ratio_of(line: Mapping[str, Any], above: str, below: str) -> tuple[float, float, float]:
    """The speed of one way over another's: geometric mean over prompts and its 95 % interval."""
    return Found(list(_ratios(line, above, below)), True).interval


def _ratios(line: Mapping[str, Any], above: str, below: str) -> Iterator[float]:
    seconds, tokens = line["seconds"], line["tokens"]
    for each in zip(seconds[below], tokens[below], seconds[above], tokens[above], strict=True):
        yield each[0] / max(1, each[1]) / (each[2] / max(1, each[3]))


def row_of(line: Mapping[str, Any]) -> list[str]:
    """A row of the second table."""
    speed = sum(line["tokens"][PLAIN]) / sum(line["seconds"][PLAIN])
    ratios = [
        f"{mean:.3f} ({low:.3f}..{high:.3f})"
        for mean, low, high in (ratio_of(line, *pair) for pair in ((WITHOUT, PLAIN), (WITH, PLAIN), (WITH, WITHOUT)))
    ]
    about = [str(line[name]) for name in Cell._fields]
    return [*about, str(len(line["tokens"][PLAIN])), f"{speed:.1f}", *ratios, str(line["num_different"])]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run or resume; returns the exit code: 1 where an output differs from plain decoding's.

    Raises:
        ValueError, OSError: an option or file cannot be used.
    """
    options = parser_of("tune", TuneConfig, __doc__).parse_args(arguments)
    session = Session(config_of(TuneConfig, options.config, flags_given(options)))
    return session.complete() or int(any(line["num_different"] for line in session.lines))
