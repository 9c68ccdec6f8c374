"""`RowLookup`: drafts by lookup in a row's own text, and in a corpus."""

from __future__ import annotations

from collections.abc import Sequence

from selfspec.control.rows import Tally
from selfspec.drafting.compiled_prompt_lookup import lookup_of
from selfspec.drafting.datastore import Datastore
from selfspec.drafting.prompt_lookup import Guess, Lookup

OWN_LEAD = 3  # a match in the corpus must be longer than one in the row's own text by more than this


class RowLookup:
    """Lookup for a row in its own text and in a corpus, which the rows of an engine share.

    A draft continues the longest match in the row's own text. It continues the match in the corpus where that is longer
    by more than `OWN_LEAD` tokens, or where the own text has none.

    Args:
        content: the row's tokens, not copied; tokens may be appended.
    """

    def __init__(self, content: Sequence[int], datastore: Datastore | None = None) -> None:
        self._content, self._datastore = content, datastore
        self._own: Lookup | None = None
        self._stored, self._stored_for = 0, -1  # match length in the corpus, and the content's length at that time

    @property
    def own(self) -> Lookup:
        """The index over the row's own text, built at the first use."""
        if self._own is None:
            self._own = lookup_of(self._content)
        return self._own

    @property
    def has_corpus(self) -> bool:
        return self._datastore is not None

    @property
    def match(self) -> int:
        """The match length; 0 without a match."""
        own = self.own.match
        return max(own, self._stored_match()) if self._is_stored(own) else own

    def take_tally(self) -> Tally:
        """Statistics of lookup in the row's own text since the last call."""
        return self.own.take_tally()

    def guess(self, num_tokens: int) -> Guess:
        """Draft at most `num_tokens` tokens."""
        if num_tokens > 0 and self._datastore is not None and self._is_stored(self.own.match):
            return self._datastore.draft(self._content, num_tokens)._replace(is_stored=True)
        return self.own.draft(num_tokens)

    def _is_stored(self, own: int) -> bool:
        """Whether the corpus is used, given the match length in the row's own text."""
        return self._datastore is not None and self._stored_match() > (own + OWN_LEAD if own else 0)

    def _stored_match(self) -> int:
        if self._datastore is not None and self._stored_for != len(self._content):
            match = self._datastore.find(self._content)
            self._stored, self._stored_for = 0 if match is None else match.length, len(self._content)
        return self._stored
