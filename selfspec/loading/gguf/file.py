"""`GgufFile`: the metadata of a GGUF file, and where its tensors are.

The format is specified at https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The package gguf reads it as
well, but takes ten seconds for the strings of a large vocabulary.
"""

from __future__ import annotations

import hashlib
import math
import mmap
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

MAGIC, VERSIONS = b"GGUF", (2, 3)
STRING, ARRAY = 8, 9  # types of values
NUMBERS = {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8"}
ALIGNMENT = 32  # default of the key general.alignment
HASHED = 1 << 20  # bytes at both ends of a file that its key depends on
_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})(\.gguf)", re.IGNORECASE)


class GgufTensor(NamedTuple):
    """Where a tensor is."""

    name: str
    type: str
    """The name of its type, such as F32 or Q4_K."""
    shape: tuple[int, ...]
    """As in torch: `[out, in]` for a matrix."""
    path: Path
    """The file that holds it, one of `GgufFile.paths`."""
    offset: int
    """Bytes from the start of that file."""
    nbytes: int


class GgufFile:
    """A GGUF file, or all files of a split one.

    Args:
        path: the file; of a split one, any of its files, which lie side by side.
        name: stands for it in errors.

    Attributes:
        paths: the file, or all files of a split one in their order.
        metadata: the values by key. Arrays of numbers are numpy arrays, other arrays are lists.
        tensors: by name.

    Raises:
        FileNotFoundError: there is no such file, or another file of a split one is missing.
        OSError: it cannot be read, is no GGUF file, is truncated, or is of a version that is not supported.
    """

    def __init__(self, path: Path, name: str) -> None:
        self.name = name
        metadata, tensors = _read(path, name)
        self.paths: tuple[Path, ...] = (path,)
        count = int(metadata.get("split.count", 0))
        if count > 1:
            self.paths = _parts(path, name, count)
            read = [_read(one, f"{name} ({one.name})") for one in self.paths]
            metadata = read[0][0]
            tensors = {key: tensor for _, some in read for key, tensor in some.items()}
        self.metadata: Mapping[str, Any] = metadata
        self.tensors: Mapping[str, GgufTensor] = tensors

    @property
    def architecture(self) -> str:
        """The value of general.architecture; empty where there is none."""
        return str(self.metadata.get("general.architecture", ""))

    def key(self) -> str:
        """A short hash over size, time and both ends of each file: it changes with the contents."""
        digest = hashlib.sha256()
        for path in self.paths:
            stat = path.stat()
            with path.open("rb") as opened:
                first = opened.read(HASHED)
                opened.seek(max(stat.st_size - HASHED, 0))
                digest.update(f"{stat.st_size} {stat.st_mtime_ns}".encode() + first + opened.read(HASHED))
        return digest.hexdigest()[:16]


def part_names(name: str) -> tuple[str, ...]:
    """The names of all files of a split GGUF file in their order, by the name of one of them.

    A name that is not that of a part is returned alone.
    """
    found = _PART.fullmatch(name)
    if found is None or int(found[3]) == 0:
        return (name,)
    return tuple(f"{found[1]}-{one:05d}-of-{found[3]}{found[4]}" for one in range(1, int(found[3]) + 1))


def _parts(path: Path, name: str, count: int) -> tuple[Path, ...]:
    """The files of a split file, by the name of one of them."""
    made = tuple(path.with_name(one) for one in part_names(path.name))
    if len(made) != count:
        raise OSError(
            f"{name} is one of {count} files of a split GGUF file, whose names must end in -00001-of-{count:05d}.gguf; "
            "give it the name that it had"
        )
    for one in made:
        if not one.is_file():
            raise FileNotFoundError(
                f"{name} is one of {count} files of a split GGUF file, and {one.name} is missing; put it there, too"
            )
    return made


def _read(path: Path, name: str) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
    try:
        with path.open("rb") as opened:
            if opened.read(len(MAGIC)) != MAGIC:
                raise OSError(f"{name} is no GGUF file; give a GGUF file or a folder")
            data = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no file {name}; check its name") from None
    except OSError as problem:
        if problem.strerror is None:
            raise
        raise OSError(f"{name} cannot be read ({problem.strerror}); check its permissions") from problem
    with data:
        try:
            return _Reader(data, path, name).read()
        except (struct.error, IndexError, UnicodeDecodeError, KeyError, ValueError) as problem:
            raise OSError(
                f"{name} is truncated or damaged ({str(problem) or type(problem).__name__}); copy or download it again"
            ) from problem


class _Reader:
    """Reads a header from `data`."""

    def __init__(self, data: mmap.mmap, path: Path, name: str) -> None:
        self._data, self._path, self._name, self._at = data, path, name, len(MAGIC)

    def read(self) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
        version = int(self._number(4))
        if version not in VERSIONS:
            what = "is in the byte order of another machine" if version & 0xFFFF == 0 else f"has version {version}"
            raise OSError(
                f"{self._name} {what}; GGUF files of the versions 2 and 3 are supported, in little-endian byte order: "
                "convert it again"
            )
        num_tensors, num_values = int(self._number(10)), int(self._number(10))
        metadata = {}
        for _ in range(num_values):
            key = self._string()
            metadata[key] = self._value(int(self._number(4)))
        described = [self._tensor() for _ in range(num_tensors)]
        step = int(metadata.get("general.alignment", ALIGNMENT))
        start = -(-self._at // step) * step
        tensors = {one.name: one._replace(offset=start + one.offset) for one in described}
        end = max((one.offset + one.nbytes for one in tensors.values()), default=0)
        if end > len(self._data):
            raise OSError(
                f"{self._name} is truncated: it has {len(self._data)} bytes of {end}; copy or download it again"
            )
        return metadata, tensors

    def _number(self, kind: int) -> Any:
        dtype = np.dtype(NUMBERS[kind])
        [made] = np.frombuffer(self._bytes(dtype.itemsize), dtype)
        return made.item()

    def _bytes(self, count: int) -> bytes:
        made = self._data[self._at : self._at + count]
        if len(made) < count:
            raise IndexError("its end is missing")
        self._at += count
        return made

    def _string(self) -> str:
        return self._bytes(int(self._number(10))).decode()

    def _value(self, kind: int) -> Any:
        if kind == STRING:
            return self._string()
        if kind != ARRAY:
            return self._number(kind)
        kind, count = int(self._number(4)), int(self._number(10))
        if kind == STRING:
            return self._strings(count)
        if kind == ARRAY:
            return [self._value(ARRAY) for _ in range(count)]
        dtype = np.dtype(NUMBERS[kind])
        return np.frombuffer(self._bytes(dtype.itemsize * count), dtype).copy()

    def _strings(self, count: int) -> list[str]:
        """A loop of its own, since a vocabulary has some hundred thousand strings."""
        data, at, length, made = self._data, self._at, struct.Struct("<Q").unpack_from, []
        for _ in range(count):
            [size] = length(data, at)
            at += 8 + size
            if at > len(data):
                raise IndexError("its end is missing")
            made.append(data[at - size : at].decode("utf-8", "surrogateescape"))
        self._at = at
        return made

    def _tensor(self) -> GgufTensor:
        """A tensor, with an offset from the start of all tensors."""
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        name, dimensions = self._string(), int(self._number(4))
        shape = tuple(int(self._number(10)) for _ in range(dimensions))[::-1]
        number, offset = int(self._number(4)), int(self._number(10))
        kind = GGMLQuantizationType(number)
        weights, size = GGML_QUANT_SIZES[kind]
        return GgufTensor(name, kind.name, shape, self._path, offset, math.prod(shape) // weights * size)
