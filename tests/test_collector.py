"""Python's garbage collector while models are opened."""

from __future__ import annotations

import gc

import pytest

from selfspec import LLM
from selfspec.cli.options import ModelOptions
from selfspec.cli.session import open_llm
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


def test_commands_have_the_model_never_visited_and_the_library_leaves_that_to_its_caller(monkeypatch):
    frozen = list[set[int]]()
    monkeypatch.setattr("selfspec.cli.session.freeze", lambda: frozen.append({id(one) for one in gc.get_objects()}))
    monkeypatch.setattr(gc, "freeze", pytest.fail)
    LLM("demo", max_num_seqs=1)
    assert not frozen
    command = open_llm("demo", ModelOptions(), max_num_seqs=1)
    assert len(frozen) == 2 and id(command.target.split) in frozen[1] - frozen[0]
