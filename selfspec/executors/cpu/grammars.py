"""Grammars of a compiled program's rows, which ask back for their masks (`kernels/cpu/grammars.h`)."""

from __future__ import annotations

from array import array

from selfspec.core import Sequence
from selfspec.kernels import compiled_call as c


class ProgramGrammars:
    """Follows the grammars of rows while a program runs. The caller keeps it until the program returns.

    Attributes:
        follow: the function that the program calls.
    """

    def __init__(self, rows: list[Sequence]) -> None:
        self._rows = rows
        self._problem: BaseException = RuntimeError()
        self._has_grammar = array("q", [row.grammar is not None for row in rows])
        self.follow = c.FOLLOW(self._follow)

    @classmethod
    def of(cls, rows: list[Sequence]) -> ProgramGrammars | None:
        """Those of these rows; None if no row has one."""
        return cls(rows) if any(row.grammar is not None for row in rows) else None

    @property
    def has_grammar(self) -> int:
        """Address of int64 `[rows]`: whether each row has a grammar."""
        return self._has_grammar.buffer_info()[0]

    def raise_problem(self) -> None:
        """Raise what made `follow` fail."""
        raise self._problem

    def _follow(self, row: int, at: int, token: int) -> int:
        """`Follow` of `kernels/cpu/grammars.h`."""
        sequence = self._rows[row]
        try:
            assert sequence.grammar is not None
            return sequence.grammar.follow(at, token)
        except BaseException as problem:  # which compiled code cannot pass on
            sequence.problem = self._problem = problem
            return 0
