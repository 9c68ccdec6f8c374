"""Which numbers of rows give a row the same bits: found by running products, never by belief."""

import pytest
import torch

from selfspec.model.row_counts import RowCounts, measured

ROWS = 8
WEIGHT = torch.randn(5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def product(x):
    """A product whose bits depend on no other row."""
    return (x[:, None] * WEIGHT).sum(-1)


PRODUCTS = {
    "of nothing": (product, RowCounts(ROWS, 4 * ROWS, True)),
    "of the number of rows": (lambda x: product(x) + len(x) / 1024, RowCounts(ROWS, ROWS)),
    "of few rows": (lambda x: product(x) + (len(x) < ROWS) / 1024, RowCounts(ROWS, 4 * ROWS)),
    "of one row": (lambda x: product(x) + (len(x) == 1) / 1024, RowCounts(ROWS, 4 * ROWS)),
    "of many rows": (lambda x: product(x) + (len(x) > ROWS) / 1024, RowCounts(ROWS, ROWS, True)),
    "of most rows": (lambda x: product(x) + (len(x) == 4 * ROWS) / 1024, RowCounts(ROWS, ROWS, True)),
    "of the place": (lambda x: product(x) + torch.arange(len(x))[:, None] / 1024, RowCounts(ROWS, ROWS)),
}


@pytest.mark.parametrize("dependence", PRODUCTS)
def test_what_the_rounding_of_a_row_depends_on_is_measured(dependence):
    depends, wanted = PRODUCTS[dependence]
    x = torch.randn(4 * ROWS, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    assert measured(depends, x, ROWS) == wanted


@pytest.mark.parametrize("dependence", [name for name in PRODUCTS if name != "of the place"])
@pytest.mark.parametrize("count", [1, 3, 8, 9, 16, 31, 32, 50])
def test_a_row_has_the_same_bits_in_any_number_of_rows(dependence, count):
    depends, counts = PRODUCTS[dependence]
    x = torch.randn(count, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    alone = torch.cat([counts.apply(depends, row[None]) for row in x])
    assert torch.equal(counts.apply(depends, x), alone)


@pytest.mark.parametrize(("counts", "filled"), [(RowCounts(8, 32), (8, 8, 16)), (RowCounts(8, 32, True), (3, 8, 16))])
def test_rows_are_filled_up(counts, filled):
    assert tuple(map(counts.filled, (3, 8, 9))) == filled
