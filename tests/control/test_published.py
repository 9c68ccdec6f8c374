"""The published policies that steer lengths row by row, against traces worked out by hand; and what all promise."""

from __future__ import annotations

from math import inf, isfinite, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eval.replay import replay
from selfspec.control.del_ import DynamicExit
from selfspec.control.goodput import SmartSpec, Synergy
from selfspec.control.heuristics import DSDE, DraftVerify, FiniteState, GammaTune, GammaTunePlus
from selfspec.control.plan import Plan
from selfspec.control.rows import RowOutcome, Shadow
from tests.control.rounds import ask, costs, row, tell
from tests.eval.replays import random_trace
from tests.helpers import decode, generate, make_prompts
from tests.models import tiny

POLICIES = {
    "fs": lambda: FiniteState(1, 4),
    "draft_verify": lambda: DraftVerify(1),
    "gammatune": lambda: GammaTune(1),
    "gammatune_plus": lambda: GammaTunePlus(1),
    "del": lambda: DynamicExit(4),
    "dsde": lambda: DSDE(1),
    "smartspec": lambda: SmartSpec(1, costs()),
    "synergy": lambda: Synergy(1, costs()),
}
all_policies = pytest.mark.parametrize("make", POLICIES.values(), ids=POLICIES)


def lengths(policy, *rounds):
    """The lengths planned for one row before and after rounds of (drafted, accepted)."""
    seen = list(ask(policy).draft_lengths)
    for drafted, accepted in rounds:
        tell(policy, RowOutcome(0, drafted, accepted))
        seen += ask(policy).draft_lengths
    return seen


def test_finite_state_drafts_one_more_after_full_acceptance_and_one_less_otherwise():
    assert lengths(FiniteState(1, 4), (4, 4), (5, 5), (6, 2)) == [4, 5, 6, 5]
    assert lengths(FiniteState(1, 1), (1, 0), (1, 0)) == [1, 1, 1]
    assert lengths(FiniteState(1, 17), (17, 17), (18, 18)) == [17, 18, 18]
    assert lengths(FiniteState(1, 4), (0, 0)) == [4, 4]


def test_gammatune_expands_by_two_and_falls_back_to_its_average():
    # The average: 3, then 3 + .3 (1 - 3) = 2.4, then 2.4 - .72 = 1.68; kept through full acceptance; then 1.476.
    assert lengths(GammaTune(1), (3, 1), (3, 0), (2, 2), (4, 1)) == [3, 3, 2, 4, 2]
    assert lengths(GammaTune(1, 9), (9, 9), (10, 10)) == [9, 10, 10]
    assert lengths(GammaTune(1, 1), (1, 0), (1, 0)) == [1, 1, 1]


def test_gammatune_plus_stops_unsure_drafts_and_expands_from_what_was_drafted():
    policy = GammaTunePlus(1)
    assert ask(policy) == Plan(1, (3,), 0.4)
    assert lengths(policy, (1, 1), (2, 2)) == [3, 3, 4]
    assert ask(GammaTune(1)).min_confidence == 0


def test_draft_verify_raises_its_threshold_until_acceptance_reaches_the_target():
    policy = DraftVerify(1)
    assert ask(policy) == Plan(1, (18,), 0.6)
    thresholds = []
    for drafted, accepted in [(4, 4), (6, 6), (3, 3), (4, 0)]:  # acceptance .5, .75, .875, .4375
        tell(policy, RowOutcome(0, drafted, accepted))
        thresholds.append(ask(policy).min_confidence)
    assert thresholds == pytest.approx([0.601, 0.602, 0.601, 0.602])


def test_draft_verify_takes_the_mean_of_its_rows_thresholds():
    policy = DraftVerify(1)
    ask(policy)
    tell(policy, RowOutcome(0, 4, 4))
    assert ask(policy, row(0), row(1)) == Plan(1, (18, 18), pytest.approx(0.6005))


# ---------------------------------------------------------------------------------------------------------------- all


@all_policies
def test_no_row_drafts_beyond_its_room_and_plain_rounds_name_no_exit(make):
    assert make().plan([row(0, 1), row(1, 1)]) == Plan(None, (0, 0))
    assert make().plan([row(0, 2), row(1, 1)]).draft_lengths[1] == 0


@all_policies
def test_rows_that_left_are_forgotten(make):
    policy = make()
    for first in range(0, 40, 2):
        rows = [row(first), row(first + 1)]
        tell(policy, *(RowOutcome(r.request_id, 1, 1, (0.5,), (0.1,)) for r in rows), plan=ask(policy, *rows))
        tell(policy, RowOutcome(first - 1, 1, 1, (0.5,), (0.1,)))  # of a row that has left
    for name in ("_rows", "_lengths"):
        if hasattr(policy, name) and not isinstance(policy, Synergy):
            assert set(getattr(policy, name)) == {38, 39}


@all_policies
@given(data=st.data())
def test_plans_can_be_carried_out_whatever_happens(make, data):
    policy = make()
    for _ in range(data.draw(st.integers(1, 30))):
        ids = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=4, unique=True))
        rows = [row(i, data.draw(st.integers(1, 25))) for i in ids]
        plan = policy.plan(rows)
        assert len(plan.draft_lengths) == len(rows)
        assert all(0 <= n < r.room for n, r in zip(plan.draft_lengths, rows, strict=True))
        assert (plan.exit_layer is None) == (not any(plan.draft_lengths))
        assert plan.exit_layer in (None, 1, 2, 3)
        assert isfinite(plan.min_confidence) and 0 <= plan.min_confidence <= 1
        tell(
            policy, *(outcome(data.draw, r, n, plan) for r, n in zip(rows, plan.draft_lengths, strict=True)), plan=plan
        )


def outcome(draw, of, length, plan):
    drafted = draw(st.integers(min(1, length), length))
    accepted = draw(st.integers(0, drafted))
    judged = min(accepted + 1, drafted)
    sure = st.floats(0, 1) | st.just(nan)
    confidences = tuple(draw(sure) for _ in range(drafted)) if plan.reads_confidence else ()
    away = st.floats(-1e-6, 50) | st.sampled_from([inf, nan])
    divergences = tuple(draw(away) for _ in range(judged)) if plan.keep_divergence else ()
    shadow = None
    if plan.shadow is not None and draw(st.booleans()):
        columns, layers = range(draw(st.integers(0, accepted + 1))), plan.shadow.layers
        hits = tuple(tuple(draw(st.booleans()) for _ in columns) for _ in layers)
        shadow = Shadow(layers, hits, tuple(tuple(draw(sure) for _ in columns) for _ in layers))
    return RowOutcome(of.request_id, drafted, accepted, confidences, divergences, shadow)


@all_policies
@pytest.mark.parametrize("batch_size", [1, 3])
def test_replays_are_complete_and_the_same_each_time(make, batch_size):
    traces = [random_trace(i, 4, 30 + 7 * i, prompt_length=5 + 30 * i) for i in range(4)]
    once, again = (replay(traces, make(), costs(), batch_size, prefill_chunk=40) for _ in range(2))
    assert once.num_tokens == sum(len(trace.tokens) for trace in traces)
    assert once.rounds == again.rounds


@all_policies
def test_output_is_the_models_own(make):
    model, prompts = tiny("llama"), make_prompts([5, 40, 9])
    for prompt, done in zip(prompts, decode(model, prompts, make(), max_new_tokens=24), strict=True):
        assert done.tokens == generate(model.model, prompt, 24)
