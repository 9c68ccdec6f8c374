"""What policies do as a batch grows past an accelerator's knee, on a made-up table of costs and made-up traces.

Up to some number of tokens a forward takes the time to read the weights; beyond it, the time to compute. On an H200 and
a model of 8 billion weights the knee is near 165 tokens. Longer drafts pay below it and cost beyond it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from eval.replay import make, replay
from eval.traces import WRONG_STEPS, Trace
from selfspec.control.cost_table import Table
from selfspec.control.costs import Costs
from selfspec.control.plan import SEED_POSITIONS, Policy
from selfspec.control.registry import POLICIES

Array = NDArray[np.float64]

KNEE = 165  # tokens per forward
BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
SHOWN = ("synergy", "smartspec", "adaptive")  # the policies that look at what a batch costs
SHARES, ACCEPTANCE = (0.0, 1 / 8, 3 / 16, 1 / 4, 1.0), (0.2, 0.6, 0.75, 0.85, 1.0)  # of the layers run; of hits there


def knee_costs(
    num_layers: int = 32, layer: float = 1.3e-4, head_layers: float = 2.4, knee: int = KNEE, most_rows: int = 512
) -> Costs:
    """Flat up to `knee` tokens, then linear, layers and head alike. Defaults: 8 billion weights, 128k words, an H200.

    Args:
        layer: seconds of one layer below the knee.
        head_layers: what the head costs, in layers.
        most_rows: the largest batch in the tables.
    """

    def seconds(tokens: float) -> float:
        return layer * max(1.0, tokens / knee)

    rows = range(1, most_rows + 1)
    widths = range(1, WRONG_STEPS + 3)
    return Costs(
        num_layers,
        plain=Table.of({r: num_layers * seconds(r) for r in rows}),
        early={r: Table.of({e: e * seconds(r) for e in range(1, num_layers)}) for r in rows},
        late={r: Table.of({w: seconds(r * w) for w in widths}) for r in rows},
        head=Table.of({n: head_layers * seconds(n) for n in (1, knee, 2 * knee)}),
        pick=Table.of({1: 2e-5, most_rows: 1e-4}),
        rest=Table.of({1: 3e-5, most_rows: 3e-4}),
        short=Table.of({1: 3e-5, most_rows: 2e-4}),
    )


def made_up_traces(num_layers: int, count: int = 16, num_tokens: int = 96, seed: int = 0) -> list[Trace]:
    """Traces whose confidences are calibrated, and whose layers are right as often as `ACCEPTANCE` says."""
    rng = np.random.default_rng(seed)
    shares = np.arange(1, num_layers) / num_layers
    logits = [_logit_of_mean(rate) for rate in np.interp(shares, SHARES, ACCEPTANCE)]
    return [_made_up(rng, np.array(logits), num_tokens) for _ in range(count)]


def _made_up(rng: np.random.Generator, logits: Array, num_tokens: int, spread: float = 1.5) -> Trace:
    """Positions are hard or easy for all layers alike; a deeper layer is right wherever a shallower one is."""
    ease = spread * rng.standard_normal(SEED_POSITIONS + num_tokens)
    sure = _sigmoid(logits[:, None] + ease).astype(np.float32)
    hits = rng.random(len(ease)) < sure
    after = _sigmoid(logits[:, None, None] + spread * rng.standard_normal((num_tokens, WRONG_STEPS)))
    own, prompt = slice(SEED_POSITIONS, None), slice(SEED_POSITIONS)
    wrong = np.where(hits[:, own, None], np.nan, after).astype(np.float32)
    away = (2 * (1 - sure)).astype(np.float32)
    content = tuple(range(SEED_POSITIONS + 1 + num_tokens))  # with nothing to look up
    texts = content[: SEED_POSITIONS + 1], content[SEED_POSITIONS + 1 :]
    none = np.zeros_like(hits[:, own])
    seen = hits[:, own], sure[:, own], hits[:, prompt], sure[:, prompt]
    picks = np.where(hits[:, own], np.array(texts[1]), -1).astype(np.int32), np.full(wrong.shape, -1, np.int32)
    return Trace("made up", *texts, hits[:, own], sure[:, own], away[:, own], wrong, none, *seen, len(content), *picks)


def _sigmoid(x: Array) -> Array:
    return np.asarray(1 / (1 + np.exp(-x)))


def _logit_of_mean(rate: float, spread: float = 1.5) -> float:
    """The logit around which, spread out normally, probabilities have the mean `rate`."""
    grid = np.linspace(-4, 4, 161)
    weights = np.exp(-(grid**2) / 2) / np.exp(-(grid**2) / 2).sum()
    low, high = -20.0, 20.0
    for _ in range(50):
        middle = (low + high) / 2
        if float(_sigmoid(middle + spread * grid) @ weights) < rate:
            low = middle
        else:
            high = middle
    return low


def settled_lengths(policy: Policy, traces: Sequence[Trace], costs: Costs, batch_size: int) -> float:
    """Mean number of tokens that a row of a full batch drafts, once the policy has seen half of the rounds.

    The last rounds are left out: there, it is the end of the output that keeps drafts short.
    """
    rows = [traces[i % len(traces)] for i in range(batch_size)]
    rounds = replay(rows, policy, costs, batch_size).rounds
    full = [r for r in rounds if len(r.rows) == batch_size]
    settled = full[len(full) // 2 : max(len(full) // 2 + 1, len(full) * 3 // 4)]
    return sum(row.num_drafted for r in settled for row in r.rows) / (batch_size * len(settled))


def sweep(
    policies: dict[str, Callable[[Costs], Policy]], costs: Costs, batch_sizes: Sequence[int] = BATCH_SIZES
) -> dict[str, dict[int, float]]:
    """Policy -> batch size -> settled draft length, with a fresh policy at every size."""
    traces = made_up_traces(costs.num_layers)
    return {
        name: {size: settled_lengths(made(costs), traces, costs, size) for size in batch_sizes}
        for name, made in policies.items()
    }


def shown_policies() -> dict[str, Callable[[Costs], Policy]]:
    return {name: partial(make, name) for name in SHOWN if name in POLICIES}
