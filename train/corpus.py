"""The corpus of Python files, by default the standard library of the running interpreter."""

from __future__ import annotations

import hashlib
import platform
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from train.sections import CorpusConfig

TEST_FOLDERS = frozenset({"test", "tests", "idle_test"})


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A source file: path relative to the corpus root, text, and part of the corpus."""

    path: str
    text: str
    is_test: bool
    is_held_out: bool


@dataclass(frozen=True, slots=True)
class Corpus:
    """The files of a corpus, sorted by path, and a hash of their contents."""

    files: tuple[SourceFile, ...]
    sha256: str
    origin: str

    @property
    def train(self) -> tuple[SourceFile, ...]:
        return tuple(file for file in self.files if not file.is_held_out)

    @property
    def held_out(self) -> tuple[SourceFile, ...]:
        return tuple(file for file in self.files if file.is_held_out)


def is_held_out(path: str, percent: float) -> bool:
    """Whether a file is held out; depends on its relative path only."""
    bucket = int.from_bytes(hashlib.sha256(path.encode()).digest()[:4], "big") % 10_000
    return bucket < percent * 100


def read_corpus(config: CorpusConfig) -> Corpus:
    """Read the `.py` files below the corpus root, sorted by path.

    Raises:
        ValueError: the root is not a folder, or there are no files to train on or to hold out.
    """
    root = Path(config.root) if config.root else Path(sysconfig.get_paths()["stdlib"])
    if not root.is_dir():
        raise ValueError(f"corpus.root must be a folder, got {str(root)!r}; leave it empty for the standard library")
    files, digest = [], hashlib.sha256()
    for path in sorted(root.rglob("*.py"), key=lambda each: each.relative_to(root).as_posix()):
        relative = path.relative_to(root)
        text = None if set(relative.parts) & set(config.skip) else _read(path, config.max_chars)
        if text is None:
            continue
        name = relative.as_posix()
        digest.update(f"{name}\0{text}\0".encode())
        is_test = bool(TEST_FOLDERS & set(relative.parts[:-1]))
        files.append(SourceFile(name, text, is_test, is_held_out(name, config.held_out_percent)))
    origin = config.root or f"standard library of {platform.python_implementation()} {platform.python_version()}"
    corpus = Corpus(tuple(files), digest.hexdigest(), origin)
    if not corpus.train or not corpus.held_out:
        raise ValueError(
            f"corpus needs files to train on and files held out, got {len(corpus.train)} and {len(corpus.held_out)}; "
            "check corpus.root, corpus.skip and corpus.held_out_percent"
        )
    return corpus


def _read(path: Path, max_chars: int) -> str | None:
    """The text of a file; None where it is not UTF-8, is empty, or is longer than `max_chars`."""
    try:
        text = path.read_bytes().decode("utf-8")
    except UnicodeDecodeError:
        return None
    return text if text.strip() and len(text) <= max_chars and "\0" not in text else None
