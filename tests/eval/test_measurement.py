"""Medians with confidence intervals, and the rotating order of methods."""

from __future__ import annotations

import random
from math import log
from statistics import fmean

from eval.measurement import spread


def test_a_spread_is_the_median_the_range_and_an_interval_for_the_median():
    assert spread([7.0]) == (7, 7, 7, 1, 7, 7)
    assert spread([5, 1, 2, 4, 3]) == (3, 1, 5, 5, 1, 5)  # 2 / 32 = .063: of five not even the range is sure enough
    # P(all nine, or eight of nine, on one side) = 2 * (1 + 9) / 512 = .039; with two of nine it would be .18.
    assert spread(range(1, 10)) == (5, 1, 9, 9, 2, 8)
    assert spread(range(1, 16)) == (8, 1, 15, 15, 4, 12)  # 2 * (1 + 15 + 105 + 455) / 32768 = .035


def test_the_interval_misses_the_true_median_no_more_often_than_once_in_twenty():
    draws = random.Random(0)
    caught = [spread(draws.expovariate(1) for _ in range(9)) for _ in range(500)]
    assert 0.94 < fmean(each.ci_low <= log(2) <= each.ci_high for each in caught) < 0.985
