"""`Adaptive`, the default: the exit layer and draft lengths of most expected tokens per measured second, or none.

It joins what the literature keeps apart: shadow statistics of every layer (DEL, arXiv 2504.05598), a measured table of
costs with the head in it and goodput as the aim (SmartSpec, arXiv 2406.14066; Synergy, arXiv 2310.18813), confidence
calibrated into probability (SpecDec++, arXiv 2405.19715), a batch whose slow rows do not hold up the others (DSDE,
arXiv 2509.01083), and lookup in the row's own text (prompt lookup decoding) by how often it was right.

Every few rounds it decides how layers draft (`planner`) and how many tokens are looked up after which match
(`ngram_planner`). In between, a round's plan follows from the rows' matches alone. `schedule` says when to decide and
when to probe layers that do not draft; `correction` sets forecasts right by the clock and by what came.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from selfspec.control.acceptance import Agreement, SecondRates, Tracker
from selfspec.control.correction import BY_COPIES, BY_EXIT, BY_LOOKUP, Correction, Trust, kind_of
from selfspec.control.costs import Costs
from selfspec.control.decay import Passed
from selfspec.control.laps import Seconds
from selfspec.control.ngram_planner import LONG, grown, table
from selfspec.control.ngram_stats import MOST_FOUND, NgramStats
from selfspec.control.plan import (
    DRAFTS,
    LOOKUP,
    SEED_POSITIONS,
    Lookups,
    Plan,
    Policy,
    Steady,
    TokenTree,
    confidence_bins,
)
from selfspec.control.planner import HANDICAP, MARGIN, Decision, Evidence, could_pay, decide
from selfspec.control.round_costs import MOST, Vocabulary
from selfspec.control.round_costs import Drafters as Parts
from selfspec.control.round_costs import RoundCosts as Worth
from selfspec.control.rows import RowOutcome, RowState, Shadow
from selfspec.control.schedule import Schedule

KNOWN = 12.0  # lasting picks from which on a layer is known: misses of its copies are not held against it
CONTEXT_STEP = 64  # tokens by which rows grow until rounds are priced anew
LOOK_EVERY = 4  # rounds between readings of the clock
SEED_SHARE = 0.01  # of a row's plain decoding, for probing its prompt


class Adaptive(Policy):
    """Plans from statistics and a machine's costs.

    Args:
        prior: what `state` of an earlier one of the same model returned.
        exit_layers: those to choose from; default: all.
        most: longest draft; default: as long as it pays.
        drafts: where they may come from, among `DRAFTS`.
    """

    def __init__(
        self,
        costs: Costs,
        prior: Any = None,
        exit_layers: Sequence[int] | None = None,
        most: int | None = None,
        drafts: Sequence[str] = DRAFTS,
    ) -> None:
        self.costs = costs
        self._most = MOST if most is None else min(most, MOST)
        self._most_found = MOST_FOUND if most is None else min(most, MOST_FOUND)
        self._layers = sorted(set(exit_layers or range(1, costs.num_layers))) if "exit" in drafts else []
        self._looks_up, self._may_copy = "lookup" in drafts, "copies" in drafts
        known = prior if isinstance(prior, dict) else {}
        self.tracker = Tracker(costs.num_layers, prior)
        """Statistics of all layers."""
        self._passed = Passed()
        self._agreement = Agreement(costs.num_layers, self._passed, known.get("agreement"))
        self._seconds = SecondRates(costs.num_layers) if "tree" in drafts else None
        self._own, self._stored = NgramStats(self._passed), NgramStats(self._passed)
        self._correction = Correction(_told_by(costs), known.get("correction"))
        self._trusts = Trust(self._passed), Trust(self._passed)  # in forecasts of drafts by layers, and by lookup
        self._has_prior = any(self.tracker.num_lasting(layer) >= KNOWN for layer in self._layers)
        self._schedule = Schedule(costs, self._has_prior)
        self._vocabulary: Vocabulary | None = None
        self._has_copies = False
        self._parts = Parts(costs)
        self._worth: Worth | None = None
        self._worth_for = (0, 0)
        self.decision = Decision()
        self._lookups: Lookups | None = None
        self._has_corpus = False  # whether rows have one to look in
        self._rows: list[tuple[int, int]] = []  # of the last decision, see `RowState.whole`
        self._processes = False  # whether any of them has processors
        self._usual = Plan(None, (0,), speedup=1.0)  # of rounds that lookup does not draft
        self._plan: Plan | None = None
        self._in_block = False  # whether that is one of a comparison's plain rounds
        self._forecast = 0.0  # tokens per row of the round that was planned last, where lookup drafts
        self._grown: tuple[int, ...] = ()  # see `ngram_planner.grown`
        self._streak, self._is_grown = 0, False  # right drafts in a row; whether the last plan's is longer for that
        self._was_long = False  # whether it follows a long match
        self._held: Sequence[int] = (0,)
        self._round = 0

    # ------------------------------------------------------------------------------------------ what it is told once

    def tell_vocabulary(self, vocabulary: Vocabulary | None) -> None:
        """Drafts may be over parts of this vocabulary; None: they are over all of it."""
        if vocabulary is not self._vocabulary:
            self._vocabulary = vocabulary
            self._draft_anew()

    def tell_copies(self, has_copies: bool) -> None:
        """Drafts may be written by copies of the layers in 4 bits; until this is told they may not."""
        if (has_copies and self._may_copy) != self._has_copies:
            self._has_copies = has_copies and self._may_copy
            self._worth = None
            self._draft_anew()

    def _draft_anew(self) -> None:
        self._parts = Parts(self.costs, self._vocabulary, self._has_copies)
        self._schedule.decide_now()

    def tell_correction(self, correction: Any) -> None:
        """Start from what the clock told an earlier one with these costs, as its `state` has it, and no more of it."""
        self._correction = Correction(_told_by(self.costs), correction)

    def forget_rows(self) -> None:
        """All rows are gone, and the next ones may have their numbers."""
        self._rows = []
        self._own.keep_rows(())
        self._stored.keep_rows(())

    def state(self) -> dict[str, Any]:
        """What it has seen, in plain numbers, for a later one of the same model to start from."""
        told = {"agreement": self._agreement.state(), "correction": self._correction.state()}
        return self.tracker.state() | told

    # ---------------------------------------------------------------------------------------------- what it asks for

    @property
    def reads_lookup(self) -> bool:
        """Whether rows may draft by lookup."""
        return self._looks_up

    @property
    def hears_lookup(self) -> bool:
        """Whether it is told what lookups would have come to: where they come from a corpus, which keeps no tally."""
        return self._has_corpus

    @property
    def steady(self) -> Steady:
        """How many of the next rounds follow from the rows' matches and from what was decided."""
        if self._plan is None or self._has_corpus or self._plan.shadow is not None:
            return Steady()
        if self._in_block:  # what follows the last of these is not plain
            return Steady(self._schedule.block)
        rounds = self._schedule.rounds_until_due
        before_probe = min(rounds, self._schedule.rounds_before_probe) if self._layers else rounds
        if len(self._rows) == 1:
            lengths = (0,) if self._lookups is None else self._lookups.lengths[0]
            if before_probe or self._lookups is None:
                rounds = before_probe
            else:  # a probe waits for a round that lookup does not draft
                lengths = tuple([n or -1 for n in lengths])
            return Steady(rounds, lengths=lengths, usual=self._usual, grown=self._grown, streak=self._streak)
        return Steady(before_probe, usual=self._usual, lookups=self._lookups)

    def seed_layers(self, row: RowState) -> tuple[int, ...]:
        """Layers at which the end of a prompt is probed while it is read: where nothing is known of them yet."""
        if self._has_prior or self._rows or not self._layers:
            return ()
        positions = min(SEED_POSITIONS, row.content_length - 1)
        budget = SEED_SHARE * row.room * self.costs.plain_round(1)
        layers = could_pay(self._worth_of(1, row.content_length), self._layers, HANDICAP, 1.0)
        count = len(layers)
        while count and self.costs.seed(count, positions) > budget:
            count -= 1
        return tuple(layers[i * len(layers) // count] for i in range(count)) if count else ()

    def seed(self, row: RowState, shadow: Shadow) -> None:
        self.tracker.add_shadow(shadow)
        self._schedule.decide_now()

    # ------------------------------------------------------------------------------------------------------- planning

    def plan(self, rows: Sequence[RowState]) -> Plan:
        self._round += 1
        self._held = [row.content_length for row in rows]
        self._in_block = self._schedule.block > 0
        is_due = self._schedule.begin_round()
        processes = any(row.has_processors for row in rows)
        if is_due or processes != self._processes or [row.whole for row in rows] != self._rows:
            self._processes = processes
            self._decide(rows)
            self._in_block = self._schedule.block > 0
        lengths = tuple([min(self._most, self.decision.most, row.room - 1) for row in rows])
        self._usual = self._by_layers(lengths, None) if any(lengths) else _plain(len(rows))
        self._plan = _plain(len(rows)) if self._in_block else self._by_lookup(rows) or self._without_lookup(lengths)
        return self._plan

    def _by_layers(self, lengths: tuple[int, ...], shadow: Any) -> Plan:
        if self.decision.exit_layer is None:
            return _plain(len(lengths), shadow)
        if shadow is None and self._usual.draft_lengths == lengths and self._usual.stop is self.decision.stop:
            return self._usual
        return self.decision.plan(lengths, shadow)

    def _without_lookup(self, lengths: tuple[int, ...]) -> Plan:
        if not self._layers or not self._schedule.probe_is_due or self._worth is None or not any(lengths):
            return self._usual
        slower = self._correction.ratio(BY_EXIT, len(lengths))
        layers = could_pay(self._worth, self._layers, max(HANDICAP, self.decision.speedup), slower)
        layers = tuple([layer for layer in layers if layer != self.decision.exit_layer])
        shadow = self._schedule.probe(layers, len(lengths), 1 + self.decision.length)
        return self._usual if shadow is None else self._by_layers(lengths, shadow)

    def _by_lookup(self, rows: Sequence[RowState]) -> Plan | None:
        lookups = self._lookups
        if lookups is None:
            return None
        matches = [row.match for row in rows]
        self._was_long = len(rows) == 1 and matches[0] >= LONG
        lengths = lookups.drafted(matches, [row.room - 1 for row in rows])
        if lengths is None:
            return None
        self._is_grown = self._was_long and self._streak > 0 and bool(self._grown)
        if self._is_grown:
            longer = self._grown[min(self._streak, len(self._grown)) - 1]
            lengths = (min(longer, rows[0].room - 1),)
        gained = zip(lookups.gains, matches, lengths, strict=True)
        self._forecast = 1 + sum([gains[min(match, LONG)] for gains, match, n in gained if n]) / len(rows)
        if not self._has_corpus:
            return Plan(LOOKUP, lengths)
        trees = [_chain(row, n) if n else None for row, n in zip(rows, lengths, strict=True)]
        return Plan(LOOKUP, tuple([0 if tree is None else len(tree.tokens) for tree in trees]), trees=tuple(trees))

    def _decide(self, rows: Sequence[RowState]) -> None:
        """How layers draft, and what is looked up after which match."""
        before, whole = self.decision, [row.whole for row in rows]
        count, is_other = len(rows), whole != self._rows
        worth = self._worth_of(count, self.costs.context_of(self._held))
        worth.price(1.0, lookups=self._correction.ratio(BY_LOOKUP, count))
        self._rows = whole
        if self._layers:
            self.decision = decide(before, worth, self._parts.now(self._processes), self._layers, self._evidence(count))
        else:
            self.decision = Decision(count / worth.plain_seconds)
        self._lookups = self._table(rows, worth) if self._looks_up else None
        self._grown = (
            () if self._lookups is None or count > 1 else grown(self._lookups.lengths[0][-1], self._most_found)
        )
        self._streak = 0 if is_other else self._streak
        round_seconds = self.decision.rounds[min(MOST, round(self.decision.length))] or worth.plain_seconds
        exit_layer = self.decision.exit_layer
        is_known = exit_layer is None or self.tracker.num_lasting(exit_layer) >= KNOWN
        self._schedule.decided(round_seconds, is_other, is_known)
        drafts = self.decision.exit_layer is not None or self._lookups is not None
        kind = kind_of(self.decision.plan((), None)) if self.decision.exit_layer is not None else BY_LOOKUP
        apart = self._schedule.rounds_apart(max(1.0, self.decision.speedup))
        if drafts and self._correction.wants_plain(kind, apart):
            self._schedule.compare()

    def _evidence(self, num_rows: int) -> Evidence:
        right, share = self.tracker.estimates()
        slower = self._correction.ratio(BY_EXIT, num_rows), self._correction.ratio(BY_COPIES, num_rows)
        margin = 1.0 if self._agreement.is_known else MARGIN
        agreement, seen = self._agreement.ratios(), self.tracker.lasting.sum((0, 2))
        return Evidence(right, share, seen, agreement, self._trusts[0].ratio, slower, margin, self._seconds)

    def _table(self, rows: Sequence[RowState], worth: Worth) -> Lookups | None:
        ids = [row.request_id for row in rows]
        rates = []
        self._has_corpus = False
        for row in rows:
            guesses, stats = row.guesses, self._own
            if guesses is not None and guesses.is_own:
                stats.take(guesses.take_tally(), row.request_id)
            elif guesses is not None:
                self._has_corpus = True
                stats = self._stored if guesses.is_stored else self._own
            rates.append(stats.rates(row.request_id))
        self._own.keep_rows(ids)
        self._stored.keep_rows(ids)
        return table(rates, worth, self.decision.usual, self._trusts[1].ratio, self._most_found)

    def _worth_of(self, num_rows: int, context: float) -> Worth:
        step = int(context) // CONTEXT_STEP
        if self._worth is None or self._worth_for[0] != num_rows:
            self._worth, self._worth_for = Worth(self.costs, num_rows, copies=self._has_copies), (num_rows, -1)
        if self._worth_for[1] != step:
            self._worth.move((step + 0.5) * CONTEXT_STEP)
            self._worth_for = num_rows, step
        return self._worth

    # ------------------------------------------------------------------------------------------------------- learning

    def observe(self, plan: Plan, outcomes: Sequence[RowOutcome], seconds: Seconds) -> None:
        count = max(1, len(outcomes))
        emitted = sum([outcome.num_emitted for outcome in outcomes]) / count
        self._passed.tokens += emitted
        self.tracker.pass_time(emitted)
        if self._seconds is not None:
            self._seconds.pass_time(emitted)
        is_right = self._was_long and plan.exit_layer == LOOKUP and emitted > outcomes[0].num_drafted > 0
        self._streak = self._streak + 1 if is_right else 0
        if plan.exit_layer == LOOKUP:
            if not self._is_grown:
                self._trusts[1].add(emitted, self._forecast)
        elif plan.exit_layer is not None:
            self._learn_draft(plan, plan.exit_layer, outcomes, emitted)
        for outcome in outcomes:
            if outcome.shadow is not None:
                self.tracker.add_shadow(outcome.shadow)
            if outcome.looked is not None and outcome.looked.match:
                stats = self._stored if outcome.looked.is_stored else self._own
                stats.add(outcome.looked, outcome.request_id)
        forwards = seconds.draft + seconds.verify + seconds.head
        self._schedule.pass_round(forwards, None if plan.shadow is None else seconds.shadow)
        self._correction.pass_round()
        if (plan.shadow is None and self._round % LOOK_EVERY == 0) or self._schedule.block:
            self._look_at_clock(plan, outcomes, seconds)

    def _look_at_clock(self, plan: Plan, outcomes: Sequence[RowOutcome], seconds: Seconds) -> None:
        drafted, beside = [o.num_drafted for o in outcomes], [o.num_beside for o in outcomes]
        context, share = self.costs.context_of(self._held), self._parts.share(plan.draft_vocab)
        copies = plan.draft_bits is not None
        expected = self.costs.stages(plan.exit_layer, drafted, context, beside if any(beside) else [], share, copies)
        took = seconds.draft + seconds.verify + seconds.head + seconds.pick
        self._correction.look(plan, sum(expected.values()) - expected["rest"], took)

    def _learn_draft(self, plan: Plan, exit_layer: int, outcomes: Sequence[RowOutcome], emitted: float) -> None:
        """Every drafted token that was judged is a hit of the layer or a miss."""
        rounds, longest = self.decision.rounds, max([outcome.num_drafted for outcome in outcomes])
        if plan.draft_bits is None or self._agreement.is_known:
            self._trusts[0].add(emitted, self.decision.tokens * rounds[min(len(rounds) - 1, longest)])
        judged = []
        for outcome in outcomes:
            # What no draft could have picked says nothing of the layer: it is in the part's coverage.
            told = outcome.num_accepted if outcome.is_left_out else outcome.num_judged
            judged.append((outcome.num_accepted, outcome.confidences[:told]))
            if outcome.second is not None and self._seconds is not None:
                confidence = outcome.confidences[outcome.num_accepted]
                self._seconds.add(exit_layer, confidence, outcome.second)
        if plan.draft_bits is not None and self.tracker.num_lasting(exit_layer) >= KNOWN:
            if plan.stop is not None:
                covered = self._agreement.ratios()[exit_layer - 1]
                bins = confidence_bins([one for _, confidences in judged for one in confidences])
                expected = sum([plan.stop.calibration[at] for at in bins]) / covered
                self._agreement.add(exit_layer, sum([right for right, _ in judged]), expected)
            if not self._agreement.is_good:
                return
        for right, confidences in judged:
            self.tracker.add_draft(exit_layer, right, confidences)


def _plain(num_rows: int, shadow: Any = None) -> Plan:
    return Plan(None, (0,) * num_rows, shadow=shadow, speedup=1.0)


def _chain(row: RowState, most: int) -> TokenTree | None:
    """What a row's guesses continue it with."""
    assert row.guesses is not None
    tokens = tuple(row.guesses.chain(most))
    return TokenTree(tokens, tuple(range(len(tokens)))) if tokens else None


def _told_by(costs: Costs) -> list[float]:
    """Numbers by which one table of costs is told from another."""
    last = costs.num_layers
    return [
        last,
        costs.plain(1),
        costs.late[1](4),
        costs.head(1),
        costs.pick(1),
        costs.early_pass(max(1, last // 4), 1),
    ]
