"""The file of a datastore: a page of header, then a corpus's tokens backwards, and where each context occurs in them.

    header   one page: magic, format, length and SHA-256 of a JSON document, the document
    cells    every document's tokens from its last to its first plus 1, a 0 before, between and after documents;
             2 bytes each, or 4 where the vocabulary needs them, big end first, so that comparing bytes compares tokens
    starts   uint32 [vocab_size + 1]: from where in `places` the contexts that end with a token are
    places   uint32: every cell after whose token the document goes on, sorted by what stands from there on in the
             cells, that is by the context read backwards

All numbers but the cells have their little end first; parts begin at multiples of 8 bytes.
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
DEPTH = 16  # tokens that contexts are sorted by, and so the longest match
MOST_CELLS = 2**32 - 1
_FIXED = len(MAGIC) + 4 + 4 + 32


@dataclass(frozen=True, slots=True)
class About:
    """What is in a datastore."""

    tokenizer: str  # fingerprint of its vocabulary
    vocab_size: int
    num_documents: int
    num_tokens: int
    num_places: int
    checksum: str  # SHA-256 of all but the header

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
    """The first page."""
    document = json.dumps(asdict(about)).encode()
    fixed = MAGIC + FORMAT.to_bytes(4, "little") + len(document).to_bytes(4, "little")
    return (fixed + hashlib.sha256(fixed + document).digest() + document).ljust(PAGE, b"\0")


def open_file(path: Path) -> tuple[BinaryIO, About]:
    """The file, and what it says of itself once its header has been checked.

    Raises:
        FileNotFoundError: there is none.
        OSError: it cannot be read.
        DatastoreError: it is something else, damaged or of another format.
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
                f"{path} holds {size} bytes where {about.num_bytes} belong; copy it again or build it again"
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
    """SHA-256 of all after the header."""
    file.seek(PAGE)
    digest = hashlib.sha256()
    while block := file.read(1 << 20):
        digest.update(block)
    return digest.hexdigest()


def verify(path: str | Path) -> About:
    """Read all of a datastore and compare it with its checksum; what it says of itself.

    Raises:
        OSError: it cannot be read, or is not there.
        DatastoreError: it is something else, damaged or of another format.
    """
    file, about = open_file(Path(path).expanduser())
    with file:
        if checksum(file) != about.checksum:
            raise DatastoreError(f"the body of {path} is damaged; copy it again or build it again")
    return about
