"""`Ahead`: rounds that were decoded in one call with the one before, and wait for their turn.

What a round comes to depends on its rows and its plan alone, and its tokens not even on that. So where the policy is
likely to plan some rounds alike they may be decoded at once, and are then taken one by one: planned, told of and handed
out as if each had just been decoded. If something else is planned after all, or other rows are there, what is left is
forgotten, and its keys and values are overwritten as those of wrong drafts are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from selfspec.control.laps import Seconds
from selfspec.control.plan import LOOKUP, Plan, Steady, TokenTree
from selfspec.decoding.choose import STAGES
from selfspec.decoding.row import Row
from selfspec.decoding.verdict import Verdict
from selfspec.drafting.compiled_lookup import CompiledLookup
from selfspec.target.compiled_round import most_rounds
from selfspec.target.draft_head import Part
from selfspec.target.round_room import Done, Further

NEVER = Steady().most_surprises
BURST = 1 / 30  # seconds after which no further round begins: what is streamed still seems to flow


class Coming(NamedTuple):
    """A round that waits."""

    verdicts: list[Verdict]
    steps: list[float]  # seconds, see `Done`; the same of `taken`
    taken: list[float]
    found: list[list[int]] | None  # what every row drafted, if anything, by lookup; None: layers drafted
    stages: tuple[float, float, float, float]  # the same seconds, added up: draft, verify, head and pick

    @classmethod
    def of(
        cls, verdicts: list[Verdict], steps: list[float], taken: list[float], found: list[list[int]] | None
    ) -> Coming:
        fed, verify, head, pick = taken
        if found is not None:
            fed = 0.0
        if steps:
            fed, head, pick = fed + sum(steps[::3]), head + sum(steps[1::3]), pick + sum(steps[2::3])
        return cls(verdicts, steps, taken, found, (fed, verify, head, pick))

    @property
    def parts(self) -> list[tuple[str, float]]:
        """Its seconds by stage, one after another."""
        fed, *judged = self.taken
        steps = [(STAGES[i % 3], taken) for i, taken in enumerate(self.steps)]
        early = [("draft", fed)] if self.found is None else []
        return [*steps, *early, *zip(("verify", "head", "pick"), judged, strict=True)]


class Ahead:
    """The rounds of an engine's rows that wait, oldest first.

    Args:
        burst: seconds of them after which no further one begins; None: `BURST`.
    """

    def __init__(self, burst: float | None = None) -> None:
        self._burst = burst
        self._coming: deque[Coming] = deque()
        self.usual = Plan(None, ())
        """The plan of all of them that are not drafted by lookup, or of those that may come."""
        self._part: Part | None = None  # of the vocabulary, that they are drafted over
        self._rows: list[tuple[int, int]] = []  # (request, tokens) of those that the next one is of
        self._steady, self._reads_lookup = Steady(), False
        self._lost = 0.0

    def __len__(self) -> int:
        return len(self._coming)

    @property
    def coming(self) -> Sequence[Coming]:
        """Those that wait."""
        return tuple(self._coming)

    def forget(self) -> None:
        """Rows left that these were of, or they are planned in another way."""
        self._lost += sum([sum(one.stages) for one in self._coming])
        self._coming.clear()

    def lost(self) -> float:
        """Seconds of all that was forgotten since this was last asked."""
        lost, self._lost = self._lost, 0.0
        return lost

    def take(self, rows: Sequence[Row], plan: Plan, part: Part | None, seconds: Seconds) -> list[Verdict] | None:
        """What the next round of these rows came to by this plan, if it is there; else nothing is left to wait.

        Args:
            part: of the vocabulary, that it drafts over.
        """
        if not self._coming:
            return None
        found, are_there = self._coming[0].found, [(row.request_id, len(row.content)) for row in rows] == self._rows
        if found is not None and any(found):
            is_planned = are_there and _is_of(plan, found)
        else:
            is_planned = are_there and part is self._part and self._is_usual(plan, rows)
        if not is_planned:
            self.forget()
            return None
        one = self._coming.popleft()
        seconds.add_stages(*one.stages)
        self._expect(rows, one.verdicts)
        return one.verdicts

    def allow(self, steady: Steady, usual: Plan, part: Part | None, reads_lookup: bool) -> None:
        """As many rounds as the policy is steady for may be decoded with the next one.

        Args:
            usual: the plan of those that lookup does not draft.
            part: of the vocabulary, that they draft over.
            reads_lookup: whether they depend on what is found of their rows.
        """
        self._steady, self._part, self._reads_lookup = steady, part, reads_lookup
        self.usual = usual

    def further(self, rows: Sequence[Row]) -> Further | None:
        """How far to decode on after the round that begins now; None: not at all.

        Who did not ask for more than `BURST` waits for no second round before the first token is there.
        """
        steady, usual, burst = self._steady, self.usual, BURST if self._burst is None else self._burst
        num_rounds = min(most_rounds(len(rows)), 1 + steady.num_rounds)
        if any(row.request.stop or row.request.stopping_criteria for row in rows):
            burst = min(burst, BURST)  # where they end, what was decoded beyond is in vain
        is_first = any(len(row.content) == row.num_prompt_tokens for row in rows)
        if num_rounds < 2 or (is_first and burst <= BURST):
            return None
        if usual.exit_layer == LOOKUP or usual.asks_for_more:
            return None
        ends = [sorted(row.stopper.eos) for row in rows]
        if not self._reads_lookup or (len(rows) > 1 and steady.lookups is None and not any(steady.lengths)):
            return Further(num_rounds, burst, ends)
        lookups = [row.guesser.lookup if row.guesser.is_read else None for row in rows]
        if any(row.datastore is not None for row in rows):
            return None
        if not all(one is None or isinstance(one, CompiledLookup) for one in lookups):
            return None
        if any(isinstance(one, CompiledLookup) and not one.may_lend for one in lookups):
            return None
        indices = [one.lend() if isinstance(one, CompiledLookup) else None for one in lookups]
        sizes = [one.told_size for one in lookups if isinstance(one, CompiledLookup)]
        if not sizes:
            return Further(num_rounds, burst, ends)
        longest = max([row.room for row in rows])  # what is longer than that is not drafted
        lengths, grown = (tuple([min(n, longest) for n in told]) for told in (steady.lengths, steady.grown))
        surprises = max(0, min(steady.most_surprises, NEVER) - steady.surprises(rows[0].guessed))
        longer = min(steady.longer, most_rounds(len(rows)) - num_rounds)
        most = surprises, min(steady.kept, num_rounds + longer)
        shared = steady.lookups if len(rows) > 1 else None
        if shared is not None and max(map(max, shared.lengths)) > longest:
            shared = shared._replace(lengths=tuple([tuple([min(n, longest) for n in own]) for own in shared.lengths]))
        told = lengths, steady.branches, grown, steady.streak, *most, steady.watched, rows[0].match, shared, longer
        return Further(num_rounds, burst, ends, indices, max(sizes), *told)

    def put(self, rows: Sequence[Row], rounds: Sequence[Coming], done: Sequence[Done]) -> None:
        """Let all but the first of the rounds in one call wait; the rows' indices know what they came to already."""
        for at, row in enumerate(rows):
            told = [each for one in done if (each := one.found[at]) is not None]
            if told:
                lookup = row.guesser.lookup
                assert isinstance(lookup, CompiledLookup)
                lookup.foresee(told, [len(one.rows[at].block) for one in done])
        self._coming = deque(rounds[1:])
        self._expect(rows, rounds[0].verdicts)

    def _is_usual(self, plan: Plan, rows: Sequence[Row]) -> bool:
        """Whether that is the usual plan, as far as rows have room for it."""
        usual = self.usual
        if usual.exit_layer is not None:
            lengths = tuple([min(n, row.room - 1) for n, row in zip(usual.draft_lengths, rows, strict=True)])
            usual = usual if lengths == usual.draft_lengths else replace(usual, draft_lengths=lengths)
        return plan is usual or plan == usual

    def _expect(self, rows: Sequence[Row], verdicts: Sequence[Verdict]) -> None:
        """The next round comes after this one."""
        self._rows = [(row.request_id, len(row.content) + len(v.block)) for row, v in zip(rows, verdicts, strict=True)]


def _is_of(plan: Plan, found: Sequence[list[int]]) -> bool:
    """Whether that is what a plan drafts of rows by lookup, and no branches, and it asks for nothing else."""
    if plan.exit_layer != LOOKUP or plan.asks_for_more:
        return False
    if plan.trees is None:
        return plan.draft_lengths == tuple(map(len, found))
    return all(map(_is_chain, plan.trees, found))


def _is_chain(tree: TokenTree | None, tokens: Sequence[int]) -> bool:
    if tree is None:
        return not tokens
    return [*tree.tokens] == tokens and tree.parents == tuple(range(len(tokens)))
