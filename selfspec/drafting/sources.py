"""`Guesser`: all that is free to guess of how a row goes on: from its own text, and from a corpus."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from selfspec.control.rows import Tally
from selfspec.drafting.compiled_lookup import lookup_of
from selfspec.drafting.datastore import Datastore
from selfspec.drafting.lookup import Guess, num_right

OWN_LEAD = 3  # tokens that a match in the row's own text is worth more: what was said lately is said again


class Look(NamedTuple):
    """What a row's guesses, made or not, would have come to in a round."""

    match: int  # of the chain, 0 where there was none
    is_stored: bool  # whether the chain came from the corpus
    num_right: int  # first tokens of the chain that came


class Guesser:
    """One row's guesses; a corpus is shared by the rows of an engine.

    The chain is what followed the longest match in the row's own text; or in the corpus, where that is longer by more
    than `OWN_LEAD` tokens, or nothing is found in the row's own.

    Args:
        content: the row's tokens; it may grow at its end, and is not copied.
    """

    def __init__(self, content: Sequence[int], datastore: Datastore | None = None) -> None:
        self._content, self._datastore = content, datastore
        self.lookup = lookup_of(content)
        self._stored, self._stored_for = 0, -1  # match in the corpus, of content of this length

    @property
    def is_read(self) -> bool:
        """Whether somebody asked for guesses before: a row's index is made when they do."""
        return len(self.lookup) > 0

    @property
    def match(self) -> int:
        """How many of the row's last tokens the chain follows, 0 where there is none."""
        if self._datastore is None:
            return self.lookup.match
        return self._stored_match() if self.is_stored else self.lookup.match

    @property
    def is_stored(self) -> bool:
        """Whether the chain comes from the corpus."""
        if self._datastore is None:
            return False
        own = self.lookup.match
        return self._stored_match() > (own + OWN_LEAD if own else 0)

    @property
    def is_own(self) -> bool:
        """Whether all guesses come from the row's own text."""
        return self._datastore is None

    def take_tally(self) -> Tally:
        """How often guesses from the row's own text would have been right, since this was last asked."""
        return self.lookup.take_tally()

    @property
    def guessed(self) -> Sequence[int]:
        """Tokens that came as they would have been guessed from the row's own text, see `Lookup.guessed`."""
        return self.lookup.guessed

    def chain(self, num_tokens: int) -> list[int]:
        """At most so many tokens; none without a match."""
        return self.guess(num_tokens).tokens

    def guess(self, num_tokens: int) -> Guess:
        """The chain, and the match it follows."""
        if self._datastore is not None and self.is_stored:
            return self._datastore.draft(self._content, num_tokens)
        return self.lookup.draft(num_tokens)

    def alternatives(self) -> list[int]:
        """What else may come next: the tokens that followed shorter matches in the row's own text, the longer first."""
        return self.lookup.alternatives()

    def look(self, block: Sequence[int]) -> Look:
        """Set the guesses beside the tokens that came, before these are added to the content."""
        tokens, match = self.guess(len(block))
        right = num_right(tokens, block)
        return Look(match, self.is_stored, right)

    def _stored_match(self) -> int:
        if self._datastore is not None and self._stored_for != len(self._content):
            match = self._datastore.find(self._content)
            self._stored, self._stored_for = 0 if match is None else match.length, len(self._content)
        return self._stored
