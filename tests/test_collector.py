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


def test_of_several_that_overlap_the_last_one_restores_what_was() -> None:
    for was_enabled in (True, False):
        (gc.enable if was_enabled else gc.disable)()
        try:
            first, second = uncollected(), uncollected()
            first.__enter__()
            second.__enter__()
            first.__exit__(None, None, None)
            assert not gc.isenabled(), "the other one still opens a model"
            second.__exit__(None, None, None)
            assert gc.isenabled() == was_enabled
        finally:
            gc.enable()
