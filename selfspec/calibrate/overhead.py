"""What an engine spends around the forwards of its rounds: on asking, accepting, telling, and on calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from selfspec.control.costs import Costs
from selfspec.control.plan import UNBOUNDED_ROUNDS, Plan, Policy
from selfspec.control.rows import RowState
from selfspec.decoding.engine import Engine
from selfspec.decoding.results import Round
from selfspec.model.draft_vocabulary import Frequencies
from selfspec.model.stack import Stack

# Plain rounds, of rows of so many tokens: a call that begins takes as long as dozens of them spend around their
# forwards, so there are more of fast ones, as in the texts of fast models: up to so many in so many seconds, which is
# less than a burst. With a longer burst the call would begin before the clock is read.
ROUNDS, MOST_ROUNDS, SPAN = 32, 128, 0.03
PROMPT = 2


class _Plain:
    """What an engine needs of a target, as far as it decodes plainly."""

    tokenizer = prior = stored = default_exit_layer = default_num_draft_tokens = None
    eos_token_ids: frozenset[int] = frozenset()

    def __init__(self, stack: Stack) -> None:
        self.stack = self.exact_stack = stack

    def costs(self, batch_size: int = 1, exact: bool = False) -> Costs:
        raise NotImplementedError("plain decoding needs no costs")


class _Warmed(Policy):
    """Plain decoding whose first program is a single round: what reading a prompt takes is not timed."""

    def plan(self, rows: Sequence[RowState]) -> Plan:
        is_new = rows[0].content_length == PROMPT
        return Plan(None, (0,) * len(rows), num_rounds=1 if is_new else UNBOUNDED_ROUNDS)


class EngineOverhead:
    """Times plain rounds as engines decode them, many in one call.

    Args:
        now: the clock, in seconds.
    """

    def __init__(self, stack: Stack, now: Callable[[], float]) -> None:
        self._target, self._now = _Plain(stack), now
        self._engines: dict[int, Engine] = {}  # by rows; what they have made stays

    @property
    def fits(self) -> bool:
        """Whether rows may become long enough."""
        return self._target.stack.context_limit > PROMPT + ROUNDS

    def seconds(self, tokens: Sequence[int], forward: float = SPAN) -> float:
        """Around one round of as many rows as there are tokens, which they begin with, and of about so many seconds."""
        rows, longest = len(tokens), self._target.stack.context_limit - PROMPT - 1
        count = min(MOST_ROUNDS, longest, max(ROUNDS, int(SPAN / max(forward, SPAN / MOST_ROUNDS))))
        engine = self._engines.get(rows)
        if engine is None:
            room = rows * (PROMPT + MOST_ROUNDS + 1)
            engine = Engine(self._target, policy=_Warmed(), max_batch_size=rows, max_cached_tokens=room)
            engine.frequencies = Frequencies(engine.stack.vocab_size)  # these tokens are nobody's
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
