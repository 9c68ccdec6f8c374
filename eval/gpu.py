"""Measure decoding on a GPU, and compare it with the speed of the device: `python -m eval gpu --minutes 4`.

Targets are synthetic: well-known shapes, random weights, a set acceptance. Every shape is measured in its own process,
so a lost CUDA context or a crash costs one measurement. The record is written after each, the most important first;
what is not measured says why. A table goes to standard output, then the record as one line of JSON.
`python -m eval gpu configs/eval/gpu_small.yaml` tries the command on a CPU in a minute.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import time

import torch

from eval.config import config_of, parser_of
from eval.gpu_figures import DRAFT_TOKENS, Cell, figures, render
from eval.gpu_peers import TRANSFORMERS, folder_rate, read_peer, transformers_rate
from eval.gpu_rates import (
    TEMPERATURE,
    Record,
    Rows,
    device_speed,
    first_token,
    launches,
    layers_of,
    prefill_rate,
    recordings_of,
    replayed,
    sizes_of,
)
from eval.measurement import ROOT, device, machine, rounded
from eval.models import with_policy
from eval.shapes import SHAPES
from eval.synthetic import Synthetic, synthetic_target
from selfspec import LLM
from train.configuration import as_plain, build, check, check_least, flags_given, option

OWN = ("plain", "fixed", "adaptive")
ADAPTIVE = (
    "adaptive, again",
    "adaptive:exit",
    "adaptive, hopeless",
    "plain, hopeless",
)  # beside "adaptive", the cold one
NUM_FIRST = 2  # batch sizes that are measured before all others
FIRST_SECONDS = 160.0  # minimum of the first shape in a short run
GRACE = 30.0  # seconds that a process may exceed its time
OPENING, LOST = "opening", 3  # the measurement's name while a shape is opened; exit code after a lost CUDA context


@dataclass(frozen=True, slots=True)
class GpuConfig:
    """The configuration of `python -m eval gpu`."""

    shapes: tuple[str, ...] = option(("llama-3-8b", "smollm2-135m"), "Shapes, or config.json files.")
    minutes: float = option(9.5, "Time limit; what there is no time for is reported as not measured.")
    batch_sizes: tuple[int, ...] = option((1, 32, 8, 128, 4, 64, 2, 16), "Rows decoded together, by importance.")
    peer_batch_sizes: tuple[int, ...] = option((1, 8, 32), "Batch sizes of peers, of exact mode and of long contexts.")
    contexts: tuple[int, ...] = option((1024, 8192), "Tokens of a prompt; the first with all batch sizes.")
    methods: tuple[str, ...] = option(
        ("plain", "fixed", "adaptive"),
        "Methods at the first two batch sizes; adaptive:exit+lookup names its drafters, fixed:N its draft length. "
        "'adaptive, again' is adaptive after what it has learned.",
    )
    draft_lengths: tuple[int, ...] = option((2, 6), f"Other draft lengths of fixed than {DRAFT_TOKENS}.")
    acceptance: float = option(0.8, "Acceptance of the targets at an eighth of the layers, 0.05..1.")
    launches: bool = option(
        False, "Time each launch of a fused layer alone at 1, 5, 32 and 160 tokens, and tiny kernels."
    )
    peer: tuple[str, ...] = option((), "Folders of peers, each with a selfspec_peer.json; see docs/measurements.md.")
    dtype: str = option("bfloat16", "Number format of the weights.")
    device: str = option("cuda", "Device; 'cpu' is for trying the command.")
    new_tokens: int = option(256, "New tokens per row; rows begin again where they end before the measurement does.")
    warm_seconds: float = option(0.4, "Seconds of decoding before the measurement.")
    window_seconds: float = option(0.8, "Seconds of the measurement.")
    compile_seconds: float = option(60.0, "Expected seconds of a peer that compiles.")

    def __post_init__(self) -> None:
        check_least(self, 16, "new_tokens")  # a round has at most a few tokens, and the first one is not counted
        check_least(self, 0, "minutes", "warm_seconds", "window_seconds", "compile_seconds")
        for name, least in (("batch_sizes", 1), ("contexts", 2)):
            given = getattr(self, name)
            check(bool(given) and min(given) >= least, name, f"numbers of at least {least}", list(given))
        check(all(n >= 1 for n in self.draft_lengths), "draft_lengths", "at least 1", list(self.draft_lengths))
        dtypes = ("bfloat16", "float16", "float32")
        check(self.dtype in dtypes, "dtype", f"among {', '.join(dtypes)}", self.dtype)
        for name in self.shapes:
            known = name in SHAPES or Path(name).exists()
            check(known, "shapes", f"of {', '.join(SHAPES)}, or a config.json", name)
        names = [read_peer(folder).name for folder in self.peer]
        check(len(set(names)) == len(names), "peer", "folders of different names", names)


def cells_of(config: GpuConfig) -> list[Cell]:
    """All measurements, the most important first, without repetition."""
    first, *longer = dict.fromkeys(config.contexts)
    batches = list(dict.fromkeys(config.batch_sizes))
    peers = [batch for batch in batches if batch in config.peer_batch_sizes]
    found = [Cell(first, batch, method) for batch in batches[:NUM_FIRST] for method in config.methods]
    found[len(config.methods) : len(config.methods)] = [Cell(first, 1, "hf")] if 1 in peers else []
    found += [Cell(first, batch, method) for batch in batches for method in ("plain", "adaptive")]
    found += [Cell(first, 1, "launches")] if config.launches else []
    found += [Cell(first, batch, method) for batch in peers for method in ADAPTIVE]
    found += [Cell(first, 1, "first token")]
    found += [Cell(first, batch, "plain, exact") for batch in peers]
    found += [Cell(context, 1, "prefill") for context in (first, *longer)]
    lengths = [f"fixed:{length}" for length in config.draft_lengths]
    folders = [f"peer:{read_peer(folder).name}" for folder in config.peer]
    found += [Cell(first, batch, method) for batch in peers for method in ("fixed", *lengths, "hf", *folders)]
    found += [Cell(first, 1, "hf early exit")] if 1 in peers else []
    found += [Cell(context, batch, method) for context in longer for batch in peers for method in (*OWN, "hf")]
    return list(dict.fromkeys([*found, *([Cell(first, 1, "hf static")] if 1 in peers else [])]))


# -------------------------------------------------------------------------------------------------------- one shape


class Shape:
    """The measurements of a shape in this process, as far as time and memory allow.

    Args:
        path: the file of the record, written after every measurement; what it holds is not measured again.
        end: planned end, in seconds of `time`.
    """

    def __init__(self, path: Path, name: str, end: float) -> None:
        self.path, self.name, self.end = path, name, end
        self.record = json.loads(path.read_text("utf-8"))
        self.config, self.found = build(GpuConfig, self.record["config"]), self.record["shapes"][name]
        self.device = torch.device(self.config.device)
        self.taken: dict[str, float] = {}  # seconds of the last measurement by kind
        self.llms: dict[str, LLM] = {}
        self.where: Record = {}  # how targets are made
        self.hopeless: Synthetic | None = None  # a target whose early layers know nothing

    def measure(self) -> None:
        """Measure everything that the record lacks; exits with `LOST` where the device cannot be used any more."""
        self.trying(OPENING)
        try:
            self.found.setdefault("speed", device_speed(self.device))
            # Rows may be longer than the model's training length: speed does not depend on it.
            longest = max(self.config.contexts) + 2 * self.config.new_tokens
            where: Record = {"device": self.device, "dtype": getattr(torch, self.config.dtype)}
            where |= {"acceptance": self.config.acceptance, "temperature": TEMPERATURE}
            self.where = {"max_position_embeddings": longest, **where}
            self.target = synthetic_target(self.name, **self.where)
        except Exception as problem:
            self.missing(OPENING, problem)
            return
        self.found |= {"target": self.target.about(), "sizes": sizes_of(self.target), "device": device(self.device)}
        self.found["opened"] = {"layers": layers_of(self.target.split), **recordings_of(self.target.llm)}
        for cell in cells_of(self.config):
            if str(cell) not in self.found["tried"]:
                self.cell(cell)

    def cell(self, cell: Cell) -> None:
        kind, left = cell.method.partition(":")[0], self.end - time()
        longest = max(2 * (self.config.warm_seconds + self.config.window_seconds), *self.taken.values(), 0.0)
        expected = self.taken.get(kind, self.config.compile_seconds if kind == "hf static" else longest)
        if left < expected:
            self.missing(str(cell), f"no time: about {expected:.0f} s needed, {max(0, left):.0f} s left")
            return
        self.trying(str(cell))
        begun = time()
        try:
            self.found["cells"].append({**cell._asdict(), **self.measured(cell)})
        except Exception as problem:
            self.missing(str(cell), problem)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        if kind != "hf static":
            self.taken[kind] = time() - begun
        save(self.path, self.record)

    def measured(self, cell: Cell) -> Record:
        """The figures of a cell."""
        config, (context, batch, method) = self.config, cell
        if method.startswith("peer:"):
            peer = next(one for one in map(read_peer, config.peer) if f"peer:{one.name}" == method)
            about: Record = {"context": context, "new_tokens": config.new_tokens, "dtype": config.dtype}
            return folder_rate(peer, self.end - time(), shape=self.name, batch=batch, device=config.device, **about)
        if method in TRANSFORMERS:
            return transformers_rate(self.target, method, batch, context, config.window_seconds, DRAFT_TOKENS)
        llm = self.llm(method)
        if method == "prefill":
            return prefill_rate(llm, context)
        if method == "first token":
            return first_token(llm, self.llm("plain, prefix cache"), context)
        if method == "launches":
            return {"tokens_per_second": 0.0, "launches": launches(llm.target.split)}
        before = recordings_of(llm)
        rows = Rows(llm, batch, context, config.new_tokens)
        found = rows.rate(config.warm_seconds, config.window_seconds)
        rows.stop()
        now = recordings_of(llm)
        found |= {name: now[name] - before[name] for name in ("recordings", "recording_seconds")}
        found["recording_mib"] = now["recording_mib"]
        llm.keep_statistics(rows.engine)
        if method in ("plain", "fixed"):
            try:
                found |= replayed(rows)
            except ValueError as problem:
                found["why_not_busy"] = str(problem)
        return found

    def llm(self, method: str) -> LLM:
        """The target with a method's policy, which goes on with what it learned in earlier measurements."""
        name, _, given = method.removesuffix(", again").partition(":")
        policy, _, how = name.partition(", ")
        options: Record = {"policy": policy if policy in OWN else "plain", "exact": how == "exact"}
        if name == "fixed":
            options |= {"exit_layer": self.target.made.exit_layer, "num_speculative_tokens": int(given or DRAFT_TOKENS)}
        if name == "adaptive" and given:
            options["drafters"] = tuple(given.split("+"))
        if how == "hopeless" and self.hopeless is None:
            self.hopeless = synthetic_target(self.name, **{**self.where, "acceptance": None})
        target = self.hopeless if how == "hopeless" and self.hopeless is not None else self.target
        made = self.llms.setdefault(f"{name}:{given}", with_policy(target.llm, **options))
        if how == "prefix cache":
            made._prefix_cache, made.prefix_cache_tokens = True, 2 * max(self.config.contexts)
        return made

    def trying(self, what: str) -> None:
        """Write what is measured now, so that a process that dies is known to have died of it."""
        print(f"[{self.end - time():5.0f} s left] {self.name}: {what}", file=sys.stderr, flush=True)
        self.found["tried"].append(what)
        save(self.path, self.record)

    def missing(self, what: str, why: object) -> None:
        """Record why something was not measured; SystemExit where the device cannot be used any more."""
        is_lost = isinstance(why, torch.AcceleratorError)
        self.found["missing"][what] = one_line(why) if isinstance(why, Exception) else str(why)
        save(self.path, self.record)
        if self.device.type == "cuda" and isinstance(why, Exception) and not is_lost:
            try:
                torch.cuda.synchronize(self.device)
            except RuntimeError:
                is_lost = True
        if is_lost:
            sys.exit(LOST)


def one_line(problem: Exception) -> str:
    """An error in one line."""
    text = " ".join(str(problem).split())[:300]
    return "out of memory" if isinstance(problem, torch.OutOfMemoryError) else f"{type(problem).__name__}: {text}"


def save(path: Path, record: Record) -> None:
    """Replace the record's file in one step."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(record, indent=1) + "\n", "utf-8")
    os.replace(temporary, path)


# ---------------------------------------------------------------------------------------------------------- all shapes


def measure_in_process(path: Path, name: str, end: float) -> str | None:
    """Measure a shape in a new process; returns None, or why it ended early."""
    command = [sys.executable, "-m", "eval.gpu", str(path.resolve()), name, repr(end)]
    try:
        left = max(0.0, end + GRACE - time())
        code = subprocess.run(command, check=False, cwd=ROOT, stdout=subprocess.DEVNULL, timeout=left).returncode
    except subprocess.TimeoutExpired:
        return f"it exceeded its time by {GRACE:.0f} s and was killed"
    return f"the process ended with {signal.Signals(-code).name if code < 0 else f'exit code {code}'}" if code else None


def run(config: GpuConfig, path: Path, measure: Callable[[Path, str, float], str | None]) -> Record:
    """Measure all shapes, each within its share of the time; after a lost process, go on in a new one.

    Args:
        path: the file of the record.
        measure: `measure_in_process`.
    """
    end, about = time() + 60 * config.minutes, {"benchmark": "gpu", "environment": machine()}
    record: Record = {"complete": False, **about, "config": as_plain(config), "shapes": {}}
    path.parent.mkdir(parents=True, exist_ok=True)
    for number, name in enumerate(config.shapes):
        left = max(0.0, end - time())
        share = left * 2 / (len(config.shapes) - number + 1)  # an earlier shape has more than a later one
        until = time() + (max(share, min(left, FIRST_SECONDS)) if number == 0 else share)
        record["shapes"][name] = {"cells": [], "tried": [], "missing": {}}
        while True:
            save(path, record)
            why = measure(path, name, until)
            record = json.loads(path.read_text("utf-8"))
            found = record["shapes"][name]
            last = found["tried"][-1] if found["tried"] else OPENING
            if why is not None:
                found["missing"].setdefault(last, why)
            if why is None or last == OPENING or time() >= until:
                break
    for found in record["shapes"].values():
        found["figures"] = figures(found)
    record["complete"] = True
    save(path, record)
    return record


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit code.

    Raises:
        ValueError, OSError: the device or a shape does not exist, or an option is out of range.
    """
    parser = parser_of("gpu", GpuConfig, __doc__)
    parser.add_argument("--output", default="runs/gpu", metavar="FOLDER", help="for gpu.json; default: %(default)s")
    options = parser.parse_args(arguments)
    config = config_of(GpuConfig, options.config, flags_given(options))
    if torch.device(config.device).type == "cuda" and not torch.cuda.is_available():
        raise ValueError("this machine has no CUDA device; configs/eval/gpu_small.yaml tries the command on a CPU")
    record = run(config, Path(options.output) / "gpu.json", measure_in_process)
    print(render(record), end="\n\n")
    print(json.dumps(rounded(record)))
    return 0


if __name__ == "__main__":
    Shape(Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])).measure()
