"""Drafts over a part of the vocabulary, and by 4-bit copies of the layers: where they pay, and where they may not."""

from __future__ import annotations

import numpy as np
import pytest

from selfspec.control.acceptance import Tracker
from selfspec.control.adaptive import Adaptive
from selfspec.control.drafters import BY_LAYERS, MOST, VOCAB_DIVISORS, Drafter, Drafters
from selfspec.control.plan import SEED_POSITIONS
from selfspec.control.planner import Candidates
from selfspec.core import ShadowPicks
from selfspec.model.draft_vocabulary import Frequencies
from selfspec.params import DRAFTERS
from tests.control.rounds import (
    LAYERS,
    even_costs,
    good_layers,
    play,
    row_round,
    sequence,
    settled,
    tell,
    times_of,
    with_copies,
    with_dear_contexts,
)

VOCAB = 131072
DEAR = 5e-4  # seconds of a head, where a layer takes a tenth of a millisecond


class Text:
    """What is known of a vocabulary: how much of the text each part covers."""

    def __init__(self, vocab_size=VOCAB, focus=None, **covered):
        self.focus = focus
        self.vocab_size, self.covered = vocab_size, {int(size[1:]): share for size, share in covered.items()}

    def has_part(self, size):
        return True

    def coverage(self, size):
        return self.covered.get(size, 0.0)


def planned(head, text, **kinds):
    policy = Adaptive(even_costs(head=head), good_layers(), drafters=["exit"])
    policy.set_vocabulary(text)
    row = sequence(0, 100, 40, **kinds)
    return settled(policy, row).plan([row])


def test_the_part_of_most_tokens_per_second_is_drafted_over():
    assert planned(DEAR, Text(s16384=0.99, s32768=1.0)).draft_vocab == 16384
    assert planned(DEAR, Text(s16384=0.6, s32768=0.99)).draft_vocab == 32768


@pytest.mark.parametrize(
    "head, text",
    [(DEAR, Text(s16384=0.3, s32768=0.4)), (2e-5, Text(s16384=1.0, s32768=1.0)), (DEAR, None)],
    ids=["covers little", "cheap head", "nothing known"],
)
def test_elsewhere_drafts_are_over_all_of_it(head, text):
    plan = planned(head, text)
    assert plan.exit_layer == 2 and plan.draft_vocab is None


def test_small_vocabularies_have_no_parts_however_dear_their_head():
    dear = even_costs(head=DEAR)
    sizes = {
        v: [drafter.draft_vocab for drafter in Drafters(dear, Text(v)).now()]
        for v in (4096, 16383, 16384, 32768, VOCAB)
    }
    assert sizes == {4096: [None], 16383: [None], 16384: [None, 4096], 32768: [None, 4096, 8192]} | {
        VOCAB: [None, 16384, 32768]
    }
    assert Drafters(dear).now() == [BY_LAYERS]


def test_heads_trained_for_few_tokens_draft_over_those():
    dear = even_costs(head=DEAR)
    assert [one.draft_vocab for one in Drafters(dear, Text(focus=1024)).now()] == [None, 1024, 16384]
    assert [one.draft_vocab for one in Drafters(dear, Text(focus=20000)).now()] == [None, 16384, 32768]
    assert [one.draft_vocab for one in Drafters(dear, Text(4096, focus=1024)).now()] == [None]
    assert planned(DEAR, Text(focus=1024, s1024=0.99, s16384=1.0)).draft_vocab == 1024


def test_rows_with_processors_are_priced_over_the_whole_vocabulary():
    text = Text(s16384=1.0, s32768=1.0)
    over_all = planned(DEAR, None)
    assert planned(DEAR, text).draft_vocab == 16384
    assert planned(DEAR, text, has_processors=True) == over_all
    assert over_all.speedup < planned(DEAR, text).speedup


def test_what_a_part_does_not_cover_lowers_the_chances_that_drafts_stop_by():
    sure, unsure = (planned(DEAR, Text(s16384=c, s32768=0.0)) for c in (1.0, 0.9))
    assert sure.draft_vocab == unsure.draft_vocab == 16384
    assert unsure.stop.calibration == pytest.approx([0.9 * right for right in sure.stop.calibration])
    assert unsure.speedup < sure.speedup


def test_tokens_that_no_draft_could_have_picked_do_not_count_against_the_layer():
    def after(is_outside_vocab):
        policy = Adaptive(even_costs(head=DEAR), good_layers(), exit_layers=[2], drafters=["exit"])
        policy.set_vocabulary(Text(s16384=0.9, s32768=0.9))
        row = sequence(0, 100, 40)
        settled(policy, row)
        for _ in range(20):
            plan = policy.plan([row])
            tell(policy, row_round(0, 3, 2, (0.9,) * 3, is_outside_vocab=is_outside_vocab), plan=plan)
        return policy.tracker.estimates()[0][1]

    kept, lowered = after(True), after(False)
    assert kept[7] > 0.9 and lowered[7] < 0.75  # the bin of 0.9


def test_it_leaves_a_part_that_no_longer_covers_the_text():
    text, costs = Text(s16384=1.0, s32768=1.0), even_costs(head=DEAR)
    policy = Adaptive(costs, good_layers(), drafters=["exit"])
    policy.set_vocabulary(text)
    assert {one.plan.draft_vocab for one in play(policy, costs, 12, most=3) if one.exit_layer} == {16384}
    text.covered.clear()
    assert play(policy, costs, 60, most=3)[-1].plan.draft_vocab is None


def drafting(faster=4.0, has_copies=True, drafters=DRAFTERS, **kinds):
    policy = Adaptive(with_copies(even_costs(), faster), good_layers(), drafters=[*drafters])
    policy.set_copies(has_copies)
    row = sequence(0, 100, 40, **kinds)
    return settled(policy, row).plan([row])


def test_copies_draft_where_that_pays_for_reading_all_layers_afterwards():
    assert drafting().draft_bits == 4
    assert drafting(faster=0.7).draft_bits is None
    assert drafting().speedup > drafting(faster=0.7).speedup


def test_copies_draft_where_the_layers_themselves_do_not_pay():
    for has_copies in (False, True):
        policy = Adaptive(with_copies(even_costs(), 1.7), good_layers(0.2), drafters=["exit", "copies"])
        policy.set_copies(has_copies)
        row = sequence(0, 100, 40)
        plan = settled(policy, row).plan([row])
        assert plan.draft_bits == (4 if has_copies else None)
        assert (plan.exit_layer is None) == (plan.draft_bits is None)


def test_copies_do_not_draft_where_there_are_none_or_they_may_not():
    for plan in (
        drafting(has_copies=False),
        drafting(drafters=["exit"]),
        drafting(has_processors=True),
        planned(2e-5, None),
    ):
        assert plan.exit_layer == 2 and plan.draft_bits is None


def test_copies_draft_over_a_part_of_the_vocabulary_where_their_own_head_is_dear():
    def ways(head):
        costs = with_copies(even_costs(head=head), 4.0)
        return [drafter.key for drafter in Drafters(costs, Text(s16384=1.0), copies=True).now()]

    assert ways(2e-5) == [(None, None), (None, 4)]
    assert ways(DEAR) == [(None, None), (None, 4), (16384, None), (16384, 4), (32768, None), (32768, 4)]
    policy = Adaptive(with_copies(even_costs(head=DEAR), 4.0), good_layers(), drafters=["exit", "copies"])
    policy.set_copies(True)
    policy.set_vocabulary(Text(s16384=0.99))
    row = sequence(0, 100, 40)
    plan = settled(policy, row).plan([row])
    assert (plan.exit_layer, plan.draft_vocab, plan.draft_bits) == (2, 16384, 4)


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("share", [1.0, 0.25])
def test_rounds_that_copies_draft_in_take_what_the_table_says(rows, share):
    costs = with_dear_contexts(with_copies(even_costs(), 3.0))
    copies, how = Drafter(share=share, draft_bits=4, deepest=4), {"copies": True, "draft_share": share}
    candidates = Candidates(costs, times_of(costs, rows, 288), range(1, LAYERS), [BY_LAYERS, copies])
    place = candidates.pairs.index((copies, 3))
    for drafted in (1, 5, MOST):
        expected = costs.round(3, [drafted] * rows, 288, **how)
        assert candidates.seconds[place, drafted] == pytest.approx(expected)
    limit = max(rows * (1 + n) / costs.round(3, [n] * rows, 288, **how) for n in range(1, MOST + 1))
    assert candidates.limits()[place] >= limit * (1 - 1e-9)


def test_the_clock_says_of_copies_what_it_does_not_say_of_the_layers():
    costs = with_copies(even_costs(), 1.5)
    policy = Adaptive(costs, good_layers(), exit_layers=[2], drafters=["exit", "copies"])
    policy.set_copies(True)
    slow = lambda plan: 4.0 if plan.draft_bits else 1.0  # noqa: E731  # copies are far slower than the table says
    seen = [one.plan.draft_bits for one in play(policy, costs, 900, slower=slow, most=3) if one.exit_layer]
    assert seen[0] == 4 and seen[-100:].count(None) > 80


def test_a_policy_that_serves_another_engine_decides_anew():
    costs = with_copies(even_costs(), 4.0)
    policy = Adaptive(costs, good_layers())
    for has_copies in (True, False, True):
        policy.set_copies(has_copies)
        for one in play(policy, costs, 80, most=3):
            assert one.exit_layer is None or (one.plan.draft_bits == 4) == has_copies  # plain to compare the clock


def test_copies_are_of_no_more_than_half_of_the_layers():
    costs = with_copies(even_costs(), 1000.0)
    tracker = Tracker(LAYERS)
    for _ in range(60):
        for layer in range(1, LAYERS):
            tracker.add(layer, [True] * (layer + 10) + [False], [0.9] * (layer + 11))
    policy = Adaptive(costs, tracker.state() | {"agreement": [[60.0] * (LAYERS - 1)] * 2}, drafters=["exit", "copies"])
    policy.set_copies(True)
    row = sequence(0, 100, 40)
    plan = settled(policy, row).plan([row])
    assert plan.draft_bits == 4 and plan.exit_layer <= LAYERS // 2


def drafted_by(policy, costs, copies_are_right, num_rounds):
    """By what a policy drafts, round by round, where layers are always right and their copies always, or never."""
    rounds = play(policy, costs, num_rounds, lambda plan, n: n if plan.draft_bits is None or copies_are_right else 0)
    return [one.plan.draft_bits if one.exit_layer else "plain" for one in rounds]


def policy_of(costs, prior=None):
    policy = Adaptive(costs, prior, drafters=["exit", "copies"])
    policy.set_copies(True)
    return policy


@pytest.mark.parametrize("copies_are_right", [True, False])
def test_layers_draft_where_they_are_right_and_their_copies_are_not(copies_are_right):
    costs = with_copies(even_costs(), faster=1.5)
    last = drafted_by(policy_of(costs), costs, copies_are_right, 1200)[-100:]
    assert last.count(4) > 80 if copies_are_right else last.count(None) > 80


def test_wrong_drafts_of_copies_are_no_misses_of_a_layer_that_a_prompt_showed():
    costs = with_copies(even_costs(), faster=1.5)
    policy, layers = policy_of(costs), tuple(range(1, LAYERS))
    hits = np.ones((len(layers), SEED_POSITIONS), bool)
    policy.seed(sequence(0, 40_000, 40), ShadowPicks(layers, hits, np.full(hits.shape, 0.9, np.float32)))
    by = drafted_by(policy, costs, False, 200)
    by = [one for one in by if one != "plain"]
    assert by[0] == 4 and by[-1] is None
    assert np.sum(policy.state()["hits"]) > 0 and np.sum(policy.state()["misses"]) == 0


def test_a_vocabulary_is_ranked_once_it_may_be_drafted_over():
    text = Frequencies(VOCAB)
    assert planned(2e-5, text).draft_vocab is None and not text.has_part(VOCAB // 8)
    assert planned(DEAR, text).draft_vocab is not None
    assert any(text.has_part(VOCAB // divisor) for divisor in VOCAB_DIVISORS)
