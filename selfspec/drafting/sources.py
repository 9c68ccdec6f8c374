"""`Guesser`: all that is free to guess of how a row goes on: from its own text, from a corpus, from earlier looks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from selfspec.control.rows import Tally
from selfspec.drafting.compiled_lookup import lookup_of
from selfspec.drafting.datastore import Datastore
from selfspec.drafting.lookup import Guess, num_right
from selfspec.drafting.recycle import Ints, Recycled

OWN_LEAD = 3  # tokens that a match in the row's own text is worth more: what was said lately is said again


class Look(NamedTuple):
    """What a row's guesses, made or not, would have come to in a round."""

    match: int  # of the chain, 0 where there was none
    is_stored: bool  # whether the chain came from the corpus
    num_right: int  # first tokens of the chain that came
    ranks: tuple[tuple[int, bool, int], ...] = ()  # see `Guesser._ranks`


class Guesser:
    """One row's guesses; a corpus and recycled candidates are shared by the rows of an engine.

    The chain is what followed the longest match in the row's own text; or in the corpus, where that is longer by more
    than `OWN_LEAD` tokens, or nothing is found in the row's own.

    Args:
        content: the row's tokens; it may grow at its end, and is not copied.
    """

    def __init__(
        self, content: Sequence[int], recycled: Recycled | None = None, datastore: Datastore | None = None
    ) -> None:
        self._content, self._recycled, self._datastore = content, recycled, datastore
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
        return self._datastore is None and not self.recalls

    def take_tally(self) -> Tally:
        """How often guesses from the row's own text would have been right, since this was last asked."""
        return self.lookup.take_tally()

    @property
    def guessed(self) -> Sequence[int]:
        """Tokens that came as they would have been guessed from the row's own text, see `Lookup.guessed`."""
        return self.lookup.guessed

    @property
    def recalls(self) -> bool:
        """Whether there may be candidates of other tokens than the next."""
        return self._recycled is not None and self._recycled.has_learned

    @property
    def last(self) -> tuple[int, int]:
        """The last token but one, -1 where there is none, and the last one."""
        return (self._content[-2] if len(self._content) > 1 else -1), self._content[-1]

    def chain(self, num_tokens: int) -> list[int]:
        """At most so many tokens; none without a match."""
        return self.guess(num_tokens).tokens

    def guess(self, num_tokens: int) -> Guess:
        """The chain, and the match it follows."""
        if self._datastore is not None and self.is_stored:
            return self._datastore.draft(self._content, num_tokens)
        return self.lookup.draft(num_tokens)

    def candidates(self, token: int, previous: int) -> tuple[int, list[int]]:
        """What the model thought likely after such tokens the last time that it looked, the likeliest first.

        Returns:
            Also of what kind they are: 0 where only the token is known, 1 where the pair is.
        """
        if self._recycled is None or not self._recycled.has_learned:
            return 0, []
        kind = int(self._recycled.knows_pair(token, previous))
        return kind, self._recycled.candidates(token, previous)

    def first_candidates(self) -> tuple[int, list[int]]:
        """For the next token: what followed shorter matches, the longer first, then what the model thought likely.

        Returns:
            Also of what kind they are: 2 where something followed a shorter match, else as `candidates` has it.
        """
        others = self.lookup.alternatives()
        if not self.recalls:
            return (2, others) if others else (0, [])
        previous, token = self.last
        kind, found = self.candidates(token, previous)
        return (2, list(dict.fromkeys([*others, *found]))) if others else (kind, found)

    def look(self, block: Sequence[int], with_ranks: bool = True) -> Look:
        """Set the guesses beside the tokens that came, before these are added to the content."""
        tokens, match = self.guess(len(block))
        right = num_right(tokens, block)
        asks = with_ranks and (right == 0 or self.recalls)  # else there are no candidates
        return Look(match, self.is_stored, right, self._ranks(block, tokens, right) if asks else ())

    def _ranks(self, block: Sequence[int], chain: Sequence[int], right: int) -> tuple[tuple[int, bool, int], ...]:
        """Where the tokens that came stood among the candidates, as far as the chain did not offer them.

        Per token with candidates: their kind, whether the chain offered another one, and its place among the candidates
        without that; their number where it was none of them.
        """
        out = []
        previous, token = self.last if right == 0 else ((self.last[1], *block)[right - 1], block[right - 1])
        for at in range(right, len(block) if self.recalls else 1):
            offered = chain[at] if at == right and at < len(chain) else None
            kind, rest = self.first_candidates() if at == 0 else self.candidates(token, previous)
            if offered in rest:
                rest.remove(offered)
            came = block[at]
            if rest:
                out.append((kind, offered is not None, rest.index(came) if came in rest else len(rest)))
            previous, token = token, came
        return tuple(out)

    def learn(self, tokens: Sequence[int], candidates: Ints) -> None:
        """Take what the model thought likely at the row's last places, before `tokens` are added to its content.

        Args:
            tokens: what came there.
            candidates: `[len(tokens), k]`, the likeliest there.
        """
        if self._recycled is not None:
            before = [*self.last, *tokens[:-1]]
            self._recycled.learn(np.array(before[1:]), candidates, np.array(before[:-1]))

    def _stored_match(self) -> int:
        if self._datastore is not None and self._stored_for != len(self._content):
            match = self._datastore.find(self._content)
            self._stored, self._stored_for = 0 if match is None else match.length, len(self._content)
        return self._stored
