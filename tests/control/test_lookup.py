"""Policies that draft by lookup: what they learn of matches, what they draft, and that it never costs much."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eval.replay import make, replay
from selfspec.control.adaptive import Adaptive
from selfspec.control.decay import TokenClock
from selfspec.control.fixed import PromptLookup
from selfspec.control.goodput import SmartSpecLookup
from selfspec.control.ngrams import LEAST_CHANCE, SHORTEST, NgramStats, table
from selfspec.control.plan import (
    CORPUS,
    LOOKUP,
    NUM_LOOKUP_BINS,
    NUM_MATCH_BINS,
    OWN_TEXT,
    RESPONSES,
    SOURCES,
    Plan,
    lookup_bin,
    match_bin,
)
from selfspec.control.registry import make_policy
from selfspec.control.round_costs import LOOKUP_GRID, MOST_FOUND, MOST_PACKED, RoundCosts
from selfspec.control.rows import RowOutcome, RowState, Tally
from tests.control.rounds import Found, tell
from tests.control.test_adaptive import LAYERS, traces
from tests.eval.replays import made_up_costs, trace_of, with_dear_contexts
from tests.slow import slow

VOCAB = 1 << 20  # of the traces; a text of tokens as random as that says nothing twice


def says(trace, tokens):
    """The same outcome of all layers, in another text."""
    return replace(trace, prompt=tuple(tokens[: trace.prompt_length]), tokens=tuple(tokens[trace.prompt_length :]))


def repeats(trace, period=40, vocab=10_000, seed=0):
    count = trace.prompt_length + len(trace.tokens)
    phrase = np.random.default_rng(seed).integers(vocab, size=period).tolist()
    return says(trace, (phrase * (count // period + 1))[:count])


def random_words(trace, vocab, seed=0):
    count = trace.prompt_length + len(trace.tokens)
    rng = np.random.default_rng(seed)
    return says(trace, (rng.permutation(VOCAB)[:count] if vocab == VOCAB else rng.integers(vocab, size=count)).tolist())


def seconds_of(texts, **options):
    costs = made_up_costs(LAYERS)
    return sum(replay([trace], Adaptive(costs, **options), costs).seconds for trace in texts)


# ---------------------------------------------------------------------------------------------------------- statistics


def tally(match, right, seen):
    """So many tokens of a row came after matches of this length, and so many of them as what followed it last."""
    place = match_bin(match)
    line = [[n if at == place else 0 for at in range(NUM_MATCH_BINS)] for n in (seen, right)]
    return Tally(seen, *line)


def test_match_lengths_fall_into_bins():
    matches = (1, 2, 3, 4, 5, 6, 8, 9, 15, 16, 31, 32, 63, 64, 127, 128, 200)
    assert [match_bin(match) for match in matches] == [0, 1, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7, 8, 8, 9, 9]


def test_what_was_right_after_such_matches_is_expected_again_and_what_was_not_is_not():
    for right in (0, 40):
        stats = NgramStats(TokenClock())
        before = stats.rates(0)
        stats.take(tally(5, 0, 0), 0)  # its prompt
        stats.take(tally(5, right, 40), 0)
        after = stats.rates(0)
        assert (after[match_bin(5)] > before[match_bin(5)]) == (right > 0)
        assert after[match_bin(20)] == pytest.approx(before[match_bin(20)])


def test_a_row_that_only_seems_to_repeat_itself_is_told_from_those_that_do():
    stats = NgramStats(TokenClock())
    for request_id, right in ((0, 50), (1, 0)):
        stats.take(tally(9, 0, 0), request_id)
        stats.take(tally(9, right, 50), request_id)
    good, bad, other = (stats.rates(i)[match_bin(9)] for i in (0, 1, 2))
    assert bad < 0.2 < other < 0.8 < good
    stats.keep_rows([])
    assert stats.rates(0)[match_bin(9)] == pytest.approx(stats.rates(1)[match_bin(9)])


def test_a_prompt_counts_for_few_tokens_and_older_ones_fade():
    passed = TokenClock()
    stats = NgramStats(passed)
    stats.take(tally(9, 4000, 4000), 0)  # of a prompt
    for _ in range(3):
        passed.tokens += 300
        stats.take(tally(9, 0, 12), 0)
    assert stats.rates(0)[match_bin(9)] < 0.35


def test_what_came_of_a_draft_counts_by_the_match_before_each_token():
    stats = NgramStats(TokenClock())
    for _ in range(10):
        stats.add(4, 6, 3, 0, RESPONSES)  # tokens after matches of 4, 5, 6 were right, and that after 7 was not
    rates, prior = stats.rates(0), NgramStats(TokenClock()).rates(0)
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
    round_costs = RoundCosts(made_up_costs(LAYERS), 1)
    usual, seconds = speedup / round_costs.plain_seconds, round_costs.lookups()
    found = table([rates], round_costs, usual, 1.0, most)
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
    round_costs = RoundCosts(made_up_costs(LAYERS, rows=(1, 4, 8)), count)
    usual = count / round_costs.plain_seconds
    found = table([[rate] * NUM_LOOKUP_BINS] * count, round_costs, usual, 1.0)
    matches = np.random.default_rng(seed).integers(0, 40, count).tolist()
    lengths = None if found is None else found.drafted(matches, [100] * count)
    if lengths is not None:
        kept = count + sum(sum(rate ** (at + 1) for at in range(n)) for n in lengths)
        assert kept / round_costs.lookups()[sum(lengths)] >= usual * (1 - 1e-9)
        assert all(match or not length for match, length in zip(matches, lengths, strict=True))


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("context", [10, 700])
def test_rounds_by_lookup_take_what_the_table_says(rows, context):
    costs = with_dear_contexts(made_up_costs(LAYERS))
    round_costs = RoundCosts(costs, rows)
    round_costs.move(context)
    prices = round_costs.lookups()
    assert len(prices) == 1 + min(rows * MOST_FOUND, MOST_PACKED)
    assert prices[0] == pytest.approx(costs.plain_round(rows, context))
    for drafted in LOOKUP_GRID[1:]:
        expected = costs.round(LOOKUP, [drafted] * rows, context)
        assert prices[rows * drafted : rows * drafted + 1] in ([], [pytest.approx(expected)])


# ------------------------------------------------------------------------------------------------------------ adaptive


def test_a_text_that_repeats_itself_is_drafted_by_lookup():
    costs = made_up_costs(LAYERS)
    for acceptance in (0.0, 0.7):
        texts = [repeats(trace) for trace in traces(acceptance)]
        assert seconds_of(texts) < 0.45 * seconds_of(texts, drafts=("exit",))
        rounds = replay(texts[:1], Adaptive(costs), costs).rounds
        assert {round_.plan.exit_layer for round_ in rounds[-5:]} == {LOOKUP}


EXIT, TREE = (("exit",), ("lookup",)), (("exit", "tree"), ("lookup",))


@pytest.mark.parametrize("vocab", [slow(10), 100, slow(1000), VOCAB])
@pytest.mark.parametrize(
    ("acceptance", "without", "beside"), [(0.0, *EXIT), (0.7, *EXIT), *[(rate, *TREE) for rate in (0.0, 0.3, 0.7, 0.9)]]
)
def test_where_there_is_nothing_to_look_up_it_is_as_fast_as_without(acceptance, vocab, without, beside):
    texts = [random_words(trace, vocab) for trace in traces(acceptance, tokens=500)]
    alone, both = seconds_of(texts, drafts=without), seconds_of(texts, drafts=(*without, *beside))
    # A text of few words matches itself by chance, and a draft that is right by chance may be worth its token.
    assert alone >= (0.995 if vocab == VOCAB else 0.93 if vocab == 10 else 0.96) * both


@pytest.mark.parametrize(("drafts", "allowed"), [(("exit",), {*range(1, LAYERS), None}), (("lookup",), {LOOKUP, None})])
def test_drafts_come_from_where_they_may(drafts, allowed):
    costs = made_up_costs(LAYERS)
    rounds = replay([repeats(trace) for trace in traces(0.7)], Adaptive(costs, drafts=drafts), costs).rounds
    assert {round_.plan.exit_layer for round_ in rounds} <= allowed
    assert any(row.num_drafted for round_ in rounds for row in round_.rows)
    assert all(round_.plan.shadow is None for round_ in rounds) or "exit" in drafts


@pytest.mark.parametrize(("matches", "rooms", "drafts"), [((12, 0), (99, 99), 0), ((12, 12), (99, 2), 2)])
def test_of_two_rows_one_without_a_match_or_room_drafts_little_and_the_other_does(matches, rooms, drafts):
    policy = Adaptive(made_up_costs(LAYERS), drafts=("lookup",))
    plan = policy.plan([RowState(i, 50, 100, Found(match)) for i, match in enumerate(matches)])
    drafted = plan.table.drafted(matches, rooms)
    assert drafted[0] > 5 and drafted[1] == drafts


# ----------------------------------------------------------------------------------------------------------- published


def test_prompt_lookup_asks_for_as_many_tokens_every_round():
    plan = PromptLookup().plan([RowState(0, 9, 40), RowState(1, 9, 4)])
    assert (plan.exit_layer, plan.draft_lengths, plan.lookups) == (LOOKUP, (10, 10), None)
    assert plan.table.drafted([1, 50], [39, 3]) == (10, 3) and plan.table.drafted([0, 0], [39, 3]) is None
    assert make_policy("pld", 4) == PromptLookup(10) and make_policy("pld", 4, num_draft_tokens=2) == PromptLookup(2)


@pytest.mark.parametrize("name", ["pld", "smartspec-lookup"])
@pytest.mark.parametrize("batch_size", [1, 4])
def test_published_lookups_gain_where_a_text_repeats_itself(name, batch_size):
    costs = made_up_costs(LAYERS)
    done = replay([repeats(trace, seed=i) for i, trace in enumerate(traces(0.0))], make(name, costs), costs, batch_size)
    assert {round_.plan.exit_layer for round_ in done.rounds} <= {LOOKUP, None}
    assert done.plain_seconds > 1.8 * done.seconds


def test_smartspec_with_lookup_counts_how_often_there_is_a_match():
    policy = SmartSpecLookup(made_up_costs(LAYERS))
    often = policy.goodput(4, 1, 50)
    for _ in range(40):
        policy.plan([RowState(0, 50, 100)])
        tell(policy, RowOutcome(0, 0, 0), plan=Plan(LOOKUP, (4,)))
    plain = policy.goodput(0, 1, 50)
    assert plain < policy.goodput(4, 1, 50) < 0.6 * often
    assert policy.goodput(0, 1, 50) == plain


@pytest.mark.parametrize("drafts", [(), ("trees",), "lookup", ("exit", "trees")])
def test_drafts_from_nowhere_are_refused(drafts):
    with pytest.raises(ValueError, match=r"drafts must hold some of exit, copies, lookup, tree, got"):
        make_policy("adaptive", 4, costs=lambda: made_up_costs(4), drafts=drafts)


@pytest.mark.parametrize("name", ["recycle", "cascade"])
def test_sources_that_were_removed_are_refused_as_such(name):
    with pytest.raises(
        ValueError, match=rf"drafts must hold some of .*, got \['exit', '{name}'\] \(removed: {name}\)$"
    ):
        make_policy("adaptive", 4, costs=lambda: made_up_costs(4), drafts=["exit", name])


def test_branches_of_nothing_are_refused():
    with pytest.raises(ValueError, match=r"drafts must hold exit or lookup, which copies and tree only modify"):
        make_policy("adaptive", 4, costs=lambda: made_up_costs(4), drafts=("tree",))


def test_a_trace_of_random_tokens_has_nothing_to_look_up():
    rng = np.random.default_rng(0)
    trace = trace_of(rng.random((3, 50)) < 0.5, rng.random((3, 50), np.float32), rng)
    assert len({*trace.prompt, *trace.tokens}) == 55
