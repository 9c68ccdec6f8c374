"""Trees grown from free guesses are a chain, and beside its first token the others that are likely enough."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from selfspec.control.growth import FIRST, LEAST, NUM_RANKS, Ranks, grow
from tests.control.rounds import Free

ids = st.integers(0, 5)
guesses_of_rows = st.builds(Free, st.lists(ids, max_size=8), st.lists(ids, max_size=4, unique=True))
falling = st.lists(st.floats(0.01, 1), max_size=8).map(lambda drawn: sorted(drawn, reverse=True))
tables = st.lists(st.floats(0, 0.6), min_size=NUM_RANKS, max_size=NUM_RANKS).map(
    lambda line: sorted(line, reverse=True)
)


def paths_of(tree):
    found = [()]
    for token, parent in zip(tree.tokens, tree.parents, strict=True):
        found.append((*found[parent], token))
    return found[1:]


@settings(max_examples=200)
@given(guesses_of_rows, falling, tables)
def test_it_grows_the_chain_and_all_likely_others_beside_its_first_token(guesses, chances, rates):
    chain = guesses.chain(len(chances))
    expected = {tuple(chain[: i + 1]): chances[i] for i in range(len(chain))}
    others = [token for token in guesses.alternatives() if token not in chain[:1]] if chain else []
    for token, rate in zip(others, rates, strict=False):
        if (1 - chances[0]) * rate >= LEAST:
            expected[token,] = (1 - chances[0]) * rate
    grown = grow(guesses, chances, rates)
    assert dict(zip(paths_of(grown.tree), grown.chances, strict=True)) == pytest.approx(expected)
    assert list(grown.tree.tokens[: len(chain)]) == chain


@settings(max_examples=200)
@example(Free([0, 0, 0], [0, 2]), [0.5, 0.5, 0.5], [0.6] * NUM_RANKS)
@given(guesses_of_rows, falling, tables)
def test_any_first_nodes_are_a_tree_whose_chances_fall(guesses, chances, rates):
    grown = grow(guesses, chances, rates)
    tokens, parents = grown.tree
    of_path = dict(zip(paths_of(grown.tree), grown.chances, strict=True))
    ordered = [grown.chances[node] for node in grown.order]
    assert len(of_path) == len(tokens) and sorted(grown.order) == list(range(len(tokens)))
    assert ordered == sorted(ordered, reverse=True)
    for node, parent in enumerate(parents):
        assert 0 <= parent <= node and (parent == 0 or grown.chances[node] <= grown.chances[parent - 1])
    for count in range(len(tokens) + 1):
        best = grown.best(count)
        kept = paths_of(best)  # IndexError where a parent is not there
        assert len(best.tokens) == len(best.parents) == len(kept) == len(set(kept)) == count
        assert all(path[:-1] in {(), *kept} for path in kept)
        assert sorted((of_path[path] for path in kept), reverse=True) == ordered[:count]


def test_an_alternative_that_the_chain_has_is_not_drafted_twice_and_its_rank_goes_to_the_next():
    grown = grow(Free([2], [2, 3, 4]), [0.6], [0.5, 0.25, *[0.0] * 6])
    assert grown.tree == ((2, 3, 4), (0, 0, 0)) and grown.chances == pytest.approx([0.6, 0.4 * 0.5, 0.4 * 0.25])


def test_nothing_grows_where_nothing_is_known_or_likely():
    assert grow(Free(), [], [0.5] * NUM_RANKS).tree == ((), ())
    assert grow(Free([2], [3]), [0.5], [LEAST] * NUM_RANKS).tree == ((2,), (0,))
    assert grow(Free([2], [3]), [0.5], [3 * LEAST] * NUM_RANKS).tree == ((2, 3), (0, 0))


# --------------------------------------------------------------------------------------------------------------- ranks


def test_nothing_known_the_first_rates_hold():
    assert Ranks().rates == list(FIRST)


def test_a_rank_that_was_right_is_expected_again():
    ranks = Ranks()
    for i in range(400):
        ranks.add(NUM_RANKS if i % 2 else 0)  # every other time none
    assert ranks.rates == pytest.approx([0.5, *[0.0] * 7], abs=0.02)


@given(st.lists(st.tuples(st.integers(0, NUM_RANKS + 2), st.floats(0, 4000)), max_size=30))
def test_rates_are_chances_and_fall(seen):
    ranks = Ranks()
    for rank, tokens in seen:
        ranks.add(rank)
        ranks.passed.tokens += tokens
    assert ranks.rates == sorted(ranks.rates, reverse=True) and all(0 <= rate <= 1 for rate in ranks.rates)


def test_older_ranks_fade():
    ranks = Ranks()
    for _ in range(100):
        ranks.add(0)
    assert ranks.rates[0] > 0.9
    for _ in range(40):
        ranks.passed.tokens += 300.0
    for _ in range(20):
        ranks.add(NUM_RANKS)
    assert ranks.rates[0] < 0.1
