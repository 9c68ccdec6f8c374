"""Recordings that are made before decoding: those of all plans that a policy names, within limits."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import cache, partial
from itertools import chain, repeat

import pytest
import torch

from selfspec import SamplingParams
from selfspec.control.adaptive import Adaptive
from selfspec.control.costs import Costs, RoundLimits, Table
from selfspec.control.published.layerskip import Fixed
from selfspec.core import Plan
from selfspec.executors.cuda import body_choice
from selfspec.executors.cuda import runner as runners
from selfspec.executors.cuda.fused_body import FusedBody
from selfspec.loading import target as targets
from tests.cuda.standin import runner_of, with_runner
from tests.cuda.tape import Failing
from tests.helpers import Run, engine_of, make_prompts, tokens_of
from tests.helpers import decode as decoded
from tests.models import build
from tests.target import Target

LIMITS = RoundLimits(longest=15, tokens=256, rows=32)
PARAMS = SamplingParams(max_tokens=48)


def costs(num_layers):
    """Layers of a tenth of a millisecond and a head that takes as long as four of them."""
    layer, rows = 1e-4, (1, 2)
    rounds = {n: Table.of({1: (num_layers + 4) * layer, 16: (num_layers + 5) * layer}) for n in rows}
    steps = {n: Table.of({1: layer, num_layers: num_layers * layer}) for n in rows}
    nothing = Table.of({1: 0.0})
    return Costs(num_layers, rounds, steps, Table.of({1: 4 * layer}), nothing, nothing, recorded=LIMITS)


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """However slow the machine is, all is recorded before decoding."""
    monkeypatch.setattr(runners, "START_SECONDS", float("inf"))


class Often(Adaptive):
    """Goes through its own list, besides what it decides, and drafts by lookup."""

    def __init__(self, *given):
        super().__init__(*given)
        self.kinds, self._asked = set(), 0

    def plan(self, rows):
        self._asked += 1
        plan = super().plan(rows)
        if self._asked % 2:
            likely = self.likely(len(rows))
            chosen = likely[self._asked // 2 % len(likely)]
            lookups = None if chosen.shadow else plan.lookups  # as in its own plans
            plan = replace(chosen, num_rounds=2, lookups=lookups, keep_confidence=chosen.exit_layer is not None)
        self.kinds.add((plan.exit_layer, plan.shadow is not None, max(plan.draft_lengths)))
        return plan


small = partial(build, "llama", num_hidden_layers=2)


@cache
def wanted(num_rows, make=small):
    return tokens_of(decoded(Target(make()), prompts(num_rows), "plain", PARAMS))


def prompts(num_rows):
    return make_prompts([9, 17, 5, 12][:num_rows])


@pytest.mark.parametrize("num_rows", [1, 3])
def test_adaptive_makes_no_recording_while_decoding(num_rows, caplog):
    target = with_runner(Target(build("llama"), backend="views"), max_rows=32)
    policy = Often(costs(target.split.num_layers))
    with caplog.at_level(logging.INFO, "selfspec"):
        run = Run(engine_of(target, policy, max_num_seqs=num_rows))
    graphs = target.split.runner.graphs
    recorded = graphs.num_recorded
    assert f"recorded rounds before decoding: {recorded} recordings in" in caplog.text and "MiB" in caplog.text
    for prompt in prompts(num_rows):
        run.add(prompt, PARAMS)
    run.finish()
    assert tokens_of(run.outputs) == wanted(num_rows, partial(build, "llama"))
    assert len(policy.kinds) > 5 and any(row.drafted for one in run.rounds for row in one.rows)
    assert graphs.num_recorded == recorded and target.split.runner.refused is None
    del run
    engine_of(target, Often(costs(target.split.num_layers)), max_num_seqs=num_rows)
    assert graphs.num_recorded == recorded, "a second engine finds them"


def test_rounds_of_a_fixed_exit_layer_are_recorded_before_decoding():
    target = with_runner(Target(small(), backend="views"))
    run = Run(engine_of(target, Fixed(1, 3), max_num_seqs=3))
    recorded = target.split.runner.graphs.num_recorded
    assert recorded == 6, "plain and drafted rounds of 1, 2 and up to 4 rows"
    for prompt in prompts(3):
        run.add(prompt, PARAMS)
    run.finish()
    assert tokens_of(run.outputs) == wanted(3) and target.split.runner.graphs.num_recorded == recorded


@pytest.mark.parametrize(("name", "limit"), [("START_SECONDS", -1.0), ("START_BYTES", 1 << 20)])
def test_what_is_beyond_the_limits_is_recorded_when_it_is_used(name, limit, caplog, monkeypatch):
    monkeypatch.setattr(runners, name, limit)
    target = with_runner(Target(small(), backend="views"), num_bytes=1 << 20)
    with caplog.at_level(logging.INFO, "selfspec"):
        run = Run(engine_of(target, Fixed(1, 3), max_num_seqs=3))
    recorded = target.split.runner.graphs.num_recorded
    assert recorded == (0 if name == "START_SECONDS" else 1)
    assert (recorded == 0) or "; 5 more at their first use" in caplog.text
    for prompt in prompts(3):
        run.add(prompt, PARAMS)
    run.finish()
    assert tokens_of(run.outputs) == wanted(3) and target.split.runner.graphs.num_recorded > recorded


def test_short_memory_ends_what_is_recorded_before_decoding(caplog):
    target = Target(small(), backend="views")
    tape = Failing(torch.OutOfMemoryError("no memory"), {4})
    graphs = (runner := runner_of(target.split, tape=tape)).graphs
    target.split.runner = runner
    with caplog.at_level(logging.INFO, "selfspec"):
        run = Run(engine_of(target, Fixed(1, 3), max_num_seqs=3))
    assert len(graphs) == graphs.num_recorded == 3 and "; 3 more at their first use" in caplog.text
    for prompt in prompts(3):
        run.add(prompt, PARAMS)
    run.finish()
    assert tokens_of(run.outputs) == wanted(3) and graphs.num_recorded > 3 and runner.refused is None


def test_plain_rounds_of_all_numbers_of_rows_come_first(monkeypatch):
    target, asked = with_runner(Target(small(), backend="views")), []
    monkeypatch.setattr(target.split.runner, "prepare", lambda cache, wanted: asked.extend(wanted))
    engine_of(target, Fixed(1, 3), max_num_seqs=5)
    assert [(rows, plan.exit_layer) for rows, plan in asked] == [
        *[(rows, None) for rows in (5, 1, 2, 4)],
        *[(rows, 1) for rows in (5, 1, 2, 4)],
    ]
    assert asked[0][1] == Plan(None, (0,) * 5)


# ------------------------------------------------------------------------------------------ checks that are remembered


@pytest.fixture
def opened(monkeypatch, tmp_path):
    """Opens models, whose replays seem to take these seconds; each with the number of checks and timings so far."""
    monkeypatch.setenv("SELFSPEC_CACHE", str(tmp_path))
    done, check = [], runners.round_problem
    monkeypatch.setattr(runners, "round_problem", lambda *given: done.append("check") or check(*given))

    def open_one(model, seconds=(2e-3, 1e-3), owned=True):
        times = chain(seconds, repeat(1.0) if seconds else ())  # five launches are as slow as ten
        install = partial(runners.install, make=runner_of, measure=lambda *given: done.append("time") or next(times))
        monkeypatch.setattr(targets, "install", install)
        return Target(model, backend="views", owned=owned), len(done)

    return open_one


@pytest.mark.parametrize("seconds", [(2e-3, 1e-3), (1e-3, 2e-3)])
def test_a_second_start_neither_checks_nor_times_what_was_checked(opened, seconds, caplog):
    first, count = opened(small(), seconds)
    with caplog.at_level(logging.INFO, "selfspec"):
        again, later = opened(small(), ())
    assert count > 2 and later == count and "checked and chosen before" in caplog.text
    assert again.split.runner is not None and again.split.runner.graphs.num_recorded == 0
    for one in (first, again):
        assert isinstance(one.split.recorded, FusedBody) == (seconds[1] < seconds[0])
    assert tokens_of(decoded(again, prompts(3), Fixed(1, 3), PARAMS)) == wanted(3)


def test_other_weights_devices_and_versions_are_checked(opened, monkeypatch):
    _, count = opened(small())
    other = small()
    other.lm_head.weight.data.mul_(1.5)
    _, of_weights = opened(other)
    assert of_weights == 2 * count
    with monkeypatch.context() as patch:
        patch.setattr("selfspec.loading.target.device_name", lambda device: "cuda: another one")
        assert opened(small())[1] == 3 * count
    with monkeypatch.context() as patch:
        patch.setattr("selfspec.loading.checked.__version__", "0.0.0")
        assert opened(small())[1] == 4 * count
    assert opened(small())[1] == 4 * count


def test_a_model_of_the_callers_is_checked_every_time(opened):
    _, count = opened(small(), owned=False)
    assert opened(small(), owned=False)[1] == 2 * count


@pytest.mark.parametrize("is_short_for_ever", [False, True])
def test_a_known_choice_that_memory_is_too_short_for_is_made_anew(opened, monkeypatch, is_short_for_ever):
    _, count = opened(small())
    honest, calls = body_choice.fused_body, []

    def short(*given):
        calls.append(given)
        if is_short_for_ever or len(calls) == 1:
            raise torch.OutOfMemoryError("no memory")
        return honest(*given)

    monkeypatch.setattr(body_choice, "fused_body", short)
    target, later = opened(small())
    assert len(calls) == 2 and target.split.runner is not None
    if is_short_for_ever:
        assert target.split.recorded is None and later > count
    else:
        assert isinstance(target.split.recorded, FusedBody) and later == 2 * count
    assert tokens_of(decoded(target, prompts(3), Fixed(1, 3), PARAMS)) == wanted(3)


def test_layers_that_an_error_refused_are_tried_again(opened):
    target, count = opened(small(), ())  # no time is measured: it raises
    assert target.split.recorded is None and target.split.runner is not None
    target, later = opened(small())
    assert later > count and isinstance(target.split.recorded, FusedBody)
