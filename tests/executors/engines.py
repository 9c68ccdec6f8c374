"""Engines whose plans are run by one executor, the requests that they are tried with, and plans of every kind."""

from __future__ import annotations

import random
from contextlib import contextmanager
from dataclasses import replace
from functools import cache

import pytest

from selfspec.control.plan import (
    LOOKUP,
    NUM_BINS,
    NUM_LOOKUP_BINS,
    LookupTable,
    Plan,
    Policy,
    SecondChoices,
    SurvivalStop,
    always,
)
from selfspec.decoding import engine as engine_module
from selfspec.decoding.engine import Engine
from selfspec.decoding.request import Request
from selfspec.drafting.datastore import Datastore
from selfspec.drafting.datastore_build import build as build_datastore
from selfspec.executors.pick import Sampling
from selfspec.executors.select import executors_for
from tests.cuda.standin import with_runner
from tests.helpers import Adversary, Always, drain, make_prompts
from tests.models import build
from tests.target import Target
from tests.tokenizers import byte_tokenizer

# The eager one on views and on the compiled body, the compiled one, and recordings of views and of fused layers.
EXECUTORS = ("views", "eager", "cpu", "cuda", "fused")
RECORDED = ("cuda", "fused")
BYTES = {"vocab_size": 257, "eos_token_id": 256, "pad_token_id": 256}
WAYS = ({}, {"temperature": 0.9, "top_p": 0.9}, {"temperature": 1.1}, {"temperature": 1.0, "top_k": 20})
PENALTIES = (
    {"repetition_penalty": 1.3},
    {"presence_penalty": 1.1, "frequency_penalty": 0.4},
    {"repetition_penalty": 0.8, "no_repeat_ngram_size": 2},
    {"frequency_penalty": -0.6, "no_repeat_ngram_size": 3},
    {"no_repeat_ngram_size": 1},
)
PAGE = 16
LENGTHS = (9, 1, 20, 4, 13, 2, 7, 30)
NUM_REQUESTS = 2 * len(LENGTHS)  # the second half has penalties


@cache
def target(kind):
    """A model of bytes, whose output may be ended by any text; shared, so nothing may change it."""
    model, tokenizer = build("llama", **BYTES), byte_tokenizer()
    if kind in RECORDED:
        return recorded(kind, Target(model, tokenizer, engine="views"))
    return Target(model, tokenizer, engine="views" if kind == "views" else "compiled")


def recorded(kind, made):
    """The same target, run from recordings."""
    return with_runner(made, packing="copy" if kind == "fused" else None)


@contextmanager
def only_eager():
    """Engines that are made meanwhile have the eager executor alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_module, "executors_for", lambda *given: executors_for(*given)[-1:])
        yield


def engine_of(kind, made=None, **options):
    """An engine whose plans that executor runs, where it serves them."""
    settings = {"max_batch_size": 4, "max_cached_tokens": 512, "page_size": PAGE, "burst": 60.0, **options}
    made = target(kind) if made is None else made
    if kind in ("cpu", *RECORDED):
        return Engine(made, **settings)
    with only_eager():
        return Engine(made, **settings)


@cache
def plain(kind, at):
    """A request and what plain decoding makes of it: prompts that repeat themselves, ends and penalties of any kind."""
    penalties = PENALTIES[at % len(PENALTIES)] if at >= len(LENGTHS) else {}
    at %= len(LENGTHS)
    [prompt] = make_prompts([LENGTHS[at]], seed=at)
    sampling = Sampling(seed=at, **WAYS[at // 2 % 4], **penalties)
    request = Request(prompt * 2 if at % 3 == 0 else prompt, 12 + 5 * at, sampling, eos=frozenset())
    assert (len(request.prompt) + request.max_new_tokens - 1) % PAGE, "a fault may fill a place more than it has"
    free, middle = alone(kind, request), 6 + 3 * at
    if at % 4 == 1:  # ends with a text that appears in the midst of it
        request = replace(request, stop=(free.text[len(free.text) // 2 :][:2],))
    elif at % 4 == 2:
        most = len(request.prompt) + middle
        request = replace(request, stopping_criteria=(lambda ids, scores: ids.shape[1] >= most,))
    elif at % 4 == 3:
        request = replace(request, eos=frozenset(free.tokens[middle : middle + 1]))
    return request, alone(kind, request)


def alone(kind, request):
    engine = engine_of("views" if kind == "views" else "eager", target(kind), policy="plain")
    engine.submit(request)
    return drain(engine).completions[0]


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """Documents that hold much of what is decoded, and more."""
    path, dice = tmp_path_factory.mktemp("corpus") / "corpus.store", random.Random(0)
    texts = [[*request.prompt, *done.tokens] for request, done in (plain("views", at) for at in range(len(LENGTHS)))]
    noise = [[dice.randrange(257) for _ in range(30)] for _ in range(9)]
    build_datastore(path, [text[i : i + 12] for text in texts for i in range(0, len(text), 9)] + noise, "", 257)
    return Datastore.open(path)


class Programs(Adversary):
    """Programs of every kind, few of which ask for what the eager executor alone has."""

    def __init__(self, seed, num_layers=4, bits=(None, 4), **options):
        super().__init__(seed, num_layers, **options)
        self.bits = bits

    def plan(self, rows):
        plan, dice = super().plan(rows), self.dice
        right = tuple(dice.random() for _ in range(NUM_BINS))
        rule = SecondChoices(right, right[::-1], dice.choice([-1, 0.05]), dice.choice([1, 3, 9]), dice.choice([0, 0.3]))
        drafts = plan.exit_layer is not None and plan.exit_layer != LOOKUP
        return replace(
            plan,
            draft_lengths=tuple(dice.randint(0, 9) if drafts else 3 for _ in rows),
            keep_divergence=plan.keep_divergence and dice.random() < 0.1,
            shadow=plan.shadow if dice.random() < 0.4 else None,
            stop=dice.choice([None, SurvivalStop(right, dice.random())]),
            second_choices=dice.choice([None, rule]) if drafts else None,
            draft_bits=dice.choice(self.bits) if drafts else None,
            draft_vocab=dice.choice([None, 150]) if drafts else None,
            num_rounds=dice.choice([1, 2, 5, 40]),
        )


class Noted(Always):
    """Keeps what it is told."""

    def __init__(self, *given, **named):
        super().__init__(*given, **named)
        self.seen = []

    def observe(self, plan, rounds):
        self.seen.append((plan, rounds))


class Together(Noted):
    """Drafts by lookup where two rows have a match, else by half of the layers."""

    def __init__(self):
        super().__init__(2, 3, num_rounds=20)

    def plan(self, rows):
        bins = NUM_LOOKUP_BINS
        table = LookupTable(((4,) * bins,) * len(rows), ((1.0,) * bins,) * len(rows), (1.5,))
        return replace(super().plan(rows), lookups=table)


class Both(Policy):
    """Half of the layers draft where lookup finds nothing, in programs of so many rounds."""

    def __init__(self, num_rounds):
        self.num_rounds = num_rounds

    def plan(self, rows):
        lengths = (3,) * len(rows)
        return Plan(2, lengths, keep_confidence=True, lookups=always(lengths), num_rounds=self.num_rounds)


def programs(rounds):
    """Rounds by program, without those that decoded nothing."""
    made = []
    for round_ in rounds:
        if round_.plan is None:
            continue
        if round_.program_index == 0:
            made.append([])
        assert round_.program_index == len(made[-1])
        made[-1].append(round_)
    return made
