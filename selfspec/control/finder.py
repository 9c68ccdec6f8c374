"""`Finder`, the part of `Adaptive` that drafts what is free to guess, where that promises more than any other round."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence

from selfspec.control.ease import Ease
from selfspec.control.fading import Passed
from selfspec.control.gate import GATE
from selfspec.control.growth import LEAST, Grown, Ranks, grow
from selfspec.control.lengths import TO_ASK, Lengths, Weighed, growing
from selfspec.control.matches import LONG, MOST_FOUND, Matches, choose
from selfspec.control.plan import DEFAULT_DRAFTS, LOOKUP, Looked, Plan, RowOutcome, RowState, Steady, TokenTree
from selfspec.control.reading import FEW, Hope
from selfspec.control.trust import Trust
from selfspec.control.worth import Worth

STRENGTHS = (3,)  # bounds between matches whose forecasts are trusted apart: those of weak ones are too good oftener
QUIET = 2  # rounds in a row in which a batch drafted nothing after a match, until it is taken to draft nothing
UNASKED = (0,) * GATE  # what is drafted by lookup where a row is asked about after long matches alone, by match
UNWATCHED = -1, 0, 0  # request, match and tokens of the single row that was watched in the last round
SURE = 0.97  # no chance of being right counts for more where it is asked whether a draft could pay at all
CIRCLES = (1.0,) * MOST_FOUND  # how likely a draft is right as far as each token, in text that repeats itself


class Finder:
    """Plans from what earlier guesses came to; every round that is told of tells it more, whoever drafted.

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
        self._vain = {0: QUIET}  # by match, of a batch: in how many rounds in a row nothing was drafted
        self.usual = 0.0  # tokens per second that the last round had to promise
        self._forecast = 0.0  # tokens of the round that was planned last, of all rows
        self._watched = UNWATCHED
        self._streak, self._streak_of = 0, -1  # drafts after long matches in a row that were right as a whole; of a row
        self.gives_way = False
        """Whether lookup would have drafted in that round, but layers are to show what they come to there."""
        self.chains: Sequence[Sequence[float]] = []
        """Of every row in the round that was planned last, see `chances`."""

    def plan(
        self,
        rows: Sequence[RowState],
        worth: Worth,
        usual: float,
        beside_layers: bool = False,
        only_long: bool = False,
    ) -> Plan | None:
        """Drafts of what is free; None where that promises less than is usual.

        Args:
            usual: tokens per second of all rows.
            beside_layers: whether that is what drafts by layers come to.
            only_long: whether rows are asked about after long matches alone.
        """
        matches, self._watched, self.gives_way = [row.match for row in rows], UNWATCHED, False
        if len(rows) == 1:
            return self._plan_one(rows[0], matches[0], worth, usual, beside_layers, only_long)
        found = self._plan(rows, matches, worth, usual, False)
        for match in {*matches}:
            self._vain[match] = 0 if found is not None and match else self._vain.get(match, 0) + 1
        return found

    def steady(
        self, rows: Sequence[RowState], beside_layers: bool, most: Steady, checks: Callable[[Sequence[float]], int]
    ) -> Steady:
        """For how many rounds after one that was just planned what is drafted depends on matches alone.

        Args:
            most: those that there may be.
            checks: how many guesses that are as likely an early pass checks, where they are not drafted.
        """
        guesses = rows[0].guesses
        if len(rows) > 1 or guesses is None:
            vain = [self._vain.get(match, 0) >= QUIET for match in range(max(self._vain) + 1)]
            return most._replace(lengths=(*[0 if is_vain else TO_ASK for is_vain in vain], TO_ASK))
        if guesses.is_stored or guesses.recalls:
            return Steady()
        most = most._replace(num_rounds=min(most.num_rounds, self._lengths.rounds_left()))
        return self._steady(self._lengths.all(), beside_layers, most, checks)

    def steady_after_long(self, beside_layers: bool, most: Steady, checks: Callable[[Sequence[float]], int]) -> Steady:
        """The same where a single row is asked about after long matches alone."""
        if self._lengths.after_long is None:
            return most._replace(lengths=(*UNASKED, TO_ASK))
        only = [*[Weighed(0)] * GATE, self._lengths.after_long]
        most = most._replace(num_rounds=min(most.num_rounds, self.watched_for))
        return self._steady(only, beside_layers, most, checks)

    def hopes(self, rows: Sequence[RowState]) -> Hope:
        """Whether rows will draft by lookup after a long match, as far as anybody has asked."""
        one, guesses = self._lengths.after_long, rows[0].guesses
        if one is None or len(rows) > 1 or (guesses is not None and (guesses.is_stored or guesses.recalls)):
            return Hope.SOME
        return Hope.SURE if one.length else Hope.SOME if one.may_branch else Hope.NONE

    def _steady(
        self,
        known: Sequence[Weighed],  # by match
        beside_layers: bool,
        most: Steady,
        checks: Callable[[Sequence[float]], int],
    ) -> Steady:
        lengths = [one.length for one in known]
        if beside_layers:
            for n, one in enumerate(known):
                is_wanted = one.length and self._ease.is_wanted(_strength(n), one.promised, one.usual)
                if is_wanted or (not one.length and checks(one.chances)):
                    lengths[n] = TO_ASK
        return most._replace(
            lengths=tuple(lengths),
            most_lookups=self._ease.rounds_left if beside_layers else most.most_lookups,
            branches=tuple([one.may_branch for one in known]),
            grown=known[-1].grown if lengths[-1] > 0 else (),
            streak=self._streak,
        )

    def _begin(self, row: RowState, worth: Worth, usual: float, beside_layers: bool, only_long: bool = False) -> None:
        """Have a single row's drafts weighed, if they were not lately."""
        told = row.request_id, usual, beside_layers
        self._lengths.begin(*told, lambda n: self._weigh(row.request_id, n, worth, usual, beside_layers), only_long)

    def _plan_one(
        self, row: RowState, match: int, worth: Worth, usual: float, beside_layers: bool, only_long: bool
    ) -> Plan | None:
        """The same of a single row, as it was weighed lately."""
        guesses = row.guesses
        if guesses is None or guesses.is_stored or guesses.recalls:
            return self._plan([row], [match], worth, usual, beside_layers)
        self._begin(row, worth, usual, beside_layers, only_long)
        known = self._lengths.after(match)
        if known.may_branch and guesses.first_candidates()[1]:
            return self._plan([row], [match], worth, usual, beside_layers)
        self.usual, self.chains = known.usual, [known.chances[: row.room - 1]]
        self._trust = self._trusts[bisect_right(STRENGTHS, match)]
        if row.request_id != self._streak_of:
            self._streak, self._streak_of = 0, row.request_id
        length = min(known.after(self._streak) if match >= LONG else known.length, row.room - 1)
        if length <= 0:
            return None
        if beside_layers and self._ease.is_wanted(_strength(match), known.promised, known.usual):
            self.gives_way = True
            return None
        self._ease.note(_strength(match))
        self._forecast = known.forecast if length == known.length else 0.0
        tokens = tuple(guesses.chain(length))
        tree = TokenTree(tokens, tuple(range(len(tokens))))
        return Plan(LOOKUP, (len(tokens),), trees=(tree,), speedup=known.promised * worth.plain_seconds)

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
        if trust.ratio * rate < usual:
            length = 0
        may_branch = self.branches and wrong * self.ranks.beside >= least
        grown = growing(length, choose([CIRCLES[: self._most]], seconds).lengths[0]) if match >= LONG else ()
        return Weighed(length, trust.ratio * rate, rate * seconds[length], usual, chances, may_branch, grown)

    def watch(self, row: RowState, worth: Worth, usual: float, beside_layers: bool = False) -> None:
        """A single row that is not asked about: how its match grew since it was watched last, if that was long, tells
        how far a draft would have been right; and after long ones it may be drafted. See `plan`."""
        request_id, match, length = self._watched
        came = row.content_length - length
        is_own = row.guesses is not None and not row.guesses.is_stored
        self._watched = row.request_id, row.match if is_own else 0, row.content_length
        if is_own and row.guesses is not None and not row.guesses.recalls:
            self._begin(row, worth, usual, beside_layers, only_long=True)
        if row.request_id != request_id or match < LONG or not is_own or not 0 < came < GATE:
            return
        goes_on = row.match >= min(match + came, GATE)  # of longer ones it is not told how long
        # Of one that ended nobody knows after which of the tokens.
        self.matches.add(Looked(match, came, came if goes_on else (came - 1) // 2), row.request_id)
        self.matches.keep_rows([row.request_id])

    @property
    def watched_for(self) -> int:
        """Rounds after this one for which what was weighed while it was watched is kept."""
        return self._lengths.rounds_left(only_long=True)

    def pass_watching(self) -> None:
        """Count a round in which a single row without a long match was to be watched."""
        self._lengths.pass_watching()

    def pass_time(self, tokens: float) -> None:
        """Let older observations fade by so many tokens per row that came of rounds which it is not told of."""
        self._passed.tokens += tokens
        self._streak = 0

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
        one = outcomes[0] if len(outcomes) == 1 else None
        is_right = one is not None and plan.exit_layer == LOOKUP and 0 < one.num_drafted == one.num_accepted
        is_long = one is not None and one.looked is not None and one.looked.match >= LONG
        self._streak = self._streak + 1 if is_right and is_long else 0
        if plan.exit_layer == LOOKUP and self._forecast:
            self._trust.add(tokens, self._forecast / max(1, len(outcomes)))


def _strength(match: int) -> int:
    """0 where nothing is found."""
    return 1 + bisect_right(STRENGTHS, match) if match else 0
