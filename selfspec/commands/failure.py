"""How a command ends when it cannot go on: one sentence on stderr and an exit code."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

RUN, USAGE, INTERRUPTED = 1, 2, 130
_NAMES = (
    "adapter|device|drafts|dtype|engine|exit_heads|exit_layer|max_new_tokens|model|num_draft_tokens|policy|quantize"
)


class Failure(Exception):
    """A sentence for the user, and the exit code."""

    def __init__(self, message: str, code: int = USAGE) -> None:
        super().__init__(message)
        self.code = code


@contextmanager
def as_sentences() -> Iterator[None]:
    """Turn what the library raises at its border into failures: bad values are usage, all else belongs to the run."""
    try:
        yield
    except ValueError as problem:
        raise Failure(_as_options(str(problem))) from problem
    except (OSError, ImportError, RuntimeError) as problem:
        if type(problem) is RuntimeError:
            raise  # a mistake of ours: its traceback is wanted
        raise Failure(_as_options(str(problem)), RUN) from problem


def _as_options(sentence: str) -> str:
    """The library's sentences begin with a parameter's name; say the option's instead."""
    return re.sub(rf"^({_NAMES})\b(?!:)", lambda found: "--" + found[0].replace("_", "-"), sentence)
