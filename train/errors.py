"""The error of a run that failed after it had started; bad input is a ValueError."""

from __future__ import annotations


class RunFailed(RuntimeError):
    """A run had to stop; the message says where, why, and how to continue."""
