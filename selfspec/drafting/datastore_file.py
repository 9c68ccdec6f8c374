"""The file format of a datastore: a header, the tokens of a corpus backwards, and the sorted contexts.

    header   one page: magic, format, length and SHA-256 of a JSON document, the document
    cells    the tokens + 1 of every document from the last to the first, with a 0 before, between and after documents;
             2 bytes each, or 4 for large vocabularies, big-endian, so that comparing bytes compares tokens
    starts   uint32 [vocab_size + 1]: by last token of a context, the index in `places` of its first context
    places   uint32: the cells whose token has a successor in its document, sorted by the following cells, which are
             the context read backwards

All numbers but the cells are little-endian. Parts begin at multiples of 8 bytes.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import BinaryIO

from selfspec.errors import DatastoreError

MAGIC, FORMAT = b"SELFSPCD", 1
PAGE = 4096
DEPTH = 16  # tokens by which contexts are sorted: the longest match
MOST_CELLS = 2**32 - 1
_FIXED = len(MAGIC) + 4 + 4 + 32


@dataclass(frozen=True, slots=True)
class About:
    """The metadata of a datastore."""

    tokenizer: str  # fingerprint of the vocabulary
    vocab_size: int
    num_documents: int
    num_tokens: int
    num_places: int
    checksum: str  # SHA-256 of the file without its header

    @property
    def token_bytes(self) -> int:
        return 2 if self.vocab_size < 1 << 16 else 4

    @property
    def num_cells(self) -> int:
        return self.num_tokens + self.num_documents + 1

    @property
    def starts_at(self) -> int:
        return aligned(PAGE + self.num_cells * self.token_bytes)

    @property
    def places_at(self) -> int:
        return aligned(self.starts_at + 4 * (self.vocab_size + 1))

    @property
    def num_bytes(self) -> int:
        return self.places_at + 4 * self.num_places


def aligned(offset: int) -> int:
    return offset + -offset % 8


def header(about: About) -> bytes:
    """The header of a file."""
    document = json.dumps(asdict(about)).encode()
    fixed = MAGIC + FORMAT.to_bytes(4, "little") + len(document).to_bytes(4, "little")
    return (fixed + hashlib.sha256(fixed + document).digest() + document).ljust(PAGE, b"\0")


def open_file(path: Path) -> tuple[BinaryIO, About]:
    """Open a file and check its header.

    Raises:
        FileNotFoundError: there is no such file.
        OSError: it cannot be read.
        DatastoreError: it is no datastore, is damaged, or has another format.
    """
    try:
        file = path.open("rb")
    except FileNotFoundError:
        raise FileNotFoundError(
            f"there is no datastore {path}; make one with: selfspec corpus build MODEL CORPUS -o {path}"
        ) from None
    except IsADirectoryError:
        raise DatastoreError(f"{path} is a folder; give the file that `selfspec corpus build` wrote") from None
    try:
        about = _read_header(path, file.read(PAGE))
        size = os.fstat(file.fileno()).st_size
        if size != about.num_bytes:
            raise DatastoreError(
                f"{path} must have {about.num_bytes} bytes, got {size}; copy it again or build it again"
            )
    except BaseException:
        file.close()
        raise
    return file, about


def _read_header(path: Path, page: bytes) -> About:
    if not page.startswith(MAGIC):
        raise DatastoreError(f"{path} is no datastore; give a file that `selfspec corpus build` wrote")
    found = int.from_bytes(page[len(MAGIC) :][:4], "little")
    if found != FORMAT and len(page) >= _FIXED:
        raise DatastoreError(
            f"{path} has format {found} and this selfspec reads format {FORMAT}; update selfspec or build it again"
        )
    length = int.from_bytes(page[len(MAGIC) + 4 :][:4], "little")
    document = page[_FIXED : _FIXED + length]
    if len(page) < PAGE:
        raise DatastoreError(f"{path} ends within its header; copy it again or build it again")
    if hashlib.sha256(page[: _FIXED - 32] + document).digest() != page[_FIXED - 32 : _FIXED]:
        raise DatastoreError(f"the header of {path} is damaged; copy it again or build it again")
    given = json.loads(document)
    return About(**{field.name: given[field.name] for field in fields(About)})


def checksum(file: BinaryIO) -> str:
    """SHA-256 of a file without its header."""
    file.seek(PAGE)
    digest = hashlib.sha256()
    while block := file.read(1 << 20):
        digest.update(block)
    return digest.hexdigest()


def verify(path: str | Path) -> About:
    """Compare a datastore with its checksum, and return its metadata.

    Raises:
        OSError: the file is missing or cannot be read.
        DatastoreError: it is no datastore, is damaged, or has another format.
    """
    file, about = open_file(Path(path).expanduser())
    with file:
        if checksum(file) != about.checksum:
            raise DatastoreError(f"the body of {path} is damaged; copy it again or build it again")
    return about
