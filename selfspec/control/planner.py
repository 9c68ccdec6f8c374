"""The exit layer and stops of most expected tokens per second, or plain decoding where drafts promise too little."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from selfspec.control.acceptance import SecondRates
from selfspec.control.decay import Floats
from selfspec.control.parts import WHOLE, Part
from selfspec.control.pieces import MOST
from selfspec.control.plan import Plan, SecondChoices, ShadowPlan, SurvivalStop
from selfspec.control.worth import Worth

HANDICAP = 1.05  # what a draft must promise over plain decoding before it is begun (cf. arXiv 2406.14066)
OFF = 0.97  # and to go on: drafts tell more of their worth than shadow picks do
STAY = 0.02  # what another exit layer must promise more than the present one, where one row tells which is better
MARGIN = 1.1  # what drafts by copies must promise over those by layers, as long as nobody knows how good they are
# Models that were trained to leave early do so best near a quarter of the depth: what such an exit counts more than its
# promise before it was seen; how that falls off, in logarithms of depth; and the picks after which it counts half.
FAVOUR, FAVOUR_WIDTH, FAVOUR_SEEN = 0.3, 0.5, 24.0
MOST_BESIDE = 8  # second choices drafted for a row
TOO_SOON = 0.75  # of a draft's expected length: a stop that would end a middling one before that is not used
UNKNOWN = 4  # tokens drafted at most by a layer of which as few picks were seen; of more, as many as those


class Evidence(NamedTuple):
    """What is known of every layer; arrays are `[L - 1, bins]` or `[L - 1]`, exit layer e in row e - 1."""

    right: Floats  # how often a pick of each bin of confidence is right
    share: Floats  # how often each bin occurs
    seen: Floats  # lasting picks
    agreement: Floats  # how often copies are right where the layers would be
    trust: float  # in forecasts of drafts by layers
    slower: tuple[float, float]  # rounds that layers, and copies, draft in take so much longer, see `Correction`
    margin: float = 1.0  # what drafts by copies must promise over those by layers
    seconds: SecondRates | None = None  # of second choices; None: they are not drafted


class Decision(NamedTuple):
    """How layers draft, if any does."""

    usual: float = 0.0  # tokens per second believed, of all rows: of plain rounds where nothing is drafted
    speedup: float = 1.0  # that over plain rounds; where nothing is drafted, what drafts would have come to
    exit_layer: int | None = None
    part: Part = WHOLE
    length: float = 0.0  # drafted tokens expected per row
    tokens: float = 0.0  # per row and second, by the table
    rounds: Sequence[float] = (0.0,) * (MOST + 1)  # their seconds, by drafted tokens per row
    stop: SurvivalStop | None = None
    second_choices: SecondChoices | None = None
    most: int = MOST  # tokens drafted per row

    def plan(self, draft_lengths: tuple[int, ...], shadow: ShadowPlan | None) -> Plan:
        """A round of rows that draft so many tokens each, at most."""
        return Plan(
            self.exit_layer,
            draft_lengths,
            stop=self.stop,
            keep_confidence=True,
            shadow=shadow,
            second_choices=self.second_choices,
            draft_vocab=self.part.size,
            draft_bits=self.part.bits,
            speedup=self.speedup,
        )


def decide(now: Decision, worth: Worth, parts: Sequence[Part], layers: Sequence[int], evidence: Evidence) -> Decision:
    """The best way to draft.

    Args:
        now: what holds until then; another way must promise more.
        parts: ways of drafting to choose from, the layers themselves first.
        layers: exit layers to choose from.
    """
    plain = worth.num_rows / worth.plain_seconds
    least = HANDICAP if now.exit_layer is None else OFF
    rates, drafted, covered = _rates(worth, parts, evidence)
    slower = np.array([evidence.slower[part.bits is not None] for part in parts])
    promised = np.maximum.reduce(rates, 2) / slower[:, None]
    at, exit_layer = _choose(now, worth.num_rows, parts, layers, promised, evidence)
    part, line = parts[at], exit_layer - 1
    trusted = evidence.trust * float(promised[at, line])
    if trusted < least * plain:
        return Decision(plain, trusted / plain)
    worth.draft_by(*part.priced_as)
    stop_at = int(rates[at, line].argmax())
    rate, length = float(rates[at, line, stop_at]), float(drafted[line, stop_at])
    right = tuple((evidence.right[line] * covered[at, line]).tolist())
    drafting = _drafting(exit_layer, part, rate, length, right, worth, evidence)
    return drafting._replace(usual=trusted, speedup=trusted / plain)


def _rates(worth: Worth, parts: Sequence[Part], evidence: Evidence) -> tuple[Floats, Floats, Floats]:
    """Tokens per second `[parts, L - 1, stops]`, drafted tokens `[L - 1, stops]`, coverage `[parts, L - 1]`."""
    coverages = np.array([[part.coverage] for part in parts]).repeat(len(evidence.right), 1)
    coverages[[part.bits is not None for part in parts]] *= evidence.agreement
    rates, drafted = worth.rates(evidence.right, evidence.share, [part.priced_as for part in parts], coverages)
    return rates, drafted, coverages


def _choose(
    now: Decision,
    num_rows: int,
    parts: Sequence[Part],
    layers: Sequence[int],
    promised: Floats,
    evidence: Evidence,
) -> tuple[int, int]:
    """Which of the parts, and the exit layer."""
    favour = _favour(len(evidence.right) + 1) * FAVOUR_SEEN / (FAVOUR_SEEN + evidence.seen)
    weighed = promised * (1 + favour / num_rows)  # many rows soon tell which layers are right
    weighed[[part.bits is not None for part in parts]] /= evidence.margin
    for line, part in zip(weighed, parts, strict=True):
        line[[e not in layers or e > (part.deepest or e) for e in range(1, len(line) + 1)]] = 0
    at, line = divmod(int(weighed.argmax()), weighed.shape[1])
    if now.exit_layer is not None:
        for before, part in enumerate(parts):
            if (
                part.way == now.part.way
                and weighed[at, line] < (1 + STAY / num_rows) * weighed[before, now.exit_layer - 1]
            ):
                return before, now.exit_layer
    return at, line + 1


def _favour(num_layers: int) -> Floats:
    away = np.log(4 * np.arange(1, num_layers) / num_layers)
    return np.asarray(FAVOUR * np.exp(-(away**2) / FAVOUR_WIDTH))


def _drafting(
    exit_layer: int, part: Part, rate: float, length: float, right: tuple[float, ...], worth: Worth, evidence: Evidence
) -> Decision:
    """How the chosen layer drafts; `right` is by bin of confidence, `rate` by the table."""
    line = exit_layer - 1
    acceptance = sum([chance * often for chance, often in zip(right, evidence.share[line].tolist(), strict=True)])
    value = rate / max(acceptance, 1e-6)  # of a second, in chances of being right so far
    least_likely, most = value * worth.one_more(exit_layer, length), MOST
    if least_likely > acceptance ** (TOO_SOON * length):  # costs rise in steps: the next token is dearer than the last
        least_likely, most = min(least_likely, value * worth.each(exit_layer, length)), max(1, math.ceil(length))
    return Decision(
        exit_layer=exit_layer,
        part=part,
        length=length,
        tokens=rate / worth.num_rows,
        rounds=worth.rounds(exit_layer),
        stop=SurvivalStop(right, least_likely),
        second_choices=_second_choices(exit_layer, right, length, rate, worth, evidence.seconds),
        most=min(most, max(UNKNOWN, int(evidence.seen[line] + 1e-6))),
    )


def _second_choices(
    exit_layer: int, right: tuple[float, ...], length: float, rate: float, worth: Worth, seconds: SecondRates | None
) -> SecondChoices | None:
    """Which of them are drafted beside a draft of about `length` tokens; None where none is worth its time."""
    if seconds is None:
        return None
    second = seconds.of(exit_layer)
    fixed, each = worth.beside(exit_layer, length)
    # Of a first token; later ones are come to less often.
    if max([(1 - chance) * other for chance, other in zip(right, second, strict=True)]) <= each * rate:
        return None
    return SecondChoices(right, second, each * rate, MOST_BESIDE, fixed * rate / worth.num_rows)


def could_pay(worth: Worth, layers: Sequence[int], speedup: float, slower: float) -> tuple[int, ...]:
    """Exit layers of such a speedup if they were always right: to probe the others would be for nothing."""
    least, limits = slower * speedup * worth.num_rows / worth.plain_seconds, worth.limits()
    return tuple([layer for layer in layers if limits[layer - 1] >= least])
