"""Where the default policy is slower than plain decoding: `python -m eval guard`.

A cell is a model, a number of threads and of rows, a kind of text, a temperature, and whether the policy has decoded
before: "cold" begins every time without statistics, "warm" goes on with those of the text before. A cell decodes
batches of questions plainly and by the default policy in turns, each first every other time, until the 95 % interval of
the ratio of their times is narrow enough or lies above the floor. Times are of decoding, without reading the prompts.
Cells that do not become narrow in time are undecided, which does not pass. Outputs are compared, too. A run that was
stopped is resumed by the same command. Cells in virtual time follow, see `eval.guard_virtual`.

For models with random weights a text is scripted: predicted outputs (`SamplingParams.prediction`) of whose tokens a
given share is right.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, product
from pathlib import Path
from statistics import fmean, stdev
from time import perf_counter
from typing import NamedTuple

import torch

from eval import measurement
from eval.config import FOLDER, config_of, parser_of
from eval.figures import drawing, table
from eval.guard_virtual import ACCEPTANCE, GPU, RECORDING, SHAPE, Seconds, Virtual, simulate
from eval.models import Ids, decode, open_llm, with_policy
from eval.questions import encode, read_questions
from eval.records import append_line, read_lines, write_file
from eval.session import Resumable
from selfspec import LLM
from selfspec.core import RoundOutput
from train.configuration import check, check_known, check_least, flags_given, option

COLD, WARM = "cold", "warm"
FEWEST = 6  # pairs of a cell
PROMPT = 48  # tokens of a random prompt
COLUMNS = (
    "model",
    "threads",
    "rows",
    "text",
    "temperature",
    "start",
    "ratio",
    "interval",
    "lowest",
    "pairs",
    "verdict",
)


FILES = {"free": "stories.jsonl", "repeating": "editing.jsonl", "code": "prompts.jsonl"}
TEXTS = tuple(f"{name}={FOLDER / file}" for name, file in FILES.items())


@dataclass(frozen=True, slots=True)
class GuardConfig:
    """The configuration of `python -m eval guard`."""

    models: tuple[str, ...] = option(("demo", "smollm2"), "Names of models, folders or GGUF files.")
    threads: tuple[int, ...] = option((1, 2), "Numbers of threads.")
    rows: tuple[int, ...] = option((1, 4, 16), "Rows decoded together.")
    texts: tuple[str, ...] = option(TEXTS, "NAME=FILE of questions, or NAME=SHARE of right tokens of predictions.")
    temperatures: tuple[float, ...] = option((0.0, 0.8), "Temperatures.")
    starts: tuple[str, ...] = option((COLD, WARM), "cold: without statistics of earlier texts; warm: with them.")
    tokens: int = option(128, "Tokens per row; ends of text are ignored.")
    half_width: float = option(0.02, "Half of the 95 % interval of a decided cell's ratio.")
    least: float = option(0.98, "Least ratio of a cell that passes: plain decoding's time over the policy's.")
    least_cold: float = option(0.97, "The same where the policy starts without statistics.")
    virtual_rows: tuple[int, ...] = option((1, 4, 8, 32, 128), "Rows of cells in virtual time; none: no such cells.")
    seconds: float = option(60.0, "Seconds after which a cell begins no further pair.")
    output: str = option("", "Run folder; empty: runs/ and the configuration's name.")

    def __post_init__(self) -> None:
        check_least(self, 1, "tokens")
        check(self.half_width > 0, "half_width", "above 0", self.half_width)
        for name in ("threads", "rows"):
            check(bool(getattr(self, name)) and min(getattr(self, name)) >= 1, name, "numbers of at least 1", "less")
        for name in self.starts:
            check_known("start", name, (COLD, WARM))
        check(bool(self.texts) and all("=" in text for text in self.texts), "texts", "NAME=FILE", list(self.texts))

    def floor(self, start: str) -> float:
        """The least ratio of a cell that passes."""
        return self.least_cold if start == COLD else self.least


class Cell(NamedTuple):
    """What is decoded, and how."""

    model: str
    threads: int
    rows: int
    text: str
    temperature: float
    start: str


class Found(NamedTuple):
    """The ratios of a cell: plain decoding's seconds over the policy's, pair by pair."""

    ratios: list[float]
    is_equal: bool  # whether the outputs were

    @property
    def interval(self) -> tuple[float, float, float]:
        """Geometric mean and 95 % interval."""
        logs = [math.log(ratio) for ratio in self.ratios]
        from scipy.stats import t  # slow to import

        degrees = len(logs) - 1
        half = t.ppf(0.975, degrees) * stdev(logs) / math.sqrt(len(logs)) if degrees else math.inf
        return math.exp(fmean(logs)), math.exp(fmean(logs) - half), math.exp(fmean(logs) + half)

    @property
    def half_width(self) -> float:
        mean, low, _ = self.interval
        return mean - low

    def verdict(self, least: float, half_width: float) -> str:
        """`passes`, `fails` or `undecided`."""
        mean, low, high = self.interval
        if not self.is_equal or high < least:
            return "fails"
        if low >= least or (mean >= least and self.half_width <= half_width):
            return "passes"
        return "fails" if self.half_width <= half_width else "undecided"


class Session(Resumable[GuardConfig]):
    """Ratios of times, measured and in virtual time."""

    may_change = ("output", "models", "threads", "rows", "texts", "temperatures", "starts", "seconds", "virtual_rows")

    def __init__(self, config: GuardConfig) -> None:
        super().__init__(config, config.output)
        self.passes = False  # whether all cells do; `finish` finds out

    @property
    def found(self) -> dict[Cell, Found]:
        """The cells that were measured."""
        known = {Cell(*[line[name] for name in Cell._fields]): line for line in self.lines}
        return {cell: Found(line["ratios"], line["is_equal"]) for cell, line in known.items()}

    def run(self) -> None:
        """Measure what is missing, model by model."""
        config, known = self.config, self.found
        missing = [cell for cell in cells_of(config) if cell not in known]
        begun, done = perf_counter(), 0
        for model in config.models:
            own = [cell for cell in missing if cell.model == model]
            llm = open_llm(model) if own else None
            for cell in own:
                assert llm is not None
                torch.set_num_threads(cell.threads)
                left = (perf_counter() - begun) / done * (len(missing) - done) / 60 if done else math.nan
                self.say(f"{' '.join(map(str, cell))}, {left:.0f} minutes left")
                self._keep(cell, measured(llm, cell, config))
                done += 1
        known_virtual = self.virtual
        for virtual in (Virtual(rows, acceptance) for rows in config.virtual_rows for acceptance in ACCEPTANCE):
            if virtual not in known_virtual:
                self.say(f"virtual time: {virtual.rows} rows, acceptance {virtual.acceptance}")
                append_line(self.folder / "virtual.jsonl", virtual._asdict() | simulate(virtual)._asdict())

    @property
    def virtual(self) -> dict[Virtual, Seconds]:
        """The cells in virtual time that were simulated."""
        lines = read_lines(self.folder / "virtual.jsonl", repair=True)
        each = [[line[name] for name in (*Virtual._fields, *Seconds._fields)] for line in lines]
        return {Virtual(*one[:2]): Seconds(*one[2:]) for one in each}

    def _keep(self, cell: Cell, found: Found) -> None:
        line = {**cell._asdict(), "ratios": [round(ratio, 4) for ratio in found.ratios], "is_equal": found.is_equal}
        self.keep(line)

    def finish(self) -> str:
        """Write the table and the plot, and return the table."""
        config, lines, means = self.config, [], []
        for cell, found in sorted(self.found.items(), key=lambda item: item[1].interval[0]):
            mean, low, high = found.interval
            verdict = found.verdict(config.floor(cell.start), config.half_width)
            figures = f"{mean:.3f}", f"{low:.3f}..{high:.3f}", f"{min(found.ratios):.2f}", str(len(found.ratios))
            lines.append([*map(str, cell), *figures, verdict])
            means.append((" ".join(map(str, cell)), mean, low, high))
        machine = measurement.machine()
        about = (
            f"{machine['cpu']}, {machine['cpu_cores']} cores, torch {machine['torch']}, selfspec at "
            f"{machine['commit']}: plain decoding's time over the default policy's, {config.tokens} tokens per row."
        )
        passed = sum(line[-1] == "passes" for line in lines)
        text = f"{about}\n\n{passed} of {len(lines)} cells pass.\n\n{table(COLUMNS, lines)}\n"
        if virtual := self.virtual:
            text += f"\n{_virtual_table(virtual)}\n"
        passed -= sum(not seconds.passes(cell.acceptance) for cell, seconds in virtual.items())
        write_file(self.folder / "guard.md", text)
        _plot(means, self.folder / "guard.svg")
        self.passes = passed == len(lines)
        return text


def cells_of(config: GuardConfig) -> Iterator[Cell]:
    """All cells of a configuration."""
    texts = [text.partition("=")[0] for text in config.texts]
    for model, threads, rows in product(config.models, config.threads, config.rows):
        for text, temperature, start in product(texts, config.temperatures, config.starts):
            yield Cell(model, threads, rows, text, temperature, start)


def measured(llm: LLM, cell: Cell, config: GuardConfig) -> Found:
    """Decode a cell's batches in turns."""
    given = dict(text.partition("=")[::2] for text in config.texts)[cell.text]
    share = _share(given)
    prompts = encode(read_questions(given), llm.tokenizer) if share is None else _random_prompts(llm)
    found, begun = Found([], True), perf_counter()
    for number in count():
        batch = [prompts[(number * cell.rows + i) % len(prompts)] for i in range(cell.rows)]
        if number == 0:  # not timed
            others = _pair(llm, cell)
            for one in others:
                decode(one, batch, 8)
        predictions = None if share is None else _predicted(others[0], batch, cell, config.tokens, number, share)
        if number == 0 or cell.start == COLD:  # both with a new KV cache, whose memory has not been touched
            plain, policy = _pair(llm, cell)
        pair = (plain, policy) if number % 2 else (policy, plain)
        with measurement.no_garbage_collection():
            done = {id(one): _decoded(one, batch, cell, config.tokens, number, predictions) for one in pair}
        (seconds, wanted), (own, tokens) = done[id(plain)], done[id(policy)]
        found = Found([*found.ratios, seconds / own], found.is_equal and tokens == wanted)
        decided = found.half_width <= config.half_width or found.interval[1] >= config.floor(cell.start)
        if (number + 1 >= FEWEST and decided) or perf_counter() - begun >= config.seconds:
            return found
    raise AssertionError("unreachable")


def _pair(llm: LLM, cell: Cell) -> tuple[LLM, LLM]:
    """Plain decoding and the default policy, which know nothing of earlier texts."""
    plain = with_policy(llm, policy="plain", max_num_seqs=cell.rows)
    return plain, with_policy(llm, policy="adaptive", max_num_seqs=cell.rows)


def _share(given: str) -> float | None:
    """The share of right tokens in predictions that a text's value says; None where it is a file."""
    try:
        return float(given)
    except ValueError:
        return None


def _random_prompts(llm: LLM) -> list[list[int]]:
    """Prompts for models whose weights are random."""
    dice = random.Random(0)
    return [[dice.randrange(llm.target.split.vocab_size) for _ in range(PROMPT)] for _ in range(64)]


def _predicted(plain: LLM, batch: Ids, cell: Cell, num_tokens: int, seed: int, share: float) -> list[list[int]]:
    """The outputs of plain decoding, of whose tokens this share is right and the others are random."""
    _, outputs = _decoded(plain, batch, cell, num_tokens, seed)
    dice, vocab = random.Random(seed), plain.target.split.vocab_size
    return [[token if dice.random() < share else dice.randrange(vocab) for token in output] for output in outputs]


def _decoded(
    llm: LLM, batch: Ids, cell: Cell, num_tokens: int, seed: int, predictions: Ids | None = None
) -> tuple[float, list[list[int]]]:
    """Seconds of decoding a batch, and its tokens."""
    reading = 0.0

    def on_round(round_: RoundOutput) -> None:
        nonlocal reading
        reading += round_.seconds.prefill

    start = perf_counter()
    how = {"temperature": cell.temperature, "seeds": seed, "predictions": predictions, "on_round": on_round}
    done = decode(llm, batch, num_tokens, **how)
    return perf_counter() - start - reading, [one.token_ids for one in done]


def _virtual_table(found: Mapping[Virtual, Seconds]) -> str:
    lines = [
        [
            *map(str, cell),
            f"{seconds.of_plain:.3f}",
            f"{seconds.of_fixed:.3f}",
            f"{seconds.recordings} ({seconds.recording:.1f} s of {seconds.adaptive:.1f})",
            "passes" if seconds.passes(cell.acceptance) else "fails",
        ]
        for cell, seconds in found.items()
    ]
    about = (
        f"In virtual time, {SHAPE} on {GPU}: computed costs, the policy's own measured time, and recordings that no "
        f"start makes at {RECORDING} s each (a guess); texts of set acceptance at a quarter of the layers."
    )
    columns = ("rows", "acceptance", "plain over adaptive", "best fixed over adaptive", "recordings", "verdict")
    return f"{about}\n\n{table(columns, lines)}"


def _plot(means: Sequence[tuple[str, float, float, float]], path: Path) -> None:
    """The ratios and intervals of all cells, the lowest first."""
    if not means:
        return
    with drawing((8, 1 + 0.16 * len(means)), path) as figure:
        axes = figure.add_subplot()
        for place, (_, mean, low, high) in enumerate(means):
            axes.plot([low, high], [place, place], color="0.6")
            axes.plot([mean], [place], "o", color="C0", markersize=3)
        axes.set_yticks(range(len(means)), [name for name, *_ in means], fontsize=5)
        axes.axvline(1.0, color="0.3", linewidth=0.8)
        axes.set_xlabel("plain decoding's time over the default policy's")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run or resume; returns the exit code: 1 where a cell does not pass.

    Raises:
        ValueError, OSError: an option or file cannot be used.
    """
    options = parser_of("guard", GuardConfig, __doc__).parse_args(arguments)
    session = Session(config_of(GuardConfig, options.config, flags_given(options)))
    return session.complete() or int(not session.passes)
