"""`Policy`, the base class of policies; `Plain`; and the rules that a `Plan` may hold: lookup, stop rules, probes."""

from __future__ import annotations

from bisect import bisect_right
from collections import abc
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from selfspec.core import LOOKUP, UNBOUNDED_ROUNDS, Plan, RoundOutput, Sequence, ShadowPicks

if TYPE_CHECKING:
    from selfspec.control.ledger import Ledger
    from selfspec.model.draft_vocabulary import Frequencies

CONFIDENCE_EDGES = (0.2, 0.35, 0.5, 0.6, 0.7, 0.8, 0.88, 0.94, 0.97, 0.985, 0.995)
"""Bounds between the bins of confidence. Bins are narrower near 1."""
NUM_BINS = len(CONFIDENCE_EDGES) + 1
FEW_BINNED = 24  # below so many confidences, `bisect` is faster than numpy
MATCH_EDGES = (2, 3, 4, 6, 9, 16, 32, 64, 128)
"""Bounds between the bins of match lengths in tokens: 1, 2, 3, 4-5, 6-8, 9-15, 16-31, 32-63, 64-127, 128 and more.

Compiled code has the same bounds (`lookup.h`)."""
NUM_MATCH_BINS = len(MATCH_EDGES) + 1
SOURCES = OWN_TEXT, RESPONSES, CORPUS = range(3)
"""Where drafts by lookup come from: the row's own text, finished responses, a corpus. In `lookup.h`, too."""
GRAMMAR = len(SOURCES)
"""The source of drafts whose tokens a grammar forces."""
NUM_LOOKUP_BINS = len(SOURCES) * NUM_MATCH_BINS
SEED_POSITIONS = 16  # last positions of a prompt at which a policy may probe layers (arXiv 2504.05598)


def match_bin(match: int) -> int:
    """The bin of a match length of at least 1 token."""
    return bisect_right(MATCH_EDGES, match)


def lookup_bin(match: int, source: int) -> int:
    """The bin of a match length of at least 1 token among those of all sources."""
    return source * NUM_MATCH_BINS + bisect_right(MATCH_EDGES, match)


def confidence_bin(confidence: float) -> int:
    """The bin of a confidence in 0..1."""
    return bisect_right(CONFIDENCE_EDGES, confidence)


def confidence_bins(confidences: abc.Sequence[float]) -> list[int]:
    """The bin of each confidence."""
    if len(confidences) < FEW_BINNED:
        return [bisect_right(CONFIDENCE_EDGES, confidence) for confidence in confidences]
    bins: list[int] = np.searchsorted(CONFIDENCE_EDGES, confidences, "right").tolist()
    return bins


class SurvivalStop(NamedTuple):
    """Stop drafting when the draft is unlikely to be accepted as a whole.

    A row's survival is the estimated probability that all its drafted tokens are accepted: the product of
    `calibration` at their confidences. All rows of a batch continue while their mean survival is at least `least`,
    since a pass over all rows takes nearly the same time as one over some of them.

    A row whose survival is below `keep` withdraws its last token: verifying it would take more than it is worth. The
    target's pick there is known all the same where the tokens before are accepted.
    """

    calibration: tuple[float, ...]  # acceptance rate by confidence bin
    least: float
    keep: float = 0.0

    def goes_on(self, survivals: abc.Sequence[float]) -> bool:
        """Whether the rows that are still drafting draft one more token."""
        return sum(survivals) >= self.least * len(survivals)


class ShadowPlan(NamedTuple):
    """A probe: the layers and rows whose shadow picks are computed after a round."""

    layers: tuple[int, ...]  # ascending, without the exit layer, whose picks are the draft
    rows: tuple[int, ...]  # indices into the round's rows
    max_columns: int  # probed positions per row: the first judged ones
    exact: bool = False  # over the whole vocabulary; False: over the target's most probable tokens and a sample


class LookupTable(NamedTuple):
    """Draft lengths by match length. In a round, either all rows with a match draft by lookup, or none does.

    The match length is the number of a row's last tokens that occur earlier in its text, in a finished response, or in
    a corpus.
    """

    lengths: tuple[tuple[int, ...], ...]
    """Per row, source and match bin (`lookup_bin`): tokens to draft. A row without a match drafts none."""
    gains: tuple[tuple[float, ...], ...]
    """Per row, source and match bin: expected accepted tokens."""
    needs: tuple[float, ...]
    """By drafted tokens of all rows: the expected accepted tokens that a round needs. The last entry covers more."""

    def drafted(
        self,
        matches: abc.Sequence[int],
        capacities: abc.Sequence[int],
        sources: abc.Sequence[int] | None = None,
        ledger: Ledger | None = None,
    ) -> tuple[int, ...] | None:
        """The number of tokens that each row drafts; None where no row drafts by lookup.

        Args:
            matches: match length per row.
            capacities: maximum draft length per row.
            sources: of the match, per row; default: the row's own text.
            ledger: what the drafts may lose; None: no limit.
        """
        drafted, gain = list[int](), 0.0
        sources = (OWN_TEXT,) * len(matches) if sources is None else sources
        rows = zip(self.lengths, self.gains, matches, capacities, sources, strict=True)
        for lengths, gains, match, capacity, source in rows:
            length = min(lengths[at := lookup_bin(match, source)], capacity) if match else 0
            if length > 0:
                gain += gains[at]
            drafted.append(max(0, length))
        if ledger is not None and any(drafted):
            cut = ledger.cut(drafted)
            gain *= sum(cut) / sum(drafted)
            drafted = cut
        total = sum(drafted)
        return tuple(drafted) if total and gain >= self.needs[min(total, len(self.needs) - 1)] else None


@lru_cache(maxsize=64)
def always(draft_lengths: tuple[int, ...]) -> LookupTable:
    """The table by which row i drafts `draft_lengths[i]` tokens after a match of any length."""
    bins, none = NUM_LOOKUP_BINS, ((0.0,) * NUM_LOOKUP_BINS,) * len(draft_lengths)
    return LookupTable(tuple([(length,) * bins for length in draft_lengths]), none, (0.0,))


def table_of(plan: Plan) -> LookupTable | None:
    """The lookup table of a plan, if rows may draft by lookup."""
    return always(plan.draft_lengths) if plan.exit_layer == LOOKUP else plan.lookups


class Policy:
    """The base class of policies. Plans change speed, never tokens. A subclass must define `plan`.

    Attributes:
        most_forced: tokens that the grammars of structured outputs force are drafted before all others, at most so many
            per row and round: each is certain. A plan may say otherwise. What comes of such rounds is not observed.
    """

    most_forced = 0

    def plan(self, rows: list[Sequence]) -> Plan:
        """Decide what to run for these rows next, and for how many rounds."""
        raise NotImplementedError

    def observe(self, plan: Plan, rounds: list[RoundOutput]) -> None:
        """Take the outcomes of all rounds of a plan, in order."""

    def seed_layers(self, row: Sequence) -> abc.Sequence[int]:
        """Layers to probe at the last `SEED_POSITIONS` positions of a prompt during prefill."""
        return ()

    def seed(self, row: Sequence, shadow: ShadowPicks) -> None:
        """Take the shadow picks of a prompt; a prompt may come in two parts."""

    def likely(self, num_rows: int) -> list[Plan]:
        """Plans to expect for so many rows, plain rounds first: what they need is recorded before decoding."""
        return []

    def set_vocabulary(self, vocabulary: Frequencies | None) -> None:
        """Allow drafts over a part of this vocabulary; None: only over the whole vocabulary."""

    def set_copies(self, has_copies: bool) -> None:
        """Allow drafts by 4-bit copies of the layers, or not."""

    def set_waiting(self, num_waiting: int, num_joining: int = 0) -> None:
        """Tell how many requests wait for a place in the batch, before `plan`.

        Args:
            num_joining: requests that read their prompts, or whose first token is waited for. While there are any, a
                program has one round.
        """


class Plain(Policy):
    """Plain decoding."""

    def plan(self, rows: list[Sequence]) -> Plan:
        return Plan(None, (0,) * len(rows), num_rounds=UNBOUNDED_ROUNDS)

    def likely(self, num_rows: int) -> list[Plan]:
        return [Plan(None, (0,) * num_rows)]
