"""Measure the `Costs` of a machine on whole rounds of the model.

Early passes, verifications, heads and picks are timed within whole rounds. Timed alone, a few layers would stay in the
processor's caches, which a whole model does not.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from selfspec.calibrate.overhead import EngineOverhead
from selfspec.calibrate.readings import Readings, low
from selfspec.calibrate.recorded import measure_recorded
from selfspec.calibrate.timed_rounds import FURTHER, SHADOW_POSITIONS, TimedRounds, shadow_seconds
from selfspec.control.costs import CONTEXT, Costs
from selfspec.core import LOOKUP, Plan, SamplingParams
from selfspec.executors.cuda.capture import CannotCapture
from selfspec.model.split_model import SplitModel
from selfspec.progress import report

_log = logging.getLogger("selfspec")
QUICK_SECONDS = 1.5  # time limit of a measurement at first use; slow models exceed it
REPEATS = 7
LEAST_READINGS = 3  # of every piece, however long that takes; a slow model with a time limit has one
LOGGED = 2.0  # seconds: a measurement that will take longer writes a log line
WIDTHS = (1, 2, 3, 4, 5, 6, 8, 12, 18, 32, 64)  # tokens per row of a verification
HEAD_TOKENS = (32, 128)  # numbers of tokens that rounds do not reach
# For several rows: tokens per row, and the maximum in all. Matrix products have steps of 16 tokens; with even widths,
# batches of up to 8 rows would be measured at full steps only.
BATCH_WIDTHS, MOST = (1, 2, 3, 5, 9, 18, 32), 288
RAGGED_EVERY, RAGGED_WIDTH = 4, 9  # in a ragged verification every fourth row has so many tokens, the others have one
LONG_CONTEXT, LONG_WIDTH = 512, 8  # cached tokens, and tokens per row of a verification with them
LONGER = (64, 128)  # additional cached tokens per row of a batch; the last also for every second row only
LONGER_WIDTH = 3  # tokens per row of a verification with these
STEPS = 4  # early passes of a timed round
FAST = 3e-3  # seconds of a forward below which the overhead of single calls matters
THIN_WIDTHS, THIN_HEADS = (1, 2, 4, 8), (16, 128)  # the points of a slow model with a time limit
THIN_BATCH_WIDTHS = (1, 2, 8)  # the same of several rows; batch sizes between the second and the last are left out
MANY_FORWARDS = 200  # a model is slow where so many forwards exceed the time limit
PER_PROBE = 3  # forwards of a probe, about


def exits_to_time(num_layers: int) -> list[int]:
    """Exit layers at which early passes are timed, from a single layer to all but one."""
    some = (min(max(1, round(num_layers * i / 8)), num_layers - 1) for i in (1, 1.5, 2, 3, 4, 6))
    return sorted({1, *some, num_layers - 1})


def measure(
    split: SplitModel,
    batch_sizes: Sequence[int] = (1,),
    repeats: int = REPEATS,
    widths: Sequence[int] = WIDTHS,
    within: float | None = QUICK_SECONDS,
    counts: Callable[[Sequence[float]], float] = low,
) -> Costs:
    """Time every part of a round. Progress is logged, see `selfspec.progress`.

    Where rounds are recorded, this is `recorded.measure_recorded`, which reads `batch_sizes` and `repeats` alone.

    Args:
        batch_sizes: numbers of rows to measure; 1 is always added.
        widths: tokens of a single row's verifications. Several rows have `BATCH_WIDTHS` up to the largest of these.
        within: seconds after which no further repeat begins; None: no limit. Each point is timed three times at least,
            or `repeats` times where that is less; slow models are measured at fewer points, once at least.
        counts: see `Readings`.

    Raises:
        ValueError: the model has one layer only.
    """
    if split.num_layers < 2:
        raise ValueError(f"a model must have at least 2 layers to measure costs, got {split.num_layers}")
    sizes = sorted({1, *batch_sizes})
    if split.runner is not None and split.runner.refused is None and split.runner.limits.rows:
        try:
            return split.agreed(measure_recorded(split, sizes, repeats))
        except CannotCapture as problem:
            report("rounds are measured operation by operation, since they cannot be recorded (%s)", problem)
    with torch.inference_mode():
        costs = _Measurement(split, sizes, widths, counts).costs(repeats, within)
        if split.agreed(doubtful(costs)):
            # Probably another process was running. Since profiles are kept, a second measurement is worth its time.
            report("these figures are inconsistent; measuring again")
            longer = None if within is None else 2 * within
            costs = _Measurement(split, sizes, widths, counts).costs(max(3, repeats), longer, is_logged=True)
        return split.agreed(costs)


def doubtful(costs: Costs) -> bool:
    """Whether one layer takes more than half of a forward, or a part of the layers more than all of them."""
    early, plain = costs.early[1], costs.plain(1)
    return costs.num_layers >= 4 and (early(1) > plain / 2 or early(costs.num_layers - 1) > 1.3 * plain)


class _Measurement:
    """Runs all timings in turn, several times, so that a drift of the machine's speed affects all of them.

    Each timing runs several times in a row, as rounds do while decoding, so that the processor's caches are in the same
    state. The first run is not counted, except for large models, whose weights do not fit into caches.
    """

    def __init__(
        self,
        split: SplitModel,
        batch_sizes: Sequence[int],
        widths: Sequence[int],
        counts: Callable[[Sequence[float]], float] = low,
    ) -> None:
        self.split, self.batch_sizes = split, batch_sizes
        self.middle = max(1, split.num_layers // 4)
        limit, widest = split.context_limit, max(STEPS, *widths)
        self.base = max(0, min(CONTEXT, limit - 2 * widest))
        self.long = max(self.base, min(LONG_CONTEXT, limit - 2 * widest))
        self.widths = [w for w in sorted({1, *widths}) if self.base + w <= limit]
        self.steps = min(STEPS, limit - self.base)
        longest = self.base + max(widest, LONGER[-1] + LONGER_WIDTH)
        self.timed = TimedRounds(split, max(batch_sizes), longest, self.long + LONG_WIDTH)
        self.picker, self.given, self.now = self.timed.picker, self.timed.given, self.timed.now
        self.readings = Readings(counts)
        self.engines = EngineOverhead(split, self.now)
        self.keeps = self.thin = self.is_fast = False

    def costs(self, repeats: int, within: float | None, is_logged: bool = False) -> Costs:
        self.plain(1, self.base, "plain")
        start = self.now()
        self.plain(1, self.base, "plain")
        forward = self.now() - start
        self.thin = self.split.agreed(within is not None and forward * MANY_FORWARDS > within)
        self.is_fast = forward < FAST
        if self.split.has_copies and self.steps == STEPS:
            self.copied(1, max(1, self.split.num_layers // 2))  # this makes all copies
        if self.thin and len(self.batch_sizes) > 3:
            self.batch_sizes = [*self.batch_sizes[:2], self.batch_sizes[-1]]
        probes, turn = list(self.probes()), (True,) if self.thin or self.has_calls else (False, True, True)
        least = 1 if self.thin else -(-LEAST_READINGS // sum(turn))
        expected = min(least, repeats) * len(turn) * len(probes) * PER_PROBE * forward
        if expected > LOGGED and not is_logged:
            _log.warning("measuring what decoding costs on this machine, about %.0f s, once ...", expected)
        for repeat in range(repeats):
            late = repeat >= least and within is not None and (self.now() - start) * (repeat + 1) / repeat > within
            if self.split.agreed(late):
                break
            for i, probe in enumerate(probes):
                report("repeat %d of at most %d, %.0f %%", repeat + 1, repeats, 100 * i / len(probes))
                for self.keeps in turn:
                    probe()
            for rows in self.batch_sizes if self.has_calls else ():
                self.around(rows)  # many rounds per call
        beyond = self.long - self.base
        return self.readings.costs(self.split.num_layers, self.middle, beyond if beyond > self.base else 0)

    def probes(self) -> Iterator[Callable[[], None]]:
        layers, heads = self.split.num_layers, THIN_HEADS if self.thin else HEAD_TOKENS
        half = max(self.middle, layers // 2)
        heads_at = set() if self.split.exit_heads is None else set(self.split.exit_heads.layers)  # these take longer
        every = sorted({*exits_to_time(layers), *heads_at})
        few = sorted({1, half} | heads_at) if self.thin else [e for e in every if e <= half]
        for rows in self.batch_sizes:
            widths = self.widths if rows == 1 and not self.thin else self.batch_widths(rows)
            exits = few if rows > 1 else sorted({1, self.middle, layers - 1} | heads_at) if self.thin else every
            yield partial(self.plain, rows, self.base, "plain")
            yield from (partial(self.round, rows, exit_layer, self.steps, "early") for exit_layer in exits)
            yield from (partial(self.round, rows, self.middle, width, "late") for width in widths)
            if self.split.has_copies and self.steps == STEPS:
                early = [e for e in few if e <= max(1, layers // 2)]
                yield from (partial(self.copied, rows, exit_layer) for exit_layer in early)
            if rows > 1 and self.base + RAGGED_WIDTH <= self.split.context_limit:
                yield partial(self.ragged, rows)
        yield partial(self.plain, 1, self.long, "long")
        if LONG_WIDTH in self.widths:
            yield partial(self.round, 1, self.middle, LONG_WIDTH, "long late", self.long)
        for rows in self.batch_sizes[1:] if self.base + LONGER[-1] < self.long else ():
            if self.has_calls:
                yield partial(self.read, rows, self.base + LONGER[-1])
            yield from (partial(self.plain, rows, self.base + longer, "longer", longer) for longer in LONGER)
            if LONGER_WIDTH in self.batch_widths(rows):
                yield partial(self.round, rows, self.middle, LONGER_WIDTH, "longer late", self.base + LONGER[-1])
            yield partial(self.plain, rows, self.base, "uneven", LONGER[-1], LONGER[-1])
        yield from (partial(self.head, n) for n in heads)
        yield from (partial(self.shadow, n) for n in SHADOW_POSITIONS)

    def batch_widths(self, rows: int) -> list[int]:
        """Tokens per row of verifications of several rows, and of one row of a slow model."""
        usual = (THIN_WIDTHS if rows == 1 else THIN_BATCH_WIDTHS) if self.thin else BATCH_WIDTHS
        widths = [w for w in usual if w <= self.widths[-1]]
        return [w for w in widths if rows * w <= max(MOST, 2 * rows)]

    @property
    def has_calls(self) -> bool:
        """Whether timed rounds run many per call: it is possible, and rounds are fast enough for it to matter."""
        return self.timed.in_calls and self.is_fast and self.engines.fits

    def read(self, rows: int, context: int) -> None:
        """Read all keys of the rows once, so that they are in the processor's caches, as during decoding."""
        self.laps(rows, Plan(None, (0,) * rows), context)

    def plain(self, rows: int, context: int, piece: str, size: int = 1, uneven: int = 0) -> None:
        """Time a plain round as `piece` of this size; every second row has `uneven` more cached tokens."""
        single, *warm = self.laps(rows, Plan(None, (0,) * rows), context, uneven)
        (around, *_), (layers, *_) = single["rest"], single["verify"]
        if not self.timed.in_calls:
            layers += around  # other rounds have this overhead within their layers, too
        elif not self.has_calls:
            self.keep("rest", rows, 1, around)
        if piece == "plain":
            self.keep("single", rows, 1, layers)
        for laps in warm or [single]:
            self.keep(piece, rows, size, laps["verify"][0] if warm else layers)
            self.keep("plain head", 1, rows, laps["head"][0])
            if self.steps == 1:  # no draft measures the head
                self.keep("head", 1, rows, laps["head"][0])

    def around(self, rows: int) -> None:
        """Time the overhead of plain rounds."""
        forward = self.readings.typical("plain")[rows][1]
        self.keep("around", rows, 1, self.engines.seconds(self.given(rows, 0).tolist(), forward))

    def round(self, rows: int, exit_layer: int, width: int, piece: str, context: int | None = None) -> None:
        """Time a round of `width` tokens per row: its early passes or its verification, and its heads and picks."""
        single, *warm = self.laps(rows, Plan(exit_layer, (width - 1,) * rows, keep_confidence=True), context)
        for laps in warm or [single]:
            (first, *later), late = laps["draft"], laps["verify"][0]
            if piece == "early":
                self.keep("first", rows, exit_layer, first)
                self.keep(piece, rows, exit_layer, sum(later) / len(later) if later else first)
            else:
                self.keep(piece, rows, width, late)
            if width == 1:  # a plain forward in two parts
                self.keep("halves", rows, 1, first + late)
            for stage in ("head", "pick"):
                *drafting, judging = laps[stage]
                for one in drafting:
                    self.keep(stage, 1, rows, one)
                if drafting:
                    self.keep(stage, 1, rows * width, judging)

    def copied(self, rows: int, exit_layer: int) -> None:
        """Time a draft by 4-bit copies of the layers."""
        plan = Plan(exit_layer, (self.steps - 1,) * rows, keep_confidence=True, draft_bits=4)
        single, *warm = self.laps(rows, plan)
        for laps in warm or [single]:
            first, *later, packing = laps["draft"]
            self.keep("copied first", rows, exit_layer, first + packing)
            for one in later:
                self.keep("copied later", rows, exit_layer, one)
            for one in laps["head"][:-1]:
                self.keep("copied head", 1, rows, one)

    def ragged(self, rows: int) -> None:
        """Time a verification by all layers in which few rows have many tokens and the others one."""
        lengths = [0 if i % RAGGED_EVERY else RAGGED_WIDTH - 1 for i in range(rows)]
        [laps] = self.laps(rows, Plan(LOOKUP, tuple(lengths)))
        self.keep("ragged", rows, sum(lengths) + rows, laps["verify"][0])

    def laps(
        self, num_rows: int, plan: Plan, context: int | None = None, uneven: int = 0
    ) -> list[dict[str, list[float]]]:
        """See `TimedRounds.laps`."""
        further = FURTHER if self.has_calls and plan.exit_layer != LOOKUP else 0
        return self.timed.laps(num_rows, self.base if context is None else context, plan, further, uneven)

    def head(self, num_tokens: int) -> None:
        """Time head and picks of many tokens after a forward, so that the head is not in the processor's caches."""
        self.plain(1, self.base, "plain")
        hidden = self.given(num_tokens, 1)
        start = self.now()
        logits = self.split.logits(hidden, self.middle)
        between = self.now()
        picks = self.picker(logits, [SamplingParams()] * num_tokens, range(num_tokens)).tokens
        torch.stack([picks, picks]).tolist()  # a round copies drafts and picks to the host
        self.keep("head", 1, num_tokens, between - start)
        self.keep("pick", 1, num_tokens, self.now() - between)

    def shadow(self, positions: int) -> None:
        """Time shadow picks of all layers at a few positions."""
        seconds = shadow_seconds(self.split, self.picker, self.given(positions, 1), self.now)
        self.keep("short", 1, positions * (self.split.num_layers - 1), seconds)

    def keep(self, piece: str, rows: int, size: int, seconds: float) -> None:
        if self.keeps:
            self.readings.keep(piece, rows, size, seconds)
