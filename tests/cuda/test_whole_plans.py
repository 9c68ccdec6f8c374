"""Recorded rounds, over a part of the vocabulary, too: they are the rounds of the eager executor."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from selfspec.control.fixed import Fixed
from selfspec.control.plan import NUM_BINS, Plan, SurvivalStop
from selfspec.executors.cuda.graphs import Graphs
from selfspec.executors.eager import EagerExecutor
from selfspec.kernels.suite import REFERENCE
from tests.cuda.standin import with_runner
from tests.cuda.tape import Tape
from tests.helpers import Schedule, audit_cache, decode, make_prompts
from tests.models import build, some_heads, tiny
from tests.target import Target

WAYS = {"temperature": [0.0, 0.8, 1.0, 0.7], "top_k": [0, 0, 9, 0], "top_p": [1.0, 0.9, 1.0, 1.0], "seed": [0, 1, 2, 3]}


class Layers(Schedule):
    """Throws dice for all that layers may draft in one round, with few shapes of rounds."""

    def __init__(self, seed):
        super().__init__(seed, 4, lookup=False)

    def plan(self, rows):
        dice = self.random
        rates = tuple(dice.random() for _ in range(NUM_BINS))
        plan = Plan(
            dice.choice([1, 3]),
            (4, *(dice.randint(0, 4) for _ in rows[1:])),
            dice.choice([0.0, 0.4]),
            stop=dice.choice([None, SurvivalStop(rates, dice.random() / 2)]),
            draft_vocab=dice.choice([None, 40]),
        )
        return replace(plan, min_confidence=0.0) if plan.stop is not None else plan


def rounds_of(target, prompts, policy, audit=None, **options):
    """What a policy is told, round by round, and the completions."""
    done = decode(target, prompts, policy, audit, {"page_size": 8, "burst": 60.0, "max_batch_size": 32}, **options)
    told = []
    for plan, rounds in policy.seen:
        told.append((plan, [(one.exit_layer, [tuple(row) for row in one.rows]) for one in rounds]))
    return told, done, policy.outcomes


def check_whole(lengths, seed, sampled, new=10, heads=None, kernels=REFERENCE, max_rows=8):
    """Recorded rounds come to what the eager executor's come to, and keep the tokens of plain decoding."""
    prompts, model = make_prompts(lengths, seed), build("llama")
    options = {name: (values * len(lengths))[: len(lengths)] for name, values in WAYS.items()} if sampled else {}
    options |= {"max_new_tokens": [new + 3 * (i % 3) for i in range(len(lengths))]}
    wanted = decode(tiny("llama"), prompts, "plain", None, {"max_batch_size": 32}, **options)
    eager, _, _ = rounds_of(Target(model, engine="views", exit_heads=heads), prompts, Layers(seed), **options)
    target = with_runner(Target(model, engine="views", exit_heads=heads), max_rows=max_rows, kernels=kernels)
    whole, done, outcomes = rounds_of(target, prompts, Layers(seed), lambda made: audit_cache(made, model), **options)
    assert [one.tokens for one in done] == [one.tokens for one in wanted]
    assert len(whole) == len(eager)
    for (plan, rounds), (same, others) in zip(whole, eager, strict=True):
        assert plan == same
        for (layer, rows), (other, expected) in zip(rounds, others, strict=True):
            assert layer == other
            for one, two in zip(rows, expected, strict=True):
                assert one[:3] == two[:3] and one[4:] == two[4:]
                assert one[3] == pytest.approx(two[3], abs=1e-4)
    return outcomes


@pytest.fixture
def only_recorded(monkeypatch):
    """Fails where a round of the recording executor is not one recording."""
    honest = EagerExecutor.round

    def careful(self, rows, draft):
        assert self.stack.runner is None, "a round was run by segments"
        return honest(self, rows, draft)

    monkeypatch.setattr(EagerExecutor, "round", careful)


@pytest.mark.usefixtures("only_recorded")
@pytest.mark.parametrize(("lengths", "seed", "sampled"), [([5, 1, 30], 1, False), ([12], 0, True)])
def test_rounds_are_those_of_the_eager_executor(lengths, seed, sampled):
    check_whole(lengths, seed, sampled)


@pytest.mark.slow
@pytest.mark.usefixtures("only_recorded")
def test_exit_heads_draft_in_recorded_rounds():
    heads = some_heads((1, 3))
    outcomes = check_whole([7, 22], 5, False, heads=heads)
    assert outcomes != check_whole([7, 22], 5, False), "the heads draft otherwise"


@pytest.mark.slow
@pytest.mark.usefixtures("only_recorded")
def test_many_rows_draft_in_one_recording():
    check_whole([1 + i % 9 for i in range(19)], 2, True, new=3, max_rows=32)


# -------------------------------------------------------------------------------------------- parts of the vocabulary


def test_recordings_draft_over_a_part_that_is_ranked_anew_and_over_edited_heads():
    target, [prompt] = with_runner(Target(build("llama"), engine="views")), make_prompts([9])
    frequencies, runner = target.stack.frequencies, target.stack.runner

    def drafted():
        request, rounds = target.requests([prompt], {"max_new_tokens": 9}), []
        [plain] = target.generate([prompt], policy="plain", max_new_tokens=9)
        for round_ in target.rounds(request, policy=Fixed(2, 3, draft_vocab=20)):
            rounds += round_.rows
        assert [token for row in rounds for token in row.tokens] == plain.tokens
        return {token for row in rounds for token in row.drafted}

    assert drafted() <= frequencies.part(20).members
    before, recorded = frequencies.part(20).version, runner.graphs.num_recorded
    frequencies.add(list(range(70, 90)) * 50, written=True)
    later = drafted()
    assert frequencies.part(20).version > before and later <= frequencies.part(20).members == {*range(70, 90)}
    assert runner.graphs.num_recorded == recorded, "the same recordings"
    with torch.no_grad():
        target.model.lm_head.weight[75] += 9 * target.model.lm_head.weight[80]
    assert drafted() != later
    assert runner.graphs.num_recorded == recorded


class Held:
    """Inputs of a recording."""

    def __init__(self, *shared):
        self.num_bytes, self.shared = 1, shared


def test_bytes_that_several_recordings_read_count_once():
    part, buffer = Held(), torch.zeros(4)
    part.num_bytes = 1000
    graphs = Graphs(Tape(num_bytes=10), budget=1040)
    for key in range(3):
        graphs.record(key, Held(part), lambda: (buffer + 1,))
    assert graphs.num_bytes == 1033 and len(graphs) == 3
    graphs.record(3, Held(), lambda: (buffer + 1,))
    assert graphs.num_bytes == 1033 and len(graphs) == 3, "over the budget, so that one is dropped"


# ------------------------------------------------------------------------------------------------------ known faults


def noise_by_index_in_the_part(logits, sampling, names=None):
    picks, confidences = REFERENCE.pick(logits, sampling)
    return picks if names is None else names[picks], confidences


@pytest.mark.slow
def test_noise_of_other_tokens_is_noticed():
    with pytest.raises(AssertionError):
        check_whole([7, 22, 13], 3, True, new=24, kernels=REFERENCE._replace(pick=noise_by_index_in_the_part))
