"""`Adaptive`, the default policy: the drafter, exit layer and draft lengths with the most expected tokens per second.

It combines shadow statistics of every layer (DEL, arXiv 2504.05598), goodput as the objective (SmartSpec, arXiv
2406.14066; Synergy, arXiv 2310.18813), calibrated confidence (SpecDec++, arXiv 2405.19715), draft lengths for ragged
batches (DSDE, arXiv 2509.01083), and prompt lookup by its acceptance rate.

Three things are known. `times`: what rounds took on this machine. `acceptance` and `ngrams`: how often each layer and
each match was right. `ledger`: what drafting may still lose. A decision chooses how layers draft (`planner`) and how
many tokens are drafted by lookup after a match of each length (`ngrams`). It holds for all rounds until the next
decision; of them, drafts are cut to what the ledger's balance covers.
"""

from __future__ import annotations

import math
from collections import abc
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np

from selfspec.control.acceptance import LASTING, Agreement, TokenClock, Tracker
from selfspec.control.costs import Costs
from selfspec.control.drafters import MOST, MOST_FOUND, Drafters, recorded_exits, recorded_lengths
from selfspec.control.ledger import SHARE, Ledger, window
from selfspec.control.ngrams import NgramStats, table
from selfspec.control.plan import (
    OWN_TEXT,
    SEED_POSITIONS,
    LookupTable,
    Policy,
    ShadowPlan,
    confidence_bins,
)
from selfspec.control.planner import Candidates, Decision, Evidence, decide
from selfspec.control.times import MOST_OFF, PLAIN_READINGS, PLAIN_WINDOWS, AllTimes, Times
from selfspec.core import LOOKUP, Plan, RoundOutput, RowRound, Sequence, ShadowPicks
from selfspec.params import DRAFTERS

if TYPE_CHECKING:
    from selfspec.model.draft_vocabulary import Frequencies

MIN_PICKS = 12.0  # lasting observations from which on a layer's acceptance counts as measured
SEED_SHARE = 0.01  # largest time for probing a prompt, as a share of the row's plain decoding
UNKNOWN_ROUNDS = 4  # rounds between decisions while the layer that drafts has few observations
FIRST, MOST_ROUNDS = 16, 256  # rounds between decisions: at first; the number doubles up to the most
CHANGED = 0.1  # relative change of a plain round's time after which layers are judged again
DECISION_SHARE = 0.003  # largest share of the time for decisions
PLAIN_ROUNDS = 4, 3  # plain rounds that are measured at once: at first, and later
PROBED_TOKENS, PROBED_ROWS = 20, 4  # probed positions per row, and rows per probe, at most
SMOOTHING = 0.2  # of the moving average of a decision's seconds


class Adaptive(Policy):
    """Plans from measured seconds, acceptance statistics and a ledger.

    Args:
        costs: calibrated times, which stand for rounds that have not run yet.
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
        self.ledger = Ledger(0.0, 0.0)
        """What drafting may still lose; at the start a quarter of the most."""
        self.ledger = self.ledger._replace(balance=self.ledger.most / 4)
        self._clock = TokenClock()
        self._agreement = Agreement(costs.num_layers, self._clock, known.get("agreement"))
        self._ngrams = NgramStats(self._clock)
        self._all_times = AllTimes(costs, self._clock)
        self._vocabulary: Frequencies | None = None
        self._has_copies = False
        self._drafters = Drafters(costs)
        self.decision = Decision()
        self._table: LookupTable | None = None  # of the rows of the last decision, and of all others
        self._lookups: LookupTable | None = None  # of the rows of the last plan
        self._could_pay: tuple[int, ...] = ()  # layers that are faster than the decision if they are always right
        self._rows: list[tuple[int, int]] = []  # identities of the rows of the last plan, see `Sequence.identity`
        self._lines: dict[tuple[int, int], int] = {}  # of rows in `_table`
        self._decided_rows = 0  # rows of the last decision
        self._in_ledger: list[tuple[int, int]] = []  # identities of the rows of `Ledger.leads`
        self._num_joining = 0  # see `Policy.set_waiting`
        self._has_processors = False  # whether any of these rows has processors
        self._context_lengths: abc.Sequence[int] = (0,)  # tokens per row
        self._pause = 0  # rounds until another decision is within its share of the time
        self._rounds_left, self._interval = 0, FIRST  # rounds to the next decision, and what they are at least
        self._has_probed, self._next_row = False, 0  # whether a probe was made for the next decision; its next row
        self._probed_at = 0.0  # emitted tokens per row until the last probe
        self._decision_seconds = 0.0  # moving average of the policy's own time in a step with a decision
        self._decided_for = 0, False  # rows, and whether any has processors, of the last decision about layers
        self._decided_at = math.inf  # seconds of a plain round then
        self._is_evidence_new = True  # whether layers were judged since the last decision about them
        self._has_decided = False  # whether the last plan came with a decision
        self._is_extra = False  # whether that one is paid by the ledger, since it was earlier than its share allows

    # -------------------------------------------------------------------------------------------------------- setters

    def set_vocabulary(self, vocabulary: Frequencies | None) -> None:
        if vocabulary is not self._vocabulary:
            self._vocabulary = vocabulary
            self._reset_drafters()

    def set_copies(self, has_copies: bool) -> None:
        """Allow drafts by 4-bit copies of the layers; without this call they are not used."""
        if (has_copies and self._may_copy) != self._has_copies:
            self._has_copies = has_copies and self._may_copy
            self._reset_drafters()

    def set_waiting(self, num_waiting: int, num_joining: int = 0) -> None:
        self._num_joining = num_joining
        self.ledger = self.ledger._replace(has_waiting=num_waiting > 0)

    def _reset_drafters(self) -> None:
        self._drafters = Drafters(self.costs, self._vocabulary, self._has_copies)
        self._rounds_left = self._pause = 0
        self._is_evidence_new = self._has_probed = True

    def forget_rows(self) -> None:
        """Drop the statistics of single rows. Later rows may then have the same sequence ids."""
        self._rows, self._lines, self._in_ledger = [], {}, []
        self._ngrams.keep_rows(())

    def state(self) -> dict[str, Any]:
        """All acceptance statistics as plain numbers, for the `prior` of a later instance."""
        return self.tracker.state() | {"agreement": self._agreement.state()}

    # -------------------------------------------------------------------------------------------------------- probing

    def seed_layers(self, row: Sequence) -> tuple[int, ...]:
        """Layers to probe at the end of the first prompts, within `SEED_SHARE`; none once one of them is known well."""
        if self._rows or not self._layers or self.tracker.overall.sum((0, 2)).max() >= LASTING:
            return ()
        positions = min(SEED_POSITIONS, row.num_tokens - 1)
        budget = SEED_SHARE * row.num_remaining * self.costs.plain_round(1)
        times = self._times_of([row.num_tokens])
        layers = self._candidates(times).could_pay(1 / times.plain_seconds)
        count = len(layers)
        while count and self.costs.seed(count, positions) > budget:
            count -= 1
        return tuple(layers[i * len(layers) // count] for i in range(count)) if count else ()

    def seed(self, row: Sequence, shadow: ShadowPicks) -> None:
        self.tracker.add_shadow(shadow)
        self._rounds_left, self._is_evidence_new = 0, True

    # ------------------------------------------------------------------------------------------------------- planning

    def plan(self, rows: list[Sequence]) -> Plan:
        self._context_lengths = [row.num_tokens for row in rows]
        count, has_processors = len(rows), any(row.has_processors for row in rows)
        identities = [row.identity for row in rows]
        is_other = identities != self._rows or has_processors != self._has_processors
        times = self._times_of(self._context_lengths)
        is_new = identities != self._in_ledger
        if is_new:
            self.ledger, self._in_ledger = self.ledger.of_rows(self._in_ledger, identities), identities
        self._has_decided = False
        if times.measured_plain is None:
            self._rounds_left = self._rounds_left if is_other else 0  # the same rows, in another range of contexts
            return Plan(None, (0,) * count, num_rounds=PLAIN_ROUNDS[0], speedup=1.0)
        plain_in = times.plain_at + PLAIN_WINDOWS * window(times.plain_seconds) - self._all_times.seconds
        if plain_in <= 0:
            return Plan(None, (0,) * count, num_rounds=PLAIN_ROUNDS[1], speedup=1.0)
        if is_new and self._num_joining:  # the next program is of one round
            return Plan(None, (0,) * count, speedup=1.0)
        is_like, is_covered = self._is_like(count, has_processors), self.ledger.balance >= self._decision_seconds
        if self._pause > 0 and not is_covered:  # another decision has to wait
            if is_other and not is_like:
                return Plan(None, (0,) * count, num_rounds=self._pause, speedup=1.0)
            self._rounds_left = max(self._rounds_left, self._pause)
        if is_other and is_like:
            self._go_on_with(identities)
            self._rounds_left = min(self._rounds_left, self._pause)
            self.ledger = self.ledger._replace(plain_seconds=times.plain_seconds).entered(0.0)
        if self._rounds_left <= 0 or (is_other and not is_like):
            is_first = not self._decided_rows
            is_probe_due = not is_other or self._clock.tokens >= self._probed_at + MOST_ROUNDS
            shadow = self._probe(count) if is_like and is_probe_due and not self._has_probed else None
            if shadow is None:
                self._has_processors = has_processors
                self._decide(rows, times)
                shadow = self._probe(count) if is_first else None
            if shadow is not None:
                return self._probing(shadow, count)
        longest = self._set_layers_price(times.plain_seconds)
        num_rounds, ledger, decision = max(1, self._rounds_left), self.ledger, self.decision
        if decision.exit_layer is not None and ledger.covers_layers:  # all rounds draft
            num_rounds = max(1, min(num_rounds, math.ceil(plain_in / times.plain_seconds)))
        elif decision.exit_layer is not None:  # what layers need to draft is not prepared before it may be used
            wait = (ledger.layers_price - ledger.balance) / (SHARE * times.plain_seconds)
            num_rounds, decision = min(num_rounds, max(FIRST, math.ceil(wait))), Decision()
        return decision.plan(count, num_rounds, longest, self._lookups, None, ledger)

    def likely(self, num_rows: int) -> list[Plan]:
        """See `Policy.likely`. Where rounds are recorded, no other recordings serve its plans."""
        none = (0,) * num_rows
        plans, longest = [Plan(None, none)], self.costs.recorded_length(num_rows)
        if not longest:
            return plans
        if self._looks_up:
            longest_found = min(longest, self._most_found)
            lengths = {min(1 << i, longest_found + 1) - 1 for i in range(1, (longest_found + 1).bit_length() + 1)}
            plans += [Plan(LOOKUP, (length,) * num_rows) for length in sorted(lengths - {0})]
        for drafter in self._drafters.now() if self._layers else []:
            for exit_layer in self._layers:
                for length in recorded_lengths(longest, self._most):
                    plans.append(Plan(exit_layer, (length,) * num_rows, draft_vocab=drafter.draft_vocab))
        return plans

    def _probe(self, num_rows: int) -> ShadowPlan | None:
        """A probe of layers that do not draft but could be faster, of as many rows as the ledger covers."""
        layers = tuple([layer for layer in self._could_pay if layer != self.decision.exit_layer])
        each, most = math.ceil(1 + self.decision.length), min(num_rows, PROBED_ROWS)
        count = next((n for n in range(most, 0, -1) if self._probe_price(layers, n * each) <= self.ledger.balance), 0)
        if not layers or not count:
            return None
        picked = tuple(sorted((self._next_row + i) % num_rows for i in range(count)))
        self._next_row, self._has_probed = (self._next_row + count) % num_rows, True
        self._probed_at = self._clock.tokens
        return ShadowPlan(layers, picked, 1 if self.costs.recorded is not None else PROBED_TOKENS)

    def _probing(self, shadow: ShadowPlan, num_rows: int) -> Plan:
        """One round with a probe, and a decision after it."""
        self._rounds_left = 0
        if self.costs.recorded is not None:
            return Plan(None, (0,) * num_rows, shadow=shadow, speedup=1.0)
        longest = self._set_layers_price(self.ledger.plain_seconds)
        return self.decision.plan(num_rows, 1, longest, self._lookups, shadow, self.ledger)

    def _probe_price(self, layers: tuple[int, ...], num_positions: int) -> float:
        return self.ledger.layers_price + self.costs.shadow(len(layers), num_positions)

    def _decide(self, rows: list[Sequence], times: Times) -> None:
        """Choose how layers draft, and draft lengths by match length."""
        count, plain = len(rows), times.plain_seconds
        times.move(_mean(self._context_lengths))
        self.ledger = self.ledger._replace(plain_seconds=plain).entered(0.0)
        is_settled = self.decision.exit_layer is None and not self._is_evidence_new
        is_settled &= self._decided_for == (count, self._has_processors)
        if self._layers and not (is_settled and abs(plain / self._decided_at - 1) < CHANGED):
            self._is_evidence_new, self._decided_for, self._decided_at = False, (count, self._has_processors), plain
            right, share = self.tracker.estimates()
            evidence = Evidence(right, share, self.tracker.lasting.sum((0, 2)), self._agreement.ratios())
            now, candidates = self.decision, self._candidates(times, self.ledger)
            self.decision = decide(now, candidates, evidence)
            while self._drafters.rank(self.decision.drafter):
                candidates = self._candidates(times, self.ledger)
                self.decision = decide(now, candidates, evidence)
            self._could_pay = candidates.could_pay(self.decision.usual)
        else:
            self.decision = self.decision._replace(usual=count / plain)
        self._interval = min(2 * self._interval, MOST_ROUNDS) if count == self._decided_rows else FIRST
        self._set_layers_price(plain)
        usual = self.decision.usual if self.ledger.covers_layers else count / plain
        self._set_lookups(rows, times, plain + max(self.ledger.balance, self.ledger.most / 4), usual)
        self._go_on_with(self._in_ledger)  # last, so that an interrupted decision is made again
        exit_layer = self.decision.exit_layer
        is_unknown = exit_layer is not None and self.tracker.num_lasting(exit_layer) < MIN_PICKS
        self._is_extra, pause = self._pause > 0, math.ceil(self._decision_seconds / (DECISION_SHARE * plain))
        self._rounds_left = max(pause, self._interval)
        if is_unknown and self.ledger.covers_layers:  # it drafts, so there will be observations
            self._rounds_left = UNKNOWN_ROUNDS
        self._has_probed, self._has_decided = is_unknown, True

    def _candidates(self, times: Times, ledger: Ledger | None = None) -> Candidates:
        drafters = self._drafters.now(self._has_processors)
        return Candidates(self.costs, times, self._layers, drafters, self._most, ledger)

    def _set_layers_price(self, plain: float) -> int:
        """Set what rounds that layers draft lose if nothing is accepted.

        Returns:
            The longest draft, up to the decision's, that the balance covers; the shortest where it covers none.
        """
        decision, ledger, longest, price = self.decision, self.ledger, 0, 0.0
        if decision.exit_layer is not None:
            most, recorded = min(decision.most, self._most), self.costs.recorded_length(len(self._context_lengths))
            lengths = range(1, most + 1) if recorded is None else recorded_lengths(recorded, most)
            scale = plain / self._decided_at  # since the decision, the machine or the number of rows may have changed
            most_seconds = plain + min(decision.stake, ledger.balance)
            covered = [length for length in lengths if scale * decision.rounds[length] <= most_seconds]
            longest = covered[-1] if covered else 1
            price = scale * decision.rounds[longest] - plain
        self.ledger = ledger._replace(layers_price=price)
        return longest

    def _set_lookups(self, rows: list[Sequence], times: Times, affordable: float, usual: float) -> None:
        """Choose draft lengths by match length, and set what these rounds lose if nothing is accepted."""
        found, prices, lines = None, (0.0,), {row: at for at, row in enumerate(self._in_ledger)}
        if self._looks_up:
            for row in rows:
                if row.new_lookup is not None:
                    self._ngrams.take(row.lookup.take_tally(), row.seq_id)
            rates = self._ngrams.rates([row.seq_id for row in rows])
            self._ngrams.keep_rows([row.seq_id for row in rows])
            seconds, longest = times.lookups(), self.costs.recorded_length(len(rows))
            most = min(self._most_found, int(np.count_nonzero(seconds <= affordable)) - 1)
            found = table(rates, len(rows), seconds, usual, most if longest is None else min(most, longest))
            if found is not None:
                prices = tuple((seconds - seconds[0]).tolist())
        self.ledger = self.ledger._replace(lookup_prices=prices)
        self._table, self._lines, self._decided_rows = found, lines, len(rows)

    def _is_like(self, num_rows: int, has_processors: bool) -> bool:
        """Whether the last decision may serve these rows until the next one."""
        decided = self._decided_rows
        is_like = 2 * abs(num_rows - decided) <= decided and has_processors == self._has_processors
        return is_like and self.costs.recorded_length(num_rows) == self.costs.recorded_length(decided)

    def _go_on_with(self, rows: list[tuple[int, int]]) -> None:
        """Keep the decision for other rows, given by identity. New rows draft after matches as rows usually do."""
        table = self._table
        if table is not None:
            lines = [self._lines.get(row, -1) for row in rows]
            lengths, gains = tuple([table.lengths[at] for at in lines]), tuple([table.gains[at] for at in lines])
            table = table._replace(lengths=lengths, gains=gains)
        self._rows, self._lookups = rows, table  # no call in between, after which an interrupt would leave one of them

    def _times_of(self, context_lengths: abc.Sequence[int]) -> Times:
        return self._all_times.of(len(context_lengths), _mean(context_lengths))

    # ------------------------------------------------------------------------------------------------------- learning

    def observe(self, plan: Plan, rounds: list[RoundOutput]) -> None:
        own, before = sum([round_.seconds.control for round_ in rounds]), self._all_times.seconds
        is_first = len(rounds) > 1  # of several that ran in one call, the first takes longer
        for is_plain, group in groupby(rounds, lambda one: one.exit_layer is None and plan.shadow is None):
            if is_plain:
                self._observe_plain([*group], is_first)
            else:
                for round_ in group:
                    self._observe(plan, round_, is_first)
                    is_first = False
            is_first = False
        if self._has_decided:
            self._decision_seconds += (SMOOTHING if self._decision_seconds else 1.0) * (own - self._decision_seconds)
            self._pause = math.ceil(self._decision_seconds / (DECISION_SHARE * self.ledger.plain_seconds)) - len(rounds)
            self.ledger = self.ledger.entered(-own if self._is_extra else 0.0)
        else:  # at most half of what plain rounds pay in, so that the balance recovers however short programs are
            decoding = self._all_times.seconds - before
            self.ledger = self.ledger.entered(-min(own, SHARE / 2 * decoding))

    def _pass(self, rounds: list[RoundOutput]) -> Times:
        """Let the time of rounds pass; the times of rounds like these."""
        count, num_rounds = max(1, len(rounds[0].rows)), len(rounds)
        times = self._all_times.of(count, _mean(self._context_lengths))
        emitted = sum([outcome.num_emitted for round_ in rounds for outcome in round_.rows]) / count
        self._clock.tokens += emitted
        self.tracker.pass_time(emitted)
        self._rounds_left, self._pause = self._rounds_left - num_rounds, self._pause - num_rounds
        self._all_times.seconds += sum([max(0.0, round_.seconds.decoding) for round_ in rounds])
        self._context_lengths = [held + round(emitted) for held in self._context_lengths]
        return times

    def _observe_plain(self, rounds: list[RoundOutput], is_first: bool) -> None:
        """Count rounds in which nothing was drafted or probed, all at once."""
        before, times = self._all_times.seconds, self._pass(rounds)
        times.plain_at = self._all_times.seconds
        counted = rounds[is_first and times.measured_plain is not None :]
        times.add_plain([round_.seconds.decoding for round_ in counted[-PLAIN_READINGS:]])
        ledger = self.ledger._replace(plain_seconds=times.plain_seconds)
        self.ledger = ledger.entered(SHARE * (self._all_times.seconds - before))

    def _observe(self, plan: Plan, round_: RoundOutput, is_first: bool) -> None:
        """Count one round. is_first: of several that ran in one call."""
        outcomes, seconds, exit_layer = round_.rows, round_.seconds, round_.exit_layer
        times, took = self._pass([round_]), seconds.decoding
        # What a round drafted, also beyond the end of a sequence: it took the time of all of it.
        num_drafted = sum([max(outcome.num_drafted, len(outcome.drafted)) for outcome in outcomes])
        prices, plain = self.ledger.lookup_prices, self.ledger.plain_seconds
        if exit_layer is None:
            times.plain_at = self._all_times.seconds
            if not is_first or times.measured_plain is None:
                times.add_plain([took])
        elif exit_layer == LOOKUP:
            expected = plain + prices[min(num_drafted, len(prices) - 1)]
            times.add_lookup(num_drafted, min(took, MOST_OFF * expected))
        else:
            self._observe_draft(plan, exit_layer, outcomes)
            self._is_evidence_new = True
            drafter, length = (plan.draft_vocab, plan.draft_bits), round(num_drafted / max(1, len(outcomes)))
            if length == 0 or all(outcome.withdrawn is None for outcome in outcomes):
                times.add_draft(drafter, exit_layer, length, min(took, MOST_OFF * (plain + self.ledger.layers_price)))
        for outcome in outcomes:
            if outcome.shadow is not None:
                self.tracker.add_shadow(outcome.shadow)
                self._is_evidence_new = True
            if outcome.source != OWN_TEXT:  # whose tally counts every token, drafted or not
                drafted, right = outcome.num_drafted, outcome.num_accepted
                self._ngrams.add(outcome.match_length, drafted, right, outcome.seq_id, outcome.source)
        ledger = self.ledger._replace(plain_seconds=times.plain_seconds).after(round_)
        self.ledger = ledger.entered(-seconds.shadow)

    def _observe_draft(self, plan: Plan, exit_layer: int, outcomes: list[RowRound]) -> None:
        """Count the judged tokens of drafts by layers or copies."""
        judged = []
        for outcome in outcomes:
            # A target token outside the draft vocabulary is counted in the vocabulary's coverage, not as a miss.
            right, known = outcome.num_right
            judged.append((right, outcome.confidences[: right if outcome.is_outside_vocab else known]))
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


def _mean(lengths: abc.Sequence[int]) -> float:
    return sum(lengths) / len(lengths)
