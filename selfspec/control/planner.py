"""The drafter, exit layer, length and stop rule with the most expected tokens per second, or plain decoding.

    expected(drafter, exit layer) = max over stop rules of  rows * (1 + E[accepted tokens]) / E[seconds of the round]

`RoundCosts.rates` computes the fraction. Where the best value is below plain decoding, nothing is drafted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from selfspec.control.acceptance import Floats
from selfspec.control.ledger import Ledger
from selfspec.control.plan import LookupTable, ShadowPlan, SurvivalStop
from selfspec.control.round_costs import BY_LAYERS, MOST, Drafter, RoundCosts, each_of, one_more
from selfspec.core import Plan

RECORD_MARGIN = 0.05  # relative gain that a change of exit layer or draft length needs where rounds are recorded
# The prior of the best exit layer. In models trained with early exits it is near a quarter of the depth. The expected
# rate of a layer without observations is raised by EXIT_PRIOR there, by less at a distance in log depth; after
# EXIT_PRIOR_WEIGHT observations of the layer, half of it is left.
EXIT_PRIOR, EXIT_PRIOR_WIDTH, EXIT_PRIOR_WEIGHT = 0.3, 0.5, 24.0
MIN_LENGTH_SHARE = 0.75  # a stop rule must let drafts of average acceptance reach this share of the expected length
MIN_SEEN = 12.0  # observations of a layer from which on its copy may draft
UNKNOWN = 4  # maximum draft length of a layer with fewer observations; of other layers, the number of observations


class Evidence(NamedTuple):
    """Statistics of every layer; arrays are `[L - 1, bins]` or `[L - 1]`, exit layer e in row e - 1."""

    right: Floats  # acceptance rate by bin of confidence
    share: Floats  # share of the picks in each bin
    seen: Floats  # lasting observations
    agreement: Floats  # acceptance of copies relative to the layers


class Decision(NamedTuple):
    """How layers draft, or that none does."""

    usual: float = 0.0  # expected tokens per second of all rows
    speedup: float = 1.0  # the best draft's expected speedup over plain rounds, also where nothing is drafted
    exit_layer: int | None = None
    drafter: Drafter = BY_LAYERS
    length: float = 0.0  # expected drafted tokens per row
    rounds: Sequence[float] = (0.0,) * (MOST + 1)  # seconds of a round by drafted tokens per row
    stop: SurvivalStop | None = None
    most: int = MOST  # maximum draft length

    def plan(
        self,
        num_rows: int,
        num_rounds: int,
        most: int,
        lookups: LookupTable | None,
        shadow: ShadowPlan | None,
        ledger: Ledger,
    ) -> Plan:
        """The plan of `num_rounds` rounds by this decision; `most` limits the draft length of every row."""
        return Plan(
            self.exit_layer,
            (0 if self.exit_layer is None else min(most, self.most),) * num_rows,
            lookups=lookups,
            ledger=ledger,
            num_rounds=num_rounds,
            stop=self.stop,
            keep_confidence=self.exit_layer is not None,
            shadow=shadow,
            draft_vocab=self.drafter.draft_vocab,
            draft_bits=self.drafter.draft_bits,
            speedup=1.0 if self.exit_layer is None else self.speedup,
        )


def decide(
    now: Decision, costs: RoundCosts, drafters: Sequence[Drafter], layers: Sequence[int], evidence: Evidence
) -> Decision:
    """Choose drafter, exit layer and stop rule, or plain decoding.

    Args:
        now: the decision before, which others must exceed by a margin.
        drafters: drafters to choose from, the layers themselves first.
        layers: exit layers to choose from.
    """
    costs.drafters = drafters
    coverages = np.array([[drafter.coverage] for drafter in drafters]).repeat(len(evidence.right), 1)
    coverages[[drafter.by_copies for drafter in drafters]] *= evidence.agreement
    rates, drafted = costs.rates(evidence.right, evidence.share, coverages)  # [drafters, L - 1, stops], [L - 1, stops]
    expected = np.maximum.reduce(rates, 2)
    margin = 0.0 if costs.stops_early else RECORD_MARGIN
    at, exit_layer = _choose(now, margin, costs.num_rows, drafters, layers, expected, evidence)
    line, plain = exit_layer - 1, costs.num_rows / costs.plain_seconds
    best = float(expected[at, line])
    if best <= plain:
        return Decision(plain, best / plain)
    stop = int(rates[at, line].argmax())
    if not costs.stops_early and (now.exit_layer, now.drafter.key) == (exit_layer, drafters[at].key):
        before = now.most - 1
        if rates[at, line, stop] < (1 + margin) * rates[at, line, before]:
            stop = before
    rate, length = float(rates[at, line, stop]), float(drafted[line, stop])
    right = tuple((evidence.right[line] * coverages[at, line]).tolist())
    drafting = _drafting(exit_layer, drafters[at], rate, length, right, costs, evidence)
    return drafting._replace(usual=best, speedup=best / plain)


def _choose(
    now: Decision,
    margin: float,
    num_rows: int,
    drafters: Sequence[Drafter],
    layers: Sequence[int],
    expected: Floats,
    evidence: Evidence,
) -> tuple[int, int]:
    """The index of the drafter, and the exit layer."""
    weighted = expected * (1 + _exit_prior(evidence.seen) / num_rows)  # larger batches soon have observations
    weighted[:, [e - 1 for e in range(1, weighted.shape[1] + 1) if e not in layers]] = 0
    for line, drafter in zip(weighted, drafters, strict=True):
        if drafter.by_copies:  # whether a wrong token is the copy's fault shows only where the layer is known
            line[evidence.seen < MIN_SEEN] = 0
        if drafter.deepest is not None:
            line[drafter.deepest :] = 0
    at, line = divmod(int(weighted.argmax()), weighted.shape[1])
    present = [i for i, drafter in enumerate(drafters) if drafter.key == now.drafter.key]
    if margin and now.exit_layer is not None and present:
        before = present[0], now.exit_layer - 1
        if weighted[at, line] < (1 + margin) * weighted[before]:
            return present[0], now.exit_layer
    return at, line + 1


def _exit_prior(seen: Floats) -> Floats:
    """The relative bonus of every exit layer, `[L - 1]`."""
    num_layers = len(seen) + 1
    away = np.log(4 * np.arange(1, num_layers) / num_layers)
    return np.asarray(
        EXIT_PRIOR * np.exp(-(away**2) / EXIT_PRIOR_WIDTH) * EXIT_PRIOR_WEIGHT / (EXIT_PRIOR_WEIGHT + seen)
    )


def _drafting(
    exit_layer: int,
    drafter: Drafter,
    rate: float,
    length: float,
    right: tuple[float, ...],
    costs: RoundCosts,
    evidence: Evidence,
) -> Decision:
    """The decision for the chosen layer; `right` is its acceptance rate by bin, `rate` tokens per second.

    The stop rule lets drafting continue while the draft's survival exceeds what one more token costs, measured in
    tokens by the rate of the round. Where stopping early saves no time, there is no such rule.
    """
    line, rounds, rows = exit_layer - 1, costs.rounds(exit_layer, drafter), costs.num_rows
    decision = Decision(exit_layer=exit_layer, drafter=drafter, length=length, rounds=rounds, most=round(length))
    if not costs.stops_early:
        return decision
    acceptance = sum([chance * often for chance, often in zip(right, evidence.share[line].tolist(), strict=True)])
    value = rate / max(acceptance, 1e-6)  # of a second, in survival
    least, most = value * one_more(rounds, length, rows), MOST
    if least > acceptance ** (MIN_LENGTH_SHARE * length):  # costs have steps: use the average cost of a token
        least, most = min(least, value * each_of(rounds, length, rows)), max(1, math.ceil(length))
    return decision._replace(
        stop=SurvivalStop(right, least),
        most=min(most, max(UNKNOWN, int(evidence.seen[line] + 1e-6))),
    )


def could_pay(costs: RoundCosts, layers: Sequence[int], rate: float) -> tuple[int, ...]:
    """The exit layers with more than `rate` tokens per second at an acceptance rate of 1. Others are not probed."""
    limits = costs.limits()
    return tuple([layer for layer in layers if limits[layer - 1] > rate])
