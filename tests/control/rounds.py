"""Rounds played by hand: rows, costs that are easy to reckon with, and what a policy is asked and told."""

from __future__ import annotations

from selfspec.control.costs import Costs, Table
from selfspec.control.plan import Plan, RowState, Seconds

ROOMY = 10_000


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


def ask(policy, *rows):
    return policy.plan(rows or [row()])


def tell(policy, *outcomes, plan=None):
    policy.observe(plan or Plan(1, (1,) * len(outcomes)), outcomes, Seconds())
