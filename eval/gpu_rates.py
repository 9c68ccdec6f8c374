"""Measure a device: rounds after prefill, single forwards, transformers' own decoding, bandwidth."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteria, StoppingCriteriaList

from eval.decoders import neutral_generation_config
from eval.measurement import no_garbage_collection, synchronize, timed
from eval.synthetic import Synthetic, random_prompts
from selfspec.decoding.engine import Engine
from selfspec.decoding.results import Round
from selfspec.executors.picker import Picker
from selfspec.executors.prefill import prefill
from selfspec.model.kv_cache import PackedRows, Span

ONE_ROUND = 0.0  # deadline in seconds that gives programs of one round, so that the clock is read after each
SLICES = 3  # of the measurement; the rates of the slowest and the fastest are reported
WARM_ROUNDS = 4  # minimum before the measurement; the first ones may compile or record graphs
WARM_SHARE = 0.4  # maximum share of a row's tokens before the measurement
PAGE = 256  # page size in tokens, a multiple of what any attention backend needs
PEERS = {"hf": 4, "hf early exit": 4, "hf static": 6}  # transformers' methods: calls before the measurement
PEER_TOKENS = 512  # maximum new tokens of transformers' methods


@dataclass(frozen=True, slots=True)
class Rate:
    """Tokens per second of all rows together."""

    tokens_per_second: float
    lowest: float  # over the slices
    highest: float
    rounds: int
    seconds: float
    acceptance: float | None = None  # of judged drafted tokens; None: unknown, or nothing was drafted
    plans: dict[str, int] | None = None  # rounds by exit layer

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def ready_engine(target: Synthetic, batch: int, context: int, new_tokens: int, **options: Any) -> Engine:
    """An engine with prefilled rows of `context` tokens that may emit `new_tokens` each.

    One prompt is prefilled and its KV cache copied to the other rows, so that the prefill of a batch takes as long as
    that of one row. The rows' last tokens differ, and so their outputs.
    """
    share = -(-(context + new_tokens) // PAGE) * PAGE
    engine = Engine(
        target, max_batch_size=batch, max_cached_tokens=batch * share, prefill_chunk=4096, burst=ONE_ROUND, **options
    )
    (prompt,) = random_prompts(target.stack.vocab_size, 1, context, seed=3)
    for last in range(batch):
        engine.submit([*prompt[:-1], last % target.stack.vocab_size], max_new_tokens=new_tokens)
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

    Raises:
        ValueError: the rows end before the measurement.
    """
    new_tokens = engine.rows[0].room
    done: list[tuple[float, Round]] = []
    with no_garbage_collection():
        start, begun, num_rounds = perf_counter(), None, 0
        while len(engine.rows) == engine.max_batch_size:
            rounds = engine.step()
            synchronize(engine.stack.device)
            now, num_rounds = perf_counter(), num_rounds + len(rounds)
            used = new_tokens - min((row.room for row in engine.rows), default=0)
            if begun is None:
                if (now - start >= warm and num_rounds >= WARM_ROUNDS) or used >= WARM_SHARE * new_tokens:
                    begun = now
                continue
            done += [(now, round_) for round_ in rounds]
            if now - begun >= window:
                break
    if begun is None or not done:
        raise ValueError(f"rows of {new_tokens} new tokens end before the measurement; raise new_tokens")
    marks, total = [(begun, 0)], 0
    for now, round_ in done:
        total += sum(len(row.tokens) for row in round_.rows)
        marks.append((now, total))
    rows = [row for _, round_ in done for row in round_.rows]
    judged = sum(min(row.num_accepted + 1, len(row.drafted)) for row in rows)
    exits = Counter("plain" if r.exit_layer is None else str(r.exit_layer) for _, r in done if r.plan)
    accepted = sum(row.num_accepted for row in rows) / judged if judged else None
    return _rate(marks, len(done), accepted, dict(exits))


def _rate(marks: Sequence[tuple[float, int]], rounds: int, *more: Any) -> Rate:
    """The rate of (time, total tokens) at the start of the measurement and after every round."""
    cuts = sorted({round(i * (len(marks) - 1) / SLICES) for i in range(SLICES + 1)})
    slices = [(marks[b][1] - marks[a][1]) / (marks[b][0] - marks[a][0]) for a, b in pairwise(cuts)]
    seconds = marks[-1][0] - marks[0][0]
    return Rate((marks[-1][1] - marks[0][1]) / seconds, min(slices), max(slices), rounds, seconds, *more)


class _Watch(StoppingCriteria):
    """Records the time of every token, and ends the output after `window` seconds."""

    def __init__(self, device: torch.device, warm_calls: int, window: float) -> None:
        self.device, self.warm_calls, self.window = device, warm_calls, window
        self.marks: list[tuple[float, int]] = []  # (time, tokens of all rows)

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        synchronize(self.device)
        self.marks.append((perf_counter(), input_ids.numel()))
        counted = self.marks[self.warm_calls :]
        over = len(counted) > SLICES and counted[-1][0] - counted[0][0] >= self.window
        return torch.full((input_ids.shape[0],), over, device=input_ids.device)


def peer_rate(target: Synthetic, kind: str, batch: int, context: int, window: float, draft_tokens: int) -> Rate:
    """Measure transformers' decoding: `hf` (eager), `hf static` (a static cache, compiled on CUDA) or `hf early exit`.

    Raises:
        ValueError: early exit with several rows, which transformers does not support; or too few tokens were timed.
    """
    if kind == "hf early exit" and batch > 1:
        raise ValueError("transformers' early exit decodes one row only")
    model, where = target.stack.model, target.stack.device
    given = torch.tensor(random_prompts(target.stack.vocab_size, batch, context, seed=3), device=where)
    options: dict[str, Any] = {"cache_implementation": "static"} if kind == "hf static" else {}
    if kind == "hf early exit":
        options = {"assistant_early_exit": target.made.exit_layer}
    watch = _Watch(where, PEERS[kind], window)
    with no_garbage_collection(), neutral_generation_config(model) as config:
        if kind == "hf early exit":
            config.num_assistant_tokens = draft_tokens  # assisted generation reads it from there
        model.generate(
            given,
            attention_mask=torch.ones_like(given),
            max_new_tokens=PEER_TOKENS,
            stopping_criteria=StoppingCriteriaList([watch]),
            **options,
        )
    marks = watch.marks[watch.warm_calls :]
    if len(marks) <= SLICES:
        raise ValueError(f"only {len(marks)} tokens were timed; a longer window is needed")
    return _rate(marks, len(marks) - 1)


def forward_seconds(engine: Engine, lengths: Sequence[int], repeats: int = 10) -> float:
    """Median seconds of a forward of the model with head, over `lengths[i]` new tokens of row i."""
    stack = engine.stack
    tokens = torch.arange(sum(lengths), device=stack.device) % stack.vocab_size
    spans = [Span(row.pages, len(row.content) - 1, n) for row, n in zip(engine.rows, lengths, strict=True)]

    def forward() -> None:
        hidden = stack.run(PackedRows(engine.cache, spans, stack.device), 0, stack.num_layers, tokens)
        stack.logits(hidden)

    with torch.inference_mode(), no_garbage_collection():
        taken = [timed(forward, stack.device)[1] for _ in range(repeats + 3)]
    return statistics.median(taken[3:])  # the first may capture or compile


def busy_rounds(engine: Engine, rounds: int = 12) -> dict[str, float]:
    """Busy seconds of the device and launches per round, by torch's profiler; a graph is one launch."""
    from torch.autograd import DeviceType  # type: ignore[attr-defined]
    from torch.profiler import ProfilerActivity, profile

    for _ in range(3):
        engine.step()
    done = 0
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
        while done < rounds:
            done += len(engine.step())
        synchronize(engine.stack.device)
    # Only kernels are counted: launches on the host include their kernels' time.
    events = seen.key_averages()
    kernels = [e for e in events if e.device_type == DeviceType.CUDA and not getattr(e, "is_user_annotation", False)]
    launches = [e for e in events if e.device_type == DeviceType.CPU and "Launch" in e.key and e.key.startswith("cu")]
    return {
        "busy_seconds": sum(e.self_device_time_total for e in kernels) / 1e6 / done,
        "launches": sum(e.count for e in launches) / done,
    }


def device_speed(device: torch.device, num_bytes: int = 1 << 30, size: int = 8192, repeats: int = 8) -> dict[str, Any]:
    """Measure a device's bandwidth and, on a GPU, its FLOP/s; the best of the repeats.

    Returns:
        `copy_bytes_per_second`, read and written bytes of a large copy; `matmul_flops_per_second`, of a square product
        in bfloat16.
    """
    source = torch.zeros(num_bytes if device.type == "cuda" else num_bytes >> 4, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    found = {"copy_bytes_per_second": 2 * source.nbytes / _least(lambda: target.copy_(source), repeats, device)}
    if device.type == "cuda":
        a, b = torch.randn(2, size, size, device=device).to(torch.bfloat16)
        found["matmul_flops_per_second"] = 2 * size**3 / _least(lambda: a @ b, repeats, device)
    return found


def _least(call: Callable[[], Any], repeats: int, device: torch.device) -> float:
    return min(timed(call, device)[1] for _ in range(repeats))
