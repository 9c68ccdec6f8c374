"""Building a datastore: documents are written as they come, then their contexts are sorted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from selfspec.drafting.datastore_file import DEPTH, MOST_CELLS, PAGE, About, checksum, header
from selfspec.drafting.suffixes import CHUNK, sort_suffixes
from selfspec.errors import whole
from selfspec.files import write_whole

Tokens = Sequence[int] | NDArray[Any]


def build(
    path: str | Path,
    documents: Iterable[Tokens],
    tokenizer: str,
    vocab_size: int,
    say: Callable[[str], None] = lambda text: None,
) -> About:
    """Write a datastore of documents, whole or not at all; what was there before is replaced.

    Takes time for sorting all contexts, O(n log n) for n tokens, and at its peak about 24 bytes of memory per token.
    Documents themselves are taken one at a time.

    Args:
        documents: token ids of each; matches and drafts stay within one. Empty ones are left out.
        tokenizer: fingerprint of the vocabulary, see `selfspec.model.fingerprint.vocabulary_of`.
        vocab_size: ids lie in 0..vocab_size - 1.
        say: is told now and then what is being done.

    Raises:
        ValueError: an id outside the vocabulary, no token that another follows, or more than 4 billion tokens.
        OSError: the file cannot be written.
    """
    size, file = whole("vocab_size", vocab_size, 1), Path(path).expanduser()
    if file.is_dir():
        raise IsADirectoryError(21, "it is a folder", str(file))
    return write_whole(file, lambda stream: _write(stream, documents, tokenizer, size, say))


def _write(
    file: BinaryIO, documents: Iterable[Tokens], tokenizer: str, vocab_size: int, say: Callable[[str], None]
) -> About:
    empty = About(tokenizer, vocab_size, 0, 0, 0, "")
    dtype: type[Any] = np.uint16 if empty.token_bytes == 2 else np.uint32
    file.seek(PAGE)
    num_documents, num_tokens = _write_cells(file, documents, vocab_size, np.dtype(dtype).newbyteorder(">"), say)
    say(f"sorting {num_tokens:,} tokens")
    file.seek(PAGE)
    cells = np.fromfile(file, np.dtype(dtype).newbyteorder(">"), num_tokens + num_documents + 1).astype(dtype)
    starts, places = _sorted_places(cells, vocab_size, num_documents + 1)
    if not len(places):
        raise ValueError("a datastore needs a document of at least two tokens, and there is none; give more text")
    about = About(tokenizer, vocab_size, num_documents, num_tokens, len(places), "")
    say(f"writing {about.num_bytes:,} bytes")
    for offset, part in ((about.starts_at, starts), (about.places_at, places)):
        file.write(bytes(offset - file.tell()))
        part.astype("<u4", copy=False).tofile(file)
    about = replace(about, checksum=checksum(file))
    file.seek(0)
    file.write(header(about))
    return about


def _write_cells(
    file: BinaryIO, documents: Iterable[Tokens], vocab_size: int, dtype: np.dtype[Any], say: Callable[[str], None]
) -> tuple[int, int]:
    """Every document backwards, a 0 before, between and after; how many documents and tokens those were."""
    num_documents = num_tokens = 0
    separator = np.zeros(1, dtype).tobytes()
    file.write(separator)
    for document in documents:
        tokens = np.asarray(document, np.int64)
        if not len(tokens):
            continue
        if tokens.min() < 0 or tokens.max() >= vocab_size:
            raise ValueError(f"token ids must lie in 0..{vocab_size - 1}, got {tokens.min()}..{tokens.max()}")
        num_documents, num_tokens = num_documents + 1, num_tokens + len(tokens)
        if num_documents + num_tokens >= MOST_CELLS:
            raise ValueError(f"a datastore holds at most {MOST_CELLS:,} tokens and documents; make several")
        file.write((tokens[::-1] + 1).astype(dtype).tobytes() + separator)
        say(f"read {num_tokens:,} tokens")
    return num_documents, num_tokens


def _sorted_places(
    cells: NDArray[Any], vocab_size: int, num_separators: int
) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
    """`starts` and `places`, as the file has them."""
    places = sort_suffixes(cells, DEPTH)[num_separators:]
    kept = np.empty(len(places), bool)
    counts = np.zeros(vocab_size + 1, np.int64)
    for begin in range(0, len(places), CHUNK):
        chunk = places[begin : begin + CHUNK]
        goes_on = kept[begin : begin + CHUNK] = cells[chunk - np.uint32(1)] != 0
        counts += np.bincount(cells[chunk[goes_on]], minlength=vocab_size + 1)
    return np.cumsum(counts).astype(np.uint32), places[kept]
