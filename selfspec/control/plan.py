"""`Plan`, what a policy decides for a round; and `Policy`, who decides."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from selfspec.control.laps import Seconds
from selfspec.control.rows import RowOutcome, RowState, Shadow

if TYPE_CHECKING:
    from selfspec.control.round_costs import Vocabulary

CONFIDENCE_EDGES = (0.2, 0.35, 0.5, 0.6, 0.7, 0.8, 0.88, 0.94, 0.97, 0.985, 0.995)
"""Bounds between the bins in which statistics by confidence are kept: finer where drafts are nearly sure."""
NUM_BINS = len(CONFIDENCE_EDGES) + 1
FEW_BINNED = 24  # confidences: an array of fewer takes longer
MATCH_EDGES = (2, 3, 4, 6, 9, 16, 32)
"""Bounds between the bins of what lookup matched, in tokens: 1, 2, 3, 4-5, 6-8, 9-15, 16-31, 32 and more.

Compiled indices have a byte for each bin in a word, and the same bounds (`lookup.cpp`)."""
NUM_MATCH_BINS = len(MATCH_EDGES) + 1
SEED_POSITIONS = 16  # last positions of a prompt that a policy may look at (arXiv 2504.05598)


def confidence_bin(confidence: float) -> int:
    return bisect_right(CONFIDENCE_EDGES, confidence)


def confidence_bins(confidences: Sequence[float]) -> list[int]:
    """Of each."""
    if len(confidences) < FEW_BINNED:
        return [bisect_right(CONFIDENCE_EDGES, confidence) for confidence in confidences]
    bins: list[int] = np.searchsorted(CONFIDENCE_EDGES, confidences, "right").tolist()
    return bins


DRAFTS = ("exit", "copies", "lookup", "tree")
"""Where drafts may come from: early layers, the row's own text or a corpus; "tree" lets drafts have branches, "copies"
lets copies of early layers in 4 bits draft in their place."""
REMOVED_DRAFTS = ("recycle", "cascade")
"""Which there once were: naming one of these says so."""
LOOKUP = 0  # the exit layer of drafts by lookup: they run no layer, and the whole model verifies them


class SurvivalStop(NamedTuple):
    """Stop drafts that are too unlikely to be right to be worth another token.

    A row's survival is the chance that all its drafted tokens are right: the product, over them, of how often tokens of
    such confidence were right. The rows of a batch go on together while their mean survival is at least `least`: a pass
    costs nearly the same for all of them as for some, and ragged rows make every later step dearer.
    """

    calibration: tuple[float, ...]  # by confidence bin: how often a drafted token of that confidence is right
    least: float

    def goes_on(self, survivals: Sequence[float]) -> bool:
        """Whether the rows that are still drafting draft another token."""
        return sum(survivals) >= self.least * len(survivals)


class SecondChoices(NamedTuple):
    """Beside which tokens of a draft its layer's second choice is drafted as well, for where the first is wrong.

    They go through the early layers together, in the pass that feeds the draft's last token anyway.
    """

    right: tuple[float, ...]  # by confidence bin of the first choice: how often that is right
    second: tuple[float, ...]  # and how often the second is
    least: float  # drafted are those likelier than this to be come to, and right
    most: int  # of a row
    enough: float = 0.0  # and none of a row where by all of them together that is exceeded by no more than this


class TokenTree(NamedTuple):
    """Tokens that may come next, and after those; node 0 is the row's last token, the first of `tokens` is node 1."""

    tokens: tuple[int, ...]
    parents: tuple[int, ...]  # of each of them: the node it goes on from, 0 or one before it


class ShadowPlan(NamedTuple):
    """At which layers, and for which rows, to see after the round what each layer would have picked."""

    layers: tuple[int, ...]  # ascending, none of them the exit layer (whose picks are the draft)
    rows: tuple[int, ...]  # indices into the round's rows
    max_columns: int  # judged positions looked at per row, the first ones
    exact: bool = False  # over the whole vocabulary, instead of the target's likeliest tokens and a sample


@dataclass(frozen=True, slots=True)
class Plan:
    """One round: where to leave early and how far each row guesses. `exit_layer` None is plain decoding.

    Exit layer 0 (`LOOKUP`) drafts what followed the last time that the row's text ended as it does now, and nothing
    where it never did, or else the trees that the plan brings along; such drafts have no confidences, so that no stop
    ends them, and no divergences.

    Both stops end a row's draft after a token and never withdraw it, which would bias sampled output.
    """

    exit_layer: int | None
    draft_lengths: tuple[int, ...]  # per row, each below the row's room
    min_confidence: float = 0.0  # a row stops after a token less probable than this under the draft; not beside `stop`
    stop: SurvivalStop | None = None
    keep_confidence: bool = False  # report the drafted tokens' confidences even where no stop needs them
    keep_divergence: bool = False  # report how far the draft's distributions are from the target's
    shadow: ShadowPlan | None = None
    second_choices: SecondChoices | None = None  # drafted beside the exit's own
    trees: tuple[TokenTree | None, ...] | None = None  # per row, of `draft_lengths` tokens; only where no layer drafts
    draft_vocab: int | None = None  # draft over so many tokens, the most frequent; not for rows with processors
    draft_bits: int | None = None  # 4: draft by copies of the layers in 4 bits, if there are any; all layers judge
    speedup: float | None = None  # what the policy expects over plain decoding; for people

    @property
    def reads_confidence(self) -> bool:
        wants = (
            self.keep_confidence or self.min_confidence > 0 or self.stop is not None or self.second_choices is not None
        )
        return wants and self.exit_layer != LOOKUP

    @property
    def asks_for_more(self) -> bool:
        """Whether for more than tokens and their confidences."""
        return self.shadow is not None or self.keep_divergence


class Lookups(NamedTuple):
    """What the rows of a batch draft by lookup: in a round, each of them, or none where that promises too little."""

    lengths: tuple[tuple[int, ...], ...]
    """Of every row, by its match, longer ones as the last: tokens; without a match none, whatever is said."""
    gains: tuple[tuple[float, ...], ...]
    """The same: how many of those are likely to be right."""
    needs: tuple[float, ...]
    """By drafted tokens of all rows, more as the last: how many must be likely to be right."""

    def drafted(self, matches: Sequence[int], rooms: Sequence[int]) -> tuple[int, ...] | None:
        """Tokens that every row drafts; None where lookup drafts nothing.

        Args:
            matches: of every row.
            rooms: the most tokens that each may draft.
        """
        drafted, gain = [], 0.0
        for lengths, gains, match, room in zip(self.lengths, self.gains, matches, rooms, strict=True):
            at = min(match, len(lengths) - 1)
            length = min(lengths[at], room) if match else 0
            if length > 0:
                gain += gains[at]
            drafted.append(max(0, length))
        total = sum(drafted)
        return tuple(drafted) if total and gain >= self.needs[min(total, len(self.needs) - 1)] else None


class Steady(NamedTuple):
    """How many rounds after the one that was planned last are likely to have the same plan, but for two things: drafts
    are no longer than rows have room for, as long as one has room for any; and lookup may draft some of the rounds."""

    num_rounds: int = 0
    lengths: tuple[int, ...] = (0,)
    """Of a policy that reads lookups, by the rows' matches, longer ones as the last: tokens that a single row drafts by
    lookup; 0: the plan is the same; less: the policy has to be asked."""
    branches: tuple[bool, ...] = ()
    """The same: whether it has to be asked where other tokens followed shorter matches, too."""
    usual: Plan | None = None
    """After a round that lookup drafts: the plan of the others; None: that is not known."""
    grown: tuple[int, ...] = ()
    """What takes the place of the last of `lengths` after so many rounds in a row that lookup drafted after as long a
    match, and that were right as a whole: one, two, ..; more are as the last. Empty: that changes nothing."""
    streak: int = 0
    """How many of those the round that was planned last comes after."""
    most_surprises: int = 1 << 30
    """Of a single row: the policy has to be asked once so many tokens in `RowState.guessed` came after matches that
    have no length in `lengths`, each draft by lookup meanwhile counted as one of them unless it was right as a whole
    after a match as long as the last of these."""
    kept: int = 0
    """But not before so many rounds."""
    lookups: Lookups | None = None
    """Of a batch: what its rows draft by lookup, whatever `lengths` says; None: that says it."""
    longer: int = 0
    """Each of `num_rounds` that is drafted by lookup lets one more follow, up to so many."""

    def surprises(self, guessed: Sequence[int]) -> int:
        """How many of them `RowState.guessed` tells of."""
        return sum([count for count, counts in zip(guessed, self.watched, strict=False) if counts])

    @property
    def watched(self) -> tuple[bool, ...]:
        """Of every bin of matches, whether `most_surprises` counts tokens after such: those with length 0."""
        last = len(self.lengths) - 1
        return tuple([self.lengths[min(first, last)] == 0 for first in (1, *MATCH_EDGES)])


class Policy:
    """Chooses plans, which change speed and never tokens. A subclass needs `plan` and `observe` alone."""

    def plan(self, rows: Sequence[RowState]) -> Plan:
        """What the next round of these rows does."""
        raise NotImplementedError

    def observe(self, plan: Plan, outcomes: Sequence[RowOutcome], seconds: Seconds) -> None:
        """What came of it, row by row, and what its stages took."""
        raise NotImplementedError

    @property
    def reads_lookup(self) -> bool:
        """Whether rows come with what lookup finds (`RowState.guesses`), which takes an index of every row."""
        return False

    @property
    def hears_lookup(self) -> bool:
        """Whether it is told what lookup would have come to (`RowOutcome.looked`); asked once it has planned."""
        return self.reads_lookup

    @property
    def steady(self) -> Steady:
        """How many rounds after the one that was planned last it will plan alike: they may be decoded before it is
        asked about them, and hold if it plans them so."""
        return Steady()

    def seed_layers(self, row: RowState) -> Sequence[int]:
        """Layers at which the last `SEED_POSITIONS` of a prompt are looked at while it is read."""
        return ()

    def seed(self, row: RowState, shadow: Shadow) -> None:
        """What was seen there, perhaps in two parts."""

    def tell_vocabulary(self, vocabulary: Vocabulary | None) -> None:
        """The vocabulary that drafts may be over a part of; None: they are over all of it."""

    def tell_copies(self, has_copies: bool) -> None:
        """Whether there are copies of the layers in 4 bits to draft by."""
