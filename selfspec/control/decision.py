"""`Decision`: the exit layer and stops of most expected tokens per second, or none, until somebody decides anew."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from selfspec.control.choosing import Choice, Chooser
from selfspec.control.experience import Experience
from selfspec.control.kinds import BY_LAYERS
from selfspec.control.parts import WHOLE, Part
from selfspec.control.pieces import MOST
from selfspec.control.plan import Plan, SecondChoices, ShadowPlan, SurvivalStop
from selfspec.control.worth import Worth

HANDICAP = 1.05  # what a draft must promise over plain decoding before it is begun (cf. arXiv 2406.14066)
OFF = 0.97  # and to go on: a draft tells more of what drafts are worth than a look does, and forecasts are seldom exact
# What drafts by copies must promise over those by the layers: the latter feed verification what they have run already,
# and need nothing believed of how often copies are right.
MARGIN = 1.1
MOST_BESIDE = 8  # second choices drafted for a row
# Of a draft's expected length: a stop that would end one of middling tokens before that contradicts what it came from,
# as it does where costs rise in steps, and the token after the last is far dearer than those before.
TOO_SOON = 0.75
UNKNOWN = 4  # tokens drafted at most by a layer of which as few picks were seen; of more, as many as those


class Decision(NamedTuple):
    """How layers draft, if any does."""

    usual: float = 0.0  # tokens per second believed, of all rows: of plain rounds where nothing is drafted
    speedup: float = 1.0  # that over plain rounds; where nothing is drafted, what drafts would have come to
    exit_layer: int | None = None
    part: Part = WHOLE  # of the vocabulary
    length: float = 0.0  # drafted tokens expected per row
    rate: float = 0.0  # tokens per second forecast
    rounds: Sequence[float] = (0.0,) * (MOST + 1)  # their seconds, by drafted tokens per row
    stop: SurvivalStop | None = None
    second_choices: SecondChoices | None = None
    most: int = MOST  # tokens drafted per row
    is_known: bool = True  # whether more than `UNKNOWN` picks of the layer were seen
    covered: float = 1.0  # see `control.choosing.Choice`

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


def decide(
    now: Decision, worth: Worth, parts: Sequence[Part], chooser: Chooser, experience: Experience, least: float
) -> Decision:
    """The best exit layer, and the chance of being all right below which a row's draft stops.

    Args:
        now: what holds until then.
        parts: of the vocabulary, to draft over.
        least: speedup that drafts must promise.
    """
    plain, in_use = worth.num_rows / worth.plain_seconds, (now.part, now.exit_layer)
    slower = experience.pace.kinds.ratio(BY_LAYERS, worth.num_rows)
    chooser.look()
    chosen = chooser.choose(parts, worth, in_use, MARGIN)
    is_short = chosen.trust * chosen.rate < least * plain * slower
    if is_short and experience.agreement.is_known and len(parts) > 1:
        # Where the layers themselves do not pay, copies that are known need no margin over them.
        chosen = chooser.choose(parts, worth, in_use, 1.0)
    trusted = chosen.trust * chosen.rate / slower
    speedup = trusted / plain
    if speedup < least:
        return Decision(plain, speedup)
    return _drafting(chosen, worth, experience)._replace(usual=trusted, speedup=speedup)


def _drafting(chosen: Choice, worth: Worth, experience: Experience) -> Decision:
    """How the chosen layer drafts."""
    exit_layer, rate, length = chosen.exit_layer, chosen.rate, chosen.length
    right = [chance * chosen.covered for chance in chosen.right]
    acceptance = sum([chance * often for chance, often in zip(right, chosen.share, strict=True)])
    value, calibration = rate / max(acceptance, 1e-6), tuple(right)  # of a second, in chances of being right so far
    least_likely, most = value * worth.one_more(exit_layer, length), MOST
    if least_likely > acceptance ** (TOO_SOON * length):
        least_likely, most = min(least_likely, value * worth.each(exit_layer, length)), max(1, math.ceil(length))
    # As long as nobody knows how often the layer is right, its confidence says little of where to stop.
    seen = int(experience.tracker.num_lasting(exit_layer) + 1e-6)  # what is recalled is a whole number, nearly
    return Decision(
        exit_layer=exit_layer,
        part=chosen.part,
        length=length,
        rate=rate,
        rounds=worth.rounds(exit_layer),
        stop=SurvivalStop(calibration, least_likely),
        second_choices=_second_choices(exit_layer, calibration, length, rate, worth, experience),
        most=min(most, max(UNKNOWN, seen)),
        is_known=seen > UNKNOWN,
        covered=chosen.covered,
    )


def _second_choices(
    exit_layer: int, calibration: tuple[float, ...], length: float, rate: float, worth: Worth, experience: Experience
) -> SecondChoices | None:
    """Which of them are drafted beside a draft of about `length` tokens; None where none is worth its time."""
    if experience.second_rates is None:
        return None
    second = experience.second_rates.of(exit_layer)
    fixed, each = worth.beside(exit_layer, length)
    # Of a first token; later ones are come to less often.
    likeliest = max([(1 - chance) * other for chance, other in zip(calibration, second, strict=True)])
    if likeliest <= each * rate:
        return None
    return SecondChoices(calibration, second, each * rate, MOST_BESIDE, fixed * rate / worth.num_rows)


def spread(num_layers: int) -> list[int]:
    """All exit layers, those near a quarter of the depth first, then evenly outwards."""
    near = sorted(range(1, num_layers), key=lambda e: abs(math.log(4 * e / num_layers)))
    return near[::2] + near[1::2]
