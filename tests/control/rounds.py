"""Rounds played by hand: rows, costs that are easy to reckon with, and what a policy is asked and told."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from selfspec.control.cost_table import Table
from selfspec.control.costs import Costs
from selfspec.control.plan import LOOKUP, NUM_LOOKUP_BINS, Plan
from selfspec.control.rows import RoundOutcome, RowOutcome, RowState, Shadow, StageSeconds, Tally

ROOMY, NOTHING = 10_000, (0,) * NUM_LOOKUP_BINS


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


class Found:
    """What lookup finds of a row."""

    def __init__(self, match=0, tallies=None):
        self.match = match
        self._tallies = iter(tallies or ())  # what the row's index tells when it is asked, one after another

    def take_tally(self):
        return next(self._tallies, Tally(0, NOTHING, NOTHING))


def ask(policy, *rows):
    return policy.plan(rows or [row()])


def tell(policy, *outcomes, plan=None, seconds=None):
    plan = plan or Plan(1, (1,) * len(outcomes))
    policy.observe(plan, [RoundOutcome(plan.exit_layer, outcomes, seconds or StageSeconds())])


class Played(NamedTuple):
    """A round that was played."""

    plan: Plan
    exit_layer: int | None  # what drafted
    num_drafted: int
    is_first: bool  # of its program


def play(policy, costs, num_rounds, right=lambda plan, n: n, slower=lambda plan: 1.0, lookup=None, most=100):
    """Rounds of one row, program by program, in which `right` of the drafted tokens are right.

    Args:
        slower: by how much longer drafts take than the costs say.
        lookup: what is found of the row.
        most: tokens that are drafted at most.
    """
    done, length, room = [], 50, 90_000
    while len(done) < num_rounds:
        plan = policy.plan([RowState(0, length, room - length, lookup)])
        rounds = []
        while len(rounds) < plan.num_rounds and len(done) < num_rounds:
            table = plan.table if lookup is not None else None
            found = table.drafted([lookup.match], [room - length - 1]) if table is not None else None
            exit_layer = LOOKUP if found else plan.exit_layer or None
            n = min(most, (found or plan.draft_lengths)[0]) if exit_layer is not None else 0
            kept, layers, shadow = right(plan, n) if n else 0, (), None
            if plan.shadow is not None and not found:
                layers = plan.shadow.layers
                hits = np.ones((len(layers), kept + 1), bool)
                shadow = Shadow(layers, hits, np.full(hits.shape, 0.9, np.float32))
            took = costs.stages(exit_layer, [n], copies=plan.draft_bits is not None and not found)
            took = {stage: taken * (slower(plan) if exit_layer else 1.0) for stage, taken in took.items()}
            outcome = RowOutcome(0, n, kept, (0.9,) * n if exit_layer else (), shadow=shadow)
            if found:
                outcome = outcome._replace(match=lookup.match)
            rounds.append(RoundOutcome(exit_layer, [outcome], StageSeconds(**took, shadow=1e-4 if layers else 0.0)))
            done.append(Played(plan, exit_layer, n, len(rounds) == 1))
            length += kept + 1
            if layers:
                break
        policy.observe(plan, rounds)
    return done
