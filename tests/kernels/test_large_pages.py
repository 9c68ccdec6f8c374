"""Memory handed out for weights: zeros, apart from each other, and alive as long as any tensor of it."""

from __future__ import annotations

import gc

import torch
from hypothesis import given
from hypothesis import strategies as st

from selfspec.kernels.large_pages import CHUNK, LARGE, LINE, LargePageAllocator


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 3000)), min_size=1, max_size=8))
def test_tensors_are_zeros_of_their_shape_and_share_no_cache_line(shapes):
    allocator = LargePageAllocator()
    made = [allocator.zeros(*shape) for shape in shapes]
    for number, (one, shape) in enumerate(zip(made, shapes, strict=True)):
        assert one.shape == shape and not one.any()
        assert one.data_ptr() % LINE == 0
        one.fill_(number + 1)
    assert all((one == number + 1).all() for number, one in enumerate(made))


def test_a_tensor_outlives_its_allocator_and_may_be_larger_than_a_chunk():
    allocator = LargePageAllocator()
    small, large = allocator.zeros(3), allocator.zeros(CHUNK // 4 + 5)
    large[-1] = 7
    del allocator
    gc.collect()
    assert large.data_ptr() % LARGE == 0
    assert small.tolist() == [0, 0, 0] and large[-1] == 7 and torch.equal(large[:-1], torch.zeros(CHUNK // 4 + 4))
