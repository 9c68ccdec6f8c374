"""Drafts by lookup: acceptance by match length and source, and the draft lengths that follow."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from selfspec.control.acceptance import TokenClock
from selfspec.control.adaptive import Adaptive
from selfspec.control.drafters import MOST_FOUND
from selfspec.control.ngrams import LEAST_CHANCE, SHORTEST, NgramStats, table
from selfspec.control.plan import (
    CORPUS,
    NUM_LOOKUP_BINS,
    NUM_MATCH_BINS,
    OWN_TEXT,
    RESPONSES,
    SOURCES,
    lookup_bin,
    match_bin,
    table_of,
)
from selfspec.control.times import LOOKUP_GRID, MOST_PACKED
from selfspec.core import LOOKUP
from tests.control.rounds import (
    Match,
    Repetition,
    Tally,
    even_costs,
    play,
    sequence,
    settled,
    times_of,
    with_dear_contexts,
)

# ---------------------------------------------------------------------------------------------------------- statistics


def tally(match, right, seen):
    """`seen` tokens of a row after matches of this length, `right` of which are those that the match predicts."""
    place = match_bin(match)
    line = [[n if at == place else 0 for at in range(NUM_MATCH_BINS)] for n in (seen, right)]
    return Tally(seen, *line)


def test_match_lengths_fall_into_bins():
    matches = (1, 2, 3, 4, 5, 6, 8, 9, 15, 16, 31, 32, 63, 64, 127, 128, 200)
    assert [match_bin(match) for match in matches] == [0, 1, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7, 8, 8, 9, 9]


def test_what_was_right_after_such_matches_is_expected_again_and_what_was_not_is_not():
    for right in (0, 40):
        stats = NgramStats(TokenClock())
        before = stats.rates([0])[0]
        stats.take(tally(5, 0, 0), 0)  # its prompt
        stats.take(tally(5, right, 40), 0)
        after = stats.rates([0])[0]
        assert (after[match_bin(5)] > before[match_bin(5)]) == (right > 0)
        assert after[match_bin(20)] == pytest.approx(before[match_bin(20)])


def test_a_row_that_only_seems_to_repeat_itself_is_told_from_those_that_do():
    stats = NgramStats(TokenClock())
    for seq_id, right in ((0, 50), (1, 0)):
        stats.take(tally(9, 0, 0), seq_id)
        stats.take(tally(9, right, 50), seq_id)
    good, bad, other = (stats.rates([i])[0][match_bin(9)] for i in (0, 1, 2))
    assert bad < 0.2 < other < 0.8 < good
    stats.keep_rows([])
    assert stats.rates([0])[0][match_bin(9)] == pytest.approx(stats.rates([1])[0][match_bin(9)])


def test_a_prompt_counts_for_few_tokens_and_older_ones_fade():
    passed = TokenClock()
    stats = NgramStats(passed)
    stats.take(tally(9, 4000, 4000), 0)  # of a prompt
    for _ in range(3):
        passed.tokens += 300
        stats.take(tally(9, 0, 12), 0)
    assert stats.rates([0])[0][match_bin(9)] < 0.35


def test_what_came_of_a_draft_counts_by_the_match_before_each_token():
    stats = NgramStats(TokenClock())
    for _ in range(10):
        stats.add(4, 6, 3, 0, RESPONSES)  # tokens after matches of 4, 5, 6 were right, and that after 7 was not
    rates, prior = stats.rates([0])[0], NgramStats(TokenClock()).rates([0])[0]
    for at, order in ((lookup_bin(4, RESPONSES), 1), (lookup_bin(7, RESPONSES), -1)):
        assert order * rates[at] > order * prior[at]
    for other in (OWN_TEXT, CORPUS):  # every source has statistics of its own
        own = slice(lookup_bin(1, other), lookup_bin(1, other) + NUM_MATCH_BINS)
        assert rates[own] == pytest.approx(prior[own])


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(0.01, 0.99), min_size=NUM_LOOKUP_BINS, max_size=NUM_LOOKUP_BINS),
    st.sampled_from(SOURCES),
    st.floats(1.0, 3.0),
    st.integers(1, MOST_FOUND),
)
def test_a_single_rows_length_is_that_of_most_tokens_per_second(rates, source, speedup, most):
    times = times_of(even_costs(), 1)
    usual, seconds = speedup / times.plain_seconds, times.lookups()
    found = table(np.array([rates]), 1, seconds, usual, most)
    for match in SHORTEST:
        chances = np.cumprod([rates[lookup_bin(match + at, source)] for at in range(most)])
        kept = [1.0, *(1 + np.cumsum(np.where(chances < LEAST_CHANCE, 0, chances)))]
        best = max(tokens / taken for tokens, taken in zip(kept, seconds, strict=False))
        length = 0 if found is None else found.lengths[0][lookup_bin(match, source)]
        if length:
            assert kept[length] / seconds[length] == pytest.approx(best)
            assert best >= usual * (1 - 1e-9)
        elif best > max(usual, 1 / seconds[0]) * (1 + 1e-9):
            raise AssertionError("a draft that pays is not drafted")


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 6), st.floats(0.05, 0.99), st.integers(0, 99))
def test_rows_of_a_batch_draft_where_all_together_promise_more_than_is_usual(count, rate, seed):
    times = times_of(even_costs(rows=(1, 4, 8)), count)
    usual = count / times.plain_seconds
    found = table(np.full((count, NUM_LOOKUP_BINS), rate), count, times.lookups(), usual)
    matches = np.random.default_rng(seed).integers(0, 40, count).tolist()
    lengths = None if found is None else found.drafted(matches, [100] * count)
    if lengths is not None:
        kept = count + sum(sum(rate ** (at + 1) for at in range(n)) for n in lengths)
        assert kept / times.lookups()[sum(lengths)] >= usual * (1 - 1e-9)
        assert all(match or not length for match, length in zip(matches, lengths, strict=True))


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("context", [32, 672])
def test_rounds_by_lookup_take_what_the_table_says(rows, context):
    costs = with_dear_contexts(even_costs())
    prices = times_of(costs, rows, context).lookups()
    assert len(prices) == 1 + min(rows * MOST_FOUND, MOST_PACKED)
    assert prices[0] == pytest.approx(costs.plain_round(rows, context))
    for drafted in LOOKUP_GRID[1:]:
        expected = costs.round(LOOKUP, [drafted] * rows, context)
        assert prices[rows * drafted : rows * drafted + 1].tolist() in ([], [pytest.approx(expected)])


# ------------------------------------------------------------------------------------------------------------ adaptive


@pytest.mark.parametrize("right", [lambda plan, n: n, lambda plan, n: 0], ids=["layers are right", "layers are wrong"])
def test_a_text_that_repeats_itself_is_drafted_by_lookup(right):
    costs = even_costs()
    by_lookup = lambda plan, n: n if plan.lookups is not None else right(plan, n)  # noqa: E731
    rounds = play(Adaptive(costs), costs, 300, by_lookup, lookup=Repetition(100))
    assert sum(one.exit_layer == LOOKUP and one.num_drafted > 20 for one in rounds[100:]) > 150


class Chance(Match):
    """The lookup of a row whose matches are hardly ever right."""

    def take_tally(self):
        return Tally(30, (10, 10, 5, *(0,) * 7), (1, 0, 0, *(0,) * 7))


@pytest.mark.parametrize("drafters", [("exit",), ()])
def test_matches_that_are_not_right_cost_next_to_nothing(drafters):
    costs = even_costs()
    policy = Adaptive(costs, drafters=(*drafters, "lookup"))
    rounds = play(policy, costs, 600, lambda plan, n: 0, lookup=Chance(2))
    assert sum(one.exit_layer == LOOKUP for one in rounds) < 40


@pytest.mark.parametrize(("matches", "capacities", "drafts"), [((12, 0), (99, 99), 0), ((12, 12), (99, 2), 2)])
def test_of_two_rows_one_without_a_match_or_capacity_drafts_little_and_the_other_does(matches, capacities, drafts):
    policy = Adaptive(even_costs(), drafters=("lookup",))
    rows = [sequence(i, 100, 50, Match(match)) for i, match in enumerate(matches)]
    plan = settled(policy, *rows).plan(rows)
    drafted = table_of(plan).drafted(matches, capacities)
    assert drafted[0] > 5 and drafted[1] == drafts
