"""Python's garbage collector while models are opened."""

from __future__ import annotations

import gc

import pytest

from selfspec.collector import uncollected


def test_the_collector_is_paused_and_restored() -> None:
    assert gc.isenabled()
    with pytest.raises(OSError, match="unreadable"), uncollected():
        assert not gc.isenabled()
        raise OSError("unreadable")
    assert gc.isenabled()


def test_a_collector_that_is_off_stays_off() -> None:
    gc.disable()
    try:
        with uncollected():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()
