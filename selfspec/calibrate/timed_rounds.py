"""`TimedRounds`: rounds over synthetic rows, run by the engine's executors and timed by stage."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import cast

import torch

from selfspec.core import LOOKUP, Draft, Plan, Request, RoundOutput, Sequence, StageSeconds
from selfspec.decoding.stopping import Stopper
from selfspec.drafting.lookup import RowLookup
from selfspec.executors.base import RoundDraft
from selfspec.executors.picker import Picker
from selfspec.executors.select import executors_for
from selfspec.executors.shadow import shadow_picks
from selfspec.model.kv_cache import PagedCache
from selfspec.model.split_model import SplitModel
from selfspec.params import SamplingParams

RAGGED = 4  # tokens by which the rows of a batch differ in length
# Rounds after the first one in a call. Only the last half of them counts, since the first rounds after Python code take
# up to twice as long.
FURTHER, LEAST_FURTHER = 12, 3
SHADOW_POSITIONS = (1, 4, 8, 32)  # numbers of positions at which shadow picks are timed
GROWTH = 96  # tokens by which a row may grow in a call; long drafts have fewer rounds per call


class _Laps(StageSeconds):
    """The stages of a round one by one, by a clock that synchronises the device."""

    def __init__(self, now: Callable[[], float]) -> None:
        super().__init__()
        self._clock = now
        self.taken: dict[str, list[float]] = {}
        self._last = now()

    def add(self, stage: str, seconds: float) -> None:
        self.taken.setdefault(stage, []).append(seconds)

    def now(self) -> float:
        return self._clock()


class TimedRounds:
    """Runs and times rounds; the rows' caches are kept between them.

    Args:
        num_rows: maximum number of rows of a round.
        max_length: maximum length of a row in tokens.
        far_length: the same for rounds of a single row with a long context.
    """

    def __init__(self, split: SplitModel, num_rows: int, max_length: int, far_length: int) -> None:
        self._split, self.picker = split, Picker(split)
        self.now: Callable[[], float] = partial(synchronised_seconds, split.device)
        self._max_length = max_length + 8 * FURTHER + 4 * RAGGED
        self._cache, self._pages = _rows(split, num_rows, self._max_length)
        self._far = _rows(split, 1, far_length + 8 * FURTHER)
        # Of no method: a reference cycle would hold the caches until Python looks for cycles.
        new_laps = partial(_Laps, self.now)
        self._executors = [
            [one for one in executors_for(split, cache, self.picker, new_seconds=new_laps) if one.times_stages]
            for cache in (self._cache, self._far[0])
        ]
        self._grown: dict[tuple[int, int, Plan], int] = {}
        self._inputs: dict[tuple[int, bool], torch.Tensor] = {}

    def laps(self, num_rows: int, context: int, plan: Plan, further: int) -> list[dict[str, list[float]]]:
        """Run `1 + further` rounds in one call; seconds by stage of the first and of the last half of the others.

        Accepted tokens make rows longer. So that the counted rounds have the wanted context, rows start shorter by the
        growth that was measured at the last call with these arguments.
        """
        drafted = max(plan.draft_lengths)
        further = min(further, max(LEAST_FURTHER, GROWTH // (1 + drafted)))
        is_far = context + 1 + drafted + 8 * FURTHER + 4 * RAGGED > self._max_length
        cache, pages = self._far if is_far else (self._cache, self._pages)
        start = context - (self._grown.get((num_rows, context, plan), 0) if further else 0)
        most = min(cache.page_size, self._split.context_limit)
        rows, stopper = [], Stopper(most - 1)  # its prompt is one token, whatever else it has
        mean = sum([i % 8 for i in range(num_rows)]) / num_rows
        for i, token in enumerate(self.given(num_rows, 0).tolist()):
            away = round(RAGGED * (i % 8 - mean))
            content = [0] * max(0, min(start + away, most - 1 - drafted)) + [token]
            row = Sequence(i, Request([0]), content, most, stopper=stopper, new_lookup=RowLookup)
            row.pages = tuple(pages[i])
            rows.append(row)
        executor = next(one for one in self._executors[is_far] if one.serves(rows, plan))
        if plan.exit_layer == LOOKUP:
            given = [Draft([0] * length, length) for length in plan.draft_lengths]
            rounds = [executor.round(rows, RoundDraft(plan, given))]
        elif further:
            rounds = [*executor.run(rows, replace(plan, num_rounds=1 + further), 1.0)]
        else:
            rounds = [executor.round(rows, RoundDraft(plan))]
        coming = [one for one in rounds[1:] if _is_whole(one, plan)]
        half = len(coming) // 2
        if coming:
            before = [rounds[0], *coming[: half + (len(coming) - half) // 2]]
            emitted = sum([len(row.token_ids) for each in before for row in each.rows])
            self._grown[num_rows, context, plan] = min(context, emitted // num_rows)
        return [cast(_Laps, one.seconds).taken for one in (rounds[0], *coming[half:])]

    @property
    def in_calls(self) -> bool:
        """Whether many rounds can run in one compiled call."""
        return self._split.backend == "compiled" and self.picker.is_compiled and self._split.runner is None

    def given(self, num_tokens: int, start: int) -> torch.Tensor:
        """Random tokens (`start` 0) or hidden states, so that tokens are routed to various experts."""
        known = self._inputs.get((num_tokens, start > 0))
        if known is None:
            source = torch.Generator().manual_seed(num_tokens)
            if start == 0:
                known = torch.randint(self._split.vocab_size, (num_tokens,), generator=source)
            else:
                known = torch.randn(num_tokens, self._split.config.hidden_size, generator=source).to(
                    self._split.hidden_dtype
                )
            known = self._inputs[num_tokens, start > 0] = known.to(self._split.device)
        return known


def synchronised_seconds(device: torch.device) -> float:
    """The time once the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()  # of the device, no capture may be under way
    return perf_counter()


def shadow_seconds(split: SplitModel, picker: Picker, hidden: torch.Tensor, now: Callable[[], float]) -> float:
    """Seconds of shadow picks of all layers at the positions of `hidden`, `[N, hidden_size]`."""
    params, at, scores = [SamplingParams()] * len(hidden), range(len(hidden)), split.logits(hidden)
    layers = range(1, split.num_layers)
    seen = hidden.expand(len(layers), -1, -1).contiguous()
    start = now()
    shadow_picks(split, picker, layers, seen, params, at, scores, scores.argmax(-1))
    return now() - start


def _is_whole(round_: RoundOutput, plan: Plan) -> bool:
    """Whether all rows drafted as many tokens as planned."""
    return [row.num_drafted for row in round_.rows] == list(plan.draft_lengths)


def _rows(split: SplitModel, count: int, max_length: int) -> tuple[PagedCache, list[list[int]]]:
    """A cache with one page for each of `count` rows."""
    cache = split.new_cache(count, max_length)
    return cache, [cache.reserve(max_length) or [] for _ in range(count)]
