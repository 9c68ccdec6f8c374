"""`Finder`, the part of `Adaptive` that drafts what is free to guess, where that promises more than any other round.

A single row that has its own text alone to look in is followed by a table: how long a draft is after how long a match.
What the row's index tells of every token that came is all that needs, so that nobody asks in between, and what never
pays costs a look at the table now and then. Batches, corpora and recycled candidates are asked about round by round.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence

from selfspec.control.ease import Ease
from selfspec.control.fading import Passed
from selfspec.control.growth import LEAST, Grown, Ranks, grow
from selfspec.control.lengths import SHORTEST, TO_ASK, Lengths, Weighed, growing
from selfspec.control.matches import LONG, MOST_FOUND, Matches, choose
from selfspec.control.plan import DEFAULT_DRAFTS, LOOKUP, Looked, Plan, RowOutcome, RowState, Steady, TokenTree
from selfspec.control.reading import FEW, may_interrupt
from selfspec.control.trust import Trust
from selfspec.control.worth import Worth

STRENGTHS = (3,)  # bounds between matches whose forecasts are trusted apart: those of weak ones are too good oftener
QUIET = 2  # rounds in a row in which a batch drafted nothing after a match, until it is taken to draft nothing
SURE = 0.97  # no chance of being right counts for more where it is asked whether a draft could pay at all
CIRCLES = (1.0,) * MOST_FOUND  # how likely a draft is right as far as each token, in text that repeats itself
PLAN_SECONDS = 4e-5  # that the interpreter takes for a round by lookup among others, beyond one that is as those before
Checks = Callable[[Sequence[float]], int]  # how many guesses that are as likely an early pass checks


class Finder:
    """Plans from what earlier guesses came to.

    Args:
        most: longest draft; default: as long as it pays.
        drafts: of "lookup", "recycle" and "tree", those to use.
    """

    def __init__(self, most: int | None = None, drafts: Sequence[str] = DEFAULT_DRAFTS) -> None:
        self._passed = passed = Passed()
        self.matches, self.stored, self.ranks = Matches(passed), Matches(passed), Ranks(passed)
        self._looks_up, self.recycles = "lookup" in drafts, "recycle" in drafts
        self.branches = "tree" in drafts or self.recycles
        self._is_tree = "tree" in drafts
        self._most = MOST_FOUND if most is None else min(most, MOST_FOUND)
        self._trusts = [Trust(passed) for _ in range(len(STRENGTHS) + 1)]  # by the longest match of the rows
        self._trust = self._trusts[0]  # of the round that was planned last
        self._ease = Ease(len(STRENGTHS) + 2, passed)  # the first: nothing is found
        self._lengths = Lengths()
        self._quiet: dict[int, bool] = {}  # by match, as far as anybody asked: see `is_quiet`
        self._match = 0  # of the row that is followed, before the round that was planned last
        self._streak, self._streak_of = 0, -1  # drafts after long matches in a row that were right as a whole; of a row
        self._vain = {0: QUIET}  # by match, of a batch: in how many rounds in a row nothing was drafted
        self.usual = 0.0  # tokens per second that the last round had to promise
        self._forecast = 0.0  # tokens of the round that was planned last, of all rows
        self.gives_way = False
        """Whether lookup would have drafted in that round, but layers are to show what they come to there."""
        self.chains: Sequence[Sequence[float]] = []
        """Of every row in the round that was planned last, see `chances`."""
        self.wants_looks = False
        """Whether it is to be told what guesses came to in that round: where drafts may branch."""

    # ---------------------------------------------------------------------------------------- a row that is followed

    def follow(self, row: RowState, worth: Worth, usual: float, beside_layers: bool) -> Plan | None:
        """Plan a round of a single row with guesses from its own text alone; None where that promises less than usual.

        Args:
            usual: tokens per second.
            beside_layers: whether that is what drafts by layers come to.
        """
        guesses = row.guesses
        assert guesses is not None
        match = self._match = row.match
        self.gives_way = self.wants_looks = False
        if self._lengths.is_due(row.request_id, usual, beside_layers, worth.plain_seconds):
            self._weigh_all(row, worth, usual, beside_layers)
        known = self._lengths.after(match)
        if known.may_branch and guesses.first_candidates()[1]:
            self.wants_looks = True
            return self._plan([row], [match], worth, usual, beside_layers)
        self.usual, self.chains = known.usual, [known.chances[: row.room - 1]]
        self._trust = self._trusts[bisect_right(STRENGTHS, match)]
        length = min(known.after(self._streak) if match >= LONG else known.length, row.room - 1)
        if length <= 0:
            return None
        if beside_layers and self._ease.is_wanted(_strength(match), known.promised, known.usual):
            self.gives_way = True
            return None
        self._ease.note(_strength(match))
        self._lengths.note()
        self._forecast = known.forecast if length == known.length else 0.0
        tokens = tuple(guesses.chain(length))
        tree = TokenTree(tokens, tuple(range(len(tokens))))
        return Plan(LOOKUP, (len(tokens),), trees=(tree,), speedup=known.promised * worth.plain_seconds)

    def is_quiet(self, match: int, checks: Checks) -> bool:
        """Whether nothing comes of such a match of the row that is followed, as long as what was weighed is kept."""
        known = self._quiet.get(match)
        if known is None:
            one = self._lengths.after(match)
            known = self._quiet[match] = not (one.length or one.may_branch or checks(one.chances))
        return known

    def pass_quiet(self, match: int) -> None:
        """A round of the row that is followed was planned as the one before, since such a match is quiet."""
        self._match = match
        self._lengths.pass_rounds()

    @property
    def rounds_left(self) -> int:
        """Rounds of it after this one for which what was weighed is kept."""
        return self._lengths.rounds_left

    def follows_steadily(self, beside_layers: bool, most: Steady, checks: Checks) -> Steady:
        """For how many rounds after one that was just planned what is drafted depends on matches alone.

        Args:
            most: those that there may be.
        """
        known, most_lookups = self._lengths.all(), most.most_lookups
        lengths = [one.length for one in known]
        if beside_layers:
            most_lookups = self._ease.rounds_left
            for n, one in enumerate(known):
                is_wanted = one.length and self._ease.is_wanted(_strength(n), one.promised, one.usual)
                if is_wanted or (not one.length and checks(one.chances)):
                    lengths[n] = TO_ASK
        return most._replace(
            num_rounds=min(most.num_rounds, self.rounds_left),
            lengths=tuple(lengths),
            most_lookups=most_lookups,
            branches=tuple([one.may_branch for one in known]),
            grown=known[-1].grown if lengths[-1] > 0 else (),
            streak=self._streak,
        )

    def learn(self, plan: Plan, outcome: RowOutcome, forecast: float = 0.0) -> None:
        """What came of a round of the row that is followed.

        Args:
            forecast: tokens that it was to bring, if layers drafted.
        """
        emitted, looked = outcome.num_emitted, outcome.looked
        is_found, is_right = plan.exit_layer == LOOKUP, 0 < outcome.num_drafted == outcome.num_accepted
        if is_found and looked is None:
            looked = Looked(self._match, emitted, outcome.num_accepted)
        if looked is not None and looked.match:
            self.matches.add(looked, outcome.request_id, is_tallied=True)
        if looked is not None and looked.ranks:
            self.ranks.add(looked.ranks)
        if forecast:
            self._ease.add(_strength(self._match), emitted, forecast)
        self.matches.keep_rows([outcome.request_id])
        self._passed.tokens += emitted
        self._streak = self._streak + 1 if is_found and is_right and self._match >= LONG else 0
        if is_found and self._forecast:
            self._trust.add(emitted, self._forecast)

    def _weigh_all(self, row: RowState, worth: Worth, usual: float, beside_layers: bool) -> None:
        assert row.guesses is not None
        if row.request_id != self._streak_of:
            self._streak, self._streak_of = 0, row.request_id
        self.matches.take(row.guesses.take_tally(), row.request_id)
        self._lengths.keep([self._weigh(row.request_id, n, worth, usual, beside_layers) for n in SHORTEST])
        self._quiet.clear()

    def _weigh(self, request_id: int, match: int, worth: Worth, usual: float, beside_layers: bool) -> Weighed:
        """What a row drafts after such a match in its own text."""
        if beside_layers:
            usual *= self._ease.ratio(_strength(match))
        if not match:
            return Weighed(0, usual=usual)
        self._trust = trust = self._trusts[bisect_right(STRENGTHS, match)]
        seconds = worth.lookups()
        # Where it does not pay to verify them, layers may yet check a few.
        count = 1 if worth.by_copies or not beside_layers else self._most
        chances = self.matches.survivals(match, request_id, most=count) if self._looks_up else []
        if not self._could_pay([chances], seconds, usual, self.branches):
            return Weighed(0, usual=usual, chances=chances)
        if count < self._most and chances:
            chances = self.matches.survivals(match, request_id, most=self._most)
        wrong = 1 - chances[0] if chances else 1.0
        least = max(LEAST, usual * worth.least_lookup / trust.ratio)
        (length,), rate = choose([chances], seconds)
        promised = trust.ratio * rate * seconds[length] / (seconds[length] + PLAN_SECONDS)
        if promised < usual:
            length = 0
        may_branch = self.branches and may_interrupt(worth) and wrong * self.ranks.beside >= least
        grown = growing(length, choose([CIRCLES[: self._most]], seconds).lengths[0]) if match >= LONG else ()
        return Weighed(length, promised, rate * seconds[length], usual, chances, may_branch, grown)

    # ----------------------------------------------------------------------------------- rows that are asked about

    def plan(self, rows: Sequence[RowState], worth: Worth, usual: float, beside_layers: bool = False) -> Plan | None:
        """Drafts of what is free; None where that promises less than is usual.

        Args:
            usual: tokens per second of all rows.
            beside_layers: whether that is what drafts by layers come to.
        """
        matches, self.gives_way = [row.match for row in rows], False
        found = self._plan(rows, matches, worth, usual, beside_layers)
        for match in {*matches}:
            self._vain[match] = 0 if found is not None and match else self._vain.get(match, 0) + 1
        return found

    def steady(self, rows: Sequence[RowState], most: Steady) -> Steady:
        """How many rounds after one that was just planned are likely to draft nothing, if matches are as short.

        Args:
            most: those that there may be.
        """
        if len(rows) == 1:
            return Steady()
        vain = [self._vain.get(match, 0) >= QUIET for match in range(max(self._vain) + 1)]
        return most._replace(lengths=(*[0 if is_vain else TO_ASK for is_vain in vain], TO_ASK))

    def _plan(
        self, rows: Sequence[RowState], matches: Sequence[int], worth: Worth, usual: float, beside_layers: bool
    ) -> Plan | None:
        branches, is_small = self.branches and len(rows) <= FEW, len(rows) <= FEW
        longest = max(matches)
        compares = beside_layers and len(rows) == 1
        if compares:
            usual *= self._ease.ratio(_strength(longest))
        self.usual = usual
        if not longest and not (branches and any(row.guesses is not None and row.guesses.recalls for row in rows)):
            self.chains = [[]] * len(rows)
            return None
        seconds = worth.lookups()
        # A token less likely than this lowers the rate of any round of a batch that is worth it.
        least = 0.0 if is_small else usual * worth.least_lookup
        self.chains = chains = [self.chances(row, match, least) for row, match in zip(rows, matches, strict=True)]
        self._trust = self._trusts[bisect_right(STRENGTHS, longest)]
        if not self._could_pay(chains, seconds, usual, branches):
            return None
        # No tree or chain that is worth a round has a token less likely than this.
        least = max(LEAST, usual * worth.least_lookup / self._trust.ratio) if branches else 1.0
        grown = [self._grow(row, one, least) if branches else None for row, one in zip(rows, chains, strict=True)]
        offers = [
            chances if one is None else [one.chances[node] for node in one.order][: min(self._most, row.room - 1)]
            for row, chances, one in zip(rows, chains, grown, strict=True)
        ]
        if not any(offers):
            return None
        lengths, rate = choose(offers, seconds)
        trusted = self._trust.ratio * rate
        if not any(lengths) or trusted < usual:
            return None
        if compares and self._ease.is_wanted(_strength(longest), trusted, usual):
            self.gives_way = True
            return None
        self._ease.note(_strength(longest))
        self._forecast = rate * seconds[sum(lengths)]
        trees: list[TokenTree | None] = [None] * len(rows)
        for i, (row, one, length) in enumerate(zip(rows, grown, lengths, strict=True)):
            if one is not None:
                trees[i] = one.best(length)
            elif length and row.guesses is not None:
                tokens = tuple(row.guesses.chain(length))
                trees[i] = TokenTree(tokens, tuple(range(len(tokens))))
        lengths = [0 if tree is None else len(tree.tokens) for tree in trees]
        speedup = trusted * worth.plain_seconds / len(rows)
        return Plan(LOOKUP, tuple(lengths), trees=tuple(trees), speedup=speedup)

    def pass_time(self, tokens: float) -> None:
        """Let older observations fade by so many tokens per row that came of rounds which it is not told of."""
        self._passed.tokens += tokens
        self._streak = 0

    def pass_plain(self, num_rounds: int) -> None:
        """Count plain rounds that nobody asked about."""
        self.pass_time(num_rounds)
        self._lengths.pass_rounds(num_rounds)

    def chances(self, row: RowState, match: int, least: float = 0.0) -> list[float]:
        """Of the chain of a row to be right as far as each token; those less likely than `least` are left out."""
        guesses = row.guesses
        if guesses is None or not self._looks_up or match == 0:
            return []
        most = min(self._most, row.room - 1)
        if not guesses.is_stored:
            return self.matches.survivals(match, row.request_id, least)[:most]
        chances = self.stored.survivals(match, row.request_id, least)[:most]
        return chances[: len(guesses.chain(len(chances)))]  # a document may end before

    def _could_pay(
        self, chains: Sequence[Sequence[float]], seconds: Sequence[float], usual: float, branches: bool
    ) -> bool:
        """Whether drafts could promise enough if every token were as likely as the first."""
        firsts = [chances[0] if chances else 0.0 for chances in chains]
        enough, ratio = usual * seconds[1], self._trust.ratio
        if ratio * sum([1 / (1 - min(first, SURE)) for first in firsts]) > enough and max(firsts) > 0:
            return True
        if not branches:
            return False
        likely = self.ranks.likeliest(self._is_tree)
        return likely > 0 and ratio * sum([1 / (1 - min(max(first, likely), SURE)) for first in firsts]) > enough

    def _grow(self, row: RowState, chances: Sequence[float], least: float) -> Grown | None:
        """A tree or chain for a row; None where the chain alone will do, since the others are less likely than `least`.

        Unless candidates are recalled, there are none but for the next token.
        """
        if row.guesses is None:
            return None
        if not row.guesses.recalls:
            if chances and (1 - chances[0]) * self.ranks.beside < least:
                return None
            if not row.guesses.first_candidates()[1]:
                return None
        grown = grow(row.guesses, chances, self.ranks.rates, self._is_tree)
        return grown if len(grown.chances) > len(chances) else None

    def observe(self, plan: Plan, outcomes: Sequence[RowOutcome], forecast: float = 0.0) -> None:
        """Set what came of a round beside what would have been guessed, and beside what it promised.

        Args:
            forecast: tokens that a round of a single row was to bring, which layers drafted in.
        """
        emitted = 0
        for outcome in outcomes:
            emitted += outcome.num_emitted
            looked = outcome.looked
            if looked is None:
                continue
            if looked.match:
                (self.stored if looked.is_stored else self.matches).add(looked, outcome.request_id)
            if looked.ranks:
                self.ranks.add(looked.ranks)
        if forecast and outcomes[0].looked is not None:
            self._ease.add(_strength(outcomes[0].looked.match), emitted, forecast)
        alive = [outcome.request_id for outcome in outcomes]
        self.matches.keep_rows(alive)
        self.stored.keep_rows(alive)
        tokens = emitted / max(1, len(outcomes))
        self._passed.tokens += tokens
        self._streak = 0
        if plan.exit_layer == LOOKUP:
            self._trust.add(tokens, self._forecast / max(1, len(outcomes)))


def _strength(match: int) -> int:
    """0 where nothing is found."""
    return 1 + bisect_right(STRENGTHS, match) if match else 0
