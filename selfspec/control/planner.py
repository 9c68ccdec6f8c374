"""The draft of most expected tokens per second, over every drafter, exit layer, length and stop; or plain decoding.

    promised(drafter, exit layer) = max over stops of  rows * (1 + E[accepted tokens]) / E[seconds of the round]

`RoundCosts.rates` has the fraction. It is divided by how much slower such rounds were than the table of costs says, and
multiplied by how far forecasts came true. Where the best of it promises less than plain decoding, nothing is drafted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from selfspec.control.acceptance import SecondRates
from selfspec.control.decay import Floats
from selfspec.control.plan import LookupTable, Plan, SecondChoices, ShadowPlan, SurvivalStop
from selfspec.control.round_costs import BY_LAYERS, MOST, Drafter, RoundCosts, each_of, one_more

HANDICAP = 1.05  # what a draft must promise over plain decoding before it is begun (cf. arXiv 2406.14066)
OFF = 0.97  # and to go on: drafts show more of what they gain than shadow picks do
STAY = 0.02  # what another exit layer must promise more than the present one, where one row shows which is better
MARGIN = 1.1  # what drafts by copies must promise over those by layers, as long as nobody knows how good they are
# A prior of the best exit layer. Models that were trained to leave early do so best near a quarter of the depth: until
# a layer was seen, what it promises is raised by so much there, and by less the farther its depth's logarithm is away.
# Evidence outweighs it: after so many picks of the layer, half of it is left.
EXIT_PRIOR, EXIT_PRIOR_WIDTH, EXIT_PRIOR_WEIGHT = 0.3, 0.5, 24.0
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
    drafter: Drafter = BY_LAYERS
    length: float = 0.0  # drafted tokens expected per row
    tokens: float = 0.0  # per row and second, by the table
    rounds: Sequence[float] = (0.0,) * (MOST + 1)  # their seconds, by drafted tokens per row
    stop: SurvivalStop | None = None
    second_choices: SecondChoices | None = None
    most: int = MOST  # tokens drafted per row

    def plan(
        self, num_rows: int, num_rounds: int, most: int, lookups: LookupTable | None, shadow: ShadowPlan | None
    ) -> Plan:
        """Rounds of rows that draft at most so many tokens each, by layers or as the table says by lookup."""
        return Plan(
            self.exit_layer,
            (0 if self.exit_layer is None else min(most, self.most),) * num_rows,
            lookups=lookups,
            num_rounds=num_rounds,
            stop=self.stop,
            keep_confidence=self.exit_layer is not None,
            shadow=shadow,
            second_choices=self.second_choices,
            draft_vocab=self.drafter.draft_vocab,
            draft_bits=self.drafter.draft_bits,
            speedup=1.0 if self.exit_layer is None else self.speedup,
        )


def decide(
    now: Decision, costs: RoundCosts, drafters: Sequence[Drafter], layers: Sequence[int], evidence: Evidence
) -> Decision:
    """The best way to draft.

    Args:
        now: what holds until then; another way must promise more.
        drafters: ways of drafting to choose from, the layers themselves first.
        layers: exit layers to choose from.
    """
    costs.drafters = drafters
    coverages = np.array([[drafter.coverage] for drafter in drafters]).repeat(len(evidence.right), 1)
    coverages[[drafter.by_copies for drafter in drafters]] *= evidence.agreement
    rates, drafted = costs.rates(evidence.right, evidence.share, coverages)  # [drafters, L - 1, stops], [L - 1, stops]
    promised = np.maximum.reduce(rates, 2) / np.array([[evidence.slower[drafter.by_copies]] for drafter in drafters])
    at, exit_layer = _choose(now, costs.num_rows, drafters, layers, promised, evidence)
    line, plain = exit_layer - 1, costs.num_rows / costs.plain_seconds
    trusted = evidence.trust * float(promised[at, line])
    if trusted < (HANDICAP if now.exit_layer is None else OFF) * plain:
        return Decision(plain, trusted / plain)
    stop = int(rates[at, line].argmax())
    rate, length = float(rates[at, line, stop]), float(drafted[line, stop])
    right = tuple((evidence.right[line] * coverages[at, line]).tolist())
    drafting = _drafting(exit_layer, drafters[at], rate, length, right, costs, evidence)
    return drafting._replace(usual=trusted, speedup=trusted / plain)


def _choose(
    now: Decision,
    num_rows: int,
    drafters: Sequence[Drafter],
    layers: Sequence[int],
    promised: Floats,
    evidence: Evidence,
) -> tuple[int, int]:
    """Which of the drafters, and the exit layer."""
    weighed = promised * (1 + _exit_prior(evidence.seen) / num_rows)  # many rows soon show which layers are right
    weighed[:, [e - 1 for e in range(1, weighed.shape[1] + 1) if e not in layers]] = 0
    for line, drafter in zip(weighed, drafters, strict=True):
        if drafter.by_copies:
            line /= evidence.margin
        if drafter.deepest is not None:
            line[drafter.deepest :] = 0
    at, line = divmod(int(weighed.argmax()), weighed.shape[1])
    present = [i for i, drafter in enumerate(drafters) if drafter.key == now.drafter.key]
    if now.exit_layer is not None and present:
        before = present[0], now.exit_layer - 1
        if weighed[at, line] < (1 + STAY / num_rows) * weighed[before]:
            return present[0], now.exit_layer
    return at, line + 1


def _exit_prior(seen: Floats) -> Floats:
    """What every exit layer's promise is raised by, `[L - 1]`."""
    num_layers = len(seen) + 1
    away = np.log(4 * np.arange(1, num_layers) / num_layers)
    return np.asarray(
        EXIT_PRIOR * np.exp(-(away**2) / EXIT_PRIOR_WIDTH) * EXIT_PRIOR_WEIGHT / (EXIT_PRIOR_WEIGHT + seen)
    )


def _drafting(
    exit_layer: int,
    drafter: Drafter,
    rate: float,
    length: float,
    right: tuple[float, ...],
    costs: RoundCosts,
    evidence: Evidence,
) -> Decision:
    """How the chosen layer drafts; `right` is by bin of confidence, `rate` by the table.

    A row goes on while its draft is likelier to be right than a token more takes of what the round gains per second.
    """
    line, rounds, rows = exit_layer - 1, costs.rounds(exit_layer, drafter), costs.num_rows
    acceptance = sum([chance * often for chance, often in zip(right, evidence.share[line].tolist(), strict=True)])
    value = rate / max(acceptance, 1e-6)  # of a second, in chances of being right so far
    least, most = value * one_more(rounds, length, rows), MOST
    if least > acceptance ** (TOO_SOON * length):  # costs rise in steps: the next token is dearer than the last
        least, most = min(least, value * each_of(rounds, length, rows)), max(1, math.ceil(length))
    return Decision(
        exit_layer=exit_layer,
        drafter=drafter,
        length=length,
        tokens=rate / rows,
        rounds=rounds,
        stop=SurvivalStop(right, least),
        second_choices=_second_choices(exit_layer, drafter, right, length, rate, costs, evidence.seconds),
        most=min(most, max(UNKNOWN, int(evidence.seen[line] + 1e-6))),
    )


def _second_choices(
    exit_layer: int,
    drafter: Drafter,
    right: tuple[float, ...],
    length: float,
    rate: float,
    costs: RoundCosts,
    seconds: SecondRates | None,
) -> SecondChoices | None:
    """Which of them are drafted beside a draft of about `length` tokens; None where none gains more than it takes."""
    if seconds is None:
        return None
    second = seconds.of(exit_layer)
    fixed, each = costs.beside(exit_layer, length, drafter)
    # Of a first token; later ones are come to less often.
    if max([(1 - chance) * other for chance, other in zip(right, second, strict=True)]) <= each * rate:
        return None
    return SecondChoices(right, second, each * rate, MOST_BESIDE, fixed * rate / costs.num_rows)


def could_pay(costs: RoundCosts, layers: Sequence[int], speedup: float, slower: float) -> tuple[int, ...]:
    """Exit layers of such a speedup if they were always right: to probe the others would be for nothing."""
    least, limits = slower * speedup * costs.num_rows / costs.plain_seconds, costs.limits()
    return tuple([layer for layer in layers if limits[layer - 1] >= least])
