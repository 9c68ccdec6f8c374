"""What calls of one target have seen: later ones go on with it, and it is written down for whoever asks."""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np
import pytest
import torch

from eval.replay import replay
from selfspec import profile
from selfspec.api import Target
from selfspec.control import policies
from selfspec.control.adaptive import Adaptive
from tests.eval.replays import made_up_costs, trace_of
from tests.models import build

LAYERS = 8
PROMPTS = ([5, 6, 7, 8] * 6, [9, 3, 4], [5, 6, 7, 8] * 6)


class Counted(Adaptive):
    """Counts how many were made, and the rounds that they were told of."""

    made: int = 0
    rounds: int = 0

    def __init__(self, *given, **named):
        super().__init__(*given, **named)
        Counted.made += 1

    def plan(self, rows):
        Counted.rounds += 1
        return super().plan(rows)

    def pass_plain(self, num_rounds, seconds):
        Counted.rounds += num_rounds
        super().pass_plain(num_rounds, seconds)


@pytest.fixture
def target(monkeypatch):
    """A target whose costs are made up, in a program that counts its policies."""
    made = Target(build("llama"))
    costs = made_up_costs(made.stack.num_layers)
    monkeypatch.setattr(profile, "costs_of", lambda stack, batch_size: costs)
    monkeypatch.setattr(policies, "Adaptive", Counted)
    monkeypatch.setattr(Counted, "made", 0)
    monkeypatch.setattr(Counted, "rounds", 0)
    return made


def tokens(target, prompt, **options):
    [done] = target.generate([prompt], max_new_tokens=40, **options)
    return done.tokens


def test_calls_go_on_with_one_policy_and_write_what_plain_decoding_does(target):
    for prompt in PROMPTS * 2:
        assert tokens(target, prompt) == tokens(target, prompt, policy="plain")
    assert Counted.made == 1
    other = {"drafts": ["exit", "lookup"], "policy": "adaptive"}
    for _ in range(2):
        done = [target.generate([*PROMPTS], **options) for options in ({"policy": "plain"}, {}, other)]
        assert [[one.tokens for one in each] for each in done[1:]] == 2 * [[one.tokens for one in done[0]]]
        assert Counted.made == 2  # one of other drafts
    tokens(target, PROMPTS[0], exit_layer=1)
    assert Counted.made == 2 and target.generate([PROMPTS[0]], exit_layer=1)[0].stats.num_draft_tokens


def test_what_a_call_has_seen_is_known_at_once(target):
    before = None
    for prompt in PROMPTS:
        tokens(target, prompt)
        assert target.prior is target.prior  # written once
        assert target.prior != before and np.sum(target.prior["misses"]) > 0
        before = target.prior
    assert Counted.made == 1


def test_the_policy_is_told_of_every_round_of_a_call(target):
    rounds = [round_ for prompt in PROMPTS for round_ in target.stream([prompt], max_new_tokens=60, drafts=["exit"])]
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
    streams = [target.stream([prompt], max_new_tokens=40) for prompt in PROMPTS]
    assert Counted.made == 3
    done = [[] for _ in streams]
    for rounds in zip(*streams, strict=False):
        for kept, round_ in zip(done, rounds, strict=True):
            kept += [token for row in round_.rows for token in row.tokens]
    assert done[1][:8] == tokens(target, PROMPTS[1])[:8]
    for stream in streams:
        stream.close()
    tokens(target, PROMPTS[0])
    assert Counted.made == 3  # one of theirs goes on


def test_an_engine_that_is_remembered_keeps_its_policy_to_itself(target):
    engine = target_engine(target)
    target.remember(engine)
    tokens(target, PROMPTS[0])
    assert Counted.made == 2
    assert np.sum(engine.policy.state()["misses"]) < np.sum(target.prior["misses"])


def target_engine(target):
    from selfspec import Engine

    engine = Engine(target)
    engine.submit(PROMPTS[0], max_new_tokens=40)
    for _ in engine.run():
        pass
    return engine


def test_a_policy_that_a_caller_made_stays_theirs(target):
    own = Adaptive(target.costs())
    tokens(target, PROMPTS[0], policy=own)
    assert target.remembered._idle == {}
    assert target.prior == own.state()


def test_what_a_copy_sees_is_its_own(target):
    tokens(target, PROMPTS[0])
    copy = target.remembered.copy()
    before = copy.prior
    assert before == target.prior
    tokens(target, PROMPTS[1])
    assert copy.prior == before != target.prior


def test_calls_in_several_threads_never_share_a_policy(target):
    wanted, wrong = {i: tokens(target, PROMPTS[i], policy="plain") for i in range(3)}, []

    def call(i):
        for _ in range(4):
            with torch.inference_mode():
                if tokens(target, PROMPTS[i]) != wanted[i]:
                    wrong.append(i)

    threads = [threading.Thread(target=call, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and 1 <= Counted.made <= 12


def looping(seed, size):
    """A text that goes round in circles of so many tokens, and what layers would have said of it."""
    rng = np.random.default_rng(seed)
    hits = rng.random((LAYERS - 1, 96)) < 0.6
    trace = trace_of(hits, rng.random(hits.shape, np.float32), rng, 24)
    content = [3 + i % size for i in range(24 + 96)]
    return replace(trace, prompt=tuple(content[:24]), tokens=tuple(content[24:]))


@pytest.mark.parametrize("drafts", [["lookup"], ["exit", "lookup", "tree"]])
def test_texts_of_calls_one_after_another_are_decoded_as_those_of_one_engine_are(drafts):
    """Rows of a later call have the numbers of earlier ones, and here their lengths, too."""
    costs = made_up_costs(LAYERS)
    first = Adaptive(costs, drafts=drafts)
    replay([looping(9, 7)], first, costs)
    traces = [looping(1, 5), looping(2, 1000), looping(3, 11), looping(4, 1000), looping(5, 3)]
    at_once = replay(traces, Adaptive(costs, first.state(), drafts=drafts), costs).rounds
    policy, one_by_one = Adaptive(costs, first.state(), drafts=drafts), []
    for trace in traces:
        policy.forget_rows()
        one_by_one += replay([trace], policy, costs).rounds
    assert [(r.plan, r.rows[0][1:]) for r in one_by_one] == [(r.plan, r.rows[0][1:]) for r in at_once]
