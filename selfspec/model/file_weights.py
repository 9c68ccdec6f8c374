"""`FileWeights`: weights that are mapped from a file, with the blocks of the GGUF file that they were made of."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from selfspec.model.gguf_blocks import Blocks
from selfspec.model.mapped_file import MappedFile


class FileWeight(NamedTuple):
    """A weight of a model, and what its files say of it."""

    weight: nn.Parameter
    blocks: Blocks
    sample: list[float]
    """What `selfspec.model.fingerprint.sample` gives for it."""
    version: int  # of the weight, when it was read
    address: int
    pages: slice  # of the file of float32 weights


class FileWeights:
    """The float32 weights of a model that are mapped from its file, and the blocks that they were dequantised from.

    The blocks stand for a weight until it is edited. Memory is only taken by the weights that somebody reads.

    Args:
        floats: the file with the float32 weights.
        source: the GGUF file, which the blocks are mapped from.
    """

    def __init__(self, floats: MappedFile, source: MappedFile) -> None:
        self._floats, self._source = floats, source
        self._known: dict[int, FileWeight] = {}

    def add(self, weight: nn.Parameter, offset: int, blocks: Blocks, sample: list[float]) -> None:
        """Map a weight, float32 `[out, in]`, `offset` bytes from the start of its file."""
        weight.data = self._floats.tensor(torch.float32, offset, tuple(weight.shape))
        pages = self._floats.pages(offset, weight.nbytes)
        self._known[id(weight)] = FileWeight(weight, blocks, sample, weight._version, weight.data_ptr(), pages)

    def held(self, deeply: bool) -> dict[int, FileWeight]:
        """The weights that are still as their file holds them, by `id`.

        Args:
            deeply: also detect edits through `.data` or numpy, where the system tells (see `sees_all`). It takes some
                milliseconds for a gigabyte.
        """
        edited = self._floats.edited_pages() if deeply else None
        if edited is not None and not edited.any():
            edited = None
        return {
            key: one
            for key, one in self._known.items()
            if one.weight._version == one.version
            and one.weight.data_ptr() == one.address
            and one.weight.shape == one.blocks.shape
            and one.weight.is_contiguous()
            and (edited is None or not edited[one.pages].any())
        }

    def blocks_of(self, weight: torch.Tensor) -> Blocks | None:
        """The blocks of a weight of which no edit was counted, for reading them now.

        None for other weights, and where the GGUF file was truncated meanwhile, as a copy over it does at first.
        """
        one = None if self._source.is_truncated else self.held(deeply=False).get(id(weight))
        return None if one is None else one.blocks

    @property
    def sees_all(self) -> bool:
        """Whether `held(deeply=True)` detects every edit; else only those that torch counts."""
        return self._floats.edited_pages() is not None

    def release(self) -> None:
        """Give back the memory of all weights and blocks that were read; they are read again when they are used.

        Call it before anybody else has the model: a weight that is edited meanwhile might lose the edit. After an edit,
        nothing is released.
        """
        self._floats.release()
        self._source.release()
