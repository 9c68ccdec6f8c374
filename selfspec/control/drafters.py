"""`Drafters`: the drafters that use early layers, to choose from.

They are the layers; 4-bit copies of them (`selfspec.executors.cpu.packed`); and, where the head takes longer than a
layer, each of these over the most frequent tokens only (FR-Spec, arXiv 2502.14856). Such a draft takes only a share of
the head's time. Its coverage is the share of the target's picks that are among these tokens, which is measured without
drafting.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from selfspec.control.costs import Costs, between_rows

if TYPE_CHECKING:
    from selfspec.model.draft_vocabulary import Frequencies

MOST, MOST_FOUND = 18, 63  # maximum draft lengths: by layers, and by lookup
# Draft lengths of recorded rounds, and exit layers in sixteenths of the layers. Each pair is a recording; of more of
# them, expected tokens per second differ by less than acceptance is known, and a start would not record all.
RECORDED_LENGTHS, RECORDED_EXITS = (1, 2, 4), (1, 4)
VOCAB_DIVISORS = (8, 4)  # sizes of draft vocabularies: the vocabulary's over these
LEAST_VOCAB = 4096  # smallest draft vocabulary


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
        # Each size is a set of recordings.
        self._divisors = VOCAB_DIVISORS if costs.recorded is None else VOCAB_DIVISORS[-1:]
        self._with_dear_heads = [drafter for drafter in self._over_all if _has_dear_head(costs, drafter)]

    def now(self, only_layers: bool = False) -> list[Drafter]:
        """The drafters to choose from. The coverage of a draft vocabulary that was not ranked yet is 1 (see `rank`).

        Args:
            only_layers: only the layers, over the whole vocabulary.
        """
        if only_layers or self._vocabulary is None:
            return [BY_LAYERS] if only_layers else [*self._over_all]
        text, dear = self._vocabulary, self._with_dear_heads
        sizes = [size for size in (text.vocab_size // divisor for divisor in self._divisors) if size >= LEAST_VOCAB]
        if text.focus is not None and text.focus < min(sizes, default=0):
            sizes = [text.focus, *sizes[:-1]]  # as many as before, for recordings
        covered = [text.coverage(size) if text.has_part(size) else 1.0 for size in sizes if dear]
        vocabs = [(size, self.share(size), coverage) for size, coverage in zip(sizes, covered, strict=False)]
        return [*self._over_all, *[Drafter(*vocab, one.draft_bits, one.deepest) for vocab in vocabs for one in dear]]

    def rank(self, drafter: Drafter) -> bool:
        """Rank the vocabulary of a drafter, which takes milliseconds; False if that was done before."""
        if drafter.draft_vocab is None or self._vocabulary is None or self._vocabulary.has_part(drafter.draft_vocab):
            return False
        self._vocabulary.part(drafter.draft_vocab)
        return True

    def share(self, size: int | None) -> float:
        """A draft vocabulary's share of the vocabulary; 1 for None."""
        return 1.0 if size is None or self._vocabulary is None else size / self._vocabulary.vocab_size


def copies_of(num_layers: int) -> Drafter:
    """The drafter of 4-bit copies, over the whole vocabulary."""
    return Drafter(draft_bits=4, deepest=deepest_copy(num_layers))


def deepest_copy(num_layers: int) -> int:
    """The deepest exit layer of copies. Deeper exits do not pay, so copies of further layers would waste memory."""
    return max(1, num_layers // 2)


def recorded_lengths(longest: int, most: int = MOST) -> list[int]:
    """The draft lengths of recorded rounds by layers: at most `longest`, what a recording holds, and `most`."""
    return sorted({length for length in [min(length, most) for length in RECORDED_LENGTHS] if 0 < length <= longest})


def recorded_exits(num_layers: int) -> list[int]:
    """The exit layers of recorded rounds."""
    return sorted({min(max(1, round(num_layers * i / 16)), num_layers - 1) for i in RECORDED_EXITS})


def _has_dear_head(costs: Costs, drafter: Drafter) -> bool:
    """Whether the drafter's head takes longer than one of its layers."""
    steps, head = (costs.steps, costs.head) if not drafter.by_copies or costs.copies is None else costs.copies
    return 2 * head(1) > between_rows(steps, 1, 1)
