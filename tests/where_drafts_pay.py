"""Costs of a machine on which drafts pay: a layer is slow, and early passes cost nearly nothing."""

from __future__ import annotations

from selfspec.control.costs import Costs, Table


def where_drafts_pay(num_layers: int = 4) -> Costs:
    nothing = Table.of({1: 0.0})
    late = {1: Table.of({1: 1.0, 9: 1.1}), 8: Table.of({1: 1.0, 9: 2.0})}
    early = {1: Table.of({1: 0.01, num_layers: 0.02})}
    plain = Table.of({1: float(num_layers)})
    return Costs(num_layers, plain, early, late, head=nothing, pick=nothing, rest=nothing, short=nothing)
