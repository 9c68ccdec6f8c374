"""Hand a model over to a machine without network: python -m train.handover MODEL ARCHIVE.tar.xz

The archive holds what `save_pretrained` writes, so that machine needs neither the package gguf nor a cache. It is
written in parts, each small enough to be copied alone; `--model.base ARCHIVE.tar.xz` joins and unpacks them.
"""

from __future__ import annotations

import argparse
import io
import lzma
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO, cast

from selfspec.errors import UnsupportedModelError
from selfspec.loading.hub import open_model

SUFFIX = ".tar.xz"
DTYPES = ("float16", "bfloat16", "float32")
PRESET = 1  # of LZMA; higher ones take several times as long and save little


class PartWriter(io.RawIOBase):
    """A stream that is written into files `NAME.part000`, `NAME.part001`, ... of at most `size` bytes each."""

    def __init__(self, file: Path, size: int) -> None:
        self.file, self.size, self.left = file, size, 0
        self.parts: list[Path] = []
        self.opened: BinaryIO | None = None

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view, done = memoryview(data).cast("B"), 0
        while done < len(view):
            if not self.left:
                self._next()
            assert self.opened is not None
            written = self.opened.write(view[done : done + self.left])
            done, self.left = done + written, self.left - written
        return done

    def _next(self) -> None:
        if self.opened is not None:
            self.opened.close()
        self.parts.append(self.file.with_name(f"{self.file.name}.part{len(self.parts):03}"))
        self.opened, self.left = self.parts[-1].open("wb"), self.size

    def close(self) -> None:
        if self.opened is not None:
            self.opened.close()
        super().close()


class PartReader(io.RawIOBase):
    """The contents of several files, one after another."""

    def __init__(self, files: Sequence[BinaryIO]) -> None:
        self.files = list(files)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while self.files:
            if count := cast(io.BufferedReader, self.files[0]).readinto(buffer):
                return count
            self.files.pop(0)
        return 0


def pack(model: str, archive: Path, part_bytes: int, dtype: str) -> list[Path]:
    """Write a model and its tokenizer into an archive in parts of at most `part_bytes`; return the parts.

    Args:
        model: what `selfspec.loading.hub.open_model` opens, such as smollm2 or a .gguf file.
        dtype: of the written weights. Dequantised weights in float16 differ by at most 1 part in 2048.

    Raises:
        ValueError: a name or a number is not allowed, or a weight is too large for the dtype.
        OSError, ImportError, UnsupportedModelError: the model cannot be opened, or a file cannot be written.
    """
    if not archive.name.endswith(SUFFIX):
        raise ValueError(f"the archive must be named NAME{SUFFIX}, got {archive.name!r}")
    if part_bytes < 1:
        raise ValueError(f"--part-mb must be above 0, got {part_bytes / 1e6:g}")
    opened, tokenizer = open_model(model, dtype=dtype, device="cpu")
    if not all(bool(weight.isfinite().all()) for weight in opened.parameters()):
        raise ValueError(f"--dtype must be one that holds all weights, got {dtype}; use bfloat16 or float32")
    archive.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=archive.parent) as made:
        for each in (opened, tokenizer):
            if each is not None:
                cast(Any, each).save_pretrained(made)
        with (
            PartWriter(archive, part_bytes) as parts,
            lzma.open(parts, "wb", preset=PRESET) as packed,
            tarfile.open(fileobj=packed, mode="w|") as tar,
        ):
            for file in sorted(Path(made).iterdir()):
                tar.add(file, file.name)
    return parts.parts


def parts_of(archive: Path) -> list[Path]:
    """The files of an archive, in order: itself, or its parts.

    Raises:
        ValueError: there are none, or one between the first and the last is missing.
    """
    if archive.is_file():
        return [archive]
    parts = sorted(archive.parent.glob(f"{archive.name}.part[0-9][0-9][0-9]"))
    numbers = [int(part.name[-3:]) for part in parts]
    if not parts or numbers != list(range(len(parts))):
        raise ValueError(
            f"model.base {str(archive)!r} must be an archive or have all its parts beside it, from .part000 on, "
            f"got {', '.join(part.name for part in parts) or 'none'}; copy the others"
        )
    return parts


def unpack(archive: Path, folder: Path) -> Path:
    """Unpack an archive, or its parts, into `folder`, which appears when it is whole; one that is there is kept.

    Raises:
        ValueError: a part is missing or damaged, or the last ones were not copied.
    """
    if folder.is_dir():
        return folder
    parts, unfinished = parts_of(archive), folder.with_name(f"{folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        with ExitStack() as split:
            joined = io.BufferedReader(PartReader([split.enter_context(part.open("rb")) for part in parts]))
            with lzma.open(joined) as packed, tarfile.open(fileobj=packed, mode="r|") as tar:
                tar.extractall(unfinished, filter="data")
        unfinished.rename(folder)
    except (EOFError, lzma.LZMAError, tarfile.TarError) as error:
        raise ValueError(
            f"model.base {str(archive)!r} is damaged or lacks its last parts ({error}); {len(parts)} parts are there: "
            "copy them all again"
        ) from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="smollm2, a folder, a .gguf file or a hub id")
    parser.add_argument("archive", type=Path, help=f"NAME{SUFFIX}; its parts are written beside it")
    parser.add_argument("--part-mb", type=float, default=40.0, help="size of a part at most; default: %(default)s")
    parser.add_argument("--dtype", choices=DTYPES, default=DTYPES[0], help="of the weights; default: %(default)s")
    given = parser.parse_args(arguments)
    try:
        parts = pack(given.model, given.archive, int(given.part_mb * 1e6), given.dtype)
    except (ValueError, UnsupportedModelError, OSError, ImportError) as error:
        print(f"train.handover: {error}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    for part in parts:
        print(f"{part}  {part.stat().st_size / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
