"""The drafter, exit layer, length and stop rule with the most expected tokens per second, or plain decoding.

    expected(drafter, exit layer) = max over stop rules of  rows * (1 + E[accepted tokens]) / E[seconds of the round]

`Candidates.rates` computes the fraction. Where the best value is below plain decoding, nothing is drafted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from selfspec.control.acceptance import Floats
from selfspec.control.costs import Costs
from selfspec.control.drafters import BY_LAYERS, MOST, MOST_FOUND, Drafter, recorded_lengths
from selfspec.control.ledger import Ledger
from selfspec.control.plan import NUM_BINS, LookupTable, ShadowPlan, SurvivalStop
from selfspec.control.times import Times
from selfspec.core import Plan

RECORD_MARGIN = 0.05  # relative gain that a change of exit layer or draft length needs where rounds are recorded
# The prior of the best exit layer. In models trained with early exits it is near a quarter of the depth. The expected
# rate of a layer without observations is raised by EXIT_PRIOR there, by less at a distance in log depth; after
# EXIT_PRIOR_WEIGHT observations of the layer, half of it is left.
EXIT_PRIOR, EXIT_PRIOR_WIDTH, EXIT_PRIOR_WEIGHT = 0.3, 0.5, 24.0
MIN_LENGTH_SHARE = 0.75  # a stop rule must let drafts of average acceptance reach this share of the expected length
MIN_SEEN = 12.0  # observations of a layer from which on its copy may draft
UNKNOWN = 4  # maximum draft length of a layer with fewer observations; of other layers, the number of observations
CAPS = (1, 2, 3, 4, 6, 9, 13, MOST)  # maximum lengths among the stop rules of a single row
_LENGTHS, _CAPS = np.arange(1.0, MOST + 1), np.array(CAPS, np.float64)


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
    stake: float = 0.0  # seconds that a round may lose

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


class Candidates:
    """The rounds that layers may draft, and their expected tokens per second.

    Model of a single row's draft: it continues while confidences are above a bound, up to a maximum length, and ends
    after the first token below, which is verified where that is worth its time; confidences are independent. Model of
    several rows, and of recorded rounds, which take
    no less time where a draft stops early: all drafts have the same length.

    Args:
        most: maximum draft length in recorded rounds.
        ledger: rounds that lose more than a stake where nothing is accepted are not chosen; None: all may be.

    Attributes:
        stakes: of the last `rates`, the same shape: what a round may lose, in seconds. It is the share of the ledger's
            largest balance by which it grows fastest in the long run (Kelly, 1956): the expected gain over the largest
            one. So a few rejected drafts do not end those that pay in the mean.
    """

    def __init__(
        self,
        costs: Costs,
        times: Times,
        drafters: Sequence[Drafter] = (BY_LAYERS,),
        most: int = MOST,
        ledger: Ledger | None = None,
    ) -> None:
        self.num_rows, self.plain_seconds, self.drafters = times.num_rows, times.plain_seconds, drafters
        recorded = costs.recorded_length(self.num_rows)
        self.stops_early = recorded is None
        """Whether a draft that stops early takes less time."""
        self.longest = MOST_FOUND if recorded is None else recorded
        """Maximum draft length."""
        self._is_allowed = self.longest >= _LENGTHS
        if not self.stops_early:
            self._is_allowed &= np.isin(_LENGTHS, recorded_lengths(self.longest, most))
        self.stakes: Floats = np.empty(0)
        self._ledger = ledger
        self.seconds = np.array([times.drafts(drafter) for drafter in drafters])
        """`[drafters, L - 1, MOST + 1]`: seconds of rounds in which every row verifies 0, 1, .., `MOST` drafts."""
        self._verified = np.maximum(self.seconds[:, :, 1] - self.seconds[:, :, 0], 0.0)
        withdraws = self.num_rows == 1 and self.stops_early
        self.keep: Floats = self._verified / self.plain_seconds * withdraws
        """`[drafters, L - 1]`: drafted tokens with a lower acceptance rate are withdrawn; 0: all are verified."""

    def rates(self, right: Floats, share: Floats, coverages: Floats) -> tuple[Floats, Floats]:
        """Tokens per second of all rows and drafted tokens per row, `[drafters, L - 1, stops]`.

        For one row a stop is a confidence bin with a maximum length in `CAPS`; else (see the class) it is a length.

        Args:
            right: `[L - 1, bins]`, acceptance rate by bin of confidence.
            share: `[L - 1, bins]`, share of the picks in each bin.
            coverages: `[drafters, L - 1]`, factors on `right`.
        """
        seconds, drafted_right = self.seconds, right * share * coverages[:, :, None]
        if self.num_rows > 1 or not self.stops_early:
            acceptance = np.add.reduce(drafted_right, 2, keepdims=True)
            kept = 1 + np.add.accumulate(acceptance**_LENGTHS, 2)
            rounds = seconds[:, :, 1:]
            rates = self._affordable(kept * self._is_allowed, rounds, rounds, 1 + _LENGTHS)
            return rates, np.tile(_LENGTHS, (*rates.shape[:2], 1))
        # P(confidence above the bound), P(above and accepted) of tokens that are verified: [2, drafters, L - 1, bins]
        is_kept = right * coverages[:, :, None] >= self.keep[:, :, None]
        likely = np.stack((share * is_kept, drafted_right * is_kept))
        above = np.minimum(np.add.accumulate(likely[..., ::-1], 3)[..., ::-1], 1 - 1e-6)
        # Expected tokens of a draft up to its stop, and expected accepted ones.
        drafted, kept = ((1 - above[..., None] ** _CAPS) / (1 - above[..., None])).reshape(*above.shape[:3], -1)
        low = drafted.astype(np.int64)  # below `MOST`
        below, beyond = (np.take_along_axis(seconds, at, 2) for at in (low, low + 1))
        withdrawn = 1 - np.minimum(likely[0].sum(2), 1)
        rounds = below + (drafted - low) * (beyond - below) - (self._verified * withdrawn)[:, :, None] * drafted
        most = np.tile(CAPS, NUM_BINS)  # a draft may go on to its maximum
        return self._affordable(1 + above[1, ..., :1] * kept, rounds, seconds[:, :, most], 1 + most), drafted

    def _affordable(self, kept: Floats, rounds: Floats, longest: Floats, most: Floats) -> Floats:
        """Tokens per second, 0 where a stake is exceeded.

        Args:
            kept: expected tokens of a row.
            rounds: expected seconds.
            longest: seconds of rounds with the longest drafts.
            most: tokens of a row if all of these are accepted.
        """
        rates = self.num_rows * kept / rounds
        if self._ledger is None:
            self.stakes = np.full(rates.shape, math.inf)
            return rates
        prices = longest / self.plain_seconds - 1
        gains = kept - rounds / self.plain_seconds
        shares = np.minimum(np.maximum(gains, 0) / np.maximum(most - 1 - prices, 1e-9), 1)
        self.stakes = np.maximum(shares * self._ledger.most, self._ledger.least_stake)
        is_covered = self.plain_seconds * prices <= self.stakes
        return np.where(is_covered, rates, 0.0)

    def limits(self) -> Floats:
        """Upper bounds of the tokens per second of all rows, `[L - 1]`: with an acceptance rate of 1."""
        best = np.maximum.reduce(self._is_allowed * (1 + _LENGTHS) / self.seconds[:, :, 1:], 2)
        for line, drafter in zip(best, self.drafters, strict=True):
            if drafter.deepest is not None:
                line[drafter.deepest :] = 0
        return np.asarray(self.num_rows * best.max(0))

    def could_pay(self, layers: Sequence[int], rate: float) -> tuple[int, ...]:
        """The layers with more than `rate` tokens per second at an acceptance rate of 1. Others are not probed."""
        limits = self.limits()
        return tuple([layer for layer in layers if limits[layer - 1] > rate])


def decide(now: Decision, candidates: Candidates, layers: Sequence[int], evidence: Evidence) -> Decision:
    """Choose drafter, exit layer and stop rule, or plain decoding.

    Args:
        now: the decision before, which others must exceed by a margin where rounds are recorded.
        layers: exit layers to choose from.
    """
    drafters = candidates.drafters
    coverages = np.array([[drafter.coverage] for drafter in drafters]).repeat(len(evidence.right), 1)
    coverages[[drafter.by_copies for drafter in drafters]] *= evidence.agreement
    rates, drafted = candidates.rates(evidence.right, evidence.share, coverages)
    expected = np.maximum.reduce(rates, 2)
    margin = 0.0 if candidates.stops_early else RECORD_MARGIN
    plain = candidates.num_rows / candidates.plain_seconds
    at, exit_layer = _choose(now, margin, candidates.num_rows, drafters, layers, expected, plain, evidence)
    line = exit_layer - 1
    best = float(expected[at, line])
    if best <= plain:
        return Decision(plain, best / plain)
    stop = int(rates[at, line].argmax())
    if not candidates.stops_early and (now.exit_layer, now.drafter.key) == (exit_layer, drafters[at].key):
        before = now.most - 1
        if rates[at, line, stop] < (1 + margin) * rates[at, line, before]:
            stop = before
    rate, length = float(rates[at, line, stop]), float(drafted[at, line, stop])
    right = tuple((evidence.right[line] * coverages[at, line]).tolist())
    drafting = _drafting(exit_layer, at, rate, length, right, candidates, evidence)
    return drafting._replace(usual=best, speedup=best / plain, stake=float(candidates.stakes[at, line, stop]))


def _choose(
    now: Decision,
    margin: float,
    num_rows: int,
    drafters: Sequence[Drafter],
    layers: Sequence[int],
    expected: Floats,
    plain: float,
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
    faster = weighted * (expected > plain)  # the prior of a slower layer does not stand against these
    at, line = divmod(int((faster if faster.any() else weighted).argmax()), weighted.shape[1])
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
    at: int,
    rate: float,
    length: float,
    right: tuple[float, ...],
    candidates: Candidates,
    evidence: Evidence,
) -> Decision:
    """The decision for the chosen layer and the drafter `at`.

    `right` is its acceptance rate by bin, `rate` its tokens per second.

    The stop rule lets drafting continue while the draft's survival exceeds what one more token costs, measured in
    tokens by the rate of the round. Where stopping early saves no time, there is no such rule.
    """
    line, rows = exit_layer - 1, candidates.num_rows
    drafter, rounds = candidates.drafters[at], candidates.seconds[at, line].tolist()
    decision = Decision(exit_layer=exit_layer, drafter=drafter, length=length, rounds=rounds, most=round(length))
    if not candidates.stops_early:
        return decision
    acceptance = sum([chance * often for chance, often in zip(right, evidence.share[line].tolist(), strict=True)])
    value = rate / max(acceptance, 1e-6)  # of a second, in survival
    least, most = value * _one_more(rounds, length, rows), MOST
    if least > acceptance ** (MIN_LENGTH_SHARE * length):  # costs have steps: use the average cost of a token
        each = _each_of(rounds, length, rows, candidates.plain_seconds)
        least, most = min(least, value * each), max(1, math.ceil(length))
    return decision._replace(
        stop=SurvivalStop(right, least, float(candidates.keep[at, line])),
        most=min(most, max(UNKNOWN, int(evidence.seen[line] + 1e-6))),
    )


def _one_more(rounds: Sequence[float], drafted: float, num_rows: int) -> float:
    """Seconds per row that one more drafted token per row adds to a round with about `drafted` per row."""
    at = min(int(drafted), MOST - 2)
    return (rounds[at + 2] - rounds[at]) / 2 / num_rows


def _each_of(rounds: Sequence[float], drafted: float, num_rows: int, plain: float) -> float:
    """Average seconds per row and drafted token of such a round."""
    count = min(MOST, max(1, math.ceil(drafted)))
    return (rounds[count] - plain) / count / num_rows
