"""Policies that see plain rounds ahead are not asked about them: who is asked when, and that it changes nothing."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from selfspec.api import Target
from selfspec.control.adaptive import Adaptive
from selfspec.control.fixed import Fixed
from selfspec.control.laps import Seconds
from selfspec.control.plan import LOOKUP, Plan, Steady
from selfspec.control.rows import RowOutcome, RowState
from selfspec.decoding import ahead as ahead_module
from selfspec.decoding import asking as asking_module
from selfspec.decoding.asking import MOST_CHECKED, Asking
from selfspec.decoding.engine import Engine
from selfspec.drafting.lookup import Lookup
from selfspec.drafting.sources import Guesser
from tests.eval.replays import made_up_costs
from tests.helpers import generate, make_prompts
from tests.models import build

LAYERS = 8


def test_policies_are_told_which_rows_are_sampled():
    told = {}

    class Curious(Fixed):
        def plan(self, rows):
            told.update({row.request_id: row.is_sampled for row in rows})
            return super().plan(rows)

    engine = Engine(Target(build("llama")), policy=Curious(1, 2), max_batch_size=3)
    for temperature in (0.0, 0.7, 1.0):
        engine.submit([3, 1, 4], max_new_tokens=5, temperature=temperature)
    assert len(list(engine.run())) > 1 and told == {0: False, 1: True, 2: True}


class Patient:
    """Plain decoding, asked about one round in a few."""

    reads_lookup = True

    def __init__(self, ahead):
        self.plain_ahead = ahead
        self.asked, self.told, self.passed = [], 0, []

    def plan(self, rows):
        self.asked.append([row.request_id for row in rows])
        assert all(row.match >= 0 and row.guesses is not None for row in rows)
        return Plan(None, (0,) * len(rows))

    def pass_plain(self, num_rounds, seconds):
        assert seconds > 0
        self.passed.append(num_rounds)

    def observe(self, plan, outcomes, seconds):
        assert all(outcome.looked is not None for outcome in outcomes)
        self.told += 1


def decode(policy, lengths, num_tokens, **options):
    target, prompts = Target(build("llama")), make_prompts(lengths)
    engine = Engine(target, policy=policy, **options)
    for prompt, count in zip(prompts, num_tokens, strict=True):
        engine.submit(prompt, max_new_tokens=count)
    done = [row.completion for round_ in engine.run() for row in round_.rows if row.completion is not None]
    tokens = [one.tokens for one in sorted(done, key=lambda one: one.request_id)]
    assert tokens == [generate(target.model, p, n) for p, n in zip(prompts, num_tokens, strict=True)]


@pytest.mark.parametrize(("ahead", "passed"), [(0, []), (5, [5, 5, 5]), (100, [])])
def test_it_is_asked_once_for_all_rounds_ahead_and_told_how_many_came(ahead, passed):
    policy = Patient(ahead)
    decode(policy, [7], [24])
    assert len(policy.asked) == policy.told == -(-24 // (ahead + 1))
    assert policy.passed == passed


def test_it_is_asked_when_rows_leave():
    policy = Patient(100)
    decode(policy, [7, 12], [8, 20])
    assert policy.asked == [[0, 1], [1]] and policy.passed == [7]


def test_it_is_asked_when_another_row_takes_the_place_of_one():
    policy = Patient(100)
    decode(policy, [7, 5], [8, 6], max_batch_size=1)
    assert policy.asked == [[0], [1]] and policy.passed == [7]


@pytest.mark.parametrize("ahead", [-1, 2.5])
def test_rounds_ahead_that_are_no_count_are_refused(ahead):
    with pytest.raises(ValueError, match=r"^a policy's plain_ahead must be a whole number of at least 0, got"):
        decode(Patient(ahead), [7], [24])


class Watchful(Patient):
    """Is asked after all where so many of a row's last tokens were there before."""

    def __init__(self, ahead, least, reads_lookup=True, by_branches=False):
        super().__init__(ahead)
        self.steady = Steady(200, (*(0,) * least, 5))
        if by_branches:  # other tokens may be drafted beside those that followed
            self.steady = Steady(200, (0,) * (least + 1), (*(False,) * least, True))
        self.lengths, self.reads_lookup = [], reads_lookup

    def plan(self, rows):
        self.lengths.append(rows[0].content_length)
        return super().plan(rows) if self.reads_lookup else Plan(None, (0,))

    def observe(self, plan, outcomes, seconds):
        self.told += 1


@pytest.mark.parametrize("engine", ["views", "compiled"])
@pytest.mark.parametrize("by_branches", [False, True])
@pytest.mark.parametrize("least", [1, 2, 4])
def test_rounds_ahead_end_where_a_match_is_found_that_matters(engine, least, by_branches, monkeypatch):
    monkeypatch.setattr(ahead_module, "BURST", 60.0)
    target, [prompt] = Target(build("llama"), engine=engine), make_prompts([9])
    policy, ahead, count = Watchful(11, least, by_branches=by_branches), 11, 90
    tokens = target.generate([prompt], max_new_tokens=count, policy=policy)[0].tokens
    assert tokens == generate(target.model, prompt, count)
    content, expected, left = [*prompt, *tokens], [], 0
    for length in range(len(prompt), len(content)):
        if left and Lookup(content[:length]).match < least:
            left -= 1
            continue
        expected.append(length)
        left = ahead
    assert policy.lengths == expected
    assert len(expected) > -(-count // (ahead + 1)), "the text repeats itself, or nothing is tested"
    assert policy.told == len(expected)


@pytest.mark.parametrize("engine", ["views", "compiled"])
@pytest.mark.parametrize(("most", "kept"), [(1, 0), (3, 0), (3, 6), (1 << 20, 0)])
def test_rounds_ahead_end_where_there_is_something_to_learn(engine, most, kept, monkeypatch):
    monkeypatch.setattr(ahead_module, "BURST", 60.0)
    target, [prompt] = Target(build("llama"), engine=engine), make_prompts([9])

    class Learning(Watchful):
        def plan(self, rows):
            rows[0].guesses.take_tally()
            return super().plan(rows)

    policy, ahead, count = Learning(11, 40), 11, 90
    policy.steady = policy.steady._replace(most_surprises=most, kept=kept)
    tokens = target.generate([prompt], max_new_tokens=count, policy=policy)[0].tokens
    content, expected, left = [*prompt, *tokens], [], 0
    lookup = Lookup(told := list(prompt))
    for token in tokens:
        came, _ = ahead - left, lookup.match
        if left and not (came >= kept and sum(lookup.guessed) >= most):
            left -= 1
        else:
            expected.append(len(told))
            lookup.take_tally()
            left = ahead
        told.append(token)
    assert policy.lengths == expected and told == content
    assert (len(expected) > -(-count // (ahead + 1))) == (most < 10)


def test_who_reads_no_lookup_is_not_asked_for_matches():
    policy = Watchful(11, 1, reads_lookup=False)
    decode(policy, [9], [60])
    assert len(policy.lengths) == 5


class Hasty(Fixed):
    """Counts on plain rounds, and drafts."""

    plain_ahead = 7


def test_plans_that_draft_are_followed_once():
    decode(Hasty(2, 4), [7, 5], [24, 9])  # and never beyond a row's room


def test_plans_that_were_fit_are_not_checked_again_as_long_as_there_are_few(monkeypatch):
    checked, plans = [], [Plan(2, (length,)) for length in range(1, MOST_CHECKED + 2)]
    check = asking_module.check_plan
    monkeypatch.setattr(asking_module, "check_plan", lambda plan, *fit: checked.append(plan) or check(plan, *fit))
    policy, rows = SimpleNamespace(), [SimpleNamespace(request_id=0, room=9, told=lambda reads: None)]
    asking = Asking(policy, 4)

    def follow(plan, rows=rows):
        policy.plan = lambda told: plan
        asking.plan(rows)

    for plan in [*plans[:MOST_CHECKED], *plans[:MOST_CHECKED]]:
        follow(plan)
    assert checked == plans[:MOST_CHECKED]
    follow(plans[-1])
    follow(plans[1])
    assert len(checked) == MOST_CHECKED + 1
    follow(plans[0])
    assert len(checked) == MOST_CHECKED + 2, "that was longest ago"
    with pytest.raises(ValueError, match="must be one per row"):
        follow(plans[0], rows * 2)
    assert len(checked) == MOST_CHECKED + 3, "of other rows it is another plan"


def asked(policy, num_rounds):
    """In which rounds it is asked, for a model whose layers are never right."""
    made, seconds, at = [], {"verify": 1e-3, "head": 1e-4}, 0
    while at < num_rounds:
        plan = policy.plan([RowState(0, 40 + at, num_rounds - at)])
        made.append(at)
        drafted = plan.draft_lengths[0]
        more = {"draft": 1e-3 if plan.exit_layer else 0.0, "shadow": 2e-4 if plan.shadow else 0.0}
        policy.observe(plan, [RowOutcome(0, drafted, 0, (0.9,) * drafted)], Seconds(**seconds, **more))
        came = min(policy.plain_ahead, num_rounds - at - 1)
        if policy.plain_ahead:
            policy.pass_plain(came, 1e-3 * came)
        at += 1 + came
    return made


# Without layers that may draft there is nothing to look at, as where none could pay were it always right.
@pytest.mark.parametrize(("drafts", "most"), [(("exit", "lookup"), 200), (("exit",), 120), (("lookup",), 120)])
def test_the_default_policy_is_seldom_asked_where_drafts_do_not_pay(drafts, most):
    assert len(asked(Adaptive(made_up_costs(LAYERS), drafts=drafts), 600)) < most


def test_the_default_policy_looks_another_row_up_at_its_beginning_however_long_it_saw_plain_rounds_ahead():
    policy = Adaptive(made_up_costs(LAYERS))
    asked(policy, 300)
    policy.pass_plain(2, 2e-3)
    repeats, new = ([*range(10)] * 8, [*range(80)])
    for request, content in enumerate((repeats, new), 1):
        assert policy.reads_lookup
        plan = policy.plan([RowState(request, 80, 200, Guesser(content))])
        assert (plan.exit_layer == LOOKUP) == (content is repeats)


class Changing(Watchful):
    """Says at first that no match matters, and then, about rounds that were decoded by that, that every one does."""

    def plan(self, rows):
        self.steady = Steady(60, lengths=(0,)) if len(self.lengths) < 2 else Steady(60, lengths=(0, -1))
        self.plain_ahead = 0 if len(self.lengths) < 2 else 100
        return super().plan(rows)


def test_a_policy_that_minds_matches_after_all_is_asked_about_rounds_that_wait(monkeypatch):
    monkeypatch.setattr(ahead_module, "BURST", 60.0)
    target, [prompt], count = Target(build("llama"), engine="compiled"), make_prompts([9]), 60
    policy = Changing(0, 1)
    tokens = target.generate([prompt], max_new_tokens=count, policy=policy)[0].tokens
    content = [*prompt, *tokens]
    matched = [n for n in range(len(prompt) + 3, len(content)) if Lookup(content[:n]).match]
    assert matched and {*matched} <= {*policy.lengths}
