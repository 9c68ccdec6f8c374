"""`Plan`, a program of rounds for a batch; and `Policy`, the base class of those that make plans."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from selfspec.control.rows import RoundOutcome, RowState, Shadow

if TYPE_CHECKING:
    from selfspec.control.round_costs import Vocabulary

CONFIDENCE_EDGES = (0.2, 0.35, 0.5, 0.6, 0.7, 0.8, 0.88, 0.94, 0.97, 0.985, 0.995)
"""Bounds between the bins in which statistics by confidence are kept: finer where drafts are nearly sure."""
NUM_BINS = len(CONFIDENCE_EDGES) + 1
FEW_BINNED = 24  # confidences: an array of fewer takes longer
MATCH_EDGES = (2, 3, 4, 6, 9, 16, 32, 64, 128)
"""Bounds between the bins of match lengths, in tokens: 1, 2, 3, 4-5, 6-8, 9-15, 16-31, 32-63, 64-127, 128 and more.

The compiled index has the same bounds (`lookup.cpp`)."""
NUM_MATCH_BINS = len(MATCH_EDGES) + 1
SEED_POSITIONS = 16  # last positions of a prompt that a policy may look at (arXiv 2504.05598)


def match_bin(match: int) -> int:
    """The bin of a match of at least one token."""
    return bisect_right(MATCH_EDGES, match)


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
FOR_EVER = 1 << 30  # rounds of a plan that nothing changes but the end of a row
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


class ShadowPlan(NamedTuple):
    """At which layers, and for which rows, to see after a round what each layer would have picked."""

    layers: tuple[int, ...]  # ascending, none of them the exit layer (whose picks are the draft)
    rows: tuple[int, ...]  # indices into the round's rows
    max_columns: int  # judged positions looked at per row, the first ones
    exact: bool = False  # over the whole vocabulary, instead of the target's likeliest tokens and a sample


class LookupTable(NamedTuple):
    """Draft lengths by match length. In a round, every row with a match drafts by lookup, or none does.

    A match is how many of a row's last tokens are found earlier, in its own text or in a corpus.
    """

    lengths: tuple[tuple[int, ...], ...]
    """Of every row, by bin of its match (`match_bin`): tokens to draft. Without a match none are drafted."""
    gains: tuple[tuple[float, ...], ...]
    """The same: how many of those are likely to be accepted."""
    needs: tuple[float, ...]
    """By drafted tokens of all rows, more as the last: how many must be likely to be accepted."""

    def drafted(self, matches: Sequence[int], rooms: Sequence[int]) -> tuple[int, ...] | None:
        """Tokens that every row drafts; None where no row drafts by lookup.

        Args:
            matches: of every row.
            rooms: the most tokens that each may draft.
        """
        drafted, gain = [], 0.0
        for lengths, gains, match, room in zip(self.lengths, self.gains, matches, rooms, strict=True):
            length = min(lengths[at := match_bin(match)], room) if match else 0
            if length > 0:
                gain += gains[at]
            drafted.append(max(0, length))
        total = sum(drafted)
        return tuple(drafted) if total and gain >= self.needs[min(total, len(self.needs) - 1)] else None


@lru_cache(maxsize=64)
def always(draft_lengths: tuple[int, ...]) -> LookupTable:
    """Every row drafts so many tokens after any match."""
    bins, none = NUM_MATCH_BINS, ((0.0,) * NUM_MATCH_BINS,) * len(draft_lengths)
    return LookupTable(tuple([(length,) * bins for length in draft_lengths]), none, (0.0,))


@dataclass(frozen=True, slots=True)
class Plan:
    """A program: up to `num_rounds` rounds of a batch, each with one draft and one verification.

    A program ends early where a row ends or its deadline has come, and after the round that looked at layers, where a
    `shadow` asks for that. At least one round runs.

    Both stops end a row's draft after a token and never withdraw it, which would bias sampled output.

    Args:
        exit_layer: layers that draft; None: none does, which is plain decoding; 0 (`LOOKUP`): rows draft what followed
            the last time that their text ended as it does now, and all layers verify.
        draft_lengths: most tokens to draft, per row; cut to what the row may still emit.
    """

    exit_layer: int | None
    draft_lengths: tuple[int, ...]
    min_confidence: float = 0.0  # a row stops after a token less probable than this under the draft; not beside `stop`
    stop: SurvivalStop | None = None
    keep_confidence: bool = False  # report the drafted tokens' confidences even where no stop needs them
    keep_divergence: bool = False  # report how far the draft's distributions are from the target's
    shadow: ShadowPlan | None = None  # of the first round that is not drafted by lookup
    second_choices: SecondChoices | None = None  # drafted beside the exit's own
    draft_vocab: int | None = None  # draft over so many tokens, the most frequent; not for rows with processors
    draft_bits: int | None = None  # 4: draft by copies of the layers in 4 bits, if there are any; all layers judge
    lookups: LookupTable | None = None  # rounds in which this says so are drafted by lookup instead
    num_rounds: int = 1
    deadline: float | None = None  # seconds after which no further round begins; None: the engine's
    speedup: float | None = None  # what the policy expects over plain decoding; for people

    @property
    def table(self) -> LookupTable | None:
        """When rows draft by lookup, and how much."""
        return always(self.draft_lengths) if self.exit_layer == LOOKUP else self.lookups

    @property
    def reads_confidence(self) -> bool:
        wants = (
            self.keep_confidence or self.min_confidence > 0 or self.stop is not None or self.second_choices is not None
        )
        return wants and self.exit_layer != LOOKUP


class Policy:
    """Makes plans, which change speed and never tokens. A subclass needs `plan` alone."""

    def plan(self, rows: Sequence[RowState]) -> Plan:
        """What to run for these rows next, and for how many rounds."""
        raise NotImplementedError

    def observe(self, plan: Plan, rounds: Sequence[RoundOutcome]) -> None:
        """What came of a plan: all its rounds, in order."""

    def seed_layers(self, row: RowState) -> Sequence[int]:
        """Layers at which the last `SEED_POSITIONS` of a prompt are looked at while it is read."""
        return ()

    def seed(self, row: RowState, shadow: Shadow) -> None:
        """What was seen there, perhaps in two parts."""

    def tell_vocabulary(self, vocabulary: Vocabulary | None) -> None:
        """The vocabulary that drafts may be over a part of; None: they are over all of it."""

    def tell_copies(self, has_copies: bool) -> None:
        """Whether there are copies of the layers in 4 bits to draft by."""
