"""Lookup finds what a naive search finds, in little time and memory."""

from __future__ import annotations

import ctypes
import gc
import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from selfspec.control.ngram_stats import bin_of
from selfspec.control.plan import NUM_MATCH_BINS
from selfspec.control.rows import Tally
from selfspec.drafting.compiled_lookup import CompiledLookup, lookup_of
from selfspec.drafting.lookup import Lookup
from selfspec.kernels import compiled_call
from selfspec.kernels.compiled_call import functions


def naive(content, most, num_tokens):
    """(tokens, match) by trying every suffix from the longest on, and every place from the last on."""
    for length in range(min(most, len(content) - 1), 0, -1):
        suffix = content[len(content) - length :]
        for end in range(len(content) - 1, length - 1, -1):
            if content[end - length : end] == suffix:
                period = content[end:]
                return [period[i % len(period)] for i in range(num_tokens)], length
    return [], 0


def naive_alternatives(content, most):
    """What followed the latest places of every shorter suffix, the longer ones first; without what a draft begins with.

    A suffix that went on backwards in one way only was last seen where a longer one was.
    """
    [first], match = naive(content, most, 1) if naive(content, most, 1)[1] else ([None], 0)
    found = []
    for length in range(match - 1, 0, -1):
        found += naive(content, length, 1)[0]
    return [token for token in dict.fromkeys(found) if token != first]


def naive_tally(content, most, start):
    """From a place on: tokens that came after a match, and as what followed it, by bin."""
    seen, right = [0] * NUM_MATCH_BINS, [0] * NUM_MATCH_BINS
    for at in range(start, len(content)):
        tokens, match = naive(content[:at], most, 1)
        if match:
            seen[bin_of(match)] += 1
            right[bin_of(match)] += tokens == [content[at]]
    return Tally(len(content) - start, seen, right)


BOTH = pytest.mark.parametrize("kind", [Lookup, CompiledLookup])
contents = st.integers(1, 4).flatmap(lambda vocab: st.lists(st.integers(0, vocab), max_size=80))


@BOTH
@example(content=[0] * 40, most=16, num_tokens=5, step=1)
@example(content=[0, 1] * 30, most=7, num_tokens=9, step=13)
@given(content=contents, most=st.integers(1, 20), num_tokens=st.integers(0, 12), step=st.integers(1, 30))
def test_a_draft_is_what_a_naive_search_finds(kind, content, most, num_tokens, step):
    grown = []
    lookup = kind(grown, most)
    for start in range(0, len(content), step):
        grown += content[start : start + step]
        expected, match = naive(grown, most, num_tokens)
        assert lookup.draft(num_tokens) == (expected, match)
        assert (lookup.match, len(lookup)) == (match, len(grown))


@BOTH
@settings(max_examples=100)
@example(content=[3, 2, 1, 6, 4, 2, 1, 7, 5, 1, 8, 3, 2, 1], most=16, step=1)  # 7 after two tokens, 8 after one
@example(content=[0, 1, 2, 1, 3, 2, 0, 1], most=16, step=1)
@example(content=[4, 0, 1, 2, 0, 1, 3, 4, 0, 1], most=16, step=1)
@given(content=contents, most=st.integers(1, 20), step=st.integers(1, 30))
def test_alternatives_are_what_followed_shorter_matches(kind, content, most, step):
    grown = []
    lookup = kind(grown, most)
    for start in range(0, len(content), step):
        grown += content[start : start + step]
        assert lookup.alternatives() == naive_alternatives(grown, most)


@BOTH
@example(content=[1, 2] * 40, most=16, steps=[70, 1, 9])
@example(content=[*range(9)] * 12, most=32, steps=[60, 40, 1, 7])
@given(content=contents, most=st.integers(1, 40), steps=st.lists(st.integers(1, 90), min_size=1, max_size=8))
def test_the_index_tells_how_often_a_guess_would_have_been_right(kind, content, most, steps):
    """Every token counts once, whether anybody asked for matches in between or not."""
    grown = []
    lookup, start = kind(grown, most), 0
    for i, step in enumerate(steps):
        grown += content[len(grown) : len(grown) + step]
        if i % 2 == 0:
            assert lookup.take_tally() == naive_tally(grown, most, start)
            start = len(grown)
        else:
            assert lookup.match == naive(grown, most, 1)[1]


def kinds_of_text(length):
    rng = random.Random(0)
    yield "random", [rng.randrange(32_000) for _ in range(length)]
    yield "few tokens", [rng.randrange(4) for _ in range(length)]
    yield "one token", [7] * length
    yield "period", [rng.randrange(32_000) for _ in range(400)] * (length // 400)
    words = [[rng.randrange(32_000) for _ in range(rng.randint(1, 6))] for _ in range(300)]
    yield "words", [token for _ in range(length) for token in words[int(300 * rng.random() ** 3)]][:length]
    phrase = [rng.randrange(50) for _ in range(length // 2)]
    yield "twice", phrase + phrase


@BOTH
@pytest.mark.parametrize("grows", [False, True])
def test_the_index_takes_less_than_64_bytes_per_token(kind, grows):
    for name, content in kinds_of_text(8000):
        given_first = content[:1] if grows else content
        lookup = kind(given_first)
        for token in content[len(given_first) :]:
            given_first.append(token)
            assert lookup.match >= 0
        assert lookup.match >= 0
        assert lookup.num_bytes < 64 * len(given_first), name


def test_a_match_longer_than_the_index_tells_apart_is_refused_at_the_border():
    for most in (0, 256):
        with pytest.raises(ValueError, match=r"most must lie in 1..255"):
            Lookup([], most)


def test_indices_are_compiled_where_something_else_is(monkeypatch):
    compiled_call.functions()
    assert isinstance(lookup_of([1, 2]), CompiledLookup)
    monkeypatch.setattr("selfspec.drafting.compiled_lookup.loaded", lambda: None)
    assert type(lookup_of([1, 2])) is Lookup


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

    def selfspec_index_free(self, index):
        self.held.remove(index)
        self.lib.selfspec_index_free(index)


def test_compiled_indices_are_given_back(monkeypatch):
    lib = Noting(functions())
    monkeypatch.setattr("selfspec.drafting.compiled_lookup.functions", lambda: lib)
    content = [1, 2, 1]
    lookup = CompiledLookup(content)
    assert lookup.match == 1 and lib.num_made == 1
    lookup.lend()
    lookup.foresee([[0, -1, 0, 0]], [3])
    content += [2, 1]  # another way than it was told, so that it is made anew
    assert lookup.match == 3 and lib.num_made == 2 and len(lib.held) == 1
    del lookup
    gc.collect()
    assert not lib.held


@pytest.mark.parametrize("count", [5, 127, 200, 255, 256, 300])
def test_a_call_may_tell_the_index_of_as_many_tokens_as_fill_a_counter(count):
    """After the first of them, all follow a longest match; what is more than a byte holds is left out."""
    content, tokens = [7] * 40, [7] * count
    lookup = CompiledLookup(content)
    lookup.take_tally()
    out = (ctypes.c_int64 * (4 + lookup.most))()
    told = functions().selfspec_index_add(lookup.lend(), (ctypes.c_int64 * count)(*tokens), count, out)
    lookup.foresee([out[: 4 + told]], [count])
    content += tokens
    tally = lookup.take_tally()
    assert tally.num_tokens == count and tally.seen == tally.right == [0] * (NUM_MATCH_BINS - 1) + [min(count, 255)]
    assert lookup.draft(9) == ([7] * 9, lookup.most)
