"""Measure the `Costs` of a machine on whole rounds of the model.

Draft steps, verifications and heads are timed within whole rounds. Timed alone, a few layers would stay in the
processor's caches, which a whole model does not.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from selfspec.calibrate.recorded import measure_recorded
from selfspec.calibrate.timed_rounds import FURTHER, SHADOW_POSITIONS, TimedRounds, shadow_seconds
from selfspec.control.costs import CONTEXT, Copies, Costs, Table
from selfspec.core import Plan
from selfspec.executors.cuda.capture import CannotCapture
from selfspec.model.split_model import SplitModel
from selfspec.params import SamplingParams
from selfspec.progress import report

_log = logging.getLogger("selfspec")
QUICK_SECONDS = 1.5  # time limit of a measurement at first use; slow models exceed it
REPEATS = 7
LEAST_READINGS = 3  # of every piece, however long that takes; a slow model with a time limit has one
LOGGED = 2.0  # seconds: a measurement that will take longer writes a log line
WIDTHS = (1, 2, 3, 4, 5, 6, 8, 12, 18, 32, 64)  # tokens per row of a verification
# For several rows: tokens per row, and the maximum in all. Matrix products have steps of 16 tokens; with even widths,
# batches of up to 8 rows would be measured at full steps only.
BATCH_WIDTHS, MOST = (1, 2, 3, 5, 9, 18, 32), 288
HEAD_TOKENS = 128  # a number of tokens that rounds do not reach
LONG_CONTEXT, LONG_WIDTH = 512, 8  # cached tokens, and tokens per row of a verification with them
LONGER = 128  # additional cached tokens per row of a batch
STEPS = 4  # early passes of a timed round
FAST = 3e-3  # seconds of a forward below which the overhead of single calls matters
THIN_WIDTHS = (1, 2, 4, 8)  # the points of a slow model with a time limit
THIN_BATCH_WIDTHS = (1, 2, 8)  # the same of several rows; batch sizes between the first and the last are left out
THIN_SHADOW = (1, 8)  # positions of shadow picks
MANY_FORWARDS = 200  # a model is slow where so many forwards exceed the time limit
PER_PROBE = 3  # forwards of a probe, about
LOW = 1 / 8  # the quantile of the readings of a piece that counts
TICK = 1e-9  # smallest reading, so that quotients are finite
MOST_SHORT = 1.25  # largest factor by which parts of a round are scaled up to the whole


def exits_to_time(num_layers: int) -> list[int]:
    """Exit layers at which draft steps are timed, from a single layer to all but one."""
    some = (min(max(1, round(num_layers * i / 8)), num_layers - 1) for i in (1, 2, 4))
    return sorted({1, *some, num_layers - 1})


def measure(
    split: SplitModel,
    batch_sizes: Sequence[int] = (1,),
    repeats: int = REPEATS,
    widths: Sequence[int] = WIDTHS,
    within: float | None = QUICK_SECONDS,
) -> Costs:
    """Time rounds and their parts. Progress is logged, see `selfspec.progress`.

    Where rounds are recorded, this is `recorded.measure_recorded`, which reads `batch_sizes` and `repeats` alone.

    Args:
        batch_sizes: numbers of rows to measure; 1 is always added.
        widths: tokens of a single row's verifications. Several rows have `BATCH_WIDTHS` up to the largest of these.
        within: seconds after which no further repeat begins; None: no limit. Each point is timed three times at least,
            or `repeats` times where that is less; slow models are measured at fewer points, once at least.

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
        costs = _Measurement(split, sizes, widths).costs(repeats, within)
        if split.agreed(doubtful(costs)):
            # Probably another process was running. Since profiles are kept, a second measurement is worth its time.
            report("these figures are inconsistent; measuring again")
            longer = None if within is None else 2 * within
            costs = _Measurement(split, sizes, widths).costs(max(3, repeats), longer, is_logged=True)
        return split.agreed(costs)


def doubtful(costs: Costs) -> bool:
    """Whether one layer takes more than half of a round, or a part of the layers more than all of them."""
    plain = costs.plain_round(1)
    one, most = (costs.step(e, 1, draft_share=0.0) for e in (1, costs.num_layers - 1))
    return costs.num_layers >= 4 and (one > plain / 2 or most > 1.3 * plain)


class _Measurement:
    """Runs all timings in turn, several times, so that a drift of the machine's speed affects all of them.

    Each timing runs several times in a row, as rounds do while decoding, so that the processor's caches are in the same
    state. The first run is not counted, except for large models, whose weights do not fit into caches.
    """

    def __init__(self, split: SplitModel, batch_sizes: Sequence[int], widths: Sequence[int]) -> None:
        self.split, self.batch_sizes = split, batch_sizes
        self.middle = max(1, split.num_layers // 4)
        limit, widest = split.context_limit, max(STEPS, *widths)
        self.base = max(0, min(CONTEXT, limit - 2 * widest))
        self.long = max(self.base, min(LONG_CONTEXT, limit - 2 * widest))
        self.widths = [w for w in sorted({1, *widths}) if self.base + w <= limit]
        self.steps = min(STEPS, limit - self.base)
        self.timed = TimedRounds(split, max(batch_sizes), self.base + max(widest, 1 + LONGER), self.long + LONG_WIDTH)
        self.readings: dict[tuple[str, int, int], list[float]] = {}  # (piece, rows, size) -> seconds
        self.keeps = self.thin = self.is_fast = False

    def costs(self, repeats: int, within: float | None, is_logged: bool = False) -> Costs:
        now = self.timed.now
        self.plain(1, self.base, "plain")
        start = now()
        self.plain(1, self.base, "plain")
        forward = now() - start
        self.thin = self.split.agreed(within is not None and forward * MANY_FORWARDS > within)
        self.is_fast = forward < FAST
        if self.has_copies:
            self.copied(1, max(1, self.split.num_layers // 2))  # this makes all copies
        if self.thin:
            self.batch_sizes = sorted({self.batch_sizes[0], self.batch_sizes[-1]})
        probes, turn = list(self.probes()), (True,) if self.thin or self.has_calls else (False, True, True)
        least = 1 if self.thin else -(-LEAST_READINGS // sum(turn))
        expected = min(least, repeats) * len(turn) * len(probes) * PER_PROBE * forward
        if expected > LOGGED and not is_logged:
            _log.warning("measuring what decoding costs on this machine, about %.0f s, once ...", expected)
        for repeat in range(repeats):
            late = repeat >= least and within is not None and (now() - start) * (repeat + 1) / repeat > within
            if self.split.agreed(late):
                break
            for i, probe in enumerate(probes):
                report("repeat %d of at most %d, %.0f %%", repeat + 1, repeats, 100 * i / len(probes))
                for self.keeps in turn:
                    probe()
        return self.summary()

    def probes(self) -> Iterator[Callable[[], None]]:
        layers, half = self.split.num_layers, max(self.middle, self.split.num_layers // 2)
        heads_at = set() if self.split.exit_heads is None else set(self.split.exit_heads.layers)  # these take longer
        every = sorted({*exits_to_time(layers), *heads_at})
        few = sorted({1, half} | heads_at)
        for rows in self.batch_sizes:
            exits = sorted({1, self.middle, layers - 1} | heads_at) if self.thin and rows == 1 else every
            yield partial(self.plain, rows, self.base, "plain")
            yield from (partial(self.round, rows, e, self.steps, "step") for e in (exits if rows == 1 else few))
            yield from (partial(self.round, rows, self.middle, width, "late") for width in self.widths_of(rows))
            if self.has_copies:
                yield from (partial(self.copied, rows, e) for e in few if e <= max(1, layers // 2))
            if rows == 1:
                yield partial(self.plain, 1, self.long, "long")
                if LONG_WIDTH in self.widths:
                    yield partial(self.round, 1, self.middle, LONG_WIDTH, "long late", self.long)
            elif self.base + LONGER < self.long:
                yield partial(self.plain, rows, self.base + LONGER, "long")
        if not self.thin:
            yield partial(self.head, HEAD_TOKENS)
        yield from (partial(self.shadow, n) for n in (THIN_SHADOW if self.thin else SHADOW_POSITIONS))

    def widths_of(self, rows: int) -> list[int]:
        """Tokens per row of verifications."""
        if rows == 1 and not self.thin:
            return self.widths
        usual = (THIN_WIDTHS if rows == 1 else THIN_BATCH_WIDTHS) if self.thin else BATCH_WIDTHS
        return [w for w in usual if w <= self.widths[-1] and rows * w <= max(MOST, 2 * rows)]

    @property
    def has_calls(self) -> bool:
        """Whether timed rounds run many per call: it is possible, and rounds are fast enough for it to matter."""
        return self.timed.in_calls and self.is_fast

    @property
    def has_copies(self) -> bool:
        return self.split.has_copies and self.steps == STEPS

    # ------------------------------------------------------------------------------------------------------- timings

    def plain(self, rows: int, context: int, piece: str) -> None:
        """Time a plain round as `piece`."""
        for laps in self.laps(rows, Plan(None, (0,) * rows), context):
            self.keep(piece, rows, 1, sum(map(sum, laps.values())))
            self.keep("layers" if piece == "plain" else "long layers", rows, 1, laps["verify"][0])
            self.keep("head", 1, rows, laps["head"][0] + laps["pick"][0])

    def round(self, rows: int, exit_layer: int, width: int, piece: str, context: int | None = None) -> None:
        """Time a round of `width` tokens per row: its draft steps or its verification, and its heads."""
        plan = Plan(exit_layer, (width - 1,) * rows, keep_confidence=True)
        for laps in self.laps(rows, plan, self.base if context is None else context):
            *drafting, judging = [head + pick for head, pick in zip(laps["head"], laps["pick"], strict=True)]
            self.keep("head", 1, rows * width, judging)
            if piece != "step":
                self.keep(piece, rows, width, laps["verify"][0])
            elif drafting:
                passes = laps["draft"]
                self.keep(piece, rows, exit_layer, sum(passes) / len(passes) + sum(drafting) / len(drafting))

    def copied(self, rows: int, exit_layer: int) -> None:
        """Time a draft by 4-bit copies of the layers."""
        plan = Plan(exit_layer, (self.steps - 1,) * rows, keep_confidence=True, draft_bits=4)
        for laps in self.laps(rows, plan, self.base):
            passes, heads, picks = laps["draft"], laps["head"][:-1], laps["pick"][:-1]
            head = sum(heads) / len(heads) + sum(picks) / len(picks)
            self.keep("copied step", rows, exit_layer, sum(passes) / len(heads) + head)
            self.keep("copied head", 1, rows, head)

    def laps(self, rows: int, plan: Plan, context: int) -> list[dict[str, list[float]]]:
        """Seconds by stage of the rounds that count, see `TimedRounds.laps`."""
        single, *warm = self.timed.laps(rows, context, plan, FURTHER if self.has_calls else 0)
        return warm or [single]

    def head(self, num_tokens: int) -> None:
        """Time head and picks of many tokens after a forward, so that the head is not in the processor's caches."""
        self.plain(1, self.base, "plain")
        hidden = self.timed.given(num_tokens, 1)
        start = self.timed.now()
        logits = self.split.logits(hidden, self.middle)
        picks = self.timed.picker(logits, [SamplingParams()] * num_tokens, range(num_tokens)).tokens
        torch.stack([picks, picks]).tolist()  # a round copies drafts and picks to the host
        self.keep("head", 1, num_tokens, self.timed.now() - start)

    def shadow(self, positions: int) -> None:
        """Time shadow picks of all layers at a few positions."""
        seconds = shadow_seconds(self.split, self.timed.picker, self.timed.given(positions, 1), self.timed.now)
        self.keep("shadow", 1, positions * (self.split.num_layers - 1), seconds)

    # ------------------------------------------------------------------------------------------------------- results

    def keep(self, piece: str, rows: int, size: int, seconds: float) -> None:
        if self.keeps:
            self.readings.setdefault((piece, rows, size), []).append(seconds)

    def typical(self, piece: str) -> dict[int, dict[int, float]]:
        """Seconds of a piece by rows and size: a low quantile. Readings that are not positive are dropped.

        Other processes only make readings longer, and long parts more often than short ones, so that medians of parts
        would not be comparable.
        """
        found: dict[int, dict[int, float]] = {}
        for (name, rows, size), seconds in self.readings.items():
            if name == piece:
                real = sorted(s for s in seconds if s >= TICK) or [TICK]
                found.setdefault(rows, {})[size] = real[min(int(len(real) * LOW), (len(real) - 1) // 2)]
        return found

    def summary(self) -> Costs:
        """The costs that follow from the readings."""
        layers, late, steps = self.split.num_layers, self.typical("late"), self.typical("step")
        plain = {rows: of_one[1] for rows, of_one in self.typical("plain").items()}
        whole = {rows: of_one[1] for rows, of_one in self.typical("layers").items()}
        head, all_layers = Table.of(self.typical("head")[1]), layers / (layers - self.middle)
        copied, copied_head = self.typical("copied step"), self.typical("copied head")
        rounds, long = dict[int, Table](), dict[int, float]()
        for rows, of_rows in late.items():
            # With a varying speed, low quantiles of parts add up to less than that of the whole, so that drafts would
            # look cheaper than they are.
            short = min(max(1.0, whole[rows] / (of_rows[1] * all_layers)), MOST_SHORT)
            steps[rows], copied[rows] = (
                {e: short * seconds for e, seconds in each.get(rows, {}).items()} for each in (steps, copied)
            )
            more = {w: max(0.0, short * all_layers * (seconds - of_rows[1])) for w, seconds in of_rows.items()}
            heads = {w: head(rows * w) - head(rows) for w in of_rows}
            rounds[rows] = Table.of({w: plain[rows] + more[w] + heads[w] for w in of_rows})
        for rows, of_one in self.typical("long").items():
            beyond = (self.long if rows == 1 else self.base + LONGER) - self.base
            long[rows] = max(0.0, of_one[1] - plain[rows]) / beyond if beyond else 0.0
        return Costs(
            layers,
            rounds=rounds,
            steps={rows: Table.of(of_rows or {1: TICK}) for rows, of_rows in steps.items()},
            head=head,
            context=Table.of(long),
            shadow_picks=Table.of(self.typical("shadow")[1]),
            width=self._width(all_layers, long[1], late[1]),
            copies=Copies({rows: Table.of(of_rows) for rows, of_rows in copied.items()}, Table.of(copied_head[1]))
            if copied_head
            else None,
        )

    def _width(self, all_layers: float, context: float, late: dict[int, float]) -> float:
        """`Costs.width`, from a verification with a long context."""
        beyond, far = self.long - self.base, self.typical("long late").get(1, {})
        if not (beyond and context and LONG_WIDTH in far):
            return 0.0
        each = max(0.0, far[LONG_WIDTH] - late[LONG_WIDTH]) * all_layers / beyond
        return max(0.0, each / context - 1) / (LONG_WIDTH - 1)
