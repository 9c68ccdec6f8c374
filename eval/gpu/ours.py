"""selfspec's own speed on a device: rounds of rows whose prompts are there already, and single forwards."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any

import torch

from eval.targets import Synthetic, random_prompts
from eval.timing import quiet, synchronize
from selfspec.decoding.engine import Engine
from selfspec.decoding.results import Round
from selfspec.executors.picker import Picker
from selfspec.executors.prefill import prefill
from selfspec.model.kv_cache import PackedRows, Span

ONE_ROUND = 0.0  # the deadline of programs of one round: the clock is read after each
SLICES = 3  # of a timed window, whose spread is told
WARM_ROUNDS = 4  # before the clock counts, at least: the first ones may compile or record
WARM_SHARE = 0.4  # of the room that rows have, at most, before the clock counts


@dataclass(frozen=True, slots=True)
class Rate:
    """Tokens per second of all rows together."""

    tokens_per_second: float
    lowest: float  # of the window's slices
    highest: float
    rounds: int
    seconds: float
    acceptance: float | None = None  # of drafted tokens that were judged; None: nothing was drafted
    plans: dict[str, int] | None = None  # rounds by exit layer

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def ready_engine(target: Synthetic, batch: int, context: int, room: int, **options: Any) -> Engine:
    """An engine whose rows hold `context` tokens each and may emit `room`.

    One prompt is read, and its keys and values are copied to the other rows, whose last tokens differ: text goes
    another way in each from there, and a batch takes no longer to make ready than a row.
    """
    page = 256  # a multiple of what any attention backend asks for
    share = -(-(context + room) // page) * page
    engine = Engine(
        target, max_batch_size=batch, max_cached_tokens=batch * share, prefill_chunk=4096, burst=ONE_ROUND, **options
    )
    (prompt,) = random_prompts(target.stack.vocab_size, 1, context, seed=3)
    for last in range(batch):
        engine.submit([*prompt[:-1], last % target.stack.vocab_size], max_new_tokens=room)
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
    """Decode for about `warm` seconds, a few rounds at least, and then for `window` seconds, or until a row ends."""
    room = engine.rows[0].room
    done: list[tuple[float, Round]] = []
    where = engine.stack.device
    with quiet():
        start, begun, num_rounds = perf_counter(), None, 0
        while len(engine.rows) == engine.max_batch_size:
            rounds = engine.step()
            synchronize(where)
            now, num_rounds = perf_counter(), num_rounds + len(rounds)
            used = room - min((row.room for row in engine.rows), default=0)
            if begun is None:
                if (now - start >= warm and num_rounds >= WARM_ROUNDS) or used >= WARM_SHARE * room:
                    begun = now
                continue
            done += [(now, round_) for round_ in rounds]
            if now - begun >= window:
                break
    if begun is None or not done:
        raise ValueError(f"rows of {room} new tokens end before anything could be timed")
    return _summed(begun, done)


def _summed(begun: float, done: Sequence[tuple[float, Round]]) -> Rate:
    slices, last = [], begun
    size = -(-len(done) // SLICES)
    for at in range(0, len(done), size):
        part = done[at : at + size]
        slices.append(sum(len(row.tokens) for _, r in part for row in r.rows) / (part[-1][0] - last))
        last = part[-1][0]
    rows = [row for _, r in done for row in r.rows]
    judged = sum(min(row.num_accepted + 1, len(row.drafted)) for row in rows)
    exits = Counter("plain" if r.exit_layer is None else str(r.exit_layer) for _, r in done if r.plan)
    seconds = done[-1][0] - begun
    return Rate(
        sum(len(row.tokens) for row in rows) / seconds,
        min(slices),
        max(slices),
        len(done),
        seconds,
        sum(row.num_accepted for row in rows) / judged if judged else None,
        dict(exits),
    )


def forward_seconds(engine: Engine, lengths: Sequence[int], repeats: int = 10) -> float:
    """Median seconds of the whole model, head included, over `lengths[i]` new tokens of row i."""
    stack = engine.stack
    tokens = torch.arange(sum(lengths), device=stack.device) % stack.vocab_size
    spans = [Span(row.pages, len(row.content) - 1, n) for row, n in zip(engine.rows, lengths, strict=True)]
    taken = []
    with torch.inference_mode(), quiet():
        for repeat in range(repeats + 3):
            synchronize(stack.device)
            start = perf_counter()
            hidden = stack.run(PackedRows(engine.cache, spans, stack.device), 0, stack.num_layers, tokens)
            stack.logits(hidden)
            synchronize(stack.device)
            if repeat >= 3:  # those before may capture or compile
                taken.append(perf_counter() - start)
    return statistics.median(taken)


def busy_seconds(engine: Engine, rounds: int = 12) -> float:
    """Seconds a round keeps the device busy, by torch's profiler: what the wall clock has beyond it is the host's."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    for _ in range(3):
        engine.step()
    done = 0
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
        while done < rounds:
            done += len(engine.step())
        synchronize(engine.stack.device)
    # Launches on the host carry their kernels' time as well: kernels alone are counted.
    events = [event for event in seen.key_averages() if event.device_type == DeviceType.CUDA]
    events = [event for event in events if not getattr(event, "is_user_annotation", False)]
    return sum(event.self_device_time_total for event in events) / 1e6 / done
