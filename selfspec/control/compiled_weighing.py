"""`CompiledWeighing`: the same, in one compiled function; see `selfspec/kernels/cpu/weighing.cpp`."""

from __future__ import annotations

import ctypes
from array import array

from selfspec.control.finder import SURE, Finder
from selfspec.control.lengths import SHORTEST, Weighed, growing
from selfspec.control.matches import FIRST, FIRST_WEIGHT, LEAST, LONG, MOST_FOUND, POOL_WEIGHT, ROW_WEIGHT
from selfspec.control.plan import MATCH_EDGES
from selfspec.control.weighing import PLAN_SECONDS, Weighing
from selfspec.control.worth import Worth
from selfspec.kernels.compiled_call import WEIGHED, Matches, Rounds, functions, loaded


class CompiledWeighing(Weighing):
    """Weighs all lengths of matches at once."""

    def __init__(self, finder: Finder) -> None:
        super().__init__(finder)
        self._call = functions().selfspec_weigh
        self._edges, self._first = array("q", MATCH_EDGES), array("d", FIRST)
        self._out = array("d", bytes(8 * WEIGHED * len(SHORTEST)))
        self._matches, self._rounds = Matches(len(FIRST), MOST_FOUND), Rounds()
        matches = self._matches
        held = [each.buffer_info()[0] for each in (self._edges, *finder.matches.counts, self._first)]
        matches.edges, matches.hits, matches.seen, matches.pooled_hits, matches.pooled_seen, matches.first = held
        matches.first_weight, matches.pool_weight, matches.row_weight = FIRST_WEIGHT, POOL_WEIGHT, ROW_WEIGHT
        matches.least = LEAST
        self._addresses = [ctypes.addressof(each) for each in (matches, self._rounds)]

    def all(self, request_id: int, worth: Worth, usual: float, beside_layers: bool) -> list[Weighed]:
        """See `Weighing`."""
        finder, matches, out = self._finder, self._matches, self._out
        few, most = (self._few(worth, beside_layers), finder.most) if finder.looks_up else (0, 0)
        asked, usuals = array("d"), []
        for match in SHORTEST:
            usuals.append(self._usual(match, usual, beside_layers))
            trust, is_long = finder.trust_after(match).ratio, match >= LONG
            asked.extend((match, few, most, is_long, usuals[-1], trust, finder.likeliest, SURE, PLAN_SECONDS))
        hits, seen, matches.weight = finder.matches.counts_of(request_id)
        matches.own_hits, matches.own_seen = hits.buffer_info()[0], seen.buffer_info()[0]
        worth.tell_lookups(self._rounds)
        self._call(*self._addresses, asked.buffer_info()[0], len(SHORTEST), out.buffer_info()[0])
        weighed = [Weighed(0, usual=usuals[0])]
        for n, match in enumerate(SHORTEST[1:], 1):
            begin, usual = n * WEIGHED, usuals[n]
            length, could_pay, longest, promised, forecast, count = out[begin : begin + 6]
            chances = out[begin + 6 : begin + 6 + int(count)].tolist()
            if not could_pay:
                weighed.append(Weighed(0, usual=usual, chances=chances))
                continue
            may_branch, grown = self._may_branch(match, worth, usual, chances), growing(int(length), int(longest))
            weighed.append(Weighed(int(length), promised, forecast, usual, chances, may_branch, grown))
        return weighed


def weighing_of(finder: Finder) -> Weighing:
    """Compiled, if anything else is."""
    return Weighing(finder) if loaded() is None else CompiledWeighing(finder)
