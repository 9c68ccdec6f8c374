"""What the slow tests share: the mark on single cases, and settings of properties that look for new counterexamples."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import settings

# All other properties use the same examples every time, so that a run of the suite can be repeated. Each failure here
# prints the line @reproduce_failure(...), which brings its example back where it is put above the test.
FRESH = settings(derandomize=False, max_examples=60, print_blob=True)


# One of each kind: plain, windows, soft caps, experts, learned positions, sinks, chunks.
KINDS = ("llama", "mistral", "gemma2", "mixtral", "gpt2", "gpt_oss", "llama4_text")


def slow(*values: Any) -> Any:
    """A case of a parametrized test that only `make test-slow` runs."""
    return pytest.param(*values, marks=pytest.mark.slow)


def of_each_kind(families: Iterable[str]) -> list[Any]:
    """Families as cases, all but one of each kind slow: for what a test of every family shows of them already."""
    return [family if family in KINDS else slow(family) for family in families]
