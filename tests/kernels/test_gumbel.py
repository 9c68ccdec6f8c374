"""Gumbel noise from a hash: pinned, the same in any batch and order, and of the right law."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from selfspec.kernels.gumbel import NoiseAhead, gumbel

EXTREMES = [0, 1, -1, (1 << 63) - 1, -(1 << 63), 123456789, -987654321]


def splitmix(z):
    """SplitMix64's finaliser in Python's unbounded integers, straight from the paper."""
    mask = (1 << 64) - 1
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & mask
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & mask
    return z ^ (z >> 31)


def by_hand(seed, position, token):
    mask, step = (1 << 64) - 1, 0x9E3779B97F4A7C15
    key = splitmix(splitmix((seed * step + step) & mask) + position * step & mask)
    bits = splitmix(key + (token + 1) * step & mask) >> 12
    return -math.log(-math.log((bits + 0.5) / 2**52))


def at(seed, position, token, vocab=1000):
    return gumbel(torch.tensor([seed]), torch.tensor([position]), vocab)[0, token].item()


@pytest.mark.parametrize(
    ("seed", "position", "token", "value"),
    [
        (0, 0, 0, -0.0811690),
        (0, 0, 1, -0.2719792),
        (0, 1, 0, -0.6807578),
        (1, 0, 0, 0.4534737),
        (-1, 5, 999, 0.2289450),
        ((1 << 63) - 1, 17, 3, -0.6621853),
        (-(1 << 63), 4096, 42, 4.0689836),
        (1234, 1 << 40, 7, 3.5001290),
    ],
)
def test_the_stream_of_noise_never_changes(seed, position, token, value):
    assert at(seed, position, token) == pytest.approx(value, abs=1e-6)


@pytest.mark.parametrize("seed", EXTREMES)
@pytest.mark.parametrize("position", [0, 1, 511, 1 << 40])
def test_noise_is_the_hash_spelt_out_for_any_64_bit_seed(seed, position):
    noise = gumbel(torch.tensor([seed]), torch.tensor([position]), 50)[0]
    expected = torch.tensor([by_hand(seed, position, token) for token in range(50)])
    torch.testing.assert_close(noise, expected.float(), rtol=1e-6, atol=1e-6)


def test_noise_of_a_position_does_not_depend_on_its_batch_or_order_or_vocabulary():
    generator = torch.Generator().manual_seed(0)
    seeds = torch.randint(-(1 << 62), 1 << 62, (64,), generator=generator)
    positions = torch.randint(0, 1 << 20, (64,), generator=generator)
    noise = gumbel(seeds, positions, 33)
    order = torch.randperm(64, generator=generator)
    assert torch.equal(gumbel(seeds[order], positions[order], 33), noise[order])
    assert torch.equal(torch.cat([gumbel(seeds[i : i + 1], positions[i : i + 1], 33) for i in range(64)]), noise)
    assert torch.equal(gumbel(seeds, positions, 100)[:, :33], noise)


asked = st.lists(st.tuples(st.sampled_from([0, 3, -7]), st.integers(0, 40)), min_size=1, max_size=9)


@given(st.lists(st.tuples(asked, st.sampled_from([5, 64])), min_size=1, max_size=8), st.integers(0, 20_000))
def test_noise_that_is_kept_is_the_noise_of_the_moment_whatever_was_asked_before(requests, most):
    ahead = NoiseAhead(most)
    for pairs, vocab in requests:
        seeds, positions = [seed for seed, _ in pairs], torch.tensor([position for _, position in pairs])
        assert torch.equal(ahead(seeds, positions, vocab), gumbel(torch.tensor(seeds), positions, vocab))


def test_noise_is_made_once_for_a_draft_and_its_verification(monkeypatch):
    made = []
    monkeypatch.setattr(
        "selfspec.kernels.gumbel.gumbel", lambda *given: (made.append(len(given[1])), gumbel(*given))[1]
    )
    ahead = NoiseAhead()
    for position in range(16, 23):
        ahead([5], torch.tensor([position]), 100)
    ahead([5] * 7, torch.arange(16, 23), 100)
    assert made == [NoiseAhead.BLOCK]


def test_many_rows_of_a_large_vocabulary_make_no_noise_that_may_never_be_used(monkeypatch):
    made = []
    monkeypatch.setattr(
        "selfspec.kernels.gumbel.gumbel", lambda *given: (made.append(len(given[1])), gumbel(*given))[1]
    )
    NoiseAhead(most=4 * 1000 * 8)([1, 2, 3], torch.tensor([4, 5, 6]), 1000)
    assert made == [3]


def test_neighbouring_seeds_positions_and_tokens_share_no_noise():
    seeds, positions = torch.meshgrid(torch.arange(-8, 8), torch.arange(16), indexing="ij")
    noise = gumbel(seeds.flatten(), positions.flatten(), 64).double()
    assert noise.unique().numel() > 0.999 * noise.numel()
    across = [noise[:-1].flatten(), noise[:, :-1].flatten()]
    along = [noise[1:].flatten(), noise[:, 1:].flatten()]
    for one, other in zip(across, along, strict=True):
        assert abs(stats.pearsonr(one, other).statistic) < 0.02


@pytest.mark.parametrize("which", ["seeds", "positions", "tokens"])
def test_noise_follows_gumbels_law_along_each_of_its_counters(which):
    count = 20_000
    zeros, counter = torch.zeros(count, dtype=torch.int64), torch.arange(count)
    noise = {
        "seeds": lambda: gumbel(counter - count // 2, zeros, 1)[:, 0],
        "positions": lambda: gumbel(zeros, counter, 1)[:, 0],
        "tokens": lambda: gumbel(zeros[:1], zeros[:1], count)[0],
    }[which]()
    assert noise.dtype == torch.float32
    assert noise.isfinite().all()
    assert stats.kstest(noise.double().numpy(), "gumbel_r").pvalue > 1e-3
