"""`RowLookup`: drafts by lookup in a sequence's own text, in finished responses, and in a corpus."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from selfspec.control.plan import OWN_TEXT
from selfspec.core import Draft, Request
from selfspec.drafting.datastore import Datastore
from selfspec.drafting.datastore import Match as CorpusMatch
from selfspec.drafting.ngram_index import MOST_MATCHED, CompiledIndex, Index, Tally, new_index
from selfspec.drafting.responses import Match, Responses

Texts = Responses | Datastore  # where drafts by lookup may come from besides a sequence's own text
PREDICTION_CONTEXT = 16  # the last tokens of a prompt, after which its prediction is expected to begin
OWN_LEAD = 3  # a match in other texts must be longer than one in the row's own text by more than this


class Prediction(NamedTuple):
    """What a row's output is expected to be: the end of its prompt, and the tokens after it."""

    token_ids: Sequence[int]
    num_prompt_tokens: int  # at its begin

    @classmethod
    def of(cls, request: Request) -> Prediction | None:
        """A request's, whose prediction is token ids; None: it has none."""
        given = request.params.prediction
        assert not isinstance(given, str)
        end = request.prompt_token_ids[-PREDICTION_CONTEXT:]
        return cls([*end, *given], len(end)) if given else None


class TextLookup:
    """Prompt lookup (github.com/apoorvumang/prompt-lookup-decoding) in a sequence's own text.

    Args:
        content: the row's tokens, not copied; tokens may be appended.
        most: maximum match length, 1..255.
        make: makes the index.
        prediction: a text in which matches are found, too.
    """

    def __init__(
        self,
        content: Sequence[int],
        most: int = MOST_MATCHED,
        make: Callable[[int, int], Index | CompiledIndex] = new_index,
        prediction: Prediction | None = None,
    ) -> None:
        self.most, self._make, self._content, self._prediction = most, make, content, prediction
        self._start = 0 if prediction is None else len(prediction.token_ids) + 1  # of its own tokens in the index
        self._index: Index | CompiledIndex | None = self._new()
        self._read = self._tallied = 0  # tokens in the index; of them, those of earlier tallies
        self._match, self._place = 0, -1  # of the last token in the index

    def __len__(self) -> int:
        """Tokens in the index."""
        return self._read

    @property
    def index(self) -> Index | CompiledIndex:
        """The index of all tokens. Compiled rounds may add tokens to it before the row has them."""
        self._catch_up()
        assert self._index is not None
        return self._index

    @property
    def match(self) -> int:
        """The match length: the number of the row's last tokens that occurred before, at most `most`."""
        if self._read < len(self._content):
            self._catch_up()
        return self._match

    def take_tally(self) -> Tally:
        """Statistics of lookup over the tokens since the last call, token by token."""
        counts = self.index.take_counts()
        num_tokens, self._tallied = self._read - self._tallied, self._read
        return Tally(num_tokens, *counts)

    def draft(self, num_tokens: int) -> Draft:
        """Draft `num_tokens` tokens, or none without a match.

        Where the earlier occurrence has fewer tokens after it, the text is a repetition, which the draft continues.
        """
        match = self.match
        if match == 0 or num_tokens < 1:
            return Draft([], match)
        if self._start:
            return Draft(self.index.draft(self._place, num_tokens), match)
        content, start = self._content, self._place + 1
        period = self._read - start
        if num_tokens <= period:
            return Draft(list(content[start : start + num_tokens]), match)
        return Draft([content[start + i % period] for i in range(num_tokens)], match)

    def _new(self) -> Index | CompiledIndex:
        made = self._make(self.most, len(self._content) + self._start)
        if self._prediction is not None:
            made.add_text(self._prediction.token_ids, self._prediction.num_prompt_tokens - 1)
        return made

    def _catch_up(self) -> None:
        content, index = self._content, self._index
        held = -1 if index is None else len(index) - self._start
        self._index = None  # until it is complete again
        is_lost = not 0 <= held <= len(content)  # it has tokens of lost rounds, or there was too little memory
        if index is None or is_lost:
            index, held = self._new(), 0
        index.extend(content[held:])
        if is_lost:
            index.take_counts()  # which were taken before
        self._index, self._read, (self._match, self._place) = index, len(content), index.last


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
        prediction: what the output is expected to be; it counts as the row's own text.
    """

    def __init__(
        self, content: Sequence[int], others: Sequence[Texts] = (), prediction: Prediction | None = None
    ) -> None:
        self._content, self._others, self._prediction = content, others, prediction
        self._own: TextLookup | None = None
        self._found: tuple[Any, Match | CorpusMatch] | None = None  # the best match in other texts, if it is used
        self._found_for = -1  # the content's length at that time

    @property
    def own(self) -> TextLookup:
        """The index over the row's own text, built at the first use."""
        if self._own is None:
            self._own = TextLookup(self._content, prediction=self._prediction)
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
