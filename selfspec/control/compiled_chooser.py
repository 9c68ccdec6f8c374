"""`CompiledChooser`: the same choice, in one compiled function; see `selfspec/kernels/cpu/choice.cpp`."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence

from selfspec.control.choosing import STAY, Choice, Chooser
from selfspec.control.compiled_tracker import CompiledTracker
from selfspec.control.experience import KNOWN, Experience
from selfspec.control.parts import Part
from selfspec.control.pieces import MOST, WIDTH
from selfspec.control.plan import NUM_BINS
from selfspec.control.worth import CAPS, Worth
from selfspec.kernels.compiled_call import MOST_WIDTH, PRICES, WAY, Asked, Chosen, functions

NONE = -1  # in use
assert WIDTH <= MOST_WIDTH


class CompiledChooser(Chooser):
    """Chooses from a compiled tracker's estimates."""

    def __init__(
        self, experience: Experience, exit_layers: Sequence[int], num_layers: int, tracker: CompiledTracker
    ) -> None:
        super().__init__(experience, exit_layers, num_layers)
        self._tracker, self._num_lines = tracker, num_layers - 1
        self._choose, self._limits = functions().selfspec_choose, functions().selfspec_limits
        self._layers, self._caps = array("q", exit_layers), array("q", CAPS)
        self._best, self._prices = array("d", bytes(8 * self._num_lines)), array("d", bytes(8 * WIDTH))
        self._asked, self._chosen = Asked(), Chosen()
        asked, agreement = self._asked, experience.agreement
        asked.layers, asked.num_layers = self._layers.buffer_info()
        asked.caps, asked.num_caps = self._caps.buffer_info()
        asked.came, asked.expected = [counts.ctypes.data for counts in agreement.counts]
        asked.favour, asked.width, asked.longest, asked.known = self._favour.ctypes.data, WIDTH, MOST, KNOWN
        told = [ctypes.addressof(each) for each in (tracker.known, asked, self._chosen)]
        self._addresses = *told, self._prices.buffer_info()[0]

    def look(self) -> None:
        """See `Chooser`."""
        _ = self._experience.tracker  # with everything that came
        self._tracker.look()

    def limits(self, worth: Worth) -> list[float]:
        """See `Worth.limits`."""
        limits: list[float] = []
        for way, deepest in worth.at_best():
            by, table = worth.pieces(way)
            prices = array("b", PRICES.pack(*by, table))
            self._limits(prices.buffer_info()[0], self._num_lines, WIDTH, MOST, self._best.buffer_info()[0])
            best = [worth.num_rows * limit for limit in self._best[:deepest]]
            limits = [*map(max, limits, best), *limits[deepest:]] if limits else best
        return limits

    def choose(self, parts: Sequence[Part], worth: Worth, now: tuple[Part, int | None], margin: float) -> Choice:
        """See `Chooser`."""
        asked, chosen, experience = self._asked, self._chosen, self._experience
        told = bytearray(WAY.size * len(parts))
        asked.now_way = NONE
        for i, part in enumerate(parts):
            copies, (by, table) = part.bits is not None, worth.pieces(part.priced_as)
            beside, deepest = 1 / margin if copies else 1.0, part.deepest or self._num_lines
            WAY.pack_into(told, i * WAY.size, part.coverage, beside, copies, deepest, *by, table)
            if part.way == now[0].way and now[1] is not None:
                asked.now_way, asked.now_layer = i, now[1]
        ways = array("b", told)
        asked.num_rows, asked.num_ways, asked.ways = worth.num_rows, len(parts), ways.buffer_info()[0]
        asked.stay = 1 + STAY / worth.num_rows
        asked.pooled, asked.believed = experience.agreement.believed
        asked.trust_in_known, asked.trust = experience.trust_ratios
        self._choose(*self._addresses)
        part, begin = parts[chosen.way], (chosen.exit_layer - 1) * NUM_BINS
        worth.take_line(part.priced_as, chosen.exit_layer, self._prices.tolist())
        right, share = (each[begin : begin + NUM_BINS] for each in (self._tracker.right, self._tracker.share))
        rate, length, covered, trust = chosen.rate, chosen.length, chosen.covered, chosen.trust
        return Choice(part, chosen.exit_layer, rate, length, covered, trust, right, share)


def chooser_of(experience: Experience, exit_layers: Sequence[int], num_layers: int) -> Chooser:
    """Compiled, if the tracker is."""
    tracker = experience.tracker
    if isinstance(tracker, CompiledTracker):
        return CompiledChooser(experience, exit_layers, num_layers, tracker)
    return Chooser(experience, exit_layers, num_layers)
