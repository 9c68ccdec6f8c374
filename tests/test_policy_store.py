"""Calls of one model continue with the policy of the call before, whose statistics are exported for others."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from math import inf

import pytest

from selfspec import SamplingParams
from selfspec.calibrate import profile
from selfspec.control import registry
from selfspec.control.acceptance import is_prior
from selfspec.control.adaptive import Adaptive
from tests.control.rounds import costs as made_up_costs
from tests.helpers import tokens_of
from tests.models import build
from tests.target import Target

PROMPTS = ([5, 6, 7, 8] * 6, [9, 3, 4], [5, 6, 7, 8] * 6)


class Counted(Adaptive):
    """Counts how many were made, the rounds that they were told of, and threads that met another one inside.

    With `others`, a call inside a policy waits until as many threads are inside one, once.
    """

    made: int = 0
    latest: Adaptive | None = None
    rounds: int = 0
    met: int = 0
    forgotten: int = 0
    others: threading.Barrier | None = None

    def __init__(self, *given, **named):
        self.inside: list[int] = []
        super().__init__(*given, **named)
        Counted.made += 1
        Counted.latest = self

    @contextmanager
    def alone(self):
        self.inside.append(threading.get_ident())
        if (others := Counted.others) is not None:
            others.wait()
        yield
        Counted.met += len(set(self.inside)) > 1
        self.inside.remove(threading.get_ident())

    def plan(self, rows):
        with self.alone():
            return super().plan(rows)

    def observe(self, plan, rounds):
        Counted.rounds += len(rounds)
        super().observe(plan, rounds)

    def state(self):
        with self.alone():
            return super().state()

    def forget_rows(self):
        Counted.forgotten += 1
        super().forget_rows()


@pytest.fixture
def target(monkeypatch):
    """A target whose costs are made up, in a program that counts its policies."""
    made = Target(build("llama"))
    costs = made_up_costs()
    monkeypatch.setattr(profile, "costs_of", lambda split, batch_size: costs)
    monkeypatch.setattr(registry, "Adaptive", Counted)
    monkeypatch.setattr(Counted, "latest", None)
    for name in ("made", "rounds", "met", "forgotten"):
        monkeypatch.setattr(Counted, name, 0)
    return made


def tokens(target, prompt, **options):
    [done] = target.generate([prompt], max_tokens=40, **options)
    return done.token_ids


def test_calls_go_on_with_one_policy_and_write_what_plain_decoding_does(target):
    for prompt in PROMPTS * 2:
        assert tokens(target, prompt) == tokens(target, prompt, policy="plain")
    assert Counted.made == 1 and Counted.forgotten == 2 * len(PROMPTS)
    other = {"drafters": ["exit", "lookup"], "policy": "adaptive"}
    for _ in range(2):
        done = [target.generate([*PROMPTS], **options) for options in ({"policy": "plain"}, {}, other)]
        assert [tokens_of(each) for each in done[1:]] == 2 * [[one.token_ids for one in done[0]]]
    assert Counted.made == 4  # of other drafts, and of all again, from what was seen meanwhile
    tokens(target, PROMPTS[0], **other)
    assert Counted.made == 4
    tokens(target, PROMPTS[0], exit_layer=1)
    assert target.generate([PROMPTS[0]], exit_layer=1)[0].stats.num_draft_tokens
    tokens(target, PROMPTS[0], exact=True, **other)
    assert Counted.made == 5


def test_a_policy_of_other_costs_is_left_and_what_it_saw_is_kept(target, monkeypatch):
    tokens(target, PROMPTS[0])
    tokens(target, PROMPTS[1])
    seen = Counted.latest.state()
    others = made_up_costs(slow_batch=4)
    monkeypatch.setattr(target, "costs", lambda *given, **named: others)
    made = []
    monkeypatch.setattr(registry, "Adaptive", lambda costs, prior, *more: made.append(prior) or Adaptive(costs, prior))
    tokens(target, PROMPTS[0])
    assert made == [seen]


def test_what_is_saved_is_all_that_was_seen(target, monkeypatch):
    saved = []
    monkeypatch.setattr(profile, "save_prior", lambda split, prior: saved.append(prior))
    target.save_prior()
    assert saved == []
    for prompt in PROMPTS:
        tokens(target, prompt)
    policy = Counted.latest
    target.save_prior()
    target.prior = {"of": "somebody"}
    target.save_prior()
    target.prior = None
    tokens(target, PROMPTS[0])
    under_way = target.llm().stream([PROMPTS[0]], SamplingParams(max_tokens=40))
    next(under_way)  # it has the policy to itself, but the first call after that was written down at once
    target.save_prior()
    assert saved[:2] == [policy.state(), {"of": "somebody"}] and saved[2] not in saved[:2]


@pytest.mark.parametrize("problem", [KeyboardInterrupt, ValueError])
@pytest.mark.parametrize("state", [None, lambda self: 1 / 0, lambda self: {"hits": [float("nan")]}])
def test_a_policy_that_was_interrupted_decides_no_more(target, monkeypatch, problem, state):
    def interrupted(*given):
        monkeypatch.undo()
        if state is not None:
            monkeypatch.setattr(Adaptive, "state", state)  # as of one that is half changed
        raise problem

    monkeypatch.setattr("selfspec.control.adaptive.DECISION_SHARE", inf)  # however long the last decision took
    tokens(target, PROMPTS[0])
    costs, wanted = target.costs(), tokens(target, PROMPTS[2], policy="plain")
    monkeypatch.setattr("selfspec.control.adaptive.decide", interrupted)
    with pytest.raises(problem):
        tokens(target, PROMPTS[2])
    assert is_prior(target.prior, target.split.num_layers)
    monkeypatch.undo()
    monkeypatch.setattr(profile, "costs_of", lambda split, batch_size: costs)
    monkeypatch.setattr(registry, "Adaptive", Counted)
    before = Counted.made
    assert tokens(target, PROMPTS[2]) == wanted
    assert Counted.made == before + 1


def test_the_policy_observes_every_round_of_a_call(target):
    rounds = []
    for prompt in PROMPTS:
        target.generate([prompt], max_tokens=60, drafters=["exit"], on_round=rounds.append)
    assert Counted.rounds == sum(round_.plan is not None for round_ in rounds) > 60


def test_who_sets_statistics_has_the_next_call_start_from_them(target):
    tokens(target, PROMPTS[0])
    before = target.prior
    tokens(target, PROMPTS[1])
    target.prior = before
    assert target.prior is before
    tokens(target, PROMPTS[1])
    assert Counted.made == 2


def test_a_call_that_begins_while_another_is_under_way_has_a_policy_of_its_own(target):
    tokens(target, PROMPTS[0])
    streams = [target.llm().stream([prompt], SamplingParams(max_tokens=40)) for prompt in PROMPTS]
    assert Counted.made == 3
    done = [[] for _ in streams]
    for parts in zip(*streams, strict=False):
        for kept, part in zip(done, parts, strict=True):
            kept += part.outputs[0].token_ids
    assert done[1] and done[1] == tokens(target, PROMPTS[1])[: len(done[1])]
    for stream in streams:
        stream.close()
    assert tokens(target, PROMPTS[2]) == tokens(target, PROMPTS[2], policy="plain")
    assert Counted.made == 3  # one of theirs goes on


def test_a_policy_that_a_caller_made_stays_theirs(target):
    own = Adaptive(target.costs())
    tokens(target, PROMPTS[0], policy=own)
    seen = own.state()
    assert target.prior == seen
    tokens(target, PROMPTS[1])
    assert Counted.made == 1 and own.state() == seen != target.prior


def test_what_a_copy_sees_is_its_own(target):
    tokens(target, PROMPTS[0])
    copy = target.policies.copy()
    before = copy.prior
    assert before == target.prior
    tokens(target, PROMPTS[1])
    assert copy.prior == before != target.prior


def test_calls_in_several_threads_never_share_a_policy(target, monkeypatch):
    wanted, wrong = {i: tokens(target, PROMPTS[i], policy="plain") for i in range(3)}, []
    meet = threading.Barrier(3, action=lambda: setattr(Counted, "others", None))
    monkeypatch.setattr(Counted, "others", meet)

    def call(i):
        for _ in range(4):
            if tokens(target, PROMPTS[i]) != wanted[i] or target.prior is None:
                wrong.append(i)

    threads = [threading.Thread(target=call, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and not Counted.met and Counted.made >= 3


@pytest.mark.parametrize(
    "options",
    [
        {"policy": "adaptive", "exit_layer": [1]},
        {"drafters": [["exit"]]},
        {"policy": "adaptive", "exit_layer": 99},
        {"policy": ["adaptive"]},
    ],
)
def test_bad_options_are_refused_in_later_calls_as_in_the_first(target, options):
    said = []
    for _ in range(2):
        with pytest.raises((TypeError, ValueError)) as problem:  # whichever it is, it is the same
            tokens(target, PROMPTS[0], **options)
        said.append((problem.type, str(problem.value)))
        tokens(target, PROMPTS[0])
    assert said[0] == said[1]
    tokens(target, PROMPTS[0])
    assert Counted.made == 1
