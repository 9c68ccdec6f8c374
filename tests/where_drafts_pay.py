"""Costs of a machine on which drafts pay: a layer is slow, and early passes cost nearly nothing."""

from __future__ import annotations

from selfspec.control.costs import Costs, Table


def where_drafts_pay(num_layers: int = 4) -> Costs:
    nothing = Table.of({1: 0.0})
    rounds = {rows: Table.of({1: num_layers, 9: num_layers * most}) for rows, most in ((1, 1.1), (8, 2.0))}
    steps = {1: Table.of({1: 0.01, num_layers: 0.02})}
    return Costs(num_layers, rounds, steps, head=nothing, context=nothing, shadow_picks=nothing)
