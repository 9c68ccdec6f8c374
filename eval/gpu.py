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
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter, time
from typing import Any, NamedTuple

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile

from eval.config import config_of, parser_of
from eval.figures import table
from eval.gpu_peers import TRANSFORMERS, folder_rate, read_peer, transformers_rate
from eval.measurement import ROOT, device, machine, no_garbage_collection, rates, rounded, synchronize, timed
from eval.models import params_of, with_policy
from eval.shapes import SHAPES
from eval.synthetic import Synthetic, random_prompts, synthetic_target
from selfspec import LLM
from selfspec.core import RoundOutput
from selfspec.decoding.engine import LLMEngine
from train.configuration import as_plain, build, check, check_least, flags_given, option

TEMPERATURE = 0.5  # of all rows but those of peers: the acceptance of greedy outputs differs from the set one by 0.1
DRAFT_TOKENS = 4  # of "fixed" and of transformers' early exit
OWN = ("plain", "fixed", "adaptive")
NUM_FIRST = 2  # batch sizes that are measured before all others
PAGE = 256  # tokens; the memory of a row is a multiple of it, as any attention backend needs
WARM_ROUNDS, BUSY_ROUNDS, PREFILL_REPEATS = 4, 12, 3
NEAR = 0.1  # of the wanted acceptance, within which a speedup of fixed is judged
FIRST_SECONDS = 160.0  # minimum of the first shape in a short run
GRACE = 30.0  # seconds that a process may exceed its time
OPENING, LOST = "opening", 3  # the measurement's name while a shape is opened; exit code after a lost CUDA context
COLUMNS = (
    *("tokens/s", "lowest", "highest", "acceptance", "over plain", "over hf", "over best fixed", "wall ms", "floor ms"),
    *("wall / floor", "busy ms", "busy / floor", "host share", "kernels a layer"),
)
Record = dict[str, Any]


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


class Cell(NamedTuple):
    """One measurement: a method at a batch size and context."""

    context: int
    batch: int
    method: str

    def __str__(self) -> str:
        return f"{self.method}, batch {self.batch}, context {self.context}"


def cells_of(config: GpuConfig) -> list[Cell]:
    """All measurements, the most important first, without repetition."""
    first, *longer = dict.fromkeys(config.contexts)
    batches = list(dict.fromkeys(config.batch_sizes))
    peers = [batch for batch in batches if batch in config.peer_batch_sizes]
    found = [Cell(first, batch, method) for batch in batches[:NUM_FIRST] for method in config.methods]
    found[len(config.methods) : len(config.methods)] = [Cell(first, 1, "hf")] if 1 in peers else []
    found += [Cell(first, batch, method) for batch in batches for method in ("plain", "adaptive")]
    found += [Cell(first, batch, "plain, exact") for batch in peers]
    found += [Cell(context, 1, "prefill") for context in (first, *longer)]
    lengths = [f"fixed:{length}" for length in config.draft_lengths]
    folders = [f"peer:{read_peer(folder).name}" for folder in config.peer]
    found += [Cell(first, batch, method) for batch in peers for method in ("fixed", *lengths, "hf", *folders)]
    found += [Cell(first, 1, "hf early exit")] if 1 in peers else []
    found += [Cell(context, batch, method) for context in longer for batch in peers for method in (*OWN, "hf")]
    return list(dict.fromkeys([*found, *([Cell(first, 1, "hf static")] if 1 in peers else [])]))


# ------------------------------------------------------------------------------------------------------------- rates


@dataclass(slots=True)
class Counts:
    """What the measured steps of an engine did."""

    steps: list[tuple[float, int]] = field(default_factory=list)  # seconds and tokens of all rows
    rounds: int = 0
    judged: int = 0  # drafted tokens up to the first wrong one
    accepted: int = 0
    held: float = 0.0  # tokens of a row, summed over rounds
    plans: Counter[str] = field(default_factory=Counter)  # rounds by exit layer

    def add(self, seconds: float, rounds: Sequence[RoundOutput], context: float) -> float:
        """Add a step whose rows hold `context` tokens at first; returns how many they hold then."""
        tokens = 0
        for round_ in rounds:
            self.held += context
            context += sum(len(row.token_ids) for row in round_.rows) / len(round_.rows)
            tokens += sum(len(row.token_ids) for row in round_.rows)
            self.judged += sum(row.num_judged for row in round_.rows)
            self.accepted += sum(row.num_accepted for row in round_.rows)
            self.plans["plain" if round_.exit_layer is None else str(round_.exit_layer)] += 1
        self.rounds += len(rounds)
        self.steps.append((seconds, tokens))
        return context

    def as_dict(self) -> Record:
        acceptance = self.accepted / self.judged if self.judged else None
        about = {"acceptance": acceptance, "mean_context": self.held / self.rounds, "plans": dict(self.plans)}
        return {**rates(self.steps), "rounds": self.rounds, **about}


class Rows:
    """Rows of random prompts in an engine, which begin again where they end.

    Args:
        clock: seconds.
    """

    def __init__(
        self, llm: LLM, batch: int, context: int, new_tokens: int, clock: Callable[[], float] = perf_counter
    ) -> None:
        share = -(-(context + new_tokens) // PAGE) * PAGE
        self.engine: LLMEngine = llm.engine(
            max_num_seqs=batch, max_num_cached_tokens=batch * share, prefill_chunk=batch * context
        )
        self.prompts = random_prompts(llm.target.split.vocab_size, batch, context, seed=3)
        self.device, self.context, self.new_tokens, self.clock = llm.target.split.device, context, new_tokens, clock
        self.num_begun = 0

    def full_steps(self) -> Iterator[tuple[float, list[RoundOutput], float]]:
        """Endless steps in which all rows decode and no prompt is read: seconds, rounds, tokens that a row held."""
        while True:
            for at, prompt in enumerate(self.prompts):
                params = params_of(self.new_tokens, TEMPERATURE, seed=self.num_begun)
                self.engine.add_request(str(at), prompt, params)
                self.num_begun += 1
            held, is_full = float(self.context), False
            while self.engine.has_unfinished_requests():
                rounds, begun = list[RoundOutput](), self.clock()
                is_ended = any(output.finished for output in self.engine.step(rounds.append))
                synchronize(self.device)
                seconds = self.clock() - begun
                if is_full:
                    yield seconds, rounds, held
                is_full = all(len(one.rows) == len(self.prompts) for one in rounds)
                held += sum(len(row.token_ids) for one in rounds for row in one.rows) / len(self.prompts)
                if is_ended:
                    break
            self.stop()

    def stop(self) -> None:
        """End all rows."""
        for at in range(len(self.prompts)):
            self.engine.abort(str(at))
        while self.engine.has_unfinished_requests():
            self.engine.step()

    def rate(self, warm: float, window: float) -> Record:
        """Tokens per second over at least `window` seconds of steps, after `warm` seconds and a few rounds."""
        done, start, num_rounds = Counts(), self.clock(), 0
        with no_garbage_collection():
            for seconds, rounds, held in self.full_steps():
                num_rounds += len(rounds)
                if done.rounds or (self.clock() - start >= warm and num_rounds > WARM_ROUNDS):
                    done.add(seconds, rounds, held)
                    if sum(seconds for seconds, _ in done.steps) >= window:
                        return done.as_dict()
        raise AssertionError("steps do not end")

    def busy(self) -> Record:
        """Seconds that the device is busy per round, and its kernels and launches, by torch's profiler.

        Raises:
            ValueError: the device is no GPU, or its profiling library (CUPTI) reports nothing.
        """
        if self.device.type != "cuda":
            raise ValueError("busy time is known of a CUDA device only")
        num_rounds, steps = 0, self.full_steps()
        next(steps)
        with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
            while num_rounds < BUSY_ROUNDS:
                num_rounds += len(next(steps)[1])
        self.stop()
        return {name: value / num_rounds for name, value in counted(seen.key_averages()).items()}


def counted(events: Iterable[Any]) -> dict[str, float]:
    """What the events of a profile say. Launches on the host include their kernels' time, so it is not added up."""
    events = list(events)
    done = [e for e in events if e.device_type == DeviceType.CUDA and not getattr(e, "is_user_annotation", False)]
    kernels = sum(e.count for e in done if not e.key.startswith(("Memcpy", "Memset")))
    launches = [e for e in events if e.device_type == DeviceType.CPU and "Launch" in e.key and e.key.startswith("cu")]
    if not kernels:
        raise ValueError("torch's profiler reports no kernels; CUPTI may be refused on this machine")
    seconds = sum(e.self_device_time_total for e in done) / 1e6
    return {"busy_seconds": seconds, "kernels": kernels, "launches": sum(e.count for e in launches)}


def prefill_rate(llm: LLM, context: int) -> Record:
    """Tokens per second of reading a prompt and writing a token, and of transformers' forward as `generate` makes it;
    the medians of the repeats, after one that is not counted."""
    split, found, seconds = llm.target.split, list[float](), list[float]()
    ids = torch.tensor(random_prompts(split.vocab_size, 1, context, seed=5), device=split.device)

    def by_transformers() -> None:
        with torch.inference_mode():
            split.model(ids, use_cache=True, logits_to_keep=1)

    engine = llm.engine(max_num_seqs=1, max_num_cached_tokens=(context // PAGE + 2) * PAGE, prefill_chunk=context)
    for _ in range(PREFILL_REPEATS + 1):
        engine.add_request("prompt", ids[0].tolist(), params_of(1))
        found.append(timed(engine.step, split.device)[1])
        seconds.append(timed(by_transformers, split.device)[1])
    own, theirs = (statistics.median(each[1:]) for each in (found, seconds))
    return {"tokens_per_second": context / own, "hf_tokens_per_second": context / theirs}


def device_speed(where: torch.device, num_bytes: int = 1 << 30, size: int = 8192, repeats: int = 8) -> dict[str, float]:
    """`copy_bytes_per_second`, read and written bytes of a large copy; on a GPU also `matmul_flops_per_second`, of a
    square product in bfloat16. The best of the repeats."""
    is_gpu = where.type == "cuda"
    source = torch.zeros(num_bytes if is_gpu else num_bytes >> 4, dtype=torch.uint8, device=where)
    target = torch.empty_like(source)
    seconds = min(timed(lambda: target.copy_(source), where)[1] for _ in range(repeats))
    found = {"copy_bytes_per_second": 2 * source.nbytes / seconds}
    if is_gpu:
        a, b = torch.randn(2, size, size, device=where).to(torch.bfloat16)
        found["matmul_flops_per_second"] = 2 * size**3 / min(timed(lambda: a @ b, where)[1] for _ in range(repeats))
    return found


def sizes_of(target: Synthetic) -> dict[str, float]:
    """Bytes that a token's forward reads, those of the head among them, those of the head's rows for the default draft
    vocabulary, and those of a token's keys and values."""
    model, config = target.split.model, target.split.config.get_text_config()
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    kv = 2 * config.num_key_value_heads * config.head_dim * config.num_hidden_layers * embedding.element_size()
    unread = 0 if head is embedding else embedding.nbytes  # only one row of an embedding is read
    drafts = (target.split.default_draft_vocab or len(head)) * head[0].nbytes
    read = sum(p.nbytes for p in model.parameters()) - unread
    return {"read_bytes": read, "head_bytes": head.nbytes, "draft_head_bytes": drafts, "kv_bytes_per_token": kv}


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

    def measure(self) -> None:
        """Measure everything that the record lacks; exits with `LOST` where the device cannot be used any more."""
        self.trying(OPENING)
        try:
            self.found.setdefault("speed", device_speed(self.device))
            # Rows may be longer than the model's training length: speed does not depend on it.
            longest = max(self.config.contexts) + 2 * self.config.new_tokens
            where: Record = {"device": self.device, "dtype": getattr(torch, self.config.dtype)}
            where |= {"acceptance": self.config.acceptance, "temperature": TEMPERATURE}
            self.target = synthetic_target(self.name, max_position_embeddings=longest, **where)
        except Exception as problem:
            self.missing(OPENING, problem)
            return
        self.found |= {"target": self.target.about(), "sizes": sizes_of(self.target), "device": device(self.device)}
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
        rows = Rows(llm, batch, context, config.new_tokens)
        found = rows.rate(config.warm_seconds, config.window_seconds)
        rows.stop()
        llm.keep_statistics(rows.engine)
        if method in ("plain", "fixed") and batch in config.batch_sizes[:NUM_FIRST] and context == config.contexts[0]:
            try:
                found |= rows.busy()
            except ValueError as problem:
                found["why_not_busy"] = str(problem)
        return found

    def llm(self, method: str) -> LLM:
        """The target with a method's policy, which goes on with what it learned in earlier measurements."""
        name, _, given = method.removesuffix(", again").partition(":")
        options: Record = {"policy": name if name in OWN else "plain", "exact": name == "plain, exact"}
        if name == "fixed":
            options |= {"exit_layer": self.target.made.exit_layer, "num_speculative_tokens": int(given or DRAFT_TOKENS)}
        if name == "adaptive" and given:
            options["drafters"] = tuple(given.split("+"))
        return self.llms.setdefault(f"{name}:{given}", with_policy(self.target.llm, **options))

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


# ------------------------------------------------------------------------------------------------------------- figures


def floor_seconds(found: Mapping[str, Any], cell: Mapping[str, Any]) -> float:
    """Seconds to read what a round of plain or fixed must read, by the measured copy bandwidth.

    All rows share the weights. A fixed round runs the early layers once for every drafted token and once more for the
    last one, then the other layers; the head's rows of the draft vocabulary once for every drafted token, and the whole
    head once for all of them.
    """
    about, sizes = found["target"], found["sizes"]
    depth, drafted = (about["exit_layer"], DRAFT_TOKENS) if cell["method"] == "fixed" else (0, 0)
    passes = 1 + drafted * depth / about["num_layers"]
    held = cell["batch"] * cell["mean_context"] * sizes["kv_bytes_per_token"]
    layers = sizes["read_bytes"] - sizes["head_bytes"] + held
    heads = sizes["head_bytes"] + drafted * sizes["draft_head_bytes"]
    return float((passes * layers + heads) / found["speed"]["copy_bytes_per_second"])


def figures(found: Mapping[str, Any]) -> list[Record]:
    """The values of `COLUMNS` of every cell, as far as they are known."""
    cells = {Cell(one["context"], one["batch"], one["method"]): one for one in found["cells"]}
    made = []
    for cell, one in cells.items():
        speed = one["tokens_per_second"]
        row = {**cell._asdict(), "tokens/s": speed, "lowest": one.get("lowest"), "highest": one.get("highest")}
        fixed = [c for c in cells if c[:2] == cell[:2] and c.method.partition(":")[0] == "fixed"]
        best = max(fixed, key=lambda c: cells[c]["tokens_per_second"], default=None)
        over = {"over plain": cell._replace(method="plain"), "over hf": cell._replace(method="hf")}
        over |= {"over best fixed": best} if best and cell.method.startswith("adaptive") else {}
        row |= {name: speed / cells[of]["tokens_per_second"] for name, of in over.items() if of in cells}
        if cell.method == "prefill":
            row |= {"over plain": None, "over hf": speed / one["hf_tokens_per_second"]}
        seen, wanted = one.get("acceptance"), found["target"]["wanted"]
        row["acceptance"] = seen
        if cell.method == "fixed" and "over plain" in row and (seen is None or abs(seen - wanted) > NEAR):
            row["over plain"] = None  # it would say nothing about the wanted acceptance
        if "rounds" in one:
            row["wall ms"] = 1e3 * one["seconds"] / one["rounds"]
        if cell.method in ("plain", "fixed"):
            row["floor ms"] = 1e3 * floor_seconds(found, one)
            row["wall / floor"] = row["wall ms"] / row["floor ms"]
        if "busy_seconds" in one:
            row |= {"busy ms": 1e3 * one["busy_seconds"], "busy / floor": 1e3 * one["busy_seconds"] / row["floor ms"]}
            row["host share"] = max(0.0, 1 - row["busy ms"] / row["wall ms"])
            row["kernels a layer"] = one["kernels"] / found["target"]["num_layers"]
        made.append({name: value for name, value in row.items() if value is not None})
    return made


def render(record: Mapping[str, Any]) -> str:
    """The table of every shape, its targets, and what was not measured."""
    env, parts = record["environment"], list[str]()
    for name, found in record["shapes"].items():
        if "target" in found:
            target, copies = found["target"], found["speed"]["copy_bytes_per_second"] / 1e12
            parts.append(
                f"synthetic {name}, {target['dtype']}, random weights, acceptance {target['acceptance']:.2f} at layer "
                f"{target['exit_layer']} of {target['num_layers']} at temperature {TEMPERATURE:g}; "
                f"{found['device'].get('gpu', env['cpu'])}, which copies {copies:.2f} TB/s; torch {env['torch']}"
            )
            shown = [column for column in COLUMNS if any(column in row for row in found["figures"])]
            cells = [
                [row["method"], str(row["batch"]), str(row["context"])]
                + [f"{row[column]:.3g}" if column in row else "" for column in shown]
                for row in found["figures"]
            ]
            parts.append(table(["method", "batch", "context", *shown], cells))
        if found["missing"]:
            whys = "; ".join(f"{what} ({why})" for what, why in found["missing"].items())
            parts.append(f"{name}: not measured ({len(found['missing'])}): {whys}")
    return "\n\n".join(parts)


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
