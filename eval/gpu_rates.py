"""Measure an engine on a device: rounds after prefill, busy time, prefill, and the pause while a prompt is read."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from time import perf_counter
from typing import Any

import torch

from eval.gpu_clock import Recorded, kernels_of, seconds_of
from eval.measurement import no_garbage_collection, synchronize, timed
from eval.synthetic import Synthetic, random_prompts
from selfspec.decoding.engine import Engine
from selfspec.decoding.results import Round
from selfspec.executors.cuda.round_inputs import RoundInputs
from selfspec.executors.picker import Picker
from selfspec.executors.prefill import prefill

SLICES = 3  # of the measurement; the rates of the slowest and the fastest are reported
WARM_ROUNDS = 4  # minimum before the measurement; the first ones may compile or record graphs
WARM_SHARE = 0.4  # maximum share of a row's tokens before the measurement
PAGE = 256  # page size in tokens, a multiple of what any attention backend needs
BUSY_ROUNDS = 12  # minimum of a profile
PREFILL_REPEATS = 3
SHORT_PROMPT, RUNNING_TOKENS = 16, 512  # prompt and most new tokens of the row that runs while a long prompt is read


@dataclass(frozen=True, slots=True)
class Rate:
    """Tokens per second of all rows together."""

    tokens_per_second: float
    lowest: float  # over the slices
    highest: float
    rounds: int
    seconds: float
    mean_context: float | None = None  # tokens that a row holds, in the middle of the measurement
    acceptance: float | None = None  # of judged drafted tokens; None: unknown, or nothing was drafted
    plans: dict[str, int] | None = None  # rounds by exit layer

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def ready_engine(target: Synthetic, batch: int, context: int, new_tokens: int, **options: Any) -> Engine:
    """An engine with prefilled rows of `context` tokens that may emit `new_tokens` each.

    One prompt is prefilled and its KV cache copied to the other rows, so that the prefill of a batch takes as long as
    that of one row. The rows' last tokens and seeds differ, and so their outputs. They are sampled at the temperature
    for which the target's acceptance is set.
    """
    share = -(-(context + new_tokens) // PAGE) * PAGE
    engine = Engine(target, max_batch_size=batch, max_cached_tokens=batch * share, prefill_chunk=4096, **options)
    (prompt,) = random_prompts(target.stack.vocab_size, 1, context, seed=3)
    sampling = {"max_new_tokens": new_tokens, "temperature": target.made.temperature}
    for last in range(batch):
        engine.submit([*prompt[:-1], last % target.stack.vocab_size], seed=last, **sampling)
    with torch.inference_mode():
        engine._admit()
        first, *others = engine.rows
        while first.num_cached < context - 1:
            prefill(engine.stack, engine.cache, Picker(engine.stack), [first], engine.prefill_chunk, engine.policy)
        for row in others:
            for page, to in zip(first.pages, row.pages, strict=True):
                engine.cache.copy(page, to)
            row.num_cached = first.num_cached
    return engine


def rate_of(engine: Engine, warm: float, window: float) -> Rate:
    """Decode for about `warm` seconds, then measure for `window` seconds or until a row ends.

    The clock is read after every program of rounds, which are as long as the engine makes them.

    Raises:
        ValueError: the rows end before the measurement.
    """
    new_tokens, rows_before = engine.rows[0].room, engine.rows
    done, marks = list[Round](), list[tuple[float, int]]()  # of the measurement; marks: (time, total tokens)
    with no_garbage_collection():
        start, num_rounds = perf_counter(), 0
        while len(engine.rows) == engine.max_batch_size:
            rounds = engine.step()
            synchronize(engine.stack.device)
            now, num_rounds = perf_counter(), num_rounds + len(rounds)
            if marks:
                done += rounds
                marks.append((now, marks[-1][1] + sum(len(row.tokens) for one in rounds for row in one.rows)))
                if now - marks[0][0] >= window:
                    break
                continue
            used = new_tokens - min((row.room for row in engine.rows), default=0)
            if (now - start >= warm and num_rounds >= WARM_ROUNDS) or used >= WARM_SHARE * new_tokens:
                marks, length = [(now, 0)], _mean_length(rows_before)
    if not done:
        raise ValueError(f"rows of {new_tokens} new tokens end before the measurement; raise new_tokens")
    rows = [row for round_ in done for row in round_.rows]
    judged = sum(min(row.num_accepted + 1, len(row.drafted)) for row in rows)
    exits = Counter("plain" if r.exit_layer is None else str(r.exit_layer) for r in done if r.plan)
    accepted = sum(row.num_accepted for row in rows) / judged if judged else None
    context = (length + _mean_length(rows_before)) / 2
    return rate_between(marks, len(done), context, accepted, dict(exits))


def _mean_length(rows: Sequence[Any]) -> float:
    return statistics.fmean(len(row.content) for row in rows)


def rate_between(marks: Sequence[tuple[float, int]], rounds: int, *more: Any) -> Rate:
    """The rate of (time, total tokens) at the start of the measurement and after every program."""
    cuts = sorted({round(i * (len(marks) - 1) / SLICES) for i in range(SLICES + 1)})
    slices = [(marks[b][1] - marks[a][1]) / (marks[b][0] - marks[a][0]) for a, b in pairwise(cuts)]
    seconds = marks[-1][0] - marks[0][0]
    return Rate((marks[-1][1] - marks[0][1]) / seconds, min(slices), max(slices), rounds, seconds, *more)


def busy_rounds(engine: Engine) -> dict[str, Any]:
    """Seconds that the device is busy per round, and its kernels and launches per round.

    Where the profiler reports nothing, the seconds are those of the recorded round replayed without pause, and the
    kernels those of its graph.

    Raises:
        ValueError: the device is no GPU, or neither way works.
    """
    done = [0]

    def some_rounds() -> None:
        done[0] = 0
        while done[0] < BUSY_ROUNDS and len(engine.rows) == engine.max_batch_size:
            done[0] += len(engine.step())

    some_rounds()
    try:
        seen = kernels_of(some_rounds, engine.stack.device)
    except ValueError:
        runner = engine.stack.runner
        latest = None if runner is None else runner.graphs.latest
        if latest is None or not isinstance(latest.inputs, RoundInputs):
            raise
        with torch.inference_mode():
            seconds = seconds_of(latest.recording.replay, engine.stack.device)
            count = Recorded(latest.body, engine.stack.device).num_nodes
        return {"way": "replays of the graph", "busy_seconds": seconds, "kernels": count, "launches": None}
    per_round = {"busy_seconds": seen.seconds, "kernels": seen.count, "launches": seen.launches}
    return {"way": "profiler", **{name: value / done[0] for name, value in per_round.items()}}


def prefill_seconds(target: Synthetic, context: int) -> dict[str, float]:
    """Seconds to read a prompt of `context` tokens; the medians of the repeats, after one that is not counted.

    Returns:
        `seconds`, in one call; `steps_seconds`, in the engine's chunks, with the first round; `peer_seconds`, by a
        forward of the transformers model as `generate` makes it.
    """
    stack = target.stack
    ids = torch.tensor(random_prompts(stack.vocab_size, 1, context, seed=5), device=stack.device)
    prompt = [*ids[0].tolist(), 0]  # the last token is left to the first round

    def new_engine() -> Engine:
        engine = Engine(target, policy="plain", max_batch_size=1, max_cached_tokens=(context // PAGE + 2) * PAGE)
        engine.submit(prompt, max_new_tokens=1)
        return engine

    def in_one_call() -> None:
        with torch.inference_mode():
            row.num_cached = 0
            prefill(engine.stack, engine.cache, Picker(engine.stack), [row], context, engine.policy)

    def in_steps() -> None:
        while engine.has_work:
            engine.step()

    def by_transformers() -> None:
        with torch.inference_mode():
            stack.model(ids, use_cache=True, logits_to_keep=1)

    found: dict[str, list[float]] = {"seconds": [], "steps_seconds": [], "peer_seconds": []}
    for _ in range(PREFILL_REPEATS + 1):
        engine = new_engine()
        with torch.inference_mode():
            engine._admit()
        (row,) = engine.rows
        found["seconds"].append(timed(in_one_call, stack.device)[1])
        row.num_cached = 0
        found["steps_seconds"].append(timed(in_steps, stack.device)[1])
        found["peer_seconds"].append(timed(by_transformers, stack.device)[1])
    return {name: statistics.median(seconds[1:]) for name, seconds in found.items()}


def pauses(target: Synthetic, context: int) -> dict[str, float]:
    """How long a running row waits for its next token while a prompt of `context` tokens is read.

    Two long prompts are read; the first one is not counted, since kernels may compile and graphs be recorded in it.

    Returns:
        `longest_seconds` between two rounds of the row in that time; `round_seconds`, the median before.
    """
    vocab, (short,) = target.stack.vocab_size, random_prompts(target.stack.vocab_size, 1, SHORT_PROMPT, seed=6)
    new_tokens = min(RUNNING_TOKENS, target.stack.context_limit - SHORT_PROMPT)
    room = -(-(SHORT_PROMPT + new_tokens) // PAGE) * PAGE + (context // PAGE + 2) * PAGE
    # Programs of one round: of longer ones, the row's tokens come together.
    engine = Engine(target, policy="plain", max_batch_size=2, max_cached_tokens=room, page_size=PAGE, burst=0.0)
    running = engine.submit(short, max_new_tokens=new_tokens)

    def gaps(until: int | None) -> list[float]:
        """Seconds between rounds of the running row, until a request ends, or for a few rounds."""
        found, last = list[float](), perf_counter()
        while True:
            rows = [row for one in engine.step() for row in one.rows]
            synchronize(target.stack.device)
            if any(row.request_id == running for row in rows):
                now = perf_counter()
                found, last = [*found, now - last], now
            if (until is None and len(found) > WARM_ROUNDS) or any(
                row.request_id == until and row.completion is not None for row in rows
            ):
                return found

    gaps(None)
    for seed in (7, 8):
        before = statistics.median(gaps(None))
        (prompt,) = random_prompts(vocab, 1, context, seed)
        longest = max(gaps(engine.submit(prompt, max_new_tokens=2)))
    return {"longest_seconds": longest, "round_seconds": before}
