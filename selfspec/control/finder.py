"""`Finder`, the part of `Adaptive` that drafts what is free to guess, where that promises more than any other round.

Corpora are asked about round by round; rows with their own texts alone to look in are followed by tables instead, see
`Follower` and `Crowd`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from selfspec.control.fading import Passed
from selfspec.control.growth import LEAST, Grown, Ranks, grow
from selfspec.control.lengths import TO_ASK
from selfspec.control.matches import MOST_FOUND, Matches, choose
from selfspec.control.plan import DRAFTS, LOOKUP, Plan, Steady, TokenTree
from selfspec.control.reading import FEW
from selfspec.control.rows import RowOutcome, RowState
from selfspec.control.trust import Trust
from selfspec.control.worth import Worth

STRENGTHS = (3,)  # bounds between matches whose forecasts are trusted apart: those of weak ones are too good oftener
QUIET = 2  # rounds in a row in which a batch drafted nothing after a match, until it is taken to draft nothing
SURE = 0.97  # no chance of being right counts for more where it is asked whether a draft could pay at all


class Finder:
    """Plans from what earlier guesses came to.

    Args:
        most: longest draft; default: as long as it pays.
        drafts: of "lookup" and "tree", those to use.
    """

    def __init__(self, most: int | None = None, drafts: Sequence[str] = DRAFTS) -> None:
        self.passed = passed = Passed()
        """Time, that all it knows fades by."""
        self.matches, self.stored, self.ranks = Matches(passed), Matches(passed), Ranks(passed)
        self.looks_up, self.branches = "lookup" in drafts, "tree" in drafts
        self.most = MOST_FOUND if most is None else min(most, MOST_FOUND)
        self._trusts = [Trust(passed) for _ in range(len(STRENGTHS) + 1)]  # by the longest match of the rows
        self._trust = self._trusts[0]  # of the round that was planned last
        self._vain = {0: QUIET}  # by match, of a batch: in how many rounds in a row nothing was drafted
        self.forecast = 0.0
        """Tokens of the round that was planned last, of all rows."""

    def forget_rows(self) -> None:
        """No row is known any more."""
        self.matches.keep_rows(())
        self.stored.keep_rows(())

    def plan(self, rows: Sequence[RowState], worth: Worth, usual: float) -> Plan | None:
        """Drafts of what is free; None where that promises less than is usual.

        Args:
            usual: tokens per second of all rows.
        """
        matches = [row.match for row in rows]
        found = self.plan_by_guesses(rows, matches, worth, usual)
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

    def plan_by_guesses(
        self, rows: Sequence[RowState], matches: Sequence[int], worth: Worth, usual: float
    ) -> Plan | None:
        """The same of rows whose matches are known."""
        branches, is_small = self.branches and len(rows) <= FEW, len(rows) <= FEW
        longest = max(matches)
        if not longest:
            return None
        seconds = worth.lookups()
        # A token less likely than this lowers the rate of any round of a batch that is worth it.
        least = 0.0 if is_small else usual * worth.least_lookup
        chains = [self.chances(row, match, least) for row, match in zip(rows, matches, strict=True)]
        self._trust = self.trust_after(longest)
        if not self.could_pay(chains, seconds, usual, branches):
            return None
        # No tree or chain that is worth a round has a token less likely than this.
        least = max(LEAST, usual * worth.least_lookup / self._trust.ratio) if branches else 1.0
        grown = [self._grow(row, one, least) if branches else None for row, one in zip(rows, chains, strict=True)]
        offers = [
            chances if one is None else [one.chances[node] for node in one.order][: min(self.most, row.room - 1)]
            for row, chances, one in zip(rows, chains, grown, strict=True)
        ]
        if not any(offers):
            return None
        lengths, rate = choose(offers, seconds)
        trusted = self._trust.ratio * rate
        if not any(lengths) or trusted < usual:
            return None
        self.forecast = rate * seconds[sum(lengths)]
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

    def trust_after(self, match: int) -> Trust:
        """How far forecasts came true after matches as long as that."""
        return self._trusts[bisect_right(STRENGTHS, match)]

    def pass_time(self, tokens: float) -> None:
        """Let older observations fade by so many tokens per row that came of rounds which it is not told of."""
        self.passed.tokens += tokens

    def chances(self, row: RowState, match: int, least: float = 0.0) -> list[float]:
        """Of the chain of a row to be right as far as each token; those less likely than `least` are left out."""
        guesses = row.guesses
        if guesses is None or not self.looks_up or match == 0:
            return []
        most = min(self.most, row.room - 1)
        if not guesses.is_stored:
            return self.matches.survivals(match, row.request_id, least)[:most]
        chances = self.stored.survivals(match, row.request_id, least)[:most]
        return chances[: len(guesses.chain(len(chances)))]  # a document may end before

    def could_pay(
        self,
        chains: Sequence[Sequence[float]],
        seconds: Sequence[float],
        usual: float,
        branches: bool,
        trust: Trust | None = None,
    ) -> bool:
        """Whether drafts could promise enough if every token of a chain were as likely as its first.

        Args:
            trust: in that; default: of the round that is planned.
        """
        firsts = [chances[0] if chances else 0.0 for chances in chains]
        ratio = (self._trust if trust is None else trust).ratio
        beside = sum(self.ranks.rates) if branches else 0.0
        hoped = [1 / (1 - min(first, SURE)) + (1 - first) * beside if first else 1.0 for first in firsts]
        return max(firsts) > 0 and ratio * sum(hoped) > usual * seconds[1]

    def _grow(self, row: RowState, chances: Sequence[float], least: float) -> Grown | None:
        """A tree for a row; None where the chain alone will do, since all others are less likely than `least`."""
        if row.guesses is None or not chances or (1 - chances[0]) * self.ranks.rates[0] < least:
            return None
        grown = grow(row.guesses, chances, self.ranks.rates)
        return grown if len(grown.chances) > len(chances) else None

    def observe(self, plan: Plan, outcomes: Sequence[RowOutcome]) -> None:
        """Set what came of a round beside what would have been guessed, and beside what it promised."""
        emitted = 0
        for outcome in outcomes:
            emitted += outcome.num_emitted
            looked = outcome.looked
            if looked is None:
                continue
            if looked.match:
                (self.stored if looked.is_stored else self.matches).add(looked, outcome.request_id)
            if looked.rank is not None:
                self.ranks.add(looked.rank)
        alive = [outcome.request_id for outcome in outcomes]
        self.matches.keep_rows(alive)
        self.stored.keep_rows(alive)
        tokens = emitted / max(1, len(outcomes))
        self.passed.tokens += tokens
        if plan.exit_layer == LOOKUP:
            self._trust.add(tokens, self.forecast / max(1, len(outcomes)))
