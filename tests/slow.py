"""What the slow tests share: the mark on single cases, and settings of properties that look for new counterexamples."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings

# All other properties use the same examples every time, so that a run of the suite can be repeated. Each failure here
# prints the line @reproduce_failure(...), which brings its example back where it is put above the test.
FRESH = settings(derandomize=False, max_examples=60, print_blob=True)


def slow(*values: Any) -> Any:
    """A case of a parametrized test that only `make test-slow` runs."""
    return pytest.param(*values, marks=pytest.mark.slow)
