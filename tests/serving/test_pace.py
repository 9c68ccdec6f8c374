"""Retry-After: the time in which what runs and waits ends, from measured tokens per second."""

from __future__ import annotations

import math

import pytest

from selfspec import SamplingParams
from selfspec.decoding.outputs import CompletionOutput, RequestOutput
from selfspec.serving.calls import Call
from selfspec.serving.pace import Pace

RATE = 50.0  # tokens per second of the machine that is simulated


def call(max_tokens, **more):
    return Call("a", [[1, 2, 3]], SamplingParams(max_tokens=max_tokens, **more), 1000, 60.0)


def worked(pace, lengths, start, num_ends=1):
    """Outputs of these lengths, decoded one after another; the time after them."""
    now = start
    pace.begin(now)
    for length in lengths:
        now += length / RATE
        pace.add(length, num_ends, True, now)
    return now


def test_short_answers_before_say_nothing_of_long_ones_that_wait():
    pace = Pace()
    assert pace.seconds([call(10)]) == 0
    worked(pace, [12] * 500, 10.0, num_ends=0)  # all of them at their limit
    queue = [call(400) for _ in range(8)]
    assert pace.seconds(queue) == pytest.approx(8 * 400 / RATE, rel=0.05)
    assert pace.seconds([call(400, ignore_eos=True)]) == pytest.approx(400 / RATE)


def test_answers_that_end_by_themselves_make_those_that_wait_short():
    pace = Pace()
    worked(pace, [20] * 1000, 10.0)
    assert pace.seconds([call(900)]) == pytest.approx(20 / RATE, rel=0.1)
    assert pace.seconds([call(5)]) == pytest.approx(20 * (1 - math.exp(-5 / 20)) / RATE, rel=0.1)


def test_what_an_output_has_is_not_waited_for_and_a_limit_of_the_context_counts():
    pace, begun = Pace(), call(400, ignore_eos=True)
    pace.seed(RATE)
    assert pace.seconds([begun]) == pytest.approx(400 / RATE)
    output = CompletionOutput(0, "", [5] * 390, finish_reason=None)
    begun.add(0, RequestOutput("a/0", None, [1, 2, 3], [output], False), 1.0)
    assert pace.seconds([begun]) == pytest.approx(10 / RATE)
    assert pace.seconds([call(5000, ignore_eos=True)]) == pytest.approx(997 / RATE)


def test_the_rate_is_that_of_times_in_which_requests_waited_and_follows_the_machine():
    pace = Pace()
    now = worked(pace, [10] * 50, 10.0, num_ends=0)
    for _ in range(50):  # a single request is slower for each of its tokens
        now += 1.0
        pace.add(10, 0, False, now)
    assert pace.seconds([call(100, ignore_eos=True)]) == pytest.approx(100 / RATE)
    for _ in range(120):  # the machine became four times slower
        now += 4 * 50 / RATE
        pace.add(50, 0, True, now)
    assert pace.seconds([call(100, ignore_eos=True)]) == pytest.approx(400 / RATE, rel=0.05)
