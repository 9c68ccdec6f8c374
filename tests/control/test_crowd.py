"""Rows of a batch draft by tables of their matches, all in one round or none, as far as that promises more."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from selfspec.control import crowd
from selfspec.control.crowd import Crowd
from selfspec.control.finder import Finder
from selfspec.control.lengths import FIRST_KEPT, KEPT, MOST_KEPT, WEIGHING
from selfspec.control.matches import LONG, Matches
from selfspec.control.pieces import MOST_PACKED
from selfspec.control.plan import LOOKUP, MATCH_EDGES, NUM_MATCH_BINS, Lookups, Plan, Steady
from selfspec.control.reading import FOLLOW_SHARE, READ_SECONDS
from selfspec.control.rows import RowOutcome, RowState, Tally
from selfspec.control.worth import Worth
from tests.control.rounds import NOTHING, found
from tests.control.test_reading import costs_of

ALWAYS, NEVER = ((80,) * NUM_MATCH_BINS,) * 2, ((80,) * NUM_MATCH_BINS, NOTHING)


def row(i=0, match=12, room=400, tally=None, length=50, **kinds):
    tallies = None if tally is None else [Tally(80, *tally)]
    return RowState(i, length, room, found(match, tallies=tallies, **kinds))


def usual_of(worth, rows):
    return len(rows) / worth.plain_seconds


class Batch:
    """A crowd, its machine, and rounds of it."""

    def __init__(self, num_rows=4, **kinds):
        self.worth, self.crowd = Worth(costs_of(num_rows, **kinds), num_rows), Crowd(Finder())

    def plan(self, *rows, faster=1.0):
        """Args: faster: times as many tokens per second are usual as plain rounds have."""
        return self.crowd.plan(rows, self.worth, faster * usual_of(self.worth, rows))

    def lengths(self):
        lookups = self.crowd.steady(Steady(1000)).lookups
        return None if lookups is None else [lengths[-1] for lengths in lookups.lengths]


# --------------------------------------------------------------------------------------------------------- what is told


@given(
    rows=st.lists(
        st.tuples(st.lists(st.integers(-1, 9), min_size=3, max_size=3), st.integers(0, 5), st.integers(-1, 7)),
        min_size=1,
        max_size=5,
    ),
    gains=st.lists(st.sampled_from([0.0, 0.5, 1.5]), min_size=3, max_size=3),
    needs=st.lists(st.sampled_from([-1.0, 0.0, 1.0, 2.5]), min_size=1, max_size=12),
)
@example(rows=[([0, 3, 3], 2, 7), ([0, 3, 3], 0, 7)], gains=[0.0, 1.5, 1.5], needs=[0.0] * 4)
def test_rows_draft_what_their_matches_say_if_all_of_it_promises_enough(rows, gains, needs):
    lookups = Lookups(tuple([tuple(own) for own, _, _ in rows]), (tuple(gains),) * len(rows), tuple(needs))
    each = [min(own[min(match, 2)], room) if match else 0 for own, match, room in rows]
    each = tuple([max(0, n) for n in each])
    right = sum(gains[min(match, 2)] for (_, match, _), n in zip(rows, each, strict=True) if n)
    is_enough = sum(each) and right >= needs[min(sum(each), len(needs) - 1)]
    assert lookups.drafted([match for _, match, _ in rows], [room for _, _, room in rows]) == (
        each if is_enough else None
    )


# ------------------------------------------------------------------------------------------------------------- drafting


def test_rows_with_a_match_draft_and_others_wait():
    plan = Batch().plan(row(0), row(1, match=0), row(2, room=4), row(3, room=1))
    assert plan.exit_layer == LOOKUP and plan.trees is None
    assert plan.draft_lengths[0] > 3 and plan.draft_lengths[1:] == (0, 3, 0)


def test_what_is_usual_must_be_beaten():
    assert Batch().plan(*map(row, range(4)), faster=1.0) is not None
    assert Batch().plan(*map(row, range(4)), faster=50.0) is None
    batch = Batch()
    assert batch.plan(*[row(i, match=3 if i == 0 else 0) for i in range(4)], faster=1.8) is None
    assert batch.plan(*[row(i, match=3) for i in range(4)], faster=1.8) is not None, "they share what a round takes"


@pytest.mark.parametrize("match", [1, 3, 12])
def test_what_a_rows_text_came_to_decides_how_much_it_drafts(match):
    rows = [row(i, match, tally=tally) for i, tally in enumerate((ALWAYS, None, NEVER))]
    lengths = Batch(3).plan(*rows, faster=1.5).draft_lengths
    assert lengths[0] > lengths[1] > lengths[2]


def test_rows_with_the_numbers_of_earlier_ones_are_others_once_those_are_forgotten():
    batch = Batch()
    assert not any(batch.plan(*[row(i, 3, tally=NEVER) for i in range(4)], faster=1.5) or ())
    batch.crowd.forget_rows()
    batch.crowd._finder.forget_rows()
    later = batch.plan(*[row(i, 3, tally=ALWAYS if i < 2 else NEVER) for i in range(4)], faster=1.5)
    assert later.draft_lengths[0] == later.draft_lengths[1] > later.draft_lengths[2] == later.draft_lengths[3]
    batch.crowd.forget_rows()
    assert batch.plan(*[row(i, length=448, room=2) for i in range(4)]) is None, "too few tokens to come for an index"


def test_forecasts_that_do_not_come_true_are_believed_less():
    batch, rows = Batch(), [row(i) for i in range(4)]
    before = batch.plan(*rows)
    for _ in range(80):
        plan = batch.plan(*rows) or Plan(None, (0,) * 4)
        batch.crowd.learn(plan, [RowOutcome(i, n, 0) for i, n in enumerate(plan.draft_lengths)])
    after = batch.plan(*rows)
    assert after is None or sum(after.draft_lengths) < sum(before.draft_lengths)


def test_drafts_are_the_shorter_the_more_a_token_costs():
    lengths = [Batch(ragged=ragged).plan(*[row(i, 6) for i in range(4)]).draft_lengths[0] for ragged in (1.0, 2.0, 3.0)]
    assert lengths[0] > lengths[1] > lengths[2] > 0


def test_all_rows_draft_no_more_than_is_held_at_once_even_where_others_joined():
    batch = Batch(8)
    batch.plan(*[row(i, tally=ALWAYS) for i in range(8)])
    for count in (9, 12, 12, 8, 13):
        plan = batch.plan(*[row(i, tally=ALWAYS) for i in range(count)])
        assert plan is not None and 0.6 * MOST_PACKED < sum(plan.draft_lengths) <= MOST_PACKED


# --------------------------------------------------------------------------------------------------- when it weighs


def test_it_is_weighed_now_and_then_and_where_something_else_is_usual(monkeypatch):
    asked, weigh, batch, at = [], Crowd._weigh, Batch(), 0
    monkeypatch.setattr(Crowd, "_weigh", lambda *given: asked.append(at) or weigh(*given))
    rows = [row(i, match=0) for i in range(4)]
    for at in range(FIRST_KEPT + 4 * KEPT):  # noqa: B007  # it is told of above
        batch.plan(*rows)
        steady = batch.crowd.steady(Steady(1000, longer=7))
        assert steady.num_rounds == batch.crowd.rounds_left and not steady.longer
        few = batch.crowd.steady(Steady(3, longer=7))
        assert few.num_rounds + few.longer == min(10, batch.crowd.rounds_left)
    ends = (FIRST_KEPT, KEPT, 2 * KEPT)
    assert asked == [0, *[sum(ends[: i + 1]) + i + 1 for i in range(3)]]  # each is kept for twice as long
    at = -1
    batch.plan(*rows, faster=1.2)
    assert asked[-1] == -1


def test_what_is_told_of_forecasts_changes_how_likely_a_token_must_be():
    lengths = []
    for came in (0, 60):
        batch = Batch()
        for _ in range(2):
            plan = batch.plan(*[row(i) for i in range(4)], faster=1 + 0.1 * len(batch.crowd._lines))
            batch.crowd.learn(plan, [RowOutcome(i, n, min(came, n)) for i, n in enumerate(plan.draft_lengths)])
        lengths.append(batch.crowd.steady(Steady(1000)).lookups.lengths[0][9])
    assert lengths[0] < lengths[1]


def test_an_index_that_is_made_is_not_paid_for_again():
    """Towards the end of long texts there is no time left to make one, and those that were made are looked into."""
    batch = Batch()
    long = [row(i, length=50_000, room=4000) for i in range(4)]
    assert batch.plan(*long) is not None
    ends = [row(i, length=53_990, room=10) for i in range(4)]
    assert batch.plan(*ends, faster=1.2) is not None, "weighed anew, of the same rows"
    assert Batch().plan(*ends) is None
    late = RowState(9, 60_000, 3, Unread())
    joined = batch.plan(*ends[:3], late, faster=1.2)
    assert [n > 0 for n in joined.draft_lengths] == [True] * 3 + [False], (
        "a row that joins has an index that pays or none"
    )


def test_a_row_whose_index_is_not_made_holds_up_no_other_and_is_read_once_its_share_suffices():
    batch, endless = Batch(), RowState(8, 1 << 30, 200, Unread())
    assert batch.plan(endless, row(1, room=4000), row(2, room=4000)) is not None, "on nobody else's budget, too"
    assert [n > 0 for n in batch.lengths()] == [False, True, True]
    slow = Batch(slower=0.02)
    texts = [row(i, length=90, room=60, tally=ALWAYS) for i in range(4)]
    alone = READ_SECONDS * (90 + 60)
    share = FOLLOW_SHARE * slow.worth.plain_seconds * 60
    assert share / 4 < alone < share / 2, "else this says nothing"
    slow.plan(*texts)
    assert slow.lengths() is None, "of four rows each has a fourth of the time"
    slow.plan(*texts[:2])
    assert slow.lengths() is not None and all(n > 0 for n in slow.lengths())


def test_plain_rounds_that_nobody_asked_about_make_what_was_weighed_older():
    batch = Batch()
    batch.plan(*[row(i) for i in range(4)])
    left = batch.crowd.rounds_left
    batch.crowd.pass_rounds(5)
    assert batch.crowd.rounds_left == left - 5


@pytest.mark.parametrize(("more", "is_soon"), [(0, True), (1, True), (8, True), (9, False), (100, False)])
def test_what_was_weighed_is_kept_until_a_call_ends_that_ends_soon_after(more, is_soon):
    batch = Batch()
    batch.plan(*[row(i) for i in range(4)])
    left = batch.crowd.rounds_left
    assert left == FIRST_KEPT
    batch.crowd.keep_until(left + more)
    assert batch.crowd.rounds_left == left + more * is_soon
    batch.crowd.keep_until(3)
    assert batch.crowd.rounds_left == left + more * is_soon, "it is not kept for less long"


def test_however_often_that_is_asked_weighing_comes_at_last(monkeypatch):
    weighed, weigh = [], Crowd._weigh
    monkeypatch.setattr(Crowd, "_weigh", lambda *given: weighed.append(at) or weigh(*given))
    batch, rows = Batch(), [row(i, match=0) for i in range(4)]
    for at in range(FIRST_KEPT + 10):  # noqa: B007  # it is told of above
        batch.plan(*rows)
        batch.crowd.keep_until(batch.crowd.rounds_left + 1)
    assert weighed == [0, FIRST_KEPT + FIRST_KEPT // 4 + 1]


def test_other_rows_are_weighed_at_once_where_that_was_to_come_soon(monkeypatch):
    weighed, weigh = [], Crowd._weigh
    monkeypatch.setattr(Crowd, "_weigh", lambda *given: weighed.append(passed) or weigh(*given))
    for passed in (20, 28):
        batch = Batch()
        batch.plan(*[row(i) for i in range(4)])
        batch.crowd.pass_rounds(passed)
        batch.plan(*[row(i) for i in range(1, 5)])
    assert weighed == [20, 28, 28]


@pytest.mark.parametrize(("rounds", "kept"), [(0, FIRST_KEPT), (50, 50), (10_000, MOST_KEPT)])
def test_weighing_pays_for_the_call_that_it_ends_within_bounds(monkeypatch, rounds, kept):
    batch = Batch()
    monkeypatch.setattr(crowd, "WEIGH_SECONDS", 0.0)
    monkeypatch.setattr(crowd, "WEIGH_ROW", 0.0)
    monkeypatch.setattr(crowd, "ENDING", (rounds - 0.5) * WEIGHING * batch.worth.plain_seconds)
    batch.plan(*[row(i) for i in range(4)])
    assert batch.crowd.rounds_left == kept


def test_rows_that_join_have_tables_of_their_own_and_others_keep_theirs():
    batch = Batch()
    first, second = row(0, tally=ALWAYS), row(1, tally=NEVER)
    batch.plan(first, second)
    good, bad = batch.lengths()
    batch.plan(row(2, tally=NEVER), first)
    new, kept = batch.lengths()
    assert kept == good > bad > 0 and new < good


def test_another_text_of_the_same_number_is_another_row():
    batch = Batch()
    batch.plan(row(0, tally=ALWAYS), row(1))
    good, _ = batch.lengths()
    batch.plan(row(0, tally=NEVER, length=51), row(1))
    assert batch.lengths()[0] < good


class Unread:
    is_own, is_stored = True, False

    def __getattr__(self, name):
        raise AssertionError(f"{name} makes an index")


@pytest.mark.parametrize(("kinds", "length"), [({"ragged": 50.0}, 50), ({"slower": 1e-4}, 50), ({}, 1 << 30)])
def test_rows_whose_indices_cannot_pay_are_not_asked_for_them(kinds, length):
    batch = Batch(**kinds)
    rows = [RowState(i, length, 400, Unread()) for i in range(4)]
    for _ in range(10):
        assert batch.plan(*rows) is None
    assert batch.lengths() is None


# -------------------------------------------------------------------------------------------------------- what is known


def test_a_bins_chance_is_between_what_the_row_and_what_all_rows_came_to():
    matches = Matches()
    first = matches.rights(7)
    matches.take(Tally(80, *ALWAYS), 0)
    matches.take(Tally(80, *NEVER), 1)
    stranger, good, bad = matches.rights(7), matches.rights(0), matches.rights(1)
    assert all(0 < low < mean < high < 1 for low, mean, high in zip(bad, stranger, good, strict=True))
    assert first != stranger and all(abs(chance - 0.5) < 0.2 for chance in stranger)


@given(st.lists(st.integers(0, 40), min_size=2 * NUM_MATCH_BINS, max_size=2 * NUM_MATCH_BINS))
def test_tables_are_those_of_the_chances_token_by_token(counts):
    seen, right = counts[:NUM_MATCH_BINS], counts[NUM_MATCH_BINS:]
    right = [min(pair) for pair in zip(seen, right, strict=True)]
    crowd, worth = Crowd(Finder()), Worth(costs_of(4), 4)
    rows = [row(0, tally=(seen, right)), *map(row, range(1, 4))]
    crowd.plan(rows, worth, usual_of(worth, rows))
    lookups = crowd.steady(Steady(1000)).lookups
    if lookups is None:
        return
    rights, least = crowd._finder.matches.rights(0), max(crowd._each, 0.05)
    for match in range(1, LONG + 1):
        shortest = max(edge for edge in (1, *MATCH_EDGES) if edge <= match)
        chance, chances = 1.0, []
        for at in range(64):
            chance *= rights[sum(shortest + at >= edge for edge in MATCH_EDGES)]
            chances.append(chance)
        kept = [chance for chance in chances if chance >= least]
        assert lookups.lengths[0][match] == min(len(kept), 63)
        assert lookups.gains[0][match] == pytest.approx(sum(kept[:63]))
