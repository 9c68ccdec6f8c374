"""`RoundCosts`: seconds of all candidate rounds, measured or calibrated, and their expected tokens per second.

`Drafters` lists the drafters to choose from: the layers; 4-bit copies of them (`selfspec.executors.cpu.packed`); and,
where the head takes longer than a layer, each of these over the most frequent tokens only (FR-Spec, arXiv 2502.14856).
Such a draft takes only a share of the head's time. Its coverage is the share of the target's picks that are among these
tokens, which is measured without drafting.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from selfspec.control.acceptance import Floats
from selfspec.control.costs import CONTEXT, LOOKUP_SECONDS, Costs
from selfspec.control.times import Times

if TYPE_CHECKING:
    from selfspec.model.draft_vocabulary import Frequencies

MOST = 18  # maximum draft length
# Draft lengths of recorded rounds, which need a recording for each; and the exit layers, in sixteenths of the layers.
RECORDED_LENGTHS, RECORDED_EXITS = (1, 2, 3, 4, 6, 8, 11, 15), (1, 1.5, 2, 3, 4, 5, 6, 8)
CAPS = (1, 2, 3, 4, 6, 9, 13, MOST)  # maximum lengths among the stop rules of a single row
MOST_FOUND = 63  # maximum draft length by lookup
MOST_PACKED = 256  # tokens drafted by lookup in a round, at most: their logits are in memory at once
LOOKUP_GRID = (0, 1, 2, 3, 4, 5, 7, 11, 17, 31, 63)  # drafted tokens per row at which lookup costs are computed
VOCAB_DIVISORS = (8, 4)  # sizes of draft vocabularies: the vocabulary's over these
LEAST_VOCAB = 4096  # smallest draft vocabulary
_LENGTHS, _CAPS = np.arange(1.0, MOST + 1), np.array(CAPS, np.float64)


class Drafter(NamedTuple):
    """A drafter that uses early layers."""

    draft_vocab: int | None = None  # size of the draft vocabulary; None: the whole vocabulary
    share: float = 1.0  # draft vocabulary over vocabulary
    coverage: float = 1.0  # share of the target's picks in the draft vocabulary
    draft_bits: int | None = None  # 4: copies of the layers draft
    deepest: int | None = None  # deepest exit layer; None: no limit

    @property
    def key(self) -> tuple[int | None, int | None]:
        """The identity of the drafter, which does not depend on its coverage."""
        return self.draft_vocab, self.draft_bits

    @property
    def by_copies(self) -> bool:
        return self.draft_bits is not None


BY_LAYERS = Drafter()
"""The layers themselves, over the whole vocabulary."""


class Drafters:
    """The layers, their copies if there are any, and draft vocabularies for each with a head dearer than a layer."""

    def __init__(self, costs: Costs, vocabulary: Frequencies | None = None, copies: bool = False) -> None:
        self._vocabulary = vocabulary
        self._over_all = [BY_LAYERS]
        if copies and costs.copies is not None:
            self._over_all.append(copies_of(costs.num_layers))
        self._with_dear_heads = [drafter for drafter in self._over_all if _has_dear_head(costs, drafter)]

    def now(self, only_layers: bool = False, measured: bool = True) -> list[Drafter]:
        """The drafters to choose from.

        Args:
            only_layers: only the layers, over the whole vocabulary.
            measured: with the coverages of draft vocabularies, whose ranking takes milliseconds; else these are 1.
        """
        if only_layers or self._vocabulary is None:
            return [BY_LAYERS] if only_layers else [*self._over_all]
        text, dear = self._vocabulary, self._with_dear_heads
        sizes = [size for size in (text.vocab_size // divisor for divisor in VOCAB_DIVISORS) if size >= LEAST_VOCAB]
        vocabs = [(size, self.share(size), text.coverage(size) if measured else 1.0) for size in sizes if dear]
        return [*self._over_all, *[Drafter(*vocab, one.draft_bits, one.deepest) for vocab in vocabs for one in dear]]

    def share(self, size: int | None) -> float:
        """A draft vocabulary's share of the vocabulary; 1 for None."""
        return 1.0 if size is None or self._vocabulary is None else size / self._vocabulary.vocab_size


def copies_of(num_layers: int) -> Drafter:
    """The drafter of 4-bit copies, over the whole vocabulary."""
    return Drafter(draft_bits=4, deepest=deepest_copy(num_layers))


def deepest_copy(num_layers: int) -> int:
    """The deepest exit layer of copies. Deeper exits do not pay, so copies of further layers would waste memory."""
    return max(1, num_layers // 2)


def _has_dear_head(costs: Costs, drafter: Drafter) -> bool:
    """Whether the drafter's head takes longer than one of its layers."""
    head = costs.copies.head if drafter.by_copies and costs.copies is not None else costs.head
    return head(1) > costs.early_pass(1, 1, copies=drafter.by_copies)


class RoundCosts:
    """Predicted seconds of rounds of `num_rows` rows with `context` tokens each, and expected tokens per second.

    Model of a single row's draft: it continues while confidences are above a bound, up to a maximum length, and ends
    after the first token below; confidences are independent. Model of several rows, and of recorded rounds, which take
    no less time where a draft stops early: all drafts have the same length.

    Args:
        copies: whether 4-bit copies may draft, if their costs are known.
        most: maximum draft length of early layers in recorded rounds.
        times: what rounds took; None: all times are calibrated ones.

    Attributes:
        most_seconds: rounds that take longer are not chosen.
    """

    def __init__(
        self,
        costs: Costs,
        num_rows: int,
        context: float = CONTEXT,
        copies: bool = True,
        most: int = MOST,
        times: Times | None = None,
    ) -> None:
        self.num_rows, self._costs, self.times, self.most_seconds = num_rows, costs, times, math.inf
        recorded = costs.recorded_length(num_rows)
        self.stops_early = recorded is None
        """Whether a draft that stops early takes less time."""
        self.longest = MOST_FOUND if recorded is None else recorded
        """Maximum draft length."""
        self._is_allowed = self.longest >= _LENGTHS
        if not self.stops_early:
            self._is_allowed &= np.isin(_LENGTHS, [length for length in RECORDED_LENGTHS if length <= most])
        self.drafters: Sequence[Drafter] = Drafters(costs, copies=copies).now()
        """The drafters to choose from."""
        self.move(context)

    def move(self, context: float) -> None:
        """Set the context length per row, from which the cost of reading the cache follows."""
        costs, rows = self._costs, self.num_rows
        self._context = context
        # Extra seconds per layer of a pass over one token per row, and of one further token per row.
        self._more = costs.reading(rows, context)
        self._further = costs.reading(rows, context, 2) - self._more
        plain = costs.cached(("plain", rows), lambda: costs.plain_round(rows))
        self.calibrated_plain = plain + costs.num_layers * self._more
        self._rounds: dict[tuple[float, bool], Floats] = {}  # by drafter, relative to plain rounds
        self._found: Floats | None = None  # the same of rounds by lookup

    @property
    def plain_seconds(self) -> float:
        """Seconds of a plain round."""
        measured = None if self.times is None else self.times.plain_seconds
        return self.calibrated_plain if measured is None else measured

    def rates(self, right: Floats, share: Floats, coverages: Floats) -> tuple[Floats, Floats]:
        """Tokens per second of all rows, `[drafters, L - 1, stops]`, and drafted tokens per row, `[L - 1, stops]`.

        For one row a stop is a confidence bin with a maximum length in `CAPS`; else (see the class) it is a length.

        Args:
            right: `[L - 1, bins]`, acceptance rate by bin of confidence.
            share: `[L - 1, bins]`, share of the picks in each bin.
            coverages: `[drafters, L - 1]`, factors on `right`.
        """
        seconds = [self._seconds(drafter) for drafter in self.drafters]
        drafted_right = right * share * coverages[:, :, None]
        if self.num_rows > 1 or not self.stops_early:
            acceptance = np.add.reduce(drafted_right, 2, keepdims=True)
            kept = 1 + np.add.accumulate(acceptance**_LENGTHS, 2)
            kept = kept * self._is_allowed / np.array(seconds)[:, :, 1:]
            return self.num_rows * self._affordable(kept, np.array(seconds)[:, :, 1:]), np.tile(
                _LENGTHS, (len(share), 1)
            )
        # P(confidence above the bound), P(above and accepted) for each drafter: [1 + drafters, L - 1, bins]
        likely = np.concatenate((share[None], drafted_right))
        above = np.minimum(np.add.accumulate(likely[:, :, ::-1], 2)[:, :, ::-1], 1 - 1e-6)
        # Expected tokens of a draft up to its stop, and expected accepted ones.
        expected = ((1 - above[..., None] ** _CAPS) / (1 - above[..., None])).reshape(len(above), len(share), -1)
        drafted, kept = expected[0], expected[1:]
        low, rounds = drafted.astype(np.int64), np.empty(kept.shape)  # below `MOST`
        at = low + np.arange(0, len(share) * (MOST + 1), MOST + 1)[:, None]
        for line, of_drafter in zip(rounds, seconds, strict=True):
            below, beyond = of_drafter.take(at), of_drafter.take(at + 1)
            line[:] = below + (drafted - low) * (beyond - below)
        capped = np.array(seconds)[:, :, list(CAPS)]  # a draft may go on to its maximum
        found = (1 + above[1:, :, :1] * kept) / rounds
        return self._affordable(found.reshape(*found.shape[:2], -1, len(CAPS)), capped[:, :, None]).reshape(
            found.shape
        ), drafted

    def _affordable(self, rates: Floats, seconds: Floats) -> Floats:
        return rates if self.most_seconds == math.inf else np.where(seconds <= self.most_seconds, rates, 0.0)

    @property
    def most_found(self) -> int:
        """The most tokens that all rows together may draft by lookup: their round takes no more than `most_seconds`."""
        return int(np.count_nonzero(self.lookups() <= self.most_seconds)) - 1

    def limits(self) -> Floats:
        """Upper bounds of the tokens per second of all rows, `[L - 1]`: with an acceptance rate of 1."""
        limits = np.zeros(self._costs.num_layers - 1)
        for drafter in self.drafters:
            best = np.maximum.reduce(self._is_allowed * (1 + _LENGTHS) / self._seconds(drafter)[:, 1:], 1)
            limits[: drafter.deepest] = np.maximum(limits[: drafter.deepest], best[: drafter.deepest])
        return self.num_rows * limits

    def rounds(self, exit_layer: int, drafter: Drafter = BY_LAYERS) -> list[float]:
        """Seconds of rounds in which every row drafts 0, 1, .., `MOST` tokens."""
        seconds: list[float] = self._seconds(drafter)[exit_layer - 1].tolist()
        return seconds

    def lookups(self) -> Floats:
        """Seconds of rounds by lookup in which all rows together draft 0, 1, 2, .. tokens."""
        if self._found is None:
            drafted, seconds = self._costs.cached(("lookups", self.num_rows), self._lookup_rounds)
            reading = self._costs.num_layers * (self._more + self._further * drafted)
            self._found = (seconds + reading) / self.calibrated_plain
        relative = self._found if self.times is None else self.times.lookups(self._found)
        return self.plain_seconds * np.concatenate(((1.0,), relative))

    def _seconds(self, drafter: Drafter) -> Floats:
        """Seconds of rounds, `[L - 1, MOST + 1]`, by exit layer and drafted tokens per row."""
        key = drafter.share, drafter.by_copies
        if key not in self._rounds:
            terms = self._costs.cached(("rounds", self.num_rows, key[1]), lambda: self._terms(drafter.by_copies))
            factors = np.array((1.0, drafter.share, self._more, self._further))
            self._rounds[key] = np.tensordot(factors, terms, 1) / self.calibrated_plain
        known = self._rounds[key]
        return self.plain_seconds * (known if self.times is None else self.times.drafts(drafter.key, known))

    def _terms(self, copies: bool) -> Floats:
        """The terms of `_seconds`, `[4, L - 1, MOST + 1]`, by exit layer and drafted tokens per row.

        Fixed seconds; seconds of the draft's head and picks over the whole vocabulary; number of layers run over one
        token per row; number of layers times further tokens per row in verification.

        Args:
            copies: 4-bit copies draft: they do not run over the last token, and all layers verify.
        """
        costs, rows = self._costs, self.num_rows
        exits, drafted = np.arange(1, costs.num_layers)[:, None], np.arange(MOST + 1)
        early, first = (
            np.array([[costs.early_pass(e, rows, first=is_first, copies=copies)] for e in range(1, costs.num_layers)])
            for is_first in (False, True)
        )
        tokens = [rows * (1 + n) for n in range(MOST + 1)]
        verifying = np.full_like(exits, costs.num_layers) if copies else costs.num_layers - exits
        judging = [(costs.verify_head(n, rows) if copies else costs.head(n)) + costs.pick(n) for n in tokens]
        one_layer = np.array([costs.verify(costs.num_layers - 1, rows, n) for n in tokens])
        passes = drafted + (not copies)
        head = costs.copies.head if copies and costs.copies is not None else costs.head
        terms = np.empty((4, len(exits), MOST + 1))
        terms[0] = passes * early + first - early + verifying * one_layer + np.array(judging) + costs.rest(rows)
        terms[1] = drafted * (head(rows) + costs.pick(rows))
        terms[2] = passes * exits + verifying
        terms[3] = verifying * drafted
        return terms

    def _lookup_rounds(self) -> tuple[Floats, Floats]:
        """Drafted tokens per row, and seconds without cache reading, of rounds by lookup, by drafted tokens in all."""
        rows, costs = self.num_rows, self._costs
        tokens = [rows * (1 + drafted) for drafted in LOOKUP_GRID]
        ragged = max(1.0, costs.ragged(rows)) if costs.ragged is not None and rows > 1 else 1.0
        layers = [ragged * costs.verify(0, rows, n) for n in tokens]
        judging = [costs.verify_head(n, rows) + costs.pick(n) for n in tokens]
        drafted = np.arange(1, min(rows * MOST_FOUND, MOST_PACKED) + 1) / rows
        seconds = np.interp(drafted, LOOKUP_GRID, np.add(layers, judging)) + costs.rest(rows) + rows * LOOKUP_SECONDS
        return drafted, seconds


def recorded_exits(num_layers: int) -> list[int]:
    """The exit layers of recorded rounds."""
    return sorted({min(max(1, round(num_layers * i / 16)), num_layers - 1) for i in RECORDED_EXITS})


def one_more(rounds: Sequence[float], drafted: float, num_rows: int) -> float:
    """Seconds per row that one more drafted token per row adds to a round with about `drafted` per row."""
    at = min(int(drafted), MOST - 2)
    return (rounds[at + 2] - rounds[at]) / 2 / num_rows


def each_of(rounds: Sequence[float], drafted: float, num_rows: int) -> float:
    """Average seconds per row and drafted token of such a round."""
    count = min(MOST, max(1, math.ceil(drafted)))
    return (rounds[count] - rounds[0]) / count / num_rows
