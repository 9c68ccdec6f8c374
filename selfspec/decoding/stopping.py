"""Where a row ends: asked token by token, so that an end inside an accepted block is an end there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, Protocol

import torch

FinishReason = Literal["eos", "stop", "length", "cancelled"]


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that decoding needs."""

    def decode(self, token_ids: Any, **kwargs: Any) -> Any: ...


class TextStream:
    """Turns tokens into text as they come, without ever splitting a character.

    Decoded with a few tokens of context, so that a tokenizer which strips a leading space does so only at the prompt's
    start. Text that may be the beginning of a stop string is held back until it is known.
    """

    CONTEXT = 6
    MOST_CONTEXT = 64

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stop: Sequence[str] = ()) -> None:
        self._tokenizer, self._stop = tokenizer, tuple(stop)
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
        return str(self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def push(self, tokens: Iterable[int], last: bool = False) -> str:
        """Add tokens; return the text that is now certain. Stop strings are cut off, with all that follows."""
        self._ids += tokens
        text = self._decode(self._ids[self._start :])
        if len(text) > len(self._seen) and (last or not text.endswith("\ufffd")):
            self._held += text[len(self._seen) :]
            self._start, self._read = self._read, len(self._ids)
            self._seen = self._decode(self._ids[self._start : self._read])
        return self._release(last)

    def _release(self, last: bool) -> str:
        cuts = [(at, s) for s in self._stop if (at := self._held.find(s)) >= 0]
        if cuts:
            at, self.found = min(cuts)
            sure, self._held = self._held[:at], ""
            return sure
        keep = 0 if last else max((_overlap(self._held, s) for s in self._stop), default=0)
        sure, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return sure


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)


Criterion = Callable[[torch.Tensor, Any], Any]


class Stopper:
    """Cuts a block of new tokens where its row ends, and turns what is kept into text."""

    def __init__(
        self,
        max_new_tokens: int,
        eos: frozenset[int] = frozenset(),
        text: TextStream | None = None,
        stop: Sequence[str] = (),
        criteria: Sequence[Criterion] = (),
    ) -> None:
        self.max_new_tokens, self.eos, self._text, self._criteria = max_new_tokens, eos, text, criteria
        self._by_token = bool(stop) or bool(criteria)

    def cut(self, content: Sequence[int], emitted: int, block: Sequence[int]) -> tuple[int, str, FinishReason | None]:
        """How many tokens of `block` are kept, their text, and why the row ends there, if it does.

        Args:
            content: the row's tokens before the block, prompt included.
            emitted: how many of them are new.
        """
        reason: FinishReason | None = None
        text, kept = "", len(block)
        for i, token in enumerate(block):
            if token in self.eos:
                reason = "eos"
            if self._by_token:
                text += self._push([token], last=False)
                asked = self._criterion([*content, *block[: i + 1]])
                if reason is None and (asked or self._stopped()):
                    reason = "stop"
            if reason is None and emitted + i + 1 >= self.max_new_tokens:
                reason = "length"
            if reason is not None:
                kept = i + 1
                break
        text += self._push([] if self._by_token else block[:kept], last=reason is not None)
        return kept, text, reason

    def flush(self) -> str:
        """The text still held back, for a row that ends with no further token."""
        return self._push([], last=True)

    def _push(self, tokens: Sequence[int], last: bool) -> str:
        if self._text is None or self._stopped():
            return ""
        return self._text.push(tokens, last)

    def _stopped(self) -> bool:
        return self._text is not None and self._text.found is not None

    def _criterion(self, content: list[int]) -> bool:
        if not self._criteria:
            return False
        ids = torch.tensor([content])
        answers = [bool(torch.as_tensor(ask(ids, None)).all()) for ask in self._criteria]  # every one is asked
        return any(answers)
