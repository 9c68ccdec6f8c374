"""New keys and values into pages: kernel and twin write the slots they are told and nothing else."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from selfspec.kernels import reference

kv_scatter = pytest.importorskip("selfspec.kernels.kv_scatter", reason="Triton is not installed")


@given(
    slots=st.lists(
        st.one_of(st.integers(0, 23), st.just(-1)),
        min_size=1,
        max_size=9,
        unique_by=lambda s: s if s >= 0 else object(),
    ),
    shape=st.sampled_from([(1, 8), (2, 64), (3, 80)]),
    turned=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
)
def test_slots_hold_their_tokens_and_all_else_stays(slots, shape, turned, dtype):
    key, value = torch.randn(2, len(slots), *shape).to(dtype)
    if turned:  # as a model hands them over: head by head
        key = key.transpose(0, 1).contiguous().transpose(0, 1)
    before = torch.randn(2, 6, 4, *shape).to(dtype)
    before[:, 0, 0] = float("nan")
    wanted = before.flatten(1, 2).clone()
    for token, slot in enumerate(slots):
        if slot >= 0:
            wanted[0, slot], wanted[1, slot] = key[token], value[token]
    for scatter in [reference.scatter] + ([kv_scatter.scatter] if dtype != torch.float64 else []):
        keys, values = before.clone()
        scatter(key, value, keys, values, torch.tensor(slots))
        for got, want in zip((keys, values), wanted, strict=True):
            torch.testing.assert_close(got.flatten(0, 1), want, rtol=0, atol=0, equal_nan=True)


def test_no_tokens_are_no_work():
    keys, values = torch.zeros(2, 2, 4, 1, 8)
    kv_scatter.scatter(torch.zeros(0, 1, 8), torch.zeros(0, 1, 8), keys, values, torch.zeros(0, dtype=torch.int64))
    assert not keys.any()
