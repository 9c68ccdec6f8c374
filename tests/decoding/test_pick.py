"""Picks: argmax or Gumbel-argmax per packed position, behind transformers' own filters."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from transformers import LogitsProcessorList
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from selfspec.executors.pick import Sampling
from selfspec.kernels.gumbel import gumbel
from selfspec.kernels.pick import filtered, scored


def pick(logits, samplings, positions):
    return scored(logits, samplings, positions).argmax(-1)


GRID = list(itertools.product([0.5, 1.0, 1.7], [0, 1, 7], [1.0, 0.9, 0.3], [0.0, 0.1, 1.0]))


def some_logits(rows=5, vocab=40, seed=0):
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


@pytest.mark.parametrize(("temperature", "top_k", "top_p", "min_p"), GRID)
def test_filters_are_those_of_transformers_in_its_order(temperature, top_k, top_p, min_p):
    chain = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    chain += [TopKLogitsWarper(top_k)] if top_k else []
    chain += [TopPLogitsWarper(top_p)] if top_p < 1 else []
    chain += [MinPLogitsWarper(min_p)] if min_p else []
    logits = some_logits()
    ours = filtered(logits, Sampling(temperature, top_k, top_p, min_p))
    assert torch.equal(ours, chain(None, logits))
    assert (ours.isfinite().sum(-1) >= 1).all()


@pytest.mark.parametrize("top_p", [0.001, 0.3, 0.9, 0.999])
@pytest.mark.parametrize("kind", ["peaked", "flat", "ties", "all the same", "few"])
def test_top_p_of_a_large_vocabulary_is_that_of_the_whole_sort_row_by_row(top_p, kind):
    logits = {
        "peaked": some_logits(6, 900) * 3,
        "flat": some_logits(6, 900) / 30,
        "ties": some_logits(6, 900).round(),
        "all the same": torch.zeros(6, 900),
        "few": TopKLogitsWarper(5)(None, some_logits(6, 900)),
    }[kind]
    logits[3] = 20 * some_logits(1, 900, seed=1)[0]  # settled at once, between rows that may not be
    sampling = Sampling(1.0, top_p=top_p)
    expected = TopPLogitsWarper(top_p)(None, logits)
    together = filtered(logits, sampling)
    assert torch.equal(together, expected)
    assert torch.equal(torch.cat([filtered(row[None], sampling) for row in logits]), together)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_row_of_impossible_logits_is_left_to_transformers_and_harms_no_other(bad):
    logits = some_logits(3, 900) * 3
    sound = filtered(logits, Sampling(1.0, top_p=0.9))
    logits[1] = bad if bad < 0 else logits[1]
    logits[1, 7] = bad
    found = filtered(logits, Sampling(1.0, top_p=0.9))
    assert torch.equal(found[1:2], TopPLogitsWarper(0.9)(None, logits[1:2])) or bool(found[1].isnan().any())
    assert torch.equal(found[::2], sound[::2])
    assert 0 <= int(pick(logits, [Sampling(1.0, top_p=0.9)] * 3, torch.arange(3))[1]) < 900


def test_greedy_takes_the_largest_logit_and_leaves_the_logits_alone():
    logits = some_logits()
    before = logits.clone()
    positions = torch.arange(5)
    greedy = Sampling(0.0, top_k=3, top_p=0.5, min_p=0.3)
    assert filtered(logits, greedy) is logits
    assert torch.equal(pick(logits, [greedy] * 5, positions), before.argmax(-1))
    pick(logits, [Sampling(0.7, 3, 0.5, 0.1)] * 5, positions)
    assert torch.equal(logits, before)


def test_a_sampled_pick_is_the_argmax_of_filtered_logits_and_noise():
    logits, positions = some_logits(), torch.tensor([3, 0, 99, 7, 1 << 40])
    sampling = Sampling(0.8, top_k=9, top_p=0.9, seed=-17)
    noise = gumbel(torch.full((5,), -17), positions, 40)
    assert torch.equal(pick(logits, [sampling] * 5, positions), (filtered(logits, sampling) + noise).argmax(-1))


def test_a_pick_depends_on_nothing_but_its_own_row():
    logits, positions = some_logits(rows=len(GRID)), torch.arange(len(GRID)) * 3
    samplings = [Sampling(*kind, seed=i % 4) for i, kind in enumerate(GRID)]
    samplings[::5] = [Sampling()] * len(samplings[::5])  # greedy ones between
    together = pick(logits, samplings, positions)
    alone = torch.cat([pick(logits[i : i + 1], samplings[i : i + 1], positions[i : i + 1]) for i in range(len(GRID))])
    assert torch.equal(together, alone)
    order = torch.randperm(len(GRID), generator=torch.Generator().manual_seed(0))
    shuffled = pick(logits[order], [samplings[i] for i in order], positions[order])
    assert torch.equal(shuffled, together[order])


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"temperature": math.nan}, r"temperature must be a number of at least 0 \(0 is greedy\), got nan"),
        ({"temperature": math.inf}, "temperature must be a number of at least 0 .* got inf"),
        ({"temperature": -0.5}, "temperature must be a number of at least 0 .* got -0.5"),
        ({"top_k": -1}, "top_k must be at least 0 .* got -1"),
        ({"top_p": 0.0}, r"top_p must lie in \(0, 1\] .* got 0.0"),
        ({"top_p": 1.1}, r"top_p must lie in \(0, 1\] .* got 1.1"),
        ({"top_p": math.nan}, "top_p .* got nan"),
        ({"min_p": -0.1}, r"min_p must lie in \[0, 1\] .* got -0.1"),
        ({"min_p": 2.0}, r"min_p must lie in \[0, 1\] .* got 2.0"),
        ({"seed": 1 << 63}, "seed must be a 64-bit integer, got 9223372036854775808"),
    ],
)
def test_an_option_out_of_range_is_refused_by_name(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        Sampling(**options)
