"""Python's garbage collector, which finds nothing while much is made and kept."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

_lock, _state = Lock(), {"inside": 0, "was_enabled": False}


@contextmanager
def uncollected() -> Iterator[None]:
    """Pause the collector. Opening a model makes a million objects that stay, and it would visit them many times.

    It may be nested, and entered by several threads: the last one that leaves lets the collector go on.
    """
    with _lock:
        if not _state["inside"]:
            _state["was_enabled"] = gc.isenabled()
        _state["inside"] += 1
    try:
        gc.disable()
        yield
    finally:
        with _lock:
            _state["inside"] -= 1
            if not _state["inside"] and _state["was_enabled"]:
                gc.enable()
