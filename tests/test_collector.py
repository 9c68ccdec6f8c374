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


def test_of_two_that_overlap_the_last_one_restores_it() -> None:
    first, second = uncollected(), uncollected()
    with first:
        with second:
            assert not gc.isenabled()
        assert not gc.isenabled(), "the outer one still opens a model"
    assert gc.isenabled()
    first, second = uncollected(), uncollected()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert not gc.isenabled()
    second.__exit__(None, None, None)
    assert gc.isenabled()
