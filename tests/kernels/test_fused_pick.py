"""Picks: the kernel is torch's pick; filters keep what transformers' keep."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from selfspec.kernels import reference
from selfspec.kernels.gumbel import gumbel
from selfspec.kernels.pick import params_of, sampling_tensors
from selfspec.params import SamplingParams
from tests.kernels import samples

fused_pick = pytest.importorskip("selfspec.kernels.fused_pick", reason="Triton is not installed")

a_kind = st.tuples(
    st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    st.sampled_from([0, 1, 3, 40, 5000]),
    st.sampled_from([1.0, 0.95, 0.5, 0.01]),
    st.sampled_from([0.0, 0.05, 0.4, 1.0]),
)
BOTH = [reference.pick, fused_pick.pick]


def logits_for(count, vocab, seed):
    return 3 * torch.randn(count, vocab, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=7)
@given(
    kinds=st.lists(a_kind, min_size=1, max_size=3),
    vocab=st.sampled_from([2, 33, 300]),
    is_part=st.booleans(),
    seed=st.integers(0, 10_000),
)
def test_kernel_picks_as_torch_does(kinds, vocab, is_part, seed):
    logits, sampling = logits_for(len(kinds), vocab, seed), samples.sampling(kinds, seed)
    some = torch.randperm(900, generator=torch.Generator().manual_seed(seed))[:vocab].sort().values
    names = some if is_part else None
    wanted, confidences = reference.pick(logits, sampling, names)
    got, got_confidences = fused_pick.pick(logits, sampling, names)
    assert torch.equal(got, wanted)
    torch.testing.assert_close(got_confidences, confidences, rtol=1e-4, atol=1e-6)


def test_how_rows_pick_is_the_same_on_the_host_and_in_tensors():
    rows = [
        SamplingParams(temperature=0.5, top_k=3, top_p=0.25, min_p=0.125, seed=-7),
        SamplingParams(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=1 << 62),
    ]
    tensors = sampling_tensors(rows, torch.tensor([4, 9]))
    assert [(one.filters, one.seed) for one in params_of(tensors)] == [(one.filters, one.seed) for one in rows]
    assert tensors.sampled and tensors.filtered
    assert not sampling_tensors(rows[1:], torch.tensor([4])).sampled
    empty = tensors._replace(**{name: 0 * getattr(tensors, name) for name in tensors._fields[:6]})
    assert all(one.is_greedy for one in params_of(empty)), "slots without a row are all zeros"


def test_a_vocabulary_of_several_blocks():
    vocab = 2 * fused_pick.WIDE + 77
    kinds = [(0.0, 0, 1.0, 0.0), (1.0, 700, 0.9, 0.01), (0.7, 0, 1.0, 0.0)]
    logits, sampling = logits_for(3, vocab, 0), samples.sampling(kinds, 0)
    logits[0, vocab - 1] = logits[0].max() + 1
    got, confidences = fused_pick.pick(logits, sampling)
    wanted, wanted_confidences = reference.pick(logits, sampling)
    assert got.tolist() == wanted.tolist()
    assert got[0] == vocab - 1
    torch.testing.assert_close(confidences, wanted_confidences, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("seed", [0, -1, (1 << 63) - 1, -(1 << 63)])
def test_noise_hashed_in_the_kernel_is_that_of_the_processor(seed):
    """With logits of 0, a pick is the token with the most noise, and its confidence depends on all of the noise."""
    positions = torch.tensor([0, 1, 511, 1 << 40])
    noise = gumbel(torch.full((4,), seed), positions, 300)
    sampling = samples.sampling([(1.0, 0, 1.0, 0.0)] * 4, 0)._replace(seeds=torch.full((4,), seed), positions=positions)
    got, confidences = fused_pick.pick(torch.zeros(4, 300), sampling)
    assert torch.equal(got, noise.argmax(-1))
    torch.testing.assert_close(confidences, noise.softmax(-1).amax(-1), rtol=1e-6, atol=0)


@pytest.mark.parametrize("pick", BOTH)
def test_ties_go_to_the_lowest_token_and_what_is_no_number_wins(pick):
    logits = torch.zeros(3, 40)
    logits[0, [7, 30]] = 1.0
    logits[1] = float("-inf")
    logits[2, 5] = float("nan")
    assert pick(logits, samples.sampling([(0.0, 0, 1.0, 0.0)] * 3, 0))[0].tolist() == [7, 0, 5]


@pytest.mark.parametrize("pick", BOTH)
def test_of_tokens_as_likely_as_the_last_one_of_top_k_all_are_kept(pick):
    logits = torch.tensor([[2.0, 1.0, 1.0, 1.0, -3.0]]).expand(5, 5).contiguous()
    picks = {*pick(logits, samples.sampling([(1.0, 2, 1.0, 0.0)] * 5, 0))[0].tolist()}
    assert picks <= {0, 1, 2, 3} and len(picks & {1, 2, 3}) > 1
