"""Hand a model over to a machine without network: python -m train.handover MODEL ARCHIVE.tar.xz

The archive holds what `save_pretrained` writes, but for weights in the quantised blocks of a GGUF file, which stay so.
It is written in parts, each small enough to be copied alone; `--model.base ARCHIVE.tar.xz` joins and unpacks them, and
dequantises blocks with torch alone: that machine needs neither the package gguf nor a cache.
"""

from __future__ import annotations

import argparse
import io
import json
import lzma
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO, cast

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from selfspec.errors import UnsupportedModelError
from selfspec.kernels.dequantize import TYPES, dequantized
from selfspec.loading.hub import open_model
from selfspec.loading.names import find, is_gguf
from selfspec.model.gguf_blocks import BlockWeight

SUFFIX = ".tar.xz"
BLOCKS = "blocks"
DTYPES = (BLOCKS, "float16", "bfloat16", "float32")
WEIGHTS = "model.safetensors"
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
        dtype: of the written weights; "blocks": those of a GGUF file, exactly. Others in float16 differ by at most 1
            part in 2048.

    Raises:
        ValueError: a name or a number is not allowed, or a weight is too large for the dtype.
        OSError, ImportError, UnsupportedModelError: the model cannot be opened, or a file cannot be written.
    """
    if not archive.name.endswith(SUFFIX):
        raise ValueError(f"the archive must be named NAME{SUFFIX}, got {archive.name!r}")
    if part_bytes < 1:
        raise ValueError(f"--part-mb must be above 0, got {part_bytes / 1e6:g}")
    in_blocks = dtype == BLOCKS
    opened, tokenizer = open_model(model, dtype=None if in_blocks else dtype, device="cpu", keep_blocks=in_blocks)
    if in_blocks and not any(isinstance(weight, BlockWeight) for weight in opened.parameters()):
        raise ValueError(f"--dtype {BLOCKS} is for GGUF files of quantised weights, got {model}; use float16")
    if not in_blocks and not all(bool(weight.isfinite().all()) for weight in opened.parameters()):
        raise ValueError(f"--dtype must be one that holds all weights, got {dtype}; use bfloat16 or float32")
    archive.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=archive.parent) as made:
        if in_blocks:
            _save_blocks(opened, Path(made))
        for each in (None if in_blocks else opened, tokenizer):
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


def _save_blocks(model: nn.Module, folder: Path) -> None:
    """Write a model's files; its weights in blocks as uint8 `[out, bytes]`, with their types beside them."""
    tensors: dict[str, Tensor] = {}
    types, written = {}, set()
    for name, weight in model.state_dict().items():
        if not isinstance(weight, BlockWeight):
            tensors[name] = weight.contiguous()
            continue
        blocks = weight.blocks
        place = blocks.data.data_ptr(), None if blocks.rows is None else blocks.rows.data_ptr()
        if place in written:  # a head that is tied to the embeddings
            continue
        written.add(place)
        is_known = blocks.type in TYPES
        rows = blocks.data if blocks.rows is None else blocks.data[blocks.rows]
        tensors[name] = rows.contiguous() if is_known else weight.dequantize()
        if is_known:
            types[name] = blocks.type
    save_file(tensors, folder / WEIGHTS, {"format": "pt", BLOCKS: json.dumps(types)})
    for each in (cast(Any, model).config, cast(Any, model).generation_config):
        each.save_pretrained(folder)


def _dequantise(folder: Path) -> None:
    """Replace weights in blocks by float32 ones."""
    file = folder / WEIGHTS
    if not file.is_file():
        return
    with safe_open(file, "pt") as opened:
        types = json.loads((opened.metadata() or {}).get(BLOCKS, "{}"))
        if not types:
            return
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    tensors |= {name: dequantized(tensors[name], kind) for name, kind in types.items()}
    file.unlink()
    save_file(tensors, file, {"format": "pt"})


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
        _dequantise(unfinished)
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
    parser.add_argument(
        "--dtype", choices=DTYPES, help=f"of the weights; default: {BLOCKS} of a GGUF file, else float16"
    )
    given = parser.parse_args(arguments)
    try:
        dtype = given.dtype or (BLOCKS if is_gguf(find(given.model)) else "float16")
        parts = pack(given.model, given.archive, int(given.part_mb * 1e6), dtype)
    except (ValueError, UnsupportedModelError, OSError, ImportError) as error:
        print(f"train.handover: {error}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    for part in parts:
        print(f"{part}  {part.stat().st_size / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
