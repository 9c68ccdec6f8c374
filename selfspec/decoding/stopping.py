"""Where a row ends: asked token by token, so that an end inside an accepted block is an end there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from threading import Lock
from typing import Any, NamedTuple

import torch

from selfspec.core import FinishReason, StoppingCriterion
from selfspec.params import SamplingParams
from selfspec.structured.formats import overlap
from selfspec.structured.row_grammar import RowGrammar


class TextRules(NamedTuple):
    """What is text of the tokens, besides the stop strings."""

    includes_stop: bool = False  # a stop string that is found is part of the text
    skips_special_tokens: bool = True
    min_tokens: int = 0  # no stop string is looked for in the text before so many tokens

    @classmethod
    def of(cls, params: SamplingParams) -> TextRules:
        """Those of a request."""
        return cls(params.include_stop_str_in_output, params.skip_special_tokens, params.min_tokens)


DEFAULT_RULES = TextRules()


class TextStream:
    """Turns tokens into text as they come, without ever splitting a character.

    Decoded with a few tokens of context, so that a tokenizer which strips a leading space does so only at the prompt's
    start. Text that may be the beginning of a stop string is held back until it is known.
    """

    CONTEXT = 6
    MOST_CONTEXT = 64

    def __init__(
        self, tokenizer: Any, prompt: Sequence[int], stop: Sequence[str] = (), rules: TextRules = DEFAULT_RULES
    ) -> None:
        self._tokenizer, self._stop, self._rules = tokenizer, tuple(stop), rules
        self._num_pushed = 0
        self._ids, self._start = list(prompt[-self.MOST_CONTEXT :]), 0
        start = max(0, len(self._ids) - self.CONTEXT)
        while start > 0 and self._decode(self._ids[start:]).startswith("\ufffd"):
            start -= 1  # not inside a character, nor inside a run of byte tokens, which some tokenizers decode as one
        self._ids, self._read = self._ids[start:], len(self._ids) - start
        for _ in range(3):  # a character that the prompt leaves unfinished belongs to the output that completes it
            if self._read and self._decode(self._ids[: self._read]).endswith("\ufffd"):
                self._read -= 1
        self._seen = self._decode(self._ids[: self._read])
        self._held = ""
        self.found: str | None = None  # the stop string that ended the text

    def _decode(self, ids: Sequence[int]) -> str:
        skips = self._rules.skips_special_tokens
        return str(self._tokenizer.decode(ids, skip_special_tokens=skips, clean_up_tokenization_spaces=False))

    def push(self, tokens: Iterable[int], last: bool = False) -> str:
        """Add tokens; return the text that is now certain. Stop strings are cut off, with all that follows."""
        known = len(self._ids)
        self._ids += tokens
        self._num_pushed += len(self._ids) - known
        text = self._decode(self._ids[self._start :])
        if len(text) > len(self._seen) and (last or not text.endswith("\ufffd")):
            self._held += text[len(self._seen) :]
            self._start, self._read = self._read, len(self._ids)
            self._seen = self._decode(self._ids[self._start : self._read])
        return self._release(last)

    def _release(self, last: bool) -> str:
        stop = self._stop if self._num_pushed >= self._rules.min_tokens else ()
        cuts = [(at, s) for s in stop if (at := self._held.find(s)) >= 0]
        if cuts:
            at, self.found = min(cuts)
            kept = at + len(self.found) if self._rules.includes_stop else at
            certain, self._held = self._held[:kept], ""
            return certain
        keep = 0 if last else max((overlap(self._held, s) for s in stop), default=0)
        certain, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return certain


class SequenceText:
    """A row's text; its tokens are turned into text when somebody reads it, which takes longer than ending a round.

    They are turned in the order and in the blocks in which they came, so that a piece is the same whenever it is read.

    Args:
        prompt: what the text goes on from.
        stop, rules: see `TextStream`.
    """

    def __init__(
        self, tokenizer: Any, prompt: Sequence[int], stop: Sequence[str] = (), rules: TextRules = DEFAULT_RULES
    ) -> None:
        self._tokenizer, self._prompt, self._stop, self._rules = tokenizer, prompt, stop, rules
        self._stream: TextStream | None = None  # of the blocks that were read
        self._blocks: list[tuple[Sequence[int], bool]] = []  # tokens, and whether none follow
        self._pieces: list[str] = []  # of those that were read
        self._reading = Lock()  # rounds may be read in another thread than decodes them

    @property
    def found(self) -> str | None:
        """The stop string that ended what was read."""
        return None if self._stream is None else self._stream.found

    def add(self, tokens: Sequence[int], last: bool = False) -> TextDelta:
        """Take the tokens that came; they are not copied."""
        self._blocks.append((tokens, last))
        return TextDelta(self, len(self._blocks) - 1)

    def __len__(self) -> int:
        """Blocks that came."""
        return len(self._blocks)

    def forget(self, first: int) -> None:
        """Blocks from that one on never came."""
        with self._reading:
            del self._blocks[first:]
            self._stream, self._pieces = None, []

    def piece(self, index: int) -> str:
        """What became certain with a block."""
        with self._reading:
            if self._stream is None:
                self._stream = self._new_stream()
            for tokens, last in self._blocks[len(self._pieces) : index + 1]:
                self._pieces.append(self._stream.push(tokens, last))
            return self._pieces[index]

    def __str__(self) -> str:
        """All that is certain."""
        if not self._blocks:
            return ""
        is_whole = self._blocks[-1][1] and not self._rules.min_tokens
        if is_whole and not self._pieces:  # nobody has read it as it came: at once is faster
            text = self._new_stream().push([token for tokens, _ in self._blocks for token in tokens], last=True)
            if "\ufffd" not in text:  # how a broken character is shown may depend on the blocks
                return text
        self.piece(len(self._blocks) - 1)
        return "".join(self._pieces)

    def _new_stream(self) -> TextStream:
        return TextStream(self._tokenizer, self._prompt, self._stop, self._rules)


class TextDelta(NamedTuple):
    """What became certain of a row's text with one block; `str` of it is the text."""

    text: SequenceText
    block: int

    def __str__(self) -> str:
        return self.text.piece(self.block)

    def __repr__(self) -> str:
        return repr(str(self))

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (str(self),)  # a copy is the text alone


class Stopper:
    """Cuts a block of new tokens where its row ends, and hands what is kept on to its text and its grammar."""

    def __init__(
        self,
        max_new_tokens: int,
        eos: frozenset[int] = frozenset(),
        text: SequenceText | None = None,
        stop: Sequence[str] = (),
        criteria: Sequence[StoppingCriterion] = (),
        stop_tokens: frozenset[int] = frozenset(),
        grammar: RowGrammar | None = None,
    ) -> None:
        self.max_new_tokens, self.eos, self._text, self._criteria = max_new_tokens, eos, text, criteria
        self._grammar = grammar
        self.ends = eos | stop_tokens
        """Tokens that end the row."""
        self.ends_by_token = not stop and not criteria
        """Whether only these tokens and the length end the row, and neither text nor criteria may."""

    @property
    def text(self) -> str:
        """Of all tokens so far, as far as it is certain."""
        return "" if self._text is None else str(self._text)

    def cut(
        self, content: Sequence[int], emitted: int, block: Sequence[int]
    ) -> tuple[int, str | TextDelta, FinishReason | None]:
        """How many tokens of `block` are kept, their text, and why the row ends there, if it does.

        Args:
            content: the row's tokens before the block, prompt included.
            emitted: how many of them are new.
        """
        is_whole = False  # whether the grammar ends with the block
        if self._grammar is not None:
            count, is_whole = self._grammar.take(block)
            block = block[:count]
        if not self.ends_by_token:
            known = 0 if self._text is None else len(self._text)
            try:
                return self._cut_by_token(content, emitted, block, is_whole)
            except BaseException:  # of a criterion: the row gets none of the block
                if self._text is not None:
                    self._text.forget(known)
                raise
        reason: FinishReason | None = None
        kept = min(len(block), self.max_new_tokens - emitted)
        if is_whole or not self.ends.isdisjoint(block):
            end = next((i for i, token in enumerate(block, 1) if token in self.ends), len(block))
            if end <= kept:
                return end, self._push(block[:end], last=True), "stop"
        if emitted + kept >= self.max_new_tokens:
            reason = "length"
        return kept, self._push(block[:kept], last=reason is not None), reason

    def _cut_by_token(
        self, content: Sequence[int], emitted: int, block: Sequence[int], is_whole: bool
    ) -> tuple[int, str, FinishReason | None]:
        """The same where text or criteria may end the row: they are asked after each token."""
        reason: FinishReason | None = None
        text, kept = "", len(block)
        for i, token in enumerate(block):
            if token in self.ends or (is_whole and i + 1 == len(block)):
                reason = "stop"
            text += str(self._push([token], last=False))
            asked = self._criterion([*content, *block[: i + 1]])
            if reason is None and (asked or self._stopped()):
                reason = "stop"
            if reason is None and emitted + i + 1 >= self.max_new_tokens:
                reason = "length"
            if reason is not None:
                kept = i + 1
                break
        return kept, text + str(self._push([], last=reason is not None)), reason

    def stop_reason(self, tokens: Sequence[int]) -> int | str | None:
        """The stop token or stop string that ended these tokens; None: an end of text, a criterion, or nothing did."""
        if tokens and tokens[-1] in self.ends:
            return None if tokens[-1] in self.eos else tokens[-1]
        return None if self._text is None else self._text.found

    def flush(self) -> str | TextDelta:
        """The text still held back, for a row that ends with no further token."""
        return self._push([], last=True)

    def _push(self, tokens: Sequence[int], last: bool) -> str | TextDelta:
        if self._text is None or self._stopped():
            return ""
        return self._text.add(tokens, last)

    def _stopped(self) -> bool:
        return self._text is not None and self._text.found is not None

    def _criterion(self, content: list[int]) -> bool:
        if not self._criteria:
            return False
        with torch.inference_mode():
            ids = torch.tensor([content])
            answers = [bool(torch.as_tensor(ask(ids, None)).all()) for ask in self._criteria]  # every one is asked
        return any(answers)
