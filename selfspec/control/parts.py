"""Ways of drafting that are cheaper than the layers themselves and nearly as often right.

Drafts may be written by copies of the layers in 4 bits, see `selfspec.target.rounded`; or they may be picked among a
part of the vocabulary, where the whole head is dear beside a layer:
A draft over the most frequent tokens costs their share of the head at every token, and is wrong wherever the target
picks another one (FR-Spec, arXiv 2502.14856). How often that is can be seen without drafting at all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

from selfspec.control.costs import Costs
from selfspec.control.worth import Way, deepest_copy

DIVISORS = (8, 4)  # of the vocabulary
LEAST = 4096  # tokens: of smaller heads there is little to save


class Vocabulary(Protocol):
    """What a policy may know of the tokens; see `selfspec.target.draft_head.Frequencies`."""

    @property
    def vocab_size(self) -> int: ...
    def coverage(self, size: int) -> float:
        """The share of lately written tokens that were among the `size` most frequent before they were written."""
        ...


class Part(NamedTuple):
    """What a draft is picked among."""

    size: int | None  # tokens; None: the whole vocabulary
    share: float  # of the vocabulary
    coverage: float  # of what the target picks
    bits: int | None = None  # 4: by copies of the layers
    deepest: int | None = None  # exit layer

    @property
    def way(self) -> tuple[int | None, int | None]:
        """By what it is told from others."""
        return self.size, self.bits

    @property
    def priced_as(self) -> Way:
        return self.share, self.bits is not None


WHOLE = Part(None, 1.0, 1.0)


class Parts:
    """The layers and the whole vocabulary; copies; parts of the vocabulary where the head costs more than a layer."""

    def __init__(self, costs: Costs, vocabulary: Vocabulary | None = None, copies: bool = False) -> None:
        self._vocabulary = vocabulary
        self._whole = [WHOLE]
        if copies and costs.copies is not None:
            self._whole.append(Part(None, 1.0, 1.0, 4, deepest_copy(costs.num_layers)))
        self._ways = [way for way in self._whole if vocabulary is not None and _has_dear_head(costs, way)]

    def now(self, is_whole: bool = False) -> Sequence[Part]:
        """Those to choose from, as they cover the text now; `is_whole`: the layers and the whole vocabulary alone."""
        return [WHOLE] if is_whole else [*self._whole, *self._of_sizes()]

    def share(self, size: int | None) -> float:
        """Of the vocabulary."""
        return 1.0 if size is None or self._vocabulary is None else size / self._vocabulary.vocab_size

    def _of_sizes(self) -> Iterator[Part]:
        if self._vocabulary is not None and self._ways:
            for size in [self._vocabulary.vocab_size // divisor for divisor in DIVISORS]:
                if size >= LEAST:
                    part = Part(size, self.share(size), self._vocabulary.coverage(size))
                    yield from (part._replace(bits=way.bits, deepest=way.deepest) for way in self._ways)


def _has_dear_head(costs: Costs, way: Part) -> bool:
    """Whether its head takes longer than a layer."""
    by_copies = way.bits is not None
    drafting = costs.copies if by_copies and costs.copies is not None else costs
    return drafting.head(1) > costs.early_pass(1, 1, copies=by_copies)
