"""Trees grown from free guesses are those of a search that takes the likeliest of everything, one node at a time."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from selfspec.control.growth import FIRST, LEAST, MOST_NODES, NUM_KINDS, NUM_RANKS, Ranks, grow
from tests.control.rounds import Free

VOCAB = 6


ids = st.integers(0, VOCAB - 1)
some = st.lists(ids, max_size=4, unique=True)
guesses_of_rows = st.builds(
    Free,
    st.lists(ids, max_size=8),
    some,
    st.dictionaries(ids, some, max_size=VOCAB),
    st.dictionaries(st.tuples(ids, ids), some, max_size=12),
)
falling = st.lists(st.floats(0.01, 1), max_size=8).map(lambda drawn: sorted(drawn, reverse=True))
tables = st.lists(st.lists(st.floats(0, 0.6), min_size=NUM_RANKS, max_size=NUM_RANKS), min_size=6, max_size=6).map(
    lambda lines: [sorted(line, reverse=True) for line in lines]
)


def best_first(guesses, chances, rates, least, most):
    """{path: chance} by looking at all candidates of all nodes anew for every node that is added."""
    chain = guesses.chain(len(chances))
    nodes = {tuple(chain[: i + 1]): chances[i] for i in range(len(chain))}
    on_chain = {(): chain[:1], **{tuple(chain[: i + 1]): chain[i + 1 : i + 2] for i in range(len(chain))}}
    before = {(): 1.0, **nodes}
    while len(nodes) < len(chain) + most:
        offers = []
        for path, chance in before.items():
            taken = on_chain.get(path, [])
            kind, found = guesses.first_candidates()
            if path:
                kind, found = guesses.candidates(path[-1], (*guesses.last, *path)[-2])
            left = chance - nodes[(*path, *taken)] if taken else chance
            line = rates[2 * kind + bool(taken)]
            ranked = zip([token for token in found if token not in taken], line, strict=False)
            offers += [(left * rate, (*path, token)) for token, rate in ranked]
        offers = [(chance, path) for chance, path in offers if path not in nodes and chance >= least]
        if not offers:
            break
        chance, path = max(offers)
        nodes[path] = before[path] = chance
    return nodes


def paths_of(tree):
    found = [()]
    for token, parent in zip(tree.tokens, tree.parents, strict=True):
        found.append((*found[parent], token))
    return found[1:]


@settings(max_examples=200)
@given(guesses_of_rows, falling, tables)
def test_it_grows_what_a_search_through_everything_finds(guesses, chances, rates):
    grown = grow(guesses, chances, rates)
    expected = best_first(guesses, chances, rates, LEAST, MOST_NODES)
    paths = paths_of(grown.tree)
    assert len(set(paths)) == len(paths) == len(grown.chances)
    # of equally likely nodes either may have been the last that there was room for
    assert sorted(grown.chances) == pytest.approx(sorted(expected.values()))
    if len(paths) < MOST_NODES:
        assert dict(zip(paths, grown.chances, strict=True)) == pytest.approx(expected)


@settings(max_examples=200)
@example(Free([0, 0, 0], [0, 2], {0: [0, 1], 1: [0, 1]}, {}), [0.5, 0.5, 0.5], [[0.6] * NUM_RANKS] * 6)
@given(guesses_of_rows, falling, tables)
def test_any_first_nodes_are_a_tree_whose_chances_fall(guesses, chances, rates):
    grown = grow(guesses, chances, rates)
    tokens, parents = grown.tree
    of_path = dict(zip(paths_of(grown.tree), grown.chances, strict=True))
    ordered = [grown.chances[node] for node in grown.order]
    assert sorted(grown.order) == list(range(len(tokens)))
    assert ordered == sorted(ordered, reverse=True)
    for node, parent in enumerate(parents):
        assert 0 <= parent <= node and (parent == 0 or grown.chances[node] <= grown.chances[parent - 1])
    chain = guesses.chain(len(chances))
    assert list(tokens[: len(chain)]) == chain
    for count in range(len(tokens) + 1):
        best = grown.best(count)
        kept = paths_of(best)  # IndexError where a parent is not there
        assert len(best.tokens) == len(best.parents) == len(kept) == len(set(kept)) == count
        assert all(0 <= parent <= node for node, parent in enumerate(best.parents))
        assert all(path[:-1] in {(), *kept} for path in kept)
        assert sorted((of_path[path] for path in kept), reverse=True) == ordered[:count]


@settings(max_examples=100)
@example(Free([2], [], {2: [3], 3: [4, 5], 4: [1]}, {}), [0.9], [[0.6] * NUM_RANKS] * 6)
@given(guesses_of_rows, falling, tables)
def test_without_branches_the_chain_goes_on_with_the_likeliest_candidates(guesses, chances, rates):
    grown = grow(guesses, chances, rates, is_tree=False)
    tokens, parents = grown.tree
    chain = guesses.chain(len(chances))
    assert list(parents) == list(range(len(tokens))) and list(tokens[: len(chain)]) == chain
    assert grown.order == list(range(len(tokens)))
    path, chance, expected = [*guesses.last, *chain], ([1.0, *chances])[len(chain)], []
    while len(expected) < MOST_NODES:
        kind, found = guesses.candidates(path[-1], path[-2]) if len(path) > 2 else guesses.first_candidates()
        chance *= rates[2 * kind][0]
        if not found or chance < LEAST:
            break
        path.append(found[0])
        expected.append(found[0])
    assert list(tokens[len(chain) :]) == expected


def test_a_candidate_that_the_chain_has_is_not_drafted_twice_and_its_rank_goes_to_the_next():
    guesses = Free([2], [2, 3, 4])
    rates = [[0.0] * NUM_RANKS for _ in range(6)]
    rates[5] = [0.5, 0.25, *[0.0] * 6]  # beside a wrong chain
    grown = grow(guesses, [0.6], rates)
    assert grown.tree == ((2, 3, 4), (0, 0, 0)) and grown.chances == pytest.approx([0.6, 0.4 * 0.5, 0.4 * 0.25])


def test_nothing_grows_where_nothing_is_known_or_likely():
    rates = [[0.5] * NUM_RANKS] * 6
    assert grow(Free(), [], rates).tree == ((), ())
    assert grow(Free(first=[3]), [], [[LEAST / 2] * NUM_RANKS] * 6).tree == ((), ())
    assert grow(Free(first=[3]), [], [[2 * LEAST] * NUM_RANKS] * 6).tree == ((3,), (0,))


# --------------------------------------------------------------------------------------------------------------- ranks


def test_nothing_known_the_first_rates_hold():
    assert Ranks().rates == [list(FIRST[line // 2]) for line in range(2 * NUM_KINDS)]


def test_a_rank_that_was_right_is_expected_again_of_its_kind_alone():
    ranks, untouched = Ranks(), Ranks().rates
    for i in range(400):
        ranks.add([(1, True, 2), (0, False, NUM_RANKS if i % 2 else 0)])  # always the third; every other time none
    rates = ranks.rates
    assert rates[3] == pytest.approx([0.0] * NUM_RANKS, abs=0.01)  # by rank they fall: the third is no likelier
    assert rates[0] == pytest.approx([0.5, *[0.0] * 7], abs=0.02)
    assert [rates[line] for line in (1, 2, 4, 5)] == [untouched[line] for line in (1, 2, 4, 5)]


@given(
    st.lists(
        st.tuples(st.integers(0, NUM_KINDS - 1), st.booleans(), st.integers(0, NUM_RANKS + 2), st.floats(0, 4000)),
        max_size=30,
    )
)
def test_rates_are_chances_and_fall(seen):
    ranks = Ranks()
    for kind, is_beside, rank, tokens in seen:
        ranks.add([(kind, is_beside, rank)])
        ranks.passed.tokens += tokens
    for line in ranks.rates:
        assert line == sorted(line, reverse=True) and all(0 <= rate <= 1 for rate in line)


def test_older_ranks_fade():
    ranks = Ranks()
    for _ in range(100):
        ranks.add([(0, False, 0)])
    assert ranks.rates[0][0] > 0.9
    for _ in range(40):
        ranks.passed.tokens += 300.0
    for _ in range(20):
        ranks.add([(0, False, NUM_RANKS)])
    assert ranks.rates[0][0] < 0.1
