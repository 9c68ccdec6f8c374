"""Policies that draft by lookup: what they learn of matches, what they draft, and that it never costs much."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eval.replay import make, replay
from selfspec.control.adaptive import Adaptive
from selfspec.control.laps import Seconds
from selfspec.control.lookup import PromptLookup, SmartSpecLookup
from selfspec.control.matches import MOST_FOUND, Matches, bin_of, choose
from selfspec.control.pieces import LOOKUP_GRID, MOST_PACKED
from selfspec.control.plan import LOOKUP, Plan
from selfspec.control.policies import make_policy
from selfspec.control.rows import Looked, RowOutcome, RowState
from selfspec.control.worth import Worth
from tests.control.rounds import found
from tests.control.test_adaptive import LAYERS, traces
from tests.eval.replays import made_up_costs, trace_of, with_dear_contexts

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


# ------------------------------------------------------------------------------------------------------------- matches


def test_match_lengths_fall_into_eight_bins():
    matches = (1, 2, 3, 4, 5, 6, 8, 9, 15, 16, 31, 32, 200)
    assert [bin_of(match) for match in matches] == [0, 1, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7]


def test_one_wrong_token_does_not_spoil_what_is_thought_of_long_matches():
    matches = Matches()
    before = [matches.survivals(match)[0] for match in (1, 4, 12, 40)]
    matches.add(Looked(40, 1, 0))
    *shorter, longest = [matches.survivals(match)[0] for match in (1, 4, 12, 40)]
    assert shorter == before[:-1] and 0.6 < longest < before[-1] - 0.1


looks = st.builds(
    lambda match, right, wrong: Looked(match, right + wrong, right), *[st.integers(1, 20)] * 2, st.integers(0, 3)
)


@given(st.lists(st.tuples(looks, st.floats(0, 5000)), max_size=20), st.integers(1, 20))
def test_the_chances_along_a_draft_fall_and_are_chances(seen, match):
    matches = Matches()
    for looked, tokens in seen:
        matches.add(looked)
        matches.passed.tokens += tokens
    chances = matches.survivals(match)
    assert all(0 < later <= sooner <= 1 for sooner, later in zip([1.0, *chances], chances, strict=False))


def test_what_was_right_after_such_matches_is_expected_again_and_what_was_not_is_not():
    good, bad = Matches(), Matches()
    for _ in range(50):
        good.add(Looked(3, 9, 9))
        bad.add(Looked(3, 9, 0))
    assert good.survivals(3)[8] > 0.8 and sum(bad.survivals(3)) < 0.1
    assert good.survivals(12)[0] > bad.survivals(12)[0] > 0.7  # longer matches share what later positions came to


def test_a_row_that_only_seems_to_repeat_itself_is_told_from_those_that_do():
    matches = Matches()
    for _ in range(20):
        for row in range(4):
            matches.add(Looked(12, 20, 20), row)
        matches.add(Looked(12, 1, 0), 4)
    assert sum(matches.survivals(12, 0)) > 10 > 1 > sum(matches.survivals(12, 4))
    assert sum(matches.survivals(12, 9)) > 5  # one that nothing is known of
    matches.keep_rows([0, 9])
    assert matches.survivals(12, 4) == matches.survivals(12, 9)


def test_older_observations_fade():
    matches = Matches()
    for _ in range(50):
        matches.add(Looked(3, 9, 9))
    for _ in range(30):
        matches.passed.tokens += 300.0
    for _ in range(3):
        matches.add(Looked(3, 9, 0), 1)
    assert matches.survivals(3)[0] < 0.35


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3)), min_size=1, max_size=3), st.integers(1, 100))
def test_the_lengths_chosen_are_the_best_of_all(rows, step):
    seconds = [1 + 0.01 * step * drafted for drafted in range(20)]
    known = Matches()
    known.add(Looked(3, 4, 0), 1)  # of the second row alone
    offers = [known.survivals(match, i)[:longest] if match else [] for i, (match, longest) in enumerate(rows)]
    lengths, rate = choose(offers, seconds)

    def rate_of(tried):
        kept = sum(sum(chances[:n]) for chances, n in zip(offers, tried, strict=True))
        return (len(rows) + kept) / seconds[sum(tried)]

    allowed = [range(longest + 1 if match else 1) for match, longest in rows]
    assert rate == pytest.approx(rate_of(lengths))
    assert rate == pytest.approx(max(map(rate_of, product(*allowed))))


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("context", [10, 700])
def test_worth_and_costs_agree_on_rounds_by_lookup(rows, context):
    costs = with_dear_contexts(made_up_costs(LAYERS))
    worth = Worth(costs, rows)
    worth.move(context)
    prices = worth.lookups()
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


@pytest.mark.parametrize("vocab", [10, 100, 1000, VOCAB])
@pytest.mark.parametrize(
    ("acceptance", "without", "beside"), [(0.0, *EXIT), (0.7, *EXIT), *[(rate, *TREE) for rate in (0.0, 0.3, 0.7, 0.9)]]
)
def test_where_there_is_nothing_to_look_up_it_is_as_fast_as_without(acceptance, vocab, without, beside):
    texts = [random_words(trace, vocab) for trace in traces(acceptance, tokens=500)]
    alone, both = seconds_of(texts, drafts=without), seconds_of(texts, drafts=(*without, *beside))
    # Plain rounds that nobody is asked about end elsewhere, so that looks at the layers come a few rounds apart.
    # A text of few words matches itself by chance, and what that is worth has to be learned.
    assert alone >= (0.999 if vocab == VOCAB else 0.96) * both


@pytest.mark.parametrize(("drafts", "allowed"), [(("exit",), {*range(1, LAYERS), None}), (("lookup",), {LOOKUP, None})])
def test_drafts_come_from_where_they_may(drafts, allowed):
    costs = made_up_costs(LAYERS)
    rounds = replay([repeats(trace) for trace in traces(0.7)], Adaptive(costs, drafts=drafts), costs).rounds
    assert {round_.plan.exit_layer for round_ in rounds} <= allowed
    assert any(row.num_drafted for round_ in rounds for row in round_.rows)
    assert all(round_.plan.shadow is None for round_ in rounds) or "exit" in drafts


@pytest.mark.parametrize(
    ("second", "drafted"),
    [(RowState(1, 50, 100, found(0)), 0), (RowState(1, 50, 3, found(12)), 2)],
    ids=["no match", "no room"],
)
def test_of_two_rows_one_without_a_match_drafts_nothing_and_the_other_does_where_it_pays(second, drafted):
    policy = Adaptive(made_up_costs(LAYERS), drafts=("lookup",))
    rows = [RowState(0, 50, 100, found(12)), second]
    for _ in range(5):
        plan = policy.plan(rows)
        outcomes = [
            RowOutcome(i, n, n, looked=Looked(12, 9, 9) if n else None) for i, n in enumerate(plan.draft_lengths)
        ]
        policy.observe(plan, outcomes, Seconds())
    assert plan.exit_layer == LOOKUP
    assert plan.draft_lengths[0] > 5 and plan.draft_lengths[1] == drafted


def test_more_rows_draft_by_layers_only_and_nothing_is_looked_up_for_them():
    policy = Adaptive(made_up_costs(LAYERS))
    assert policy.reads_lookup
    for rows, reads in ((3, False), (2, True)):
        for _ in range(5):
            plan = policy.plan([RowState(i, 50, 100, found(12)) for i in range(rows)])
            assert policy.reads_lookup == reads and (plan.exit_layer == LOOKUP) <= reads
            right = [n if plan.exit_layer == LOOKUP else n // 2 for n in plan.draft_lengths]
            each = enumerate(zip(plan.draft_lengths, right, strict=True))
            outcomes = [RowOutcome(i, n, some, (0.9,) * n, looked=Looked(12, 9, 9)) for i, (n, some) in each]
            policy.observe(plan, outcomes, Seconds())


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_plans_are_always_allowed(data):
    rows = data.draw(st.integers(1, 5))
    policy = Adaptive(made_up_costs(LAYERS), most=data.draw(st.sampled_from([None, 1, 5])))
    for _ in range(data.draw(st.integers(1, 30))):
        states = [
            RowState(i, 40, data.draw(st.integers(1, 30)), found(data.draw(st.integers(0, 16)))) for i in range(rows)
        ]
        plan = policy.plan(states)
        assert plan.exit_layer is None or LOOKUP <= plan.exit_layer < LAYERS
        pairs = list(zip(plan.draft_lengths, states, strict=True))
        assert all(0 <= length < state.room for length, state in pairs)
        assert plan.exit_layer != LOOKUP or all(state.match or not length for length, state in pairs)
        outcomes = []
        for i, (length, state) in enumerate(pairs):
            drafted = data.draw(st.integers(0, length))
            accepted = data.draw(st.integers(0, drafted))
            sure = (data.draw(st.floats(0, 1)),) * drafted if plan.reads_confidence else ()
            right = data.draw(st.integers(0, accepted + 1))
            looked = Looked(state.match, accepted + 1, right) if state.match else None
            outcomes.append(RowOutcome(i, drafted, accepted, sure, looked=looked))
        policy.observe(plan, outcomes, Seconds(draft=1e-3, verify=data.draw(st.floats(0, 1)), head=1e-4))


# ----------------------------------------------------------------------------------------------------------- published


def test_prompt_lookup_asks_for_as_many_tokens_every_round():
    assert PromptLookup().plan([RowState(0, 9, 40), RowState(1, 9, 4)]) == Plan(LOOKUP, (10, 3))
    assert PromptLookup(3).plan([RowState(0, 9, 1)]) == Plan(None, (0,))
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
        policy.observe(Plan(LOOKUP, (4,)), [RowOutcome(0, 0, 0)], Seconds())
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
    with pytest.raises(ValueError, match=r"drafts must name a source beside 'copies' and 'tree'"):
        make_policy("adaptive", 4, costs=lambda: made_up_costs(4), drafts=("tree",))


def test_a_trace_of_random_tokens_has_nothing_to_look_up():
    rng = np.random.default_rng(0)
    trace = trace_of(rng.random((3, 50)) < 0.5, rng.random((3, 50), np.float32), rng)
    assert len({*trace.prompt, *trace.tokens}) == 55
