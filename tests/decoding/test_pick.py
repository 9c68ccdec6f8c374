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

from selfspec.kernels.gumbel import gumbel
from selfspec.kernels.pick import filtered, scored
from selfspec.params import SamplingParams


def pick(logits, params, positions):
    return scored(logits, params, positions).argmax(-1)


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
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    ours = filtered(logits, params)
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
    logits[3] = 20 * some_logits(1, 900, seed=1)[0]  # decided at once, between rows that may not be
    one = SamplingParams(temperature=1.0, top_p=top_p)
    expected = TopPLogitsWarper(top_p)(None, logits)
    together = filtered(logits, one)
    assert torch.equal(together, expected)
    assert torch.equal(torch.cat([filtered(row[None], one) for row in logits]), together)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_row_of_impossible_logits_is_left_to_transformers_and_harms_no_other(bad):
    logits = some_logits(3, 900) * 3
    sound = filtered(logits, SamplingParams(temperature=1.0, top_p=0.9))
    logits[1] = bad if bad < 0 else logits[1]
    logits[1, 7] = bad
    found = filtered(logits, SamplingParams(temperature=1.0, top_p=0.9))
    assert torch.equal(found[1:2], TopPLogitsWarper(0.9)(None, logits[1:2])) or bool(found[1].isnan().any())
    assert torch.equal(found[::2], sound[::2])
    assert 0 <= int(pick(logits, [SamplingParams(temperature=1.0, top_p=0.9)] * 3, torch.arange(3))[1]) < 900


def test_greedy_takes_the_largest_logit_and_leaves_the_logits_alone():
    logits = some_logits()
    before = logits.clone()
    positions = torch.arange(5)
    greedy = SamplingParams(temperature=0.0, top_k=3, top_p=0.5, min_p=0.3)
    assert filtered(logits, greedy) is logits
    assert torch.equal(pick(logits, [greedy] * 5, positions), before.argmax(-1))
    pick(logits, [SamplingParams(temperature=0.7, top_k=3, top_p=0.5, min_p=0.1)] * 5, positions)
    assert torch.equal(logits, before)


def test_a_sampled_pick_is_the_argmax_of_filtered_logits_and_noise():
    logits, positions = some_logits(), torch.tensor([3, 0, 99, 7, 1 << 40])
    one = SamplingParams(temperature=0.8, top_k=9, top_p=0.9, seed=-17)
    noise = gumbel(torch.full((5,), -17), positions, 40)
    assert torch.equal(pick(logits, [one] * 5, positions), (filtered(logits, one) + noise).argmax(-1))


def test_a_pick_depends_on_nothing_but_its_own_row():
    logits, positions = some_logits(rows=len(GRID)), torch.arange(len(GRID)) * 3
    params = [
        SamplingParams(temperature=t, top_k=k, top_p=p, min_p=m, seed=i % 4) for i, (t, k, p, m) in enumerate(GRID)
    ]
    params[::5] = [SamplingParams()] * len(params[::5])  # greedy ones between
    together = pick(logits, params, positions)
    alone = torch.cat([pick(logits[i : i + 1], params[i : i + 1], positions[i : i + 1]) for i in range(len(GRID))])
    assert torch.equal(together, alone)
    order = torch.randperm(len(GRID), generator=torch.Generator().manual_seed(0))
    shuffled = pick(logits[order], [params[i] for i in order], positions[order])
    assert torch.equal(shuffled, together[order])
