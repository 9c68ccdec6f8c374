"""The published policies, against numbers computed by hand; and what holds for all of them."""

from __future__ import annotations

from math import exp, inf, isfinite, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from selfspec.control.plan import Plain, table_of
from selfspec.control.published.draft_verify import DraftVerify
from selfspec.control.published.dsde import DSDE
from selfspec.control.published.dynamic_exit import DynamicExit
from selfspec.control.published.finite_state import FiniteState
from selfspec.control.published.gammatune import GammaTune, GammaTunePlus
from selfspec.control.published.layerskip import Fixed
from selfspec.control.published.prompt_lookup import PromptLookup
from selfspec.control.published.smartspec import SmartSpec, SmartSpecLookup
from selfspec.control.published.synergy import Synergy
from selfspec.core import LOOKUP, Plan, ShadowPicks
from tests.control.rounds import ask, costs, even_costs, row_round, sequence, tell

POLICIES = {
    "fs": lambda: FiniteState(1, 4),
    "dv": lambda: DraftVerify(1),
    "gammatune": lambda: GammaTune(1),
    "gammatune+": lambda: GammaTunePlus(1),
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
        tell(policy, row_round(0, drafted, accepted))
        seen += ask(policy).draft_lengths
    return seen


def test_plain_drafts_nothing():
    plan = ask(Plain(), sequence(0), sequence(1))
    assert (plan.exit_layer, plan.draft_lengths, table_of(plan)) == (None, (0, 0), None)


def test_fixed_drafts_its_length_in_every_row():
    plan = ask(Fixed(3, 4, 0.5), sequence(0), sequence(1, 1))
    assert (plan.exit_layer, plan.draft_lengths, plan.min_confidence) == (3, (4, 4), 0.5)


def test_prompt_lookup_drafts_as_many_tokens_every_round():
    plan = ask(PromptLookup(), sequence(0, 40), sequence(1, 4))
    assert (plan.exit_layer, plan.draft_lengths, plan.lookups) == (LOOKUP, (10, 10), None)
    table = table_of(plan)
    assert table.drafted([1, 50], [39, 3]) == (10, 3) and table.drafted([0, 0], [39, 3]) is None


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


def test_gammatune_plus_stops_after_low_confidence_and_expands_from_what_was_drafted():
    policy = GammaTunePlus(1)
    assert ask(policy) == Plan(1, (3,), 0.4)
    assert lengths(policy, (1, 1), (2, 2)) == [3, 3, 4]
    assert ask(GammaTune(1)).min_confidence == 0


def test_draft_verify_raises_its_threshold_until_acceptance_reaches_the_target():
    policy = DraftVerify(1)
    assert ask(policy) == Plan(1, (18,), 0.6)
    thresholds = []
    for drafted, accepted in [(4, 4), (6, 6), (3, 3), (4, 0)]:  # acceptance .5, .75, .875, .4375
        tell(policy, row_round(0, drafted, accepted))
        thresholds.append(ask(policy).min_confidence)
    assert thresholds == pytest.approx([0.601, 0.602, 0.601, 0.602])


def test_draft_verify_takes_the_mean_of_its_rows_thresholds():
    policy = DraftVerify(1)
    ask(policy)
    tell(policy, row_round(0, 4, 4))
    assert ask(policy, sequence(0), sequence(1)) == Plan(1, (18, 18), pytest.approx(0.6005))


# ---------------------------------------------------------------------------------------------------------------- dsde


def calibrated(policy, divergences, accepted, seq_id=0):
    for count in accepted:
        tell(policy, row_round(seq_id, 5, count, divergences=divergences))


def test_dsde_calibrates_and_then_drafts_by_divergence():
    policy = DSDE(1)
    assert ask(policy) == Plan(1, (5,), keep_divergence=True)
    calibrated(policy, (0.1, 0.1), [1, 3, 2])
    assert ask(policy).draft_lengths == (5,)
    calibrated(policy, (0.1, 0.1), [1])  # SL max = 3 (1 + .1 / .1) = 6, SL = 2 + (2 - exp(.2)) 4 = 5.11
    assert ask(policy).draft_lengths == (6,)
    tell(policy, row_round(0, 6, 0, divergences=(1.0,)))  # SF = exp(2) - 1 > 1
    assert ask(policy).draft_lengths == (2,)


def test_dsde_weighs_the_newest_divergences_against_a_longer_window():
    policy = DSDE(1)
    ask(policy)
    calibrated(policy, (0.0,) * 5, [4, 0, 0, 0])  # SL max = 4
    tell(policy, row_round(0, 4, 0, divergences=(0.1,)))
    # One of 10 and of 21 differs: variances p (1 - p) with p = .15 / (1 - .85^10) and .15 / (1 - .85^21).
    short, long = (p * (1 - p) for p in (0.15 / (1 - 0.85**10), 0.15 / (1 - 0.85**21)))
    assert short / long == pytest.approx(1.159, abs=1e-3)
    assert policy._rows[0].predicted == pytest.approx(2 + (1 - (exp(0.2) - 1) * short / long) * 2)
    tell(policy, row_round(0, 10, 10, divergences=(0.1,) * 10))  # steady again
    assert ask(policy).draft_lengths == (4,)


def test_dsde_drafts_no_more_than_the_batchs_mean():
    policy = DSDE(1)
    ask(policy, sequence(0), sequence(1))
    calibrated(policy, (0.1, 0.1), [1, 3, 2, 1], seq_id=0)  # SL = 5.11
    calibrated(policy, (3.0,), [0, 0, 0, 0], seq_id=1)  # SL = 2
    assert ask(policy, sequence(0), sequence(1)).draft_lengths == (4, 2)


# ----------------------------------------------------------------------------------------------------------------- del


def seeded(policy, *layers, seq_id=0):
    """Show the end of a prompt: per layer, the confidences of hits and those of misses."""
    for layer, (right, wrong) in enumerate(layers, 1):
        hits = (True,) * len(right) + (False,) * len(wrong)
        policy.seed(sequence(seq_id), ShadowPicks((layer,), (hits,), ((*right, *wrong),)))
    return policy


# TPL with 4 layers: half right at layer 1 is 1.5 / 5 = .3 at one token; three quarters right at layer 2 is 1.75 / 6 =
# .292, and at layer 3 at most .25.
HALF, MOSTLY = ((0.9, 0.7), (0.5, 0.3)), ((0.9, 0.9, 0.9), (0.1,))


def test_del_starts_with_one_token_of_the_first_layer_and_probes_all_others():
    policy = DynamicExit(4)
    assert policy.seed_layers(sequence()) == (1, 2, 3)
    plan = ask(policy, sequence(0), sequence(1))
    assert plan == Plan(1, (1, 1), keep_confidence=True, shadow=((2, 3), (0, 1), 19, True))
    assert ask(DynamicExit(2)).shadow is None  # there is no other layer


def test_del_exits_where_tokens_per_layer_are_most_and_stops_midway_between_right_and_wrong():
    plan = ask(seeded(DynamicExit(4), HALF, MOSTLY, MOSTLY))
    assert (plan.exit_layer, plan.draft_lengths) == (1, (18,))
    assert plan.min_confidence == pytest.approx((0.8 + 0.4) / 2)
    # Nine of ten right at layer 2: (1 + .9 + .81 + .729) / 10 = .344 at three tokens.
    better = ask(seeded(DynamicExit(4), HALF, ((0.9,) * 9, (0.1,)), MOSTLY))
    assert (better.exit_layer, better.min_confidence) == (2, pytest.approx(0.5))
    assert better.shadow.layers == (1, 3)


def test_del_decays_old_counts_and_counts_drafts_up_to_the_first_rejected():
    policy = seeded(DynamicExit(4), HALF, MOSTLY, MOSTLY)
    plan = ask(policy)
    wrong = ShadowPicks((2, 3), ((False, False),) * 2, ((0.5, 0.5),) * 2)
    tell(policy, row_round(0, 3, 1, (0.95, 0.2, 0.01), shadow=wrong), plan=plan)
    # Layer 1 has .95 * 2 + 1 hits and as many misses, with .95 * 1.6 + .95 and .95 * .8 + .2 of confidence.
    after = ask(policy)
    assert (after.exit_layer, after.min_confidence) == (1, pytest.approx((2.47 / 2.9 + 0.96 / 2.9) / 2))
    # Two hits each at layer 2: (.95 * 3 + 2) / (.95 * 4 + 2) = .836 right, (1 + .836 + .699) / 8 = .317 > .3.
    right = ShadowPicks((2, 3), ((True, True), (False, False)), ((0.5, 0.5),) * 2)
    policy = seeded(DynamicExit(4), HALF, MOSTLY, MOSTLY)
    tell(policy, row_round(0, 3, 1, (0.95, 0.2, 0.01), shadow=right), plan=ask(policy))
    assert ask(policy).exit_layer == 2


def test_del_never_stops_by_confidence_where_a_layer_was_never_wrong_or_never_right():
    surest = ask(seeded(DynamicExit(4), ((0.9, 0.8), ()), HALF, HALF))
    assert (surest.exit_layer, surest.draft_lengths, surest.min_confidence) == (1, (18,), 0)
    worst = ask(seeded(DynamicExit(4), ((), (0.3,)), ((), (0.3,)), ((), (0.3,))))
    assert (worst.draft_lengths, worst.min_confidence) == ((18,), 0)


def test_del_leaves_out_layers_never_observed():
    policy = DynamicExit(4)
    policy.seed(sequence(), ShadowPicks((2,), ((False, False),), ((nan, 0.1),)))
    plan = ask(policy)
    assert (plan.exit_layer, plan.min_confidence) == (2, 0)


def test_del_pools_the_rows_of_a_batch():
    policy = seeded(DynamicExit(4), ((0.9,), ()), MOSTLY, MOSTLY, seq_id=0)
    seeded(policy, ((), (0.3,)), MOSTLY, MOSTLY, seq_id=1)
    plan = ask(policy, sequence(0), sequence(1))  # half right at layer 1
    assert (plan.exit_layer, plan.min_confidence) == (1, pytest.approx(0.6))


def test_del_keeps_the_counts_of_prompts_that_are_still_being_read():
    policy = seeded(DynamicExit(4), HALF, MOSTLY, MOSTLY, seq_id=5)
    ask(policy, sequence(3))
    assert ask(policy, sequence(5)).min_confidence == pytest.approx(0.6)
    ask(policy, sequence(6))
    assert ask(policy, sequence(5)).draft_lengths == (1,)  # dropped with the row


# ------------------------------------------------------------------------------------------------- smartspec, synergy


def smart(accepted, judged):
    """A policy at its second decision, when so many of its judged tokens were accepted."""
    policy = SmartSpec(1, costs())
    misses = judged - 2 * accepted
    rounds = [(2, 1)] * accepted + [(1, 0)] * misses
    for drafted, hits in [*rounds, *[(0, 0)] * (20 - len(rounds))]:
        ask(policy)
        tell(policy, row_round(0, drafted, hits))
    return policy


def test_smartspec_drafts_while_goodput_rises():
    # Of .8: 1.1 / 4, 1.8 / 5, 2.44 / 6, 2.952 / 7 = .4217, 3.3616 / 8 = .4202 tokens per second.
    policy = SmartSpec(1, costs())
    assert ask(policy) == Plan(1, (3,))
    assert policy.goodput(3, 1, 10) == pytest.approx(2.952 / 7)
    assert ask(SmartSpec(1, costs(), most=2)).draft_lengths == (2,)


def test_smartspec_demands_a_tenth_more_than_plain_decoding_gives():
    assert ask(smart(8, 20)).draft_lengths == (1,)  # 1.4 / 5 = .28
    assert ask(smart(7, 20)) == Plan(None, (0,))  # 1.35 / 5 = .27, above 1 / 4 but below 1.1 / 4


def test_smartspec_decides_every_twenty_rounds():
    policy = SmartSpec(1, costs())
    for _ in range(20):
        assert ask(policy).draft_lengths == (3,)
        tell(policy, row_round(0, 3, 0))
    assert ask(policy).draft_lengths == (0,)


def test_smartspec_is_off_in_a_large_batch_but_for_a_probe_after_two_hundred_rounds():
    policy, rows = SmartSpec(1, costs()), [sequence(i) for i in range(8)]
    seen = [ask(policy, *rows).draft_lengths[0] for _ in range(221)]  # 8 * 1.8 / (2 + 6) < 1.1 * 8 / 4
    assert seen == [0] * 200 + [8] * 20 + [0]


def test_smartspec_distributes_the_batchs_tokens_by_acceptance():
    policy, rows = SmartSpec(1, costs(slow_batch=2000)), [sequence(0), sequence(1)]
    assert ask(policy, *rows).draft_lengths == (3, 3)
    tell(policy, row_round(0, 10, 9), row_round(1, 4, 3))
    for _ in range(6):
        tell(policy, row_round(1, 1, 0))
    assert ask(policy, *rows).draft_lengths == (4, 2)  # .9 and .3: int(.5 + 4 / 1.2 * rate) + 1
    assert ask(policy, sequence(1), sequence(2)).draft_lengths == (2, 4)  # a new row counts as .7
    ask(policy, sequence(0))
    tell(policy, row_round(0, 1, 0))
    assert ask(policy, sequence(0)).draft_lengths == (3,)  # none accepted


def test_smartspec_with_lookup_counts_how_often_there_is_a_match():
    policy = SmartSpecLookup(even_costs())
    often = policy.goodput(4, 1, 50)
    for _ in range(40):
        ask(policy)
        tell(policy, row_round(0, 0, 0), plan=Plan(LOOKUP, (4,)))
    plain = policy.goodput(0, 1, 50)
    assert plain < policy.goodput(4, 1, 50) < 0.6 * often


def test_synergy_shortens_drafts_as_the_batch_grows_and_ends_with_plain_decoding():
    # One row: 4, 5 / 1.9 = 2.63, 6 / 2.318 = 2.59, 7 / 2.647 = 2.64. Three: 4, 5.86 / 1.9 = 3.08, 7.71 / 2.318 = 3.33.
    policy = Synergy(1, costs())
    assert [policy.length(rows) for rows in (1, 3, 8)] == [2, 1, 0]
    assert ask(policy, sequence(0), sequence(1, 1), sequence(2)) == Plan(1, (1, 0, 1))
    assert ask(policy, *(sequence(i) for i in range(8))) == Plan(None, (0,) * 8)
    assert Synergy(1, costs(), accepted=(0, 0.1)).length(1) == 0
    assert Synergy(1, costs(), accepted=(0, 1, 2, 3)).length(1) == 3


# ---------------------------------------------------------------------------------------------------------------- all


@all_policies
def test_no_row_drafts_more_than_it_may_emit_and_plain_rounds_name_no_exit(make):
    assert ask(make(), sequence(0, 1), sequence(1, 1)) == Plan(None, (0, 0))
    assert ask(make(), sequence(0, 2), sequence(1, 1)).draft_lengths[1] == 0


@all_policies
def test_rows_that_left_are_dropped(make):
    policy = make()
    for first in range(0, 40, 2):
        rows = [sequence(first), sequence(first + 1)]
        tell(policy, *(row_round(row, 1, 1, (0.5,), (0.1,)) for row in rows), plan=ask(policy, *rows))
        tell(policy, row_round(first - 1, 1, 1, (0.5,), (0.1,)))  # of a row that has left
    for name in ("_rows", "_lengths"):
        if hasattr(policy, name) and not isinstance(policy, Synergy):
            assert set(getattr(policy, name)) == {38, 39}


@all_policies
@given(data=st.data())
def test_plans_can_be_carried_out_whatever_happens(make, data):
    policy = make()
    for _ in range(data.draw(st.integers(1, 30))):
        ids = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=4, unique=True))
        rows = [sequence(i, data.draw(st.integers(1, 25))) for i in ids]
        plan = policy.plan(rows)
        assert len(plan.draft_lengths) == len(rows)
        assert all(0 <= n < row.num_remaining for n, row in zip(plan.draft_lengths, rows, strict=True))
        assert (plan.exit_layer is None) == (not any(plan.draft_lengths))
        assert plan.exit_layer in (None, 1, 2, 3)
        assert isfinite(plan.min_confidence) and 0 <= plan.min_confidence <= 1
        pairs = zip(rows, plan.draft_lengths, strict=True)
        tell(policy, *(outcome(data.draw, row, n, plan) for row, n in pairs), plan=plan)


def outcome(draw, row, length, plan):
    drafted = draw(st.integers(min(1, length), length))
    accepted = draw(st.integers(0, drafted))
    judged = min(accepted + 1, drafted)
    one = st.floats(0, 1) | st.just(nan)
    confidences = tuple(draw(one) for _ in range(drafted)) if plan.reads_confidence else ()
    divergence = st.floats(-1e-6, 50) | st.sampled_from([inf, nan])
    divergences = tuple(draw(divergence) for _ in range(judged)) if plan.keep_divergence else ()
    shadow = None
    if plan.shadow is not None and draw(st.booleans()):
        columns, layers = range(draw(st.integers(0, accepted + 1))), plan.shadow.layers
        hits = tuple(tuple(draw(st.booleans()) for _ in columns) for _ in layers)
        shadow = ShadowPicks(layers, hits, tuple(tuple(draw(one) for _ in columns) for _ in layers))
    return row_round(row, drafted, accepted, confidences, divergences, shadow=shadow)
