"""DEL (arXiv 2504.05598): the exit layer with the most expected tokens per loaded layer."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from selfspec.control.plan import Policy, ShadowPlan
from selfspec.core import Plan, RoundOutput, Sequence, ShadowPicks

OMEGA = 0.95  # decay of the counts per round
MOST = 18  # maximum draft length

Floats = NDArray[np.float64]


@dataclass(slots=True)
class DynamicExit(Policy):
    """The exit layer by tokens per layer (TPL), the draft length by confidence.

    After each round every layer's picks are compared with the target's. For exit layer l with hit rate alpha, a draft
    of d tokens has TPL = (1 + alpha + .. + alpha^d) / (d l + L). The largest TPL chooses the layer only. A draft ends
    after a token whose confidence is below the mean of the layer's average confidences of hits and of misses, or at 18
    tokens. As published, TPL does not count the vocabulary product.

    Counts are kept per row and start at the end of its prompt; a batch uses their sum.
    """

    num_layers: int
    exact: bool = True  # shadow picks over the whole vocabulary, as published
    _rows: dict[int, Floats] = field(default_factory=dict, init=False, repr=False)  # by request; see `_add`
    _cost: Floats = field(init=False, repr=False, compare=False)  # layers loaded, by exit layer and draft length

    def __post_init__(self) -> None:
        layers, lengths = np.arange(1, self.num_layers), np.arange(MOST)
        self._cost = (layers[:, None] * lengths + self.num_layers).astype(np.float64)

    def seed_layers(self, row: Sequence) -> tuple[int, ...]:
        return tuple(range(1, self.num_layers))

    def seed(self, row: Sequence, shadow: ShadowPicks) -> None:
        if row.seq_id not in self._rows:
            self._rows[row.seq_id] = self._nothing()
        _add(self._rows[row.seq_id], shadow)

    def plan(self, rows: list[Sequence]) -> Plan:
        self._prune(rows)
        exit_layer, most, threshold = self._choose(sum(self._rows[row.seq_id] for row in rows) + self._nothing())
        lengths = tuple(min(most, row.num_remaining - 1) for row in rows)
        if not any(lengths):
            return Plan(None, lengths)
        others = tuple(layer for layer in range(1, self.num_layers) if layer != exit_layer)
        shadow = ShadowPlan(others, tuple(range(len(rows))), MOST + 1, self.exact) if others else None
        return Plan(exit_layer, lengths, threshold, keep_confidence=True, shadow=shadow)

    def observe(self, plan: Plan, rounds: list[RoundOutput]) -> None:
        for outcome in (row for round_ in rounds for row in round_.rows):
            counts = self._rows.get(outcome.seq_id)
            if counts is None:
                continue
            counts *= OMEGA
            if plan.exit_layer is not None and outcome.num_judged:
                # The exit layer has no pick after the draft's last token. Where all tokens were accepted, it therefore
                # has one observation less than the other layers.
                hits = tuple(i < outcome.num_accepted for i in range(outcome.num_judged))
                confidences = (*outcome.confidences, *(0.0 for _ in hits))[: len(hits)]
                _add(
                    counts, ShadowPicks((plan.exit_layer,), np.array([hits], bool), np.array([confidences], np.float32))
                )
            if outcome.shadow is not None:
                _add(counts, outcome.shadow)

    def _choose(self, counts: Floats) -> tuple[int, int, float]:
        """Exit layer, maximum draft length, and the confidence below which a draft ends."""
        hits, misses, hit_confidence, miss_confidence = counts
        seen = hits + misses
        if not seen.any():
            return 1, 1, 0.0  # a round that collects statistics
        alpha = np.divide(hits, seen, out=np.zeros_like(hits), where=seen > 0)
        tpl: Floats = (alpha[:, None] ** np.arange(MOST)).cumsum(1) / self._cost
        tpl[seen == 0] = -np.inf
        at = int(tpl.max(1).argmax())
        if not hits[at] or not misses[at]:
            return at + 1, MOST, 0.0  # the published threshold is NaN, which never stops
        return at + 1, MOST, float(hit_confidence[at] / hits[at] + miss_confidence[at] / misses[at]) / 2

    def _prune(self, rows: list[Sequence]) -> None:
        """Drop the counts of ended rows. Ids ascend, so prompts still in prefill have larger ids than all rows."""
        live = {row.seq_id for row in rows}
        newest = max(live, default=-1)
        self._rows = {i: counts for i, counts in self._rows.items() if i in live or i > newest}
        for i in live - self._rows.keys():
            self._rows[i] = self._nothing()

    def _nothing(self) -> Floats:
        return np.zeros((4, self.num_layers - 1))


def _add(counts: Floats, shadow: ShadowPicks) -> None:
    """Count hits, misses, and the sums of their confidences, by layer."""
    if not shadow.layers:
        return
    at = np.array(shadow.layers) - 1
    hits = np.array(shadow.hits, dtype=bool)
    confidences = np.nan_to_num(np.array(shadow.confidences, dtype=float))
    num_hits, hit_confidence = hits.sum(1), (confidences * hits).sum(1)
    counts[:, at] += np.stack([num_hits, hits.shape[1] - num_hits, hit_confidence, confidences.sum(1) - hit_confidence])
