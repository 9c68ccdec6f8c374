"""Retry-After: the time in which what runs and waits ends, from measured seconds of tokens."""

from __future__ import annotations

import math

import pytest

from selfspec import SamplingParams
from selfspec.decoding.outputs import CompletionOutput, RequestOutput
from selfspec.serving.calls import Call
from selfspec.serving.pace import Pace, Work

NEW, READ = 0.02, 0.005  # seconds of a token of the machine that is simulated


def call(max_tokens, length=3, **more):
    return Call("a", [[1] * length], SamplingParams(max_tokens=max_tokens, **more), 1000, 60.0)


def worked(lengths, num_ends=1, slower=1, is_full=True, pace=None):
    """A pace after outputs of these lengths, each of a prompt of 10 tokens."""
    pace = pace or Pace()
    for length in lengths:
        pace.add(Work(length, slower * NEW * length, 10, slower * READ * 10), num_ends, is_full)
    return pace


def test_short_answers_before_say_nothing_of_long_ones_that_wait():
    assert Pace().seconds([call(10)]) == 0
    pace = worked([12] * 500, num_ends=0)  # all of them at their limit
    assert pace.seconds([call(400)] * 8) == pytest.approx(8 * (400 * NEW + 3 * READ), rel=0.05)
    assert pace.seconds([call(400, ignore_eos=True)]) == pytest.approx(400 * NEW + 3 * READ)


def test_answers_that_end_by_themselves_make_those_that_wait_short():
    pace = worked([20] * 1000)
    assert pace.seconds([call(900)]) == pytest.approx(20 * NEW + 3 * READ, rel=0.1)
    assert pace.seconds([call(5)]) == pytest.approx(20 * (1 - math.exp(-5 / 20)) * NEW + 3 * READ, rel=0.1)


def test_what_was_read_and_decoded_is_not_waited_for_and_the_context_is_a_limit():
    pace, begun = worked([10]), call(400, 500, ignore_eos=True)
    assert pace.seconds([begun]) == pytest.approx(400 * NEW + 500 * READ)
    output = CompletionOutput(0, "", [5] * 390, finish_reason=None)
    begun.add(0, RequestOutput("a/0", None, [1], [output], False), 1.0)
    begun.started = 1.0
    assert pace.seconds([begun]) == pytest.approx(10 * NEW)
    assert pace.seconds([call(5000, 997, ignore_eos=True)]) == pytest.approx(3 * NEW + 997 * READ)


def test_speed_is_that_of_times_in_which_requests_waited_and_follows_the_machine():
    queue = [call(100, ignore_eos=True)]
    pace = worked([10] * 50, slower=4, is_full=False)  # a single request is slower for each of its tokens
    pace = worked([10] * 50, pace=pace)
    pace = worked([10] * 50, slower=4, is_full=False, pace=pace)
    assert pace.seconds(queue) == pytest.approx(100 * NEW + 3 * READ)
    pace = worked([50] * 80, slower=4, pace=pace)
    assert pace.seconds(queue) == pytest.approx(4 * (100 * NEW + 3 * READ), rel=0.05)
