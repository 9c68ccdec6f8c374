"""Simulated rounds: sequences, costs with simple numbers, and rounds whose outcomes a test decides."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import NamedTuple

import numpy as np

from selfspec.control.acceptance import TokenClock, Tracker
from selfspec.control.adaptive import Adaptive
from selfspec.control.costs import Copies, Costs, Table
from selfspec.control.plan import NUM_LOOKUP_BINS, confidence_bin, table_of
from selfspec.control.times import Times
from selfspec.core import LOOKUP, Plan, Request, RoundOutput, RowRound, Sequence, ShadowPicks, StageSeconds
from selfspec.params import SamplingParams

MANY, LAYERS = 10_000, 8


class Tally(NamedTuple):
    """Tokens of a row after matches, by bin of the match length, and how many of them were right."""

    num_tokens: int = 0
    seen: tuple = (0,) * NUM_LOOKUP_BINS
    right: tuple = (0,) * NUM_LOOKUP_BINS


class Match:
    """A row's lookup: its match length, and the tallies that it gives one after another."""

    def __init__(self, match=0, tallies=()):
        self.match, self._tallies = match, iter(tallies)

    def take_tally(self):
        return next(self._tallies, Tally())


class Repetition(Match):
    """The lookup of a row that repeats itself."""

    def take_tally(self):
        return Tally(30, (0,) * 7 + (20, 0, 0), (0,) * 7 + (20, 0, 0))


def sequence(seq_id=0, num_remaining=MANY, num_tokens=10, lookup=None, has_processors=False):
    params = SamplingParams(logits_processors=[len] if has_processors else None)
    tokens = range(num_tokens)  # policies read its length alone
    new_lookup = None if lookup is None else lambda given: lookup
    return Sequence(seq_id, Request([0], params), tokens, num_tokens + num_remaining, new_lookup=new_lookup)


def row_round(of, num_drafted, num_accepted, confidences=(), divergences=(), **more):
    """What a round gave a sequence. of: the sequence, or its id."""
    of = of if isinstance(of, Sequence) else sequence(of)
    more |= {"confidences": confidences, "divergences": divergences}
    return RowRound(of, num_drafted, num_accepted, [0] * (num_accepted + 1), **more)


def ask(policy, *rows):
    return policy.plan([*rows] or [sequence()])


def settled(policy, *rows):
    """The policy after plain rounds of these rows, which it measures before it decides anything."""
    plan = policy.plan([*rows])
    assert plan.exit_layer is None and plan.lookups is None
    context = sum(row.num_tokens for row in rows) / len(rows)
    took = StageSeconds(verify=policy.costs.plain_round(len(rows), context))
    policy.observe(plan, [RoundOutput(None, [row_round(row, 0, 0) for row in rows], took, plan)] * plan.num_rounds)
    return policy


def tell(policy, *rows, plan=None):
    plan = plan or Plan(1, (1,) * len(rows))
    policy.observe(plan, [RoundOutput(plan.exit_layer, [*rows], StageSeconds(), plan)])


# --------------------------------------------------------------------------------------------------------------- costs


def costs(slow_batch=8, unit=1.0):
    """Four layers of `unit` seconds each, whatever the tokens, for one row; `slow_batch` rows take so long per token.

    So one row's round with exit layer 1 and k drafted tokens takes (k + 1) + 3 units, a plain one 4.
    """
    nothing = Table.of({1: 0.0})
    steps = Table.of({1: unit, 3: 3 * unit})
    rounds = {1: Table.of({1: 4 * unit, 9: 4 * unit}), slow_batch: Table.of({1: 4 * unit, 9: 36 * unit})}
    return Costs(4, rounds, {1: steps}, head=nothing, context=nothing, shadow_picks=nothing)


def even_costs(head=2e-5, rows=(1, 4)):
    """Costs of `LAYERS` layers that take a tenth of a millisecond each, and a little more for every further token."""

    def layer(tokens):
        return 1e-4 * (1 + 0.02 * tokens)

    few = Table.of({1: 1e-6, 64: 5e-6})
    one = Table.of({n: head * (1 + 0.02 * n) + few(n) for n in (1, 8, 64)})
    widths = (1, 2, 4, 8, 18)
    rounds = {r: Table.of({w: LAYERS * layer(r * w) + one(r * w) + few(r) for w in widths}) for r in rows}
    steps = {r: Table.of({e: e * layer(r) + one(r) for e in range(1, LAYERS)}) for r in rows}
    context = Table.of({r: LAYERS * r * 1e-7 for r in rows})
    return Costs(LAYERS, rounds, steps, head=one, context=context, shadow_picks=few)


def on_slower_machine(costs, factor):
    """Costs where everything takes `factor` times as long."""
    rounds, steps = (
        {rows: table.scaled(factor) for rows, table in part.items()} for part in (costs.rounds, costs.steps)
    )
    return replace(costs, rounds=rounds, steps=steps, head=costs.head.scaled(factor))


def with_dear_contexts(costs):
    """Costs where reading the KV cache is slow for many rows and for many tokens of a row."""
    return replace(costs, context=Table((1, 4), (LAYERS * 2e-6, LAYERS * 1.6e-5)), width=0.4)


def with_copies(costs, faster=4.0):
    """Costs where 4-bit copies are `faster` than the layers."""
    steps = {rows: table.scaled(1 / faster) for rows, table in costs.steps.items()}
    return replace(costs, copies=Copies(steps, costs.head.scaled(1 / faster)))


def times_of(costs, rows, context=1):
    """Times of rows with about `context` tokens each before any round has run."""
    times = Times(costs, rows, TokenClock())
    times.move(context)
    return times


# ---------------------------------------------------------------------------------------------------------- simulation


class Played(NamedTuple):
    """A simulated round."""

    plan: Plan
    exit_layer: int | None  # what drafted
    num_drafted: int
    is_first: bool  # of its program


def play(policy, costs, num_rounds, right=lambda plan, n: n, slower=lambda plan: 1.0, lookup=None, most=100):
    """Rounds of one row, program by program, in which `right` of the drafted tokens are accepted.

    Args:
        slower: factor on the time of drafted rounds, relative to the costs.
        lookup: the row's lookup.
        most: maximum number of drafted tokens.
    """
    done, length = [], 50
    while len(done) < num_rounds:
        row = sequence(0, 90_000 - length, length, lookup)
        plan, rounds = policy.plan([row]), []
        ledger = plan.ledger
        while len(rounds) < plan.num_rounds and len(done) < num_rounds:
            table = table_of(plan) if lookup is not None else None
            given = [lookup.match] if lookup is not None else [], [row.num_remaining - 1]
            found = table.drafted(*given, ledger=ledger) if table is not None else None
            may_draft = ledger is None or ledger.covers_layers
            exit_layer = LOOKUP if found else plan.exit_layer if may_draft and plan.exit_layer else None
            n = min(most, (found or plan.draft_lengths)[0]) if exit_layer is not None else 0
            kept, layers, shadow = right(plan, n) if n else 0, (), None
            if plan.shadow is not None and not found:
                layers = plan.shadow.layers
                hits = np.ones((len(layers), kept + 1), bool)
                shadow = ShadowPicks(layers, hits, np.full(hits.shape, 0.9, np.float32))
            share = policy._drafters.share(None if found else plan.draft_vocab) if isinstance(policy, Adaptive) else 1.0
            copies = plan.draft_bits is not None and not found
            took = costs.stages(exit_layer, [n], draft_share=share, copies=copies)
            took = {stage: taken * (slower(plan) if exit_layer else 1.0) for stage, taken in took.items()}
            match = {"match_length": lookup.match} if found else {}
            one = row_round(row, n, kept, (0.9,) * n if exit_layer else (), shadow=shadow, **match)
            seconds = StageSeconds(**took, shadow=1e-5 if layers else 0.0)
            rounds.append(RoundOutput(exit_layer, [one], seconds, plan))
            ledger = ledger and ledger.after(rounds[-1])
            done.append(Played(plan, exit_layer, n, len(rounds) == 1))
            length += kept + 1
            if layers or (rounds[-1].exit_layer and ledger is not None and not ledger.covers_layers):
                break
        policy.observe(plan, rounds)
    return done


def good_layers(rate=0.9):
    """A prior in which layer 2 is right so often, and others hardly ever."""
    tracker = Tracker(LAYERS)
    for i in range(60):
        for layer in range(1, LAYERS):
            tracker.add(layer, [layer == 2 and i % 10 < 10 * rate], [0.9])
    return tracker.state()


class Text(NamedTuple):
    """An output: whether each layer's pick is its token, `[LAYERS - 1, n]`, and with which confidence."""

    hits: np.ndarray
    confidences: np.ndarray


def texts(acceptance, count=4, num_tokens=256, is_informative=True):
    """Texts in which all layers are right equally often, with confidences that depend on it, or do not."""
    made = []
    for seed in range(count):
        rng = np.random.default_rng(seed)
        hits = rng.random((LAYERS - 1, num_tokens)) < acceptance
        confidences = rng.random(hits.shape)
        if is_informative:
            confidences = np.where(hits, 0.5 + 0.5 * confidences, 0.7 * confidences)
        made.append(Text(hits, confidences))
    return made


class Decoded(NamedTuple):
    rounds: list[RoundOutput]
    seconds: float
    plain_seconds: float  # of plain decoding of the same texts


def decode(policy, costs, all_texts, true_costs=None):
    """Decode texts as one batch, whose rounds take what `true_costs` says; default: `costs`."""
    true_costs, places = true_costs or costs, [0] * len(all_texts)
    done, seconds, plain = [], 0.0, 0.0
    prompt, rng = 33, np.random.default_rng(0)
    ends = [text.hits.shape[1] for text in all_texts]
    rows = [sequence(i, end, prompt) for i, end in enumerate(ends)]
    for row, text in zip(rows, all_texts, strict=True):
        layers = policy.seed_layers(row)
        if layers:
            policy.seed(row, shadow_of(text, layers, 0, 16))
    while rows:
        plan, rounds = policy.plan(rows), []
        ledger = plan.ledger
        while len(rounds) < plan.num_rounds and all(places[row.seq_id] < ends[row.seq_id] for row in rows):
            now = replace(plan, exit_layer=None) if ledger and not ledger.covers_layers else plan
            drafted, confidences = draft(now, rows, all_texts, places, rng)
            outcomes = []
            for i, (row, n) in enumerate(zip(rows, drafted, strict=True)):
                text, at = all_texts[row.seq_id], places[row.seq_id]
                hits = text.hits[plan.exit_layer - 1, at : at + n] if n else np.ones(0, bool)
                accepted = n if hits.all() else int(hits.argmin())
                withdrawn = None
                if n and withdraws(plan, confidences[i]):
                    n = drafted[i] = n - 1
                    withdrawn, accepted = int(accepted <= n), min(accepted, n)
                shadow = None
                if plan.shadow is not None and i in plan.shadow.rows:
                    judged = min(accepted + 1, plan.shadow.max_columns)
                    shadow = shadow_of(text, plan.shadow.layers, at, at + judged)
                given = {"shadow": shadow, "withdrawn": withdrawn}
                outcomes.append(row_round(row, n, accepted, tuple(confidences[i]), **given))
            num_withdrawn = sum(one.withdrawn is not None for one in outcomes)
            exit_layer = plan.exit_layer if any(drafted) or num_withdrawn else None
            context = sum(row.num_tokens for row in rows) / len(rows)
            took = StageSeconds(**true_costs.stages(exit_layer, drafted, context))
            if num_withdrawn:
                took.draft += true_costs.withdrawal(exit_layer, num_withdrawn, context)
            judged = [one.shadow.hits.size for one in outcomes if one.shadow is not None]
            took.shadow = true_costs.shadow(1, sum(judged))
            rounds.append(RoundOutput(exit_layer, outcomes, took, plan))
            ledger = ledger and ledger.after(rounds[-1])
            seconds += took.total
            longest = max(one.num_emitted for one in outcomes)
            emitting = [sum(one.num_emitted > i for one in outcomes) for i in range(longest)]
            plain += sum(true_costs.plain_round(n, context + i) for i, n in enumerate(emitting))
            for row, one in zip(rows, outcomes, strict=True):
                places[row.seq_id] += one.num_emitted
                row.token_ids = range(prompt + places[row.seq_id])
            if plan.shadow is not None:
                break
        policy.observe(plan, rounds)
        done += rounds
        rows = [row for row in rows if places[row.seq_id] < ends[row.seq_id]]
    return Decoded(done, seconds, plain)


def draft(plan, rows, all_texts, places, rng):
    """Drafted tokens per row, and their confidences; those after a wrong token are random."""
    lengths = [min(n, row.num_remaining - 1) for n, row in zip(plan.draft_lengths, rows, strict=True)]
    if plan.exit_layer is None:
        return [0] * len(rows), [[] for _ in rows]
    drafted, confidences, survival = [0] * len(rows), [[] for _ in rows], [1.0] * len(rows)
    live, is_wrong = [i for i, n in enumerate(lengths) if n], [False] * len(rows)
    while live:
        for i in live:
            text, at = all_texts[rows[i].seq_id], places[rows[i].seq_id] + drafted[i]
            one = rng.random() if is_wrong[i] else text.confidences[plan.exit_layer - 1, at]
            is_wrong[i] |= not text.hits[plan.exit_layer - 1, at]
            confidences[i].append(float(one))
            drafted[i] += 1
            if plan.stop is not None:
                survival[i] *= plan.stop.calibration[confidence_bin(one)]
        if plan.stop is not None and not plan.stop.goes_on([survival[i] for i in live]):
            break
        live = [i for i in live if drafted[i] < lengths[i] and confidences[i][-1] >= plan.min_confidence]
    return drafted, confidences


def withdraws(plan, confidences):
    """Whether the last token of a draft is not verified. Right tokens are 0, wrong ones 1."""
    stop = plan.stop
    return stop is not None and prod(stop.calibration[confidence_bin(one)] for one in confidences) < stop.keep


def shadow_of(text, layers, start, stop):
    index = np.array(layers) - 1
    return ShadowPicks(tuple(layers), text.hits[index, start:stop], text.confidences[index, start:stop])
