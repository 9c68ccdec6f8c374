"""The bounds equal those of an exhaustive search."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from eval.bounds import MAX_DRAFTED, CostGrid, clairvoyant, statics
from eval.replay import replay
from selfspec.control.costs import Copies, Costs, Table
from selfspec.control.plan import Plain, Policy
from selfspec.control.published.layerskip import Fixed
from selfspec.core import LOOKUP, Plan
from selfspec.drafting.lookup import TextLookup
from selfspec.kernels.pick import num_accepted
from selfspec.params import DRAFTERS
from tests.eval.replays import Dice, trace_of


@st.composite
def traces(draw, most_tokens=30, most_layers=4):
    """A trace with random hits and confidences."""
    shape = draw(st.integers(1, most_layers - 1)), draw(st.integers(1, most_tokens))
    hits = draw(arrays.arrays(np.bool_, shape))
    sure = draw(arrays.arrays(np.float32, shape, elements=st.sampled_from([0.1, 0.5, 0.7, 0.9, 1.0])))
    vocab = draw(st.sampled_from([2, 5, 10_000]))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    made = trace_of(hits, sure, rng, draw(st.integers(1, 140)), vocab=vocab)
    if draw(st.booleans()):
        return made
    shape = (max(1, made.num_layers // 2), shape[1])  # what copies draft is recorded too
    left = np.minimum(np.arange(shape[1], 0, -1), MAX_DRAFTED)
    right = rng.integers(0, 1 + rng.integers(0, 1 + left, shape)).astype(np.int16)
    sure = rng.choice(np.array([0.1, 0.5, 0.7, 0.9, 1.0], np.float32), (*shape, MAX_DRAFTED))
    return replace(made, copied_right=right, copied=sure)


@st.composite
def costs_for(draw, num_layers):
    """Random increasing tables, with cheap or expensive plain rounds, and costs of long contexts."""
    seconds = st.floats(0.1, 4.0)

    def table(points, size=1.0):
        steps = draw(st.lists(seconds, min_size=len(points), max_size=len(points)))
        return Table(tuple(points), tuple(float(x) for x in size * np.cumsum(steps)))

    rounds, steps = {1: table((1, 2, 5, 19), num_layers)}, {1: table(range(1, num_layers))}
    context, width = draw(st.sampled_from([(0.0, 0.0), (0.2, 0.0), (0.2, 0.4)]))
    copies = draw(st.sampled_from([None, Copies({1: table(range(1, num_layers), 0.5)}, table((1,), 0.1))]))
    head, context = table((1, 4, 19), 0.2), Table((1,), (context,))
    return Costs(num_layers, rounds, steps, head, context, table((1, 8), 0.1), width=width, copies=copies)


@settings(max_examples=8)
@given(st.data())
def test_every_static_setting_takes_the_seconds_of_its_replay(data):
    trace = data.draw(traces())
    costs = data.draw(costs_for(trace.num_layers))
    pair = [trace, trace.cut(-(-len(trace.tokens) // 2))]
    found = list(statics(pair, CostGrid(costs, MAX_DRAFTED)))
    ways = trace.num_layers - 1 + (max(1, trace.num_layers // 2) if costs.copies else 0)
    assert len(found) == 1 + ways * MAX_DRAFTED
    for static in found:
        policy = Plain() if static.exit_layer is None else Fixed(*static[:2], draft_bits=4 if static.copies else None)
        assert static.seconds == pytest.approx(replay(pair, policy, costs).seconds)


@settings(max_examples=30)
@given(st.data())
def test_no_static_setting_or_random_schedule_beats_the_clairvoyant(data):
    trace = data.draw(traces())
    costs = data.draw(costs_for(trace.num_layers))
    of_rounds = CostGrid(costs, MAX_DRAFTED)
    least = clairvoyant(trace, of_rounds, DRAFTERS)
    assert least <= min(static.seconds for static in statics([trace], of_rounds)) * (1 + 1e-9)
    chance = replay([trace], NoEmptyDraft(Dice(data.draw(st.integers(0, 99)), trace.num_layers)), costs)
    assert least <= chance.seconds * (1 + 1e-9)


class NoEmptyDraft(Policy):
    """A round without drafts is plain; its cost does not come from tables of early passes."""

    def __init__(self, inner):
        self.inner = inner

    def plan(self, rows):
        plan = self.inner.plan(rows)
        return plan if any(plan.draft_lengths) else Plan(None, plan.draft_lengths)


@settings(max_examples=30)
@given(st.data())
def test_the_clairvoyant_finds_the_best_of_all_schedules(data):
    trace = data.draw(traces(most_tokens=6, most_layers=3))
    costs = data.draw(costs_for(trace.num_layers))
    of_rounds = CostGrid(costs, 6)
    assert clairvoyant(trace, of_rounds, ("exit", "lookup")) == pytest.approx(fastest_schedule(trace, costs))


def fastest_schedule(trace, costs):
    """Exhaustive search over exit layers, lengths, and copies in every round."""
    half = CostGrid(costs, 1).num_copied

    @cache
    def rest(at):
        left = len(trace.tokens) - at
        if left == 0:
            return 0.0
        context = trace.prompt_length + at
        options = [costs.plain_round(1, context) + rest(at + 1)]
        content = [*trace.prompt, *trace.tokens[:at]]
        for length in range(1, left):
            guess = TextLookup(content).draft(length).token_ids
            if guess:
                kept = num_accepted(guess, trace.tokens[at:])
                options.append(costs.round(LOOKUP, [length], context) + rest(at + kept + 1))
        for line in range(trace.num_layers - 1):
            for length in range(1, left):
                hits = trace.hits[line, at : at + length].tolist()
                for copies in (False, True) if line < half else (False,):
                    accepted = [*hits, False].index(False)
                    if copies and len(trace.copied):
                        accepted = min(length, int(trace.copied_right[line, at]))
                    took = costs.round(line + 1, [length], context, copies=copies)
                    options.append(took + rest(at + accepted + 1))
        return min(options)

    return rest(0)
