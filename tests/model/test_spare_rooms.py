"""Rooms of compiled rounds are used again, as far as they take little memory."""

from __future__ import annotations

from types import SimpleNamespace

from selfspec.executors.cpu.rounds import MOST_KEPT_BYTES, MOST_SPARE_BYTES, Spare


def room(size, num_bytes=MOST_KEPT_BYTES):
    return SimpleNamespace(size=size, num_bytes=num_bytes)


def kept(spare):
    return [one for spares in spare._by_size.values() for one in spares]


def test_a_room_is_handed_out_once_and_by_its_size_alone():
    spare, given = Spare(), room((8, 16, 64), 1)
    spare.give_back(room((4, 16, 64), 1))
    spare.give_back(given)
    assert spare.take(None, given.size) is given
    assert given not in kept(spare) and len(kept(spare)) == 1


def test_rooms_of_all_sizes_take_no_more_than_they_may_and_those_of_the_first_size_go():
    spare = Spare()
    for i in range(3 * MOST_SPARE_BYTES // MOST_KEPT_BYTES):
        spare.give_back(room((i, 8, 64)))
        if i % 3 == 2:
            spare.take(None, (i, 8, 64))  # of a size of which none is left to drop
        assert sum(one.num_bytes for one in kept(spare)) <= MOST_SPARE_BYTES
    assert len(kept(spare)) + 1 == MOST_SPARE_BYTES // MOST_KEPT_BYTES, "the last one was taken"
    assert (0, 8, 64) not in spare._by_size


def test_a_large_room_is_kept_by_nobody():
    spare = Spare()
    spare.give_back(room((99, 8, 64), MOST_KEPT_BYTES + 1))
    assert not kept(spare)
