"""The drafter, exit layer, length and stop rule with the most expected tokens per second, or plain decoding.

    expected(drafter, exit layer) = max over stop rules of  rows * (1 + E[accepted tokens]) / E[seconds of the round]

`Candidates.rates` computes the fraction. Where the best value is below plain decoding, nothing is drafted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
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
    length. Arrays `[drafters, E, ..]` have a line for each of `layers`.

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
        self.num_rows, self.plain_seconds = times.num_rows, times.plain_seconds
        self.layers, self.drafters = layers, drafters
        self.lines = np.array(layers, np.int64) - 1
        """Those of `layers` in arrays over all exit layers."""
        recorded = costs.recorded_length(self.num_rows)
        self.stops_early = recorded is None
        """Whether a draft that stops early takes less time."""
        is_allowed = most >= _LENGTHS if recorded is None else np.isin(_LENGTHS, recorded_lengths(recorded, most))
        deepest = [costs.num_layers if one.deepest is None else one.deepest for one in drafters]
        self._is_allowed = (self.lines < np.array(deepest)[:, None])[:, :, None] & is_allowed
        self.seconds = np.array([times.drafts(drafter)[self.lines] for drafter in drafters])
        """`[drafters, E, MOST + 1]`: seconds of rounds in which every row verifies 0, 1, .., `MOST` drafts."""
        self._added = np.maximum(self.seconds[:, :, 1:] - self.seconds[:, :, :-1], 0.0)
        self._withdraws = self.num_rows == 1 and self.stops_early
        self.keep: Floats = self._added[:, :, 0] / self.plain_seconds * self._withdraws
        """`[drafters, E]`: drafted tokens with a lower acceptance rate are withdrawn; 0: all are verified."""
        self._ledger, self._prices = ledger, self.seconds[:, :, 1:] / self.plain_seconds - 1  # in tokens

    def rates(self, right: Floats, share: Floats, coverages: Floats) -> tuple[Floats, Floats, Floats]:
        """Tokens per second of all rows, drafted tokens per row, and tokens that a row gains by a round.

        `[drafters, E, stops, MOST]` each, by maximum draft length in the last dimension. For one row a stop is a bin
        of confidence, else (see the class) there is one.

        Args:
            right: `[E, bins]`, acceptance rate by bin of confidence.
            share: `[E, bins]`, share of the picks in each bin.
            coverages: `[drafters, E]`, factors on `right`.
        """
        right = right * coverages[:, :, None]
        is_kept = right >= self.keep[:, :, None]
        # P(confidence above the bound), P(above and accepted) of tokens that are verified: [2, drafters, E, bins]
        above = np.add.accumulate(np.stack((share * is_kept, share * right * is_kept))[..., ::-1], 3)[..., ::-1]
        verified, accepted = above[..., :1]
        if not self._withdraws:
            above = np.stack((np.ones_like(accepted), accepted))
        # P(a draft has a further token), P(all before it are accepted), in the last dimension its place.
        reach = np.empty((*above.shape, MOST))
        reach[..., :1], reach[..., 1:] = 1.0, above[..., None]
        reach = np.multiply.accumulate(reach, 4)
        drafted, kept = np.add.accumulate(reach, 4)
        added = self._added - self._added[:, :, :1] * (1 - verified)
        rounds = self.seconds[:, :, None, :1] + np.add.accumulate(reach[0] * added[:, :, None], 3)
        tokens = 1 + accepted[..., None] * kept
        gains = tokens - rounds / self.plain_seconds
        is_allowed = self._is_allowed[:, :, None]
        if self._ledger is not None:
            is_allowed = is_allowed & (gains >= self._least_gains(self._ledger)[:, :, None])
        return np.where(is_allowed, self.num_rows * tokens / rounds, 0.0), drafted, gains

    def _least_gains(self, ledger: Ledger) -> Floats:
        """`[drafters, E, MOST]`: the tokens that a round of this maximum length must gain to be within its stake."""
        most, least = ledger.most / self.plain_seconds, ledger.least_stake / self.plain_seconds
        gains = np.where(self._prices > least, self._prices * self._largest_gains() / most, -math.inf)
        return np.where(self._prices > most, math.inf, gains)

    def _largest_gains(self) -> Floats:
        return np.maximum(_LENGTHS - self._prices, 1e-9)

    def stake(self, gain: float, at: int, line: int, length: int) -> float:
        """Seconds that a round may lose that gains `gain` tokens per row and has this maximum length."""
        if self._ledger is None:
            return math.inf
        share = min(1.0, max(0.0, gain) / float(self._largest_gains()[at, line, length - 1]))
        return max(share * self._ledger.most, self._ledger.least_stake)

    def could_pay(self, rate: float) -> tuple[int, ...]:
        """The layers with more than `rate` tokens per second at an acceptance rate of 1. Others are not probed."""
        limits = self.limits() > rate
        return tuple([layer for layer, could in zip(self.layers, limits.tolist(), strict=True) if could])

    def limits(self) -> Floats:
        """Upper bounds of the tokens per second of all rows, `[E]`: with an acceptance rate of 1."""
        limits = self._is_allowed * (1 + _LENGTHS) / self.seconds[:, :, 1:]
        return np.asarray(self.num_rows * np.maximum.reduce(limits, (0, 2)))


def decide(now: Decision, candidates: Candidates, evidence: Evidence) -> Decision:
    """Choose drafter, exit layer and stop rule, or plain decoding.

    Args:
        now: the decision before, which others must exceed by a margin where rounds are recorded.
    """
    prior = _exit_prior(evidence.seen)
    prior, *of_layers = [statistics[candidates.lines] for statistics in (prior, *evidence)]
    evidence = Evidence(*of_layers)
    by_copies = [[one.by_copies] for one in candidates.drafters]
    coverages = np.array([[one.coverage] for one in candidates.drafters]) * np.where(by_copies, evidence.agreement, 1.0)
    rates, drafted, gains = candidates.rates(evidence.right, evidence.share, coverages)
    expected = np.maximum.reduce(rates, (2, 3))
    margin = 0.0 if candidates.stops_early else RECORD_MARGIN
    plain = candidates.num_rows / candidates.plain_seconds
    weighted = expected * (1 + prior / candidates.num_rows)  # larger batches soon have observations
    weighted *= ~(by_copies & (evidence.seen < MIN_SEEN))  # else a wrong token may be the copy's fault or the layer's
    at, line = _choose(now, margin, candidates, weighted, expected > plain)
    best = float(expected[at, line])
    if best <= plain:
        return Decision(plain, best / plain)
    stop, place = divmod(int(rates[at, line].argmax()), MOST)
    if not candidates.stops_early and _is_from(now, candidates, at, line):
        before = now.most - 1
        if rates[at, line, stop, place] < (1 + margin) * rates[at, line, stop, before]:
            place = before
    chosen = at, line, stop, place
    right = tuple((evidence.right[line] * coverages[at, line]).tolist())
    drafting = _drafting(at, line, float(rates[chosen]), float(drafted[chosen]), right, candidates, evidence)
    stake = candidates.stake(float(gains[chosen]), at, line, place + 1)
    return drafting._replace(usual=best, speedup=best / plain, stake=stake)


def _is_from(now: Decision, candidates: Candidates, at: int, line: int) -> bool:
    """Whether a decision is for this exit layer and drafter."""
    return (now.exit_layer, now.drafter.key) == (candidates.layers[line], candidates.drafters[at].key)


def _choose(
    now: Decision, margin: float, candidates: Candidates, weighted: Floats, is_faster: NDArray[np.bool_]
) -> tuple[int, int]:
    """The places of the drafter and of the exit layer, by tokens per second times the bonus of the prior."""
    faster = weighted * is_faster  # the prior of a slower layer does not stand against these
    at, line = divmod(int((faster if faster.any() else weighted).argmax()), weighted.shape[1])
    if margin:
        places = [place for place in np.ndindex(weighted.shape) if _is_from(now, candidates, *place)]
        if places and weighted[at, line] < (1 + margin) * weighted[places[0]]:
            return places[0]
    return at, line


def _exit_prior(seen: Floats) -> Floats:
    """The relative bonus of every exit layer, `[L - 1]`."""
    num_layers = len(seen) + 1
    away = np.log(4 * np.arange(1, num_layers) / num_layers)
    return np.asarray(
        EXIT_PRIOR * np.exp(-(away**2) / EXIT_PRIOR_WIDTH) * EXIT_PRIOR_WEIGHT / (EXIT_PRIOR_WEIGHT + seen)
    )


def _drafting(
    at: int,
    line: int,
    rate: float,
    length: float,
    right: tuple[float, ...],
    candidates: Candidates,
    evidence: Evidence,
) -> Decision:
    """The decision for the drafter and exit layer in these places.

    `right` is its acceptance rate by bin, `rate` its tokens per second.

    The stop rule lets drafting continue while the draft's survival exceeds what one more token costs, measured in
    tokens by the rate of the round. Where stopping early saves no time, there is no such rule.
    """
    rows, exit_layer = candidates.num_rows, candidates.layers[line]
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
