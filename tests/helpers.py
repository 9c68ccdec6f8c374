"""What the tests decode with and check by: a policy that throws dice, transformers' generate as judge, and audits."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache, cached_property
from itertools import pairwise
from typing import NamedTuple

import hypothesis
import pytest
import torch
from transformers import DynamicCache, LogitsProcessorList

from selfspec.control.plan import (
    LOOKUP,
    NUM_BINS,
    NUM_LOOKUP_BINS,
    LookupTable,
    Plan,
    Policy,
    SecondChoices,
    ShadowPlan,
    SurvivalStop,
)
from selfspec.decoding.engine import Engine
from selfspec.executors.cuda.exact import exact_stack
from tests.models import SHARED
from tests.target import Target

NEAR_TIE = 2e-5  # in standard deviations of the logits, about ten times what rounding moves them


def make_prompts(lengths, seed=0, vocab=96):
    rng = random.Random(seed)
    return [[rng.randrange(3, vocab) for _ in range(n)] for n in lengths]


class Schedule(Policy):
    """A policy that throws dice: any exit layer or lookup, any length per row, any stop rule, anew every round."""

    def __init__(self, seed, num_layers, longest=6, plain=True, confidences=(0.0, 0.0, 0.2, 0.6, 1.0), lookup=True):
        self.random = random.Random(seed)
        self.exits = [*([None] if plain else []), *([LOOKUP] if lookup else []), *range(1, num_layers)]
        self.longest, self.confidences = longest, confidences
        self.seen = []  # (plan, its rounds) of every program

    def plan(self, rows):
        exit_layer = self.random.choice(self.exits)
        lengths = [0 if exit_layer is None else self.random.randint(0, self.longest) for _ in rows]
        return Plan(exit_layer, tuple(lengths), self.random.choice(self.confidences))

    def observe(self, plan, rounds):
        self.seen.append((plan, rounds))

    @property
    def outcomes(self):
        """What the policy was told of every row of every round."""
        return [outcome for _, rounds in self.seen for round_ in rounds for outcome in round_.rows]


class Adversary(Schedule):
    """Throws dice for the rest of a plan too, looks into prompts, and insists on being told what it asked for."""

    def __init__(self, seed, num_layers, exact=None, most_rounds=6, **options):
        super().__init__(seed, num_layers, **options)
        self.dice, self.layers, self.exact = random.Random(seed), range(1, num_layers), exact
        self.most_rounds = most_rounds
        self.seeds = []  # (row, shadow) of every look into a prompt
        self.shadows = []  # (row before the round, shadow, whether it was exact)
        self.rows = ()

    def seed_layers(self, row):
        return self.some(self.layers, 0)

    def seed(self, row, shadow):
        self.seeds.append((row, shadow))

    def some(self, things, least):
        return tuple(sorted(self.dice.sample(things, self.dice.randint(least, len(things)))))

    def plan(self, rows):
        self.rows, plan, dice = rows, super().plan(rows), self.dice
        calibration = tuple(dice.random() for _ in range(NUM_BINS))
        stop = SurvivalStop(calibration, dice.random())
        layers = self.some([layer for layer in self.layers if layer != plan.exit_layer], 1)
        exact = dice.random() < 0.5 if self.exact is None else self.exact
        shadow = ShadowPlan(layers, self.some(range(len(rows)), 0), dice.randint(1, 8), exact)
        rule = SecondChoices(calibration, tuple(dice.random() for _ in range(NUM_BINS)), dice.choice([-1, 0.1]), 4)
        return replace(
            plan,
            second_choices=dice.choice([None, rule]) if plan.exit_layer else None,
            stop=dice.choice([None, stop]),
            keep_confidence=dice.random() < 0.5,
            keep_divergence=dice.random() < 0.5,
            shadow=dice.choice([None, shadow, shadow, shadow]),
            lookups=dice.choice([None, self.some_lookups(rows)]) if plan.exit_layer != LOOKUP else None,
            num_rounds=dice.randint(1, self.most_rounds),
        )

    def some_lookups(self, rows):
        """A table that drafts little or much after any match, or nothing as long as that promises too little."""
        dice = self.dice
        lengths = tuple(tuple(dice.randint(-1, 6) for _ in range(NUM_LOOKUP_BINS)) for _ in rows)
        gains = tuple(tuple(max(0.0, n * dice.random()) for n in of_row) for of_row in lengths)
        return LookupTable(lengths, gains, tuple(dice.choice([-1.0, 0.5, 9.0]) for _ in range(dice.randint(1, 5))))

    def observe(self, plan, rounds):
        super().observe(plan, rounds)
        assert 1 <= len(rounds) <= plan.num_rounds
        rows = {row.request_id: (i, row) for i, row in enumerate(self.rows)}
        assert [outcome.request_id for outcome in rounds[0].rows] == list(rows)
        for at, round_ in enumerate(rounds):
            assert round_.exit_layer in (None, LOOKUP, plan.exit_layer)
            looked = [outcome.shadow is not None for outcome in round_.rows]
            assert at == len(rounds) - 1 or not any(looked)  # a program ends with the round that looks at layers
            for outcome in round_.rows:
                self.check(plan, round_.exit_layer, *rows[outcome.request_id], outcome)

    def check(self, plan, exit_layer, i, row, outcome):
        if exit_layer != LOOKUP:
            assert outcome.num_drafted <= plan.draft_lengths[i] and not outcome.match
        elif plan.lookups is not None and plan.exit_layer != LOOKUP:
            assert outcome.num_drafted <= max(0, *plan.lookups.lengths[i])
        reads = plan.reads_confidence and exit_layer
        assert len(outcome.confidences) == (outcome.num_drafted if reads else 0)
        assert all(0 < confidence <= 1 for confidence in outcome.confidences)
        keeps = plan.keep_divergence and exit_layer
        least = outcome.num_judged if keeps else 0  # more where an end cut the block
        assert least <= len(outcome.divergences) <= (outcome.num_drafted if keeps else 0)
        assert all(divergence > -1e-3 for divergence in outcome.divergences)
        assert bool(outcome.match) >= (exit_layer == LOOKUP and outcome.num_drafted > 0)
        if outcome.shadow is not None:
            columns = {len(line) for line in (*outcome.shadow.hits, *outcome.shadow.confidences)}
            assert outcome.shadow.layers == plan.shadow.layers and i in plan.shadow.rows
            assert len(columns) == 1 and max(columns) <= plan.shadow.max_columns
            assert min(columns) >= min(outcome.num_accepted + 1, plan.shadow.max_columns)
            self.shadows.append((row, outcome.shadow, plan.shadow.exact))


class Always(Policy):
    """A policy of one plan."""

    def __init__(self, exit_layer, longest, min_confidence=0.0, num_rounds=1):
        self.exit_layer, self.longest, self.min_confidence = exit_layer, longest, min_confidence
        self.num_rounds = num_rounds

    def plan(self, rows):
        lengths = (self.longest,) * len(rows)
        return Plan(self.exit_layer, lengths, self.min_confidence, num_rounds=self.num_rounds)


class ShortBlocks(Target):
    """A target whose exact mode on the stand-in has blocks so small that short prompts fill some."""

    @cached_property
    def exact_stack(self):
        return exact_stack(self.stack, rows=8, wide=16, checked=(37, 21, 6))


# ------------------------------------------------------------------------------------------------------------- judges


def generate(model, prompt, max_new_tokens, processors=()):
    """The tokens of transformers' own greedy decoding, one prompt at a time; of shared models they are kept."""
    if not processors and any(model is one for one in SHARED):
        return [*generated_once(model, tuple(prompt), max_new_tokens)]
    return generate_now(model, prompt, max_new_tokens, processors)


@cache
def generated_once(model, prompt, max_new_tokens):
    return tuple(generate_now(model, prompt, max_new_tokens))


@torch.inference_mode()
def generate_now(model, prompt, max_new_tokens, processors=()):
    out = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        do_sample=False,
        max_new_tokens=max_new_tokens,
        logits_processor=LogitsProcessorList(processors),
        return_dict_in_generate=True,
        output_scores=True,
    )
    refuse_ties(torch.cat(out.scores))
    return out.sequences[0, len(prompt) :].tolist()


def refuse_ties(scores):
    """A choice that rounding could turn proves nothing: another example, please."""
    best = scores.topk(2).values
    spread = scores.masked_fill(scores < -1e3, 0).std()  # without what a mask forbids
    if float((best[:, 0] - best[:, 1]).min() / spread) > NEAR_TIE:
        return
    if hypothesis.currently_in_test_context():
        hypothesis.reject()
    pytest.fail(
        "two logits are nearly tied, so rounding could change the expected tokens; choose another prompt or seed"
    )


@torch.inference_mode()
def whole_cache(model, content):
    """Keys and values `[length, kv_heads, head_dim]` of every layer, from one plain forward of the model."""
    cache = DynamicCache()
    model(input_ids=torch.tensor([content]), past_key_values=cache, use_cache=True)
    return [(layer.keys[0].transpose(0, 1), layer.values[0].transpose(0, 1)) for layer in cache.layers]


# ------------------------------------------------------------------------------------------------------------- audits


def audit_cache(engine, model):
    """Every row's keys and values, in every layer, are those of a plain forward over its content but the last token."""
    for row in engine.rows:
        if row.num_cached == 0:
            continue
        is_ready = len(row.content) > row.num_prompt_tokens
        assert row.num_cached == len(row.content) - 1 if is_ready else row.num_cached < len(row.content)
        expected = whole_cache(model, row.content[: row.num_cached])
        assert len(expected) == engine.stack.num_layers
        for layer, (keys, values) in enumerate(expected):
            got_keys, got_values = engine.cache.read(layer, row.pages, row.num_cached)
            torch.testing.assert_close(got_keys, keys, rtol=1e-3, atol=1e-4, msg=_where("keys", row, layer))
            torch.testing.assert_close(got_values, values, rtol=1e-3, atol=1e-4, msg=_where("values", row, layer))


def _where(what, row, layer):
    return lambda text: f"{what} of row {row.request_id} in layer {layer}: {text}"


def audit_pages(engine):
    """Every page is free or owned by one running row, and no row runs that has ended."""
    owned = [page for row in engine.rows for page in row.pages]
    assert len({*owned}) == len(owned) == engine.cache.num_pages - engine.cache.num_free_pages
    assert {*owned} <= {*range(engine.cache.num_pages)}
    assert all(row.finish_reason is None for row in engine.rows)
    assert len(engine.rows) <= engine.max_batch_size
    for row in engine.rows:
        assert len(row.pages) == engine.cache.pages_for(row.num_prompt_tokens + row.stopper.max_new_tokens - 1)


class Outcome(NamedTuple):
    completions: dict  # request id -> Completion
    rounds: list


def drain(engine, audit=None, before=(), most_steps=2000):
    """Step until nothing is left to do, with an audit after every step; `before` are the rounds there were already."""
    rounds = list(before)
    while engine.has_work:
        assert len(rounds) < most_steps, "the engine makes no progress"
        rounds += engine.step()
        audit_pages(engine)
        if audit is not None:
            audit(engine)
    assert engine.cache.num_free_pages == engine.cache.num_pages
    done = [row.completion for round_ in rounds for row in round_.rows if row.completion is not None]
    completions = {completion.request_id: completion for completion in done}
    assert len(done) == len(completions), "a request ended twice"
    check_rounds(rounds, completions)
    return Outcome(completions, rounds)


def check_rounds(rounds, completions):
    """Statistics, tokens and text of every completion are what its rounds add up to, counted here once more."""
    for request_id, completion in completions.items():
        steps = [row for round_ in rounds for row in round_.rows if row.request_id == request_id]
        assert [token for row in steps for token in row.tokens] == completion.tokens
        assert "".join(row.text for row in steps) == completion.text
        assert [row.completion is None for row in steps] == [True] * (len(steps) - 1) + [False]
        histogram = {}
        for row in steps:
            assert row.num_accepted == _common(row.drafted, row.tokens)
            assert len(row.tokens) - row.num_accepted in ((0, 1) if row.completion else (1,))
            if row.drafted:
                histogram.setdefault(len(row.drafted), []).append(row.num_accepted)
        stats = completion.stats
        counted = {d: sorted(counts.elements()) for d, counts in stats.acceptance_histogram_by_draft_length.items()}
        assert counted == {d: sorted(accepted) for d, accepted in histogram.items()}
        assert stats.num_plain_steps == sum(bool(row.tokens) and not row.drafted for row in steps)
        assert stats.num_generated_tokens == len(completion.tokens)
        check_stats(stats)


def check_stats(stats):
    """The identities between the figures."""
    histogram, steps = stats.acceptance_histogram, stats.num_spec_steps
    assert sum(histogram.values()) == steps
    assert sum(a * n for a, n in histogram.items()) == stats.num_accepted_draft_tokens <= stats.num_draft_tokens
    assert stats.mean_acceptance_length == pytest.approx(1 + stats.num_accepted_draft_tokens / steps if steps else 1)
    rates = stats.acceptance_by_position()
    drafts = stats.acceptance_histogram_by_draft_length.items()
    assert len(rates) == max((min(d, a + 1) for d, counts in drafts for a in counts), default=0)
    assert all(0 <= joint <= conditional <= 1 for joint, conditional in rates)
    if len(stats.acceptance_histogram_by_draft_length) == 1:  # one draft length: joint is the running product
        for (before, _), (joint, conditional) in pairwise([(1.0, 1.0), *rates]):
            assert joint == pytest.approx(before * conditional)


def _common(drafted, tokens):
    return next(
        (i for i, (a, b) in enumerate(zip(drafted, tokens, strict=False)) if a != b), min(len(drafted), len(tokens))
    )


def decode(target, prompts, policy, audit=None, engine=None, **options):
    """Completions in the order of the prompts, through an engine of its own, audited after every step.

    Args:
        engine: the engine's options, such as page_size.
        options: those of a request; a list holds one per prompt.
    """
    settings = {"max_batch_size": 8, "max_cached_tokens": 1024, **(engine or {})}
    made = Engine(target, policy=policy, **settings)
    ids = []
    for i, prompt in enumerate(prompts):
        own = {name: value[i] if isinstance(value, list) else value for name, value in options.items()}
        ids.append(made.submit(prompt, **own))
    completions, _ = drain(made, audit)
    assert sorted(completions) == ids
    return [completions[i] for i in ids]
