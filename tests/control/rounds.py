"""Rounds played by hand: rows, costs that are easy to reckon with, and what a policy is asked and told."""

from __future__ import annotations

from selfspec.control.cost_table import Table
from selfspec.control.costs import Costs
from selfspec.control.laps import Seconds
from selfspec.control.plan import NUM_MATCH_BINS, Plan
from selfspec.control.rows import RowState, Tally

ROOMY, NOTHING = 10_000, (0,) * NUM_MATCH_BINS


def costs(slow_batch=8):
    """Four layers of a second each, whatever the tokens, for one row; `slow_batch` rows take a second per token each.

    So one row's round with exit layer 1 and k drafted tokens takes (k + 1) + 3 seconds, a plain one 4.
    """
    nothing = Table.of({1: 0.0})
    early = Table.of({1: 1.0, 3: 3.0})
    late = {1: Table.of({1: 1.0, 9: 1.0}), slow_batch: Table.of({1: 1.0, 9: 9.0})}
    plain = Table.of({1: 4.0, 8: 4.0})
    return Costs(4, plain, {1: early}, late, head=nothing, pick=nothing, rest=nothing, short=nothing)


def row(request_id=0, room=ROOMY):
    return RowState(request_id, 10, room)


class Free:
    """Guesses of a row: its chain, and what else may come first."""

    def __init__(self, chain=(), first=(), match=None, is_stored=False, tallies=None, guessed=NOTHING):
        self.match, self.is_stored = len(chain) if match is None else match, is_stored
        self.guessed = guessed
        self._tallies = iter(tallies or ())  # what the row's index tells when it is asked, one after another
        self._chain, self._first = [*chain], [*first]

    @property
    def is_own(self):
        return not self.is_stored

    def take_tally(self):
        self.guessed = NOTHING
        return next(self._tallies, Tally(0, NOTHING, NOTHING))

    def chain(self, num_tokens):
        return self._chain[:num_tokens]

    def alternatives(self):
        return list(self._first)


def found(match, **others):
    """Guesses of a row of whose last `match` tokens a long text is found after an earlier place."""
    return Free(range(5, 99) if match else (), match=match, **others)


def ask(policy, *rows):
    return policy.plan(rows or [row()])


def tell(policy, *outcomes, plan=None):
    policy.observe(plan or Plan(1, (1,) * len(outcomes)), outcomes, Seconds())
