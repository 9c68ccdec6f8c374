"""Figures compared with calculations by hand."""

from __future__ import annotations

import json

import numpy as np
import pytest

from eval.answers import Turn, choice_of, groups, item_of
from eval.decoders import split_by_round
from eval.metrics import METRICS, Group, figures
from eval.summary import fastest_plain, harness_share
from selfspec.core import RoundOutput, StageSeconds
from selfspec.decoding.outputs import SpecStats


def turn(sizes, steps, **known):
    return Turn([0] * sum(sizes), sum(steps) + 0.01, accept_lengths=sizes, step_seconds=steps, **known)


def answer(question_id, turns, category="math", **more):
    choice = choice_of(turns, ["text"] * len(turns))
    row = {"question_id": question_id, "category": category, "choices": [choice], **more}
    return json.loads(json.dumps(row))


FAST = [
    answer(1, [turn([3, 2], [0.3, 0.1]), turn([1, 4, 2], [0.2, 0.17, 0.06])]),
    answer(2, [turn([2, 2, 1], [0.21, 0.07, 0.1])], "qa"),
]
SLOW = [
    answer(1, [turn([1] * 5, [0.3] + [0.1] * 4), turn([1] * 7, [0.2] + [0.11] * 6)]),
    answer(2, [turn([1] * 5, [0.23] + [0.13] * 4)], "qa"),
]


def group(rows=FAST, base=SLOW, **more):
    return Group([item_of(row) for row in rows], [item_of(row) for row in base], resamples=200, **more)


def test_spec_bench_figures_equal_those_of_its_script():
    found = figures(group())
    fast, slow = (12 / 0.85 + 5 / 0.39) / 2, (12 / 1.58 + 5 / 0.76) / 2  # means over questions of tokens / seconds
    assert found["spec_bench_tokens_per_second"] == pytest.approx(fast)
    assert found["spec_bench_speedup"] == pytest.approx(fast / slow)
    assert found["mean_accepted_tokens"] == (5 + 7 + 5) / 8


def test_totals_and_pairs():
    found = figures(group())
    fast, slow = [0.41 + 0.44, 0.39], [0.71 + 0.87, 0.76]
    assert list(found) == list(METRICS) and found["num_tokens"] == 17
    assert found["tokens_per_second"]["value"] == pytest.approx(17 / sum(fast))
    assert found["tokens_per_second"]["low"] == pytest.approx(5 / fast[1])  # samples of the slower question alone
    assert found["speedup"]["value"] == pytest.approx(sum(slow) / sum(fast))
    ratios = [slow[0] / fast[0], slow[1] / fast[1]]
    paired = found["paired_ratio"]
    assert paired["value"] == pytest.approx((ratios[0] * ratios[1]) ** 0.5)
    assert [paired["least"], paired["most"], paired["low"], paired["high"]] == pytest.approx(sorted(ratios) * 2)
    assert paired["median"] == pytest.approx(sum(ratios) / 2) and paired["num_questions"] == 2


def test_latencies_exclude_the_first_step():
    found = figures(group())
    assert found["time_to_first_token_p50"] == pytest.approx(0.21)
    assert found["decode_tokens_per_second"] == pytest.approx((2 + 6 + 3) / (0.1 + 0.23 + 0.17))
    latencies = [0.05] * 2 + [0.17 / 4] * 4 + [0.03] * 2 + [0.035] * 2 + [0.1]
    assert found["per_token_latency_p50"] == pytest.approx(np.percentile(latencies, 50))
    assert found["per_token_latency_p95"] == pytest.approx(np.percentile(latencies, 95))


def test_drafts_stages_and_layers():
    stats = SpecStats()
    for drafted, accepted in ((3, 3), (3, 1), (2, 0)):
        stats.add_round(drafted, accepted, accepted + 1)
    stats.add_round(0, 0, 1)
    stages = {"prefill": 0.1, "draft": 0.3}
    turns = [
        turn([4, 2, 1, 1], [0.1] * 4, stats=stats, stage_seconds=stages, layer_passes=20, prefill_seconds=0.1)
        for _ in "ab"
    ]
    found = figures(group([answer(1, turns)], SLOW))
    assert found["acceptance_length"] == 1 + 8 / 6 and found["draft_acceptance_rate"] == 8 / 16
    joint = [each["joint"] for each in found["acceptance_by_position"]]
    conditional = [each["conditional"] for each in found["acceptance_by_position"]]
    assert joint == [2 / 3, 1 / 3, 1 / 2] and conditional == [2 / 3, 1 / 2, 1]
    assert found["layer_passes_per_token"] == 40 / 16 and found["stage_shares"] == pytest.approx(
        {"prefill": 0.25, "draft": 0.75}
    )
    assert found["prefill_share"] == pytest.approx(0.2 / 0.82)


def test_unreported_values_give_none_and_no_baseline_gives_no_speedup():
    silent = answer(1, [Turn([1, 2], 0.5), Turn([3], 0.5)])
    found = figures(Group([item_of(silent)], None, resamples=5))
    known = {name for name, value in found.items() if value is not None}
    assert known == {"num_questions", "num_tokens", "seconds", "spec_bench_tokens_per_second", "tokens_per_second"}
    mixed = figures(group([silent, FAST[1]]))
    assert mixed["time_to_first_token_p50"] is None and mixed["mean_accepted_tokens"] == 5 / 3


def test_an_empty_answer_has_no_ratio():
    empty = answer(1, [Turn([], 0.5, accept_lengths=[])])
    assert figures(group([empty], [empty]))["paired_ratio"] is figures(group([empty], [empty]))["speedup"] is None
    assert figures(group([empty], SLOW))["speedup"]["value"] == 0
    assert figures(group([empty], SLOW))["spec_bench_speedup"] == 0


def test_intervals_come_from_the_seed_alone():
    assert figures(group(seed=1)) == figures(group(seed=1))
    rows = [answer(i, [turn([1] * (i + 2), [0.1] * (i + 2))]) for i in range(9)]
    one, two = (figures(group(rows, rows[::-1], seed=seed))["tokens_per_second"] for seed in (1, 2))
    assert one["value"] == two["value"] and one["low"] <= one["value"] <= one["high"]
    assert (one["low"], one["high"]) != (two["low"], two["high"])
    assert figures(group(rows, rows[::-1]))["speedup"]["low"] == pytest.approx(1)  # the same draws on both sides


def test_mt_bench_categories_are_also_merged():
    items = [item_of(answer(i, [turn([1], [0.1])], kind)) for i, kind in enumerate(("math", "qa", "writing", "math"))]
    assert {name: len(of_group) for name, of_group in groups(items).items()} == {
        "math": 2,
        "qa": 1,
        "writing": 1,
        "mt_bench": 3,
        "overall": 4,
    }
    assert "mt_bench" not in groups(items[:1])


def test_the_baseline_is_the_fastest_plain_decoding_on_common_questions():
    both = {"plain": {1: SLOW[0], 2: SLOW[1]}, "transformers": {1: SLOW[0]}, "adaptive": {1: FAST[0]}}
    assert fastest_plain(both) == "plain"
    assert fastest_plain({**both, "transformers": {1: FAST[0]}}) == "transformers"
    assert fastest_plain({"adaptive": {1: FAST[0]}, "plain": {}}) is None


def test_the_harness_share_is_relative_to_the_methods_time():
    rows = [
        answer(1, [turn([1], [0.09])], harness_seconds=0.01),
        {"kind": "error", "seconds": 0.1, "harness_seconds": 0},
    ]
    assert harness_share(rows) == pytest.approx(0.05) and harness_share(FAST) is None


def test_a_programs_time_is_divided_among_its_rounds():
    """Programs of one, three and one rounds."""
    own, places = [9.0, 2.0, 1.0, 1.0, 5.0], [0, 0, 1, 2, 0]
    done = [
        RoundOutput(None, [], StageSeconds(verify=taken), round_index=at) for taken, at in zip(own, places, strict=True)
    ]
    stamped = [10.0, 7.9, 0.05, 0.05, 6.0]
    assert split_by_round(stamped, done) == pytest.approx([10.0, 4.0, 2.0, 2.0, 6.0])
    assert split_by_round(stamped[:1], done[:1]) == stamped[:1] and split_by_round([], []) == []
