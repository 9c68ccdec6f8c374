"""Replay predicts the engine: plans, drafts, emitted tokens and all observations of a policy."""

from __future__ import annotations

from dataclasses import replace

import pytest

from eval.models import open_llm
from eval.replay import make
from selfspec.control.adaptive import Adaptive
from selfspec.control.costs import Table
from selfspec.control.published.layerskip import Fixed
from selfspec.control.registry import POLICIES
from selfspec.core import LOOKUP
from tests.eval.models import tiny_llm
from tests.eval.replays import Dice, Scene, Setting, assert_same, replayed
from tests.helpers import make_prompts
from tests.slow import slow

ALONE, TOGETHER = Setting(), Setting(max_batch_size=2, prefill_chunk=24)
SAMPLED = [setting._replace(temperature=0.8) for setting in (ALONE, TOGETHER)]
SETTINGS = [ALONE, TOGETHER, *SAMPLED]


IDS = ["greedy", "greedy, batch", "sampled", "sampled, batch"]
TEXTS = ["def add(a, b):\n    return", "for name in names:\n    if name", "class SplitModel:\n    def __init__(self"]


@pytest.fixture(scope="module")
def demo():
    llm = open_llm("demo")
    return Scene(llm, [llm.tokenizer(text)["input_ids"] for text in TEXTS], (48, 40, 48))


@pytest.fixture(scope="module")
def small():
    return Scene(tiny_llm(), make_prompts((40, 1, 60, 7, 2), seed=5), (48, 30, 61, 1, 44))


def compare(scene, policy, setting):
    """Decode with a new policy, replay with another, and compare the two call by call."""
    traces = scene.traces(setting.temperature)
    calls, emitted, outputs = scene.live(policy(), setting)
    again, predicted = replayed(traces, policy(), scene.costs, setting)
    for number, (here, there) in enumerate(zip(calls, again, strict=True)):
        assert_same(here, there, f"call {number}, {here[0]}")
    assert emitted == predicted
    assert outputs == [trace.tokens for trace in traces]


def factory(name, scene):
    if "dice" in name:
        return lambda: Dice(int(name[-1]), scene.num_layers)
    return lambda: make(name, scene.costs)


@pytest.mark.parametrize("setting", [slow(ALONE), slow(TOGETHER), slow(SAMPLED[0]), SAMPLED[1]], ids=IDS)
@pytest.mark.parametrize("name", [*POLICIES, "dice 0", "dice 1", "dice 2", "dice 3"])
def test_replay_predicts_every_round_of_a_random_model(small, name, setting):
    compare(small, factory(name, small), setting)


@pytest.mark.slow
@pytest.mark.parametrize("setting", SETTINGS, ids=IDS)
@pytest.mark.parametrize("name", [*POLICIES, "dice 7"])
def test_replay_predicts_every_round_of_the_embedded_model(demo, name, setting):
    compare(demo, factory(name, demo), setting)


@pytest.mark.slow
@pytest.mark.parametrize(("temperature", "lengths"), [(0.0, (35, 45, 30, 40)), (0.8, (70, 90, 60, 80))])
def test_replay_predicts_every_round_of_a_batch_that_lookup_drafts(temperature, lengths):
    llm = open_llm("demo")
    prompts = [llm.tokenizer(text * 3)["input_ids"] for text in (*TEXTS, "import os\n")]
    scene = Scene(llm, prompts, lengths)
    costs = replace(scene.costs, ragged=Table.of({2: 1.0, 4: 1.0}))
    scene.costs, setting = costs, Setting(3, temperature, 24)
    compare(scene, lambda: Adaptive(costs, drafters=("exit", "lookup")), setting)
    policy = Adaptive(costs, drafters=("exit", "lookup"))
    calls = replayed(scene.traces(temperature), policy, costs, setting)[0]
    rounds = [round_ for name, told, *_ in calls if name == "observe" for round_ in told]
    assert any(exit_layer == LOOKUP and len(rows) == 3 for exit_layer, rows in rounds)


@pytest.mark.slow
@pytest.mark.parametrize("setting", SETTINGS, ids=IDS)
@pytest.mark.parametrize("drawn", [(2, 3), (4, 6, 0.4), (8, 16, 0.7)])
def test_replay_predicts_every_round_that_copies_draft(demo, drawn, setting):
    assert all(len(trace.copied) == 8 for trace in demo.traces(setting.temperature))
    compare(demo, lambda: Fixed(*drawn, draft_bits=4), setting)
