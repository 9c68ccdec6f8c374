"""`RoundCosts`: seconds of every round that could be drafted, in arrays, and the tokens per second that they promise.

`Drafters` are the ways of drafting to choose from. Beside the layers themselves these are copies of the layers in 4
bits, see `selfspec.executors.cpu.four_bit`; and, where the head is dear beside a layer, drafts over the most frequent
tokens of the vocabulary alone (FR-Spec, arXiv 2502.14856). Those cost their share of the head at every token, and are
wrong wherever the target picks another token. How often that is can be seen without drafting at all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from selfspec.control.costs import CONTEXT, LOOKUP_SECONDS, Costs
from selfspec.control.decay import Floats

MOST = 18  # longest draft considered
CAPS = (1, 2, 3, 4, 6, 9, 13, MOST)  # tokens after which a row's draft may be taken to end
MOST_FOUND = 63  # longest draft of a row by lookup
MOST_PACKED = 256  # drafted by lookup in all: the logits of a round's tokens are held at once
LOOKUP_GRID = (0, 1, 2, 3, 4, 5, 7, 11, 17, 31, 63)  # drafted tokens per row at which lookups are priced
VOCAB_DIVISORS = (8, 4)  # draft vocabularies are such shares of the vocabulary
LEAST_VOCAB = 4096  # tokens: of smaller heads there is little to save
NOTICEABLE = 0.01  # smaller changes of a correction are passed over
_LENGTHS, _CAPS = np.arange(1.0, MOST + 1), np.array(CAPS, np.float64)


class Vocabulary(Protocol):
    """What a policy may know of the tokens; see `selfspec.model.draft_vocabulary.Frequencies`."""

    @property
    def vocab_size(self) -> int: ...
    def coverage(self, size: int) -> float:
        """The share of lately written tokens that were among the `size` most frequent before they were written."""
        ...


class Drafter(NamedTuple):
    """A way of drafting by early layers."""

    draft_vocab: int | None = None  # tokens drafted over; None: the whole vocabulary
    share: float = 1.0  # of the vocabulary
    coverage: float = 1.0  # of what the target picks
    draft_bits: int | None = None  # 4: by copies of the layers
    deepest: int | None = None  # exit layer; None: any

    @property
    def key(self) -> tuple[int | None, int | None]:
        """What tells it from others, however its coverage changes."""
        return self.draft_vocab, self.draft_bits

    @property
    def by_copies(self) -> bool:
        return self.draft_bits is not None


BY_LAYERS = Drafter()
"""The layers themselves, over the whole vocabulary."""


class Drafters:
    """The layers; copies, if there are any; and draft vocabularies for each whose head costs more than a layer."""

    def __init__(self, costs: Costs, vocabulary: Vocabulary | None = None, copies: bool = False) -> None:
        self._vocabulary = vocabulary
        self._over_all = [BY_LAYERS]
        if copies and costs.copies is not None:
            self._over_all.append(copies_of(costs.num_layers))
        self._with_dear_heads = [drafter for drafter in self._over_all if _has_dear_head(costs, drafter)]

    def now(self, only_layers: bool = False) -> list[Drafter]:
        """Those to choose from, as they cover the text now; `only_layers`: the layers and the whole vocabulary."""
        if only_layers or self._vocabulary is None:
            return [BY_LAYERS] if only_layers else [*self._over_all]
        sizes = [self._vocabulary.vocab_size // divisor for divisor in VOCAB_DIVISORS]
        vocabs = [(size, self.share(size), self._vocabulary.coverage(size)) for size in sizes if size >= LEAST_VOCAB]
        dear = self._with_dear_heads
        return [*self._over_all, *[Drafter(*vocab, one.draft_bits, one.deepest) for vocab in vocabs for one in dear]]

    def share(self, size: int | None) -> float:
        """Of the vocabulary."""
        return 1.0 if size is None or self._vocabulary is None else size / self._vocabulary.vocab_size


def copies_of(num_layers: int) -> Drafter:
    """Copies of the layers, over the whole vocabulary."""
    return Drafter(draft_bits=4, deepest=deepest_copy(num_layers))


def deepest_copy(num_layers: int) -> int:
    """The deepest exit that copies draft for: more of them would take memory for nothing, so late does not pay."""
    return max(1, num_layers // 2)


def _has_dear_head(costs: Costs, drafter: Drafter) -> bool:
    """Whether its head takes longer than a layer."""
    head = costs.copies.head if drafter.by_copies and costs.copies is not None else costs.head
    return head(1) > costs.early_pass(1, 1, copies=drafter.by_copies)


class RoundCosts:
    """Seconds of rounds of `num_rows` rows of `context` tokens each, and tokens per second by them.

    One row's draft is taken to go on while its tokens' bins of confidence lie above a bound, and at most for a number
    of tokens, each independently of those before it; it stops after the first token below. Several rows are taken to
    stop together, after a number of tokens.

    Args:
        copies: whether they may draft, where there are costs of them.
    """

    def __init__(self, costs: Costs, num_rows: int, context: float = CONTEXT, copies: bool = True) -> None:
        self.num_rows, self._costs = num_rows, costs
        self.drafters: Sequence[Drafter] = Drafters(costs, copies=copies).now()
        """Those to choose from."""
        self._lookup_ratio = 1.0
        self.move(context)

    def move(self, context: float) -> None:
        """Take on that every row has `context` tokens: every layer of a pass then reads as much more."""
        costs, rows = self._costs, self.num_rows
        self._context = context
        # Seconds that every layer takes longer, in a pass of one token per row, and for each further one of all rows.
        self._more = costs.reading(rows, context)
        self._further = costs.reading(rows, context, 2) - self._more
        plain = costs.cached(("plain", rows), lambda: costs.plain_round(rows))
        self.plain_seconds = plain + costs.num_layers * self._more
        self._rounds: dict[tuple[float, bool], Floats] = {}  # by drafter
        self._lookups: list[float] | None = None

    def correct_lookups(self, ratio: float) -> None:
        """Take on how much longer rounds by lookup take than plain ones, beside what the table says of both."""
        if abs(ratio / self._lookup_ratio - 1) >= NOTICEABLE:
            self._lookup_ratio, self._lookups = ratio, None

    def rates(self, right: Floats, share: Floats, coverages: Floats) -> tuple[Floats, Floats]:
        """(tokens per second of all rows `[drafters, L - 1, stops]`, drafted tokens per row `[L - 1, stops]`).

        Of one row, the stops are to end below each bin or after some number of tokens, whichever comes first, since
        some models are as sure of every token; of several, after each number of tokens.

        Args:
            right: `[L - 1, bins]`, how often a token of each bin of confidence is right.
            share: `[L - 1, bins]`, how often each bin occurs.
            coverages: `[drafters, L - 1]`, by what `right` is multiplied.
        """
        seconds = [self._seconds(drafter) for drafter in self.drafters]
        drafted_right = right * share * coverages[:, :, None]
        if self.num_rows > 1:
            acceptance = np.add.reduce(drafted_right, 2, keepdims=True)
            kept = 1 + np.add.accumulate(acceptance**_LENGTHS, 2)
            return self.num_rows * kept / np.array(seconds)[:, :, 1:], np.tile(_LENGTHS, (len(share), 1))
        # P(a token lies above the bound), P(it does, and is right): [1 + drafters, L - 1, bins]
        likely = np.concatenate((share[None], drafted_right))
        above = np.minimum(np.add.accumulate(likely[:, :, ::-1], 2)[:, :, ::-1], 1 - 1e-6)
        # Tokens of a draft that ends below the bound or at a cap, and right ones among those before its last.
        expected = ((1 - above[..., None] ** _CAPS) / (1 - above[..., None])).reshape(len(above), len(share), -1)
        drafted, kept = expected[0], expected[1:]
        low, rounds = drafted.astype(np.int64), np.empty(kept.shape)  # below `MOST`
        at = low + np.arange(0, len(share) * (MOST + 1), MOST + 1)[:, None]
        for line, of_drafter in zip(rounds, seconds, strict=True):
            below, beyond = of_drafter.take(at), of_drafter.take(at + 1)
            line[:] = below + (drafted - low) * (beyond - below)
        return (1 + above[1:, :, :1] * kept) / rounds, drafted

    def limits(self) -> Floats:
        """`[L - 1]`: tokens per second of all rows by an exit layer that is always right; no drafter promises more."""
        limits = np.zeros(self._costs.num_layers - 1)
        for drafter in self.drafters:
            best = np.maximum.reduce((1 + _LENGTHS) / self._seconds(drafter)[:, 1:], 1)
            limits[: drafter.deepest] = np.maximum(limits[: drafter.deepest], best[: drafter.deepest])
        return self.num_rows * limits

    def rounds(self, exit_layer: int, drafter: Drafter = BY_LAYERS) -> list[float]:
        """Seconds of rounds in which every row drafts 0..MOST tokens."""
        seconds: list[float] = self._seconds(drafter)[exit_layer - 1].tolist()
        return seconds

    def beside(self, exit_layer: int, drafted: float, drafter: Drafter = BY_LAYERS) -> tuple[float, float]:
        """Seconds that drafting tokens beside the others adds to a round of about `drafted` per row: at all, and each.

        The last pass becomes wider, and verification.
        """
        costs, rows = self._costs, self.num_rows
        head = costs.copies.head if drafter.by_copies and costs.copies is not None else costs.head
        step = costs.early_pass(exit_layer, rows, self._context, copies=drafter.by_copies)
        step += drafter.share * (head(rows) + costs.pick(rows))
        verified = one_more(self.rounds(exit_layer, drafter), drafted, rows) - step / rows
        if drafter.by_copies:  # they need not read what is verified
            return 0.0, verified
        narrow, some, many = (costs.wide_pass(exit_layer, rows, rows + n, self._context) for n in (0, 1, 5))
        each = (many - some) / 4
        return some - narrow - each, each + verified

    def lookups(self) -> list[float]:
        """Seconds of rounds that draft 0, 1, 2, .. tokens by lookup in all, for the whole model to verify."""
        if self._lookups is None:
            drafted, seconds = self._costs.cached(("lookups", self.num_rows), self._lookup_rounds)
            reading = self._costs.num_layers * (self._more + self._further * drafted)
            self._lookups = [self.plain_seconds, *(self._lookup_ratio * (seconds + reading)).tolist()]
        return self._lookups

    def _seconds(self, drafter: Drafter) -> Floats:
        """`[L - 1, MOST + 1]`, by drafted tokens per row."""
        key = drafter.share, drafter.by_copies
        if key not in self._rounds:
            terms = self._costs.cached(("rounds", self.num_rows, key[1]), lambda: self._terms(drafter.by_copies))
            factors = np.array((1.0, drafter.share, self._more, self._further))
            self._rounds[key] = np.tensordot(factors, terms, 1)
        return self._rounds[key]

    def _terms(self, copies: bool) -> Floats:
        """`[4, L - 1, MOST + 1]`: what the seconds of rounds are a sum of, by drafted tokens per row.

        Fixed seconds; seconds of drafting's head and picks over the whole vocabulary; layers run over a token per row;
        and further tokens of layers that verify.

        Args:
            copies: copies of the layers draft: they need not read the last token, and all layers verify.
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
        """Of rounds by lookup, by drafted tokens in all: drafted tokens per row, and seconds."""
        rows, costs = self.num_rows, self._costs
        tokens = [rows * (1 + drafted) for drafted in LOOKUP_GRID]
        ragged = max(1.0, costs.ragged(rows)) if costs.ragged is not None and rows > 1 else 1.0
        layers = [ragged * costs.verify(0, rows, n) for n in tokens]
        judging = [costs.verify_head(n, rows) + costs.pick(n) for n in tokens]
        drafted = np.arange(1, min(rows * MOST_FOUND, MOST_PACKED) + 1) / rows
        seconds = np.interp(drafted, LOOKUP_GRID, np.add(layers, judging)) + costs.rest(rows) + rows * LOOKUP_SECONDS
        return drafted, seconds


def one_more(rounds: Sequence[float], drafted: float, num_rows: int) -> float:
    """Seconds that one more drafted token per row adds, for each row, to a round of about `drafted` per row."""
    at = min(int(drafted), MOST - 2)
    return (rounds[at + 2] - rounds[at]) / 2 / num_rows


def each_of(rounds: Sequence[float], drafted: float, num_rows: int) -> float:
    """The same of each token in the mean, from the first to about the last one."""
    count = min(MOST, max(1, math.ceil(drafted)))
    return (rounds[count] - rounds[0]) / count / num_rows
