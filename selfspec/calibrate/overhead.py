"""The overhead of an engine's rounds: everything outside of forwards, heads and picks."""

from __future__ import annotations

from collections import abc
from collections.abc import Callable

from selfspec.control.plan import Policy
from selfspec.core import UNBOUNDED_ROUNDS, Plan, Request, RoundOutput, SamplingParams, Sequence
from selfspec.decoding.defaults import GenerationDefaults
from selfspec.decoding.engine import LLMEngine
from selfspec.model.draft_vocabulary import Frequencies
from selfspec.model.split_model import SplitModel

# Plain rounds per measurement: at least ROUNDS, and as many as take SPAN seconds, up to MOST_ROUNDS. Starting a call
# takes as long as the overhead of dozens of rounds, so a measurement needs many of them. SPAN is less than a burst.
ROUNDS, MOST_ROUNDS, SPAN = 32, 128, 0.03
PROMPT = 2  # tokens


class _PlainAfterPrefill(Policy):
    """Plain decoding whose first program is one round, so that prefill is not timed."""

    def plan(self, rows: list[Sequence]) -> Plan:
        is_new = rows[0].num_tokens == PROMPT
        return Plan(None, (0,) * len(rows), num_rounds=1 if is_new else UNBOUNDED_ROUNDS)


class EngineOverhead:
    """Times plain rounds of an engine, many per call.

    Args:
        now: returns the time in seconds.
    """

    def __init__(self, split: SplitModel, now: Callable[[], float]) -> None:
        self._split, self._now = split, now
        self._engines: dict[int, LLMEngine] = {}  # by number of rows

    @property
    def fits(self) -> bool:
        """Whether the context limit allows enough rounds."""
        return self._split.context_limit > PROMPT + ROUNDS

    def seconds(self, tokens: abc.Sequence[int], forward: float = SPAN) -> float:
        """Seconds of overhead per round. Each token starts a row; `forward` is the approximate time of a round."""
        rows, longest = len(tokens), self._split.context_limit - PROMPT - 1
        count = min(MOST_ROUNDS, longest, max(ROUNDS, int(SPAN / max(forward, SPAN / MOST_ROUNDS))))
        engine = self._engines.get(rows)
        if engine is None:
            capacity = rows * (PROMPT + MOST_ROUNDS + 1)
            engine = LLMEngine(
                self._split,
                _PlainAfterPrefill(),
                GenerationDefaults(),
                max_num_seqs=rows,
                max_num_cached_tokens=capacity,
            )
            engine.frequencies = Frequencies(engine.split.vocab_size)  # random tokens must not be counted
            self._engines[rows] = engine
        for at, token in enumerate(tokens):
            params = SamplingParams(max_tokens=count + 2)
            engine.add_request(str(at), Request([0] * (PROMPT - 1) + [token], params))
        engine.step()
        start, rounds = self._now(), list[RoundOutput]()
        while len(rounds) < count:
            engine.step(rounds.append)
        taken = self._now() - start
        while engine.has_unfinished_requests():
            engine.step()
        forwards = [one.seconds.verify + one.seconds.head + one.seconds.pick for one in rounds]
        return max(0.0, taken - sum(forwards)) / len(rounds)
