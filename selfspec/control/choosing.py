"""`Chooser`: which exit layer, drafting in which way, promises most tokens per second."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from selfspec.control.experience import Experience
from selfspec.control.parts import Part
from selfspec.control.tracker import Floats
from selfspec.control.worth import Worth

STAY = 0.02  # what another exit layer must promise more than the present one, where one row tells which is better
# How much more an exit at a quarter of the depth counts than its promise; and how that falls off, in logs of depth.
FAVOUR, FAVOUR_WIDTH = 0.3, 0.5


class Choice(NamedTuple):
    """What to draft by, and what is expected of it."""

    part: Part
    exit_layer: int
    rate: float  # tokens per second of all rows
    length: float  # drafted tokens per row
    covered: float = 1.0  # of what the layer would pick, and be right
    trust: float = 1.0  # in forecasts for layers like this one
    right: Sequence[float] = ()  # by bin of confidence, how often the layer is right,
    share: Sequence[float] = ()  # and how often that bin occurs


class Chooser:
    """Chooses by what rounds have shown.

    Args:
        exit_layers: those to choose from.
    """

    def __init__(self, experience: Experience, exit_layers: Sequence[int], num_layers: int) -> None:
        self._experience, self._exit_layers = experience, exit_layers
        self._favour = favour_of(num_layers)
        self._trusts = self._right = self._share = np.empty(0)

    def look(self) -> None:
        """Take on what has come until now."""
        self._trusts = self._experience.trusts()
        self._right, self._share = self._experience.tracker.estimates()

    def choose(self, parts: Sequence[Part], worth: Worth, now: tuple[Part, int | None], margin: float) -> Choice:
        """The best of these ways, which `worth` then prices drafts by.

        Args:
            now: a way and an exit layer, which stay in use unless others promise enough more.
            margin: how many times as much as the layers copies must promise.
        """
        favour = (1 + self._favour / worth.num_rows) * self._trusts  # many rows soon tell which layers are right
        agreement, stay = self._experience.agreement.ratios(), 1 + STAY / worth.num_rows
        layers, right, share = self._exit_layers, self._right, self._share
        chosen = choose(parts, layers, worth, right, share, now, stay, favour, agreement, margin)
        line = chosen.exit_layer - 1
        return chosen._replace(trust=float(self._trusts[line]), right=right[line].tolist(), share=share[line].tolist())


def choose(
    parts: Sequence[Part],
    layers: Sequence[int],
    worth: Worth,
    right: Floats,
    share: Floats,
    now: tuple[Part, int | None],
    stay: float,
    favour: Floats | float = 1.0,
    agreement: Floats | None = None,
    margin: float = 1.0,
) -> Choice:
    """The part and exit layer of most tokens per second, which `worth` then prices drafts by.

    Args:
        right: how often each layer is right among tokens that drafts are picked among, and `share`, as in
            `Worth.rates`.
        now: a part and a layer, which stay in use unless others promise `stay` times as much.
        favour: `[L - 1]`, by what each layer's promise is multiplied beside the others'.
        agreement: `[L - 1]`, how often copies are right where the layers are; None: always.
        margin: how many times as much as the layers copies must promise.
    """
    ways = [part.priced_as for part in parts]
    coverages = np.array([[part.coverage] for part in parts]).repeat(len(right), 1)  # [ways, L - 1]
    if agreement is not None:
        coverages[[part.bits is not None for part in parts]] *= agreement
    rates, drafted = worth.rates(right, share, ways, coverages)
    margins = np.array([[1.0 if part.bits is None else 1 / margin] for part in parts])
    promised = (np.maximum.reduce(rates, 2) * favour * margins).tolist()
    best, at, exit_layer, before = -1.0, 0, 0, (-1, 0)
    for i, (part, by_layer) in enumerate(zip(parts, promised, strict=True)):
        for layer in layers:
            if by_layer[layer - 1] > best and layer <= (part.deepest or layer):
                best, at, exit_layer = by_layer[layer - 1], i, layer
        if part.way == now[0].way and now[1] is not None:
            before = i, now[1]
    if before[0] >= 0 and best < stay * promised[before[0]][before[1] - 1]:
        at, exit_layer = before
    worth.draft_by(*ways[at])
    line = exit_layer - 1
    by_stop = rates[at, line].tolist()
    rate = max(by_stop)
    length = float(drafted[line, by_stop.index(rate)])
    return Choice(parts[at], exit_layer, rate, length, float(coverages[at, line]))


def favour_of(num_layers: int) -> Floats:
    """`[L - 1]`, beside 1: models that were trained to leave early do so best near a quarter of the depth."""
    away = np.log(4 * np.arange(1, num_layers) / num_layers)
    return FAVOUR * np.exp(-(away**2) / FAVOUR_WIDTH)
