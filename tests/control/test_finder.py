"""What is free to guess is drafted where it promises more than any other round, and nowhere else."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from selfspec.control.finder import Finder
from selfspec.control.plan import DRAFTS, LOOKUP, Plan
from selfspec.control.rows import Looked, RowOutcome, RowState
from selfspec.control.table import Table
from selfspec.control.worth import Worth
from selfspec.decoding.checks import check_trees
from tests.control.rounds import Free, found
from tests.control.test_adaptive import LAYERS
from tests.eval.replays import made_up_costs

PLAIN = "what a plain round promises"


@cache
def worth_of(num_rows):
    return Worth(made_up_costs(LAYERS), num_rows)


def plan_of(finder, *rows, usual=PLAIN):
    """For rows of (guesses, room)."""
    worth = worth_of(len(rows))
    states = [RowState(i, 50, room, guesses) for i, (guesses, room) in enumerate(rows)]
    return finder.plan(states, worth, len(rows) / worth.plain_seconds if usual == PLAIN else usual)


def tell(finder, *looks, plan=None, times=30):
    for _ in range(times):
        finder.observe(plan or Plan(None, (0,)), [RowOutcome(0, 0, 0, looked=looked) for looked in looks])


def taught(**options):
    """One that has seen chains be right, and where they were not, the first of the others."""
    finder = Finder(**options)
    tell(finder, Looked(12, 9, 9, rank=0), Looked(2, 9, 9), Looked(12, 9, 9, is_stored=True))
    return finder


# --------------------------------------------------------------------------------------------------------------- plans


@pytest.mark.parametrize("drafts", [("lookup",), ("lookup", "tree"), DRAFTS])
def test_where_nothing_is_free_nothing_is_planned(drafts):
    for finder in (Finder(drafts=drafts), taught(drafts=drafts)):
        for guesses in (None, Free()):
            assert plan_of(finder, (guesses, 100), usual=0.0) is None
            assert plan_of(finder, (guesses, 100), (guesses, 100), usual=0.0) is None


@pytest.mark.parametrize("drafts", [("lookup",), ("lookup", "tree"), DRAFTS])
def test_what_is_found_is_drafted_where_it_pays(drafts):
    plan = plan_of(taught(drafts=drafts), (found(12), 100))
    [tree] = plan.trees
    assert plan.exit_layer == LOOKUP and plan.draft_lengths == (len(tree.tokens),) and plan.speedup > 2
    assert tree.tokens[:20] == tuple(range(5, 25)) and tree.parents == tuple(range(len(tree.tokens)))


def test_what_is_usual_must_be_beaten():
    finder, worth = taught(), worth_of(1)
    plan = plan_of(finder, (found(12), 100), usual=1 / worth.plain_seconds)
    promised = plan.speedup / worth.plain_seconds
    assert plan_of(finder, (found(12), 100), usual=0.999 * promised) == plan
    assert plan_of(finder, (found(12), 100), usual=1.001 * promised) is None


def test_branches_grow_only_where_they_may():
    for drafts, has_branches in ((("lookup", "tree"), True), (("lookup",), False)):
        finder = Finder(drafts=drafts)
        tell(finder, *[Looked(2, 2, right, rank=None if right else 0) for right in (0, 2)])
        [tree] = plan_of(finder, (found(2, first=[40, 41]), 100), usual=1.0).trees
        assert (40 in tree.tokens) == has_branches
        assert (tree.parents != tuple(range(len(tree.parents)))) == has_branches


def test_beside_a_chain_that_is_often_wrong_what_else_may_come_is_drafted():
    finder = Finder()
    tell(finder, *[Looked(2, 2, right, rank=None if right else 0) for right in (0, 2)])
    plan = plan_of(finder, (found(2, first=[3, 4]), 100))
    [tree] = plan.trees
    assert 3 in tree.tokens and tree.parents[tree.tokens.index(3)] == 0 and tree.tokens[0] == 5


class AsksAlways(Finder):
    def _grow(self, row, chances, least):
        return super()._grow(row, chances, 0.0)


def test_branches_that_are_not_looked_for_would_not_have_been_drafted():
    have_branches, costs = set(), made_up_costs(LAYERS)
    each = 0.05 * costs.plain_round(1)  # a token's picks: not every likely branch is worth it
    worth = Worth(replace(costs, pick=Table.of({n: n * each for n in (1, 256)})), 1)
    for right, rank, usual in product(range(9), range(3), (0.5, 1.0, 1.5, 2.0, 3.0)):
        plans = []
        for finder in (Finder(), AsksAlways()):
            tell(finder, *[Looked(2, 9, 9 * (n < right)) for n in range(8)], Looked(2, 9, 0, rank=rank))
            row = RowState(0, 50, 100, found(2, first=[3, 4]))
            plans.append(finder.plan([row], worth, usual / worth.plain_seconds))
        plan, always = plans
        assert plan == always
        if plan is not None:
            have_branches.add(plan.trees[0].parents != tuple(range(plan.draft_lengths[0])))
    assert have_branches == {True, False}


@pytest.mark.parametrize("own_is_right", [True, False])
def test_what_a_corpus_finds_is_trusted_apart_from_what_the_text_finds(own_is_right):
    finder = Finder(drafts=("lookup",))
    tell(finder, Looked(6, 9, 9 * own_is_right), Looked(6, 9, 9 * (not own_is_right), is_stored=True))
    assert (plan_of(finder, (found(6), 100)) is not None) == own_is_right
    assert (plan_of(finder, (found(6, is_stored=True), 100)) is None) == own_is_right


def test_promises_that_are_not_kept_are_believed_less():
    finder = taught(drafts=("lookup",))
    before = plan_of(finder, (found(12), 100)).speedup
    for _ in range(40):
        plan = plan_of(finder, (found(12), 100), usual=0.0)
        finder.observe(plan, [RowOutcome(0, plan.draft_lengths[0], 0)])  # nothing is said of what was looked up
    assert plan_of(finder, (found(12), 100), usual=0.0).speedup < 0.6 * before


@cache
def known(is_taught, drafts):
    return taught(drafts=drafts) if is_taught else Finder(drafts=drafts)


some = st.lists(st.integers(0, 30), max_size=8, unique=True)
long = st.lists(st.integers(0, 30), min_size=63, max_size=63)
soon = st.lists(st.integers(0, 30), min_size=1, max_size=20)  # of a corpus: its document ends
lengths = st.integers(1, 16)
of_texts = st.one_of(st.none(), st.builds(Free, long, some, match=lengths), st.builds(Free, st.just([])))
of_corpora = st.builds(Free, soon, some, match=lengths, is_stored=st.just(True))
rooms, usuals = st.integers(1, 40), st.sampled_from([0.0, PLAIN])
sources = st.sampled_from([("lookup",), ("lookup", "tree"), DRAFTS])


def check_plan(rows, drafts, is_taught, usual):
    plan = plan_of(known(is_taught, drafts), *rows, usual=usual)
    if plan is None:
        return
    check_trees(plan)
    assert any(plan.draft_lengths) and plan.exit_layer == LOOKUP
    for (guesses, room), tree, length in zip(rows, plan.trees, plan.draft_lengths, strict=True):
        assert length < room
        if tree is not None and len(tree.tokens):
            paths = [()]
            for token, parent in zip(tree.tokens, tree.parents, strict=True):
                paths.append((*paths[parent], token))
            assert guesses is not None and len(set(paths)) == len(paths)
            assert "tree" in drafts or tree.parents == tuple(range(length))


@settings(max_examples=100)
@given(st.lists(st.tuples(of_texts, rooms), min_size=1, max_size=3), sources, st.booleans(), usuals)
def test_plans_are_trees_of_the_lengths_they_tell_and_stay_below_each_rows_room(rows, drafts, is_taught, usual):
    check_plan(rows, drafts, is_taught, usual)


@settings(max_examples=100)
@example([(Free([5, 6], match=9, is_stored=True), 40)], ("lookup",), True, PLAIN)
@given(st.lists(st.tuples(of_texts | of_corpora, rooms), min_size=1, max_size=3), sources, st.booleans(), usuals)
def test_a_document_of_a_corpus_that_ends_soon_ends_the_draft(rows, drafts, is_taught, usual):
    check_plan(rows, drafts, is_taught, usual)


def test_no_more_is_drafted_than_a_caller_allows():
    assert plan_of(taught(most=2), (found(12, first=[3]), 100)).draft_lengths == (2,)
