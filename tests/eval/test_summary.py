"""Medians, spreads and paired ratios on numbers small enough to check by hand."""

from __future__ import annotations

import random
from math import log
from statistics import fmean

import pytest

from eval.methods import Answer
from eval.summary import differences, paired_ratio, seconds_by_item, spread, tokens_per_second
from eval.timing import Sample, rotated


def sample(method, repeat, item, seconds, tokens=(1, 2, 3, 4)):
    return Sample(method, repeat, item, seconds, [Answer(list(tokens), None)])


def test_a_spread_is_median_quartiles_and_range():
    assert spread([5, 1, 2, 4, 3]) == (3, 1, 2, 4, 5, 5, 1, 5)
    assert spread([1, 2]) == (1.5, 1, 1.25, 1.75, 2, 2, 1, 2)
    assert spread([7.0]) == (7, 7, 7, 7, 7, 1, 7, 7)


def test_a_median_is_surely_between_values_that_it_lies_outside_of_no_oftener_than_once_in_twenty():
    # P(all nine, or eight of nine, on one side) = 2 * (1 + 9) / 512 = .039; with two of nine it would be .18.
    found = spread(range(1, 10))
    assert (found.sure_low, found.sure_high) == (2, 8)
    found = spread(range(1, 16))  # 2 * (1 + 15 + 105 + 455) / 32768 = .035
    assert (found.sure_low, found.sure_high) == (4, 12)
    found = spread(range(1, 6))  # 2 / 32 = .063: not even the range
    assert (found.sure_low, found.sure_high) == (1, 5)
    assert spread([2.0] * 1100).sure_low == 2
    draws = random.Random(0)
    caught = [spread(draws.expovariate(1) for _ in range(9)) for _ in range(1000)]
    assert 0.94 < fmean(each.sure_low <= log(2) <= each.sure_high for each in caught) < 0.98


def test_speed_is_all_tokens_over_the_sum_of_median_seconds_per_prompt():
    seconds = {0: (1, 9, 2), 1: (5, 6, 7)}  # prompt -> by repeat
    samples = [sample("a", repeat, item, s) for item, taken in seconds.items() for repeat, s in enumerate(taken)]
    assert seconds_by_item(samples) == [2, 6]
    assert tokens_per_second(samples) == pytest.approx(8 / 8)  # two prompts of four tokens


def test_ratios_are_paired_within_a_repeat_so_that_drift_cancels():
    slow = [2.0, 20.0, 3.0]  # the machine was slow in the second repeat, for both
    samples = [sample("base", r, 0, s) for r, s in enumerate(slow)]
    samples += [sample("a", r, 0, s / 2) for r, s in enumerate(slow)]
    assert paired_ratio(samples, "a", "base") == (2, 2, 2, 2, 2, 3, 2, 2)
    assert paired_ratio(samples, "base", "a").median == 0.5


def test_a_ratio_sums_over_prompts_before_it_divides():
    samples = [sample("base", 0, 0, 3), sample("base", 0, 1, 1), sample("a", 0, 0, 1), sample("a", 0, 1, 1)]
    assert paired_ratio(samples, "a", "base").median == 2


def test_differences_name_the_prompt_and_the_first_position():
    reference = [[1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 4]]
    samples = [sample("a", 0, 0, 1), sample("a", 0, 1, 1, (1, 2, 9, 4)), sample("a", 1, 1, 1, (1, 9, 3, 4))]
    assert differences(samples, reference) == [(1, 1)]
    assert differences([sample("a", 0, 2, 1, (1, 2, 3))], reference) == [(2, 3)]  # too short differs where it ends
    batch = [Sample("b", 0, 0, 1.0, [Answer([1, 2, 3, 4], None), Answer([5], None)])]
    assert differences(batch, reference) == [(1, 0)]


def test_the_order_of_methods_rotates():
    assert [rotated("abc", by) for by in range(4)] == [list("abc"), list("bca"), list("cab"), list("abc")]
