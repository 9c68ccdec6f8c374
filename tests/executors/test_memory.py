"""Too little memory for a compiled round is one clear error, and costs no token."""

from __future__ import annotations

import pytest

from selfspec.cli.failure import ending
from selfspec.kernels import compiled_call
from tests.executors.engines import engine_of, plain


class Full:
    """The compiled functions, of which the one that runs programs finds no memory while it is told so."""

    def __init__(self, library):
        self.library, self.is_full = library, False

    def __getattr__(self, name):
        return getattr(self.library, name)

    def selfspec_program(self, *given):
        return 1 if self.is_full else self.library.selfspec_program(*given)


def test_too_little_memory_is_an_error_that_costs_no_token(monkeypatch):
    request, wanted = plain("cpu", 7)
    library = Full(compiled_call.functions())
    monkeypatch.setattr(compiled_call, "functions", lambda: library)
    engine = engine_of("cpu", policy="plain", burst=0.0)
    engine.submit(request)
    rounds, library.is_full = engine.step(), True
    with pytest.raises(MemoryError, match="too little memory for a round of 1 tokens; decode fewer rows at once"):
        engine.step()
    library.is_full = False
    rounds += engine.run()
    assert [token for round_ in rounds for row in round_.rows for token in row.tokens] == wanted.tokens


@pytest.mark.parametrize(
    ("problem", "said"), [(MemoryError("too little"), "too little"), (MemoryError(), "memory ran out")]
)
def test_the_command_says_so_in_one_sentence(capsys, problem, said):
    assert ending(problem) == 1
    assert capsys.readouterr().err.startswith(f"selfspec: {said}")
