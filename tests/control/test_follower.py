"""A single row is followed by what its index tells of matches, and nobody asks in between."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from selfspec.control.finder import Finder
from selfspec.control.follower import Follower
from selfspec.control.lengths import LEAST_SURPRISES, MOST_KEPT, SHORTEST, Lengths, Weighed, growing
from selfspec.control.matches import LONG, Matches
from selfspec.control.plan import NUM_MATCH_BINS, Plan, Steady
from selfspec.control.reading import may_interrupt
from selfspec.control.rows import Looked, RowOutcome, RowState, Tally
from selfspec.control.worth import Worth
from tests.control.rounds import NOTHING, found
from tests.control.test_adaptive import LAYERS
from tests.control.test_finder import PLAIN, worth_of
from tests.eval.replays import made_up_costs

LONG_MATCH, EVERY_MATCH = (0, 0, 0, 0, 0, 40, 40, 40), (40,) * NUM_MATCH_BINS


def follower(**options):
    return Follower(Finder(**options))


def plan_of(follower, match=14, room=1000, request_id=0, usual=PLAIN, beside=False, worth=None, **kinds):
    """Plan a round of a row of which so many tokens are found."""
    worth = worth or worth_of(1)
    usual = 1 / worth.plain_seconds if usual == PLAIN else usual
    return follower.plan(RowState(request_id, 1050 - room, room, found(match, **kinds)), worth, usual, beside)


def lengths_of(follower):
    return follower.steady(Steady(1000))


def told(tally, **kinds):
    """A follower that was told this of what came in a row, after its prompt."""
    one = follower(**kinds)
    for usual, tallies in ((50.0, []), (60.0, [tally])):
        plan_of(one, usual=usual, tallies=tallies)
    return one


class Weighing:
    """When a follower weighs what it drafts, round by round."""

    def __init__(self, monkeypatch, **options):
        self.followed, self.at, self.asked = follower(**options), -1, []
        weigh_all = Follower._weigh_all
        monkeypatch.setattr(Follower, "_weigh_all", lambda *given: self.asked.append(self.at) or weigh_all(*given))

    def round(self, match, **kinds):
        self.at += 1
        return plan_of(self.followed, match, **kinds)


def learn(follower, plan, right):
    """So many tokens of a draft were right."""
    follower.learn(plan, RowOutcome(0, plan.draft_lengths[0], right))


@pytest.mark.parametrize(("right", "drafts"), [(EVERY_MATCH, True), ((0,) * NUM_MATCH_BINS, False)])
def test_what_the_index_tells_of_a_text_decides_what_is_drafted_after_which_match(right, drafts):
    followed = told(Tally(300, EVERY_MATCH, right), drafts=("lookup",))
    plan_of(followed)
    lengths = lengths_of(followed).lengths
    assert lengths[0] == 0 and len(lengths) == SHORTEST[-1] + 1
    assert all((length > 0) == drafts for length in lengths[1:])
    assert all((plan_of(followed, match) is not None) == (drafts and match > 0) for match in (0, 1, 3, 7, 40))


def test_long_prompts_count_for_little_beside_what_is_written():
    """In the prompt nothing was right; in what came after, all was."""
    prompt = Tally(4000, (600,) * NUM_MATCH_BINS, NOTHING)
    came = Tally(9, (9,) * NUM_MATCH_BINS, (9,) * NUM_MATCH_BINS)
    chances = []
    for tallies in ([prompt, came], [Tally(0, NOTHING, NOTHING), prompt, came]):
        matches = Matches()
        for tally in tallies:
            matches.take(tally, 0)
        chances.append([*matches.survivals(14), 0.0][0])
    assert chances[0] > 0.35 > 0.1 > chances[1]


@pytest.mark.parametrize(("match", "expected"), [(0, [0, 32, 96, 224, 352]), (14, [0, 32, 96, 160, 224])])
def test_what_was_weighed_is_kept_for_ever_longer_where_nothing_is_drafted(match, expected, monkeypatch):
    """Where there is always something to learn."""
    weighing, left = Weighing(monkeypatch, drafts=("lookup",)), 1
    monkeypatch.setattr(Lengths, "surprises", lambda *given: 99)
    for _ in range(expected[-1] + 1):
        before = left
        weighing.round(match)
        steady = lengths_of(weighing.followed)
        left = steady.kept
        assert steady.num_rounds == 1000 and left < MOST_KEPT
        assert weighing.asked[-1] == weighing.at or before == left + 1
    assert weighing.asked == expected


def test_nothing_is_weighed_before_there_is_something_to_learn(monkeypatch):
    weighing = Weighing(monkeypatch, drafts=("lookup",))
    for _ in range(500):
        weighing.round(0)
    plan = weighing.round(14)
    assert plan is not None and weighing.asked == [0]
    most = lengths_of(weighing.followed).most_surprises
    assert most == LEAST_SURPRISES, "beside long forwards"
    for n in range(1, most + 2):
        learn(weighing.followed, plan, 0)
        assert lengths_of(weighing.followed).most_surprises == max(0, most - n)
    weighing.round(0)
    assert weighing.asked == [0, 501], "drafts were made, and refused"


@pytest.mark.parametrize("usual", [PLAIN, 1e9])
def test_tokens_that_lookup_would_have_guessed_are_something_to_learn_where_it_drafts_nothing(usual, monkeypatch):
    weighing = Weighing(monkeypatch, drafts=("lookup",))
    few = LEAST_SURPRISES - 1
    for guessed in (NOTHING, (0, 0, 0, 0, few, 0, 0, 0), (0, 0, 0, 0, few, 1, 0, 0)):
        for _ in range(40 - 10 * (sum(guessed) > few)):
            state = RowState(0, 50, 1000, found(0, guessed=guessed))
            weighing.round(0, usual=usual, guessed=guessed)
            assert weighing.followed.is_quiet(state, 0) or weighing.at == 80
    drafts = any(lengths_of(weighing.followed).lengths)
    assert drafts == (usual == PLAIN) and weighing.asked == ([0] if drafts else [0, 80])


@given(
    st.lists(st.tuples(st.sampled_from([0, 1, 2, 3, 5, 7, 14]), st.integers(0, 9)), min_size=1, max_size=60),
    st.booleans(),
    st.floats(0.3, 1.5),
)
def test_calls_and_the_policy_agree_on_what_is_a_surprise_and_when_it_is_weighed(rounds, beside, share):
    """Also in the last round that was kept."""
    followed, guessed = follower(drafts=("lookup",)), (3, 0, 1, 0, 0, 40, 0, 20)
    usual = share * plan_of(follower(drafts=("lookup",)), usual=0.0).speedup / worth_of(1).plain_seconds
    for match, right in rounds:
        plan = plan_of(followed, match, usual=usual, beside=beside, guessed=guessed)
        if plan is not None:
            learn(followed, plan, min(right, plan.draft_lengths[0]))
        steady = lengths_of(followed)
        is_woken = steady.kept == 0 and steady.surprises(guessed) >= steady.most_surprises
        row = RowState(0, 50, 1000, found(0, guessed=guessed))
        assert followed._lengths.is_surprised(row) == is_woken
        assert followed.is_quiet(row, 0) != is_woken


@pytest.mark.parametrize("has_drafted", [False, True])
def test_what_is_known_holds_for_another_row_unless_lookup_drafted_in_the_last_one(has_drafted, monkeypatch):
    weighing = Weighing(monkeypatch, drafts=("lookup",))
    for round_ in range(40):
        weighing.round(14 if has_drafted and round_ == 20 else 0)
    weighing.round(0, request_id=1, tallies=[Tally(9, (9,) * NUM_MATCH_BINS, (9,) * NUM_MATCH_BINS)])
    assert weighing.asked == ([0, 40] if has_drafted else [0])
    assert weighing.followed._finder.matches.knows(1), "its prompt counts, weighed or not"


@given(st.integers(1, 63), st.integers(1, 63))
def test_drafts_that_are_right_grow_up_to_the_longest_that_could_pay(length, most):
    grown = growing(length, most)
    assert [*grown] == sorted({*grown}) and (grown[-1] == most if length < most else not grown)
    assert all(b <= 2 * a for a, b in pairwise((length, *grown)))
    one = Weighed(length, grown=grown)
    assert [one.after(n) for n in range(len(grown) + 3)] == [length, *grown, *[grown[-1] if grown else length] * 2]


def test_after_long_matches_a_right_draft_is_followed_by_one_twice_as_long_in_the_same_row_alone():
    followed, drafted = told(Tally(300, EVERY_MATCH, (25,) * NUM_MATCH_BINS), drafts=("lookup",)), []
    for match in (LONG, 50, LONG, LONG - 1, LONG):
        plan = plan_of(followed, match)
        steady = lengths_of(followed)
        assert steady.streak == len(drafted) % 4 and steady.grown[0] == 2 * steady.lengths[-1]
        drafted.append(plan.draft_lengths[0])
        learn(followed, plan, drafted[-1])
    first = steady.lengths[-1]
    assert drafted[:3] == [first, *steady.grown[:2]] and drafted[4] == first
    assert plan_of(followed, LONG, room=first).draft_lengths == (first - 1,), "as far as there is room"
    for ended in (
        lambda: learn(followed, plan, first - 1),
        lambda: followed.pass_others(False),
        lambda: followed.pass_plain(1),
    ):
        learn(followed, plan, first)
        assert followed._streak > 0
        ended()
        assert followed._streak == 0
    learn(followed, plan, first)
    plan_of(followed, request_id=7)
    assert followed._streak == 0, "another row's drafts say nothing of this one's"


@pytest.mark.parametrize(("slower", "branches"), [(100.0, True), (1.0, False)])
def test_drafts_may_branch_in_the_middle_of_a_call_only_beside_long_forwards(slower, branches):
    costs = made_up_costs(LAYERS)
    for name in ("early", "late"):
        costs = replace(costs, **{name: {r: t.scaled(slower) for r, t in getattr(costs, name).items()}})
    ones = {name: getattr(costs, name).scaled(slower) for name in ("plain", "head", "pick", "rest")}
    followed, worth = follower(), Worth(replace(costs, **ones), 1)
    assert may_interrupt(worth) == branches
    half = Tally(99, (30,) * NUM_MATCH_BINS, (15,) * NUM_MATCH_BINS)
    plan = plan_of(followed, 2, worth=worth, first=[3, 4], tallies=[half])
    assert any(lengths_of(followed).branches) == followed.wants_looks == branches
    assert plan is None or (3 in plan.trees[0].tokens) == branches
    seen = Looked(2, 1, 0, rank=0)
    before = followed._finder.ranks.rates
    followed.learn(Plan(None, (0,)), RowOutcome(0, 0, 0, looked=seen))
    assert followed._finder.ranks.rates != before, "it hears how often others came"


@pytest.mark.parametrize("match", [2, 4, 7])
def test_drafts_that_are_always_right_become_longer(match):
    """Nothing is said of the place after a draft that was right as a whole: nothing was drafted there."""
    followed, drafted = follower(drafts=("lookup",)), []
    for round_ in range(120):
        plan = plan_of(followed, match, usual=50.0 + 10 * (round_ % 2))  # which is weighed anew each time
        drafted.append(plan.draft_lengths[0])
        learn(followed, plan, drafted[-1])
    assert drafted[-1] > 1.5 * drafted[0] and drafted[-1] == max(drafted)


def test_what_was_counted_while_rows_were_a_batch_counts_once():
    seen = []
    for are_told in (False, True):
        followed = follower(drafts=("lookup",))
        matches = followed._finder.matches
        matches.add(Looked(14, 9, 9), 0)
        followed.pass_others(are_told)
        before = sum(matches._pooled_seen)
        plan_of(followed, tallies=[Tally(300, EVERY_MATCH, EVERY_MATCH)])
        seen.append(sum(matches._pooled_seen) - before)
    assert seen[0] > 0 == seen[1]


def test_another_text_of_the_same_number_is_another_row():
    followed = follower(drafts=("lookup",))
    plan = plan_of(followed)
    learn(followed, plan, plan.draft_lengths[0])
    worth = worth_of(1)
    followed.plan(RowState(0, 20, 80, found(14)), worth, 1 / worth.plain_seconds, False)
    assert followed._streak == 0 and followed._row == (0, 100)


def test_a_match_is_quiet_where_nothing_comes_of_it():
    followed = told(Tally(300, EVERY_MATCH, LONG_MATCH), drafts=("lookup",))
    plan_of(followed, 0, usual=60.0, beside=True)
    row = RowState(0, 50, 1000, found(0))
    assert [followed.is_quiet(row, match) for match in (0, 1, 2, 14)] == [True, True, True, False]
    for match, length in enumerate(lengths_of(followed).lengths):
        assert (length == 0) == followed.is_quiet(row, match)


def test_what_calls_are_told_of_matches_is_new_once_something_was_weighed():
    followed = told(Tally(300, EVERY_MATCH, LONG_MATCH), drafts=("lookup",))
    plan_of(followed, 0, usual=60.0, beside=True)
    assert any(lengths_of(followed).lengths)
    plan_of(followed, 0, usual=1e9, beside=True)
    assert {*lengths_of(followed).lengths} == {0}
