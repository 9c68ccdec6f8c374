"""Picks: the twin is `executors.pick`'s, the kernel is its twin, filters keep what transformers' keep."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from selfspec.executors.pick import Sampling, Subset, pick_surely, scored, second_choices, surely
from selfspec.kernels import reference
from selfspec.kernels.gumbel import gumbel
from selfspec.kernels.layout import SamplingTensors
from tests.kernels import samples

fused_pick = pytest.importorskip("selfspec.kernels.fused_pick", reason="Triton is not installed")

a_kind = st.tuples(
    st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    st.sampled_from([0, 1, 3, 40, 5000]),
    st.sampled_from([1.0, 0.95, 0.5, 0.01]),
    st.sampled_from([0.0, 0.05, 0.4, 1.0]),
)
vocabularies = st.sampled_from([2, 33, 300])


def logits_for(count, vocab, seed):
    return 3 * torch.randn(count, vocab, generator=torch.Generator().manual_seed(seed))


def by_engine(logits, kinds, sampling):
    each = [Sampling(*kind, seed) for kind, seed in zip(kinds, sampling.seeds.tolist(), strict=True)]
    return pick_surely(logits, each, sampling.positions)


@settings(max_examples=100)
@given(kinds=st.lists(a_kind, min_size=1, max_size=5), vocab=vocabularies, seed=st.integers(0, 10_000))
def test_twin_picks_as_the_engine_does(kinds, vocab, seed):
    logits, sampling = logits_for(len(kinds), vocab, seed), samples.sampling(kinds, seed)
    picks, sure = by_engine(logits, kinds, sampling)
    got, got_sure = reference.pick(logits, sampling)
    assert torch.equal(got, picks)
    torch.testing.assert_close(got_sure, sure, rtol=1e-4, atol=1e-6)


@settings(max_examples=12)
@given(
    kinds=st.lists(a_kind, min_size=1, max_size=3),
    vocab=vocabularies,
    seed=st.integers(0, 10_000),
    given_noise=st.booleans(),
)
def test_kernel_picks_as_its_twin(kinds, vocab, seed, given_noise):
    logits, sampling = logits_for(len(kinds), vocab, seed), samples.sampling(kinds, seed)
    noise = gumbel(sampling.seeds, sampling.positions, vocab) if given_noise else None
    wanted, wanted_sure = reference.pick(logits, sampling)
    got, got_sure = fused_pick.pick(logits, sampling, noise)
    assert torch.equal(got, wanted)
    torch.testing.assert_close(got_sure, wanted_sure, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("pick_two", "examples"), [(reference.pick_two, 40), (fused_pick.pick_two, 8)])
def test_parts_of_a_vocabulary_and_second_choices_are_picked_as_by_the_engine(pick_two, examples):
    @settings(max_examples=examples)
    @given(kinds=st.lists(a_kind, min_size=1, max_size=3), size=st.sampled_from([2, 33]), seed=st.integers(0, 10_000))
    def check(kinds, size, seed):
        rng = torch.Generator().manual_seed(seed)
        logits, sampling = logits_for(len(kinds), size, seed), samples.sampling(kinds, seed)
        names = torch.randperm(300, generator=rng)[:size].sort().values
        each = [Sampling(*kind, one) for kind, one in zip(kinds, sampling.seeds.tolist(), strict=True)]
        found = scored(logits, each, sampling.positions, None, Subset(names, 300))
        wanted, sure = surely(found)
        for held in (names, None):
            if held is None:  # noise of other tokens
                found = scored(logits, each, sampling.positions)
                wanted, sure = surely(found)
            got, got_sure, got_seconds = pick_two(logits, sampling, names=held)
            seconds = second_choices(found, wanted)
            assert torch.equal(got, wanted if held is None else names[wanted])
            assert torch.equal(got_seconds, seconds if held is None else names[seconds])
            torch.testing.assert_close(got_sure, sure, rtol=1e-4, atol=1e-6)

    check()


def test_second_choices_in_the_block_of_the_first_and_in_others():
    vocab = 2 * fused_pick.BLOCK + 5
    logits, sampling = logits_for(4, vocab, 1), samples.sampling([(0.0, 0, 1.0, 0.0)] * 4, 0)
    for row, (first, second) in enumerate([(7, 9), (7, vocab - 1), (vocab - 1, vocab - 2), (fused_pick.BLOCK, 3)]):
        logits[row, first], logits[row, second] = 99.0, 98.0
    logits[3, 4] = 98.0  # as likely, and higher
    names = 3 * torch.arange(vocab)
    for held in (None, names):
        got = fused_pick.pick_two(logits, sampling, names=held)
        wanted = reference.pick_two(logits, sampling, names=held)
        assert torch.equal(got[0], wanted[0]) and torch.equal(got[2], wanted[2])
    assert (wanted[2] // 3).tolist() == [9, vocab - 1, vocab - 2, 3]


def test_a_vocabulary_of_several_blocks():
    vocab = 2 * fused_pick.WIDE + 77
    kinds = [(0.0, 0, 1.0, 0.0), (1.0, 700, 0.9, 0.01), (0.7, 0, 1.0, 0.0)]
    logits, sampling = logits_for(3, vocab, 0), samples.sampling(kinds, 0)
    logits[0, vocab - 1] = logits[0].max() + 1
    got, got_sure = fused_pick.pick(logits, sampling)
    wanted, sure = by_engine(logits, kinds, sampling)
    assert got.tolist() == wanted.tolist()
    assert got[0] == vocab - 1
    torch.testing.assert_close(got_sure, sure, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("seed", [0, 1, -1, (1 << 63) - 1, -(1 << 63), 123456789])
def test_noise_hashed_in_place_is_that_of_the_processor_to_the_last_bit(seed):
    """With logits of 0, a pick is the loudest token, and how sure it is tells of all the noise."""
    positions = torch.tensor([0, 1, 511, 1 << 40])
    noise = gumbel(torch.full((4,), seed), positions, 300)
    sampling = samples.sampling([(1.0, 0, 1.0, 0.0)] * 4, 0)._replace(seeds=torch.full((4,), seed), positions=positions)
    got, sure = fused_pick.pick(torch.zeros(4, 300), sampling)
    again, sure_again = fused_pick.pick(torch.zeros(4, 300), sampling, noise)
    assert torch.equal(got, noise.argmax(-1))
    assert torch.equal(got, again) and torch.equal(sure, sure_again)


@pytest.mark.parametrize("pick", [reference.pick, fused_pick.pick])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_ties_go_to_the_lowest_token_and_what_is_no_number_wins(pick, temperature):
    sampling = samples.sampling([(temperature, 0, 1.0, 0.0)] * 3, 0)
    logits = torch.zeros(3, 40)
    logits[0, [7, 30]] = 1.0
    logits[1] = float("-inf")
    logits[2, 5] = float("nan")
    picks, _ = pick(logits, sampling, torch.zeros(3, 40))
    assert picks.tolist() == [7, 0, 5]


def test_of_tokens_as_likely_as_the_last_one_kept_all_are_kept():
    """Whichever a sort would have kept: a bound is a logit, not a place in an order."""
    logits = torch.tensor([[2.0, 1.0, 1.0, 1.0, -3.0]]).expand(32, 5).contiguous()
    for kind in [(1.0, 2, 1.0, 0.0), (1.0, 0, 0.6, 0.0)]:
        sampling = samples.sampling([kind] * 32, 0)
        picks, _ = reference.pick(logits, sampling)
        assert set(picks.tolist()) == {0, 1, 2, 3}
        few = SamplingTensors(*(each[:5] for each in sampling[:6]))
        assert torch.equal(fused_pick.pick(logits[:5], few)[0], picks[:5])
