"""The compiled pick gives what torch's operations give, for any filters, vocabulary and logits, row by row."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from selfspec.kernels.compiled_call import compiled_pick, sampling_bytes
from selfspec.kernels.pick import best_of, filtered, scored
from selfspec.params import SamplingParams

GRID = list(itertools.product([0.0, 0.6, 1.0, 1.7], [0, 1, 7, 300], [1.0, 0.95, 0.3], [0.0, 0.1, 1.0]))
a_kind = st.tuples(
    st.sampled_from([0.0, 0.05, 0.8, 1.0, 10.0]),
    st.sampled_from([0, 1, 7, 300, 5000]),
    st.sampled_from([1.0, 0.999, 0.9, 0.3, 0.001]),
    st.sampled_from([0.0, 0.05, 0.4]),
)


def params_of(kind, seed):
    temperature, top_k, top_p, min_p = kind
    return SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)


def by_torch(logits, params, positions):
    """Picks and their confidences."""
    return best_of(scored(logits, params, torch.tensor(positions)))


def compiled(logits, params, positions, tokens=None):
    packed = b"".join(sampling_bytes(*one.filters, one.seed) for one in params)
    return compiled_pick(logits, packed, positions, tokens, with_confidence=True)


def check(logits, params, positions):
    picks, confidences = by_torch(logits, params, positions)
    got = compiled(logits, params, positions)
    assert torch.equal(got.tokens, picks)
    torch.testing.assert_close(got.confidences, confidences, rtol=1e-4, atol=1e-6, equal_nan=True)


def some_logits(rows, vocab, seed, spread=3.0):
    return spread * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))


@given(
    kinds=st.lists(a_kind, min_size=1, max_size=6),
    vocab=st.sampled_from([1, 2, 7, 16, 40, 255, 256, 257, 900, 4096]),
    spread=st.sampled_from([0.03, 3.0, 12.0]),
    first=st.sampled_from([0, 5, 1 << 40]),
    seed=st.integers(0, 10_000),
)
def test_rows_of_any_filters_pick_as_torch_does(kinds, vocab, spread, first, seed):
    params = [params_of(kind, seed * 1_000_003 * (-1) ** i) for i, kind in enumerate(kinds)]
    check(some_logits(len(kinds), vocab, seed, spread), params, range(first, first + len(kinds)))


def test_a_large_vocabulary_is_picked_from_as_torch_does():
    params = [params_of(kind, i) for i, kind in enumerate(GRID[::5])]
    check(some_logits(len(params), 50257, 0), params, range(len(params)))


@pytest.mark.parametrize("temperature", [1e-6, 1e-3, 1e3, 1e6])
@pytest.mark.parametrize("spread", [1e-3, 30.0, 1e20, 1e34])
def test_temperatures_and_logits_of_any_size(temperature, spread):
    """Scores so large that noise is rounded away, ties among them, and scores beyond what a float holds."""
    params = [SamplingParams(temperature=temperature, top_p=top_p, seed=i) for i, top_p in enumerate([1.0, 0.9] * 4)]
    check(some_logits(8, 500, 1, spread), params, range(8))


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("kind", [(0.0, 0, 1.0, 0.0), (0.8, 0, 1.0, 0.0), (0.8, 5, 0.9, 0.1)])
def test_impossible_logits_harm_no_other_row(bad, kind):
    logits = some_logits(3, 900, 2)
    logits[1, 77:] = bad
    logits[1] = bad if bad < 0 else logits[1]
    check(logits, [params_of(kind, 4)] * 3, range(3))


def test_of_equal_logits_the_first_is_picked():
    logits = torch.zeros(2, 600)
    logits[1, [5, 300, 599]] = 1.0
    got = compiled(logits, [SamplingParams()] * 2, range(2))
    assert got.tokens.tolist() == [0, 5]


@pytest.mark.parametrize("kind", [(1.0, 7, 1.0, 0.0), (1.0, 0, 0.6, 0.0), (1.3, 20, 0.8, 0.0), (1.0, 0, 1.0, 0.3)])
@pytest.mark.parametrize("vocab", [12, 70, 300])
def test_tied_logits_keep_as_many_tokens_as_torch_keeps(kind, vocab):
    """All that many draws ever pick, by their logits: which of equals top-p keeps is left open by torch's sort."""
    logits, draws = (some_logits(1, vocab, 3) / 2).round(), 4000
    kept = filtered(logits, params_of(kind, 0))[0].isfinite()
    got = compiled(logits.expand(draws, -1), [params_of(kind, 0)] * draws, range(draws))
    assert sorted(logits[0, got.tokens.unique()].tolist()) == sorted(logits[0, kept].tolist())


def test_some_tokens_of_a_vocabulary_are_picked_by_the_noise_they_have_in_it():
    params, positions = [params_of(kind, i) for i, kind in enumerate(GRID)], range(len(GRID))
    tokens = torch.randperm(900, generator=torch.Generator().manual_seed(1))[:130].sort()[0]
    logits = some_logits(len(GRID), 900, 5)
    others = torch.ones(900, dtype=torch.bool).index_fill(0, tokens, False)
    picks, confidences = by_torch(logits.masked_fill(others, -1e4), params, positions)
    for each in (tokens, tokens.repeat(len(GRID), 1)):
        got = compiled(logits[:, tokens], params, positions, each)
        assert torch.equal(got.tokens, picks)
        torch.testing.assert_close(got.confidences, confidences, rtol=1e-4, atol=1e-6)


def test_a_rows_bits_do_not_depend_on_the_others_nor_on_threads():
    params, positions = [params_of(kind, i) for i, kind in enumerate(GRID)], range(7, 7 + len(GRID))
    logits = some_logits(len(GRID), 1000, 6)
    alone = [compiled(logits[i : i + 1], [one], [positions[i]]) for i, one in enumerate(params)]
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            for got, each in zip(compiled(logits, params, positions), zip(*alone, strict=True), strict=True):
                assert torch.equal(got, torch.cat(each))
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("top_p", [1e-50, 5e-324])
def test_top_p_keeps_the_likeliest_token_however_little_it_asks_for(top_p):
    logits = some_logits(20, 900, 3, 0.1)
    got = compiled(logits, [SamplingParams(temperature=1.0, top_p=top_p, seed=i) for i in range(20)], range(20))
    assert torch.equal(got.tokens, logits.argmax(-1))
