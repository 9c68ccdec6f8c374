"""`Decider`: what drafts are worth now, and what was decided by that; `Adaptive` says when to decide anew."""

from __future__ import annotations

from collections.abc import Sequence

from selfspec.control.choosing import Chooser
from selfspec.control.costs import Costs
from selfspec.control.decision import HANDICAP, OFF, Decision, decide
from selfspec.control.experience import Experience
from selfspec.control.kinds import BY_LAYERS, BY_LOOKUP
from selfspec.control.parts import Parts, Vocabulary
from selfspec.control.pieces import MOST
from selfspec.control.plan import Plan, ShadowPlan
from selfspec.control.rows import RowState
from selfspec.control.worth import Worth

# A batch's drafts that promise between the first two of these are tried for so many rounds and held against the clock
# before they are believed, once: tables of many tokens are measured in tight loops, and say least of long rounds.
# The first `COLD` rounds of a try find the caches as plain rounds left them, as plain ones do after drafts: their clock
# says nothing.
TRY, SURE, TRY_ROUNDS, COLD = 0.8, 1.15, 6, 3
# Where earlier calls held them against the clock, they are where they promise this much; and so they are in the place
# of every look at layers: all rows tell of the exit then, and their tokens count.
NEARLY = 0.92
# If they are as much better than promised as may be hoped, that has to make up for the try, which takes so many seconds
# of two decisions and of calls that end for them, beside its rounds.
TRYING = 2e-3
# Rows of a batch that go on in step end together, and apart once they draft: for each a call ends, another begins on
# cold caches, and those that are left take longer per token. In seconds and in plain rounds of all rows; and how many
# times as much drafts must promise for that, at most.
PARTING, PARTING_ROUNDS, MOST_PARTING = 1e-3, 0.5, 1.5
MOST_MADE = 8  # plans that are kept: the usual one, and those of rows that have room for less
CONTEXT_STEP = 64  # tokens by which rows grow until rounds are priced anew


class Decider:
    """Prices rounds by a machine's costs, and chooses by that and by what rounds have shown.

    Args:
        exit_layers: those to choose from.
        most: tokens that a row may draft.

    Attributes:
        decision: what holds now.
        worth: of the rows that were priced last; None: none were.
        num_rows: of these.
    """

    def __init__(self, costs: Costs, experience: Experience, exit_layers: Sequence[int], most: int = MOST) -> None:
        self._costs, self._experience, self._exit_layers, self._most = costs, experience, exit_layers, most
        self._chooser = Chooser(experience, exit_layers, costs.num_layers)
        self._has_copies = False
        self._vocabulary: Vocabulary | None = None
        self._parts = Parts(costs)  # ways of drafting
        self.worth: Worth | None = None
        self._worth_for = (0, 0)  # rows, and steps of context
        self.num_rows = 0
        self.decision = Decision()
        self._made: dict[tuple[int, ...], Plan] = {}  # by what was decided, by lengths
        self._promising: Sequence[int] | None = None  # layers worth leaving at if they were always right; None: unknown
        # How many times as much drafts must promise for rows to end apart that would end together.
        self._parting = 1.0
        self._tried: set[int] = set()  # bit lengths of batches' sizes

    def tell_vocabulary(self, vocabulary: Vocabulary | None) -> bool:
        """Drafts may be over parts of this vocabulary; None: they are over all of it. Whether that is new."""
        is_new = vocabulary is not self._vocabulary
        if is_new:
            self._vocabulary = vocabulary
            self._draft_anew()
        return is_new

    def tell_copies(self, has_copies: bool) -> bool:
        """Drafts may be written by copies of the layers in 4 bits, or not. Whether that is new."""
        is_new = has_copies != self._has_copies
        if is_new:
            self._has_copies, self.worth = has_copies, None
            self._draft_anew()
        return is_new

    def _draft_anew(self) -> None:
        self._made, self._promising = {}, None
        self._parts = Parts(self._costs, self._vocabulary, self._has_copies)

    def share(self, draft_vocab: int | None) -> float:
        """Of the vocabulary, that a draft is over."""
        return self._parts.share(draft_vocab)

    def worth_of(self, num_rows: int, context: float) -> Worth:
        """Of so many rows, of so many tokens each."""
        step = int(context) // CONTEXT_STEP
        if self.worth is None or self._worth_for[0] != num_rows:
            self.worth, self._worth_for = Worth(self._costs, num_rows, copies=self._has_copies), (num_rows, -1)
        if self._worth_for[1] != step:
            self.worth.move((step + 0.5) * CONTEXT_STEP)
            self._worth_for = (num_rows, step)
        return self.worth

    def price(self, rows: Sequence[RowState]) -> tuple[Worth, float]:
        """Price the rounds of these rows as the clock told; and the seconds that deciding takes."""
        self.num_rows, pace, self._promising = len(rows), self._experience.pace, None
        worth = self.worth_of(self.num_rows, self._costs.context_of([row.content_length for row in rows]))
        lookups, deciding = pace.kinds.ratio(BY_LOOKUP, self.num_rows), pace.deciding_of(self.num_rows)
        around = deciding + pace.around_of(self.num_rows)
        worth.price(pace.pick, (pace.passes[0], pace.passes[1]), around, lookups)
        return worth, deciding

    def be_plain(self) -> None:
        """Decide that nothing is drafted by layers."""
        assert self.worth is not None
        self._hold(Decision(self.num_rows / self.worth.plain_seconds))

    def _hold(self, decision: Decision) -> None:
        """From now on, and what comes of it is held against what it promises."""
        self.decision, self._made = decision, {}
        if decision.exit_layer is not None:
            rounds = decision.rounds[: self._most + 1]
            self._experience.expect(decision.exit_layer, decision.rate / self.num_rows, rounds, decision.covered)

    def decide(self, is_whole: bool, seconds_left: float, in_step: int = 0) -> bool:
        """Choose the exit layer, and the chance of being all right below which a row's draft stops.

        Args:
            is_whole: whether drafts must be by the layers themselves, over the whole vocabulary.
            seconds_left: that the rows will take, if they are decoded plainly.
            in_step: rows that would then end with another one, of each such group all but one.

        Returns:
            Whether that is only tried, for `TRY_ROUNDS`.
        """
        assert self.worth is not None
        if 2 * in_step < self.num_rows:  # rows that are apart have as much room as another one by chance
            in_step = 0
        apart = in_step * (PARTING + PARTING_ROUNDS * self.worth.plain_seconds)
        self._parting = seconds_left / max(seconds_left - apart, seconds_left / MOST_PARTING) if apart else 1.0
        self.decision = self._decided(is_whole, HANDICAP if self.decision.exit_layer is None else OFF)
        is_tried = self._is_worth_a_try(seconds_left)
        self._hold(self._decided(is_whole, TRY) if is_tried else self.decision)
        return is_tried

    def _decided(self, is_whole: bool, least: float) -> Decision:
        """See `control.decision.decide`; `least` is of rows that end apart."""
        assert self.worth is not None
        parts, least = self._parts.now(is_whole), least * self._parting
        return decide(self.decision, self.worth, parts, self._chooser, self._experience, least)

    def note_tried(self) -> None:
        """Such a try has told something: rows that joined meanwhile did not end it before."""
        self._tried.add(self.num_rows.bit_length())

    def try_again(self, is_whole: bool) -> bool:
        """Try a batch's drafts that promise nearly as much as plain rounds, for `TRY_ROUNDS`; whether they do.

        Args:
            is_whole: see `decide`.
        """
        if self.num_rows == 1 or self.worth is None or self.decision.exit_layer is not None:
            return False
        if self.decision.speedup < NEARLY * self._parting or not self._exit_layers:
            return False
        self._hold(self._decided(is_whole, NEARLY))
        return self.decision.exit_layer is not None

    @property
    def lost_by_trying(self) -> float:
        """Seconds that such a try is expected to take longer than plain rounds for the same tokens."""
        assert self.worth is not None
        return TRY_ROUNDS * self.worth.plain_seconds * max(0.0, 1 / self.decision.speedup - 1)

    def _is_worth_a_try(self, seconds_left: float) -> bool:
        """Whether a batch's drafts, which promise about as much as plain rounds, are to be held against the clock."""
        known, speedup = self._experience.pace.kinds.has_compared(BY_LAYERS, self.num_rows), self.decision.speedup
        least, most = (NEARLY, HANDICAP) if known else (TRY, SURE)
        least, most = least * self._parting, most * self._parting
        if not least <= speedup < most or self.num_rows == 1 or self.num_rows.bit_length() in self._tried:
            return False
        return (1 - least / speedup) * seconds_left >= self.lost_by_trying + TRYING

    def usual(self, num_rows: int) -> float:
        """Tokens per second of all rows without lookups, where a few have left or joined since that was decided."""
        return self.decision.usual * num_rows / self.num_rows

    def could_pay(self, worth: Worth, speedup: float) -> list[int]:
        """Exit layers of such a speedup if they were always right: looks at the others would be for nothing."""
        slower = self._experience.pace.kinds.ratio(BY_LAYERS, worth.num_rows)
        least = slower * speedup * worth.num_rows / worth.plain_seconds
        limits = worth.limits()
        return [layer for layer in self._exit_layers if limits[layer - 1] >= least]

    def layers_to_see(self) -> tuple[int, ...]:
        """Those that could pay, but the one that drafts, which shows itself; others only once something was decided."""
        if self._promising is None:
            assert self.worth is not None
            self._promising = self.could_pay(self.worth, max(HANDICAP, self.decision.speedup))
        return tuple([layer for layer in self._promising if layer != self.decision.exit_layer])

    def plan(self, draft_lengths: tuple[int, ...], shadow: ShadowPlan | None) -> Plan:
        """A round as was decided, of rows that draft so many tokens each, at most."""
        if shadow is not None:
            return self.decision.plan(draft_lengths, shadow)
        made = self._made.get(draft_lengths)
        if made is None:
            if len(self._made) >= MOST_MADE:
                self._made.clear()
            made = self._made[draft_lengths] = self.decision.plan(draft_lengths, None)
        return made
