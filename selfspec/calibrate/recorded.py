"""Measure the `Costs` of rounds from recordings (CUDA graphs): parts from recordings of their own, then whole rounds.

The parts are a draft step (early layers, head and pick), a plain token, and a verification. What whole rounds with
drafts take in addition is the overhead of their steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from selfspec.calibrate.timed_rounds import SHADOW_POSITIONS, shadow_seconds, synchronised_seconds
from selfspec.control.costs import CONTEXT, Costs, Table
from selfspec.core import Plan
from selfspec.executors.cuda.capture import Body, CannotCapture, Recording
from selfspec.executors.cuda.device_work import TICK, fastest
from selfspec.executors.cuda.rounds import RoundRow, StaticRows, token_capacity
from selfspec.executors.picker import Picker
from selfspec.kernels.layout import SamplingTensors
from selfspec.model.attention_backends import layout_of
from selfspec.model.kv_cache import PackedRows, Span
from selfspec.progress import report

PAGE = 64  # page size in tokens
WIDTHS = (1, 2, 5, 9, 16)  # tokens per row of a verification
SIZES = (1, 4)  # batch sizes that are measured, besides the largest; costs are linear between them
FAR, FAR_TOKENS = 1024, 8192  # additional cached tokens per row of "far" passes, and the maximum over all rows
DRAFTED = 4  # tokens per row in timed draft rounds
REPEATS = 3  # measurements of a part, of which the fastest counts
LEAST_SECONDS, MOST_REPLAYS = 4e-3, 10  # seconds of a measurement, and its replays at most
ROUNDS, WARM = 10, 2  # whole rounds in one measurement, and those before it
Seconds = dict[int, float]


def measure_recorded(split: Any, batch_sizes: Sequence[int], repeats: int = REPEATS) -> Costs:
    """Measure recorded rounds.

    Args:
        split: a `selfspec.model.split_model.SplitModel` with a runner that records it.
        batch_sizes: ascending numbers of rows. Of those that are recorded, `SIZES` and the largest are measured.
        repeats: measurements of every part, of which the fastest counts.

    Raises:
        CannotCapture: a part or a round cannot be recorded.
    """
    recorded = [rows for rows in batch_sizes if rows <= split.runner.limits.rows]
    sizes = [rows for rows in recorded if rows in SIZES or rows == recorded[-1]]
    with torch.inference_mode():
        return _Measurement(split, sizes, min(repeats, REPEATS)).costs()


class _Measurement:
    """The recordings of one measurement; each is dropped after it was timed."""

    def __init__(self, split: Any, batch_sizes: Sequence[int], repeats: int) -> None:
        self.repeats = repeats
        self.split, self.runner, self.limits = split, split.runner, split.runner.limits
        self.middle = max(1, split.num_layers // 4)
        longest = split.context_limit - max(WIDTHS)
        self.base = max(0, min(CONTEXT, longest - (ROUNDS + WARM) * (DRAFTED + 1)))
        self.beyond = {rows: max(0, min(FAR, FAR_TOKENS // rows, longest - self.base)) for rows in batch_sizes}
        # Tokens that a row must hold: those of far passes, and of whole rounds.
        rounds = self.base + (ROUNDS + WARM + 1) * (DRAFTED + 1)
        counts = {rows: -(-max(self.base + more + max(WIDTHS), rounds) // PAGE) for rows, more in self.beyond.items()}
        self.cache = self.runner.new_cache(max(rows * count for rows, count in counts.items()), PAGE)
        self.pages = {rows: [range(i * count, (i + 1) * count) for i in range(rows)] for rows, count in counts.items()}
        self.batch_sizes = batch_sizes

    def costs(self) -> Costs:
        """The costs of recorded rounds."""
        layers, sizes = self.split.num_layers, self.batch_sizes
        heads = {count: self.head(count) for count in sorted({r * width for r in sizes for width in self.widths(r)})}
        rounds, steps, context = dict[int, Table](), dict[int, Table](), Seconds()
        for rows in sizes:
            report("recorded rounds of %d rows", rows)
            token, plain = self.plain(rows, False), self.rounds(rows, 0)
            far = max(0.0, self.plain(rows, True) - token)
            context[rows] = far / self.beyond[rows] if self.beyond[rows] else 0.0
            late = {width: self.verification(rows, width) - heads[rows * width] for width in self.widths(rows)}
            more = {width: (seconds - late[1]) * layers / (layers - self.middle) for width, seconds in late.items()}
            rounds[rows] = Table.of(
                {w: plain + max(0.0, s) + max(0.0, heads[rows * w] - heads[rows]) for w, s in more.items()}
            )
            steps[rows] = Table.of({e: max(TICK, self.step(rows, e)) for e in self.exits(rows)})
        shadow = Table.of(self.shadow())
        costs = Costs(layers, rounds, steps, Table.of(heads), Table.of(context), shadow, recorded=self.limits)
        return replace(costs, steps={rows: self.with_overhead(costs, rows) for rows in sizes})

    def with_overhead(self, costs: Costs, rows: int) -> Table:
        """Draft steps, with what whole rounds take in addition to their parts."""
        drafted = min(DRAFTED, self.limits.draft_length(rows))
        more = self.rounds(rows, drafted) - costs.round(self.middle, (drafted,) * rows)
        each = max(0.0, more) / (drafted + 1)  # per pass of early layers
        return Table.of({e: each + costs.steps[rows](e) for e in costs.steps[rows].points})

    def exits(self, rows: int) -> list[int]:
        """Exit layers at which draft steps are timed."""
        layers, heads = self.split.num_layers, self.split.exit_heads
        some = {1, min(max(2, layers // 2), layers - 1)}  # between them and beyond, costs are linear
        return sorted(some | (set() if heads is None else set(heads.layers)))

    def widths(self, rows: int) -> list[int]:
        """Tokens per row of timed verifications."""
        return [width for width in WIDTHS if width <= 1 + self.limits.draft_length(rows)]

    def shadow(self) -> Seconds:
        """Seconds of shadow picks, which are not recorded, by positions times layers."""
        picker, found, now = Picker(self.split), Seconds(), partial(synchronised_seconds, self.split.device)
        for positions in SHADOW_POSITIONS:
            given = self._states(positions)
            taken = [shadow_seconds(self.split, picker, given, now) for _ in range(self.repeats)]
            found[positions * (self.split.num_layers - 1)] = min(taken)
        return found

    # ---------------------------------------------------------------------------------------------------- recordings

    def head(self, count: int) -> float:
        """Seconds of the head over `count` tokens, and of picking them."""
        hidden, sampling = self._states(count), self._sampling(count)
        return self.seconds(lambda: (self.runner.kernels.pick(self.split.logits(hidden), sampling)[0],))

    def step(self, rows: int, exit_layer: int) -> float:
        """Seconds of a draft step: early layers over one token per row, head and pick."""
        return self._pass(rows, 1, self.base, 0, exit_layer, exit_layer)

    def plain(self, rows: int, is_far: bool) -> float:
        """Seconds of a plain token per row, without the overhead of a round."""
        context = self.base + self.beyond[rows] * is_far
        return self._pass(rows, 1, context, 0, self.split.num_layers, None)

    def verification(self, rows: int, width: int) -> float:
        """Seconds of a verification by the layers above `middle`."""
        return self._pass(rows, width, self.base, self.middle, self.split.num_layers, None)

    def _pass(self, rows: int, width: int, context: int, start: int, stop: int, exit_layer: int | None) -> float:
        """Seconds of layers [start, stop), head and picks over `width` tokens per row."""
        count = rows * width
        given = self._states(count) if start else torch.zeros(count, dtype=torch.int64, device=self.split.device)
        spans = [Span(pages, context, width) for pages in self.pages[rows]]
        layout = layout_of(PackedRows(self.cache, spans, self.split.device))
        layout = layout._replace(most_tokens=token_capacity(context + width, self.cache.capacity))
        sampling, at = self._sampling(count), () if exit_layer is None else (exit_layer,)

        def body() -> tuple[Tensor, ...]:
            hidden = self.split.run(StaticRows(self.cache, layout, self.runner.kernels), start, stop, given)
            return (self.runner.kernels.pick(self.split.logits(hidden, *at), sampling)[0],)

        return self.seconds(body)

    def seconds(self, body: Body) -> float:
        """Seconds of a replay of `body`'s recording."""
        device = self.split.device

        def timed(recording: Recording) -> float:
            once = fastest(recording.replay, 1, device)
            # All ranks of a tensor-parallel model must replay as often.
            count = self.split.agreed(min(MOST_REPLAYS, math.ceil(LEAST_SECONDS / once)))

            def replay() -> None:
                for _ in range(count):
                    recording.replay()

            return min(once, fastest(replay, self.repeats, device) / count)

        seconds: float = self.runner.with_recording(body, timed)
        return seconds

    def rounds(self, rows: int, drafted: int) -> float:
        """Seconds of a whole round in a program, by the wall."""
        remaining = min(len(self.pages[rows][0]) * PAGE, self.split.context_limit) - self.base - 1
        given = [
            RoundRow(pages, self.base + 1, i, remaining, (), drafted, (), 0.0, 0, 1.0, 0.0, 0)
            for i, pages in enumerate(self.pages[rows])
        ]
        plan = Plan(self.middle if drafted else None, (drafted,) * rows, keep_confidence=bool(drafted))
        rounds = self.runner.begin(self.cache, given, plan, drafted)
        if rounds is None:
            raise CannotCapture(self.runner.refused, f"a round of {rows} rows")
        count = ROUNDS if self.repeats > 1 else 1
        for _ in range(min(WARM, count)):
            rounds.launch()
            rounds.take()
        start = perf_counter()
        rounds.launch()
        for left in reversed(range(count)):
            if left:
                rounds.launch()
            rounds.take()
        return (perf_counter() - start) / count

    def _states(self, count: int) -> Tensor:
        """Random hidden states, `[count, hidden_size]`."""
        source = torch.Generator().manual_seed(count)
        made = torch.randn(count, self.split.config.hidden_size, generator=source)
        return made.to(self.split.device, self.split.hidden_dtype)

    def _sampling(self, count: int) -> SamplingTensors:
        """Greedy picks."""
        zeros = torch.zeros(count, device=self.split.device)
        whole = zeros.long()
        return SamplingTensors(zeros, zeros.int(), zeros + 1, zeros, whole, whole, False, False)
