"""`Table`: measured seconds by a number of tokens, rows or layers.

Values between measured points are interpolated linearly; beyond the last point the last slope continues. No curve is
fitted over the whole range, since real costs have steps (arXiv 2310.18813).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Table:
    """Seconds at measured points, ascending in both."""

    points: tuple[int, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        rises = all(a < b for a, b in zip(self.points, self.points[1:], strict=False))
        if not self.points or len(self.points) != len(self.seconds) or not rises:
            raise ValueError(f"a table needs ascending points, one value each, got {self.points} and {self.seconds}")
        if not all(0 <= s < float("inf") for s in self.seconds):
            raise ValueError(f"a table's seconds must be finite and not negative, got {self.seconds}")

    @classmethod
    def of(cls, measured: Mapping[int, float]) -> Table:
        """Make a table of measurements; where noise makes them fall, neighbours are pooled (isotonic regression)."""
        points = sorted(measured)
        pools: list[list[float]] = []  # [mean, how many]
        for point in points:
            pools.append([measured[point], 1])
            while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
                mean, count = pools.pop()
                before = pools[-1]
                pools[-1] = [(before[0] * before[1] + mean * count) / (before[1] + count), before[1] + count]
        return cls(tuple(points), tuple(mean for mean, count in pools for _ in range(int(count))))

    def __call__(self, at: float) -> float:
        points, seconds = self.points, self.seconds
        if at <= points[0] or len(points) == 1:
            return seconds[0]
        i = min(bisect_left(points, at), len(points) - 1)  # beyond the last point: the last slope
        share = (at - points[i - 1]) / (points[i] - points[i - 1])
        return seconds[i - 1] + share * (seconds[i] - seconds[i - 1])

    def scaled(self, factor: float) -> Table:
        return Table(self.points, tuple(s * factor for s in self.seconds))

    @classmethod
    def read(cls, given: Mapping[str, float]) -> Table:
        """Read what `as_dict` returned."""
        return cls(tuple(int(p) for p in given), tuple(float(s) for s in given.values()))

    def as_dict(self) -> dict[str, float]:
        """Seconds by point, for a profile file."""
        return {str(p): s for p, s in zip(self.points, self.seconds, strict=True)}


def written(tables: Mapping[int, Table]) -> dict[str, dict[str, float]]:
    """Tables by number of rows, for a profile file."""
    return {str(rows): table.as_dict() for rows, table in tables.items()}


def read_by_rows(given: Mapping[str, Mapping[str, float]]) -> dict[int, Table]:
    """Read what `written` returned."""
    return {int(rows): Table.read(table) for rows, table in given.items()}


@dataclass(frozen=True)
class Copies:
    """Costs of drafts by 4-bit copies of layers and head; the fields are those of `Costs`."""

    first: Mapping[int, Table]
    early: Mapping[int, Table]
    head: Table

    def as_dict(self) -> dict[str, Any]:
        return {"first": written(self.first), "early": written(self.early), "head": self.head.as_dict()}

    @classmethod
    def from_dict(cls, given: Any) -> Copies:
        first, early = read_by_rows(given["first"]), read_by_rows(given["early"])
        if not (1 in first and 1 in early):
            raise ValueError("tables of copies for a single row are missing")
        return cls(first, early, Table.read(given["head"]))
