"""The drafter, exit layer, length and stop rule with the most expected tokens per second, or plain decoding.

    expected(drafter, exit layer) = max over stop rules of  rows * (1 + E[accepted tokens]) / E[seconds of the round]

`Candidates.rates` computes the fraction. Where the best value is below plain decoding, nothing is drafted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import copy
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from selfspec.control.acceptance import Floats
from selfspec.control.costs import Costs
from selfspec.control.drafters import BY_LAYERS, MOST, Drafter, recorded_lengths
from selfspec.control.ledger import Ledger
from selfspec.control.plan import LookupTable, ShadowPlan, SurvivalStop
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
FINALISTS = 8  # candidates of which all stop rules are compared
_LENGTHS = np.arange(1.0, MOST + 1)


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
    several rows, and of recorded rounds, which take no less time where a draft stops early: all drafts have the same
    length. A candidate is a drafter and an exit layer; arrays `[C, ..]` have a line for each.

    Args:
        layers: exit layers to choose from.
        most: maximum draft length.
        ledger: a round may lose at most a stake where nothing is accepted, else it is not chosen; None: any may be.
            The stake is the share of the ledger's largest balance by which it grows fastest in the long run (Kelly,
            1956): the expected gain over the largest one. So a few rejected drafts do not end those that pay in the
            mean.
    """

    def __init__(
        self,
        costs: Costs,
        times: Times,
        layers: Sequence[int],
        drafters: Sequence[Drafter] = (BY_LAYERS,),
        most: int = MOST,
        ledger: Ledger | None = None,
    ) -> None:
        self.num_rows, self.plain_seconds, self._ledger = times.num_rows, times.plain_seconds, ledger
        recorded = costs.recorded_length(self.num_rows)
        self.stops_early = recorded is None
        """Whether a draft that stops early takes less time."""
        self._is_allowed = most >= _LENGTHS if recorded is None else np.isin(_LENGTHS, recorded_lengths(recorded, most))
        own = [[layer for layer in layers if one.deepest is None or layer <= one.deepest] for one in drafters]
        self.pairs = [(one, layer) for one, of_one in zip(drafters, own, strict=True) for layer in of_one]
        seconds = [times.drafts(one)[np.array(of_one) - 1] for one, of_one in zip(drafters, own, strict=True) if of_one]
        self._set(np.concatenate(seconds))

    def _set(self, seconds: Floats) -> None:
        self.seconds = seconds
        """`[C, MOST + 1]`: seconds of rounds in which every row verifies 0, 1, .., `MOST` drafts."""
        self.lines = np.array([layer - 1 for _, layer in self.pairs])
        """Their places in arrays over all exit layers."""
        self._added = np.maximum(seconds[:, 1:] - seconds[:, :-1], 0.0)
        self.keep: Floats = self._added[:, 0] / self.plain_seconds * (self.num_rows == 1 and self.stops_early)
        """`[C]`: drafted tokens with a lower acceptance rate are withdrawn; 0: all are verified."""
        self._prices = seconds[:, 1:] / self.plain_seconds - 1  # in tokens
        self._largest_gains = np.maximum(_LENGTHS - self._prices, 1e-9)

    def some(self, places: NDArray[np.int64]) -> Candidates:
        """The candidates in these places."""
        chosen = copy(self)
        chosen.pairs = [self.pairs[at] for at in places]
        chosen._set(self.seconds[places])
        return chosen

    def rates(self, right: Floats, share: Floats, has_stops: bool) -> tuple[Floats, Floats, Floats]:
        """Tokens per second of all rows, drafted tokens per row, and tokens that a row gains by a round.

        `[C, stops, MOST]` each, by maximum draft length in the last dimension. A stop is a bin of confidence; without
        stops there is one, at which all drafts have the maximum length.

        Args:
            right: `[C, bins]`, acceptance rate by bin of confidence.
            share: `[C, bins]`, share of the picks in each bin.
        """
        is_kept = right >= self.keep[:, None]
        # P(confidence above the bound), P(above and accepted) of tokens that are verified: [2, C, bins]
        above = np.add.accumulate(np.array((share * is_kept, share * right * is_kept))[..., ::-1], 2)[..., ::-1]
        verified, accepted = above[..., :1]
        if not has_stops:
            above = np.array((np.ones_like(accepted), accepted))
        # P(a draft has a further token), P(all before it are accepted), in the last dimension its place.
        reach = np.empty((*above.shape, MOST))
        reach[..., :1], reach[..., 1:] = 1.0, above[..., None]
        reach = np.multiply.accumulate(reach, 3)
        drafted, kept = np.add.accumulate(reach, 3)
        added = self._added - self._added[:, :1] * (1 - verified)
        rounds = self.seconds[:, None, :1] + np.add.accumulate(reach[0] * added[:, None], 2)
        tokens = 1 + accepted[..., None] * kept
        gains = tokens - rounds / self.plain_seconds
        return self.num_rows * tokens / rounds, drafted, gains

    def is_covered(self, gains: Floats) -> NDArray[np.bool_]:
        """Whether rounds that gain so many tokens, `[C, stops, MOST]`, are within their stakes."""
        if self._ledger is None:
            return np.broadcast_to(self._is_allowed, gains.shape)
        most, least = self._ledger.most / self.plain_seconds, self._ledger.least_stake / self.plain_seconds
        needed = np.where(self._prices > least, self._prices * self._largest_gains / most, -math.inf)
        return (gains >= needed[:, None]) & (self._is_allowed & (self._prices <= max(most, least)))[:, None]

    def stake(self, gain: float, at: int, length: int) -> float:
        """Seconds that a round may lose that gains `gain` tokens per row and has this maximum length."""
        if self._ledger is None:
            return math.inf
        share = min(1.0, max(0.0, gain) / float(self._largest_gains[at, length - 1]))
        return max(share * self._ledger.most, self._ledger.least_stake)

    def limits(self) -> Floats:
        """Upper bounds of the tokens per second of all rows, `[C]`: with an acceptance rate of 1."""
        limits = self._is_allowed * (1 + _LENGTHS) / self.seconds[:, 1:]
        return np.asarray(self.num_rows * np.maximum.reduce(limits, 1))

    def could_pay(self, rate: float) -> tuple[int, ...]:
        """The layers with more than `rate` tokens per second at an acceptance rate of 1. Others are not probed."""
        return tuple(sorted({int(line) + 1 for line in self.lines[self.limits() > rate]}))


def decide(now: Decision, candidates: Candidates, evidence: Evidence) -> Decision:
    """Choose drafter, exit layer and stop rule, or plain decoding.

    Args:
        now: the decision before, which others must exceed by a margin where rounds are recorded.
    """
    lines, rows = candidates.lines, candidates.num_rows
    by_copies = np.array([drafter.by_copies for drafter, _ in candidates.pairs])
    coverages = np.array([drafter.coverage for drafter, _ in candidates.pairs])
    coverages *= np.where(by_copies, evidence.agreement[lines], 1.0)
    right, share, seen = evidence.right[lines] * coverages[:, None], evidence.share[lines], evidence.seen[lines]
    weights = 1 + _exit_prior(lines + 1, len(evidence.seen) + 1, seen) / rows  # larger batches soon have observations
    weights *= ~(by_copies & (seen < MIN_SEEN))  # else a wrong token may be the copy's fault or the layer's
    has_stops = rows == 1 and candidates.stops_early
    if has_stops and len(lines) > FINALISTS:
        rates, _, gains = candidates.rates(right, share, False)
        rates *= candidates.is_covered(np.full_like(gains, math.inf))
        places = np.sort(np.argsort(weights * np.maximum.reduce(rates, (1, 2)))[-FINALISTS:])
        candidates = candidates.some(places)
        right, share, seen, weights = (one[places] for one in (right, share, seen, weights))
    rates, drafted, gains = candidates.rates(right, share, has_stops)
    rates *= candidates.is_covered(gains)
    expected = np.maximum.reduce(rates, (1, 2))
    margin = 0.0 if candidates.stops_early else RECORD_MARGIN
    plain = rows / candidates.plain_seconds
    at = _choose(now, margin, candidates, weights * expected, expected > plain)
    best = float(expected[at])
    if best <= plain:
        return Decision(plain, best / plain)
    stop, place = divmod(int(rates[at].argmax()), MOST)
    if (
        margin
        and _is_from(now, candidates.pairs[at])
        and rates[at, stop, place] < (1 + margin) * rates[at, stop, now.most - 1]
    ):
        place = now.most - 1
    chosen = at, stop, place
    rate, length = float(rates[chosen]), float(drafted[chosen])
    drafting = _drafting(candidates, at, rate, length, right[at].tolist(), share[at].tolist(), float(seen[at]))
    stake = candidates.stake(float(gains[chosen]), at, place + 1)
    return drafting._replace(usual=best, speedup=best / plain, stake=stake)


def _is_from(now: Decision, pair: tuple[Drafter, int]) -> bool:
    """Whether a decision is for this drafter and exit layer."""
    return (now.drafter.key, now.exit_layer) == (pair[0].key, pair[1])


def _choose(
    now: Decision, margin: float, candidates: Candidates, weighted: Floats, is_faster: NDArray[np.bool_]
) -> int:
    """The place of the candidate with the most tokens per second times its weight."""
    faster = weighted * is_faster  # the weight of a slower one does not stand against these
    at = int((faster if faster.any() else weighted).argmax())
    before = [place for place, pair in enumerate(candidates.pairs) if margin and _is_from(now, pair)]
    return before[0] if before and weighted[at] < (1 + margin) * weighted[before[0]] else at


def _exit_prior(layers: NDArray[np.int64], num_layers: int, seen: Floats) -> Floats:
    """The relative bonus of exit layers, `[C]`."""
    away = np.log(4 * layers / num_layers)
    bonus = EXIT_PRIOR * np.exp(-(away**2) / EXIT_PRIOR_WIDTH)
    return np.asarray(bonus * EXIT_PRIOR_WEIGHT / (EXIT_PRIOR_WEIGHT + seen))


def _drafting(
    candidates: Candidates,
    at: int,
    rate: float,
    length: float,
    right: Sequence[float],
    share: Sequence[float],
    seen: float,
) -> Decision:
    """The decision for the candidate in this place.

    `right` is its acceptance rate by bin, `share` that of the picks, `rate` its tokens per second.

    The stop rule lets drafting continue while the draft's survival exceeds what one more token costs, measured in
    tokens by the rate of the round. Where stopping early saves no time, there is no such rule.
    """
    rows, (drafter, exit_layer), rounds = candidates.num_rows, candidates.pairs[at], candidates.seconds[at].tolist()
    decision = Decision(exit_layer=exit_layer, drafter=drafter, length=length, rounds=rounds, most=round(length))
    if not candidates.stops_early:
        return decision
    acceptance = sum([chance * often for chance, often in zip(right, share, strict=True)])
    value = rate / max(acceptance, 1e-6)  # of a second, in survival
    least, most = value * _one_more(rounds, length, rows), MOST
    if least > acceptance ** (MIN_LENGTH_SHARE * length):  # costs have steps: use the average cost of a token
        each = _each_of(rounds, length, rows, candidates.plain_seconds)
        least, most = min(least, value * each), max(1, math.ceil(length))
    stop = SurvivalStop(tuple(right), least, float(candidates.keep[at]))
    return decision._replace(stop=stop, most=min(most, max(UNKNOWN, int(seen + 1e-6))))


def _one_more(rounds: Sequence[float], drafted: float, num_rows: int) -> float:
    """Seconds per row that one more drafted token per row adds to a round with about `drafted` per row."""
    at = min(int(drafted), MOST - 2)
    return (rounds[at + 2] - rounds[at]) / 2 / num_rows


def _each_of(rounds: Sequence[float], drafted: float, num_rows: int, plain: float) -> float:
    """Average seconds per row and drafted token of such a round."""
    count = min(MOST, max(1, math.ceil(drafted)))
    return (rounds[count] - plain) / count / num_rows
