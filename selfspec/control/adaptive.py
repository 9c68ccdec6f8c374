"""`Adaptive`, the default: the exit layer and draft lengths of most expected tokens per measured second, or none.

It joins what the literature keeps apart: shadow statistics of every layer (DEL, arXiv 2504.05598), a measured table of
costs with the head in it and goodput as the aim (SmartSpec, arXiv 2406.14066; Synergy, arXiv 2310.18813), confidence
calibrated into probability (SpecDec++, arXiv 2405.19715), and a batch whose slow rows do not hold up the others (DSDE,
arXiv 2509.01083).

In a round, rows draft on as long as one more token is worth its time: as long as the chance that all of a row's tokens
so far are right, in the mean over the rows, times the exit's acceptance, times the seconds a token is worth, exceeds
the seconds one more costs. That is the best moment to stop if tokens are independent.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from selfspec.control.costs import CONTEXT, Costs
from selfspec.control.finder import Finder
from selfspec.control.parts import WHOLE, Parts, Vocabulary, choose
from selfspec.control.plan import (
    DEFAULT_DRAFTS,
    LOOKUP,
    SEED_POSITIONS,
    Plan,
    RowOutcome,
    RowState,
    SecondChoices,
    Seconds,
    Shadow,
    ShadowPlan,
    SurvivalStop,
)
from selfspec.control.reading import FEW, Reading
from selfspec.control.seconds import SecondRates
from selfspec.control.tracker import Floats, Tracker
from selfspec.control.trust import Trust
from selfspec.control.worth import MOST, Worth

HANDICAP = 1.05  # what a draft must promise over plain decoding before it is begun (cf. arXiv 2406.14066)
OFF = 0.97  # and to go on: a draft tells more of what drafts are worth than a look does, and forecasts are seldom exact
STAY = 1.02  # what another exit layer must promise over the present one
# How much more an exit at a quarter of the depth counts than its promise; and how that falls off, in logs of depth.
FAVOUR, FAVOUR_WIDTH = 0.1, 0.5
REPLAN, EARLY_REPLAN, EARLY = 12, 4, 24  # rounds between decisions; at first, and for how many rounds
IDLE_ROUNDS, CLOCK_EVERY = 512, 32  # the same while nothing is drafted; and between looks at the clock then
# Of the time, for shadow picks: of one row and of several, at first and later; and while nothing is drafted.
SHADOW_SHARE, BATCH_SHARE, OFF_SHARE = (0.025, 0.0125), (0.012, 0.003), 0.006
SEED_SHARE = 0.005  # the same for a prompt's last positions, unless it joins others
SHADOW_COLUMNS = 20  # judged positions looked at per row
SHADOW_ROWS = 4  # most rows looked at in a round
LOOK_EVERY = 4  # rounds between looks at the clock
MOST_BESIDE = 8  # second choices drafted for a row
CONTEXT_STEP = 64  # tokens by which the longest row grows until rounds are priced anew
PICK_STEP, MOST_PICK = 0.34, 200.0  # how fast the price of picks follows the clock, and how far
PASS_STEP, MOST_PASS = 0.1, 2.0  # the same of early passes, up and down
DECIDING_STEP, MOST_DECIDING = 0.25, 1.0  # and of deciding; the most, in plain rounds


class Adaptive:
    """Plans from a tracker's statistics and a machine's costs.

    Args:
        prior: statistics of an earlier run of the same model, from `Tracker.state`.
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
        drafts: Sequence[str] = DEFAULT_DRAFTS,
    ) -> None:
        self.costs, self.tracker = costs, Tracker(costs.num_layers, prior)
        self.most = MOST if most is None else min(most, MOST)
        self._allowed = list(exit_layers or range(1, costs.num_layers)) if "exit" in drafts else []
        self._finder = Finder(most, drafts) if {"lookup", "recycle"} & {*drafts} else None
        self._favour = _favour(costs.num_layers)
        self._promising: list[int] = []  # layers that would be worth leaving at if they were always right
        self._cascades = "cascade" in drafts
        self._second_rates = SecondRates(costs.num_layers) if "tree" in drafts else None
        self._second_choices: SecondChoices | None = None
        self._pick = 1.0  # how much longer picks take than in the table of costs
        self._passes = [1.0, 1.0]  # and early passes, and those of copies, beside the same rounds' verifications
        self._deciding = 0.0  # seconds that deciding takes in a round that drafts
        self._decided: list[float] = []  # of the rounds since the last look at the clock
        self._worth: Worth | None = None
        self._worth_for = (0, 0)  # rows, and steps of context of the longest
        self._credit = 0.0  # seconds that shadow picks may still take
        self._round = 0
        self._next = 0  # the round of the next decision
        self._batch = 0
        self._exit_layer: int | None = None
        self._stop: SurvivalStop | None = None
        self._length = 0.0  # drafted tokens expected per row
        self._speedup = 1.0
        self._rate = 0.0  # tokens per second forecast for the choice in use
        self._usual = 0.0  # and what is believed of that, of all rows: of plain rounds where nothing is drafted
        self._rounds = [0.0] * (MOST + 1)  # seconds of its rounds, by drafted tokens
        self._trust = Trust()  # in forecasts of rounds that layers drafted in
        self._turn = 0  # whose turn it is to be looked at in a large batch
        self._context = CONTEXT
        self._joining = 0  # prompts read since the last plan
        self._reading = Reading(costs.ragged is not None)
        self._idle_rounds = 0  # plain rounds that are not counted yet
        self._acceptance = 0.0  # of the exit layer in use
        self._may_copy, self._has_copies = "copies" in drafts, False
        self._vocabulary: Vocabulary | None = None
        self._parts, self._part = Parts(costs), WHOLE  # ways of drafting, and the one in use
        self._idle = Plan(None, (0,), speedup=1.0)
        self._made: Plan | None = None  # since the last decision
        self._most_credit = costs.shadow(costs.num_layers - 1, SHADOW_COLUMNS)

    def tell_vocabulary(self, vocabulary: Vocabulary | None) -> None:
        """Drafts may be over parts of this vocabulary; None: they are over all of it."""
        self._vocabulary = vocabulary
        self._parts, self._part = Parts(self.costs, vocabulary, self._has_copies), WHOLE

    def tell_copies(self, has_copies: bool) -> None:
        """Drafts may be written by copies of the layers in 8 bits; until this is told they may not."""
        self._has_copies = has_copies and self._may_copy
        self.tell_vocabulary(self._vocabulary)

    @property
    def reads_lookup(self) -> bool:
        """Whether rows may draft by lookup, as far as that pays, see `Reading`."""
        return self._finder is not None and self._reading.is_on(self._batch)

    @property
    def reads_ranks(self) -> bool:
        """Whether branches may be drafted beside what lookup finds."""
        return self._finder is not None and self._finder.branches and self._batch <= FEW

    @property
    def recycles(self) -> bool:
        """Whether what verification thought likely is kept."""
        return self._finder is not None and self._finder.recycles and self._batch <= FEW

    def seed_layers(self, row: RowState) -> tuple[int, ...]:
        """As many layers of a prompt as the row's output can pay for, spread over the depth, likely exits first."""
        self._joining += 1
        if not self._allowed or self._joining > 1 or self._batch > 1:
            return ()  # rounds tell a batch soon enough, and of what the model writes
        positions = min(SEED_POSITIONS, row.content_length - 1)
        budget = SEED_SHARE * row.room * self.costs.plain_round(1)
        could = self._could_pay(self._worth_of(max(1, self._batch), row.content_length // CONTEXT_STEP), HANDICAP)
        order = [layer for layer in _spread(self.costs.num_layers) if layer in could]
        count = len(order)
        while count and self.costs.seed(count, positions) > budget:
            count -= 1
        return tuple(sorted(order[:count]))

    def seed(self, row: RowState, shadow: Shadow) -> None:
        self.tracker.add_shadow(shadow)
        self._next = self._round

    def plan(self, rows: Sequence[RowState]) -> Plan:
        self._round += 1
        self._joining = 0
        if self._round >= self._next or len(rows) != self._batch:
            self._decide(rows)
        self._context = max([row.content_length for row in rows])
        read: Sequence[RowState] = ()
        if self._finder is not None and self._worth is not None:
            read = self._reading.begin(rows, self._worth, self._usual)
            found = self._finder.plan(read, self._worth, self._usual) if read else None
            if found is not None:
                return found
        if self._exit_layer is None and self._credit < 0 and self._round % CLOCK_EVERY:
            return self._idle
        if self._exit_layer is None:
            shadow = None if self._credit < 0 else self._shadow(None)
            return self._idle if shadow is None else Plan(None, self._idle.draft_lengths, shadow=shadow)
        lengths = tuple([min(self.most, row.room - 1) for row in rows])
        if not any(lengths):
            return self._idle
        shadow = None if self._credit < 0 else self._shadow(self._exit_layer)
        guesses = 0
        if read and self._cascades and self._finder is not None and self._worth is not None and self._batch == 1:
            guesses = self._worth.guesses(self._exit_layer, self._finder.chains[0])
        made = self._made
        if made is not None and shadow is None and made.draft_lengths == lengths and made.guesses == guesses:
            return made  # nothing else changes between decisions
        made = Plan(
            self._exit_layer,
            lengths,
            stop=self._stop,
            keep_confidence=True,
            shadow=shadow,
            second_choices=self._second_choices,
            guesses=guesses,
            draft_vocab=self._part.size,
            draft_bits=self._part.bits,
            speedup=self._speedup,
        )
        if shadow is None:
            self._made = made
        return made

    def observe(self, plan: Plan, outcomes: Sequence[RowOutcome], seconds: Seconds) -> None:
        if self._finder is not None:
            if self._reading.is_on(self._batch):
                self._finder.observe(plan, outcomes)
            self._count_lookup(plan, outcomes)
        if plan is self._idle and self._round % CLOCK_EVERY:  # the common case of a model that should not draft
            self._idle_rounds += 1
            self._credit += OFF_SHARE * max(0.0, seconds.verify)
            return
        emitted = 0
        for outcome in outcomes:
            emitted += outcome.num_emitted
            if plan.exit_layer and outcome.second is not None and self._second_rates is not None:
                self._second_rates.add(plan.exit_layer, outcome.confidences[outcome.num_accepted], outcome.second)
            if plan.exit_layer and outcome.num_judged:
                # What no draft could have picked says nothing of the layer: it is in the part's coverage.
                judged, accepted = outcome.num_judged - outcome.is_left_out, outcome.num_accepted
                hits = [True] * min(accepted, judged) + [False] * (judged - accepted)
                self.tracker.add(plan.exit_layer, hits, outcome.confidences[:judged])
            if outcome.shadow is not None:
                self.tracker.add_shadow(outcome.shadow)
                if plan.exit_layer is None:
                    self._next = self._round  # something to decide upon
        self.tracker.pass_time(emitted / max(1, len(outcomes)) + self._idle_rounds)
        if self._second_rates is not None:
            self._second_rates.pass_time(emitted / max(1, len(outcomes)))
        self._compare(plan, emitted, outcomes)
        self._decided.append(seconds.control)
        if self._round % LOOK_EVERY == 0:
            lengths, beside = ([*each] for each in zip(*[(o.num_drafted, o.num_beside) for o in outcomes], strict=True))
            beside = beside if any(beside) else []
            widths = outcomes[0].widths
            part = self._parts.share(plan.draft_vocab)
            copies = plan.draft_bits is not None
            expected = self.costs.stages(plan.exit_layer, lengths, self._context, beside, part, widths, copies)
            self._look_at_clock(expected, seconds, copies)
        self._idle_rounds = 0
        self._pay(plan, seconds)

    def _count_lookup(self, plan: Plan, outcomes: Sequence[RowOutcome]) -> None:
        """Tell what lookup saved in a round, by the table of costs."""
        if self._worth is None:
            return
        if plan.exit_layer is None:
            self._reading.pass_round(self._batch, self._worth.plain_seconds, 0.0)
        elif plan.exit_layer == LOOKUP:
            seconds = self._worth.lookups()
            took = seconds[min(sum([outcome.num_drafted for outcome in outcomes]), len(seconds) - 1)]
            came = sum([outcome.num_emitted for outcome in outcomes])
            self._reading.pass_round(self._batch, took, came / self._usual - took)
        else:
            longest = max([outcome.num_drafted for outcome in outcomes])
            self._reading.pass_round(self._batch, self._rounds[min(self.most, longest)], 0.0)

    def _compare(self, plan: Plan, emitted: int, outcomes: Sequence[RowOutcome]) -> None:
        """Set what came of a round beside what was forecast for the time that it takes by the table."""
        self._trust.pass_time(emitted / self._batch + self._idle_rounds)
        if plan.exit_layer:
            took = self._rounds[min(self.most, max([outcome.num_drafted for outcome in outcomes]))]
            self._trust.add(emitted / self._batch, self._rate * took / self._batch)

    def _pay(self, plan: Plan, seconds: Seconds) -> None:
        """Lay a share of the round's time by for shadow picks, and take out what they took."""
        spent = max(0.0, seconds.shadow)
        share = OFF_SHARE
        if plan.exit_layer is not None:
            share = (SHADOW_SHARE if self._batch == 1 else BATCH_SHARE)[self._round >= EARLY]
        self._credit += share * max(0.0, seconds.draft + seconds.verify + seconds.head) - spent
        self._credit = max(min(self._credit, self._most_credit), -10 * self._most_credit)  # a hiccup is forgiven

    def _decide(self, rows: Sequence[RowState]) -> None:
        """Choose the exit layer, and the chance of being all right below which a row's draft stops."""
        self._made = None
        num_rows, longest = len(rows), max([row.content_length for row in rows])
        if num_rows != self._batch:
            self._batch = num_rows
            self._idle = Plan(None, (0,) * num_rows, speedup=1.0)
        worth = self._worth_of(num_rows, longest // CONTEXT_STEP)
        right, share = self.tracker.estimates()
        worth.price(self._pick, (self._passes[0], self._passes[1]), self._deciding)
        self._usual = num_rows / worth.plain_seconds
        if not self._allowed:
            self._next = self._round + IDLE_ROUNDS
            return
        now = self._exit_layer
        parts = self._parts.now(any(row.has_processors for row in rows))
        chosen = choose(parts, self._allowed, worth, right, share, (self._part, now), STAY, self._favour)
        self._part, exit_layer, rates, drafted = chosen
        line = exit_layer - 1
        right_then, share_then = right[line].tolist(), share[line].tolist()
        by_bound = rates[line].tolist()
        rate = max(by_bound)
        trusted = self._trust.ratio * rate
        self._speedup = trusted * worth.plain_seconds / num_rows
        self._promising = self._could_pay(worth, max(HANDICAP, self._speedup))
        self._next = self._round + (EARLY_REPLAN if self._round < EARLY else REPLAN) * (1 + num_rows // 8)
        if self._speedup < (HANDICAP if now is None else OFF):
            self._exit_layer = None
            self._next = self._round + IDLE_ROUNDS
            return
        self._usual = trusted
        self._exit_layer, self._rate, self._rounds = exit_layer, rate, worth.rounds(exit_layer)
        self._length = float(drafted[line, by_bound.index(rate)])
        if self._part is not WHOLE:
            right_then = [chance * self._part.coverage for chance in right_then]
        self._acceptance = sum([chance * often for chance, often in zip(right_then, share_then, strict=True)])
        value = rate / max(self._acceptance, 1e-6)  # of a second, in chances of being right so far
        calibration = tuple(right_then)
        self._stop = SurvivalStop(calibration, value * worth.one_more(exit_layer, self._length))
        if self._second_rates is not None:
            second = self._second_rates.of(exit_layer)
            fixed, each = worth.beside(exit_layer, self._length)
            self._second_choices = SecondChoices(calibration, second, each * rate, MOST_BESIDE, fixed * rate / num_rows)

    def _worth_of(self, num_rows: int, step: int) -> Worth:
        if self._worth is None or self._worth_for[0] != num_rows:
            self._worth, self._worth_for = Worth(self.costs, num_rows), (num_rows, -1)
        if self._worth_for[1] != step:
            self._worth.move((step + 0.5) * CONTEXT_STEP)
            self._worth_for = (num_rows, step)
        return self._worth

    def _could_pay(self, worth: Worth, speedup: float) -> list[int]:
        """Exit layers of such a speedup if they were always right: looks at the others would be for nothing."""
        least = speedup * worth.num_rows / worth.plain_seconds
        could = (worth.limits() >= least).tolist()
        return [layer for layer in self._allowed if could[layer - 1]]

    def _shadow(self, exit_layer: int | None) -> ShadowPlan | None:
        """All layers that could pay, at a few rows in turn; only called when earlier rounds have paid for it."""
        layers = tuple(layer for layer in self._promising if layer != exit_layer)
        if not layers:
            return None
        columns = 1 if exit_layer is None else SHADOW_COLUMNS
        expected = 1 if exit_layer is None else 1 + math.ceil(self._length)
        rows, count = self._batch, 1
        most = min(rows, SHADOW_ROWS)
        while count < most and self.costs.shadow(len(layers), (count + 1) * expected) < self._credit:
            count += 1
        chosen = tuple(sorted((self._turn + i) % rows for i in range(count)))
        self._turn = (self._turn + count) % rows
        return ShadowPlan(layers, chosen, columns)

    def _look_at_clock(self, expected: Mapping[str, float], seconds: Seconds, copies: bool) -> None:
        """Learn what picks and deciding cost beside all else of their round, and early passes beside its verification.

        Parts of one round are set against each other only: what a round takes when others use the machine says nothing
        about other rounds.
        """
        layers = seconds.draft + seconds.verify + seconds.head
        pace = layers / (expected["draft"] + expected["verify"] + expected["head"])
        if layers > 0 and seconds.pick > 0 and expected["pick"] > 0:  # a clock that was set back says nothing
            ratio = min(max(seconds.pick / expected["pick"] / pace, 1.0), MOST_PICK)
            self._pick += PICK_STEP * (ratio - self._pick)
        decided, self._decided = sum(self._decided) / len(self._decided), []
        if layers > 0 and expected["draft"] > 0 and decided > 0:
            most = MOST_DECIDING * self.costs.plain_round(self._batch)
            self._deciding += DECIDING_STEP * (min(decided / pace, most) - self._deciding)
        if min(seconds.draft, seconds.verify, expected["draft"], expected["verify"]) > 0:
            ratio = seconds.draft / expected["draft"] / (seconds.verify / expected["verify"])
            self._passes[copies] += PASS_STEP * (min(max(ratio, 1 / MOST_PASS), MOST_PASS) - self._passes[copies])


def _favour(num_layers: int) -> Floats:
    """`[L - 1]`: models that were trained to leave early do so best near a quarter of the depth."""
    away = np.log(4 * np.arange(1, num_layers) / num_layers)
    return 1 + FAVOUR * np.exp(-(away**2) / FAVOUR_WIDTH)


def _spread(num_layers: int) -> list[int]:
    """All exit layers, those near a quarter of the depth first, then evenly outwards."""
    near = sorted(range(1, num_layers), key=lambda e: abs(math.log(4 * e / num_layers)))
    return near[::2] + near[1::2]
