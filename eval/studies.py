"""Studies of a run: additional measurements on some of its questions, written to `studies/NAME.json`.

acceptance   acceptance of drafts by exit layer and position: exact, from each layer's own picks
grid         speedup of every fixed setting (exit layer, draft length) over plain decoding
batch        speedup of `adaptive` and of the grid's best setting over plain decoding, by batch size
policies     speedup of every policy by replay of recorded outputs, at the costs of this machine, and bounds
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice, zip_longest
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch

from eval.answers import Failure, Prompt
from eval.asking import Shared, prompt_of
from eval.bounds import runs
from eval.config import STUDY_SIZES, RunConfig
from eval.measurement import Say
from eval.models import decode, with_policy
from eval.policies import compare
from eval.questions import Question
from eval.records import FullError, read_object, write_file
from eval.tasks import MEASURED, Recorded, ReplayConfig, trace_of
from eval.traces import Trace
from selfspec import LLM, SamplingParams
from selfspec.core import RoundOutput

DRAFT_LENGTHS = (1, 2, 3, 4, 6, 8)
BATCH_SIZES = (1, 2, 4, 8, 16, 32)
REPEATS = 3  # of a batch
MAX_SECONDS = 60.0  # after this a study begins no further measurement
MAX_DRAFTED = 8  # positions whose acceptance is shown
Record = dict[str, Any]


@dataclass
class Material:
    """The input of all studies: some questions of a run, and traces of the model's outputs.

    Args:
        prompts: the first turns of the questions.
    """

    config: RunConfig
    llm: LLM
    prompts: Sequence[Prompt]
    eos: frozenset[int]
    say: Say

    @cached_property
    def traces(self) -> list[Trace]:
        """A trace per prompt, which ends where the run's answer does."""
        found = []
        for i, prompt in enumerate(self.prompts):
            self.say(f"studies: recording question {i + 1} of {len(self.prompts)}")
            params = SamplingParams(temperature=self.config.temperature, seed=prompt.seed)
            trace = trace_of(self.llm, prompt.ids, prompt.max_new_tokens, params)
            ends = [j for j, token in enumerate(trace.tokens, 1) if token in self.eos]
            found.append(trace.cut(ends[0]) if ends else trace)
        return found

    @property
    def exits(self) -> list[int]:
        """Every eighth of the layers up to half of them."""
        layers = self.llm.target.split.num_layers
        return sorted({max(1, layers * eighths // 8) for eighths in range(1, 5)} - {layers})

    def seconds(self, prompts: Sequence[Prompt], batch_size: int, **settings: Any) -> float:
        """Seconds to decode study_tokens after every prompt, without prefill, by the engine's own clock."""
        limits = [min(self.config.study_tokens, prompt.max_new_tokens) for prompt in prompts]
        done, llm = (
            list[RoundOutput](),
            with_policy(self.llm, max_num_seqs=batch_size, **{"policy": "plain", **settings}),
        )
        seeds, ids = [prompt.seed for prompt in prompts], [prompt.ids for prompt in prompts]
        decode(llm, ids, limits, temperature=self.config.temperature, seeds=seeds, on_round=done.append)
        return sum(round_.seconds.total - round_.seconds.prefill for round_ in done)


def acceptance(material: Material) -> Record:
    """`joint[i - 1]` is the share of output positions from which the next i drafted tokens are all accepted.

    Only positions with at least i tokens left count; None where there are none.
    """
    exits = []
    for layer in range(1, material.llm.target.split.num_layers):
        lengths = [runs(trace.hits[layer - 1]) for trace in material.traces]
        right = [np.concatenate([n[: max(0, len(n) - i + 1)] >= i for n in lengths]) for i in range(1, MAX_DRAFTED + 1)]
        exits.append({"exit_layer": layer, "joint": [float(each.mean()) if each.size else None for each in right]})
    num_tokens = sum(len(trace.tokens) for trace in material.traces)
    return {"num_layers": material.llm.target.split.num_layers, "num_tokens": num_tokens, "exits": exits}


def grid(material: Material) -> Record:
    """Time every setting and plain decoding in turn, question by question; figures are medians of the ratios."""
    ratios: dict[tuple[int, int], list[float]] = {(e, d): [] for e in material.exits for d in DRAFT_LENGTHS}
    speeds, start = list[float](), perf_counter()
    for i, prompt in enumerate(material.prompts):
        if i and perf_counter() - start > MAX_SECONDS:
            break
        material.say(f"grid: question {i + 1} of {len(material.prompts)}")
        for layer in material.exits:
            plain = material.seconds([prompt], 1)
            speeds.append(min(material.config.study_tokens, prompt.max_new_tokens) / plain)
            for length in DRAFT_LENGTHS:
                settings = {"policy": "fixed", "exit_layer": layer, "num_speculative_tokens": length}
                ratios[layer, length].append(plain / material.seconds([prompt], 1, **settings))
    plain = median(speeds)
    speedups = {setting: median(found) for setting, found in ratios.items()}
    best = max(speedups, key=lambda setting: speedups[setting])
    return {
        "exit_layers": material.exits,
        "draft_lengths": list(DRAFT_LENGTHS),
        "plain_tokens_per_second": plain,
        "tokens_per_second": [[plain * speedups[e, d] for d in DRAFT_LENGTHS] for e in material.exits],
        "best": {"exit_layer": best[0], "draft_length": best[1], "speedup": speedups[best]},
    }


def batch(material: Material) -> Record:
    """Time batch sizes up to the first that exceeds memory, or that would probably take longer than MAX_SECONDS.

    Prompts are repeated until the last batch is full.
    """
    found = read_object(study_path(Path(material.config.output), "grid")).get("best", {})
    layer = found.get("exit_layer", max(1, material.llm.target.split.num_layers // 4))
    fixed = {"policy": "fixed", "exit_layer": layer, "num_speculative_tokens": found.get("draft_length", 4)}
    methods: dict[str, Record] = {"adaptive": {"policy": "adaptive"}}
    methods[f"fixed:{layer},{fixed['num_speculative_tokens']}"] = fixed
    speedups: dict[str, list[Record]] = {name: [] for name in methods}
    sizes: list[int] = []
    last, now = 0.0, perf_counter()  # `last`: seconds of the size before
    for size in BATCH_SIZES:
        if 2 * last > MAX_SECONDS:
            break
        material.say(f"batch: {size} rows")
        count = -(-len(material.prompts) // size) * size  # whole batches
        prompts = [material.prompts[i % len(material.prompts)] for i in range(count)]
        try:
            taken = [_time_all(material, prompts, size, methods) for _ in range(REPEATS + 1)][1:]  # the first warms up
        except torch.OutOfMemoryError:
            break
        sizes.append(size)
        last, now = perf_counter() - now, perf_counter()
        for name, of_name in speedups.items():
            values = [each["plain"] / each[name] for each in taken]
            of_name.append({"median": median(values), "low": min(values), "high": max(values)})
    return {"batch_sizes": sizes, "methods": [{"method": n, "speedup": found} for n, found in speedups.items()]}


def _time_all(material: Material, prompts: Sequence[Prompt], size: int, methods: Record) -> dict[str, float]:
    """Seconds of plain decoding and of every method, one right after the other."""
    return {name: material.seconds(prompts, size, **options) for name, options in {"plain": {}, **methods}.items()}


def policies(material: Material) -> Record:
    """Replay every policy, a new one per question; speedups are over plain decoding of all questions together."""
    target, length = material.llm.target, max(len(trace.tokens) for trace in material.traces)
    material.say(f"policies: replaying {len(material.traces)} questions")
    defaults = target.default_exit_layer, target.default_num_speculative_tokens
    task = Recorded("run", material.traces, target.costs(), *defaults)
    config = ReplayConfig(lengths=(length,), head_layers=(MEASURED,), temperature=material.config.temperature)
    (section,) = compare([task], config)
    rows = [{"name": row["name"], "kind": row["kind"], "speedup": row["mean"]} for row in section["rows"]]
    return {"length": length, "rows": rows}


MAKE: dict[str, Callable[[Material], Record]] = {f.__name__: f for f in (acceptance, grid, batch, policies)}


def make_studies(config: RunConfig, llm: LLM, questions: Sequence[Question], shared: Shared, say: Say) -> None:
    """Make the studies that the run folder lacks, or has with other sizes.

    The file of a study that fails has the reason in place of figures.

    Raises:
        FullError: a file could not be written; the folder can be resumed.
    """
    folder, sizes = Path(config.output), {key: getattr(config, key) for key in STUDY_SIZES}
    material: Material | None = None
    for name in config.studies:
        path = study_path(folder, name)
        if path.exists() and _is_of(path, sizes):
            continue
        say(f"study: {name}")
        try:
            material = material or _material(config, llm, questions, shared, say)
            made = {**MAKE[name](material), "num_questions": len(material.prompts)}
        except FullError:
            raise
        except Exception as problem:  # a failed study must not cost the answers
            text = f"{problem}" if isinstance(problem, ValueError) else f"{type(problem).__name__}: {problem}"
            made = {"error": " ".join(text.split())}
            say(f"study {name}: {made['error']}")
        write_file(path, json.dumps({"study": name, **made, **sizes}, indent=1) + "\n")


def study_path(folder: Path, name: str) -> Path:
    return folder / "studies" / f"{name}.json"


def _is_of(path: Path, sizes: dict[str, int]) -> bool:
    try:
        found = read_object(path)
    except ValueError:
        return False
    return all(found.get(key) == size for key, size in sizes.items())


def _material(config: RunConfig, llm: LLM, questions: Sequence[Question], shared: Shared, say: Say) -> Material:
    """The first turns of `config.study_questions` questions that fit into the context, evenly from all categories."""
    fitting: dict[str, list[Prompt]] = {}
    for i, question in enumerate(questions):
        try:
            fitting.setdefault(question.category, []).append(prompt_of(question, 0, [], shared, i))
        except Failure:
            continue
    interleaved = (prompt for group in zip_longest(*fitting.values()) for prompt in group if prompt is not None)
    chosen = list(islice(interleaved, config.study_questions))
    if not chosen:
        raise ValueError(f"no question leaves room for a token in the model's context of {shared.context_limit}")
    eos = frozenset[int]() if config.ignore_eos else llm.target.eos_token_ids
    return Material(config, llm, chosen, eos, say)


def sections(folder: Path, section: Callable[..., Any]) -> Iterator[Any]:
    """The report's sections of a folder's studies; a broken file gives a section with the reason."""
    for name, (title, text, show) in SHOWN.items():
        try:
            found = read_object(study_path(folder, name))
            if "error" in found:
                yield section(title, [f"The study {name} failed: {found['error']}"])
            elif found:
                count = found.get("num_questions")
                yield section(title, [f"{text} {count} questions." if count else text], *show(found))
        except (ValueError, KeyError, TypeError, AttributeError) as problem:
            yield section(title, [f"studies/{name}.json cannot be shown ({problem})."])


Cells = tuple[list[str], list[list[str]]]


def _acceptance_table(found: Record) -> Cells:
    rows = [
        [str(each["exit_layer"]), *("" if share is None else f"{share:.2f}" for share in each["joint"])]
        for each in found["exits"]
    ]
    return ["exit layer", *(str(i) for i in range(1, 1 + max(len(row) - 1 for row in rows)))], rows


def _grid_table(found: Record) -> Cells:
    plain = found["plain_tokens_per_second"]
    pairs = zip(found["exit_layers"], found["tokens_per_second"], strict=True)
    return (
        ["exit layer", *map(str, found["draft_lengths"])],
        [[str(layer), *(f"{speed / plain:.2f}" for speed in speeds)] for layer, speeds in pairs],
    )


def _batch_table(found: Record) -> Cells:
    rows = []
    for method in found["methods"]:
        cells = (f"{each['median']:.2f} ({each['low']:.2f}..{each['high']:.2f})" for each in method["speedup"])
        rows.append([f"`{method['method']}`", *cells])
    return ["method", *(f"{size} rows" for size in found["batch_sizes"])], rows


def _policies_table(found: Record) -> Cells:
    rows = sorted(found["rows"], key=lambda row: -row["speedup"])
    return ["name", "kind", "speedup"], [[f"`{row['name']}`", row["kind"], f"{row['speedup']:.2f}"] for row in rows]


RATIO = "Speedup over plain decoding"
SHOWN: dict[str, tuple[str, str, Callable[[Record], Cells]]] = {
    "acceptance": (
        "Acceptance",
        "Share of drafts that are accepted up to and including a position, by exit layer.",
        _acceptance_table,
    ),
    "grid": ("Exit layer and draft length", f"{RATIO} by exit layer and drafted tokens, without prefill.", _grid_table),
    "batch": ("Batches", f"{RATIO} of the same batch, without prefill: median and range of the repeats.", _batch_table),
    "policies": (
        "Policies",
        f"{RATIO} by replay at this machine's costs; bounds know the output.",
        _policies_table,
    ),
}
