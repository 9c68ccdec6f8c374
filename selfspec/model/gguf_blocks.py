"""`Blocks`: a weight as a GGUF file holds it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# Weights and bytes of a block, by the name of its type in GGUF files.
BLOCK_SIZES = {
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q8_0": (32, 34),
    "Q4_K": (256, 144),
    "Q6_K": (256, 210),
}


class Blocks(NamedTuple):
    """A weight `[out, in]` as a GGUF file holds it: quantised blocks along `in`."""

    type: str
    """The blocks' type in GGUF files, a key of `BLOCK_SIZES`."""
    data: Tensor
    """uint8 `[file rows, bytes per row]`."""
    rows: Tensor | None = None
    """int64 `[out]`: the file's row of each output; None: the outputs are in the file's order."""

    def select(self, outputs: Tensor) -> Blocks:
        """The rows of some outputs, int64 `[n]`."""
        return self._replace(rows=outputs if self.rows is None else self.rows[outputs])

    @property
    def shape(self) -> torch.Size:
        """The weight's shape `[out, in]`."""
        weights, size = BLOCK_SIZES[self.type]
        return torch.Size([len(self.data if self.rows is None else self.rows), self.data.shape[1] // size * weights])

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks."""
        return self.shape[0] * self.data.shape[1]
