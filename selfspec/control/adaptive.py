"""`Adaptive`, the default policy: the drafter, exit layer and draft lengths with the most expected tokens per second.

It combines shadow statistics of every layer (DEL, arXiv 2504.05598), a measured cost table that includes the head, and
goodput as the objective (SmartSpec, arXiv 2406.14066; Synergy, arXiv 2310.18813), calibrated confidence (SpecDec++,
arXiv 2405.19715), draft lengths for ragged batches (DSDE, arXiv 2509.01083), and prompt lookup by its acceptance rate.

A decision chooses how layers draft (`planner`) and how many tokens are drafted by lookup after a match of each length
(`ngrams`). It holds for all rounds until the next decision. `timing` says when to decide and when to probe layers, and
corrects predicted times and forecast tokens by measured ones.
"""

from __future__ import annotations

from collections import abc
from typing import TYPE_CHECKING, Any

from selfspec.control.acceptance import Agreement, TokenClock, Tracker
from selfspec.control.costs import Costs
from selfspec.control.ngrams import NgramStats, table
from selfspec.control.plan import (
    OWN_TEXT,
    SEED_POSITIONS,
    LookupTable,
    Policy,
    ShadowPlan,
    confidence_bins,
    lookup_bin,
)
from selfspec.control.planner import HANDICAP, MARGIN, Decision, Evidence, could_pay, decide
from selfspec.control.round_costs import MOST, MOST_FOUND, Drafters, RoundCosts, recorded_exits
from selfspec.control.timing import BY_COPIES, BY_EXIT, BY_LOOKUP, Correction, ForecastRatio, Schedule, kind_of
from selfspec.core import DRAFTERS, LOOKUP, Plan, RoundOutput, RowRound, Sequence, ShadowPicks

if TYPE_CHECKING:
    from selfspec.model.draft_vocabulary import Frequencies

MIN_PICKS = 12.0  # lasting observations from which on a layer's acceptance counts as measured
CONTEXT_STEP = 64  # growth of the rows in tokens after which round costs are computed again
TIMING_INTERVAL = 4  # rounds between comparisons of measured and predicted time
SEED_SHARE = 0.01  # largest time for probing a prompt, as a share of the row's plain decoding


class Adaptive(Policy):
    """Plans from acceptance statistics and a measured cost table.

    Args:
        prior: the `state` of an earlier instance for the same model.
        exit_layers: exit layers to choose from; default: all, or `recorded_exits` where rounds are recorded.
        most: maximum draft length; default: no limit beyond `MOST` and `MOST_FOUND`.
        drafters: where drafts may come from, some of `DRAFTERS`.
    """

    most_forced = 32

    def __init__(
        self,
        costs: Costs,
        prior: Any = None,
        exit_layers: abc.Sequence[int] | None = None,
        most: int | None = None,
        drafters: abc.Sequence[str] = DRAFTERS,
    ) -> None:
        self.costs = costs
        self._most = MOST if most is None else min(most, MOST)
        self._most_found = MOST_FOUND if most is None else min(most, MOST_FOUND)
        every = range(1, costs.num_layers) if costs.recorded is None else recorded_exits(costs.num_layers)
        self._layers = sorted(set(exit_layers or every)) if "exit" in drafters else []
        self._looks_up, self._may_copy = "lookup" in drafters, "copies" in drafters
        known = prior if isinstance(prior, dict) else {}
        self.tracker = Tracker(costs.num_layers, prior)
        """Acceptance statistics of all layers."""
        self._clock = TokenClock()
        self._agreement = Agreement(costs.num_layers, self._clock, known.get("agreement"))
        self._ngrams = NgramStats(self._clock)
        self._correction = Correction(_identity_of(costs), known.get("correction"))
        self._layer_forecasts, self._lookup_forecasts = ForecastRatio(self._clock), ForecastRatio(self._clock)
        self._has_prior = any(self.tracker.num_lasting(layer) >= MIN_PICKS for layer in self._layers)
        self._schedule = Schedule(costs, self._has_prior)
        self._vocabulary: Frequencies | None = None
        self._has_copies = False
        self._drafters = Drafters(costs)
        self._round_costs: RoundCosts | None = None
        self._round_costs_for = (0, 0)
        self.decision = Decision()
        self._lookups: LookupTable | None = None
        self._rows: list[tuple[int, int]] = []  # identities of the rows of the last decision, see `Sequence.identity`
        self._has_processors = False  # whether any of these rows has processors
        self._context_lengths: abc.Sequence[int] = (0,)  # tokens per row
        self._round = 0

    # -------------------------------------------------------------------------------------------------------- setters

    def set_vocabulary(self, vocabulary: Frequencies | None) -> None:
        if vocabulary is not self._vocabulary:
            self._vocabulary = vocabulary
            self._reset_drafters()

    def set_copies(self, has_copies: bool) -> None:
        """Allow drafts by 4-bit copies of the layers; without this call they are not used."""
        if (has_copies and self._may_copy) != self._has_copies:
            self._has_copies = has_copies and self._may_copy
            self._round_costs = None
            self._reset_drafters()

    def _reset_drafters(self) -> None:
        self._drafters = Drafters(self.costs, self._vocabulary, self._has_copies)
        self._schedule.decide_now()

    def set_correction(self, correction: Any) -> None:
        """Replace the time ratios by the `correction` of an earlier state with the same costs."""
        self._correction = Correction(_identity_of(self.costs), correction)

    def forget_rows(self) -> None:
        """Drop the statistics of single rows. Later rows may then have the same sequence ids."""
        self._rows = []
        self._ngrams.keep_rows(())

    def state(self) -> dict[str, Any]:
        """All statistics as plain numbers, for the `prior` of a later instance."""
        ratios = {"agreement": self._agreement.state(), "correction": self._correction.state()}
        return self.tracker.state() | ratios

    # -------------------------------------------------------------------------------------------------------- probing

    def seed_layers(self, row: Sequence) -> tuple[int, ...]:
        """Layers to probe at the end of the first prompt, within `SEED_SHARE`; none where there is a prior."""
        if self._has_prior or self._rows or not self._layers:
            return ()
        positions = min(SEED_POSITIONS, row.num_tokens - 1)
        budget = SEED_SHARE * row.num_remaining * self.costs.plain_round(1)
        layers = could_pay(self._costs_of(1, row.num_tokens), self._layers, HANDICAP, 1.0)
        count = len(layers)
        while count and self.costs.seed(count, positions) > budget:
            count -= 1
        return tuple(layers[i * len(layers) // count] for i in range(count)) if count else ()

    def seed(self, row: Sequence, shadow: ShadowPicks) -> None:
        self.tracker.add_shadow(shadow)
        self._schedule.decide_now()

    # ------------------------------------------------------------------------------------------------------- planning

    def plan(self, rows: list[Sequence]) -> Plan:
        self._context_lengths = [row.num_tokens for row in rows]
        has_processors, schedule = any(row.has_processors for row in rows), self._schedule
        if schedule.is_due or has_processors != self._has_processors or [row.identity for row in rows] != self._rows:
            self._has_processors = has_processors
            self._decide(rows)
        count, num_rounds = len(rows), schedule.num_rounds
        if schedule.block:
            return Plan(None, (0,) * count, num_rounds=schedule.block, speedup=1.0)
        shadow = self._probe(count) if schedule.probe_is_due else None
        if shadow is not None and self.costs.recorded is not None:
            return Plan(None, (0,) * count, shadow=shadow, speedup=1.0)
        if shadow is None and self._layers:
            num_rounds = min(num_rounds, schedule.rounds_before_probe)
        return self.decision.plan(count, num_rounds, self._most, self._lookups, shadow)

    def _probe(self, num_rows: int) -> ShadowPlan | None:
        """The next probe: of layers that do not draft but could be faster."""
        if not self._layers or self._round_costs is None:
            return None
        ratio = self._correction.ratio(BY_EXIT, num_rows)
        layers = could_pay(self._round_costs, self._layers, max(HANDICAP, self.decision.speedup), ratio)
        layers = tuple([layer for layer in layers if layer != self.decision.exit_layer])
        if self.costs.recorded is None:
            return self._schedule.probe(layers, num_rows, 1 + self.decision.length)
        # A plain round with always the same layers, so that few recordings of parts are made for probes.
        return self._schedule.probe(tuple(self._layers) if layers else (), num_rows, 1.0)

    def _decide(self, rows: list[Sequence]) -> None:
        """Choose how layers draft, and draft lengths by match length."""
        before, identities, count = self.decision, [row.identity for row in rows], len(rows)
        is_other = identities != self._rows
        round_costs = self._costs_of(count, self.costs.context_of(self._context_lengths))
        round_costs.correct_lookups(self._correction.ratio(BY_LOOKUP, count))
        if self._layers:
            self.decision = decide(
                before, round_costs, self._drafters.now(self._has_processors), self._layers, self._evidence(count)
            )
        else:
            self.decision = Decision(count / round_costs.plain_seconds)
        self._lookups = self._table(rows, round_costs) if self._looks_up else None
        self._rows = identities  # last, so that an interrupted decision is made again
        round_seconds = self.decision.rounds[min(MOST, round(self.decision.length))] or round_costs.plain_seconds
        exit_layer = self.decision.exit_layer
        is_known = exit_layer is None or self.tracker.num_lasting(exit_layer) >= MIN_PICKS
        self._schedule.decided(round_seconds, is_other, is_known)
        kind = BY_LOOKUP if exit_layer is None else kind_of(exit_layer, self.decision.drafter.draft_bits)
        apart = self._schedule.rounds_apart(max(1.0, self.decision.speedup))
        if (exit_layer is not None or self._lookups is not None) and self._correction.wants_plain(kind, apart):
            self._schedule.compare()

    def _evidence(self, num_rows: int) -> Evidence:
        right, share = self.tracker.estimates()
        time_ratios = self._correction.ratio(BY_EXIT, num_rows), self._correction.ratio(BY_COPIES, num_rows)
        margin = 1.0 if self._agreement.is_known else MARGIN
        agreement, seen = self._agreement.ratios(), self.tracker.lasting.sum((0, 2))
        forecast = self._layer_forecasts.ratio
        return Evidence(right, share, seen, agreement, forecast, time_ratios, margin)

    def _table(self, rows: list[Sequence], round_costs: RoundCosts) -> LookupTable | None:
        rates = []
        for row in rows:
            if row.new_lookup is not None:
                self._ngrams.take(row.lookup.take_tally(), row.seq_id)
            rates.append(self._ngrams.rates(row.seq_id))
        self._ngrams.keep_rows([row.seq_id for row in rows])
        return table(rates, round_costs, self.decision.usual, self._lookup_forecasts.ratio, self._most_found)

    def _costs_of(self, num_rows: int, context: float) -> RoundCosts:
        step = int(context) // CONTEXT_STEP
        if self._round_costs is None or self._round_costs_for[0] != num_rows:
            self._round_costs, self._round_costs_for = (
                RoundCosts(self.costs, num_rows, copies=self._has_copies, most=self._most),
                (num_rows, -1),
            )
        if self._round_costs_for[1] != step:
            self._round_costs.move((step + 0.5) * CONTEXT_STEP)
            self._round_costs_for = num_rows, step
        return self._round_costs

    # ------------------------------------------------------------------------------------------------------- learning

    def observe(self, plan: Plan, rounds: list[RoundOutput]) -> None:
        rows = {identity[0]: line for line, identity in enumerate(self._rows)}
        for round_ in rounds:
            self._round += 1
            self._observe(plan, round_, rows)

    def _observe(self, plan: Plan, round_: RoundOutput, lines: dict[int, int]) -> None:
        """Count one round; `lines` maps sequence ids to rows of the lookup table."""
        outcomes, seconds, exit_layer = round_.rows, round_.seconds, round_.exit_layer
        count = max(1, len(outcomes))
        emitted = sum([outcome.num_emitted for outcome in outcomes]) / count
        self._clock.tokens += emitted
        self.tracker.pass_time(emitted)
        if exit_layer == LOOKUP and plan.lookups is not None:
            gains = [
                plan.lookups.gains[lines[o.seq_id]][lookup_bin(o.match_length, o.source)]
                for o in outcomes
                if o.match_length
            ]
            self._lookup_forecasts.add(emitted, 1 + sum(gains) / count)
        elif exit_layer:
            self._observe_draft(plan, exit_layer, outcomes, emitted)
        for outcome in outcomes:
            if outcome.shadow is not None:
                self.tracker.add_shadow(outcome.shadow)
            if outcome.source != OWN_TEXT:  # whose tally counts every token, drafted or not
                drafted, right = outcome.num_drafted, outcome.num_accepted
                self._ngrams.add(outcome.match_length, drafted, right, outcome.seq_id, outcome.source)
        is_compared, is_probe = self._schedule.block > 0, any(o.shadow is not None for o in outcomes)
        forwards = seconds.draft + seconds.verify + seconds.head
        # Where rounds are recorded, a probe takes a plain round's time, too; else it is part of a drafted round.
        probing = seconds.shadow + (0.0 if self.costs.recorded is None else forwards)
        self._schedule.pass_round(forwards, probing if is_probe else None)
        self._correction.pass_round()
        if is_compared or (not is_probe and self._round % TIMING_INTERVAL == 0):
            self._compare_with_costs(plan, round_)
        self._context_lengths = [held + round(emitted) for held in self._context_lengths]

    def _compare_with_costs(self, plan: Plan, round_: RoundOutput) -> None:
        outcomes, seconds, exit_layer = round_.rows, round_.seconds, round_.exit_layer
        drafted = [o.num_drafted for o in outcomes]
        context, share = self.costs.context_of(self._context_lengths), self._drafters.share(plan.draft_vocab)
        copies = plan.draft_bits is not None
        expected = self.costs.stages(exit_layer, drafted, context, share, copies)
        took = seconds.draft + seconds.verify + seconds.head + seconds.pick
        kind = kind_of(exit_layer, plan.draft_bits)
        self._correction.add(kind, len(outcomes), sum(expected.values()) - expected["rest"], took)

    def _observe_draft(self, plan: Plan, exit_layer: int, outcomes: list[RowRound], emitted: float) -> None:
        """Count the judged tokens of drafts by layers or copies."""
        rounds, longest = self.decision.rounds, max([outcome.num_drafted for outcome in outcomes])
        if plan.draft_bits is None or self._agreement.is_known:
            self._layer_forecasts.add(emitted, self.decision.tokens * rounds[min(len(rounds) - 1, longest)])
        judged = []
        for outcome in outcomes:
            # A target token outside the draft vocabulary is counted in the vocabulary's coverage, not as a miss.
            counted = outcome.num_accepted if outcome.is_outside_vocab else outcome.num_judged
            judged.append((outcome.num_accepted, outcome.confidences[:counted]))
        if plan.draft_bits is not None and self.tracker.num_lasting(exit_layer) >= MIN_PICKS:
            if plan.stop is not None:
                covered = self._agreement.ratios()[exit_layer - 1]
                bins = confidence_bins([one for _, confidences in judged for one in confidences])
                expected = sum([plan.stop.calibration[at] for at in bins]) / covered
                self._agreement.add(exit_layer, sum([right for right, _ in judged]), expected)
            if not self._agreement.is_good:
                return
        for right, confidences in judged:
            self.tracker.add_draft(exit_layer, right, confidences)


def _identity_of(costs: Costs) -> list[float]:
    """Numbers that identify a cost table."""
    last = costs.num_layers
    return [
        last,
        costs.plain(1),
        costs.late[1](4),
        costs.head(1),
        costs.pick(1),
        costs.early_pass(max(1, last // 4), 1),
    ]
