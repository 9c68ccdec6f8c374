"""`RowLookup`: drafts by lookup in a row's own text, and in a corpus."""

from __future__ import annotations

from collections.abc import Sequence

from selfspec.control.rows import Tally
from selfspec.drafting.compiled_prompt_lookup import lookup_of
from selfspec.drafting.datastore import Datastore
from selfspec.drafting.prompt_lookup import Guess, Lookup

OWN_LEAD = 3  # tokens that a match in the row's own text is worth more: what was said lately is said again


class RowLookup:
    """What a row's text and a corpus offer for its drafts by lookup; the corpus is shared by the rows of an engine.

    A draft is what followed the longest match in the row's own text; or in the corpus, where that is longer by more
    than `OWN_LEAD` tokens, or nothing is found in the row's own.

    Args:
        content: the row's tokens; it may grow at its end, and is not copied.
    """

    def __init__(self, content: Sequence[int], datastore: Datastore | None = None) -> None:
        self._content, self._datastore = content, datastore
        self._own: Lookup | None = None
        self._stored, self._stored_for = 0, -1  # match in the corpus, of content of this length

    @property
    def own(self) -> Lookup:
        """The index over the row's own text, made when it is first asked for."""
        if self._own is None:
            self._own = lookup_of(self._content)
        return self._own

    @property
    def has_corpus(self) -> bool:
        return self._datastore is not None

    @property
    def match(self) -> int:
        """How many of the row's last tokens are found, 0 where none are."""
        own = self.own.match
        return max(own, self._stored_match()) if self._is_stored(own) else own

    def take_tally(self) -> Tally:
        """How often drafts from the row's own text would have been right, token by token, since this was last asked."""
        return self.own.take_tally()

    def guess(self, num_tokens: int) -> Guess:
        """A draft of at most so many tokens, and the match it follows."""
        if num_tokens > 0 and self._datastore is not None and self._is_stored(self.own.match):
            return self._datastore.draft(self._content, num_tokens)._replace(is_stored=True)
        return self.own.draft(num_tokens)

    def _is_stored(self, own: int) -> bool:
        """Whether the corpus has a match that is better than one of so many tokens in the row's own text."""
        return self._datastore is not None and self._stored_match() > (own + OWN_LEAD if own else 0)

    def _stored_match(self) -> int:
        if self._datastore is not None and self._stored_for != len(self._content):
            match = self._datastore.find(self._content)
            self._stored, self._stored_for = 0 if match is None else match.length, len(self._content)
        return self._stored
