"""What may go wrong while a run is on its way; bad input is a ValueError instead."""

from __future__ import annotations


class RunFailed(RuntimeError):
    """A run that began well had to stop; the message says where, why, and what is left of it."""
