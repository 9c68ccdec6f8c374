"""Lookup finds what a naive search finds, in little time and memory."""

from __future__ import annotations

import ctypes
import gc

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from selfspec.control.plan import NUM_MATCH_BINS, match_bin
from selfspec.core import Draft
from selfspec.drafting.lookup import TextLookup
from selfspec.drafting.ngram_index import MOST_MATCHED, CompiledIndex, Index, Tally, new_index
from selfspec.kernels import compiled_call
from selfspec.kernels.compiled_call import functions


def Lookup(content, most=MOST_MATCHED, make=None):
    """Lookup with an index of this kind, or of that which is chosen."""
    return TextLookup(content, most, new_index if make is None else lambda most, length: make(most))


def naive(content, most, num_tokens):
    """(tokens, match) by trying every suffix from the longest on, and every place from the last on."""
    for length in range(min(most, len(content) - 1), 0, -1):
        suffix = content[len(content) - length :]
        for end in range(len(content) - 1, length - 1, -1):
            if content[end - length : end] == suffix:
                period = content[end:]
                return [period[i % len(period)] for i in range(num_tokens)], length
    return [], 0


def naive_tally(content, most, start):
    """From a place on: tokens that came after a match, and as what followed it, by bin."""
    seen, right = [0] * NUM_MATCH_BINS, [0] * NUM_MATCH_BINS
    for at in range(start, len(content)):
        tokens, match = naive(content[:at], most, 1)
        if match:
            seen[match_bin(match)] += 1
            right[match_bin(match)] += tokens == [content[at]]
    return Tally(len(content) - start, seen, right)


BOTH = pytest.mark.parametrize("kind", [Index, CompiledIndex])
contents = st.integers(1, 4).flatmap(lambda vocab: st.lists(st.integers(0, vocab), max_size=80))


@BOTH
@example(content=[0] * 40, most=16, num_tokens=5, step=1)
@example(content=[0, 1] * 30, most=7, num_tokens=9, step=13)
@given(content=contents, most=st.integers(1, 20), num_tokens=st.integers(0, 12), step=st.integers(1, 30))
def test_a_draft_is_what_a_naive_search_finds(kind, content, most, num_tokens, step):
    grown = []
    lookup = Lookup(grown, most, kind)
    for start in range(0, len(content), step):
        grown += content[start : start + step]
        expected, match = naive(grown, most, num_tokens)
        assert lookup.draft(num_tokens) == Draft(expected, match)
        assert (lookup.match, len(lookup)) == (match, len(grown))


@BOTH
@example(content=[1, 2] * 40, most=16, steps=[70, 1, 9])
@example(content=[*range(9)] * 12, most=32, steps=[60, 40, 1, 7])
@given(content=contents, most=st.integers(1, 40), steps=st.lists(st.integers(1, 90), min_size=1, max_size=8))
def test_the_index_tells_how_often_a_guess_would_have_been_right(kind, content, most, steps):
    """Every token counts once, whether anybody asked for matches in between or not."""
    grown = []
    lookup, start = Lookup(grown, most, kind), 0
    for i, step in enumerate(steps):
        grown += content[len(grown) : len(grown) + step]
        if i % 2 == 0:
            assert lookup.take_tally() == naive_tally(grown, most, start)
            start = len(grown)
        else:
            assert lookup.match == naive(grown, most, 1)[1]


def test_a_match_longer_than_the_index_tells_apart_is_refused_at_the_border():
    for most in (0, 256):
        with pytest.raises(ValueError, match=r"most must lie in 1..255"):
            Index(most)


def test_indices_are_compiled_where_something_else_is(monkeypatch):
    compiled_call.functions()
    assert isinstance(Lookup([1, 2]).index, CompiledIndex)
    monkeypatch.setattr(compiled_call, "loaded", lambda: None)
    assert isinstance(Lookup([1, 2]).index, Index)


class Noting:
    """The compiled functions; which indices are held is written down."""

    def __init__(self, lib):
        self.lib, self.held, self.num_made = lib, set(), 0

    def __getattr__(self, name):
        return getattr(self.lib, name)

    def selfspec_index_new(self, *given):
        made = self.lib.selfspec_index_new(*given)
        self.held.add(made)
        self.num_made += 1
        return made

    def selfspec_texts_free(self, index):
        self.held.remove(index)
        self.lib.selfspec_texts_free(index)


def test_compiled_indices_are_given_back(monkeypatch):
    lib = Noting(functions())
    monkeypatch.setattr(compiled_call, "functions", lambda: lib)
    lookup = Lookup([1, 2, 1], make=CompiledIndex)
    assert lookup.match == 1 and len(lib.held) == 1
    del lookup
    gc.collect()
    assert not lib.held and lib.num_made == 1


def told(lookup, tokens):
    """As a compiled round does that nobody hears of afterwards."""
    assert functions().selfspec_index_add(lookup.index.address, (ctypes.c_int64 * len(tokens))(*tokens), len(tokens))


@given(content=contents.filter(bool), more=st.lists(st.integers(0, 4), min_size=1, max_size=9), step=st.integers(1, 9))
def test_an_index_that_was_told_of_tokens_that_its_row_never_got_is_made_anew(content, more, step):
    lookup, plain = Lookup(content, make=CompiledIndex), Lookup(content, make=Index)
    first, wanted = lookup.take_tally(), plain.take_tally()
    assert first == wanted
    told(lookup, more)
    assert (lookup.match, lookup.draft(5)) == (plain.match, plain.draft(5))
    content += more[:step]
    told(lookup, [9, *more])
    assert (lookup.match, lookup.draft(5)) == (plain.match, plain.draft(5))
    assert lookup.take_tally().num_tokens == plain.take_tally().num_tokens


def test_an_index_that_memory_was_too_little_for_is_made_when_there_is_enough(monkeypatch):
    content, lib = [1, 2, 1, 2, 1], Noting(functions())
    lookup = Lookup(content, make=CompiledIndex)
    told(lookup, [3, 4, 4])
    content += [3]  # less than it holds
    lib.selfspec_index_new = lambda *given: None
    with monkeypatch.context() as patch:
        patch.setattr(compiled_call, "functions", lambda: lib)
        for _ in range(2):
            with pytest.raises(MemoryError, match="too little memory for an index"):
                assert lookup.match
    content += [2, 3, 1]  # more than it held
    assert (lookup.match, lookup.draft(4)) == (Lookup(content).match, Lookup(content).draft(4))
