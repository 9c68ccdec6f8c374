"""`RowCounts`: with how many rows a product runs, so that the bits of a row depend on no other row.

Libraries choose a kernel by the shape of a product, and kernels sum in different orders. So a row's rounding may depend
on the number of rows, but it does not depend on the other rows' numbers. Products of few rows take the time of reading
the weights, whether the rows are filled up or not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

MULTIPLES = 4  # numbers of rows are measured up to so many times the constant one
PLACES = (0, 1, 5, 29)  # where a row may be among others

Product = Callable[[Tensor], Tensor]  # [N, in] -> [N, out]


class RowCounts(NamedTuple):
    """The numbers of rows with which a product may run."""

    rows: int  # the constant number of rows
    most: int  # rows of one product at most: `rows`, or a multiple of it if all multiples give the same bits
    is_free: bool = False  # whether any smaller number of rows gives the same bits, too

    def filled(self, count: int) -> int:
        """The number of rows to which `count` rows are filled up."""
        return count if self.is_free and count <= self.rows else -(-count // self.rows) * self.rows

    def apply(self, product: Product, x: Tensor) -> Tensor:
        """The product of `x`, `[N, in]`, with rows filled up by zeros, in several calls if there are too many rows."""
        count = len(x)
        x = fill_up(x, self.filled(count))
        if len(x) <= self.most:
            return product(x)[:count]
        return torch.cat([product(part) for part in x.split(self.most)])[:count]


def fill_up(x: Tensor, count: int, value: float = 0) -> Tensor:
    """`x` with lines of `value` after its own, `count` in all."""
    return x if len(x) == count else F.pad(x, (0, 0) * (x.dim() - 1) + (0, count - len(x)), value=value)


def random_rows(count: int, like: Tensor) -> Tensor:
    """Random inputs `[count, in]` for a weight `like`, `[out, in]`."""
    made = torch.randn(count, like.shape[1], generator=torch.Generator().manual_seed(0))
    return made.to(like.device, like.dtype)


def measured(product: Product, x: Tensor, rows: int) -> RowCounts:
    """The numbers of rows that give the bits of products of `rows` rows, found by running them.

    Args:
        x: `[MULTIPLES * rows, in]`, random inputs.
        rows: the constant number of rows.
    """
    wanted = torch.cat([product(part) for part in x.split(rows)])

    def same(count: int, at: int) -> bool:
        return torch.equal(product(x[at : at + count].clone()), wanted[at : at + count])

    places = [at for at in PLACES if at < rows]
    is_constant = all(same(rows, at) for at in places)
    all_multiples = is_constant and all(
        same(n * rows, at) for n in range(2, MULTIPLES + 1) for at in {0, (MULTIPLES - n) * rows}
    )
    is_free = is_constant and all(same(count, at) for count in range(rows - 1, 0, -1) for at in places)
    return RowCounts(rows, MULTIPLES * rows if all_multiples else rows, is_free)
