"""`CompiledWeighing`: the same, in one compiled function; see `selfspec/kernels/cpu/weighing.cpp`."""

from __future__ import annotations

import ctypes
from array import array

from selfspec.control.finder import STRENGTHS, SURE, Finder, strength_of
from selfspec.control.lengths import SHORTEST, Weighed, growing
from selfspec.control.matches import FIRST, FIRST_WEIGHT, LEAST, LONG, MOST_FOUND, POOL_WEIGHT, ROW_WEIGHT
from selfspec.control.plan import MATCH_EDGES
from selfspec.control.weighing import PLAN_SECONDS, Weighing
from selfspec.control.worth import Worth
from selfspec.kernels.compiled_call import MOST_FOUND as ROOM
from selfspec.kernels.compiled_call import WEIGHED, Matches, Rounds, functions, loaded

assert MOST_FOUND == ROOM


class CompiledWeighing(Weighing):
    """Weighs all lengths of matches at once."""

    def __init__(self, finder: Finder) -> None:
        super().__init__(finder)
        self._call = functions().selfspec_weigh
        self._edges, self._first = array("q", MATCH_EDGES), array("d", FIRST)
        self._out = array("d", bytes(8 * WEIGHED * len(SHORTEST)))
        self._matches, self._rounds = Matches(len(FIRST), MOST_FOUND), Rounds()
        matches = self._matches
        counts = [each.buffer_info()[0] for each in finder.matches.counts]
        held = [self._edges.buffer_info()[0], *counts, self._first.buffer_info()[0]]
        matches.edges, matches.hits, matches.seen, matches.pooled_hits, matches.pooled_seen, matches.first = held
        matches.first_weight, matches.pool_weight, matches.row_weight = FIRST_WEIGHT, POOL_WEIGHT, ROW_WEIGHT
        matches.least = LEAST
        self._addresses = [ctypes.addressof(each) for each in (matches, self._rounds)]

    def all(self, request_id: int, worth: Worth, usual: float, beside_layers: bool) -> list[Weighed]:
        """See `Weighing`."""
        finder, matches, out = self._finder, self._matches, self._out
        few, most = (self._few(worth, beside_layers), finder.most) if finder.looks_up else (0, 0)
        # Matches of one strength are trusted, and easy for layers, alike.
        known = [(self._usual(n, usual, beside_layers), finder.trust_after(n).ratio) for n in (0, 1, *STRENGTHS)]
        asked, likeliest = array("d"), finder.likeliest
        for match in SHORTEST:
            least, trust = known[strength_of(match)]
            asked.extend((match, few, most, match >= LONG, least, trust, likeliest, SURE, PLAN_SECONDS))
        hits, seen, matches.weight = finder.matches.counts_of(request_id)
        matches.own_hits, matches.own_seen = hits.buffer_info()[0], seen.buffer_info()[0]
        worth.tell_lookups(self._rounds)
        self._call(*self._addresses, asked.buffer_info()[0], len(SHORTEST), out.buffer_info()[0])
        return [self._read(n, match, worth, known[strength_of(match)][0]) for n, match in enumerate(SHORTEST)]

    def _read(self, n: int, match: int, worth: Worth, usual: float) -> Weighed:
        """What was weighed of the n-th length of matches."""
        begin = n * WEIGHED
        length, could_pay, longest, promised, forecast, count = self._out[begin : begin + 6]
        if not match:
            return Weighed(0, usual=usual)
        chances = self._out[begin + 6 : begin + 6 + int(count)].tolist()
        if not could_pay:
            return Weighed(0, usual=usual, chances=chances)
        may_branch, grown = self._may_branch(match, worth, usual, chances), growing(int(length), int(longest))
        return Weighed(int(length), promised, forecast, usual, chances, may_branch, grown)


def weighing_of(finder: Finder) -> Weighing:
    """Compiled, if anything else is."""
    return Weighing(finder) if loaded() is None else CompiledWeighing(finder)
