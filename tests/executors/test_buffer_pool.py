"""Buffers of compiled rounds are used again, as far as they take little memory."""

from __future__ import annotations

from types import SimpleNamespace

from selfspec.executors.cpu.buffer_pool import MAX_BUFFER_BYTES, MAX_BYTES, BufferPool


def buffers(size, num_bytes=MAX_BUFFER_BYTES):
    return SimpleNamespace(size=size, num_bytes=num_bytes)


def test_buffers_are_handed_out_once_and_by_their_size_alone():
    pool, given = BufferPool(), buffers((8, 16, 64), 1)
    pool.give_back(buffers((4, 16, 64), 1))
    pool.give_back(given)
    assert pool.take(given.size) is given
    assert pool.take(given.size) is None and pool.num_bytes == 1


def test_buffers_of_all_sizes_take_no_more_than_they_may_and_those_of_the_first_size_go():
    pool, count = BufferPool(), 3 * MAX_BYTES // MAX_BUFFER_BYTES
    for i in range(count):
        pool.give_back(buffers((i, 8, 64)))
        if i % 3 == 2:
            pool.take((i, 8, 64))  # of a size of which none is left to drop
        assert pool.num_bytes <= MAX_BYTES
    assert pool.num_bytes == MAX_BYTES - MAX_BUFFER_BYTES, "the last one was taken"
    assert pool.take((0, 8, 64)) is None


def test_small_buffers_that_came_first_all_make_room_for_a_large_one():
    pool = BufferPool()
    for i in range(64):
        pool.give_back(buffers((i, 8, 1), MAX_BYTES // 64))
    pool.give_back(buffers((99, 8, 64)))
    assert pool.num_bytes <= MAX_BYTES and pool.take((99, 8, 64)) is not None


def test_large_buffers_are_kept_by_nobody():
    pool = BufferPool()
    pool.give_back(buffers((99, 8, 64), MAX_BUFFER_BYTES + 1))
    assert not pool.num_bytes
