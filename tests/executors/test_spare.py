"""Buffers of compiled rounds are used again, as far as they take little memory."""

from __future__ import annotations

from types import SimpleNamespace

from selfspec.executors.cpu.spare import MOST_BYTES, MOST_KEPT_BYTES, Spare


def buffers(size, num_bytes=MOST_KEPT_BYTES):
    return SimpleNamespace(size=size, num_bytes=num_bytes)


def test_buffers_are_handed_out_once_and_by_their_size_alone():
    spare, given = Spare(), buffers((8, 16, 64), 1)
    spare.give_back(buffers((4, 16, 64), 1))
    spare.give_back(given)
    assert spare.take(given.size) is given
    assert spare.take(given.size) is None and spare.num_bytes == 1


def test_buffers_of_all_sizes_take_no_more_than_they_may_and_those_of_the_first_size_go():
    spare, count = Spare(), 3 * MOST_BYTES // MOST_KEPT_BYTES
    for i in range(count):
        spare.give_back(buffers((i, 8, 64)))
        if i % 3 == 2:
            spare.take((i, 8, 64))  # of a size of which none is left to drop
        assert spare.num_bytes <= MOST_BYTES
    assert spare.num_bytes == MOST_BYTES - MOST_KEPT_BYTES, "the last one was taken"
    assert spare.take((0, 8, 64)) is None


def test_small_buffers_that_came_first_all_make_room_for_a_large_one():
    spare = Spare()
    for i in range(64):
        spare.give_back(buffers((i, 8, 1), MOST_BYTES // 64))
    spare.give_back(buffers((99, 8, 64)))
    assert spare.num_bytes <= MOST_BYTES and spare.take((99, 8, 64)) is not None


def test_large_buffers_are_kept_by_nobody():
    spare = Spare()
    spare.give_back(buffers((99, 8, 64), MOST_KEPT_BYTES + 1))
    assert not spare.num_bytes
