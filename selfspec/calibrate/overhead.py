"""The overhead of an engine's rounds: everything outside of forwards, heads and picks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from selfspec.control.costs import Costs
from selfspec.control.plan import UNBOUNDED_ROUNDS, Plan, Policy
from selfspec.control.rows import RowState
from selfspec.decoding.engine import Engine
from selfspec.decoding.results import Round
from selfspec.model.draft_vocabulary import Frequencies
from selfspec.model.stack import Stack

# Plain rounds per measurement: at least ROUNDS, and as many as take SPAN seconds, up to MOST_ROUNDS. Starting a call
# takes as long as the overhead of dozens of rounds, so a measurement needs many of them. SPAN is less than a burst.
ROUNDS, MOST_ROUNDS, SPAN = 32, 128, 0.03
PROMPT = 2  # tokens


class _PlainTarget:
    """A stand-in for a target, sufficient for plain decoding."""

    tokenizer = prior = stored = default_exit_layer = default_num_draft_tokens = None
    eos_token_ids: frozenset[int] = frozenset()

    def __init__(self, stack: Stack) -> None:
        self.stack = self.exact_stack = stack

    def costs(self, batch_size: int = 1, exact: bool = False) -> Costs:
        raise NotImplementedError("plain decoding needs no costs")


class _PlainAfterPrefill(Policy):
    """Plain decoding whose first program is one round, so that prefill is not timed."""

    def plan(self, rows: Sequence[RowState]) -> Plan:
        is_new = rows[0].content_length == PROMPT
        return Plan(None, (0,) * len(rows), num_rounds=1 if is_new else UNBOUNDED_ROUNDS)


class EngineOverhead:
    """Times plain rounds of an engine, many per call.

    Args:
        now: returns the time in seconds.
    """

    def __init__(self, stack: Stack, now: Callable[[], float]) -> None:
        self._target, self._now = _PlainTarget(stack), now
        self._engines: dict[int, Engine] = {}  # by number of rows

    @property
    def fits(self) -> bool:
        """Whether the context limit allows enough rounds."""
        return self._target.stack.context_limit > PROMPT + ROUNDS

    def seconds(self, tokens: Sequence[int], forward: float = SPAN) -> float:
        """Seconds of overhead per round. Each token starts a row; `forward` is the approximate time of a round."""
        rows, longest = len(tokens), self._target.stack.context_limit - PROMPT - 1
        count = min(MOST_ROUNDS, longest, max(ROUNDS, int(SPAN / max(forward, SPAN / MOST_ROUNDS))))
        engine = self._engines.get(rows)
        if engine is None:
            room = rows * (PROMPT + MOST_ROUNDS + 1)
            engine = Engine(self._target, policy=_PlainAfterPrefill(), max_batch_size=rows, max_cached_tokens=room)
            engine.frequencies = Frequencies(engine.stack.vocab_size)  # random tokens must not be counted
            self._engines[rows] = engine
        for token in tokens:
            engine.submit([0] * (PROMPT - 1) + [token], max_new_tokens=count + 2)
        engine.step()
        start, rounds = self._now(), list[Round]()
        while len(rounds) < count:
            rounds += engine.step()
        taken = self._now() - start
        for _ in engine.run():
            pass  # until the rows end
        forwards = [one.seconds.verify + one.seconds.head + one.seconds.pick for one in rounds]
        return max(0.0, taken - sum(forwards)) / len(rounds)
