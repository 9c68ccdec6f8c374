"""`TokenTexts`: the bytes of a tokenizer's tokens, so that those of an answer join to its text."""

from __future__ import annotations

import json
from typing import Any

from transformers.convert_slow_tokenizer import bytes_to_unicode

SPACE = "\u2581"  # stands for a space in the tokens of sentencepiece
BYTES = {character: bytes([byte]) for byte, character in bytes_to_unicode().items()}  # of byte-level tokenizers


class TokenTexts:
    """Bytes and texts of single tokens.

    Args:
        tokenizer: None: tokens have no text.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", None)
        decoder = getattr(backend, "decoder", None)
        kinds = str(json.loads(decoder.__getstate__())) if decoder is not None else ""
        self._is_byte_level, self._has_byte_tokens = "ByteLevel" in kinds, "ByteFallback" in kinds
        self._added = dict(getattr(tokenizer, "added_tokens_decoder", None) or {})
        self._special = set(getattr(tokenizer, "all_special_ids", ()))
        self._known: dict[int, bytes] = {}

    def is_special(self, token: int) -> bool:
        """Whether texts leave the token out."""
        return token in self._special

    def encoded(self, token: int) -> bytes:
        """What a token adds to a text, special ones as they are written."""
        if self._tokenizer is None:
            return b""
        if token not in self._known:
            self._known[token] = self._encoded(token)
        return self._known[token]

    def text(self, token: int) -> str:
        """The same as a text; characters that other tokens complete are U+FFFD."""
        return f"token_id:{token}" if self._tokenizer is None else self.encoded(token).decode("utf-8", "replace")

    def _encoded(self, token: int) -> bytes:
        if token in self._added:
            return str(self._added[token].content).encode()
        written = self._tokenizer.convert_ids_to_tokens(token)
        if written is None:
            return b""
        if self._is_byte_level:
            return b"".join(BYTES.get(one) or one.encode() for one in written)
        if self._has_byte_tokens and len(written) == 6 and written.startswith("<0x") and written.endswith(">"):
            return bytes([int(written[3:5], 16)])
        if SPACE in written:
            return str(written).replace(SPACE, " ").encode()
        before = self._tokenizer.decode([token])  # such as "##ing" of word pieces: what it adds to itself
        return str(self._tokenizer.decode([token, token])[len(before) :]).encode("utf-8", "replace")
