"""Where something is found, layers may do better than on the whole; drafts by lookup have to promise more than that."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from selfspec.control.ease import CLEAR, EVERY, HALF_LIFE, Ease
from selfspec.control.fading import Passed
from selfspec.control.finder import Finder
from selfspec.control.plan import Plan
from selfspec.control.rows import Looked, RowOutcome, RowState
from tests.control.rounds import found
from tests.control.test_finder import taught, worth_of

NOTHING, WEAK, STRONG = range(3)
BY_LAYERS = Plan(2, (4,))


def test_layers_are_taken_to_do_there_what_they_did():
    ease = Ease(3, Passed())
    assert [ease.ratio(strength) for strength in range(3)] == [1, 1, 1]
    for _ in range(100):
        ease.add(NOTHING, 2.0, 3.0)
        ease.add(STRONG, 6.0, 3.0)
    assert ease.ratio(STRONG) > 1.4 and ease.ratio(WEAK) == ease.ratio(NOTHING) == 1  # never less than on the whole


def test_it_is_forgotten():
    passed = Passed()
    ease = Ease(2, passed)
    for _ in range(100):
        ease.add(0, 3.0, 3.0)
        ease.add(1, 6.0, 3.0)
    before = ease.ratio(1)
    passed.tokens += 20 * HALF_LIFE
    assert 1 < ease.ratio(1) < 1.01 < before


@given(st.lists(st.tuples(st.integers(0, 2), st.floats(0, 64), st.floats(0, 64), st.floats(0, 1e4)), max_size=30))
def test_it_is_a_number_whatever_came(rounds):
    passed = Passed()
    ease = Ease(3, passed)
    for strength, came, forecast, tokens in rounds:
        ease.add(strength, came, forecast)
        passed.tokens += tokens
        assert all(1 <= ease.ratio(one) < 1e6 for one in range(3))


def plan(finder, usual, match=12):
    return finder.plan([RowState(0, 50, 200, found(match))], worth_of(1), usual, beside_layers=True)


def promise(finder):
    """Tokens per second of what is found."""
    made = plan(finder, 0.0)
    return made.speedup / worth_of(1).plain_seconds


def tell(finder, tokens, forecast, match=12, times=40):
    looked = Looked(match, 9, 9 if match else 0)  # it would have been right
    for _ in range(times):
        finder.observe(BY_LAYERS, [RowOutcome(0, 8, tokens - 1, looked=looked)], forecast)


def test_what_is_found_where_layers_do_well_has_to_promise_more():
    usual = promise(taught()) / 1.3
    easy, hard = taught(), taught()
    tell(easy, 1, 4.0, match=0)
    tell(easy, 8, 4.0)
    tell(hard, 4, 4.0)
    assert plan(hard, usual) is not None and plan(easy, usual) is None


def test_layers_draft_now_and_then_where_lookup_does():
    finder = taught()
    usual = promise(finder) / (1 + CLEAR) * 2  # not so much more than that
    finder = taught()
    made = [plan(finder, usual) is not None for _ in range(EVERY + 2)]
    assert made == [True] * EVERY + [False] * 2
    tell(finder, 4, 4.0, times=1)
    assert plan(finder, usual) is not None


def test_where_lookup_promises_far_more_they_do_not():
    finder = taught()
    usual = promise(finder) / (2 * CLEAR)
    assert all(plan(finder, usual) is not None for _ in range(3 * EVERY))


def test_nothing_is_compared_with_plain_rounds():
    finder: Finder = taught()
    tell(finder, 1, 4.0, match=0)
    tell(finder, 8, 4.0)
    usual = promise(taught()) / 1.01
    rows = [RowState(0, 50, 200, found(12))]
    assert all(finder.plan(rows, worth_of(1), usual) is not None for _ in range(3 * EVERY))
