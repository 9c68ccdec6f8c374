"""`RowLookup`: drafts by lookup in a row's own text, in finished responses, and in a corpus."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from selfspec.control.plan import OWN_TEXT
from selfspec.core import Draft
from selfspec.drafting.compiled_index import CompiledIndex
from selfspec.drafting.datastore import Datastore
from selfspec.drafting.datastore import Match as CorpusMatch
from selfspec.drafting.ngram_index import Tally
from selfspec.drafting.prompt_lookup import Lookup
from selfspec.drafting.responses import Match, Responses

Texts = Responses | Datastore  # where drafts by lookup may come from besides a sequence's own text

OWN_LEAD = 3  # a match in other texts must be longer than one in the row's own text by more than this


class CompiledTexts(NamedTuple):
    """Where a row looks in compiled rounds."""

    own: CompiledIndex
    others: list[tuple[int, Any]]  # source and texts


class RowLookup:
    """Lookup for a row in its own text and in texts that the rows of an engine share.

    A draft continues the longest match in the row's own text. It continues a match in other texts where that is longer
    by more than `OWN_LEAD` tokens, or where the own text has none; of several, the longest, the first among equals.

    Args:
        content: the row's tokens, not copied; tokens may be appended.
        others: the other texts. Rows that are decoded together have the same ones.
    """

    def __init__(self, content: Sequence[int], others: Sequence[Texts] = ()) -> None:
        self._content, self._others = content, others
        self._own: Lookup | None = None
        self._found: tuple[Any, Match | CorpusMatch] | None = None  # the best match in other texts, if it is used
        self._found_for = -1  # the content's length at that time

    @property
    def own(self) -> Lookup:
        """The index over the row's own text, built at the first use."""
        if self._own is None:
            self._own = Lookup(self._content)
        return self._own

    def compiled(self) -> CompiledTexts | None:
        """The texts for compiled rounds; None if some are not compiled."""
        own, parts = self.own.index, [(texts.source, texts.compiled()) for texts in self._others]
        if not isinstance(own, CompiledIndex) or any(compiled is None for _, compiled in parts):
            return None
        return CompiledTexts(own, [(source, one) for source, compiled in parts for one in compiled or ()])

    @property
    def match(self) -> int:
        """The match length; 0 without a match."""
        found = self._find()
        return self.own.match if found is None else found[1].length

    @property
    def source(self) -> int:
        """Where the match is: one of `control.plan.SOURCES`."""
        found = self._find()
        return OWN_TEXT if found is None else found[0].source

    def take_tally(self) -> Tally:
        """Statistics of lookup in the row's own text since the last call."""
        return self.own.take_tally()

    def draft(self, num_tokens: int) -> Draft:
        """Draft at most `num_tokens` tokens."""
        found = self._find() if num_tokens > 0 else None
        if found is None:
            return self.own.draft(num_tokens)
        texts, match = found
        return Draft(texts.continuation(match, num_tokens), match.length, texts.source)

    def _find(self) -> tuple[Any, Match | CorpusMatch] | None:
        if self._others and self._found_for != len(self._content):
            own = self.own.match
            needed = own + OWN_LEAD if own else 0
            best: tuple[Any, Match | CorpusMatch] | None = None
            for texts in self._others:
                found = texts.find(self._content)
                if found is not None and found.length > needed:
                    needed, best = found.length, (texts, found)
            self._found, self._found_for = best, len(self._content)
        return self._found
