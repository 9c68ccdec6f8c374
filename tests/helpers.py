"""What tests decode with and check by: random policies, transformers' generate as judge, runs of engines, audits."""

from __future__ import annotations

import random
from collections.abc import Callable
from collections.abc import Sequence as Several
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any, Self

import hypothesis
import pytest
import torch
from transformers import DynamicCache, LogitsProcessorList

from selfspec.control.plan import (
    NUM_BINS,
    NUM_LOOKUP_BINS,
    LookupTable,
    Policy,
    ShadowPlan,
    SurvivalStop,
)
from selfspec.core import LOOKUP, Plan, Request, RoundOutput, RowRound, Sequence
from selfspec.decoding.engine import LLMEngine
from selfspec.decoding.outputs import CompletionOutput
from selfspec.loading.target import Target
from selfspec.params import SamplingParams, SpeculativeConfig
from tests.models import SHARED

NEAR_TIE = 2e-5  # in standard deviations of the logits, about ten times what rounding moves them
Audit = Callable[[LLMEngine], Any]


def make_prompts(lengths: Several[int], seed: int = 0, vocab: int = 96) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, vocab) for _ in range(n)] for n in lengths]


# ----------------------------------------------------------------------------------------------------------- policies


class Seen(Policy):
    """Keeps what it observes."""

    def __init__(self) -> None:
        self.seen: list[tuple[Plan, list[RoundOutput]]] = []

    def observe(self, plan: Plan, rounds: list[RoundOutput]) -> None:
        self.seen.append((plan, rounds))

    @property
    def rows(self) -> list[RowRound]:
        """Every row of every observed round."""
        return [row for _, rounds in self.seen for round_ in rounds for row in round_.rows]


class Always(Seen):
    """A policy of one plan."""

    def __init__(
        self, exit_layer: int | None, longest: int, min_confidence: float = 0.0, num_rounds: int = 1, **more: Any
    ) -> None:
        super().__init__()
        self.longest, self.made = longest, Plan(exit_layer, (), min_confidence, num_rounds=num_rounds, **more)

    def plan(self, rows: list[Sequence]) -> Plan:
        return replace(self.made, draft_lengths=(self.longest,) * len(rows))


class Schedule(Seen):
    """Random plans: any exit layer or lookup, any length per row, any stop rule, anew every round."""

    def __init__(
        self,
        seed: int,
        num_layers: int,
        longest: int = 6,
        plain: bool = True,
        confidences: tuple[float, ...] = (0.0, 0.0, 0.2, 0.6, 1.0),
        lookup: bool = True,
    ) -> None:
        super().__init__()
        self.random = random.Random(seed)
        self.exits = [*([None] if plain else []), *([LOOKUP] if lookup else []), *range(1, num_layers)]
        self.longest, self.confidences = longest, confidences

    def plan(self, rows: list[Sequence]) -> Plan:
        exit_layer = self.random.choice(self.exits)
        lengths = [0 if exit_layer is None else self.random.randint(0, self.longest) for _ in rows]
        return Plan(exit_layer, tuple(lengths), self.random.choice(self.confidences))


class Adversary(Schedule):
    """Random plans that use every field of a plan, probes of prompts too, and checks of what is observed.

    Args:
        most_rounds: of a plan.
        eager: how often a plan asks for what the eager executor alone has: divergences.
        simple: how often a plan asks for none of stop rules, probes and the above.
    """

    def __init__(
        self,
        seed: int,
        num_layers: int,
        most_rounds: int = 6,
        eager: float = 0.5,
        copies: bool = True,
        simple: float = 0.0,
        **options: Any,
    ) -> None:
        super().__init__(seed, num_layers, **options)
        self.dice, self.layers = random.Random(seed), range(1, num_layers)
        self.forced_dice, self.simple_dice = random.Random(seed), random.Random(seed)
        self.most_rounds, self.eager, self.copies, self.simple = most_rounds, eager, copies, simple
        self.seeds: list[tuple[Sequence, Any]] = []  # (sequence, shadow picks) of every probe of a prompt
        self.shadows: list[tuple[RowRound, int, bool]] = []  # with shadow picks, from which position, whether exact
        self.planned: list[Sequence] = []

    def seed_layers(self, row: Sequence) -> tuple[int, ...]:
        return self.some(self.layers, 0)

    def seed(self, row: Sequence, shadow: Any) -> None:
        self.seeds.append((row, shadow))

    def some(self, things: Several[int], least: int) -> tuple[int, ...]:
        return tuple(sorted(self.dice.sample(things, self.dice.randint(least, len(things)))))

    def plan(self, rows: list[Sequence]) -> Plan:
        self.planned, plan, dice = rows, super().plan(rows), self.dice
        drafts = bool(plan.exit_layer)
        rates = tuple(dice.random() for _ in range(NUM_BINS))
        layers = self.some([layer for layer in self.layers if layer != plan.exit_layer], 1)
        shadow = ShadowPlan(layers, self.some(range(len(rows)), 0), dice.randint(1, 8), dice.random() < 0.5)
        made = replace(
            plan,
            stop=dice.choice([None, SurvivalStop(rates, dice.random(), dice.choice([0, 0.3, 0.7]))]),
            keep_confidence=dice.random() < 0.5,
            keep_divergence=dice.random() < self.eager,
            shadow=shadow if dice.random() < 0.5 else None,
            draft_vocab=dice.choice([None, 50]) if drafts else None,
            draft_bits=dice.choice([None, 4]) if drafts and self.copies else None,
            lookups=dice.choice([None, self.some_lookups(rows)]) if plan.exit_layer != LOOKUP else None,
            num_rounds=dice.randint(1, self.most_rounds),
            most_forced=self.forced_dice.choice([0, 3, 40]),
        )
        if self.simple_dice.random() >= self.simple:
            return made
        return replace(made, min_confidence=0.0, stop=None, shadow=None, keep_divergence=False)

    def some_lookups(self, rows: list[Sequence]) -> LookupTable:
        """A table that drafts little or much after any match, or nothing as long as that promises too little."""
        dice = self.dice
        lengths = tuple(tuple(dice.randint(-1, 6) for _ in range(NUM_LOOKUP_BINS)) for _ in rows)
        gains = tuple(tuple(max(0.0, n * dice.random()) for n in of_row) for of_row in lengths)
        return LookupTable(lengths, gains, tuple(dice.choice([-1.0, 0.5, 9.0]) for _ in range(dice.randint(1, 5))))

    def observe(self, plan: Plan, rounds: list[RoundOutput]) -> None:
        super().observe(plan, rounds)
        assert 1 <= len(rounds) <= plan.num_rounds
        rows = [row.seq_id for row in self.planned]
        if rounds[0].round_index == 0:  # one in which a grammar forced tokens is left out
            assert [row.seq_id for row in rounds[0].rows] == rows
        for at, round_ in enumerate(rounds):
            assert round_.exit_layer in (None, LOOKUP, plan.exit_layer)
            is_probed = any(row.shadow is not None for row in round_.rows)
            assert at == len(rounds) - 1 or not is_probed  # a plan ends with the round that probes
            for row in round_.rows:
                self.check(plan, round_.exit_layer, rows.index(row.seq_id), row)

    def check(self, plan: Plan, exit_layer: int | None, i: int, row: RowRound) -> None:
        if exit_layer != LOOKUP:
            assert row.num_drafted <= plan.draft_lengths[i] and not row.match_length
        elif plan.lookups is not None and plan.exit_layer != LOOKUP:
            assert row.num_drafted <= max(0, *plan.lookups.lengths[i])
        reads = plan.reads_confidence and exit_layer
        is_withdrawn = row.withdrawn is not None
        assert len(row.confidences) == (row.num_drafted + is_withdrawn if reads else 0)
        assert not is_withdrawn or (reads and plan.stop is not None and plan.stop.keep > 0)
        assert all(0 < confidence <= 1 for confidence in row.confidences)
        keeps = plan.keep_divergence and exit_layer
        least = row.num_judged if keeps else 0  # more where an end cut the tokens
        assert least <= len(row.divergences) <= (row.num_drafted if keeps else 0)
        assert all(divergence > -1e-3 for divergence in row.divergences)
        assert bool(row.match_length) >= (exit_layer == LOOKUP and row.num_drafted > 0)
        if row.shadow is not None:
            assert plan.shadow is not None
            columns = {len(line) for line in (*row.shadow.hits, *row.shadow.confidences)}
            assert row.shadow.layers == plan.shadow.layers and i in plan.shadow.rows
            assert len(columns) == 1 and max(columns) <= plan.shadow.max_columns
            assert min(columns) >= min(row.num_accepted + 1, plan.shadow.max_columns)
            self.shadows.append((row, row.sequence.num_tokens - len(row.token_ids), plan.shadow.exact))


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
def whole_caches(model, several):
    """Keys and values `[2, layers, length, kv_heads, head_dim]` of rows of token ids, from one forward of the model.

    Shorter rows are padded at their end, which no token before it sees.
    """
    cache, longest = DynamicCache(), max(map(len, several), default=0)
    if longest == 0:
        return []
    model(input_ids=torch.tensor([row + [0] * (longest - len(row)) for row in several]), past_key_values=cache)
    pair = torch.stack([torch.stack([one.keys, one.values]) for one in cache.layers], 1).transpose(3, 4)
    return [pair[:, :, at, : len(row)] for at, row in enumerate(several)]


# ------------------------------------------------------------------------------------------------------------- audits


def audit_cache(engine: LLMEngine) -> None:
    """Every row's keys and values, in every layer, are those of a plain forward over its tokens but the last one."""
    rows = [row for row in engine.running if row.num_cached]
    for row in rows:
        is_ready = row.num_tokens > row.num_prompt_tokens
        assert row.num_cached == row.num_tokens - 1 if is_ready else row.num_cached < row.num_tokens
    expected = whole_caches(engine.split.model, [row.token_ids[: row.num_cached] for row in rows])
    for row, wanted in zip(rows, expected, strict=True):
        layers = [engine.cache.read(layer, row.pages, row.num_cached) for layer in range(engine.split.num_layers)]
        for name, got, own in zip(("keys", "values"), map(torch.stack, zip(*layers, strict=True)), wanted, strict=True):
            torch.testing.assert_close(got, own, rtol=1e-3, atol=1e-4, msg=_where(name, row))


def _where(what: str, row: Sequence) -> Callable[[str], str]:
    return lambda text: f"{what} of row {row.request_id}, by layer first: {text}"


def audit_pages(engine: LLMEngine) -> None:
    """No row runs that has ended; without a prefix cache every page is free or owned by one running row."""
    assert not any(row.is_finished for row in engine.running) and engine.num_running <= engine.max_num_seqs
    if engine.prefix is not None:
        return
    owned = [page for row in engine.running for page in row.pages]
    assert len({*owned}) == len(owned) == engine.cache.num_pages - engine.cache.num_free_pages
    assert {*owned} <= {*range(engine.cache.num_pages)}
    for row in engine.running:
        assert len(row.pages) == engine.cache.pages_for(row.max_length - 1)


# ------------------------------------------------------------------------------------------------------------- engines


def engine_of(
    target: Target,
    policy: Policy | SpeculativeConfig | str = "plain",
    *,
    max_num_seqs: int = 8,
    max_num_cached_tokens: int = 1024,
    **options: Any,
) -> LLMEngine:
    """An engine of an opened model, as `LLM.engine` makes it, with all options of `LLMEngine`.

    Args:
        policy: default: plain decoding.
    """
    config = policy if isinstance(policy, SpeculativeConfig) else SpeculativeConfig(policy=policy)
    made = target.policy(config, max_num_seqs)
    sizes = {"max_num_seqs": max_num_seqs, "max_num_cached_tokens": max_num_cached_tokens}
    return LLMEngine(target.refresh(), made, target.defaults, **sizes, **options)


class Run:
    """Steps an engine and keeps what came of its requests, each of one output. Pages are audited after every step."""

    def __init__(self, engine: LLMEngine, audit: Audit | None = None) -> None:
        self.engine, self.audit = engine, audit
        self.rounds: list[RoundOutput] = []
        self._rows: dict[str, list[RowRound]] = {}
        self.sequences: dict[str, Sequence] = {}  # that have ended, by request id
        self._parts: dict[str, list[CompletionOutput]] = {}
        self._num_added = self._num_seen = 0

    def add(self, prompt: Any, params: SamplingParams | None = None) -> str:
        """The id of a new request: "0", "1", ..."""
        request_id, self._num_added = str(self._num_added), self._num_added + 1
        self.engine.add_request(request_id, prompt, params)
        return request_id

    def step(self) -> list[RoundOutput]:
        for output in self.engine.step(self.rounds.append):
            self._parts.setdefault(output.request_id, []).extend(output.outputs)
        new, self._num_seen = self.rounds[self._num_seen :], len(self.rounds)
        for row in (row for round_ in new for row in round_.rows):
            self._rows.setdefault(request_id := row.sequence.request_id, []).append(row)
            if row.finish_reason is not None:
                assert request_id not in self.sequences, "a request ended twice"
                self.sequences[request_id] = row.sequence
        audit_pages(self.engine)
        if self.audit is not None:
            self.audit(self.engine)
        return new

    def finish(self, most_steps: int = 2000, check: bool = True) -> Self:
        """Step until nothing is left to do, and check what came of every request against its rounds.

        Args:
            check: False for rows that an interrupt or error ended in the midst of a round.
        """
        for _ in range(most_steps):
            if not self.engine.has_unfinished_requests():
                break
            self.step()
        assert not self.engine.has_unfinished_requests(), "the engine makes no progress"
        assert self.engine.num_pages_in_use == 0 and not self.engine.running
        for request_id in self.sequences if check else ():
            check_rounds(self, request_id)
        return self

    def output(self, request_id: str) -> CompletionOutput:
        """The whole output of a request that has ended."""
        parts = self._parts[request_id]
        scored = parts[-1].logprobs is not None
        return replace(
            parts[-1],
            text="".join(part.text for part in parts),
            token_ids=[token for part in parts for token in part.token_ids],
            logprobs=[row for part in parts for row in part.logprobs or ()] if scored else None,
            cumulative_logprob=sum(part.cumulative_logprob or 0.0 for part in parts) if scored else None,
        )

    @property
    def outputs(self) -> list[CompletionOutput]:
        """Of the requests that have ended, in the order in which they were added."""
        return [self.output(str(at)) for at in range(self._num_added) if str(at) in self.sequences]

    def rows(self, request_id: str) -> list[RowRound]:
        """What a request got, round by round."""
        return self._rows.get(request_id, [])


def decode(
    target: Target,
    prompts: Several[Any],
    policy: Policy | SpeculativeConfig | str = "plain",
    params: SamplingParams | list[SamplingParams] | None = None,
    *,
    audit: Audit | None = None,
    **options: Any,
) -> list[CompletionOutput]:
    """Outputs in the order of the prompts, through an engine of their own; see `run`."""
    return run(target, prompts, policy, params, audit=audit, **options).outputs


def run(
    target: Target,
    prompts: Several[Any],
    policy: Policy | SpeculativeConfig | str = "plain",
    params: SamplingParams | list[SamplingParams] | None = None,
    *,
    audit: Audit | None = None,
    **options: Any,
) -> Run:
    """A finished run of requests that come together.

    Args:
        prompts: token ids, texts, or `Request`s, which have their parameters.
        params: of all prompts, or one for each.
        options: of `engine_of`.
    """
    made = Run(engine_of(target, policy, **options), audit)
    several = params if isinstance(params, list) else [params] * len(prompts)
    for prompt, own in zip(prompts, several, strict=True):
        made.add(prompt, own)
    return made.finish()


def tokens_of(outputs: Several[CompletionOutput]) -> list[list[int]]:
    return [output.token_ids for output in outputs]


def request(prompt: Several[int], params: SamplingParams | None = None, **more: Any) -> Request:
    """A complete request without end-of-text tokens: nothing of the model's generation config applies."""
    return Request(list(prompt), params or SamplingParams(), **more)


# ---------------------------------------------------------------------------------------------------------- statistics


def check_rounds(made: Run, request_id: str) -> None:
    """Statistics, tokens and text of an output are what its rounds add up to, counted here once more."""
    output, rows = made.output(request_id), made.rows(request_id)
    assert [token for row in rows for token in row.token_ids] == output.token_ids
    assert output.token_ids == made.sequences[request_id].completion_token_ids
    assert "".join(str(row.text) for row in rows) == output.text
    assert [row.finish_reason for row in rows] == [None] * (len(rows) - 1) + [output.finish_reason]
    histogram: dict[int, list[int]] = {}
    for row in rows:
        assert row.num_accepted == _num_common(row.drafted, row.token_ids)
        assert len(row.token_ids) - row.num_accepted in ((0, 1) if row.finish_reason else (1,))
        if row.drafted:
            histogram.setdefault(len(row.drafted), []).append(row.num_accepted)
    stats = output.stats
    counted = {d: sorted(counts.elements()) for d, counts in stats.acceptance_histogram_by_draft_length.items()}
    assert counted == {d: sorted(accepted) for d, accepted in histogram.items()}
    assert stats.num_plain_steps == sum(bool(row.token_ids) and not row.drafted for row in rows)
    assert stats.num_generated_tokens == len(output.token_ids)
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


def _num_common(drafted: list[int], tokens: list[int]) -> int:
    pairs = enumerate(zip(drafted, tokens, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(drafted), len(tokens)))
