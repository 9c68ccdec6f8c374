"""Measured costs are whole, finite and ascending, whatever the clock does and however short the model's context is."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import logging
import math
import random
import weakref
from threading import Event, Thread
from types import SimpleNamespace

import pytest
import torch

from selfspec.calibrate import measure as module
from selfspec.calibrate import timed_rounds as timed
from selfspec.calibrate.measure import exits_to_time, measure
from selfspec.calibrate.timed_rounds import FURTHER, TimedRounds
from selfspec.control.costs import Costs, Table
from selfspec.core import Plan
from selfspec.executors.cuda.capture import CannotCapture
from selfspec.loading.target import Target
from selfspec.params import SamplingParams
from tests.cuda.standin import with_runner
from tests.helpers import decode, tokens_of
from tests.models import build, some_heads, tiny
from tests.slow import slow


def written(target):
    return tokens_of(decode(target, [[5, 6, 7]], "plain", SamplingParams(max_tokens=8, temperature=0.7)))


def tables_of(costs):
    return [costs.head, costs.shadow_picks, *costs.rounds.values(), *costs.steps.values()]


def assert_sound(costs, num_layers):
    assert costs.num_layers == num_layers
    for seconds in (costs.width, *costs.context.seconds):
        assert math.isfinite(seconds) and seconds >= 0
    for table in tables_of(costs):
        assert all(math.isfinite(s) and s > 0 for s in table.seconds)
        assert list(table.seconds) == sorted(table.seconds)
    assert Costs.from_dict(costs.as_dict()) == costs
    assert math.isfinite(costs.round(num_layers - 1, (3,) * 5)) and costs.plain_round(1) > 0


@pytest.mark.parametrize("family", ["llama", "gemma2", slow("gpt2"), slow("mixtral")])
def test_every_piece_is_measured(family):
    costs = measure(tiny(family).split, (1, 3), repeats=1, within=None)
    assert_sound(costs, 4)
    assert costs.steps[1].points == (1, 2, 3) and set(costs.steps) == set(costs.rounds) == {1, 3}
    assert costs.rounds[1].points == module.WIDTHS and costs.rounds[3].points == module.BATCH_WIDTHS
    assert {1, 3, 8, 27, 128} <= set(costs.head.points)


@pytest.mark.parametrize("heads", [slow(()), slow((3,))])
def test_rounds_from_recordings_are_measured_from_recordings(heads):
    target = Target(build("llama"), backend="views", exit_heads=some_heads(heads) if heads else None)
    costs = measure(with_runner(target, max_rows=6).split, (1, 2, 4, 6, 8), repeats=1)
    assert_sound(costs, 4)
    assert costs.recorded == target.split.runner.limits and costs.recorded_length(4) == 15
    assert set(costs.steps) == set(costs.rounds) == {1, 4, 6}
    assert set(heads) <= set(costs.steps[1].points) and costs.rounds[1].points == (1, 2, 5, 9, 16)


@pytest.mark.parametrize("num_layers", [2, slow(3), slow(5)])
def test_every_exit_layer_of_recorded_rounds_has_a_cost_of_its_own(num_layers):
    target = with_runner(Target(build("llama", num_hidden_layers=num_layers), backend="views"), max_rows=1)
    costs = measure(target.split, (1,), repeats=1)
    assert costs.steps[1].points == ((1,) if num_layers == 2 else (1, 2))


@pytest.mark.slow
def test_recorded_rounds_are_measured_within_a_short_context():
    """Also where every draft is accepted, so that rows grow fast."""
    model = build("gpt2", max_position_embeddings=50).requires_grad_(False)
    for layer in model.transformer.h[1:]:
        for end in (*layer.attn.c_proj.parameters(), *layer.mlp.c_proj.parameters()):
            end.zero_()
    target = with_runner(Target(model, backend="views"), max_rows=4)
    assert_sound(measure(target.split, (1, 4), repeats=2), 4)


@pytest.mark.parametrize("failing", [0, slow(8), slow(14)])
def test_rounds_that_cannot_be_recorded_are_measured_without(failing, monkeypatch):
    split = with_runner(Target(build("llama"), backend="views"), max_rows=1).split
    honest, done = split.runner.graphs.capture.record, []

    def record(body):
        done.append(body)
        if len(done) == failing + 1:
            raise CannotCapture("aten.mm.default", "out of memory")
        return honest(body)

    monkeypatch.setattr(split.runner.graphs.capture, "record", record)
    costs = measure(split, (1,), repeats=1, within=0.0)
    assert_sound(costs, 4)
    assert costs.recorded is None and len(done) > failing


@pytest.mark.slow
def test_all_ranks_replay_a_recording_as_often(monkeypatch):
    """Recordings of a tensor-parallel model wait for the other ranks, whose clocks differ."""
    split, asked = with_runner(Target(build("llama"), backend="views"), max_rows=1).split, []

    def agreed(value):
        if not isinstance(value, int):
            return value
        asked.append(value)
        return 7  # what rank 0 has

    monkeypatch.setattr(split, "agreed", agreed)
    measure(split, (1,), repeats=1)
    replayed = [one.num_replays for one in split.runner.graphs.capture.made]
    assert asked and replayed.count(2 + 7 * 2) == len(asked)


def test_recordings_of_other_threads_wait_for_a_measurement():
    """They share memory, so that a replay may overwrite what another thread has not read yet."""
    target, began, done = with_runner(Target(build("llama"), backend="views")), Event(), Event()
    wanted = written(target)

    def decode_beside():
        began.set()
        assert written(target) == wanted
        done.set()

    def use(recording):
        thread.start()
        return began.wait(60) and done.wait(0.5)

    thread = Thread(target=decode_beside)
    one = torch.ones(1)
    assert not target.split.runner.with_recording(lambda: (one + 1,), use)
    assert done.wait(60)
    thread.join()


@pytest.mark.parametrize("within", [None, 0.0], ids=["all points", "few points"])
def test_layers_with_exit_heads_are_timed_since_they_take_longer(within):
    split = Target(build("llama", num_hidden_layers=10), exit_heads=some_heads((4, 7))).split
    costs = measure(split, (1, 3), repeats=1, within=within)
    assert {4, 7} <= set(costs.steps[1].points) and 4 in costs.steps[3].points


def test_a_single_row_is_always_measured_and_many_rows_at_two_widths_at_least():
    costs = measure(tiny("llama").split, (200,), repeats=1, within=None)
    assert sorted(costs.rounds) == [1, 200] and costs.rounds[200].points == (1, 2)


@pytest.mark.parametrize(
    ("family", "limit"),  # rotary positions, and a table that ends where the context does
    [*(("llama", limit) for limit in (1, 3)), *(("gpt2", limit) for limit in (2, 5))],
)
def test_a_tiny_context_is_enough(family, limit):
    target = Target(build(family, max_position_embeddings=limit), check=False)
    costs = measure(target.split, (1, 2), repeats=1)
    assert_sound(costs, 4)
    assert max(costs.rounds[1].points) <= limit


def test_two_layers_are_enough_and_one_is_refused():
    assert_sound(measure(Target(build("llama", num_hidden_layers=2)).split, repeats=1), 2)
    with pytest.raises(ValueError, match="at least 2 layers"):
        measure(Target(build("llama", num_hidden_layers=1), check=False).split)


class Clock:
    """Says whatever it is told to, one reading after the other."""

    def __init__(self, steps):
        self.now, self.steps = 1000.0, steps

    def __call__(self):
        self.now += next(self.steps)
        return self.now


def falling(seed):
    dice = random.Random(seed)
    return (dice.choice((-2.0, -1e-3, 0.0, 1e-4, 3e-3)) for _ in itertools.count())


@pytest.mark.parametrize(
    "steps",
    [falling(0), falling(1), itertools.repeat(-1.0), itertools.repeat(0.0), itertools.repeat(10.0)],
    ids=["jumps", "other jumps", "backwards", "stopped", "slow"],
)
def test_a_bad_clock_still_gives_costs_to_divide_by(monkeypatch, steps):
    monkeypatch.setattr(timed, "perf_counter", Clock(steps))
    assert_sound(measure(tiny("llama").split, (1, 2), repeats=2), 4)


def test_a_slow_model_is_measured_at_fewer_points_unless_there_is_time(monkeypatch):
    monkeypatch.setattr(timed, "perf_counter", Clock(itertools.repeat(0.1)))
    split = tiny("llama").split
    assert measure(split).rounds[1].points == module.THIN_WIDTHS
    assert measure(split, repeats=1, within=None).rounds[1].points == module.WIDTHS


@pytest.fixture
def told(caplog):
    """What is told while something is measured, each repeat once."""
    caplog.set_level(logging.INFO, "selfspec")

    def call():
        said = [record.getMessage().partition(", ")[0] for record in caplog.records]
        caplog.clear()
        return [text for text, _ in itertools.groupby(said)]

    return call


def test_repeats_end_with_the_time_given_but_there_are_three_readings_or_one_of_a_slow_model(monkeypatch, told):
    monkeypatch.setattr(timed, "perf_counter", Clock(itertools.repeat(1e-3)))
    monkeypatch.setattr(module, "doubtful", lambda costs: False)
    split = tiny("llama").split

    def count(**options):
        measure(split, repeats=5, **options)
        return max(int(text.split()[1]) for text in told() if text.startswith("repeat"))

    assert count(within=0.8) == 3, "three repeats of a quarter of a second"
    assert count(within=0.01) == 1, "of a slow model, one repeat in any case"
    assert count(within=None) == 5


def test_a_measurement_that_takes_long_is_told_before_once(monkeypatch, told):
    monkeypatch.setattr(timed, "perf_counter", Clock(itertools.repeat(0.1)))
    monkeypatch.setattr(module, "doubtful", lambda costs: True)
    measure(tiny("llama").split)
    assert told().count("measuring what decoding costs on this machine") == 1


def test_of_many_rows_a_slow_model_is_measured_at_the_most(monkeypatch):
    monkeypatch.setattr(timed, "perf_counter", Clock(itertools.repeat(0.1)))
    costs = measure(tiny("llama").split, (1, 2, 4, 8, 16))
    assert sorted(costs.rounds) == [1, 16] and costs.rounds[16].points == module.THIN_BATCH_WIDTHS


def test_measuring_leaves_no_trace():
    """Neither torch's settings and generator, nor what the target writes, are touched."""
    target = tiny("llama")
    before = written(target)
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    measure(target.split, (1, 2), repeats=1)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == threads and torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    assert written(target) == before


@pytest.mark.parametrize("num_layers", [2, 3, 4, 5, 12, 16, 80])
def test_exits_to_time_lie_inside_the_model(num_layers):
    exits = exits_to_time(num_layers)
    assert exits[0] == 1 and exits[-1] == num_layers - 1
    assert isinstance(Table.of(dict.fromkeys(exits, 1.0)), Table) and exits == sorted(set(exits))


def test_figures_that_do_not_fit_together_are_measured_once_more(monkeypatch, told):
    doubts = iter([True])
    monkeypatch.setattr(module, "doubtful", lambda costs: next(doubts))
    measure(tiny("llama").split, repeats=1, within=None)
    again = "these figures are inconsistent; measuring again"
    assert told() == ["repeat 1 of at most 1", again, *(f"repeat {i} of at most 3" for i in (1, 2, 3))]


def test_a_layer_that_seems_to_cost_half_of_all_is_doubted():
    costs = measure(tiny("llama").split, repeats=1)
    plain, head = costs.plain_round(1), costs.head(1)
    for share_of_one, of_three, is_doubtful in ((1.0, 1.0, True), (0.1, 1.5, True), (0.2, 0.6, False)):
        steps = Table.of({1: share_of_one * plain + head, 3: of_three * plain + head})
        assert module.doubtful(dataclasses.replace(costs, steps={1: steps})) == is_doubtful


class Made(module._Measurement):
    """A measurement of given readings of four layers, verified from the first on."""

    def __init__(self, told):
        self.split, self.middle, self.base, self.long = SimpleNamespace(num_layers=4), 1, 0, 100
        self.readings, self.keeps = {}, True
        for (piece, rows, size), seconds in told.items():
            for taken in seconds if isinstance(seconds, tuple) else (seconds,):
                self.keep(piece, rows, size, taken)


def test_costs_are_what_follows_from_low_readings_of_rounds_and_their_parts():
    told = {
        ("plain", 1, 1): (90.0, 5.0, 4.5, 4.0, 6.0, 8.0, 4.2, 9.0, -1.0),  # the last of a clock that went backwards
        ("layers", 1, 1): 3.6,
        ("late", 1, 1): 2.7,
        ("late", 1, 8): 9.0,
        ("step", 1, 1): 1.2,
        ("long", 1, 1): 5.0,  # .008 a token
        ("long layers", 1, 1): 9.0,
        ("long late", 1, 8): 12.0,  # 3 of three layers for 800 tokens in all
        ("head", 1, 1): 0.2,
        ("head", 1, 8): 0.5,
        ("shadow", 1, 1): 0.1,
    }
    costs = Made(told).summary()
    assert costs.plain_round(1) == 4.2 and costs.head(8) == 0.5 and costs.steps[1](1) == 1.2
    assert costs.rounds[1](8) == pytest.approx(4.2 + (9.0 - 2.7) * 4 / 3 + 0.3)
    assert costs.context(1) == pytest.approx(0.8 / 100)
    assert costs.width == pytest.approx((3.0 * 4 / 3 / 100 / 0.008 - 1) / 7)
    # Parts that add up to less than the whole are scaled up, by a quarter at most.
    for layers, factor in ((4.32, 1.2), (90.0, 1.25)):
        scaled = Made(told | {("layers", 1, 1): layers}).summary()
        assert scaled.steps[1](1) == pytest.approx(1.2 * factor)
        assert scaled.rounds[1](8) == pytest.approx(4.2 + factor * (9.0 - 2.7) * 4 / 3 + 0.3)


class Noting:
    """Notes how much rows hold."""

    seen = ()
    times_stages = True

    def __init__(self, executor):
        self.executor = executor

    def serves(self, rows, plan):
        return True

    def round(self, rows, draft):
        self.seen.append([len(row.token_ids) - 1 for row in rows])
        return self.executor.round(rows, draft)

    def run(self, rows, plan, deadline):
        self.seen.append([len(row.token_ids) - 1 for row in rows])
        return self.executor.run(rows, plan, deadline)


@pytest.fixture
def lengths(monkeypatch):
    """What rows hold as each round, or program, begins."""
    make, seen = timed.executors_for, []
    monkeypatch.setattr(Noting, "seen", seen)
    monkeypatch.setattr(timed, "executors_for", lambda *given, **named: [*map(Noting, make(*given, **named)[1:])])
    return seen


@pytest.mark.parametrize("rows", [1, 2, 3, 8, 11])
def test_rows_hold_what_they_are_said_to_in_the_mean(rows, lengths):
    rounds = TimedRounds(Target(build("llama"), backend="compiled").split, rows, 200, 200)
    with torch.inference_mode():
        rounds.laps(rows, 60, Plan(None, (0,) * rows), 0)
    [held] = lengths
    assert sum(held) / len(held) == pytest.approx(60, abs=0.5) and len(set(held)) == min(rows, 8)


@pytest.mark.parametrize("rows", [1, 3])
def test_rows_are_as_long_as_they_are_said_to_be_by_the_time_that_counts(rows, lengths):
    rounds = TimedRounds(Target(build("llama"), backend="compiled").split, rows, 200, 200)
    with torch.inference_mode():
        for further in (FURTHER, FURTHER, 0):
            laps = rounds.laps(rows, 60, Plan(None, (0,) * rows), further)
    means = [sum(own) / rows for own in lengths]
    assert means == [60, 50, 60], "a round, six more, and half of the six that count"
    assert len(laps) == 1


@pytest.mark.parametrize("kind", ["views", "compiled", "recorded"])
def test_its_caches_are_gone_when_it_ends(kind, monkeypatch):
    """Without Python's search for reference cycles, which may come late: they are as large as an engine's."""
    target, made = Target(build("llama"), backend="compiled" if kind == "compiled" else "views"), []
    target = with_runner(target) if kind == "recorded" else target
    lend = (target.split.runner if kind == "recorded" else target.split).new_cache

    def noted(*given):
        cache = lend(*given)
        made.append(weakref.ref(cache))
        return cache

    monkeypatch.setattr(target.split.runner if kind == "recorded" else target.split, "new_cache", noted)
    gc.collect()
    gc.disable()
    try:
        measure(target.split, (1, 2), repeats=1)
        if kind == "recorded":
            target.split.runner.graphs.capture.made.clear()  # the tape's own list, which CUDA has not
        assert made and not any(one() for one in made)
    finally:
        gc.enable()
