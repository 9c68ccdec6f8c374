"""Helpers for the tests of replay: a random policy, made-up costs, and a comparison of two runs."""

from __future__ import annotations

import random
from dataclasses import replace
from math import isclose
from typing import NamedTuple

import numpy as np

from eval import tasks
from eval.models import params_of, with_policy
from eval.replay import replay
from eval.traces import Trace
from selfspec.control.costs import Costs, Table
from selfspec.control.plan import NUM_BINS, NUM_LOOKUP_BINS, LookupTable, Policy, ShadowPlan, SurvivalStop
from selfspec.core import LOOKUP, Plan, StageSeconds
from selfspec.params import SamplingParams


def made_up_costs(num_layers, head=2e-4, rows=(1, 4)):
    """Costs where a layer takes a millisecond, and a little more for every additional token."""

    def layer(tokens):
        return 1e-3 * (1 + 0.02 * tokens)

    few, widths = Table.of({1: 1e-5, 64: 5e-5}), (1, 2, 4, 8, 18)
    one = Table.of({n: head * (1 + 0.02 * n) + few(n) for n in (1, 8, 64)})
    rounds = {r: Table.of({w: num_layers * layer(r * w) + one(r * w) + few(r) for w in widths}) for r in rows}
    steps = {r: Table.of({e: e * layer(r) + one(r) for e in range(1, num_layers)}) for r in rows}
    context = Table.of({r: num_layers * r * 1e-6 for r in rows})
    return Costs(num_layers, rounds, steps, head=one, context=context, shadow_picks=few)


def with_dear_contexts(costs):
    """Costs where reading the KV cache is slow for many rows and for many tokens of a row."""
    return replace(
        costs,
        context=2e-5,
        contexts={4: Table((0, 128, 256), (0.0, 4e-3, 1e-2))},
        context_width=8e-6,
        context_widths=Table((1, 4), (8e-6, 2e-5)),
    )


def random_trace(seed, num_layers, num_tokens, prompt_length=5, wrong_steps=17):
    rng = np.random.default_rng(seed)
    shape = (num_layers - 1, num_tokens)
    sure = rng.random(shape, np.float32)
    return trace_of(rng.random(shape) < 0.3 + 0.6 * sure, sure, rng, prompt_length, wrong_steps)


def trace_of(hits, sure, rng, prompt_length=5, wrong_steps=17, vocab=1_000_000):
    shape, seen = hits.shape, (len(hits), min(32, prompt_length - 1))
    wrong = np.where(hits[..., None], np.nan, rng.random((*shape, wrong_steps))).astype(np.float32)
    short = rng.random(shape) < 0.5, rng.random(shape, np.float32)
    prompt = rng.random(seen) < 0.5, rng.random(seen, np.float32)
    away = rng.random(shape, np.float32)
    content = tuple(rng.integers(3, 3 + vocab, prompt_length + shape[1]).tolist())
    texts = content[:prompt_length], content[prompt_length:]
    return Trace("made up", *texts, hits, sure, away, wrong, *short, *prompt)


class Dice(Policy):
    """A policy with random plans in every round, and random shadow layers at prompts."""

    def __init__(self, seed, num_layers, longest=9):
        self.random, self.num_layers, self.longest = random.Random(seed), num_layers, longest

    def some(self, among, least=1):
        return tuple(sorted(self.random.sample(among, self.random.randint(min(least, len(among)), len(among)))))

    def seed_layers(self, row):
        return self.some(range(1, self.num_layers), least=0)

    def seed(self, row, shadow):
        pass

    def plan(self, rows):
        dice = self.random
        exit_layer = dice.choice([None, *range(self.num_layers)])
        lengths = [dice.randint(0, self.longest) for _ in rows]
        stop = None
        if dice.random() < 0.3:
            stop = SurvivalStop(tuple(dice.random() for _ in range(NUM_BINS)), dice.choice((0.05, 0.3)))
        looked_at = self.some([layer for layer in range(1, self.num_layers) if layer != exit_layer])
        shadow = ShadowPlan(
            looked_at, self.some(range(len(rows)), least=0), dice.randint(1, 6), exact=dice.random() < 0.5
        )
        return Plan(
            exit_layer,
            tuple(0 if exit_layer is None else length for length in lengths),
            dice.choice((0.0, 0.2, 0.6, 1.0)),
            stop,
            keep_confidence=dice.random() < 0.3,
            keep_divergence=dice.random() < 0.5,
            shadow=shadow if looked_at and dice.random() < 0.7 else None,
            lookups=self.lookups(rows) if exit_layer != LOOKUP and dice.random() < 0.5 else None,
            num_rounds=dice.randint(1, 5),
        )

    def lookups(self, rows):
        dice = self.random
        lengths = tuple(tuple(dice.randint(0, 6) for _ in range(NUM_LOOKUP_BINS)) for _ in rows)
        gains = tuple(tuple(n * dice.random() for n in of_row) for of_row in lengths)
        return LookupTable(lengths, gains, (0.0, 0.5, 1.0))


def state_of(row):
    """What policies read of a sequence."""
    return row.seq_id, row.num_tokens, row.num_remaining, row.request.params.is_greedy


def outcome_of(row):
    """What policies read of what a round gave a sequence."""
    counts = row.seq_id, row.num_drafted, row.num_accepted, row.num_emitted
    return *counts, tuple(row.confidences), tuple(row.divergences), row.shadow, row.match_length, row.source


class Witness(Policy):
    """Records all calls of a policy and its results, and replaces measured times by constants."""

    def __init__(self, inner):
        self.inner, self.calls = inner, []

    def seed_layers(self, row):
        layers = tuple(self.inner.seed_layers(row))
        self.calls.append(("seed_layers", state_of(row), layers))
        return layers

    def seed(self, row, shadow):
        self.calls.append(("seed", row.seq_id, shadow))
        self.inner.seed(row, shadow)

    def plan(self, rows):
        plan = replace(self.inner.plan(rows), ledger=None)  # whose balance depends on measured times
        self.calls.append(("plan", tuple((row.lookup.match, state_of(row)) for row in rows), plan))
        return plan

    def observe(self, plan, rounds):
        seconds = {"draft": 1e-3, "verify": 2e-3, "head": 1e-4, "pick": 1e-4}
        timeless = [replace(one, seconds=StageSeconds(**seconds)) for one in rounds]
        outcomes = tuple([(one.exit_layer, tuple(map(outcome_of, one.rows))) for one in rounds])
        self.calls.append(("observe", outcomes))
        self.inner.observe(plan, timeless)


class Setting(NamedTuple):
    """Settings of decoding, for the engine and for replay."""

    max_batch_size: int = 1
    temperature: float = 0.0
    prefill_chunk: int = 512


class Scene:
    """A model, its prompts, and the traces of its outputs."""

    def __init__(self, llm, prompts, lengths):
        self.llm, self.prompts, self.lengths = llm, prompts, lengths
        self.num_layers = llm.target.split.num_layers
        self.costs = made_up_costs(self.num_layers)
        self.known = {}

    def traces(self, temperature):
        if temperature not in self.known:
            self.known[temperature] = [self.trace(i, temperature) for i in range(len(self.prompts))]
        return self.known[temperature]

    def trace(self, i, temperature):
        return tasks.trace_of(
            self.llm, self.prompts[i], self.lengths[i], SamplingParams(temperature=temperature, seed=i)
        )

    def live(self, policy, setting):
        """Decode with the engine; returns the policy's calls, emitted tokens by round, and the outputs."""
        witness = Witness(policy)
        llm = with_policy(self.llm, policy=witness, max_num_seqs=setting.max_batch_size)
        engine = llm.engine(prefill_chunk=setting.prefill_chunk, max_step_seconds=1e9)
        for i, (prompt, n) in enumerate(zip(self.prompts, self.lengths, strict=True)):
            engine.add_request(str(i), prompt, params_of(n, setting.temperature, seed=i))
        rounds, tokens = [], [[] for _ in self.prompts]
        while engine.has_unfinished_requests():
            for output in engine.step(rounds.append):
                tokens[int(output.request_id)] += output.outputs[0].token_ids
        emitted = [{row.seq_id: len(row.token_ids) for row in r.rows} for r in rounds if r.plan is not None]
        return witness.calls, emitted, [tuple(each) for each in tokens]


def replayed(traces, policy, costs, setting):
    """Replay; returns the policy's calls and emitted tokens by round."""
    witness = Witness(policy)
    done = replay(traces, witness, costs, setting.max_batch_size, setting.prefill_chunk, deadline=1e9)
    return witness.calls, [{row.seq_id: len(row.token_ids) for row in r.rows} for r in done.rounds]


def assert_same(here, there, where="", near=1e-4):
    """Assert equality; floats that models compute may differ by rounding."""
    assert type(here) is type(there), f"{where}: {here!r} and {there!r}"
    if hasattr(here, "__dataclass_fields__"):
        parts = [(name, getattr(here, name), getattr(there, name)) for name in here.__dataclass_fields__]
    elif isinstance(here, np.ndarray):
        assert here.shape == there.shape and np.allclose(here, there, rtol=1e-3, atol=near), f"{where}: {here}, {there}"
        return
    elif isinstance(here, tuple | list):
        assert len(here) == len(there), f"{where}: {here!r} and {there!r}"
        names = getattr(here, "_fields", range(len(here)))
        parts = list(zip(names, here, there, strict=True))
    else:
        is_same = isclose(here, there, rel_tol=1e-3, abs_tol=near) if isinstance(here, float) else here == there
        assert is_same, f"{where}: {here!r} and {there!r}"
        return
    for name, a, b in parts:
        assert_same(a, b, f"{where}.{name}", 1e-5 if name == "divergences" else near)
