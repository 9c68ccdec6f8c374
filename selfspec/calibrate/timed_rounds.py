"""`TimedRounds`: rounds of rows that are made up, decoded as the engine does it and timed stage by stage."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from time import perf_counter
from typing import cast

import torch

from selfspec.control.plan import LOOKUP, Plan
from selfspec.control.rows import StageSeconds
from selfspec.decoding.request import Request
from selfspec.decoding.row import Row
from selfspec.decoding.stopping import Stopper
from selfspec.drafting.prompt_lookup import Guess
from selfspec.executors.picker import Picker
from selfspec.executors.program import Executed, RoundDraft
from selfspec.executors.select import executors_for
from selfspec.model.kv_cache import PagedCache
from selfspec.model.stack import Stack

RAGGED = 4  # tokens by which rows of a batch differ in length, about their mean
# Rounds after the first of a call of many, of which the last half count: the first ones find caches as the interpreter
# left them, and take up to twice as long, plain ones most of all.
FURTHER, LEAST_FURTHER = 12, 3
GROWTH = 96  # tokens by which a row grows at most in a call, as far as fewer rounds can help it


class _Laps(StageSeconds):
    """A round's stages one by one, on the measurement's own clock, which waits for the device."""

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
    """Keeps the rows' caches from round to round.

    Args:
        num_rows: most rows of a round.
        room: tokens that each may come to hold, without what makes them ragged.
        far_room: what a single one may, where that is more.
    """

    def __init__(self, stack: Stack, num_rows: int, room: int, far_room: int) -> None:
        self._stack, self.picker = stack, Picker(stack)
        self._room = room + 8 * FURTHER + 4 * RAGGED
        self._cache, self._pages = _rows(stack, num_rows, self._room)
        self._far = _rows(stack, 1, far_room + 8 * FURTHER)
        self._executors = [
            executors_for(stack, cache, self.picker, new_seconds=lambda: _Laps(self.now))
            for cache in (self._cache, self._far[0])
        ]
        self._grown: dict[tuple[int, int, Plan], int] = {}
        self._inputs: dict[tuple[int, bool], torch.Tensor] = {}

    def laps(
        self, num_rows: int, context: int, plan: Plan, further: int, uneven: int = 0
    ) -> list[dict[str, list[float]]]:
        """Stage -> its seconds, one by one, of a round; and of the last half of so many further ones of its call.

        Rows grow by what is accepted, which takes longer to read: they begin as much shorter as they were too long, by
        the time that counts, when this was asked last.

        Args:
            uneven: tokens that every second row holds beyond its `context`.
        """
        drafted = max(plan.draft_lengths)
        further = min(further, max(LEAST_FURTHER, GROWTH // (1 + drafted)))
        is_far = context + uneven + 1 + drafted + 8 * FURTHER + 4 * RAGGED > self._room
        cache, pages = self._far if is_far else (self._cache, self._pages)
        start = context - (self._grown.get((num_rows, context, plan), 0) if further else 0)
        most = min(cache.page_size, self._stack.context_limit)
        rows, stopper = [], Stopper(most - 1)  # its prompt is one token, whatever else it has
        mean = sum([i % 8 for i in range(num_rows)]) / num_rows
        for i, token in enumerate(self.given(num_rows, 0).tolist()):
            away = round(RAGGED * (i % 8 - mean)) + uneven * (i % 2)
            content = [0] * max(0, min(start + away, most - 1 - drafted)) + [token]
            rows.append(Row(i, Request([0]), stopper, pages[i], content))
        executor = next(one for one in self._executors[is_far] if one.serves(rows, plan))
        if plan.exit_layer == LOOKUP:
            guesses = [Guess([0] * length, length) for length in plan.draft_lengths]
            rounds = [executor.round(rows, RoundDraft(plan, guesses))]
        elif further:
            rounds = [*executor.run(rows, replace(plan, num_rounds=1 + further), 1.0)]
        else:
            rounds = [executor.round(rows, RoundDraft(plan))]
        coming = [one for one in rounds[1:] if _is_whole(one, plan)]
        half = len(coming) // 2
        if coming:
            before = [rounds[0], *coming[: half + (len(coming) - half) // 2]]
            emitted = sum([len(verdict.block) for each in before for verdict in each.verdicts])
            self._grown[num_rows, context, plan] = min(context, emitted // num_rows)
        return [cast(_Laps, one.seconds).taken for one in (rounds[0], *coming[half:])]

    @property
    def in_calls(self) -> bool:
        """Whether many rounds come in one call."""
        return self._stack.engine == "compiled" and self.picker.is_compiled and self._stack.runner is None

    def given(self, num_tokens: int, start: int) -> torch.Tensor:
        """Tokens or hidden states that differ, as real ones do: experts are then chosen as variously."""
        known = self._inputs.get((num_tokens, start > 0))
        if known is None:
            source = torch.Generator().manual_seed(num_tokens)
            if start == 0:
                known = torch.randint(self._stack.vocab_size, (num_tokens,), generator=source)
            else:
                known = torch.randn(num_tokens, self._stack.config.hidden_size, generator=source).to(
                    self._stack.hidden_dtype
                )
            known = self._inputs[num_tokens, start > 0] = known.to(self._stack.device)
        return known

    def now(self) -> float:
        if self._stack.device.type == "cuda":
            torch.cuda.synchronize(self._stack.device)
        return perf_counter()


def _is_whole(round_: Executed, plan: Plan) -> bool:
    """Whether rows had room for all that they were to draft."""
    drafted = [verdict.chain or len(verdict.drafted) for verdict in round_.verdicts]
    return drafted == list(plan.draft_lengths)


def _rows(stack: Stack, count: int, room: int) -> tuple[PagedCache, list[list[int]]]:
    """A cache with one page for each of `count` rows."""
    cache = stack.new_cache(count, room)
    return cache, [cache.reserve(room) or [] for _ in range(count)]
