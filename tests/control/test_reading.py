"""Rows are looked up as far as that pays, and what is tried in vain stays within its share of the time."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, product

import numpy as np
import pytest

from eval.replay import replay
from selfspec.control.adaptive import Adaptive
from selfspec.control.crowd import Crowd
from selfspec.control.laps import Seconds
from selfspec.control.lengths import MOST_KEPT, WEIGH_SECONDS
from selfspec.control.plan import DRAFTS, LOOKUP, Steady
from selfspec.control.reading import (
    ASK_SECONDS,
    END_SECONDS,
    FOLLOW_SHARE,
    READ_SECONDS,
    SHARE,
    Reading,
    could_pay,
)
from selfspec.control.rows import RowOutcome, RowState, Shadow
from selfspec.control.seeding import PROMPTS
from selfspec.control.table import Table
from selfspec.control.worth import Worth
from selfspec.drafting.lookup import Lookup
from tests.control.rounds import found
from tests.control.test_adaptive import traces as traces_of_chance
from tests.eval.replays import made_up_costs, trace_of

LAYERS = 8
PROMPT = 33


def costs_of(num_rows, ragged=1.0, slower=1.0):
    """A machine on which all takes `slower` times as long, and a ragged verification `ragged` times an even one."""
    costs = made_up_costs(LAYERS, rows=(1, num_rows))
    for name in ("early", "late"):
        costs = replace(costs, **{name: {r: t.scaled(slower) for r, t in getattr(costs, name).items()}})
    ones = {name: getattr(costs, name).scaled(slower) for name in ("plain", "head", "pick", "rest")}
    return replace(costs, **ones, ragged=Table.of({2: ragged, num_rows: ragged}))


def rows_of(count, room=200, content=50):
    return [RowState(i, content, room, found(9)) for i in range(count)]


def account(num_rows, is_priced=True, **kinds):
    """An account, a batch's costs, and what is usual without lookups."""
    worth = Worth(costs_of(num_rows, **kinds), num_rows)
    return Reading(is_priced), worth, num_rows / worth.plain_seconds


def echoes(count, tokens=96, period=12):
    """Texts that say the same again and again, by a model whose layers are never right before the last."""
    made = []
    for seed in range(count):
        rng = np.random.default_rng(seed)
        hits = np.zeros((LAYERS - 1, tokens), bool)
        trace = trace_of(hits, rng.random(hits.shape, np.float32) * 0.2, rng, PROMPT)
        words = rng.integers(3, 1000, period).tolist()
        content = [words[i % period] for i in range(PROMPT + tokens)]
        made.append(replace(trace, prompt=tuple(content[:PROMPT]), tokens=tuple(content[PROMPT:])))
        made[-1].short_hits[:] = made[-1].prompt_hits[:] = False
    return made


def exits_of(run):
    return [round_.plan.exit_layer for round_ in run.rounds]


def test_indices_of_rows_with_the_numbers_of_earlier_ones_are_paid_for_too():
    balances = []
    for forgets in (False, True):
        reading, worth, usual = account(4)
        rows = rows_of(4, content=5000)
        for _ in range(2):
            reading.pass_round(4, 100.0, 1.0)
            assert reading.begin(rows, worth, usual)
            if forgets:
                reading.forget_rows()
        balances.append(reading._balance)
    assert balances[0] - balances[1] == pytest.approx(4 * 5000 * READ_SECONDS)


# ------------------------------------------------------------------------------------------------------------ the table


def test_it_pays_where_few_tokens_more_cost_little_and_not_where_they_cost_a_forward():
    for ragged, pays in ((1.0, True), (6.0, False)):
        reading, worth, usual = account(8, ragged=ragged)
        assert could_pay(worth, usual) == pays
        assert bool(reading.begin(rows_of(8), worth, usual)) == pays


def test_a_forward_that_takes_no_longer_than_asking_for_guesses_leaves_no_time_for_it():
    reading, worth, usual = account(8, slower=1e-3)
    assert not could_pay(worth, usual)
    assert reading.begin(rows_of(8), worth, usual) == ()


def test_two_rows_are_not_looked_up_where_a_forward_is_too_short_for_the_call_that_a_question_ends():
    for slower, pays in ((1.0, True), (1e-2, False)):
        reading, worth, usual = account(2, slower=slower)
        assert could_pay(worth, usual) == pays
        assert bool(reading.begin(rows_of(2, room=4000), worth, usual)) == pays
    assert END_SECONDS > 3 * ASK_SECONDS


def test_where_nobody_measured_ragged_verifications_only_few_rows_are_looked_up():
    reading, worth, usual = account(8, is_priced=False)
    assert reading.begin(rows_of(8), worth, usual) == ()
    assert reading.is_on(2) and not reading.is_on(3)


# ---------------------------------------------------------------------------------------------------------- the account


def test_long_outputs_pay_for_all_rows_at_once_and_short_ones_for_some_of_them():
    looked_up = {}
    for room in (5, 50, 2000):
        reading, worth, usual = account(8, slower=0.2)
        rows = reading.begin(rows_of(8, room, content=100), worth, usual)
        looked_up[room] = sum(row.guesses is not None for row in rows)
    assert looked_up[5] == 0 < looked_up[50] < 8 == looked_up[2000]


def test_what_is_tried_in_vain_stays_within_its_share():
    reading, worth, usual = account(8, slower=0.05)
    spent = decoded = 0.0
    read, rounds = {}, 1000
    for at in range(rounds):
        rows = rows_of(8, room=rounds - at, content=50 + at)
        if not reading.is_on(8):
            rows = [row._replace(guesses=None) for row in rows]
        for row in reading.begin(rows, worth, usual):
            if row.guesses is not None:
                spent += ASK_SECONDS + READ_SECONDS * (row.content_length - read.get(row.request_id, 0))
                read[row.request_id] = row.content_length
        reading.pass_round(8, worth.plain_seconds, saved=0.0)
        decoded += worth.plain_seconds
    assert 0.5 * SHARE * decoded < spent < 1.05 * SHARE * decoded


def test_asking_about_two_rows_in_vain_pays_for_the_calls_that_it_ends_too():
    reading, worth, usual = account(2, slower=0.2)
    spent = decoded = 0.0
    asked, rounds = 0, 4000
    for at in range(rounds):
        has_asked = bool(reading.begin(rows_of(2, room=rounds - at, content=50 + at), worth, usual))
        asked += has_asked
        spent += has_asked * (3 * ASK_SECONDS + END_SECONDS) + 2 * READ_SECONDS
        reading.pass_round(2, worth.plain_seconds, saved=0.0)
        decoded += worth.plain_seconds
    assert asked > 10 and 0.5 * SHARE * decoded < spent < 1.1 * SHARE * decoded


def test_what_saves_more_than_it_takes_goes_on_however_little_the_share_pays():
    reading, worth, usual = account(8, slower=0.05)
    for at in range(300):
        rows = reading.begin(rows_of(8, room=300 - at, content=50 + at), worth, usual)
        reading.pass_round(8, worth.plain_seconds, saved=9 * ASK_SECONDS + 8 * READ_SECONDS)
    assert sum(row.guesses is not None for row in rows) == 8


def test_a_round_that_saved_much_pays_for_one_that_lost_less():
    for lost, goes_on in ((80, True), (700, False)):
        reading, worth, usual = account(2)
        assert reading.begin(rows_of(2), worth, usual)
        for saved in (100, -lost):
            reading.pass_round(2, worth.plain_seconds, saved * ASK_SECONDS)
        assert bool(reading.begin(rows_of(2, content=51), worth, usual)) == goes_on


def test_a_row_is_followed_where_its_index_takes_little_of_its_time():
    reading, worth, _ = account(1, slower=0.01)
    seconds = worth.plain_seconds
    followed = {}
    for at, (content, room) in enumerate(product((10, 1000, 100_000), (8, 64, 512))):
        row = RowState(at, content, room)
        followed[content, room] = reading.may_follow(row, worth)
        takes = WEIGH_SECONDS + READ_SECONDS * (content + room)
        assert followed[content, room] == (takes <= FOLLOW_SHARE * seconds * room)
        later = row._replace(content_length=content + room - 1, room=1)
        assert reading.may_follow(later, worth) == followed[content, room], "it is not given up half-way"
    assert {*followed.values()} == {True, False}
    assert reading.is_on(1)


# --------------------------------------------------------------------------------------------------------- the default


@pytest.mark.parametrize("batch_size", [4, 8, 16])
def test_a_batch_that_repeats_itself_drafts_by_lookup_where_that_pays(batch_size):
    traces = echoes(2 * batch_size, tokens=192)
    costs = costs_of(batch_size)
    run = replay(traces, Adaptive(costs), costs, batch_size)
    by_lookup = [row.num_emitted for one in run.rounds if one.plan.exit_layer == LOOKUP for row in one.rows]
    assert sum(by_lookup) > 0.9 * sum(row.num_emitted for one in run.rounds for row in one.rows)
    assert run.plain_seconds > 4 * run.seconds


def test_a_batch_in_which_it_cannot_pay_makes_no_index_and_is_as_fast_as_plain_decoding(monkeypatch):
    traces, costs = echoes(16), costs_of(8, ragged=8.0)
    read = []
    monkeypatch.setattr(Lookup, "_add", lambda self, position: read.append(position))
    run = replay(traces, Adaptive(costs, drafts=("lookup",)), costs, 8)
    assert not read
    full = [round_ for round_ in run.rounds if len(round_.rows) > 2]
    assert all(round_.plan.exit_layer is None for round_ in full)
    assert run.plain_seconds >= 0.99 * run.seconds


def test_a_round_of_a_batch_drafts_for_rows_with_a_match_and_for_no_others():
    policy = Adaptive(costs_of(4), drafts=("lookup",))
    rows = [RowState(i, 50, 500, found(12 if i % 2 else 0)) for i in range(4)]
    plan = policy.plan(rows)
    assert plan.exit_layer == LOOKUP
    assert [length > 0 for length in plan.draft_lengths] == [False, True, False, True]


@pytest.mark.parametrize("drafts", [("exit",), ("exit", "tree")])
def test_a_batch_drafts_by_lookup_only_where_it_may(drafts):
    run = replay(echoes(8), Adaptive(costs_of(4), drafts=drafts), costs_of(4), 4)
    assert all(one.plan.exit_layer != LOOKUP for one in run.rounds if len(one.rows) > 2)


@pytest.mark.parametrize("drafts", [("lookup",), ("exit", "lookup")])
def test_calls_go_on_by_lookup_and_what_they_foresee_is_no_look(drafts):
    """A look that is due waits where lookup drafts, and one at no layer is not waited for."""
    told = []

    class Asked(Adaptive):
        left = 0  # rounds that the last one by lookup said were steady

        def plan(self, rows):
            plan = super().plan(rows)
            assert plan.shadow is None or not self.left
            self.left = max(0, self.left - 1)
            if len(rows) == 4 and plan.exit_layer == LOOKUP:
                told.append(self.steady.num_rounds)
                self.left = told[-1]
            return plan

    policy = Asked(costs_of(4), drafts=drafts)
    run = replay(echoes(24, tokens=400, period=70), policy, costs_of(4), 4)
    assert len(told) > 30 and sum(n > 0 for n in told) > 0.8 * len(told)
    assert any(one.plan.shadow is not None for one in run.rounds) == ("exit" in drafts)


@pytest.mark.parametrize("is_stored", [False, True])
def test_where_no_call_goes_on_by_lookup_a_due_look_is_foreseen(is_stored):
    """Usual rounds that were announced would be decoded in vain: the first without a match looks at layers."""
    policy = Adaptive(costs_of(4), drafts=("exit", "lookup"))
    rows = [row._replace(guesses=found(12, is_stored=is_stored)) for row in rows_of(4)]
    assert policy.plan(rows).exit_layer == LOOKUP
    policy._looks._credit, policy._looks._due, policy._looks.are_awaited = 1.0, 0, False
    assert policy._looks.are_due
    assert policy.plan(rows).exit_layer == LOOKUP
    assert (policy.steady.num_rounds > 0) != is_stored and policy._looks.are_due == is_stored


def test_rounds_that_nobody_asked_about_make_what_was_weighed_of_a_batch_older():
    policy = Adaptive(costs_of(4), drafts=("lookup",))
    rows = [row._replace(guesses=found(0)) for row in rows_of(4)]
    while not policy.plain_ahead:
        policy.observe(policy.plan(rows), [RowOutcome(row.request_id, 0, 0) for row in rows], Seconds(verify=1e-3))
    ahead, left = policy.plain_ahead, policy._free._crowd.rounds_left
    assert ahead <= left
    policy.pass_plain(ahead, 1e-3 * ahead)
    assert policy._free._crowd.rounds_left == left - ahead


@pytest.mark.parametrize("later", [3, 100])
def test_a_batch_is_weighed_when_a_look_ends_the_call_if_that_comes_soon_after(later):
    policy = Adaptive(costs_of(4), drafts=("exit", "lookup"))
    rows = [row._replace(guesses=found(0)) for row in rows_of(4)]
    policy.plan(rows)
    left, looks = policy._free._crowd.rounds_left - 1, policy._looks
    looks._due, looks.are_awaited = looks._round + left + later + 1, False
    policy._times.decide_after(1000)
    policy.plan(rows)
    assert looks.rounds_left == left + later
    assert policy._free._crowd.rounds_left == policy.steady.num_rounds == left + (later if later == 3 else 0)


def test_looks_that_are_due_for_ever_do_not_put_off_weighing(monkeypatch):
    weighed, weigh = [], Crowd._weigh
    monkeypatch.setattr(Crowd, "_weigh", lambda *given: weighed.append(at) or weigh(*given))
    policy, rows = Adaptive(costs_of(4), drafts=("lookup",)), [r._replace(guesses=found(0)) for r in rows_of(4)]
    policy._looks._credit, policy._looks._due = 1.0, 0
    for at in range(1000):  # noqa: B007  # it is told of above
        policy.plan(rows)
    assert policy._looks.are_due
    assert max(later - first for first, later in pairwise(weighed)) == MOST_KEPT + 1


def test_a_batch_that_shrinks_to_rows_that_will_be_asked_about_foresees_nothing():
    policy = Adaptive(replace(costs_of(4), ragged=None), drafts=("lookup",))
    rows = rows_of(3)
    policy.plan(rows)
    assert not policy.reads_lookup
    policy.plan([row._replace(guesses=None) for row in rows[:2]])
    assert policy.reads_lookup and policy.steady == Steady()


def test_of_the_prompts_of_a_batch_the_first_are_looked_at():
    policy = Adaptive(made_up_costs(LAYERS))
    looked = [policy.seed_layers(RowState(i, 100, 10_000)) for i in range(PROMPTS + 3)]
    assert all(looked[:PROMPTS]) and not any(looked[PROMPTS:])
    policy.plan(rows_of(4))
    assert policy.seed_layers(RowState(9, 100, 10_000)) == ()


@pytest.mark.parametrize("drafts", [("lookup",), ("exit", "lookup"), DRAFTS])
@pytest.mark.parametrize("slower", [0.005, 0.02, 0.1])
def test_to_say_how_long_it_is_steady_changes_nothing(slower, drafts):
    costs, told = costs_of(1, slower=slower), []

    class Asked(Adaptive):
        def plan(self, rows):
            plan = super().plan(rows)
            for _ in range(2):
                told.append(self.steady)
            assert told[-1] == told[-2]
            return plan

    runs = []
    for kind in (Adaptive, Asked):
        traces = [*echoes(3), *echoes(3, tokens=200, period=70), *traces_of_chance(0.7, count=2)]
        runs.append([round_.plan for trace in traces for round_ in replay([trace], kind(costs), costs).rounds])
    assert runs[0] == runs[1]
    assert any(any(one.lengths) for one in told) == (slower > 0.01), "else it takes too long to look into"


class Counted(Adaptive):
    """How often it is asked."""

    asked = 0

    def plan(self, rows):
        self.asked += 1
        return super().plan(rows)


@pytest.mark.parametrize("drafts", [("lookup",), ("exit", "lookup")])
def test_a_row_that_is_too_fast_to_be_followed_has_no_index_and_is_seldom_asked_about(drafts, monkeypatch):
    costs = costs_of(1, slower=0.003)
    read = []
    monkeypatch.setattr(Lookup, "_add", lambda self, position: read.append(position))
    policy = Counted(costs, drafts=drafts)
    run = replay(echoes(2), policy, costs)
    assert not read
    assert len(run.rounds) == 192 and policy.asked < 0.3 * len(run.rounds)


class Unread:
    is_own, is_stored = True, False

    def __getattr__(self, name):
        raise AssertionError(f"{name} makes an index")


@pytest.mark.parametrize("drafts", [("exit",), ("exit", "copies", "tree")])
@pytest.mark.parametrize("num_rows", [1, 2, 4])
def test_a_policy_that_may_not_look_anything_up_wants_to_know_nothing_of_it(drafts, num_rows):
    policy = Adaptive(made_up_costs(LAYERS), drafts=drafts)
    for _ in range(3):
        rows = [RowState(i, 60, 4000, Unread()) for i in range(num_rows)]
        plan = policy.plan(rows)
        assert not (policy.reads_lookup or policy.hears_lookup or policy.reads_ranks)
        outcomes = [RowOutcome(i, n, n, (0.9,) * n) for i, n in enumerate(plan.draft_lengths)]
        policy.observe(plan, outcomes, Seconds())


def test_prompts_are_looked_at_until_something_is_known_of_the_layers_that_may_draft():
    for exit_layers in (None, [5]):
        policy, row = Adaptive(made_up_costs(LAYERS), exit_layers=exit_layers), RowState(0, 100, 10_000)
        layers = policy.seed_layers(row)
        assert layers
        count = (len(layers), 16)
        policy.seed(row, Shadow(layers, np.ones(count, bool), np.full(count, 0.9, np.float32)))
        policy._seeding.begin_round()
        assert policy.seed_layers(row._replace(request_id=1)) == ()
        asked, could = [], policy._decider.could_pay
        policy._decider.could_pay = lambda *given, could=could, asked=asked: asked.append(1) or could(*given)
        for i in range(5):
            policy._seeding.begin_round()
            assert policy.seed_layers(row._replace(request_id=2 + i)) == ()
        assert not asked, "what could pay takes long to find out"
        policy.tell_copies(True)
        policy._seeding.begin_round()
        policy.seed_layers(row._replace(request_id=8))
        assert len(asked) == 1, "copies make other layers pay"
        anew = Adaptive(policy.costs, exit_layers=exit_layers)
        assert anew.seed_layers(row._replace(request_id=9)) == layers
