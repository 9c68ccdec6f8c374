"""Bytes of tokens join to the bytes of the text, whatever the tokenizer."""

from __future__ import annotations

import pytest
from transformers import PreTrainedTokenizerFast

from selfspec.serving.token_texts import TokenTexts
from tests.tokenizers import byte_tokenizer, spaced_tokenizer, word_tokenizer

TEXTS = [" plain words.", " H\u00e4?", " \N{GRINNING FACE}\u6f22\u5b57!", " a\n\tb \u00a0\u00ad\x7f"]


@pytest.mark.parametrize("make", [byte_tokenizer, spaced_tokenizer])
@pytest.mark.parametrize("text", TEXTS)
def test_bytes_join_to_the_text(make, text):
    tokenizer = make()
    ids = tokenizer(text.strip(" ") if make is spaced_tokenizer else text)["input_ids"]
    assert b"".join(map(TokenTexts(tokenizer).encoded, ids)) == text.encode()


def test_special_tokens_are_told_apart_and_words_have_their_space():
    tokenizer = byte_tokenizer()
    texts = TokenTexts(tokenizer)
    assert texts.is_special(256) and texts.encoded(256) == b"<|end|>" and not texts.is_special(65)
    words = word_tokenizer()
    assert isinstance(words, PreTrainedTokenizerFast) and TokenTexts(words).text(5) == " w5"
    assert TokenTexts(None).text(7) == "token_id:7" and TokenTexts(None).encoded(7) == b""
