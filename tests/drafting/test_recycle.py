"""Recycled candidates are the latest that were learned, as a dictionary would have it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from selfspec.drafting.recycle import Recycled

VOCABULARY = 12


class Dictionary:
    """The same in plain Python, with room for every pair."""

    def __init__(self, k):
        self.k, self.after = k, {}

    def learn(self, tokens, candidates, previous):
        for token, row, before in zip(tokens, candidates, previous, strict=True):
            row = [one for one in dict.fromkeys(row[: self.k]) if one >= 0]
            self.after[token] = row
            if before >= 0:
                self.after[before, token] = row

    def candidates(self, token, previous=-1):
        return self.after.get((previous, token), self.after.get(token, []))

    def chain(self, last_tokens, num_tokens):
        path, made = [-1, *last_tokens], []
        while len(made) < num_tokens and (found := self.candidates(path[-1], path[-2])):
            path.append(found[0])
            made.append(found[0])
        return made


@st.composite
def lessons(draw, width=None):
    """(tokens, candidates, previous) of a round, in which a row of candidates ends with -1 at times."""
    ids, width = st.integers(0, VOCABULARY - 1), width or draw(st.integers(1, 5))
    num = draw(st.integers(0, 8))
    tokens = draw(st.lists(ids, min_size=num, max_size=num))
    rows = [draw(st.lists(ids, min_size=1, max_size=width)) for _ in range(num)]
    rows = [[*row, *[-1] * (width - len(row))] for row in rows]
    previous = draw(st.lists(st.integers(-1, VOCABULARY - 1), min_size=num, max_size=num))
    return tokens, rows, previous, width


def feed(memory, lesson):
    tokens, rows, previous, width = lesson
    memory.learn(np.array(tokens, int), np.array(rows, int).reshape(-1, width), np.array(previous, int))


@given(st.lists(lessons(), max_size=8), st.integers(1, 6), st.integers(0, 12))
def test_candidates_and_chains_are_those_of_a_dictionary(rounds, k, num_tokens):
    memory, model = Recycled(VOCABULARY, k), Dictionary(k)
    for lesson in rounds:
        feed(memory, lesson)
        model.learn(*lesson[:3])
    for token in range(VOCABULARY):
        assert memory.candidates(token) == model.candidates(token)
        assert memory.chain([token], num_tokens) == model.chain([token], num_tokens)
        for previous in range(VOCABULARY):
            assert memory.candidates(token, previous) == model.candidates(token, previous)
            assert memory.chain([3, previous, token], num_tokens) == model.chain([previous, token], num_tokens)


@given(st.lists(lessons(), max_size=8), st.integers(1, 3))
def test_a_pair_that_is_forgotten_leaves_its_token(rounds, pair_bits):
    memory, model = Recycled(VOCABULARY, 5, pair_bits), Dictionary(5)
    for lesson in rounds:
        feed(memory, lesson)
        model.learn(*lesson[:3])
    remembered = 0
    for token in range(VOCABULARY):
        for previous in range(VOCABULARY):
            found = memory.candidates(token, previous)
            assert found in (model.candidates(token, previous), model.candidates(token))
            remembered += (previous, token) in model.after and found != model.candidates(token)
    assert remembered <= 1 << pair_bits
    for tokens, rows, previous, _ in rounds[-1:]:
        if tokens and previous[-1] >= 0:  # what was learned last is always there
            assert memory.candidates(tokens[-1], previous[-1]) == list(dict.fromkeys(r for r in rows[-1] if r >= 0))


@given(st.lists(lessons(), max_size=8), st.integers(0, 20), st.lists(st.integers(1, 4), max_size=4))
def test_a_tree_holds_the_likeliest_of_all_nodes(rounds, num_nodes, widths):
    memory = Recycled(VOCABULARY, 4)
    for lesson in rounds:
        feed(memory, lesson)
    last, rates = [2, 3], memory.rates
    every, level = {}, {(): 1.0}  # likelihood by path
    for width in widths:
        grown = {}
        for path, likelihood in level.items():
            previous, token = [*last, *path][-2:]
            kind = int(memory._find(token, previous)[0])
            for rank, child in enumerate(memory.candidates(token, previous)[:width]):
                grown[(*path, child)] = likelihood * rates[kind, rank]
        every |= grown
        level = grown
    tokens, parents = memory.tree(last, num_nodes, widths)
    paths = []
    for token, parent in zip(tokens, parents, strict=True):
        assert parent < len(paths)
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    assert len(set(paths)) == len(paths) == min(num_nodes, len(every))
    assert [len(path) for path in paths] == sorted(map(len, paths))
    expected = sorted(every.values(), reverse=True)[: len(paths)]
    assert sorted((every[path] for path in paths), reverse=True) == pytest.approx(expected)


def test_a_tree_of_one_node_a_level_is_the_chain():
    memory, rng = Recycled(VOCABULARY, 3), np.random.default_rng(0)
    memory.learn(np.arange(VOCABULARY), rng.permuted(np.tile(np.arange(VOCABULARY), (VOCABULARY, 1)), axis=1)[:, :3])
    for token in range(VOCABULARY):
        tokens, parents = memory.tree([token], 5, [1] * 5)
        assert (tokens, parents) == (memory.chain([token], 5), [-1, 0, 1, 2, 3])


def test_rates_tell_at_which_rank_the_likeliest_token_was_known():
    memory = Recycled(10, 2)
    assert memory.rates.tolist() == [[0.5, 0.25], [0.5, 0.25]]
    token, previous = np.array([1]), np.array([2])
    for i in range(3000):  # the second candidate turns out to be the likeliest, one time in two the first
        memory.learn(token, np.array([[3, 4]] if i % 4 in (0, 1) else [[4, 3]]), previous)
    assert memory.rates == pytest.approx(0.5, abs=0.02)
    for _ in range(5000):
        memory.learn(token, np.array([[3, 4]]), None)
    assert memory.rates[0] == pytest.approx([1, 0], abs=0.01)
    assert memory.rates[1] == pytest.approx(0.5, abs=0.02)  # of no pair, nothing was learned


def test_memory_is_bounded_and_bad_sizes_are_refused():
    assert Recycled(1000, 8, 10).num_bytes == 4 * 8 * 1000 + (8 + 4 * 8) * 1024
    for arguments in ((0,), (10, 0), (10, 8, 0), (10, 8, 33), (10, 2.5)):
        with pytest.raises(ValueError, match=r"must (be a whole number of at least 1|lie in 1..32), got"):
            Recycled(*arguments)
