"""How a command ends: its exit code, and one sentence where something is not possible."""

from __future__ import annotations

import sys
from collections.abc import Callable

from eval.records import FullError
from selfspec.errors import UnsupportedModelError


def guarded(command: Callable[[], int]) -> int:
    """The command's exit code; 1 on a full disk, 2 after bad input, 130 after Ctrl-C."""
    try:
        return command()
    except KeyboardInterrupt:
        return 130
    except (ValueError, OSError, ImportError, UnsupportedModelError) as problem:
        print(f"eval: {' '.join(str(problem).split())}", file=sys.stderr)
        return 1 if isinstance(problem, FullError) else 2
